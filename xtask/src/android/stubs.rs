//! The parts of an NDK that a link for Android needs, made here: a library of empty symbols in place of each of bionic's
//! (the real ones are on every phone), the object a program starts in, and an unwinder.

use super::bionic::{LATER, LIBRARIES, Library};
use crate::error::{Error, Result};
use crate::targets::{ANDROID, ANDROID_API, ARM_LINUX, target_dir};
use crate::{command, toolchain};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The unwinder is LLVM's, out of the Rust target that brings it built for the same processor.
pub const UNWINDER_TARGET: &str = ARM_LINUX;

/// Makes what is not there yet, or was made by another compiler or from other lists, and returns its folder.
pub fn make(lld: &Path) -> Result<PathBuf> {
    let dir = target_dir().join("android-stubs");
    let stamp = dir.join("made-of");
    let inputs = describe_inputs()?;
    if fs::read_to_string(&stamp).is_ok_and(|text| text == inputs) {
        return Ok(dir);
    }
    fs::create_dir_all(&dir).map_err(|e| Error::at(&dir, e))?;
    compile(&dir, "start", &start_source())?;
    for library in LIBRARIES {
        let stem = library.name.trim_end_matches(".so");
        let object = compile(&dir, stem, &library_source(library))?;
        let mut link = Command::new(lld);
        link.args(["-shared", "-soname", library.name, "-o"]).arg(dir.join(library.name)).arg(object);
        command::stdout(&mut link)?;
    }
    // Rust's standard library names liblog without using it.
    write(&dir.join("liblog.a"), toolchain::EMPTY_ARCHIVE)?;
    let unwinder = toolchain::libdir(UNWINDER_TARGET)?.join("self-contained/libunwind.a");
    fs::copy(&unwinder, dir.join("libunwind.a"))
        .map_err(|e| Error::at(&unwinder, format!("{e}; rustup target add {UNWINDER_TARGET} brings it")))?;
    write(&stamp, &inputs)?;
    Ok(dir)
}

/// Everything that the files depend on.
fn describe_inputs() -> Result<String> {
    let compiler = command::stdout(toolchain::rustc().arg("-vV"))?;
    let libraries = LIBRARIES.iter().map(library_source).collect::<String>();
    Ok(format!("{}{}{libraries}", String::from_utf8_lossy(&compiler), start_source()))
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|e| Error::at(path, e))
}

/// Rust's compiler is the assembler that is always there.
fn compile(dir: &Path, name: &str, source: &str) -> Result<PathBuf> {
    let (file, object) = (dir.join(name).with_extension("rs"), dir.join(name).with_extension("o"));
    write(&file, source)?;
    let mut rustc = toolchain::rustc();
    rustc.args(["--edition", "2024", "--crate-type", "lib", "--target", ANDROID, "--crate-name", "stub"]);
    rustc.args(["--emit", "obj", "-o"]).arg(&object).arg(&file);
    command::stdout(&mut rustc)?;
    Ok(object)
}

fn assembly(text: &str) -> String {
    format!("#![no_std]\ncore::arch::global_asm!(r#\"\n{text}\"#);\n")
}

/// Every function is the same `ret`: the linker only looks at names and kinds.
fn library_source(library: &Library) -> String {
    let later = if library.name == "libc.so" { LATER } else { &[] };
    let mut text = ".text\n".to_string();
    for name in library.functions().chain(later.iter().map(|(name, _)| *name)) {
        text += &format!(".globl {name}\n.type {name}, %function\n{name}:\n");
    }
    text += "ret\n.data\n.balign 8\n";
    for name in library.variables() {
        text += &format!(".globl {name}\n.type {name}, %object\n.size {name}, 8\n{name}: .xword 0\n");
    }
    assembly(&text)
}

/// The beginning of a program.
fn start_source() -> String {
    assembly(&include_str!("start.s").replace("{API}", &ANDROID_API.to_string()))
}
