//! Folders of the Hugging Face cache: `models--org--name` holds every downloaded version of a model under `snapshots`.
//! Nothing is downloaded.

use crate::{Error, Result};
use std::env::var_os;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where `hf download` keeps models; `None` without a home.
pub fn cache() -> Option<PathBuf> {
    set("HF_HUB_CACHE").or_else(|| Some(home()?.join("hub")))
}

/// Where `hf auth login` leaves the token, too.
pub fn home() -> Option<PathBuf> {
    set("HF_HOME")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("huggingface")))
        .or_else(|| Some(set("HOME")?.join(".cache/huggingface")))
}

fn set(name: &str) -> Option<PathBuf> {
    var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// The files of a model in the Hugging Face cache: for a folder `models--org--name`, the snapshot that `refs/main`
/// names, else the only one; any other path is returned as it is.
pub fn snapshot(path: &Path) -> PathBuf {
    let snapshots = path.join("snapshots");
    let commit = fs::read_to_string(path.join("refs/main")).unwrap_or_default();
    // A name, not a way out of the folder.
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

/// The path that a user means: a file or directory, or the snapshot of `org/name`. `org/name:Q4_K_M` is the snapshot's
/// file with this word in its name.
///
/// # Errors
///
/// `Model` for a name that the cache does not have.
pub fn find(given: &Path) -> Result<PathBuf> {
    if given.exists() {
        return Ok(given.into());
    }
    let Some((org, name, word)) = parts(given) else { return Ok(given.into()) };
    let folder = format!("models--{org}--{name}");
    let missing = |what: &str| {
        let remedy = format!("run: hf download {org}/{name}; or give a directory or file");
        Err(Error::model(given, format!("is no file, and {what}; {remedy}")))
    };
    let Some(cache) = cache() else { return missing("there is no home to have a cache in") };
    let found = snapshot(&cache.join(&folder));
    if !found.is_dir() {
        return missing(&format!("{} has no {folder}", cache.display()));
    }
    match word {
        None => Ok(found),
        Some(word) => {
            file_with(&found, word).map_or_else(|| missing(&format!("no .gguf file there is {word}")), Ok)
        }
    }
}

/// `org/name`, and the word after a colon.
fn parts(given: &Path) -> Option<(&str, &str, Option<&str>)> {
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

/// The first file of several whose name has this word, in capitals or not.
fn file_with(dir: &Path, word: &str) -> Option<PathBuf> {
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
    fn a_model_of_the_cache_is_its_snapshot() {
        let dir = std::env::temp_dir().join(format!("antigravity-hub-{}", std::process::id()));
        let model = dir.join("models--org--name");
        let (old, new) = (model.join("snapshots/0a"), model.join("snapshots/1b"));
        fs::create_dir_all(&old).unwrap();
        assert_eq!(snapshot(&model), old, "the only one");
        fs::create_dir_all(&new).unwrap();
        assert_eq!(snapshot(&model), model, "nothing says which");
        fs::create_dir_all(model.join("refs")).unwrap();
        fs::write(model.join("refs/main"), "1b\n").unwrap();
        assert_eq!(snapshot(&model), new);
        fs::write(model.join("refs/main"), "../../..").unwrap();
        assert_eq!(snapshot(&model), model, "no way out of the folder");
        assert_eq!(snapshot(&new), new, "a snapshot itself");
        fs::remove_dir_all(&dir).unwrap();
    }
}
