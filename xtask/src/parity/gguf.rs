//! GGUF files against reference results on their decoded weights: `tests/fixtures/gguf/logits.json`.
//!
//! With `--weight-type f32` the logits are held to [`TOLERANCE`](super::compare::TOLERANCE). As they are stored, blocks
//! are multiplied with activations of eight bits: what other engines measure for that on these lively little models
//! bounds the difference, and decides which greedy steps are sure.

use super::compare::{max_abs, wrong_steps};
use super::engine::{Engine, Variant};
use super::{FLOAT, Tally, reference, same_bits, steps, within};
use crate::error::{Error, Result};
use crate::json::{self, Node};
use crate::sh;
use std::path::PathBuf;

const NATIVE: &[&str] = &["--kv-type", "f32"];
/// Largest difference, and root mean square, of native logits.
const NATIVE_MAX: f32 = 0.8;
const NATIVE_RMS: f64 = 0.15;

/// One file and what is known of it.
pub struct File {
    pub model: String,
    pub path: PathBuf,
    vocab: usize,
    ids: Vec<u32>,
    logits: Vec<f32>,
    prompt: Vec<u32>,
    greedy_ids: Vec<u32>,
    margins: Vec<f64>,
}

/// All files that have reference results.
pub fn files() -> Result<Vec<File>> {
    let dir = sh::root().join("tests/fixtures/gguf");
    let list = dir.join("logits.json");
    let value = json::read(&list)?;
    let Some(entries) = value.as_object() else { return Err(Error::at(&list, "is not an object")) };
    let one = |(name, value): (&String, &serde_json::Value)| {
        let node = Node { file: &list, value };
        let (vocab, ids, greedy) = (node.size("vocab_size")?, node.ids("ids")?, node.get("greedy")?);
        Ok(File {
            model: node.text("model")?.into(),
            path: dir.join(name),
            logits: reference::floats(&dir.join(node.text("logits")?), ids.len() * vocab)?,
            vocab,
            ids,
            prompt: greedy.ids("ids")?,
            greedy_ids: greedy.ids("greedy_ids")?,
            margins: greedy.floats("top2_margin")?,
        })
    };
    entries.iter().map(one).collect()
}

/// Checks the files of one model with the program built for it.
pub fn check(engine: &Engine, model: &str) -> Result<Tally> {
    let mut tally = Tally::default();
    for file in files()?.iter().filter(|f| f.model == model) {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let of_file = engine.of(&file.path);
        tally.count(&name, exact(&of_file, file, &name));
        tally.count(&name, native(&of_file, file, &name));
        // The checkpoints that have such files are in BF16.
        if engine.has_checkpoint() && [".F32.gguf", ".BF16.gguf"].iter().any(|end| name.ends_with(end)) {
            tally.count(&name, same_as_checkpoint(engine, &of_file, file));
        }
    }
    Ok(tally)
}

fn logits(engine: &Engine, file: &File, ids: &[u32], flags: &[&str]) -> Result<Vec<f32>> {
    let bytes = engine.logits(ids, file.vocab, Variant { flags, ..Variant::default() })?;
    Ok(reference::to_floats(&bytes))
}

fn exact(engine: &Engine, file: &File, name: &str) -> Result<()> {
    within(name, &logits(engine, file, &file.ids, FLOAT)?, &file.logits, file.vocab).1
}

/// Where the values are the same, so are the logits.
fn same_as_checkpoint(checkpoint: &Engine, of_file: &Engine, file: &File) -> Result<()> {
    let variant = Variant { flags: FLOAT, ..Variant::default() };
    let [a, b] = [checkpoint, of_file].map(|engine| engine.logits(&file.ids, file.vocab, variant));
    same_bits(&a?, &b?, file.vocab, "from a GGUF file instead of the checkpoint")
}

fn native(engine: &Engine, file: &File, name: &str) -> Result<()> {
    let found = logits(engine, file, &file.ids, NATIVE)?;
    let off: Vec<f32> = found.iter().zip(&file.logits).map(|(a, b)| a - b).collect();
    let sum: f64 = off.iter().map(|x| f64::from(*x).powi(2)).sum();
    let (most, rms) = (max_abs(&off), (sum / off.len().max(1) as f64).sqrt());
    // Not the other way round, so that what is no number is refused.
    if !(most <= NATIVE_MAX && rms <= NATIVE_RMS && off.iter().all(|x| x.is_finite())) {
        let text = format!("{name}: native: differs by up to {most}, rms {rms}");
        return Err(Error::Failed(text));
    }
    let fed = file.greedy_ids.len().saturating_sub(1);
    let ids = [&file.prompt[..], &file.greedy_ids[..fed]].concat();
    let found = logits(engine, file, &ids, NATIVE)?;
    let found = &found[(file.prompt.len() - 1) * file.vocab..];
    steps(name, &wrong_steps(found, &file.greedy_ids, &file.margins, 2.0 * f64::from(NATIVE_MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_and_their_results_are_there() {
        let files = files().unwrap();
        assert!(files.iter().all(|f| f.path.is_file() && f.margins.len() == f.greedy_ids.len()));
        for model in ["m1-llama32-bf16", "m1k-llama32-h256", "m4-qwen2-bf16", "m4k-qwen2-h256"] {
            assert!(files.iter().any(|f| f.model == model), "{model}");
        }
    }
}
