//! Reference results on disk -> one shape: the `expected.json` of the fixtures, and the
//! `golden/prompts.json` of the bundled model.

use crate::error::{AtPath, Error, Result};
use crate::json;
use files::config::{LayerKind, ModelConfig};
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

/// Everything known about one model.
pub struct Reference {
    pub name: String,
    pub dir: PathBuf,
    pub vocab: usize,
    pub cases: Vec<PromptCase>,
    pub texts: Vec<TextCase>,
    pub eos: Option<EosCase>,
}

/// Token ids and what follows them.
pub struct PromptCase {
    pub name: String,
    pub ids: Vec<u32>,
    /// Logits of the last rows of `ids`. `[row][vocab]`
    pub logits: Vec<f32>,
    pub greedy_ids: Vec<u32>,
    /// Distance of the runner-up, for each greedy id.
    pub margins: Vec<f64>,
    /// The logits each greedy id was taken from, where the reference has them. `[step][vocab]`
    pub greedy_logits: Option<Vec<f32>>,
}

/// A text and its greedy continuation.
pub struct TextCase {
    pub name: String,
    pub text: String,
    pub greedy_text: String,
    /// One for each greedy id.
    pub margins: Vec<f64>,
    /// The index of the first greedy id that ends a generation.
    pub stop: Option<usize>,
}

/// Token ids whose greedy continuation ends with an end-of-sequence id.
#[derive(Deserialize)]
pub struct EosCase {
    pub ids: Vec<u32>,
    #[serde(rename = "greedy_ids_to_eos")]
    pub greedy_ids: Vec<u32>,
    pub min_margin: f64,
}

/// `expected.json`.
#[derive(Deserialize)]
struct Fixture {
    vocab_size: usize,
    eos_token_ids: Vec<u32>,
    prompts: Vec<FixturePrompt>,
    text_prompts: Vec<FixtureText>,
    eos_prompt: Option<EosCase>,
}

#[derive(Deserialize)]
struct FixturePrompt {
    name: String,
    ids: Vec<u32>,
    logits: LogitsFile,
    greedy: FixtureGreedy,
}

#[derive(Deserialize)]
struct LogitsFile {
    file: String,
}

#[derive(Deserialize)]
struct FixtureGreedy {
    ids: Vec<u32>,
    top2_margin: Vec<f64>,
    logits: Option<LogitsFile>,
}

#[derive(Deserialize)]
struct FixtureText {
    text: String,
    greedy_ids: Vec<u32>,
    greedy_text: String,
    min_margin: f64,
}

/// An entry of `golden/prompts.json`: both ids and text; logits of all positions or the last.
#[derive(Deserialize)]
struct GoldenPrompt {
    name: String,
    text: String,
    token_ids: Vec<u32>,
    logits_file: String,
    /// Rows, vocabulary.
    logits_shape: [usize; 2],
    greedy_ids: Vec<u32>,
    greedy_text: String,
    first_stop: Option<usize>,
    margins: Vec<f64>,
}

impl Reference {
    /// Finds out whether a model's directory has reference results.
    pub fn exists(dir: &Path) -> bool {
        dir.join("expected.json").is_file() || dir.join("golden/prompts.json").is_file()
    }

    /// True for a mixture of experts.
    pub fn has_experts(&self) -> bool {
        self.config().is_some_and(|config| config.experts.count > 0)
    }

    fn config(&self) -> Option<ModelConfig> {
        ModelConfig::parse(&fs::read_to_string(self.dir.join("config.json")).ok()?).ok()
    }

    /// The flag that gives the first layer to one device and the others to another; of a model that ends with a layer
    /// without a mixer, that one; with experts all layers to the first, without those. `None` if there is nothing to split.
    pub fn split_flag(&self, devices: [&str; 2]) -> Option<String> {
        let text = fs::read_to_string(self.dir.join("config.json")).unwrap_or_default();
        let kinds = ModelConfig::parse(&text).map_or(Vec::new(), |config| config.layer_kinds);
        let ([first, others], layers) = (devices, kinds.len());
        if self.has_experts() {
            return (first != "cpu").then(|| format!("--split={first}={layers},experts=cpu"));
        }
        let cut = if kinds.ends_with(&[LayerKind::FeedForward]) { layers - 1 } else { 1 };
        (layers > 1).then(|| format!("--split={first}={cut},{others}={}", layers - cut))
    }

    pub fn load(dir: &Path) -> Result<Reference> {
        let fixture = dir.join("expected.json");
        let reference = if fixture.is_file() { from_fixture(dir, &fixture) } else { from_golden(dir) }?;
        let is_whole = |c: &PromptCase| {
            let rows = c.logits.len() / reference.vocab.max(1);
            !c.ids.is_empty() && (1..=c.ids.len()).contains(&rows) && c.margins.len() == c.greedy_ids.len()
        };
        if reference.vocab == 0 || reference.cases.is_empty() {
            return Err(Error::at(dir, "its reference results have no prompts"));
        }
        match reference.cases.iter().find(|c| !is_whole(c)) {
            Some(case) => Err(Error::at(dir, format!("prompt `{}`: lengths do not agree", case.name))),
            None => Ok(reference),
        }
    }

