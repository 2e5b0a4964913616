//! The choice of weights among the files that the hub has of a model.

use crate::error::{Error, Result};
use crate::json;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Component, Path};

/// `org/name`, and optionally a file or a part of its name.
pub struct ModelSpec {
    pub repo: String,
    word: Option<String>,
}

/// The weights of a model, by file name.
#[derive(Debug, PartialEq)]
pub enum Weights<'a> {
    Gguf(&'a str),
    Whole(&'a str),
    /// The index of the shards.
    Sharded(&'a str),
}

/// Maximum number of files in a message.
const SHOWN: usize = 8;

impl ModelSpec {
    pub fn parse(name: &str) -> Result<ModelSpec> {
        let (repo, word) = name.split_once(':').map_or((name, None), |(repo, word)| (repo, Some(word)));
        let plain = |part: &str| {
            !part.trim_matches('.').is_empty()
                && part.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
        };
        if repo.split('/').count() != 2 || !repo.split('/').all(plain) || word.is_some_and(str::is_empty) {
            return Err(Error::Usage(format!(
                "`{name}` is not a model of the hub; give org/name or org/name:file"
            )));
        }
        Ok(ModelSpec { repo: repo.into(), word: word.map(String::from) })
    }

    /// Chooses among the files of a model: the named file, else the first GGUF file with that word in its name; without
    /// a name, safetensors or the only GGUF file.
    pub fn choose_weights<'a>(&self, names: &[&'a str]) -> Result<Weights<'a>> {
        let ggufs: Vec<&str> =
            names.iter().copied().filter(|name| name.ends_with(".gguf") && is_below_folder(name)).collect();
        let refused = |why: String| Err(Error::Failed(format!("{}: {why}", self.repo)));
        let Some(word) = &self.word else {
            let there = |name: &str| names.iter().copied().find(|there| *there == name);
            return match (there("model.safetensors"), there(INDEX), ggufs.as_slice()) {
                (Some(whole), ..) => Ok(Weights::Whole(whole)),
                (None, Some(index), _) => Ok(Weights::Sharded(index)),
                (None, None, [only]) => Ok(Weights::Gguf(only)),
                (None, None, []) => {
                    refused(format!("the hub has neither model.safetensors nor {INDEX} nor a .gguf file"))
                }
                _ => refused(format!(
                    "has {} GGUF files: {}; name one: {}:FILE",
                    ggufs.len(),
                    list_some(&ggufs),
                    self.repo
                )),
            };
        };
        let lower = word.to_lowercase();
        let exact = ggufs.iter().find(|name| *name == word);
        match exact.or_else(|| ggufs.iter().find(|name| name.to_lowercase().contains(&lower))) {
            Some(file) => Ok(Weights::Gguf(file)),
            None if ggufs.is_empty() => {
                refused(format!("has no GGUF file; try: cargo xtask fetch {}", self.repo))
            }
            None => refused(format!("no GGUF file matches {word}; use one of {}", list_some(&ggufs))),
        }
    }
}

const INDEX: &str = "model.safetensors.index.json";

fn list_some(names: &[&str]) -> String {
    let more = if names.len() > SHOWN { ", …" } else { "" };
    crate::command::one_line(&format!("{}{more}", names[..names.len().min(SHOWN)].join(", ")))
}

/// True for a file name that stays below the model's folder and has no control characters.
pub fn is_below_folder(name: &str) -> bool {
    let below = |name: &str| Path::new(name).components().all(|part| matches!(part, Component::Normal(_)));
    !name.is_empty() && !name.contains(|c: char| c.is_control() || c == '\\') && below(name)
}

/// Guesses the names of the chat models made from a base model, as publishers usually name them; `None` for a chat
/// model.
pub fn guess_siblings(repo: &str) -> Option<Vec<String>> {
    const CHATS: [&str; 5] = ["-Instruct", "-instruct", "-it", "-Chat", "-chat"];
    if CHATS.iter().any(|end| repo.ends_with(end)) {
        return None;
    }
    let stem = ["-Base", "-base", "-pt"].iter().find_map(|end| repo.strip_suffix(end));
    let of_stem = CHATS.iter().map(|end| format!("{}{end}", stem.unwrap_or(repo)));
    Some(stem.map(String::from).into_iter().chain(of_stem).collect())
}

/// The shards that an index names.
pub fn read_shards(index: &Path) -> Result<BTreeSet<String>> {
    let value: Value = json::read(index)?;
    let map = value["weight_map"].as_object();
    let names: Option<BTreeSet<String>> =
        map.and_then(|map| map.values().map(|name| name.as_str().map(String::from)).collect());
    match names {
        Some(names) if !names.is_empty() && names.iter().all(|name| is_below_folder(name)) => Ok(names),
        _ => Err(Error::at(index, "its `weight_map` does not name files; use another model")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_two_parts_and_siblings_are_guessed() {
        for name in ["a/b", "a/b:x.gguf", "a.b/c-d_1:Q4_K_M"] {
            assert!(ModelSpec::parse(name).is_ok(), "{name}");
        }
        for name in ["a", "a/b/c", "/a", "a/", "a/b:", "../..", "a/..", "a/b?c", "a/%2e"] {
            assert_eq!(ModelSpec::parse(name).err().map(|e| e.exit_code()), Some(2), "{name}");
        }
        let first = |repo| guess_siblings(repo).map(|names| names[0].clone());
        assert_eq!(first("a/b").as_deref(), Some("a/b-Instruct"));
        assert_eq!(first("a/b-Base").as_deref(), Some("a/b"));
        assert_eq!(guess_siblings("a/b-pt").unwrap()[3], "a/b-it");
        assert_eq!(guess_siblings("a/b-it"), None);
    }

    #[test]
    fn the_files_to_fetch_are_chosen() {
        let chosen =
            |name: &str, files: &[&'static str]| ModelSpec::parse(name).unwrap().choose_weights(files);
        let both = ["model.safetensors", "m-q4.gguf", "m-q8.gguf"];
        assert_eq!(chosen("a/b", &both).unwrap(), Weights::Whole("model.safetensors"));
        assert_eq!(chosen("a/b", &[INDEX, "model-1.safetensors"]).unwrap(), Weights::Sharded(INDEX));
        assert_eq!(chosen("a/b", &["m-q4.gguf", "README.md"]).unwrap(), Weights::Gguf("m-q4.gguf"));
        assert_eq!(chosen("a/b:Q8", &both).unwrap(), Weights::Gguf("m-q8.gguf"));
        assert_eq!(chosen("a/b:m-q4.gguf", &both).unwrap(), Weights::Gguf("m-q4.gguf"));
        for (name, files, words) in [
            ("a/b", &both[1..], "a/b: has 2 GGUF files: m-q4.gguf, m-q8.gguf; name one: a/b:FILE"),
            ("a/b", &["x.bin"][..], "a/b: the hub has neither"),
            ("a/b", &["../m.gguf"][..], "a/b: the hub has neither"),
            ("a/b:f16", &both[..], "a/b: no GGUF file matches f16; use one of m-q4.gguf, m-q8.gguf"),
            ("a/b:f16", &["x.bin"][..], "a/b: has no GGUF file"),
        ] {
            let said = chosen(name, files).unwrap_err().to_string();
            assert!(said.starts_with(words), "{said}");
        }
    }
}
