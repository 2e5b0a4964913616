//! Finds a model's files and selects which of them to read.

use super::checkpoint::Checkpoint;
use super::config::load_config;
use super::pack;
use super::weight_type::WeightType;
use files::file_range::FileRange;
use files::lora::LoraFile;
use files::model_dir::ModelDir;
use files::packed_file::{self, LAYOUT_VERSION, PACKED_NAME, key};
use files::source::gguf::{Gguf, find_only_gguf, is_gguf};
use files::source::path_exists;
use files::{Error, Result, bundle, hf_cache};
use std::fs;
use std::path::{Path, PathBuf};

/// Location of a model's files.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPath {
    /// Directory of the weights, `config.json` and the tokenizer, or the bundle that holds them.
    pub dir: PathBuf,
    /// Path for [`Checkpoint::open`].
    pub weights: PathBuf,
}

/// A model's files, opened once: the plan, the weights, the tokenizer and the chat template all read from here.
#[derive(Debug)]
pub struct OpenModel {
    pub path: ModelPath,
    /// The packed file if it is up to date, otherwise the checkpoint.
    pub checkpoint: Checkpoint,
    /// Type of the matrices; never [`WeightType::Auto`].
    pub weight_type: WeightType,
    /// See [`OpenModel::gguf`].
    packed_gguf: Option<Gguf>,
}

const TOKENIZER: &str = "tokenizer.json";
/// Files of which either makes a directory a safetensors model.
const CHECKPOINT: [&str; 2] = ["model.safetensors", "model.safetensors.index.json"];

/// Checks whether a directory has any of these files.
fn has_any<'a>(dir: &Path, files: impl IntoIterator<Item = &'a str>) -> Result<bool> {
    let found: Result<Vec<bool>> = files.into_iter().map(|file| path_exists(&dir.join(file))).collect();
    Ok(found?.contains(&true))
}

impl ModelPath {
    /// Accepts a directory, a `.safetensors` file, a packed file, a `.gguf` file or a bundle. A directory with one GGUF
    /// file and no safetensors stands for that file, a folder `models--org--name` of the Hugging Face cache for its
    /// snapshot.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: the path does not exist, or has several GGUF files.
    pub fn new(path: &Path) -> Result<Self> {
        let path = &hf_cache::resolve_snapshot(path);
        let range = FileRange::parse(path);
        if range.is_some() && !is_gguf(path) && bundle::find_mark(path).is_none() {
            let remedy = "give a GGUF file, or a bundle without a program";
            return Err(Error::model(path, format!("holds no model; {remedy}")));
        }
        let meta = fs::metadata(range.as_ref().map_or(path, |range| &range.file)).map_err(|e| {
            let remedy = "give `EngineOptions::model` a model directory, a .safetensors or a .gguf file";
            Error::model(path, format!("{e}; {remedy}"))
        })?;
        if bundle::find_mark(path).is_some() {
            // Files beside a bundle are ignored.
            return Ok(Self { dir: path.into(), weights: path.into() });
        }
        if !meta.is_dir() {
            let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            return Ok(Self { dir: dir.into(), weights: path.into() });
        }
        let safetensors = has_any(path, CHECKPOINT.into_iter().chain([PACKED_NAME]))?;
        let gguf = if safetensors { None } else { find_only_gguf(path)? };
        Ok(Self { dir: path.into(), weights: gguf.unwrap_or_else(|| path.into()) })
    }

    /// True if the model is a bundle.
    pub fn is_bundle(&self) -> bool {
        self.dir == self.weights && !self.dir.is_dir()
    }

    /// The text files beside the weights.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: a bundle is damaged.
    pub fn text_folder(&self) -> Result<ModelDir> {
        ModelDir::open(&self.dir)
    }

    /// Path of these weights' packed file, which need not exist: in the directory, or beside the GGUF file.
    pub fn packed_path(&self) -> Option<PathBuf> {
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
        self.open_with_adapters(weight_type, &[])
    }

    /// Opens the model with these weights and adapters.
    ///
    /// # Errors
    ///
    /// Errors of [`ModelPath::open`] and [`Checkpoint::with_adapters`].
    pub fn open_with_adapters(&self, weight_type: WeightType, adapters: &[LoraFile]) -> Result<OpenModel> {
        let checkpoint = self.open_weights(weight_type, adapters)?;
        // A tokenizer.json in the directory or bundle takes precedence over the packed file's metadata.
        let own_tokenizer = if self.is_bundle() {
            self.text_folder()?.file_size(TOKENIZER).is_some()
        } else {
            self.weights.is_dir() && path_exists(&self.weights.join(TOKENIZER))?
        };
        let packed = checkpoint.packed().filter(|_| !own_tokenizer);
        let packed_gguf = packed.map(packed_file::open_gguf_metadata).transpose()?.flatten();
        let weight_type = checkpoint.resolve_weight_type(weight_type);
        Ok(OpenModel { path: self.clone(), checkpoint, weight_type, packed_gguf })
    }

    /// Opens the packed file if it was made from the checkpoint beside it with this weight type and these adapters, or
    /// if there is no checkpoint; otherwise the checkpoint.
    fn open_weights(&self, weight_type: WeightType, adapters: &[LoraFile]) -> Result<Checkpoint> {
        let open = |path: &Path| Checkpoint::open(path)?.with_adapters(adapters);
        let Some(packed) = self.packed_path().filter(|packed| packed.is_file()) else {
            return open(&self.weights);
        };
        if self.weights.is_dir() && !has_any(&self.weights, CHECKPOINT)? {
            return open(&packed);
        }
        let checkpoint = open(&self.weights)?;
        let wanted = checkpoint.resolve_weight_type(weight_type);
        if wanted == WeightType::F32 {
            return Ok(checkpoint);
        }
        let found = Checkpoint::open(&packed)?;
        let fresh = found.packed().is_some_and(|packed| {
            packed_file::read_layout_version(packed) == Some(LAYOUT_VERSION)
                && packed.metadata().get(key::SOURCE) == Some(&checkpoint.fingerprint())
                && found.resolve_weight_type(WeightType::Auto) == wanted
        });
        Ok(if fresh { found } else { checkpoint })
    }
}

impl OpenModel {
    /// The GGUF metadata with tokenizer and chat template; `None` if these are files in the model's directory.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.checkpoint.gguf().or(self.packed_gguf.as_ref())
    }

    /// Compares the model's config with the baked one. A packed file holds a config of its own, so `config.json` may be
    /// missing beside it.
    ///
    /// # Errors
    ///
    /// [`Error::Model`]: it is missing, cannot be read, or differs.
    pub fn check_config(&self) -> Result<()> {
        if let Some(packed) = self.checkpoint.packed() {
            pack::check_packed(packed)?;
            if is_gguf(&self.path.weights) || !self.path.dir.join("config.json").exists() {
                return Ok(());
            }
        }
        load_config(&self.path.dir, &self.checkpoint).map(|_| ())
    }
}
