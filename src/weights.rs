//! A model's weights: one table of names and shapes, three ways to fill it.
//!
//! Hugging Face safetensors are read in place; matrices are quantised to Q4_0 and packed in parallel, or
//! used as they are (`f32`). A packed file (`antigravity pack`) is mapped: no copy, no conversion.

pub mod pack;
#[allow(unsafe_code)]
pub mod region;
pub mod source;

use crate::config::ModelConfig;
use crate::dims::*;
use crate::error::{Error, Result};
use crate::quant::BLOCK;
use crate::quant::packed::Packed;
use region::Plane;
use source::{Dtype, Source, Tensor};
use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// What matrices become when a model is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightType {
    /// Quantised to Q4_0 where rows are whole blocks.
    Q4_0,
    /// Used as stored, computed in f32.
    F32,
}

impl FromStr for WeightType {
    type Err = Error;

    fn from_str(s: &str) -> Result<Self> {
        match s {
            "q4_0" | "q4" => Ok(WeightType::Q4_0),
            "f32" => Ok(WeightType::F32),
            other => Err(Error::Usage(format!("--weight-type {other}: use q4_0 or f32"))),
        }
    }
}

/// What a tensor of the table is for, which decides how it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Looked up by row; stays as stored.
    Embedding,
    /// Multiplied with; may be quantised.
    Matrix,
    /// A norm's weight or a bias; widened to f32.
    Vector,
}

/// One tensor of the model.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Name in the engine and in packed files.
    pub name: String,
    /// Name in the checkpoint (a tied head reads the embedding).
    pub stored_as: String,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Use.
    pub role: Role,
}

impl Spec {
    /// Whether `--weight-type q4_0` quantises this tensor.
    pub fn quantises(&self) -> bool {
        self.role == Role::Matrix && self.cols.is_multiple_of(BLOCK)
    }

    /// Bytes of the quants plane once packed.
    pub fn quants_len(&self) -> usize {
        self.rows.div_ceil(16) * (self.cols / BLOCK) * crate::quant::packed::QUANT_BYTES
    }

    /// Bytes of the scales plane once packed.
    pub fn scales_len(&self) -> usize {
        self.rows.div_ceil(16) * (self.cols / BLOCK) * crate::quant::packed::SCALE_BYTES
    }
}

/// Names and shapes of every tensor of the baked model, in the order of a forward pass.
pub fn table() -> Vec<Spec> {
    let mut specs = Vec::new();
    let mut put = |name: String, rows: usize, cols: usize, role: Role| {
        let stored_as = if name == HEAD && TIED { EMBED.to_string() } else { name.clone() };
        specs.push(Spec { name, stored_as, rows, cols, role });
    };
    put(EMBED.into(), VOCAB, DIM, Role::Embedding);
    for l in 0..LAYERS {
        let at = |s: &str| format!("model.layers.{l}.{s}");
        put(at("input_layernorm.weight"), 1, DIM, Role::Vector);
        for (part, rows) in [("q", Q_DIM), ("k", KV_DIM), ("v", KV_DIM)] {
            put(at(&format!("self_attn.{part}_proj.weight")), rows, DIM, Role::Matrix);
            if QKV_BIAS {
                put(at(&format!("self_attn.{part}_proj.bias")), 1, rows, Role::Vector);
            }
        }
        if QK_NORM {
            put(at("self_attn.q_norm.weight"), 1, HEAD_DIM, Role::Vector);
            put(at("self_attn.k_norm.weight"), 1, HEAD_DIM, Role::Vector);
        }
        put(at("self_attn.o_proj.weight"), DIM, Q_DIM, Role::Matrix);
        if O_BIAS {
            put(at("self_attn.o_proj.bias"), 1, DIM, Role::Vector);
        }
        put(at("post_attention_layernorm.weight"), 1, DIM, Role::Vector);
        put(at("mlp.gate_proj.weight"), FFN_DIM, DIM, Role::Matrix);
        put(at("mlp.up_proj.weight"), FFN_DIM, DIM, Role::Matrix);
        put(at("mlp.down_proj.weight"), DIM, FFN_DIM, Role::Matrix);
    }
    put("model.norm.weight".into(), 1, DIM, Role::Vector);
    put(HEAD.into(), VOCAB, DIM, Role::Matrix);
    specs
}

