//! Golden files as flags of the program, and what it printed as a result.

use super::comparison::Outcome;
use crate::error::{Error, Result};
use crate::json::{self, Node};
use crate::sh;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// One golden file.
pub struct Case {
    pub name: String,
    /// The flags of its settings, without the model.
    pub settings: Vec<String>,
    /// The flags that make a text of it.
    pub generate: Vec<String>,
    pub exact_weights: bool,
    /// The prompt, and its ids.
    pub text: String,
    pub prompt: Vec<u32>,
    pub expected: Outcome,
}

/// The golden files of a model.
pub fn cases(model: &Path) -> Result<Vec<Case>> {
    let dir = sh::root().join("tests/golden").join(model.file_name().unwrap_or_default());
    let entries = std::fs::read_dir(&dir);
    let entries =
        entries.map_err(|e| Error::at(&dir, format!("{e}; there are no goldens for this model")))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "json"));
    files.sort();
    files.iter().map(|file| case(file)).collect()
}

fn case(file: &Path) -> Result<Case> {
    let value = json::read(file)?;
    let node = Node { file, value: &value };
    let number = |field: &str, default: f64| value[field].as_f64().unwrap_or(default).to_string();
    let weights = node.text("weights")?;
    let words = |list: &[(&str, String)]| list.iter().flat_map(|(f, v)| [f.to_string(), v.clone()]).collect();
    let mut generate: Vec<String> = words(&[
        ("--prompt", node.text("prompt")?.into()),
        ("--num-tokens", number("tokens", 32.0)),
        ("--temperature", number("temperature", 0.0)),
        ("--repetition-penalty", number("repetition_penalty", 1.0)),
        ("--seed", number("seed", 0.0)),
        ("--format", "jsonl".into()),
    ]);
    generate.push("--quiet".into());
    let expected = node.get("expected")?;
    Ok(Case {
        name: file.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
        settings: words(&[
            ("--weight-type", weights.into()),
            ("--cache-type-k", node.text("k")?.into()),
            ("--cache-type-v", node.text("v")?.into()),
        ]),
        generate,
        exact_weights: weights == "f32",
        text: node.text("prompt")?.into(),
        prompt: ids(expected.get("prompt")?)?,
        expected: Outcome { ids: ids(expected.get("ids")?)?, digest: expected.text("digest")?.into() },
    })
}

fn ids(node: Node<'_>) -> Result<Vec<u32>> {
    serde_json::from_value(node.value.clone()).map_err(|e| Error::at(node.file, format!("token ids: {e}")))
}

/// Reads the JSON lines of `generate`.
pub fn outcome(case: &str, lines: &str) -> Result<Outcome> {
    let mut found = Outcome::default();
    for line in lines.lines() {
        let value: Value = serde_json::from_str(line).unwrap_or_default();
        match value["t"].as_str() {
            Some("token") => found.ids.extend(value["id"].as_u64().and_then(|id| u32::try_from(id).ok())),
            Some("stats") => found.digest = value["logits"].as_str().unwrap_or_default().into(),
            // A hybrid's move changes nothing.
            Some("switch") => {}
            _ => {
                let line = sh::one_line(line);
                return Err(Error::Failed(format!("{case}: this is no line of `generate`: {line}")));
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
    fn lines_of_generate_are_read() {
        let lines = "{\"t\":\"token\",\"id\":36,\"text\":\"a\"}\n{\"t\":\"token\",\"id\":null,\"text\":\"b\"}\n\
            {\"t\":\"stats\",\"logits\":\"1b72\"}\n";
        assert_eq!(outcome("x", lines).unwrap(), Outcome { ids: vec![36], digest: "1b72".into() });
        for hostile in ["", "{\"t\":\"token\",\"id\":36}\n", "\u{1b}[2J\n", "[[[[", "{\"t\":\"stats\"}\n"] {
            let e = outcome("x", hostile).unwrap_err().to_string();
            assert!(e.starts_with("x: ") && !e.contains('\u{1b}'), "{e}");
        }
    }

    #[test]
    fn golden_files_become_flags() {
        let all = cases(&sh::root().join("models/story")).unwrap();
        assert!(all.len() >= 7);
        let sampled = all.iter().find(|c| c.name == "sampled").unwrap();
        assert!(sampled.generate.windows(2).any(|w| w == ["--temperature", "0.8"]));
        assert!(sampled.generate.windows(2).any(|w| w == ["--seed", "42"]));
        assert!(all.iter().all(|c| !c.prompt.is_empty() && !c.expected.ids.is_empty()));
        assert_eq!(all.iter().filter(|c| c.exact_weights).count(), 1);
    }
}
