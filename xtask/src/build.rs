//! `cargo xtask build`, and the builds for other models that the checks need.

use crate::args::Args;
use crate::error::{Error, Result};
use crate::{sh, size};
use std::path::{Path, PathBuf};
use std::process::Command;

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, &["--model", "--target"], &[])?;
    args.no_rest()?;
    let model = args.value("--model").map(model_dir).transpose()?;
    let binary = match args.value("--target") {
        Some(target) => for_target(target, model.as_deref())?,
        None => for_host(model.as_deref())?,
    };
    let bytes = std::fs::metadata(&binary).map_err(|e| Error::at(&binary, e))?.len();
    println!("{} {}", binary.display(), size::megabytes(bytes));
    Ok(())
}

/// The release program for a target, and a model where it is not the default one.
pub fn for_target(target: &str, model: Option<&Path>) -> Result<PathBuf> {
    if target == host() {
        return for_host(model);
    }
    if !has_target(target) {
        return Err(Error::Failed(format!("no standard library for {target}: rustup target add {target}")));
    }
    sh::run(release(model).args(["--target", target]))?;
    Ok(target_dir().join(target).join("release/antigravity"))
}

/// The release program for this machine.
pub fn for_host(model: Option<&Path>) -> Result<PathBuf> {
    sh::run(&mut release(model))?;
    Ok(target_dir().join("release/antigravity"))
}

fn release(model: Option<&Path>) -> Command {
    let mut cargo = sh::cargo(&["build", "--release", "--package", "antigravity"]);
    if let Some(model) = model {
        // A bundled model by its name: the same build as without xtask, not another one.
        let bundled = model.strip_prefix(sh::root().join("models")).ok();
        cargo.env("ANTIGRAVITY_MODEL", bundled.unwrap_or(model));
    }
    cargo
}

/// This machine's target triple.
pub fn host() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// Whether Rust's standard library for a target is installed.
pub fn has_target(target: &str) -> bool {
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.args(["--print", "target-libdir", "--target", target]);
    sh::stdout(&mut rustc).is_ok_and(|out| Path::new(String::from_utf8_lossy(&out).trim()).is_dir())
}

/// The model that the flags, else the environment, name.
pub fn chosen_model(args: &Args) -> Result<PathBuf> {
    let default = std::env::var("ANTIGRAVITY_MODEL").unwrap_or_else(|_| "story".into());
    model_dir(args.value("--model").unwrap_or(&default))
}

/// Where cargo puts its results.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => sh::root().join(dir),
        None => sh::root().join("target"),
    }
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
