//! GGUF files against reference results on their decoded weights: `tests/fixtures/gguf/logits.json`, and the files of one
//! model in every further block format where `ANTIGRAVITY_GGUF_FIXTURES` says.
//!
//! With `--weight-type f32` the logits are held to [`TOLERANCE`](super::compare::TOLERANCE). As they are stored, blocks
//! are multiplied with activations of eight bits: the difference that other engines have on these lively little models
//! bounds that of ours, and decides which greedy steps are sure.

use super::compare::{max_abs, wrong_steps};
use super::engine::{Engine, Variant};
use super::{FLOAT, check_same_bits, check_steps, check_within, opencl, reference};
use crate::error::{AtPath, Error, Result};
use crate::tally::Tally;
use crate::{command, json};
use files::config::ModelConfig;
use files::source::gguf::Gguf;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const STORED: &[&str] = &["--kv-type", "f32"];
/// Largest difference, and root mean square, of native logits.
const NATIVE: (f32, f64) = (1.0, 0.15);
/// Bounds for delta nets: where the values of a head cancel, its norm enlarges the rounding of activations, at one
/// position of m20's 32 to a difference of 5.7. With f32 activations there is none.
const NATIVE_DELTA: (f32, f64) = (6.0, 0.35);
/// Bounds for experts: where the rounding of activations leads to another choice, as at two of m23's 32 positions, the
/// logits move by two.
const NATIVE_EXPERTS: (f32, f64) = (2.5, 0.25);
/// Bounds for delta nets with experts: the state of m30 differs behind such a position.
const NATIVE_DELTA_EXPERTS: (f32, f64) = (13.0, 1.2);
/// Bounds for Mamba2 with experts, whose states remember a position with other experts: m25b's differ by up to 3.3 with
/// rounded activations, and not with those of f32.
const NATIVE_MAMBA_EXPERTS: (f32, f64) = (4.0, 0.4);
/// Bounds for embeddings of each layer, whose gates round activations twice more.
const NATIVE_PER_LAYER: (f32, f64) = (1.5, 0.15);

/// The reference results of one file.
#[derive(Deserialize)]
pub struct GgufFile {
    pub model: String,
    #[serde(skip)]
    pub path: PathBuf,
    vocab_size: usize,
    ids: Vec<u32>,
    logits: String,
    greedy: Greedy,
}

#[derive(Deserialize)]
struct Greedy {
    ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    top2_margin: Vec<f64>,
}

/// Model whose files have every block format, too large to be fixtures; their results are in `manifest.json`.
const ALL_FORMATS: &str = "m1q-llama-h256";

#[derive(Deserialize)]
struct Manifest {
    vocab_size: usize,
    files: Vec<ManifestFile>,
}

#[derive(Deserialize)]
struct ManifestFile {
    file: String,
    logits_prompt: ManifestLogits,
    greedy_prompt: Greedy,
}

#[derive(Deserialize)]
struct ManifestLogits {
    ids: Vec<u32>,
    file: String,
}

/// All files that have reference results.
pub fn files() -> Result<Vec<GgufFile>> {
    let dir = command::root().join("tests/fixtures/gguf");
    let entries: BTreeMap<String, GgufFile> = json::read(&dir.join("logits.json"))?;
    let mut files: Vec<_> =
        entries.into_iter().map(|(name, file)| GgufFile { path: dir.join(name), ..file }).collect();
    let Some(place) = std::env::var_os("ANTIGRAVITY_GGUF_FIXTURES") else { return Ok(files) };
    let dir = Path::new(&place).join(ALL_FORMATS);
    let Manifest { vocab_size, files: listed } = json::read(&dir.join("manifest.json"))?;
    files.extend(listed.into_iter().map(|file| GgufFile {
        model: ALL_FORMATS.into(),
        path: dir.join(file.file),
        vocab_size,
        ids: file.logits_prompt.ids,
        logits: file.logits_prompt.file,
        greedy: file.greedy_prompt,
    }));
    Ok(files)
}

impl GgufFile {
    /// True if the program for the checkpoint of its model runs it; `None` if there is no checkpoint. Falcon-H1's does not:
    /// in GGUF files the multipliers are part of the weights.
    pub fn fits_checkpoint(&self) -> Result<Option<bool>> {
        let fits =
            |[of_file, of_checkpoint]: [ModelConfig; 2]| of_checkpoint.find_difference(&of_file).is_none();
        Ok(self.configs()?.map(fits))
    }

    /// Its config, and that of the checkpoint of its model if there is one.
    fn configs(&self) -> Result<Option<[ModelConfig; 2]>> {
        let file = command::root().join("tests/fixtures/models").join(&self.model).join("config.json");
        let Ok(text) = fs::read_to_string(&file) else { return Ok(None) };
        let of_checkpoint = ModelConfig::parse(&text).at(&file)?;
        let of_file = Gguf::open(&self.path).and_then(|gguf| gguf.read_config());
        Ok(Some([of_file.map_err(|e| Error::Failed(e.to_string()))?, of_checkpoint]))
    }

