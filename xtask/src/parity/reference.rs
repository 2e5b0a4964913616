//! Reference results on disk -> one shape: the `expected.json` of the fixtures, and the
//! `golden/prompts.json` of the bundled model.

use crate::error::{Error, Result};
use crate::json::{self, Node};
use std::path::{Path, PathBuf};

/// Everything known about one model.
pub struct Reference {
    pub name: String,
    pub dir: PathBuf,
    pub vocab: usize,
    pub cases: Vec<Case>,
    pub texts: Vec<TextCase>,
    pub eos: Option<EosCase>,
}

/// Token ids and what follows them.
pub struct Case {
    pub name: String,
    pub ids: Vec<u32>,
    /// Logits of the last rows of `ids`. `[row][vocab]`
    pub logits: Vec<f32>,
    pub greedy_ids: Vec<u32>,
    /// How far the runner-up was behind, for each greedy id.
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
pub struct EosCase {
    pub ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub min_margin: f64,
}

impl Reference {
    /// Whether a model's directory has reference results.
    pub fn exists(dir: &Path) -> bool {
        dir.join("expected.json").is_file() || dir.join("golden/prompts.json").is_file()
    }

    pub fn load(dir: &Path) -> Result<Reference> {
        let fixture = dir.join("expected.json");
        let mut reference = if fixture.is_file() {
            let value = json::read(&fixture)?;
            from_fixture(Node { file: &fixture, value: &value })?
        } else {
            let golden = dir.join("golden/prompts.json");
            let value = json::read(&golden)?;
            from_golden(Node { file: &golden, value: &value })?
        };
        reference.name = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        reference.dir = dir.into();
        Ok(reference)
    }

    /// Whether there are no positions beyond those that the model has learned, as in GPT-2.
    pub fn has_learned_positions(&self) -> bool {
        let config = json::read(&self.dir.join("config.json"));
        config.is_ok_and(|config| config["model_type"] == "gpt2")
    }

    /// The largest logit by magnitude over all prompts: the scale of this model's logits.
    pub fn scale(&self) -> f32 {
        self.cases.iter().flat_map(|c| &c.logits).fold(0.0, |m, x| m.max(x.abs()))
    }
}

/// `expected.json`; its conventions are described by the fields' names and by [`Case`].
fn from_fixture(top: Node<'_>) -> Result<Reference> {
    let vocab = top.size("vocab_size")?;
    let dir = top.file.parent().unwrap_or(Path::new("."));
    let eos_ids = top.ids("eos_token_ids")?;
    let mut cases = Vec::new();
    for prompt in top.get("prompts")?.list()? {
        let ids = prompt.ids("ids")?;
        let greedy = prompt.get("greedy")?;
        let greedy_ids = greedy.ids("ids")?;
        let table = |node: Node<'_>, rows| floats(&dir.join(node.get("logits")?.text("file")?), rows * vocab);
        cases.push(Case {
            name: prompt.text("name")?.into(),
            logits: table(prompt, ids.len())?,
            greedy_logits: Some(table(greedy, greedy_ids.len())?),
            margins: greedy.floats("top2_margin")?,
            greedy_ids,
            ids,
        });
    }
    let mut texts = Vec::new();
    for (i, prompt) in top.get("text_prompts")?.list()?.enumerate() {
        let greedy_ids = prompt.ids("greedy_ids")?;
        texts.push(TextCase {
            name: format!("text {}", i + 1),
            text: prompt.text("text")?.into(),
            greedy_text: prompt.text("greedy_text")?.into(),
            margins: vec![prompt.float("min_margin")?; greedy_ids.len()],
            stop: greedy_ids.iter().position(|id| eos_ids.contains(id)),
        });
    }
    let eos = match top.find("eos_prompt") {
        None => None,
        Some(eos) => Some(EosCase {
            ids: eos.ids("ids")?,
            greedy_ids: eos.ids("greedy_ids_to_eos")?,
            min_margin: eos.float("min_margin")?,
        }),
    };
    checked(Reference { name: String::new(), dir: PathBuf::new(), vocab, cases, texts, eos }, top.file)
}

/// `golden/prompts.json`: one list, each entry both ids and text; logits of all positions or the last.
fn from_golden(top: Node<'_>) -> Result<Reference> {
    let dir = top.file.parent().unwrap_or(Path::new("."));
    let (mut vocab, mut cases, mut texts) = (0, Vec::new(), Vec::new());
    for prompt in top.list()? {
        let shape = prompt.ids("logits_shape")?;
        let &[rows, columns] = shape.as_slice() else {
            return Err(Error::at(top.file, "field `logits_shape` is not [rows, vocab]"));
        };
        vocab = columns as usize;
        let name = prompt.text("name")?;
        let margins = prompt.floats("margins")?;
        texts.push(TextCase {
            name: name.into(),
            text: prompt.text("text")?.into(),
            greedy_text: prompt.text("greedy_text")?.into(),
            margins: margins.clone(),
            stop: prompt.find("first_stop").and_then(|n| n.value.as_u64()).map(|n| n as usize),
        });
        cases.push(Case {
            name: name.into(),
            ids: prompt.ids("token_ids")?,
            logits: floats(&dir.join(prompt.text("logits_file")?), rows as usize * vocab)?,
            greedy_ids: prompt.ids("greedy_ids")?,
            margins,
            greedy_logits: None,
        });
    }
    checked(Reference { name: String::new(), dir: PathBuf::new(), vocab, cases, texts, eos: None }, top.file)
}

/// What the checks rely on.
fn checked(reference: Reference, file: &Path) -> Result<Reference> {
    let whole = |c: &Case| {
        let rows = c.logits.len() / reference.vocab.max(1);
        !c.ids.is_empty() && (1..=c.ids.len()).contains(&rows) && c.margins.len() == c.greedy_ids.len()
    };
    if reference.vocab == 0 || reference.cases.is_empty() {
        return Err(Error::at(file, "no prompts"));
    }
    match reference.cases.iter().find(|c| !whole(c)) {
        Some(case) => Err(Error::at(file, format!("prompt `{}`: lengths do not agree", case.name))),
        None => Ok(reference),
    }
}

/// A file of exactly `count` little-endian f32.
pub fn floats(file: &Path, count: usize) -> Result<Vec<f32>> {
    let bytes = std::fs::read(file).map_err(|e| Error::at(file, e))?;
    if bytes.len() != 4 * count {
        return Err(Error::at(file, format!("{} bytes instead of {}", bytes.len(), 4 * count)));
    }
    Ok(to_floats(&bytes))
}

pub fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
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
