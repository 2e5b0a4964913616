//! An Android archive: the library for each processor, the class in `xtask/android`, and the model as an asset.

use super::library::{SHARED, release_library};
use super::model_name;
use super::zip::Zip;
use crate::android::NdkUse;
use crate::command;
use crate::elf::{Elf, find_library_problems};
use crate::error::{AtPath, Error, Result};
use crate::targets::{ANDROID, ANDROID_API, ANDROID_X86};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of a library in an archive, and its target.
type Machine = (&'static str, &'static str);
/// Phones, and the emulator on a PC.
pub const MACHINES: [Machine; 2] = [("arm64-v8a", ANDROID), ("x86_64", ANDROID_X86)];
/// The sources of the classes.
const SOURCES: &str = "xtask/android";
/// Rules that keep what the library calls by name.
const RULES: &str = "\
-keepclasseswithmembernames class org.antigravity.Model { native <methods>; }
-keep class org.antigravity.Model$Call { int accept(int, byte[]); }
-dontwarn androidx.annotation.**
";

/// Builds the libraries of a model's archive, and returns them with their folders.
pub fn build_libraries(model: &Path, ndk: NdkUse) -> Result<Vec<(Machine, PathBuf)>> {
    let build = |machine: Machine| Ok((machine, release_library(model, machine.1, ndk)?.join(SHARED)));
    MACHINES.into_iter().map(build).collect()
}

/// Writes the archive of built libraries into `out`.
pub fn pack_aar(
    model: &Path,
    libraries: &[(Machine, PathBuf)],
    asset: Option<&Path>,
    out: &Path,
) -> Result<PathBuf> {
    let mut zip = Zip::default();
    let manifest = format!(
        "<manifest xmlns:android=\"http://schemas.android.com/apk/res/android\" package=\"org.antigravity\">\n\
         \x20   <uses-sdk android:minSdkVersion=\"{ANDROID_API}\" />\n</manifest>\n"
    );
    zip.add_file("AndroidManifest.xml", manifest.as_bytes())?;
    zip.add_file("classes.jar", &build_classes(out)?)?;
    zip.add_file("R.txt", b"")?;
    zip.add_file("proguard.txt", RULES.as_bytes())?;
    for ((folder, target), library) in libraries {
        let file = fs::read(library).at(library)?;
        check_library(&file, target).at(library)?;
        zip.add_file(&format!("jni/{folder}/{SHARED}"), &file)?;
    }
    if let Some(asset) = asset {
        let name = asset.file_name().unwrap_or_default().to_string_lossy();
        zip.add_file(&format!("assets/{name}"), &fs::read(asset).at(asset)?)?;
    }
    let path = out.join(format!("antigravity-{}.aar", model_name(model)));
    fs::write(&path, zip.finish()).at(&path)?;
    Ok(path)
}

/// Compiles the classes to `classes.jar` in a folder, and returns its bytes.
fn build_classes(out: &Path) -> Result<Vec<u8>> {
    let (sources, classes) = (command::root().join(SOURCES), out.join("classes"));
    if !command::is_on_path("javac") {
        let remedy = "sudo apt-get install default-jdk-headless";
        return Err(Error::Failed(format!("javac is missing: {remedy}")));
    }
    let _ = fs::remove_dir_all(&classes);
    let package = sources.join("org/antigravity");
    let mut javac = Command::new("javac");
    // Java 8 is what every Android takes. The folder has names of annotations that other libraries bring.
    javac.args(["--release", "8", "-Xlint:all,-options,-serial", "-Werror"]).arg("-d").arg(&classes);
    javac.arg("-sourcepath").arg(&sources).args(list_files(&package)?);
    command::stdout(&mut javac)?;
    let mut jar = Zip::default();
    for class in list_files(&classes.join("org/antigravity"))? {
        let name = class.strip_prefix(&classes).unwrap_or(&class).to_string_lossy();
        jar.add_file(&name, &fs::read(&class).at(&class)?)?;
    }
    let (path, bytes) = (out.join("classes.jar"), jar.finish());
    fs::write(&path, &bytes).at(&path)?;
    Ok(bytes)
}

/// The files of a folder in the order of their names.
fn list_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = fs::read_dir(dir).at(dir)?.flatten().map(|entry| entry.path()).collect();
    files.sort();
    Ok(files)
}

/// Checks that a phone loads a library, which has each native method of the class.
fn check_library(file: &[u8], target: &str) -> Result<()> {
    let elf = Elf::parse(file).map_err(|e| Error::Failed(e.to_string()))?;
    let mut problems = find_library_problems(target, &elf);
    let class = command::root().join(format!("{SOURCES}/org/antigravity/Model.java"));
    let source = fs::read_to_string(&class).at(&class)?;
    let natives = source.lines().filter(|line| line.contains(" static native "));
    let names = natives.filter_map(|line| line.split('(').next()?.rsplit(' ').next());
    let symbols: Vec<String> = names.map(|name| format!("Java_org_antigravity_Model_{name}")).collect();
    let lacking = symbols.iter().filter(|symbol| !elf.exports.contains(symbol));
    problems.extend(lacking.map(|symbol| format!("has no {symbol}")));
    match problems.as_slice() {
        [] if !symbols.is_empty() => Ok(()),
        _ => Err(Error::Failed(format!("it {}", problems.join("; it ")))),
    }
}
