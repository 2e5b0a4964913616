//! Models by the name that they have at Hugging Face, found where `hf download` puts them. Nothing is downloaded.

use files::hub::{cache, snapshot};
use files::{Error, Result};
use std::path::{Component, Path, PathBuf};

/// The path that a user means: a file or directory, or the snapshot of `org/name`. `org/name:Q4_K_M` is the snapshot's
/// file with this word in its name.
///
/// # Errors
///
/// `Model` for a name that the cache does not have.
pub(super) fn model(given: &Path) -> Result<PathBuf> {
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
    let mut found: Vec<PathBuf> = std::fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
    found.sort();
    found.into_iter().find(|path| {
        let name = path.file_name().map_or(String::new(), |n| n.to_string_lossy().to_lowercase());
        name.ends_with(".gguf") && name.contains(&word)
    })
}
