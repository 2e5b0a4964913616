//! Builds for Android: with an NDK if there is one, otherwise against stubs made here.

pub mod bionic;
mod ndk;
mod stubs;

use crate::error::{Error, Result};
use crate::targets::{ANDROID, ANDROID_API, ANDROID_LOADER, ANDROID_PAGE, Product};
use crate::toolchain;
use std::process::Command;

/// Flags of LLVM's linker that make the program a tenth smaller: identical functions are merged, and relocations packed
/// in a format that bionic supports from API level 23 on.
const SMALLER: &[&str] = &["--icf=all", "--pack-dyn-relocs=android"];

/// The use of an NDK by a build.
#[derive(Clone, Copy, PartialEq)]
pub enum NdkUse {
    IfFound,
    Never,
}

/// Prepares a cargo command to build for Android; returns a line on how it links.
pub fn prepare_build(cargo: &mut Command, target: &str, (ndk, product): (NdkUse, Product)) -> Result<String> {
    let found = match ndk {
        NdkUse::IfFound => ndk::find_ndk(target, |name| std::env::var_os(name))?,
        NdkUse::Never => None,
    };
    let page = format!("-Clink-arg=max-page-size={ANDROID_PAGE}");
    let mut flags = vec!["-Clink-arg=-z".to_string(), page];
    // A compiler passes the linker's flags on.
    let through = if found.is_some() { "-Wl," } else { "" };
    flags.extend(SMALLER.iter().map(|flag| format!("-Clink-arg={through}{flag}")));
    if let Some(ndk) = found {
        toolchain::link_with(cargo, target, &ndk.clang, &flags);
        return Ok(format!("NDK {} in {}, API level {}", ndk.version, ndk.dir.display(), ndk.api));
    }
    if product == Product::Program && target != ANDROID {
        return Err(Error::Failed(format!(
            "a program for {target} needs an NDK; without one there are only libraries, by --lib or --aar"
        )));
    }
    toolchain::ensure_std(&stubs::unwinder_target(target))?;
    let lld = toolchain::find_lld()?;
    let dir = stubs::make_stubs(target, &lld)?;
    flags.push("-Clinker-flavor=ld".into());
    flags.push(format!("-Lnative={}", dir.display()));
    flags.push(format!("-Clink-arg={}", dir.join("names.o").display()));
    if product == Product::Program {
        flags.push(format!("-Clink-arg={}", dir.join("start.o").display()));
        flags.push(format!("-Clink-arg=--dynamic-linker={ANDROID_LOADER}"));
    }
    toolchain::link_with(cargo, target, &lld, &flags);
    let why =
        if ndk == NdkUse::Never { "NDK not used" } else { "no NDK found (ANDROID_NDK_HOME, ANDROID_HOME)" };
    Ok(format!(
        "{why}: linked by {} against stubs of the symbols in xtask/src/android/bionic, API level {ANDROID_API}; it runs on \
         phones, but use an NDK for releases",
        lld.display()
    ))
}

/// The first thing missing on this machine for a build without an NDK, and the command that installs it.
pub fn find_missing(target: &str) -> Option<(String, String)> {
    let unwinder = stubs::unwinder_target(target);
    if let Some(target) = [target, &unwinder].into_iter().find(|t| !toolchain::has_std(t)) {
        let library = format!("Rust's standard library for {target}");
        return Some((library, format!("rustup target add {target}")));
    }
    toolchain::find_lld().err().map(|_| ("LLVM's linker".into(), toolchain::LLD_REMEDY.into()))
}
