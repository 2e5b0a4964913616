//! Models by name: their folders and the numbers of their builds.

use crate::command::{quote_word, root};
use crate::error::{AtPath, Error, Result};
use crate::json;
use clap::Args;
use files::hf_cache;
use files::source::gguf::{Gguf, find_only_gguf};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

/// The model that a task is about.
#[derive(Clone, Default, Args)]
pub struct ModelArgs {
    /// A name under models/, a directory or a .gguf file [default: story]
    #[arg(long, value_name = "M")]
    pub model: Option<String>,
}

/// The model where none is named.
const DEFAULT: &str = "story";

impl ModelArgs {
    fn name(&self) -> String {
        let default = || std::env::var("ANTIGRAVITY_MODEL").unwrap_or_else(|_| DEFAULT.into());
        self.model.clone().unwrap_or_else(default)
    }

    /// The folder or file of the model in the flags, else in the environment.
    pub fn dir(&self) -> Result<PathBuf> {
        model_dir(&self.name())
    }

    /// The flag as one would type it, after a space; empty for the default.
    pub fn words(&self) -> String {
        let name = self.name();
        if name == DEFAULT { String::new() } else { format!(" --model {}", quote_word(&name)) }
    }
}

/// True if a model has a chat template, in its folder or in its GGUF file.
pub fn has_template(model: &Path) -> bool {
    let only = || find_only_gguf(model).ok().flatten();
    let gguf = if model.is_file() { Some(model.into()) } else { only() };
    let in_gguf = |file: PathBuf| Gguf::open(&file).ok()?.metadata().get("tokenizer.chat_template").map(drop);
    let settings: Value = json::read(&model.join("tokenizer_config.json")).unwrap_or_default();
    let beside = model.join("chat_template.jinja").exists() || !settings["chat_template"].is_null();
    beside || gguf.and_then(in_gguf).is_some()
}

pub fn is_weights(file: &Path) -> bool {
    file.extension().is_some_and(|e| e == "gguf" || e == "safetensors")
}

/// A model's name, without a file extension. A folder in the Hugging Face cache is called `models--org--name`.
pub fn model_name(model: &Path) -> String {
    let gguf = model.extension().is_some_and(|e| e == "gguf");
    let name = if gguf { model.file_stem() } else { model.file_name() }.unwrap_or_default().to_string_lossy();
    let mut above = model.ancestors().filter_map(|dir| dir.file_name()?.to_str()?.strip_prefix("models--"));
    let on_hub = if gguf { None } else { above.find_map(|dir| dir.split("--").last()) };
    on_hub.map_or(name.into(), String::from)
}

/// The name of a bundled model, which makes it the same build as without xtask; else the path.
pub fn bundled_name(model: &Path) -> &Path {
    model.strip_prefix(root().join("models")).unwrap_or(model)
}

pub(super) fn is_story(model: &Path) -> bool {
    model == root().join("models/story")
}

/// The absolute directory (or `.gguf` file) of a model: a name under `models/` or `tests/fixtures/models/`, a path, or
/// `org/name` of the Hugging Face cache.
pub fn model_dir(name: &str) -> Result<PathBuf> {
    let here = std::env::current_dir().unwrap_or_else(|_| root());
    let given = hf_cache::resolve_model(Path::new(name)).map_err(|e| Error::Usage(e.to_string()))?;
    let places = [
        root().join("models").join(name),
        root().join("tests/fixtures/models").join(name),
        hf_cache::resolve_snapshot(&here.join(given)),
    ];
    let usable = |path: &PathBuf| {
        let whole = path.join("config.json").is_file() || (path.is_file() && path.extension().is_some());
        let only = || find_only_gguf(path).ok().flatten().filter(|_| path.is_dir());
        if whole { Some(path.clone()) } else { only() }
    };
    let found = places.iter().find_map(usable).ok_or_else(|| {
        let mut bundled: Vec<String> = names_in("models").map(|e| e.to_string_lossy().into_owned()).collect();
        bundled.sort();
        Error::Usage(format!(
            "no model `{name}`: give a directory with a config.json, a .gguf file or one of {}",
            bundled.join(", ")
        ))
    })?;
    // Not of the file itself: in the Hugging Face cache it is a link to one without a file extension.
    let (dir, file) = if found.is_file() { (found.parent(), found.file_name()) } else { (None, None) };
    let dir = fs::canonicalize(dir.unwrap_or(&found)).at(&found)?;
    Ok(file.map_or(dir.clone(), |file| dir.join(file)))
}

fn names_in(dir: &str) -> impl Iterator<Item = std::ffi::OsString> {
    fs::read_dir(root().join(dir)).into_iter().flatten().flatten().map(|entry| entry.file_name())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_found_by_name_and_path() {
        let story = model_dir("story").unwrap();
        assert!(story.is_absolute() && story.ends_with("models/story"));
        assert_eq!(model_dir(story.to_str().unwrap()).unwrap(), story);
        let gguf = std::env::temp_dir().join(format!("xtask-only-gguf-{}", std::process::id()));
        fs::create_dir_all(&gguf).unwrap();
        fs::write(gguf.join("x.gguf"), "").unwrap();
        let only = fs::canonicalize(gguf.join("x.gguf")).unwrap();
        assert_eq!(model_dir(gguf.to_str().unwrap()).unwrap(), only);
        let snapshot = gguf.join("models--org--name/snapshots/c0ffee");
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(snapshot.join("config.json"), "").unwrap();
        std::os::unix::fs::symlink("config.json", snapshot.join("q4.gguf")).unwrap();
        let name = |path: PathBuf| model_name(&model_dir(path.to_str().unwrap()).unwrap());
        assert_eq!((name(snapshot.clone()), name(snapshot.join("q4.gguf"))), ("name".into(), "q4".into()));
        fs::remove_dir_all(&gguf).unwrap();
        let e = model_dir("no-such-model").unwrap_err().to_string();
        assert!(e.contains("no-such-model") && e.contains("story"), "{e}");
    }
}
