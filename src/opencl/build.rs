//! Build script: strips the comments of OpenCL kernels, `kernels/NAME.cl` -> `OUT_DIR/kernels/NAME.cl`.
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]

use std::path::{Path, PathBuf};
use std::{env, fs, io, process};

fn main() {
    println!("cargo:rerun-if-changed=src/opencl/build.rs");
    let folder = |name| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    let (root, out) = (folder("CARGO_MANIFEST_DIR"), folder("OUT_DIR"));
    let made =
        strip_kernels(&root.join("kernels"), &out.join("kernels")).and_then(|()| link_without_libdl(&out));
    if let Err(e) = made {
        println!("cargo::error=kernels/ cannot be copied to {}: {e}", out.display());
        process::exit(0)
    }
}

/// Writes the kernels without comments and with single spaces, which saves a third of the bytes. Lines keep their
/// numbers, because the driver's messages refer to them.
fn strip_kernels(from: &Path, to: &Path) -> io::Result<()> {
    println!("cargo:rerun-if-changed={}", from.display());
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let file = entry?.path();
        let name = file.file_name().expect("a file of a folder");
        if file.is_dir() {
            strip_kernels(&file, &to.join(name))?;
            continue;
        }
        let text = fs::read_to_string(&file)?;
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n";
        let code = |line: &str| words(line.split("//").next().unwrap_or_default());
        fs::write(to.join(name), text.lines().map(code).collect::<String>())?;
    }
    Ok(())
}

/// `libloading` links `-ldl`. musl has these functions in libc and ships an empty libdl.a, which Rust's musl targets
/// lack; this creates one.
fn link_without_libdl(dir: &Path) -> io::Result<()> {
    if env::var("CARGO_CFG_TARGET_ENV").is_ok_and(|e| e == "musl") {
        fs::write(dir.join("libdl.a"), "!<arch>\n")?;
        println!("cargo:rustc-link-search=native={}", dir.display());
    }
    Ok(())
}
