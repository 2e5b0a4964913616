//! An opened model file of either kind: its tensors by the engine's names, and the adapters that are added to them.

use super::lora;
use super::mtp::{self, mtp_tensors};
use super::spec::{CheckpointPlace, EMBED, HEAD, TensorRole, TensorSpec, ValueMap, model_tensors};
use super::stored_tensor::{StoredForm, StoredTensor};
use super::weight_type::WeightType;
use crate::dims::{ARCH, CONV_CHANNELS, CONV_TAPS, EXPERTS, HAS_MTP, HEAD_DIM, TIED};
use files::blocks::{BLOCK, BlockType, Dtype};
use files::bundle::Bundle;
use files::config::Arch;
use files::lora::{LoraAdapter, LoraFile};
use files::packed_file::{self, key};
use files::source::gguf::names::{RowOrder, to_gguf_name};
use files::source::gguf::{self, Gguf, is_gguf};
use files::source::quantised::{Loss, QuantisedTensor};
use files::source::{Safetensors, Tensor, hash_parts};
use files::{Error, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// An opened model file, and adapters.
#[derive(Debug)]
pub struct Checkpoint {
    file: ModelFile,
    /// They fit the file.
    adapters: Vec<LoraAdapter>,
}

/// An opened file of either kind.
#[derive(Debug)]
pub enum ModelFile {
    /// Safetensors, in one file or in shards; also a packed file.
    Safetensors(Safetensors),
    Gguf(Gguf),
}

impl Checkpoint {
    /// Opens a `.gguf` file, a bundle, or anything that [`Safetensors::open`] takes.
    ///
    /// # Errors
    ///
    /// [`Error::Model`], one line.
    pub fn open(path: &Path) -> Result<Self> {
        let file = if is_gguf(path) {
            Gguf::open(path).map(ModelFile::Gguf)
        } else if let Some(bundle) = Bundle::open(path)? {
            bundle.open_model().map(ModelFile::Safetensors)
        } else {
            Safetensors::open(path).map(ModelFile::Safetensors)
        };
        Ok(Self { file: file?, adapters: Vec::new() })
    }

    /// Adds adapters to its matrices.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`]: it is packed, or a scale is not finite. [`Error::Model`]: an adapter cannot be read or does not
    /// fit.
    pub fn with_adapters(mut self, files: &[LoraFile]) -> Result<Self> {
        self.adapters = files.iter().map(LoraAdapter::open).collect::<Result<_>>()?;
        lora::check_adapters(&self, &self.adapters)?;
        Ok(self)
    }

    /// The file.
    pub fn model_file(&self) -> &ModelFile {
        &self.file
    }

    /// The adapters.
    pub fn added_adapters(&self) -> &[LoraAdapter] {
        &self.adapters
    }

    /// The opened file or directory.
    pub fn path(&self) -> &Path {
        match &self.file {
            ModelFile::Safetensors(source) => source.path(),
            ModelFile::Gguf(gguf) => gguf.path(),
        }
    }

    /// An identifier of the content and the adapters.
    pub fn fingerprint(&self) -> String {
        let file = match &self.file {
            ModelFile::Safetensors(source) => source.hash_files(),
            ModelFile::Gguf(gguf) => gguf.fingerprint(),
        };
        if self.adapters.is_empty() {
            return file;
        }
        hash_parts(
            [&file].into_iter().chain(self.adapters.iter().map(|a| &a.fingerprint)).map(|s| s.as_bytes()),
        )
    }

    /// Fingerprint of the checkpoint: for a packed file, of the one it was made from.
    pub fn source_fingerprint(&self) -> String {
        let source = self.packed().and_then(|packed| packed.metadata().get(key::SOURCE));
        source.cloned().unwrap_or_else(|| self.fingerprint())
    }

    /// The GGUF file, if it is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.file {
            ModelFile::Safetensors(_) => None,
            ModelFile::Gguf(gguf) => Some(gguf),
        }
    }

    /// The packed file, if it is one.
    pub fn packed(&self) -> Option<&Safetensors> {
        match &self.file {
            ModelFile::Safetensors(source) => packed_file::read_layout_version(source).map(|_| source),
            ModelFile::Gguf(_) => None,
        }
    }

    /// Resolves [`WeightType::Auto`] for this file; a packed file keeps its type.
    pub fn resolve_weight_type(&self, weight_type: WeightType) -> WeightType {
        match &self.file {
            _ if weight_type != WeightType::Auto => weight_type,
            ModelFile::Gguf(_) => WeightType::Native,
            ModelFile::Safetensors(source) => {
                let found = packed_file::read_weight_type(source).and_then(|name| name.parse().ok());
                let default =
                    if source.quant_method().is_some() { WeightType::Native } else { WeightType::Q4_0 };
                found.filter(|t| *t != WeightType::Auto).unwrap_or(default)
            }
        }
    }

    /// The model's tensors as this file has them, those of [`mtp_tensors`] if it has all. If the config ties the head to
    /// the embedding but the file has another head, the file's head is read. An adapter of the head leaves the embedding
    /// as it is.
    pub fn tensor_specs(&self) -> Vec<TensorSpec> {
        let mut specs = model_tensors();
        let own_head = TIED && self.packed().is_none() && self.has_own_head();
        let is_adapted = |spec: &TensorSpec| spec.name == HEAD && lora::is_adapted(&self.adapters, spec);
        if TIED && (own_head || specs.iter().any(is_adapted)) {
            for spec in specs.iter_mut().filter(|spec| spec.is_vocabulary()) {
                spec.tied = false;
                if own_head && spec.name == HEAD {
                    spec.stored.name = HEAD.into();
                }
            }
        }
        let mtp = if HAS_MTP && self.packed().is_none() { mtp_tensors() } else { Vec::new() };
        if mtp.iter().all(|spec| self.find_tensor(spec).is_ok()) {
            specs.extend(mtp);
        }
        specs
    }

    /// Says of a quantised checkpoint, in one line, how many tensors no block format holds exactly and why. `None` if
    /// there are none, or if all are quantised again.
    pub fn describe_losses(&self, weight_type: WeightType) -> Option<String> {
        let ModelFile::Safetensors(source) = &self.file else { return None };
        if source.quant_method().is_none() || self.resolve_weight_type(weight_type) != WeightType::Native {
            return None;
        }
        let mut losses: BTreeMap<Loss, usize> = BTreeMap::new();
        let loss_of = |spec| match self.find_tensor(spec).ok()?.form {
            StoredForm::Quantised(matrix, _) => matrix.loss,
            _ => None,
        };
        self.tensor_specs().iter().filter_map(loss_of).for_each(|loss| *losses.entry(loss).or_default() += 1);
        let reasons = losses.iter().map(|(loss, count)| format!("{count} {}", loss.describe()));
        let reasons = reasons.collect::<Vec<_>>().join(", ");
        let what = format!("warning: {}: no block format holds some tensors exactly", self.path().display());
        (!reasons.is_empty()).then(|| format!("{what}: {reasons}"))
    }

    /// True if it has an output head that differs from the embedding.
    pub fn has_own_head(&self) -> bool {
        let ModelFile::Safetensors(source) = &self.file else { return false };
        let embedding =
            model_tensors().into_iter().find(|spec| spec.name == EMBED).map(|spec| spec.stored.name);
        let tensors = embedding.and_then(|name| find_by_name(source, &name)).zip(find_by_name(source, HEAD));
        tensors.is_some_and(|(embedding, head)| {
            embedding.dtype != head.dtype || embedding.data.bytes() != head.data.bytes()
        })
    }

    /// Checks that a packed file has this weight type, which is not [`WeightType::Auto`].
    ///
    /// # Errors
    ///
    /// [`Error::Usage`]: it has another one.
    pub fn check_packed_as(&self, weight_type: WeightType) -> Result<()> {
        let found = self.resolve_weight_type(WeightType::Auto);
        if self.packed().is_none() || weight_type == found {
            return Ok(());
        }
        Err(Error::Usage(format!(
            "`EngineOptions::weight_type` {weight_type}: {} is packed as {found}; give the checkpoint it was packed from",
            self.path().display()
        )))
    }

    /// The stored tensor of a spec.
    ///
    /// # Errors
    ///
    /// [`Error::Model`] if it is missing, or has a wrong shape or type.
    pub fn find_tensor(&self, spec: &TensorSpec) -> Result<StoredTensor> {
        let mut stored = match &self.file {
            ModelFile::Safetensors(source) => of_source(source, spec)?,
            ModelFile::Gguf(gguf) => of_gguf(gguf, spec)?,
        };
        stored.deltas = lora::find_deltas(&self.adapters, spec);
        if spec.role == TensorRole::Vector && stored.element_type().is_none() {
            return Err(unsupported_type(&stored.file, &stored.name, &stored.block.name()));
        }
        Ok(stored)
    }
}

