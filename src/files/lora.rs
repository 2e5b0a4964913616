//! LoRA adapters: pairs of small matrices, whose products are added to a model's matrices. PEFT writes a safetensors
//! file with an `adapter_config.json` beside it, llama.cpp a GGUF file.
//!
//! Files are untrusted: when an adapter is opened, its factors are pairs of matrices of one rank with finite values. To
//! fit the model is checked where they are added.

mod peft;

use crate::source::gguf::value::Value;
use crate::source::gguf::{Gguf, GgufTensor, is_gguf};
use crate::source::hash_parts;
use crate::{Error, Result, hf_cache};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Location of an adapter, and a factor of what it adds.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraFile {
    /// PEFT's directory or safetensors file, a GGUF file, or `org/name` in the Hugging Face cache.
    pub path: PathBuf,
    pub scale: f32,
}

impl From<&str> for LoraFile {
    /// Splits `FILE` or `FILE:SCALE`.
    fn from(text: &str) -> Self {
        let scaled = text.rsplit_once(':').and_then(|(path, scale)| Some((path, scale.parse().ok()?)));
        let (path, scale) = scaled.unwrap_or((text, 1.0));
        Self { path: path.into(), scale }
    }
}

/// An opened adapter.
#[derive(Debug)]
pub struct LoraAdapter {
    pub file: PathBuf,
    /// The `general.architecture` of a GGUF file, whose tensors have GGUF's names and order of rows; `None` for PEFT's.
    pub gguf_architecture: Option<String>,
    /// By the name of the matrix that the product is added to, as in a checkpoint of the file's kind.
    pub pairs: BTreeMap<String, LoraPair>,
    /// An identifier of the content and of all scales.
    pub fingerprint: String,
    /// Name and scale, for people.
    pub label: String,
}

/// The factors of `scale * b * a`.
#[derive(Debug, Clone)]
pub struct LoraPair {
    /// `[rank][cols]`
    pub a: GgufTensor,
    /// `[rows][rank]`
    pub b: GgufTensor,
    pub scale: f32,
}

/// Factors by the name of their matrix: a, then b.
type Factors = BTreeMap<String, [Option<GgufTensor>; 2]>;

/// The remedy for what cannot be added.
const MERGE: &str = "merge the adapter into its model with PEFT (merge_and_unload) and give that";

impl LoraAdapter {
    /// Opens an adapter.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`]: the scale is not finite. [`Error::Model`]: it cannot be read, is damaged or of another kind.
    pub fn open(given: &LoraFile) -> Result<Self> {
        let LoraFile { path, scale } = given;
        if !scale.is_finite() {
            let remedy = "use FILE:SCALE with a finite number, such as 0.5";
            return Err(Error::Usage(format!("`EngineOptions::lora` {}:{scale}: {remedy}", path.display())));
        }
        let path = hf_cache::resolve_model(path)?;
        fs::metadata(&path).map_err(|e| {
            let remedy = "give `EngineOptions::lora` the directory or file of an adapter";
            Error::model(&path, format!("cannot be read: {e}; {remedy}"))
        })?;
        let content =
            if is_gguf(&path) { open_gguf(&path, *scale)? } else { peft::open_peft(&path, *scale)? };
        let AdapterContent { file, gguf_architecture, hash, pairs } = content;
        if pairs.is_empty() {
            return Err(Error::model(&file, "holds no factors of matrices; give another adapter"));
        }
        let scales: Vec<[u8; 4]> = pairs.values().map(|pair| pair.scale.to_le_bytes()).collect();
        let fingerprint = hash_parts([hash.as_bytes(), scales.as_flattened()]);
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        Ok(Self { file, gguf_architecture, pairs, fingerprint, label: format!("{name}:{scale}") })
    }
}

/// Fields of a [`LoraAdapter`], with the hash of its file.
struct AdapterContent {
    file: PathBuf,
    gguf_architecture: Option<String>,
    hash: String,
    pairs: BTreeMap<String, LoraPair>,
}