    fn logits(&self, engine: &Engine, ids: &[u32], flags: &[&str]) -> Result<Vec<f32>> {
        engine.logits(ids, self.vocab_size, Variant::with(flags)).map(|bytes| reference::to_floats(&bytes))
    }

    fn check_exact(&self, engine: &Engine, name: &str) -> Result<()> {
        let file = self.path.with_file_name(&self.logits);
        let expected = reference::read_floats(&file, self.ids.len() * self.vocab_size)?;
        check_within(name, &self.logits(engine, &self.ids, FLOAT)?, &expected, self.vocab_size).1
    }

    /// The logits are the checkpoint's where the values are.
    fn check_checkpoint(&self, checkpoint: &Engine, engine: &Engine) -> Result<()> {
        let logits = |engine: &Engine| engine.logits(&self.ids, self.vocab_size, Variant::with(FLOAT));
        let what = "from a GGUF file instead of the checkpoint";
        check_same_bits(&logits(checkpoint)?, &logits(engine)?, self.vocab_size, what)
    }

    /// A packed file of it gives the same bits.
    fn check_packed(&self, engine: &Engine) -> Result<()> {
        let packed = engine.file("gguf.packed.safetensors");
        command::stdout(engine.command("pack").args(["--quiet", "--out"]).arg(&packed))?;
        let logits = |engine: &Engine| engine.logits(&self.ids, self.vocab_size, Variant::with(STORED));
        let found = logits(&engine.with_model(&packed))?;
        check_same_bits(&logits(engine)?, &found, self.vocab_size, "from a packed file of a GGUF file")
    }

    /// An OpenCL device gives the same bits.
    fn check_device(&self, engine: &Engine) -> Result<()> {
        let logits = |flags: &[&str]| engine.logits(&self.ids, self.vocab_size, Variant::with(flags));
        let on_device = opencl::DEVICE_FLAGS.iter().chain(STORED).copied().collect::<Vec<_>>();
        let [found, expected] = [logits(&on_device), logits(STORED)];
        match found {
            Err(Error::Failed(why)) if why.contains("OpenCL:") && std::env::var_os("CI").is_none() => {
                eprintln!("parity: {}: SKIPPED OpenCL: {why}", self.model);
                Ok(())
            }
            found => check_same_bits(&expected?, &found?, self.vocab_size, "on an OpenCL device"),
        }
    }

    fn check_native(&self, engine: &Engine, name: &str) -> Result<()> {
        let file = self.path.with_file_name(&self.logits);
        let expected = reference::read_floats(&file, self.ids.len() * self.vocab_size)?;
        let found = self.logits(engine, &self.ids, STORED)?;
        let (allowed_max, allowed_rms) = match &self.model {
            model if model.contains("qwen35moe") => NATIVE_DELTA_EXPERTS,
            model if model.contains("granite4h-moe") => NATIVE_MAMBA_EXPERTS,
            model if model.contains("moe") || model.contains("gptoss") => NATIVE_EXPERTS,
            model if model.contains("qwen35") => NATIVE_DELTA,
            model if model.contains("gemma4") => NATIVE_PER_LAYER,
            _ => NATIVE,
        };
        let off: Vec<f32> = found.iter().zip(&expected).map(|(a, b)| a - b).collect();
        let sum: f64 = off.iter().map(|x| f64::from(*x).powi(2)).sum();
        let (most, rms) = (max_abs(&off), (sum / off.len().max(1) as f64).sqrt());
        // Not the other way round, so that what is no number is refused.
        if !(most <= allowed_max && rms <= allowed_rms && off.iter().all(|x| x.is_finite())) {
            return Err(Error::Failed(format!("{name}: native: differs by up to {most}, rms {rms}")));
        }
        let Greedy { ids, greedy_ids, top2_margin } = &self.greedy;
        let fed = greedy_ids.len().saturating_sub(1);
        let found = self.logits(engine, &[&ids[..], &greedy_ids[..fed]].concat(), STORED)?;
        let found = &found[(ids.len() - 1) * self.vocab_size..];
        check_steps(name, &wrong_steps(found, greedy_ids, top2_margin, 2.0 * f64::from(allowed_max)))
    }
}

/// Checks the files of one model with the program built for it.
pub fn check(engine: &Engine, model: &str) -> Result<Tally> {
    let mut tally = Tally::default();
    for file in files()?.iter().filter(|f| f.model == model) {
        if engine.has_checkpoint() && file.fits_checkpoint()? == Some(false) {
            continue;
        }
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let of_file = engine.with_model(&file.path);
        tally.count_quietly(&name, file.check_exact(&of_file, &name));
        tally.count_quietly(&name, file.check_native(&of_file, &name));
        tally.count_quietly(&name, file.check_packed(&of_file));
        // Of Falcon-H1's the program is another than that for the checkpoint.
        if model == ALL_FORMATS || file.fits_checkpoint()? == Some(false) {
            tally.count_quietly(&name, file.check_device(&of_file));
        }
        // The checkpoints that have such files are in BF16.
        if engine.has_checkpoint() && [".F32.gguf", ".BF16.gguf"].iter().any(|end| name.ends_with(end)) {
            tally.count_quietly(&name, file.check_checkpoint(engine, &of_file));
        }
    }
    Ok(tally)
}