const EMBED: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// A matrix that is multiplied with.
pub enum Matrix<const ROWS: usize, const COLS: usize> {
    /// Q4_0 in the packed layout.
    Q4(Packed<ROWS, COLS>),
    /// Row-major, as stored.
    Dense {
        /// Element type.
        dtype: Dtype,
        /// `[ROWS][COLS]`
        data: Plane,
    },
}

impl<const ROWS: usize, const COLS: usize> Matrix<ROWS, COLS> {
    /// True for Q4_0.
    pub fn is_quantised(&self) -> bool {
        matches!(self, Matrix::Q4(_))
    }
}

/// The embedding matrix: `[VOCAB][DIM]` as stored.
pub struct Embedding {
    dtype: Dtype,
    data: Plane,
}

impl Embedding {
    /// Element type.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Bytes of one token's row.
    pub fn row(&self, token: usize) -> &[u8] {
        let len = DIM * self.dtype.size();
        &self.data.bytes()[token * len..][..len]
    }
}

/// One transformer block. Biases and norms that the model lacks are empty.
#[allow(missing_docs, reason = "the field names are the steps' names")]
pub struct Layer {
    pub attn_norm: Vec<f32>,
    pub wq: Matrix<Q_DIM, DIM>,
    pub wk: Matrix<KV_DIM, DIM>,
    pub wv: Matrix<KV_DIM, DIM>,
    pub q_bias: Vec<f32>,
    pub k_bias: Vec<f32>,
    pub v_bias: Vec<f32>,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    pub wo: Matrix<DIM, Q_DIM>,
    pub o_bias: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    pub gate: Matrix<FFN_DIM, DIM>,
    pub up: Matrix<FFN_DIM, DIM>,
    pub down: Matrix<DIM, FFN_DIM>,
}

/// All weights of the baked model.
pub struct Weights {
    /// Token embeddings.
    pub embed: Embedding,
    /// Transformer blocks.
    pub layers: Vec<Layer>,
    /// Final norm.
    pub norm: Vec<f32>,
    /// Output projection.
    pub head: Matrix<VOCAB, DIM>,
    /// Bytes that every decoded token reads.
    pub bytes_per_token: usize,
    /// Identifies the checkpoint these weights came from.
    pub fingerprint: String,
}

/// One tensor, loaded.
pub(crate) enum Loaded {
    Q4 { quants: Plane, scales: Plane },
    Dense { dtype: Dtype, data: Plane },
    Vector(Vec<f32>),
}

/// How loading is told of.
pub struct LoadOptions<'a> {
    /// What matrices become.
    pub weight_type: WeightType,
    /// Threads for packing.
    pub threads: usize,
    /// Called with the tensors done and all tensors.
    pub progress: &'a (dyn Fn(usize, usize) + Sync),
}

/// Where a model's files are.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelPath {
    /// Directory of `config.json` and the tokenizer.
    pub dir: PathBuf,
    /// What [`Source::open`] takes.
    pub weights: PathBuf,
}

/// File name that `antigravity pack` writes by default and that a directory is searched for.
pub const PACKED_NAME: &str = "model.packed.safetensors";

impl ModelPath {
    /// A directory, a `.safetensors` file or a packed file.
    pub fn new(path: &Path) -> Result<Self> {
        let meta = std::fs::metadata(path).map_err(|e| {
            Error::model(path, format!("{e}; give --model-path a model directory or a .safetensors file"))
        })?;
        if meta.is_dir() {
            return Ok(Self { dir: path.into(), weights: path.into() });
        }
        let dir = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Ok(Self { dir: dir.into(), weights: path.into() })
    }

    /// Opens the weights: in a directory, the packed file where it belongs to the checkpoint beside it
    /// (or where there is none), else the checkpoint.
    pub fn open(&self, weight_type: WeightType) -> Result<Source> {
        let packed = self.weights.join(PACKED_NAME);
        if !self.weights.is_dir() || !packed.is_file() {
            return Source::open(&self.weights);
        }
        let checkpoint = ["model.safetensors", "model.safetensors.index.json"];
        if !checkpoint.iter().any(|file| self.weights.join(file).exists()) {
            return Source::open(&packed);
        }
        let source = Source::open(&self.weights)?;
        if weight_type == WeightType::F32 {
            return Ok(source);
        }
        let packed = Source::open(&packed)?;
        let fresh = pack::layout_version(&packed) == Some(pack::LAYOUT)
            && packed.metadata().get("source") == Some(&source.fingerprint());
        Ok(if fresh { packed } else { source })
    }
}