fn unsupported_type(file: &Path, name: &str, found: &str) -> Error {
    Error::model(file, format!("tensor {name} has type {found}; supported: F32, F16, BF16"))
}

/// Compares a tensor's shape with the one that the config asks for.
fn check_shape(spec: &TensorSpec, (file, name): (&Path, &str), found: &[usize], config: &str) -> Result<()> {
    let rows = spec.stored.of;
    let transposed = spec.is_transposed() && !is_gguf(file);
    let want = match spec.role {
        TensorRole::Vector if spec.is_expert() => vec![EXPERTS.count, rows / EXPERTS.count],
        TensorRole::Vector => vec![rows],
        _ if transposed => vec![spec.cols, rows],
        _ if spec.is_expert() => vec![EXPERTS.count, rows / EXPERTS.count, spec.cols],
        _ => vec![rows, spec.cols],
    };
    // By heads or groups in a GGUF file.
    let of_heads = spec.role == TensorRole::Vector && is_gguf(file) && spec.name.contains(".mamba.");
    if of_heads && !spec.is_conv() && found.iter().product::<usize>() == rows {
        return Ok(());
    }
    // `[channels][1][taps]`, in a GGUF file without the 1.
    let conv =
        spec.is_conv() && [&[CONV_CHANNELS, 1, CONV_TAPS][..], &[CONV_CHANNELS, CONV_TAPS]].contains(&found);
    if conv { Ok(()) } else { check_same_shape((file, name), found, &want, config) }
}

