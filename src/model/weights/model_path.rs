//! Where a model's files are, and whether they are of the model that this program was built for.

use super::checkpoint::Checkpoint;
use super::weight_type::WeightType;
use crate::dims::{MODEL, baked};
use files::config::ModelConfig;
use files::packed_file::{self, LAYOUT, PACKED_NAME, key};
use files::source::gguf::{Gguf, is_gguf, only_gguf};
use files::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// Where a model's files are.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPath {
    /// Directory of the weights, `config.json` and the tokenizer.
    pub dir: PathBuf,
    /// What [`Checkpoint::open`] takes.
    pub weights: PathBuf,
}

/// A model's files, opened once: the plan, the weights, the tokenizer and the chat template all read from here.
#[derive(Debug)]
pub struct OpenModel {
    pub path: ModelPath,
    /// The packed file where it is fresh, otherwise the checkpoint.
    pub checkpoint: Checkpoint,
    /// What matrices become; never [`WeightType::Auto`].
    pub weight_type: WeightType,
    /// See [`OpenModel::gguf`].
    packed_gguf: Option<Gguf>,
}

/// Either of these makes a directory a safetensors model.
const CHECKPOINT: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

impl ModelPath {
    /// Takes a directory, a `.safetensors` file, a packed file or a `.gguf` file. A directory with one GGUF file and
    /// no safetensors stands for that file.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: nothing is there, or several GGUF files are.
    pub fn new(path: &Path) -> Result<Self> {
        let meta = fs::metadata(path).map_err(|e| {
            let remedy = "give --model-path a model directory, a .safetensors or a .gguf file";
            Error::model(path, format!("{e}; {remedy}"))
        })?;
        if !meta.is_dir() {
            let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            return Ok(Self { dir: dir.into(), weights: path.into() });
        }
        let there = |file: &str| fs::symlink_metadata(path.join(file)).is_ok();
        let safetensors = CHECKPOINT.into_iter().chain([PACKED_NAME]).any(there);
        let gguf = if safetensors { None } else { only_gguf(path)? };
        Ok(Self { dir: path.into(), weights: gguf.unwrap_or_else(|| path.into()) })
    }

    /// Where the packed file of these weights is, or would be: in the directory, or beside the GGUF file.
    pub fn packed(&self) -> Option<PathBuf> {
        if is_gguf(&self.weights) {
            return Some(self.weights.with_extension("gguf.packed.safetensors"));
        }
        self.weights.is_dir().then(|| self.weights.join(PACKED_NAME))
    }

    /// Opens the model with these weights.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: a file is missing or damaged.
    pub fn open(&self, weight_type: WeightType) -> Result<OpenModel> {
        let checkpoint = self.open_weights(weight_type)?;
        // In a directory, a tokenizer.json comes before what a packed file says.
        let own_tokenizer = self.weights.is_dir() && self.weights.join("tokenizer.json").exists();
        let packed = checkpoint.packed().filter(|_| !own_tokenizer);
        let packed_gguf = packed.map(packed_file::gguf).transpose()?.flatten();
        let weight_type = checkpoint.settle(weight_type);
        Ok(OpenModel { path: self.clone(), checkpoint, weight_type, packed_gguf })
    }

    /// The packed file if it was made from the checkpoint beside it with this type of weights, or if there is no
    /// checkpoint; otherwise the checkpoint.
    fn open_weights(&self, weight_type: WeightType) -> Result<Checkpoint> {
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
            packed_file::layout_version(packed) == Some(LAYOUT)
                && packed.metadata().get(key::SOURCE) == Some(&checkpoint.fingerprint())
                && found.settle(WeightType::Auto) == wanted
        });
        Ok(if fresh { found } else { checkpoint })
    }

    /// The text of the model's `config.json`, or the same made from a GGUF header; `None` where there is neither.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it cannot be read, or differs from the baked model.
    pub fn config(&self) -> Result<Option<String>> {
        if is_gguf(&self.weights) {
            return checked_gguf(&Gguf::open(&self.weights)?).map(Some);
        }
        let file = self.dir.join("config.json");
        if !file.exists() {
            return Ok(None);
        }
        checked_file(&file).map(Some)
    }
}

impl OpenModel {
    /// The GGUF metadata that hold the tokenizer and the chat template; `None` where these are files in the model's
    /// directory.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.checkpoint.gguf().or(self.packed_gguf.as_ref())
    }

    /// Compares the model's config with the baked one. A packed file may come without a `config.json`: it holds a
    /// config of its own, which is checked when it is loaded.
    pub(super) fn check_config(&self) -> Result<()> {
        let file = self.path.dir.join("config.json");
        if let Checkpoint::Gguf(gguf) = &self.checkpoint {
            return checked_gguf(gguf).map(|_| ());
        }
        let optional = is_gguf(&self.path.weights) || (self.checkpoint.packed().is_some() && !file.exists());
        if optional { Ok(()) } else { checked_file(&file).map(|_| ()) }
    }
}

fn checked_gguf(gguf: &Gguf) -> Result<String> {
    let config = gguf.config()?;
    compare(gguf.path(), gguf.path(), &config)?;
    Ok(config.to_json())
}

fn checked_file(file: &Path) -> Result<String> {
    let text = read_text(file)?;
    check_config(file, &text)?;
    Ok(text)
}

/// Compares the text of a `config.json`, which is in `file`, with the baked model.
///
/// # Errors
///
/// [`Error::Model`]: the field that differs, both values and the command that rebuilds.
pub fn check_config(file: &Path, text: &str) -> Result<()> {
    let found = ModelConfig::parse(text).map_err(|e| Error::model(file, e))?;
    compare(file, file.parent().unwrap_or(Path::new(".")), &found)
}

/// Fails with the first difference from the baked model and the command that builds for `model`.
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

/// Reads a small text file.
///
/// # Errors
///
/// [`Error::Model`]: it cannot be read, is not a regular file or is too large.
pub fn read_text(path: &Path) -> Result<String> {
    const LIMIT: u64 = 16 << 20;
    let unreadable = |e| Error::model(path, format!("cannot read: {e}"));
    let meta = fs::metadata(path).map_err(unreadable)?;
    if !meta.is_file() {
        return Err(Error::model(path, "is not a regular file"));
    }
    if meta.len() > LIMIT {
        return Err(Error::model(path, format!("is {} bytes long; at most {LIMIT} are read", meta.len())));
    }
    fs::read_to_string(path).map_err(unreadable)
}