/// Compares a model's config with the baked one.
pub fn check_config(file: &Path, text: &str) -> Result<()> {
    let found = ModelConfig::parse(text).map_err(|e| Error::model(file, e))?;
    match baked().difference(&found) {
        None => Ok(()),
        Some((field, here, there)) => {
            let dir = file.parent().unwrap_or(Path::new("."));
            let dir = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.into());
            Err(Error::model(
                file,
                format!(
                    "{field} is {there}, but this program was built for {MODEL} with {here}; \
                     rebuild: ANTIGRAVITY_MODEL={} cargo build --release",
                    dir.display()
                ),
            ))
        }
    }
}

impl Weights {
    /// Loads the model that `path` names, after comparing its config with the baked one.
    pub fn load(path: &ModelPath, options: &LoadOptions<'_>) -> Result<Self> {
        let source = path.open(options.weight_type)?;
        let config = path.dir.join("config.json");
        if config.exists() || pack::layout_version(&source).is_none() {
            check_config(&config, &read_text(&config)?)?;
        }
        if pack::layout_version(&source).is_none() {
            return Self::from_checkpoint(&source, options);
        }
        if options.weight_type == WeightType::F32 {
            return Err(Error::Usage(format!(
                "--weight-type f32: {} is packed as q4_0; give the checkpoint it was packed from",
                source.path().display()
            )));
        }
        pack::read(&source)
    }

    fn from_checkpoint(source: &Source, options: &LoadOptions<'_>) -> Result<Self> {
        let specs = table();
        let mut loaded = HashMap::with_capacity(specs.len());
        for (i, spec) in specs.iter().enumerate() {
            (options.progress)(i, specs.len());
            loaded.insert(spec.name.clone(), load_one(source, spec, options)?);
        }
        (options.progress)(specs.len(), specs.len());
        Assembly { loaded, file: source.path().into() }.assemble(source.fingerprint())
    }
}

/// Reads a small text file that a person may have broken.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    const LIMIT: u64 = 16 << 20;
    let meta = std::fs::metadata(path).map_err(|e| Error::model(path, format!("cannot read: {e}")))?;
    if !meta.is_file() {
        return Err(Error::model(path, "is not a regular file"));
    }
    if meta.len() > LIMIT {
        return Err(Error::model(path, format!("is {} bytes long; at most {LIMIT} are read", meta.len())));
    }
    std::fs::read_to_string(path).map_err(|e| Error::model(path, format!("cannot read: {e}")))
}

/// The stored tensor of a spec, shape and type checked.
fn find<'a>(source: &'a Source, spec: &Spec) -> Result<&'a Tensor> {
    let file = source.path();
    if spec.name == HEAD && !TIED && source.get(HEAD).is_none() {
        let hint = "if the embedding serves as the head, config.json must say tie_word_embeddings: true";
        return Err(Error::model(file, format!("tensor {HEAD} is missing; {hint}")));
    }
    let tensor = source.require(&spec.stored_as)?;
    let want: &[usize] = if spec.role == Role::Vector { &[spec.cols] } else { &[spec.rows, spec.cols] };
    if tensor.shape != want {
        return Err(Error::model(
            &tensor.file,
            format!("tensor {} has shape {:?}; config.json makes it {want:?}", spec.stored_as, tensor.shape),
        ));
    }
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
        return Err(Error::model(
            &tensor.file,
            format!("tensor {} has type {:?}; supported: F32, F16, BF16", spec.stored_as, tensor.dtype),
        ));
    }
    Ok(tensor)
}