/// Opens an adapter of llama.cpp.
fn open_gguf(path: &Path, scale: f32) -> Result<AdapterContent> {
    let gguf = Gguf::open(path)?;
    let err = |why: String| Error::model(path, why);
    let metadata = gguf.metadata();
    for (key, want) in [("general.type", "adapter"), ("adapter.type", "lora")] {
        if metadata.get_str(key).map_err(err)? != Some(want) {
            let found = metadata.get(key).map_or("missing".into(), Value::to_string);
            return Err(err(format!(
                "metadata \"{key}\" is {found}; supported: \"{want}\"; give a LoRA adapter"
            )));
        }
    }
    if let Some(tokens) = metadata.get("adapter.alora.invocation_tokens") {
        let what = "adapters that begin at some tokens are not supported";
        return Err(err(format!("metadata \"adapter.alora.invocation_tokens\" is {tokens}; {what}")));
    }
    let alpha = match metadata.get("adapter.lora.alpha") {
        None => 0.0,
        Some(Value::F32(alpha)) => f64::from(*alpha),
        Some(found) => {
            return Err(err(format!("metadata \"adapter.lora.alpha\" is {found}; supported: an f32")));
        }
    };
    let mut factors = Factors::new();
    for tensor in gguf.tensors() {
        let parts = [".lora_a", ".lora_b"].map(|end| tensor.name.strip_suffix(end));
        put_factor(&mut factors, path, tensor.clone(), parts)?;
    }
    // Without alpha, the product counts as it is.
    let scale_of = |_: &str, rank: usize| Ok(if alpha == 0.0 { 1.0 } else { alpha / rank as f64 });
    let architecture = metadata.get_str("general.architecture").map_err(err)?.unwrap_or_default();
    Ok(AdapterContent {
        file: path.into(),
        gguf_architecture: Some(architecture.into()),
        hash: gguf.fingerprint(),
        pairs: pair_factors(path, factors, scale, scale_of)?,
    })
}

/// Adds a factor, whose matrix one of `[a, b]` names.
fn put_factor(
    factors: &mut Factors,
    file: &Path,
    tensor: GgufTensor,
    names: [Option<&str>; 2],
) -> Result<()> {
    let found = names.into_iter().enumerate().find_map(|(i, name)| Some((i, name?.to_owned())));
    let Some((i, name)) = found else {
        let what = "is no factor of a matrix (lora_A, lora_B), which alone are supported";
        return Err(Error::model(file, format!("tensor {} {what}; {MERGE}", tensor.name)));
    };
    factors.entry(name).or_default()[i] = Some(tensor);
    Ok(())
}

/// Checks factors and computes their scales: `scale` times that of a matrix with this name and rank.
fn pair_factors(
    file: &Path,
    factors: Factors,
    scale: f32,
    scale_of: impl Fn(&str, usize) -> Result<f64>,
) -> Result<BTreeMap<String, LoraPair>> {
    let pair = |(name, factors): (String, [Option<GgufTensor>; 2])| {
        let err = |why: String| Error::model(file, format!("adapter of {name}: {why}; give a whole adapter"));
        let [Some(a), Some(b)] = factors else {
            return Err(err("only one of its two factors is there".into()));
        };
        let (&[rank, _], &[_, b_rank]) = (&a.shape[..], &b.shape[..]) else {
            return Err(err(format!(
                "its factors have shapes {:?} and {:?}, not of matrices",
                a.shape, b.shape
            )));
        };
        if rank != b_rank || rank == 0 {
            return Err(err(format!(
                "its factors have shapes {:?} and {:?}, of two ranks",
                a.shape, b.shape
            )));
        }
        for tensor in [&a, &b] {
            if let Some(i) = tensor.to_f32().iter().position(|x| !x.is_finite()) {
                return Err(err(format!("element {i} of tensor {} is NaN or infinite", tensor.name)));
            }
            tensor.data.release_pages();
        }
        let found = scale_of(&name, rank)? * f64::from(scale);
        if !(found as f32).is_finite() {
            return Err(err(format!("its scale is {found}, not a finite f32")));
        }
        Ok((name, LoraPair { a, b, scale: found as f32 }))
    };
    factors.into_iter().map(pair).collect()
}