    fn new(dir: &Path, vocab: usize) -> Reference {
        let name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Reference { name, dir: dir.into(), vocab, cases: Vec::new(), texts: Vec::new(), eos: None }
    }

    /// Finds out whether a long text is evicted from: not if there are no positions beyond those that the model has
    /// learned, as in GPT-2, or if all its attention has a window.
    pub fn can_evict(&self) -> bool {
        let config = json::read::<serde_json::Value>(&self.dir.join("config.json"));
        let windowed = |config: &serde_json::Value| {
            config["model_type"] == "mistral" && config["sliding_window"].is_number()
        };
        config.is_ok_and(|config| config["model_type"] != "gpt2" && !windowed(&config))
    }

    /// The largest logit by magnitude over all prompts: the scale of this model's logits.
    pub fn scale(&self) -> f32 {
        self.cases.iter().flat_map(|c| &c.logits).fold(0.0, |m, x| m.max(x.abs()))
    }

    /// The longest prompt whose logits are known at every position.
    pub fn longest_case(&self) -> &PromptCase {
        let is_whole = |c: &&PromptCase| c.logits.len() == c.ids.len() * self.vocab;
        let case = self.cases.iter().filter(is_whole).max_by_key(|c| c.ids.len());
        case.unwrap_or(&self.cases[0])
    }
}

fn from_fixture(dir: &Path, file: &Path) -> Result<Reference> {
    let fixture: Fixture = json::read(file)?;
    let vocab = fixture.vocab_size;
    let mut reference = Reference { eos: fixture.eos_prompt, ..Reference::new(dir, vocab) };
    for FixturePrompt { name, ids, logits, greedy } in fixture.prompts {
        let steps = greedy.ids.len();
        let greedy_logits = greedy.logits.map(|logits| read_floats(&dir.join(logits.file), steps * vocab));
        reference.cases.push(PromptCase {
            name,
            logits: read_floats(&dir.join(logits.file), ids.len() * vocab)?,
            greedy_logits: greedy_logits.transpose()?,
            margins: greedy.top2_margin,
            greedy_ids: greedy.ids,
            ids,
        });
    }
    for (i, FixtureText { text, greedy_ids, greedy_text, min_margin }) in
        fixture.text_prompts.into_iter().enumerate()
    {
        reference.texts.push(TextCase {
            name: format!("text {}", i + 1),
            text,
            greedy_text,
            margins: vec![min_margin; greedy_ids.len()],
            stop: greedy_ids.iter().position(|id| fixture.eos_token_ids.contains(id)),
        });
    }
    Ok(reference)
}

fn from_golden(dir: &Path) -> Result<Reference> {
    let dir_of_files = dir.join("golden");
    let prompts: Vec<GoldenPrompt> = json::read(&dir_of_files.join("prompts.json"))?;
    let mut reference = Reference::new(dir, prompts.first().map_or(0, |prompt| prompt.logits_shape[1]));
    for prompt in prompts {
        reference.texts.push(TextCase {
            name: prompt.name.clone(),
            text: prompt.text,
            greedy_text: prompt.greedy_text,
            margins: prompt.margins.clone(),
            stop: prompt.first_stop,
        });
        let [rows, columns] = prompt.logits_shape;
        reference.cases.push(PromptCase {
            name: prompt.name,
            ids: prompt.token_ids,
            logits: read_floats(&dir_of_files.join(prompt.logits_file), rows * columns)?,
            greedy_ids: prompt.greedy_ids,
            margins: prompt.margins,
            greedy_logits: None,
        });
    }
    Ok(reference)
}

/// Reads a file of exactly `count` little-endian f32.
pub fn read_floats(file: &Path, count: usize) -> Result<Vec<f32>> {
    let bytes = std::fs::read(file).at(file)?;
    if bytes.len() != 4 * count {
        return Err(Error::at(file, format!("{} bytes instead of {}", bytes.len(), 4 * count)));
    }
    Ok(to_floats(&bytes))
}

pub fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::model_dir;

    #[test]
    fn the_fixtures_and_the_bundled_model_load() {
        for name in ["m1-llama32-bf16", "m3-llama-sharded-f32", "m7-qwen3-bf16"] {
            let r = Reference::load(&model_dir(name).unwrap()).unwrap();
            assert_eq!((r.name.as_str(), r.cases.len(), r.texts.len()), (name, 4, 2));
            let case = &r.cases[1];
            assert_eq!(case.logits.len(), case.ids.len() * r.vocab);
            // The first greedy id comes from the last row of the prompt.
            let greedy = case.greedy_logits.as_ref().unwrap();
            assert_eq!(case.logits[case.logits.len() - r.vocab..], greedy[..r.vocab]);
            assert!(r.scale() > 1.0);
        }
        let story = Reference::load(&model_dir("story").unwrap()).unwrap();
        let long = story.cases.iter().find(|c| c.name == "recall_long").unwrap();
        assert!(long.logits.len() == story.vocab && long.ids.len() > 1000);
    }
}
