//! Finds models in the Hugging Face cache, whose folders `models--org--name` hold every downloaded version of a model
//! under `snapshots`. Nothing is downloaded.

use crate::{Error, Result};
use std::env::var_os;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Directory in which `hf download` stores models; `None` without a home directory.
pub fn cache_dir() -> Option<PathBuf> {
    read_env("HF_HUB_CACHE").or_else(|| Some(home_dir()?.join("hub")))
}

/// Directory of the Hugging Face tools, in which `hf auth login` also stores the token; `None` without a home
/// directory.
pub fn home_dir() -> Option<PathBuf> {
    read_env("HF_HOME")
        .or_else(|| Some(read_env("XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(read_env("HOME")?.join(".cache/huggingface")))
}

fn read_env(name: &str) -> Option<PathBuf> {
    var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Resolves a folder `models--org--name` to the snapshot named by `refs/main`, or else to its only snapshot. Any other
/// path is returned unchanged.
pub fn resolve_snapshot(path: &Path) -> PathBuf {
    let snapshots = path.join("snapshots");
    let commit = fs::read_to_string(path.join("refs/main")).unwrap_or_default();
    // Only a name, so that the path stays in the folder.
    let commit =
        Some(commit.trim()).filter(|c| !c.is_empty() && c.bytes().all(|b| b.is_ascii_alphanumeric()));
    if let Some(main) = commit.map(|c| snapshots.join(c)).filter(|dir| dir.is_dir()) {
        return main;
    }
    let mut all = fs::read_dir(&snapshots).into_iter().flatten().flatten().map(|e| e.path());
    match (all.next(), all.next()) {
        (Some(only), None) if only.is_dir() => only,
        _ => path.into(),
    }
}

/// Resolves a file, a directory or `org/name` to a path. `org/name` is the model's snapshot, `org/name:Q4_K_M` the GGUF
/// file in it with this word in its name.
///
/// # Errors
///
/// [`Error::Model`]: the cache has no such model or file.
pub fn resolve_model(given: &Path) -> Result<PathBuf> {
    if given.exists() {
        return Ok(given.into());
    }
    let Some((org, name, word)) = split_model_name(given) else { return Ok(given.into()) };
    let folder = format!("models--{org}--{name}");
    let missing = |what: &str| {
        let remedy = format!("run: hf download {org}/{name}; or give a directory or file");
        Err(Error::model(given, format!("is not a file, and {what}; {remedy}")))
    };
    let Some(cache) = cache_dir() else {
        return missing("without a home directory there is no Hugging Face cache");
    };
    let found = resolve_snapshot(&cache.join(&folder));
    if !found.is_dir() {
        return missing(&format!("the Hugging Face cache {} has no {folder}", cache.display()));
    }
    match word {
        None => Ok(found),
        Some(word) => find_gguf(&found, word)
            .map_or_else(|| missing(&format!("the model has no {word} .gguf file")), Ok),
    }
}

/// Splits `org/name:word`; the word is optional.
fn split_model_name(given: &Path) -> Option<(&str, &str, Option<&str>)> {
    let mut parts = given.components();
    let mut next = || match parts.next()? {
        Component::Normal(part) => part.to_str(),
        _ => None,
    };
    let (org, name) = (next()?, next()?);
    if parts.next().is_some() {
        return None;
    }
    let (name, word) = name.split_once(':').map_or((name, None), |(name, word)| (name, Some(word)));
    Some((org, name, word))
}

/// Finds the first GGUF file whose name contains this word, ignoring case.
fn find_gguf(dir: &Path, word: &str) -> Option<PathBuf> {
    let word = word.to_lowercase();
    let mut found: Vec<PathBuf> = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    found.sort();
    found.into_iter().find(|path| {
        let name = path.file_name().map_or(String::new(), |n| n.to_string_lossy().to_lowercase());
        name.ends_with(".gguf") && name.contains(&word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_model_resolves_to_its_snapshot_directory() {
        let dir = std::env::temp_dir().join(format!("antigravity-hub-{}", std::process::id()));
        let model = dir.join("models--org--name");
        let (old, new) = (model.join("snapshots/0a"), model.join("snapshots/1b"));
        fs::create_dir_all(&old).unwrap();
        assert_eq!(resolve_snapshot(&model), old, "the only one");
        fs::create_dir_all(&new).unwrap();
        assert_eq!(resolve_snapshot(&model), model, "nothing says which");
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::write(model.join("refs/main"), "1b\n").unwrap();
        assert_eq!(resolve_snapshot(&model), new);
        fs::write(model.join("refs/main"), "../../..").unwrap();
        assert_eq!(resolve_snapshot(&model), model, "no way out of the folder");
        assert_eq!(resolve_snapshot(&new), new, "a snapshot itself");
        fs::remove_dir_all(&dir).unwrap();
    }
}