fn check_same_shape(
    (file, name): (&Path, &str),
    found: &[usize],
    want: &[usize],
    config: &str,
) -> Result<()> {
    if found == want {
        return Ok(());
    }
    Err(Error::model(file, format!("tensor {name} has shape {found:?}; {config} it {want:?}")))
}

/// Names that a file may have for a checkpoint's tensor: with or without the prefix that some families' files have,
/// another one of the gate in LFM3's files, and that of a tensor for two.
pub(super) fn names_in_files(name: &str) -> impl Iterator<Item = String> {
    let fused =
        ARCH.family().fused_names.iter().fold(name.to_owned(), |name, (from, to)| name.replace(from, to));
    let plain = [name.to_owned(), name.replace("self_attn.gate_proj", "self_attn.g_proj"), fused];
    plain.into_iter().flat_map(|name| {
        let replace =
            |(prefix, replaced): &(&str, &str)| Some(format!("{prefix}{}", name.strip_prefix(replaced)?));
        let others: Vec<String> = ARCH.family().prefixes.iter().filter_map(replace).collect();
        [name].into_iter().chain(others)
    })
}

/// Finds the matrix of a spec in a quantised checkpoint; `None` if it is not quantised.
fn find_quantised(source: &Safetensors, spec: &TensorSpec, name: &str) -> Result<Option<StoredTensor>> {
    if spec.role == TensorRole::Vector {
        return Ok(None);
    }
    let found = names_in_files(name)
        .find_map(|name| source.find_quantised(&name, (spec.stored.of, spec.cols)).transpose());
    let Some(found) = found.transpose()? else { return Ok(None) };
    let QuantisedTensor { codes, row_bytes, block, .. } = &found;
    if spec.is_transposed() && *row_bytes > 0 {
        let why = format!("tensor {}: quantised matrices are not read as {ARCH:?} stores them", codes.name);
        return Err(Error::model(&codes.file, format!("{why}; use GPTQ or an unquantised checkpoint")));
    }
    let stored = StoredTensor {
        name: codes.name.clone(),
        block: *block,
        order: spec.stored.order,
        map: ValueMap::Unchanged,
        parts: vec![codes.data.clone()],
        file: codes.file.clone(),
        row_bytes: *row_bytes,
        deltas: Vec::new(),
        form: StoredForm::Quantised(Arc::new(found), 0),
    };
    Ok(Some(stored.select_rows(spec)))
}

/// Finds a tensor by one of its [names](names_in_files).
fn find_by_name<'a>(source: &'a Safetensors, name: &str) -> Option<&'a Tensor> {
    names_in_files(name).find_map(|name| source.get(&name))
}

