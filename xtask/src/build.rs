//! `cargo xtask build`, and the builds for other models and targets that other tasks need.

use crate::args::Args;
use crate::elf::{Elf, check};
use crate::error::{Error, Result};
use crate::targets::{ANDROID, TARGETS};
use crate::{android, cargo, sh, size, toolchain};
use object::elf::PT_LOAD;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use crate::targets::{Features, host, target_dir};

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, &["--model", "--target"], &["--no-ndk"])?;
    args.no_rest()?;
    let model = args.value("--model").map(model_dir).transpose()?;
    let ndk = if args.has("--no-ndk") { android::Ndk::Never } else { android::Ndk::IfFound };
    let binary = match args.value("--target") {
        Some(target) => release_with(Features::Default, target, model.as_deref(), ndk)?,
        None => for_host(model.as_deref())?,
    };
    let file = std::fs::read(&binary).map_err(|e| Error::at(&binary, e))?;
    println!("{} {}", binary.display(), size::megabytes(file.len() as u64));
    if let Ok(elf) = Elf::parse(&file) {
        println!("{}", linked(&elf));
    }
    Ok(())
}

/// A release build for a target and a model (without one: the one the user's shell is set to), linked as well
/// as this machine can. Returns the stripped binary, which is what a loader of that target expects.
pub fn for_target(target: &str, model: Option<&Path>) -> Result<PathBuf> {
    if target == host() {
        return for_host(model);
    }
    release_with(Features::Default, target, model, android::Ndk::IfFound)
}

/// [`for_target`] with these features, saying whether an NDK may be used. The next build with other features
/// replaces the binary.
pub fn release_with(
    features: Features,
    target: &str,
    model: Option<&Path>,
    ndk: android::Ndk,
) -> Result<PathBuf> {
    let mut cargo = release_command(features, model);
    cargo.args(["--target", target]);
    if let Some(note) = cargo::prepare(&mut cargo, target, ndk)? {
        eprintln!("{target}: {note}");
    }
    if target == ANDROID {
        // A release that panics ends at once, so nothing reads the tables of how to go on.
        toolchain::add_flags(&mut cargo, &["-Cforce-unwind-tables=no".into()]);
    }
    sh::run(&mut cargo)?;
    let binary = target_dir().join(target).join("release/antigravity");
    if TARGETS.contains(&target) {
        let file = std::fs::read(&binary).map_err(|e| Error::at(&binary, e))?;
        let elf = Elf::parse(&file).map_err(|e| Error::at(&binary, e))?;
        let problems = check::problems(target, &elf);
        if !problems.is_empty() {
            return Err(Error::at(&binary, format!("not fit for {target}: it {}", problems.join("; it "))));
        }
    }
    Ok(binary)
}

/// The release program for this machine.
pub fn for_host(model: Option<&Path>) -> Result<PathBuf> {
    for_host_with(Features::Default, model)
}

/// [`for_host`] with these features. The next build with others replaces the binary.
pub fn for_host_with(features: Features, model: Option<&Path>) -> Result<PathBuf> {
    sh::run(&mut release_command(features, model))?;
    Ok(target_dir().join("release/antigravity"))
}

fn release_command(features: Features, model: Option<&Path>) -> Command {
    let mut cargo = sh::cargo(&["build", "--release", "--package", "antigravity"]);
    if features == Features::None {
        cargo.arg(features.words());
    }
    if let Some(model) = model {
        // A bundled model by its name: the same build as without xtask, not another one.
        let bundled = model.strip_prefix(sh::root().join("models")).ok();
        cargo.env("ANTIGRAVITY_MODEL", bundled.unwrap_or(model));
    }
    cargo
}

/// What a program is linked to, in a line.
fn linked(elf: &Elf) -> String {
    let loader = match &elf.interpreter {
        Some(loader) => format!("loaded by {loader}"),
        None => "static".into(),
    };
    let needs = match elf.needed.as_slice() {
        [] => "needs no library".into(),
        names => format!("needs {} ({} symbols)", names.join(" "), elf.imports.len()),
    };
    let align = elf.segments.iter().filter(|s| s.kind == PT_LOAD).map(|s| s.align).min().unwrap_or(0);
    format!("  {loader}; {needs}; segments aligned to {} KiB", align >> 10)
}

/// The model that the flags, else the environment, name.
pub fn chosen_model(args: &Args) -> Result<PathBuf> {
    let default = std::env::var("ANTIGRAVITY_MODEL").unwrap_or_else(|_| "story".into());
    model_dir(args.value("--model").unwrap_or(&default))
}

/// The absolute directory (or `.gguf` file) of a model: a name under `models/` or
/// `tests/fixtures/models/`, or a path.
pub fn model_dir(name: &str) -> Result<PathBuf> {
    let root = sh::root();
    let here = std::env::current_dir().unwrap_or_else(|_| root.clone());
    let places =
        [root.join("models").join(name), root.join("tests/fixtures/models").join(name), here.join(name)];
    let usable = |p: &&PathBuf| p.join("config.json").is_file() || (p.is_file() && p.extension().is_some());
    let found = places.iter().find(usable).ok_or_else(|| {
        Error::Usage(format!(
            "no model `{name}`: neither a directory with a config.json nor one of {}",
            bundled(&root.join("models")).join(", ")
        ))
    })?;
    std::fs::canonicalize(found).map_err(|e| Error::at(found, e))
}

fn bundled(models: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(models).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A quick build for a model, apart from the main build so that it stays as it is.
pub fn quick(model: &Path) -> Command {
    let mut cargo = sh::cargo(&["build", "--package", "antigravity", "--profile", "quick", "--target-dir"]);
    cargo.arg(target_dir().join("models")).env("ANTIGRAVITY_MODEL", model);
    cargo
}

/// What [`quick`] makes.
pub fn quick_binary() -> PathBuf {
    target_dir().join("models/quick/antigravity")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_found_by_name_and_path() {
        let story = model_dir("story").unwrap();
        assert!(story.is_absolute() && story.ends_with("models/story"));
        assert!(model_dir("m6-gpt2-f32").unwrap().ends_with("tests/fixtures/models/m6-gpt2-f32"));
        assert_eq!(model_dir(story.to_str().unwrap()).unwrap(), story);
        let e = model_dir("no-such-model").unwrap_err().to_string();
        assert!(e.contains("no-such-model") && e.contains("story"), "{e}");
    }
}
