//! Golden files: the flags of the program that they stand for, and the results that it prints.

use super::comparison::Outcome;
use crate::error::{Error, Result};
use crate::{command, json};
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// One golden file.
pub struct Case {
    pub name: String,
    /// Flags of the weights and the KV cache, without the model.
    pub settings: Vec<String>,
    /// Flags of `generate`.
    pub generate: Vec<String>,
    pub exact_weights: bool,
    /// The prompt, and below its token ids.
    pub text: String,
    pub prompt: Vec<u32>,
    pub expected: Outcome,
}

impl Case {
    /// Checks the JSON lines that `generate` printed for this case.
    pub fn check_output(&self, printed: &[u8]) -> Result<()> {
        let found = parse_outcome(&self.name, &String::from_utf8_lossy(printed))?;
        if found == self.expected {
            return Ok(());
        }
        Err(Error::Failed(format!("{}: {found:?} instead of {:?}", self.name, self.expected)))
    }
}

/// The golden files of a model, by name.
pub fn read_cases(model: &Path) -> Result<Vec<Case>> {
    let dir = command::root().join("tests/golden").join(model.file_name().unwrap_or_default());
    let missing = |e| Error::at(&dir, format!("{e}; this model has no golden files"));
    let entries = std::fs::read_dir(&dir).map_err(missing)?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "json"));
    files.sort();
    files.iter().map(|file| read_case(file)).collect()
}

/// The content of a golden file.
#[derive(Deserialize)]
struct Golden {
    prompt: String,
    weights: String,
    k: String,
    v: String,
    tokens: Option<u64>,
    temperature: Option<f64>,
    repetition_penalty: Option<f64>,
    seed: Option<u64>,
    expected: Expected,
}

#[derive(Deserialize)]
struct Expected {
    prompt: Vec<u32>,
    ids: Vec<u32>,
    digest: String,
}

pub fn read_case(file: &Path) -> Result<Case> {
    let golden: Golden = json::read(file)?;
    let words = |list: &[(&str, String)]| list.iter().flat_map(|(f, v)| [f.to_string(), v.clone()]).collect();
    let mut generate: Vec<String> = words(&[
        ("--prompt", golden.prompt.clone()),
        ("--num-tokens", golden.tokens.unwrap_or(32).to_string()),
        ("--temperature", golden.temperature.unwrap_or(0.0).to_string()),
        ("--repetition-penalty", golden.repetition_penalty.unwrap_or(1.0).to_string()),
        ("--seed", golden.seed.unwrap_or(0).to_string()),
        ("--format", "jsonl".into()),
    ]);
    generate.push("--quiet".into());
    Ok(Case {
        name: file.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        settings: words(&[
            ("--weight-type", golden.weights.clone()),
            ("--cache-type-k", golden.k),
            ("--cache-type-v", golden.v),
        ]),
        generate,
        exact_weights: golden.weights == "f32",
        text: golden.prompt,
        prompt: golden.expected.prompt,
        expected: Outcome { ids: golden.expected.ids, digest: golden.expected.digest },
    })
}

/// Reads the JSON lines of `generate`.
pub fn parse_outcome(case: &str, lines: &str) -> Result<Outcome> {
    let mut found = Outcome::default();
    for line in lines.lines() {
        let value: Value = serde_json::from_str(line).unwrap_or_default();
        match value["t"].as_str() {
            Some("token") => found.ids.extend(value["id"].as_u64().and_then(|id| u32::try_from(id).ok())),
            Some("stats") => found.digest = value["logits"].as_str().unwrap_or_default().into(),
            // A hybrid that switches devices computes the same.
            Some("switch") => {}
            _ => {
                let line = command::one_line(line);
                return Err(Error::Failed(format!("{case}: not a line of `generate`: {line}")));
            }
        }
    }
    if found.digest.is_empty() {
        return Err(Error::Failed(format!("{case}: `generate` ended without its last line")));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_files_become_flags_and_lines_of_generate_are_read() {
        let all = read_cases(&command::root().join("models/story")).unwrap();
        let sampled = all.iter().find(|c| c.name == "sampled").unwrap();
        for pair in [["--temperature", "0.8"], ["--seed", "42"]] {
            assert!(sampled.generate.windows(2).any(|w| w == pair));
        }
        assert!(all.len() >= 7 && all.iter().all(|c| !c.prompt.is_empty() && !c.expected.ids.is_empty()));
        let lines = "{\"t\":\"token\",\"id\":36,\"text\":\"a\"}\n{\"t\":\"token\",\"id\":null,\"text\":\"b\"}\n\
            {\"t\":\"stats\",\"logits\":\"1b72\"}\n";
        assert_eq!(parse_outcome("x", lines).unwrap(), Outcome { ids: vec![36], digest: "1b72".into() });
        for hostile in ["", "{\"t\":\"token\",\"id\":36}\n", "\u{1b}[2J\n", "[[[[", "{\"t\":\"stats\"}\n"] {
            let e = parse_outcome("x", hostile).unwrap_err().to_string();
            assert!(e.starts_with("x: ") && !e.contains('\u{1b}'), "{e}");
        }
    }
}