fn find_required<'a>(source: &'a Safetensors, name: &str) -> Result<&'a Tensor> {
    find_by_name(source, name).map_or_else(|| source.get_required(name), Ok)
}

/// Place of a gate or up, of which a family with [fused names](files::config::Family::fused_names) stores both as one.
fn place_in_fused(spec: &TensorSpec) -> Option<CheckpointPlace> {
    let halves = [("gate_proj", 0), ("up_proj", spec.rows)];
    let is_fused = !ARCH.family().fused_names.is_empty() && !spec.is_expert();
    let (_, first) = halves.into_iter().find(|(part, _)| is_fused && spec.name.contains(part))?;
    Some(CheckpointPlace { first, of: 2 * spec.rows, ..spec.stored.clone() })
}

fn of_source(source: &Safetensors, spec: &TensorSpec) -> Result<StoredTensor> {
    let spec = &match place_in_fused(spec) {
        Some(stored) => TensorSpec { stored, ..spec.clone() },
        None => spec.clone(),
    };
    let CheckpointPlace { name, .. } = &spec.stored;
    if let Some(quantised) = find_quantised(source, spec, name)? {
        return Ok(quantised);
    }
    if spec.name == HEAD && !TIED && find_by_name(source, HEAD).is_none() {
        let hint = "if the embedding serves as the head, config.json must say tie_word_embeddings: true";
        return Err(Error::model(source.path(), format!("tensor {HEAD} is missing; {hint}")));
    }
    if spec.is_expert() {
        return of_experts(source, spec);
    }
    let Tensor { name, dtype, shape, data, file } = find_required(source, name)?;
    check_shape(spec, (file, name), shape, "config.json makes")?;
    let block = dtype.block_type().ok_or_else(|| unsupported_type(file, name, &format!("{dtype:?}")))?;
    let stored = StoredTensor {
        name: name.clone(),
        block,
        order: spec.stored.order,
        form: if spec.is_transposed() { StoredForm::Transposed } else { StoredForm::Rows },
        map: spec.value_map(),
        parts: vec![data.clone()],
        file: file.clone(),
        row_bytes: block.row_bytes(spec.cols),
        deltas: Vec::new(),
    };
    Ok(stored.select_rows(spec))
}

/// Finds the rows, or biases, of all experts: in one tensor, which may have those of gate and up of each expert in turn,
/// or in a tensor for each expert.
fn of_experts(source: &Safetensors, spec: &TensorSpec) -> Result<StoredTensor> {
    let (config, is_bias) = ("config.json makes", spec.role == TensorRole::Vector);
    let rows = if is_bias { spec.cols } else { spec.rows } / EXPERTS.count;
    let pairs = ARCH == Arch::GptOss; // rows of gate and up alternate
    let (name, order) = fuse_gate_up(spec, if pairs { 1 } else { rows });
    let name = name.replace(".weight", "").replace(".bias", "_bias");
    let all = if order == RowOrder::Unchanged { rows } else { 2 * rows };
    let checked = |name: &str, want: &[usize]| {
        let tensor = find_required(source, name)?;
        check_same_shape((&tensor.file, name), &tensor.shape, want, config).map(|()| tensor)
    };
    let stored = |tensor: &Tensor, form: StoredForm, order: RowOrder| {
        let Tensor { name, dtype, file, data, .. } = tensor;
        let is_mxfp4 = matches!(form, StoredForm::Mxfp4 { .. });
        let block = if is_mxfp4 { Some(BlockType::MXFP4) } else { dtype.block_type() };
        let block = block.ok_or_else(|| unsupported_type(file, name, &format!("{dtype:?}")))?;
        let (map, row_bytes) = (ValueMap::Unchanged, block.row_bytes(spec.cols));
        let (name, parts, file) = (name.clone(), vec![data.clone()], file.clone());
        Ok(StoredTensor { name, block, order, form, map, parts, file, row_bytes, deltas: Vec::new() })
    };
    if find_by_name(source, &name).is_some() {
        let (want, form) = if is_bias {
            (vec![EXPERTS.count, all], StoredForm::Rows)
        } else if spec.is_transposed() {
            (vec![EXPERTS.count, spec.cols, all], StoredForm::Transposed)
        } else {
            (vec![EXPERTS.count, all, spec.cols], StoredForm::Rows)
        };
        return stored(checked(&name, &want)?, form, order);
    }
    if pairs {
        let blocks = spec.cols / BLOCK;
        let codes = checked(&format!("{name}_blocks"), &[EXPERTS.count, all, blocks, BLOCK / 2])?;
        let scales = checked(&format!("{name}_scales"), &[EXPERTS.count, all, blocks])?;
        if let Some(other) = [codes, scales].into_iter().find(|tensor| tensor.dtype != Dtype::U8) {
            return Err(unsupported_type(&other.file, &other.name, &format!("{:?}", other.dtype)));
        }
        return stored(codes, StoredForm::Mxfp4 { scales: scales.data.clone() }, order);
    }
    let of_expert = |expert: usize| {
        checked(&spec.stored.name.replace("experts.", &format!("experts.{expert}.")), &[rows, spec.cols])
    };
    let found = (0..EXPERTS.count).map(of_expert).collect::<Result<Vec<_>>>()?;
    let Tensor { name, dtype, .. } = found[0];
    if let Some(other) = found.iter().find(|tensor| tensor.dtype != *dtype) {
        let message = format!("tensor {} has type {:?}, but {name} has {dtype:?}", other.name, other.dtype);
        return Err(Error::model(&other.file, message));
    }
    let parts = found.iter().map(|tensor| tensor.data.clone()).collect();
    Ok(StoredTensor { parts, ..stored(found[0], StoredForm::Rows, RowOrder::Unchanged)? })
}

