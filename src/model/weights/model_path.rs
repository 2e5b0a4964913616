//! Where a model's files are, and whether they are of the model that this program was built for.

use super::checkpoint::{Checkpoint, is_gguf};
use super::{WeightType, pack, read_text};
use crate::dims::{MODEL, baked};
use files::config::ModelConfig;
use files::packed_file::{self, PACKED_NAME};
use files::source::gguf::Gguf;
use files::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Where a model's files are.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPath {
    /// Directory of `config.json` and the tokenizer, or of the GGUF file.
    pub dir: PathBuf,
    /// What [`Checkpoint::open`] takes.
    pub weights: PathBuf,
}

/// What makes a directory one of a safetensors model.
const CHECKPOINT: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

impl ModelPath {
    /// A directory, a `.safetensors` file, a packed file or a `.gguf` file. A directory of one GGUF file and no
    /// safetensors stands for that file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: there is nothing, or a choice of GGUF files.
    pub fn new(path: &Path) -> Result<Self> {
        let meta = fs::metadata(path).map_err(|e| {
            let remedy = "give --model-path a model directory, a .safetensors or a .gguf file";
            Error::model(path, format!("{e}; {remedy}"))
        })?;
        if meta.is_dir() {
            let weights = only_gguf(path)?.unwrap_or_else(|| path.into());
            return Ok(Self { dir: path.into(), weights });
        }
        let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(Self { dir: dir.into(), weights: path.into() })
    }

    /// Where the packed file of these weights is, or would be: in a directory, and beside a GGUF file.
    pub fn packed(&self) -> Option<PathBuf> {
        match is_gguf(&self.weights) {
            true => Some(self.weights.with_extension("gguf.packed.safetensors")),
            false => self.weights.is_dir().then(|| self.weights.join(PACKED_NAME)),
        }
    }

    /// Opens the weights: the packed file where it belongs to the checkpoint beside it and has this type of weights (or
    /// where there is no checkpoint), else the checkpoint.
    pub fn open(&self, weight_type: WeightType) -> Result<Checkpoint> {
        let Some(packed) = self.packed().filter(|packed| packed.is_file()) else {
            return Checkpoint::open(&self.weights);
        };
        if self.weights.is_dir() && !CHECKPOINT.iter().any(|file| self.weights.join(file).exists()) {
            return Checkpoint::open(&packed);
        }
        let checkpoint = Checkpoint::open(&self.weights)?;
        let wanted = checkpoint.settle(weight_type);
        if wanted == WeightType::F32 {
            return Ok(checkpoint);
        }
        let found = Checkpoint::open(&packed)?;
        let fresh = found.packed().is_some_and(|packed| {
            packed_file::layout_version(packed) == Some(packed_file::LAYOUT)
                && packed.metadata().get("source") == Some(&checkpoint.fingerprint())
                && pack::weight_type(packed) == wanted
        });
        Ok(if fresh { found } else { checkpoint })
    }

    /// Compares what says which model it is, a GGUF file's header or a `config.json`, with the baked model, and returns
    /// it as the text of a `config.json`; `None` where there is neither.
    pub fn config(&self) -> Result<Option<String>> {
        if is_gguf(&self.weights) {
            let gguf = Gguf::open(&self.weights)?;
            return checked_gguf(&gguf).map(Some);
        }
        let file = self.dir.join("config.json");
        if !file.exists() {
            return Ok(None);
        }
        let text = read_text(&file)?;
        check_config(&file, &text)?;
        Ok(Some(text))
    }

    /// [`ModelPath::config`] of a checkpoint that was opened here; one that is not packed needs it.
    pub(super) fn config_of(&self, checkpoint: &Checkpoint) -> Result<()> {
        match checkpoint {
            Checkpoint::Gguf(gguf) => checked_gguf(gguf).map(|_| ()),
            Checkpoint::Safetensors(_) if is_gguf(&self.weights) => Ok(()), // packed, with a config of its own
            Checkpoint::Safetensors(_) => match self.config()? {
                None if checkpoint.packed().is_none() => {
                    let file = self.dir.join("config.json");
                    read_text(&file).and_then(|text| check_config(&file, &text))
                }
                _ => Ok(()),
            },
        }
    }
}

/// The one GGUF file of a directory that has no safetensors model.
fn only_gguf(dir: &Path) -> Result<Option<PathBuf>> {
    if CHECKPOINT.into_iter().chain([PACKED_NAME]).any(|file| fs::symlink_metadata(dir.join(file)).is_ok()) {
        return Ok(None);
    }
    let entries = fs::read_dir(dir).map_err(|e| Error::model(dir, format!("cannot be read: {e}")))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| is_gguf(p)).collect();
    found.sort();
    match found.len() {
        0 | 1 => Ok(found.pop()),
        n => {
            const SHOWN: usize = 5;
            let names = found.iter().take(SHOWN).filter_map(|p| Some(p.file_name()?.to_string_lossy()));
            let names: Vec<_> = names.map(|name| files::source::quoted(&name)).collect();
            let more = if n > SHOWN { ", …" } else { "" };
            let message = format!("has {n} GGUF files: {}{more}; name one of them", names.join(", "));
            Err(Error::model(dir, message))
        }
    }
}

fn checked_gguf(gguf: &Gguf) -> Result<String> {
    let config = gguf.config()?;
    compare(gguf.path(), gguf.path(), &config)?;
    Ok(config.to_json())
}

/// Compares a model's config with the baked one.
pub fn check_config(file: &Path, text: &str) -> Result<()> {
    let found = ModelConfig::parse(text).map_err(|e| Error::model(file, e))?;
    compare(file, file.parent().unwrap_or(Path::new(".")), &found)
}

/// The first difference to the baked model, found in `file`, with the build that `model` needs.
fn compare(file: &Path, model: &Path, found: &ModelConfig) -> Result<()> {
    let Some((field, here, there)) = baked().difference(found) else { return Ok(()) };
    let model = fs::canonicalize(model).unwrap_or_else(|_| model.into());
    Err(Error::model(
        file,
        format!(
            "{field} is {there}, but this program was built for {MODEL} with {here}; \
             rebuild: ANTIGRAVITY_MODEL={} cargo build --release",
            model.display()
        ),
    ))
}