/// Loads, and where wanted quantises, one tensor of a checkpoint.
pub(crate) fn load_one(source: &Source, spec: &Spec, options: &LoadOptions<'_>) -> Result<Loaded> {
    let tensor = find(source, spec)?;
    match spec.role {
        Role::Vector => {
            let values = tensor.dtype.to_f32(tensor.data.bytes());
            if let Some(i) = values.iter().position(|x| !x.is_finite()) {
                let message = format!("tensor {}: element {i} is {}", spec.stored_as, values[i]);
                return Err(Error::model(&tensor.file, message));
            }
            Ok(Loaded::Vector(values))
        }
        Role::Matrix if options.weight_type == WeightType::Q4_0 && spec.quantises() => {
            let (quants, scales) = pack::quantise(tensor, spec, options.threads)?;
            tensor.data.release();
            Ok(Loaded::Q4 { quants, scales })
        }
        _ => Ok(Loaded::Dense { dtype: tensor.dtype, data: tensor.data.clone() }),
    }
}

/// Loaded tensors on their way into typed places.
pub(crate) struct Assembly {
    pub loaded: HashMap<String, Loaded>,
    pub file: PathBuf,
}

impl Assembly {
    fn matrix<const ROWS: usize, const COLS: usize>(&mut self, name: &str) -> Result<Matrix<ROWS, COLS>> {
        match self.loaded.remove(name) {
            Some(Loaded::Q4 { quants, scales }) => Packed::new(quants, scales).map(Matrix::Q4),
            Some(Loaded::Dense { dtype, data }) if data.bytes().len() == ROWS * COLS * dtype.size() => {
                Some(Matrix::Dense { dtype, data })
            }
            _ => None,
        }
        .ok_or_else(|| {
            Error::model(&self.file, format!("tensor {name} does not hold {ROWS} x {COLS} weights"))
        })
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>> {
        match self.loaded.remove(name) {
            Some(Loaded::Vector(v)) => Ok(v),
            None => Ok(Vec::new()),
            Some(_) => Err(Error::model(&self.file, format!("tensor {name} is not a vector"))),
        }
    }

    pub fn assemble(mut self, fingerprint: String) -> Result<Weights> {
        let embed = match self.loaded.remove(EMBED) {
            Some(Loaded::Dense { dtype, data }) if data.bytes().len() == VOCAB * DIM * dtype.size() => {
                Embedding { dtype, data }
            }
            _ => return Err(Error::model(&self.file, format!("tensor {EMBED} is not {VOCAB} x {DIM}"))),
        };
        let row = DIM * embed.dtype.size();
        let bytes_per_token = row
            + self
                .loaded
                .values()
                .map(|t| match t {
                    Loaded::Q4 { quants, scales } => quants.bytes().len() + scales.bytes().len(),
                    Loaded::Dense { data, .. } => data.bytes().len(),
                    Loaded::Vector(v) => 4 * v.len(),
                })
                .sum::<usize>();
        let layers = (0..LAYERS).map(|l| self.layer(l)).collect::<Result<_>>()?;
        let (norm, head) = (self.vector("model.norm.weight")?, self.matrix(HEAD)?);
        Ok(Weights { embed, layers, norm, head, bytes_per_token, fingerprint })
    }

    fn layer(&mut self, l: usize) -> Result<Layer> {
        let at = |s: &str| format!("model.layers.{l}.{s}");
        Ok(Layer {
            attn_norm: self.vector(&at("input_layernorm.weight"))?,
            wq: self.matrix(&at("self_attn.q_proj.weight"))?,
            wk: self.matrix(&at("self_attn.k_proj.weight"))?,
            wv: self.matrix(&at("self_attn.v_proj.weight"))?,
            q_bias: self.vector(&at("self_attn.q_proj.bias"))?,
            k_bias: self.vector(&at("self_attn.k_proj.bias"))?,
            v_bias: self.vector(&at("self_attn.v_proj.bias"))?,
            q_norm: self.vector(&at("self_attn.q_norm.weight"))?,
            k_norm: self.vector(&at("self_attn.k_norm.weight"))?,
            wo: self.matrix(&at("self_attn.o_proj.weight"))?,
            o_bias: self.vector(&at("self_attn.o_proj.bias"))?,
            ffn_norm: self.vector(&at("post_attention_layernorm.weight"))?,
            gate: self.matrix(&at("mlp.gate_proj.weight"))?,
            up: self.matrix(&at("mlp.up_proj.weight"))?,
            down: self.matrix(&at("mlp.down_proj.weight"))?,
        })
    }
}

impl fmt::Display for WeightType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WeightType::Q4_0 => "q4_0",
            WeightType::F32 => "f32",
        })
    }
}