/// Name of the tensor with the rows, or biases, of all experts, and their order there: those of gate and up alternate,
/// `run` of each, in a tensor of both.
fn fuse_gate_up(spec: &TensorSpec, run: usize) -> (String, RowOrder) {
    for (part, name) in ["gate_proj", "up_proj"].into_iter().enumerate() {
        if spec.name.contains(name) {
            let fused = spec.name.replace(name, "gate_up_proj");
            let order = RowOrder::HeadPart { head_dim: run, part, parts: 2 };
            return (ARCH.checkpoint_name(&fused), order);
        }
    }
    (ARCH.checkpoint_name(&spec.name), RowOrder::Unchanged)
}

/// Name in GGUF files of the tensor of a spec whose checkpoint name is `plain`.
pub(super) fn gguf_name(spec: &TensorSpec, plain: &str) -> String {
    let plain = if mtp::is_tensor(&spec.name) {
        // Named after the engine's tensor; the gate has its rows among those of q.
        spec.name.replace("self_attn.gate_proj", "self_attn.q_proj")
    } else {
        plain.to_owned()
    };
    to_gguf_name(ARCH, &plain).unwrap_or(plain)
}

/// Order of the rows of a spec's tensor in GGUF files.
pub(super) fn gguf_order(spec: &TensorSpec) -> RowOrder {
    match spec.stored.order {
        RowOrder::Unchanged => RowOrder::for_tensor(ARCH, &spec.stored.name, HEAD_DIM),
        order => order,
    }
}

fn of_gguf(gguf: &Gguf, spec: &TensorSpec) -> Result<StoredTensor> {
    let config = "the metadata make";
    let fused = Some(spec).filter(|spec| spec.is_expert()).and_then(|spec| {
        let rows = spec.rows / EXPERTS.count;
        let (name, order) = fuse_gate_up(spec, rows);
        let name = gguf_name(spec, &name);
        let is_there = order != RowOrder::Unchanged && gguf.get(&name).is_some();
        is_there.then(|| (name, order, [EXPERTS.count, 2 * rows, spec.cols]))
    });
    let (name, order) = match &fused {
        Some((name, order, _)) => (name.clone(), *order),
        None => (gguf_name(spec, &spec.stored.name), gguf_order(spec)),
    };
    let gguf::GgufTensor { block, shape, data, file, .. } = gguf.get_required(&name)?.clone();
    match fused {
        Some((.., want)) => check_same_shape((&file, &name), &shape, &want, config)?,
        None => check_shape(spec, (&file, &name), &shape, config)?,
    }
    let row_bytes = block.row_bytes(spec.cols);
    let stored = StoredTensor {
        name,
        block,
        order,
        form: StoredForm::Rows,
        map: ValueMap::Unchanged,
        parts: vec![data],
        file,
        row_bytes,
        deltas: Vec::new(),
    };
    Ok(stored.select_rows(spec))
}
