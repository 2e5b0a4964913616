//! The parts of an NDK that linking for Android needs, made here: a library of empty symbols for each library of bionic
//! (phones have the real ones), the object that a program starts in, and an unwinder.

use super::bionic::{LATER, LIBRARIES, Library};
use crate::error::{AtPath, Error, Result};
use crate::targets::{ANDROID, ANDROID_API, target_dir};
use crate::{command, toolchain};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The Rust target that brings LLVM's unwinder, built for the same processor.
pub fn unwinder_target(target: &str) -> String {
    target.replace("-linux-android", "-unknown-linux-musl")
}

/// Makes the stubs unless this compiler has made them from these lists already; returns their folder.
pub fn make_stubs(target: &str, lld: &Path) -> Result<PathBuf> {
    let dir = target_dir().join("android-stubs").join(target);
    let stamp = dir.join("made-of");
    let inputs = describe_inputs(target)?;
    if fs::read_to_string(&stamp).is_ok_and(|text| text == inputs) {
        return Ok(dir);
    }
    fs::create_dir_all(&dir).at(&dir)?;
    if target == ANDROID {
        compile(target, &dir.join("start"), &start_source())?;
    }
    compile(target, &dir.join("names"), &names_source(target))?;
    for library in LIBRARIES {
        let stem = library.name.trim_end_matches(".so");
        let object = compile(target, &dir.join(stem), &library_source(library))?;
        let mut link = Command::new(lld);
        link.args(["-shared", "-soname", library.name, "-o"]).arg(dir.join(library.name)).arg(object);
        command::stdout(&mut link)?;
    }
    // Rust's standard library links liblog without using it.
    fs::write(dir.join("liblog.a"), toolchain::EMPTY_ARCHIVE).at(&dir)?;
    let brought_by = unwinder_target(target);
    let unwinder = toolchain::find_libdir(&brought_by)?.join("self-contained/libunwind.a");
    fs::copy(&unwinder, dir.join("libunwind.a"))
        .map_err(|e| Error::at(&unwinder, format!("{e}; run: rustup target add {brought_by}")))?;
    fs::write(&stamp, &inputs).at(&stamp)?;
    Ok(dir)
}

/// Everything that the stubs depend on: compiler and sources.
fn describe_inputs(target: &str) -> Result<String> {
    let compiler = command::stdout(toolchain::rustc().arg("-vV"))?;
    let libraries = LIBRARIES.iter().map(library_source).collect::<String>();
    let compiler = String::from_utf8_lossy(&compiler);
    Ok(format!("{compiler}{}{}{libraries}", start_source(), names_source(target)))
}

/// Assembles with Rust's compiler, which is always installed.
fn compile(target: &str, stem: &Path, source: &str) -> Result<PathBuf> {
    let (file, object) = (stem.with_extension("rs"), stem.with_extension("o"));
    fs::write(&file, source).at(&file)?;
    let mut rustc = toolchain::rustc();
    rustc.args(["--edition", "2024", "--crate-type", "lib", "--target", target, "--crate-name", "stub"]);
    rustc.args(["--emit", "obj", "-o"]).arg(&object).arg(&file);
    command::stdout(&mut rustc)?;
    Ok(object)
}

fn assembly(text: &str) -> String {
    format!("#![no_std]\ncore::arch::global_asm!(r#\"\n{text}\"#);\n")
}

/// Assembly of a library. All functions are one `ret`: the linker reads only names and kinds.
fn library_source(library: &Library) -> String {
    let later = if library.name == "libc.so" { LATER } else { &[] };
    let mut text = ".text\n".to_string();
    for name in library.functions().chain(later.iter().map(|(name, _)| *name)) {
        text += &format!(".globl {name}\n.type {name}, %function\n{name}:\n");
    }
    text += "ret\n.data\n.balign 8\n";
    for name in library.variables() {
        text += &format!(".globl {name}\n.type {name}, %object\n.size {name}, 8\n{name}: .quad 0\n");
    }
    assembly(&text)
}

/// Assembly of functions that the C library of the unwinder has under other names.
fn names_source(target: &str) -> String {
    let jump = if target == ANDROID { "b" } else { "jmp" };
    let names = [("__errno_location", "__errno"), ("__assert_fail", "abort")];
    let function = |(name, bionic): (&str, &str)| {
        format!(".globl {name}\n.hidden {name}\n.type {name}, %function\n{name}: {jump} {bionic}\n")
    };
    assembly(&names.map(function).concat())
}

/// Assembly of the start of a program.
fn start_source() -> String {
    assembly(&include_str!("start.s").replace("{API}", &ANDROID_API.to_string()))
}
