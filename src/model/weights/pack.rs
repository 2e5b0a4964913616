//! Writes a checkpoint as a packed file, and maps such a file.
//!
//! A packed file is a safetensors file of flat U8 tensors, the planes of [`Storage::plane_specs`]: `m.quants` and
//! `m.scales` of a matrix in blocks, otherwise `m`. Each is padded to 64 bytes, so that every plane of the mapped file
//! is aligned. The metadata ([`packed_file::key`](files::packed_file::key)) hold the layout's version, the model's
//! `config.json` (of a GGUF file, the same made from its header), the weight type, the checkpoint's fingerprint, the
//! storage of each tensor that is not Q4_0 or a vector, and the names of adapters. The header of a GGUF file, with
//! tokenizer and chat template, is one more tensor, and so is the model's [`Calibration`].

use super::calibration::Calibration;
use super::checkpoint::Checkpoint;
use super::config::check_config;
use super::convert::{LoadOptions, converted_bytes, load_tensor};
use super::mtp::{self, mtp_tensors};
use super::spec::{TensorRole, TensorSpec, model_tensors};
use super::storage::{LoadedModel, LoadedTensor, PlaneSpec, Storage, padded_len};
use super::weight_type::WeightType;
use super::zeros::{self, StoredValues};
use super::{Weights, measure_inputs};
use crate::cpu::InputSquares;
use files::atomic_file::AtomicFile;
use files::blocks::{BlockType, Dtype};
use files::mapped::{AlignedBytes, MappedSlice, map_file};
use files::packed_file::{GGUF_TENSOR, LAYOUT_VERSION, key, read_dtypes, read_layout_version};
use files::source::Safetensors;
use files::source::gguf::Gguf;
use files::{Error, Result};
use numeric::quant::format::GROUP_ROWS;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// The file's header while it is built.
#[derive(Default)]
struct PackedHeader {
    tensors: Map<String, Value>,
    dtypes: Map<String, Value>,
    /// Bytes of data so far.
    len: usize,
}

impl PackedHeader {
    fn add_tensor(&mut self, name: String, len: usize) {
        let (start, end) = (self.len, self.len + padded_len(len));
        let entry = json!({"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]});
        self.tensors.insert(name, entry);
        self.len = end;
    }

    /// The header's bytes: the JSON's length, then the JSON.
    fn finish(mut self, source: &Checkpoint, weight_type: WeightType, config: &str) -> Vec<u8> {
        self.dtypes.sort_keys();
        let mut metadata = json!({
            key::LAYOUT_VERSION: LAYOUT_VERSION.to_string(),
            "model": crate::dims::MODEL,
            key::CONFIG: config,
            key::WEIGHTS: weight_type.to_string(),
            key::SOURCE: source.fingerprint(),
            key::DTYPES: Value::Object(self.dtypes).to_string(),
        });
        if !source.added_adapters().is_empty() {
            let labels: Vec<&str> = source.added_adapters().iter().map(|adapter| &*adapter.label).collect();
            metadata[key::ADAPTERS] = json!(labels.join(", "));
        }
        self.tensors.insert("__metadata__".into(), metadata);
        let mut table = Value::Object(self.tensors);
        table.sort_all_objects();
        let mut json = table.to_string().into_bytes();
        json.resize(padded_len(json.len() + 8) - 8, b' ');
        [&(json.len() as u64).to_le_bytes()[..], &json].concat()
    }
}

/// Computes the calibration of some weights.
pub type CalibrationOf<'a> = dyn Fn(Weights) -> Result<Calibration> + 'a;

/// Destination of a packed file.
pub struct PackTarget<'a> {
    pub file: &'a File,
    /// Offset in `file` where it begins, which is where `file` continues to be written.
    pub from: u64,
    /// Path of `file`; `None` for a pipe.
    pub path: Option<&'a Path>,
    /// Name in messages.
    pub name: &'a Path,
}

/// Packs a checkpoint into `out`, which appears complete or not at all, and returns its size. See [`write_to`].
pub fn write_packed(
    source: &Checkpoint,
    config: &str,
    out: &Path,
    options: &LoadOptions<'_>,
    calibration_of: Option<&CalibrationOf<'_>>,
) -> Result<u64> {
    let file = AtomicFile::create(out).map_err(|e| Error::io(out, format!("cannot create: {e}")))?;
    let place = PackTarget { file: &file.file, from: 0, path: file.path(), name: out };
    let bytes = write_to(source, config, &place, options, calibration_of)?;
    file.commit().map_err(|e| write_error(out, e))?;
    Ok(bytes)
}

/// Packs a checkpoint and returns the number of bytes written.
///
/// Tensors are converted and written one after another, so that peak memory is one packed tensor. `config` is the text
/// of a `config.json`. `calibration_of` receives the packed weights, mapped; without it, or into a pipe, no calibration
/// is written.
///
/// # Errors
///
/// [`Error::Usage`]: the source is a packed file. [`Error::Model`]: it cannot be used. [`Error::Other`]: the place
/// cannot be written.
pub fn write_to(
    source: &Checkpoint,
    config: &str,
    place: &PackTarget<'_>,
    options: &LoadOptions<'_>,
    calibration_of: Option<&CalibrationOf<'_>>,
) -> Result<u64> {
    if source.packed().is_some() {
        return Err(Error::Usage(format!("{}: is packed already", source.path().display())));
    }
    let (specs, weight_type, mut header) =
        (source.tensor_specs(), source.resolve_weight_type(options.weight_type), PackedHeader::default());
    for spec in &specs {
        let storage = source.find_tensor(spec)?.choose_storage(spec, weight_type);
        if let Some(name) = storage.name(spec) {
            header.dtypes.insert(spec.name.clone(), json!(name));
        }
        for PlaneSpec { suffix, len } in storage.plane_specs(spec) {
            header.add_tensor(format!("{}{suffix}", spec.name), len);
        }
    }
    let gguf = source.gguf().map(Gguf::without_tensors).unwrap_or_default();
    if !gguf.is_empty() {
        header.add_tensor(GGUF_TENSOR.into(), gguf.len());
    }
    let calibration_of = calibration_of.zip(place.path);
    if calibration_of.is_some() {
        header.add_tensor(Calibration::tensor_name(), Calibration::FILE_BYTES);
    }
    let data_len = header.len;
    let header = header.finish(source, weight_type, config);

    let fail = |e: io::Error| write_error(place.name, e);
    let mut w = BlockWriter { file: place.file, buf: Vec::with_capacity(BlockWriter::SIZE) };
    let mut put = |bytes: &[u8]| {
        w.write_all(bytes)
            .and_then(|()| w.write_all(&vec![0; padded_len(bytes.len()) - bytes.len()]))
            .map_err(fail)
    };
    put(&header)?;
    let squares = measure_inputs(source, weight_type, options)?;
    for (i, spec) in specs.iter().enumerate() {
        (options.progress)(i, specs.len());
        put_planes(source, spec, (weight_type, squares.as_deref()), options.threads, &mut put)?;
    }
    put(&gguf)?;
    (options.progress)(specs.len(), specs.len());
    if calibration_of.is_some() {
        put(&Calibration::identity().to_bytes())?;
    }
    w.flush().map_err(fail)?;
    let bytes = (header.len() + data_len) as u64;
    if let Some((calibration_of, path)) = calibration_of {
        let calibration = calibration_of(place.map_weights(path, weight_type)?)?.to_bytes();
        let at = place.from + bytes - padded_len(Calibration::FILE_BYTES) as u64;
        place.file.write_all_at(&calibration, at).map_err(fail)?;
    }
    Ok(bytes)
}

/// Passes the planes of a tensor to `put`, which pads each.
fn put_planes(
    source: &Checkpoint,
    spec: &TensorSpec,
    (weight_type, squares): (WeightType, Option<&InputSquares>),
    threads: usize,
    put: &mut impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let mut room = AlignedBytes::zeroed(converted_bytes(source, spec, weight_type)?)?;
    let loaded = load_tensor(source, spec, (weight_type, squares), threads, room.as_mut_slice())?;
    put(room.as_slice())?;
    for plane in loaded.planes {
        put(plane.bytes())?;
        plane.release_pages();
    }
    Ok(())
}

/// The error of a file that cannot be written.
pub fn write_error(name: &Path, e: io::Error) -> Error {
    Error::io(name, format!("cannot write: {e}; free space or choose another place"))
}

impl PackTarget<'_> {
    /// Maps the weights of the packed file just written to `path`.
    fn map_weights(&self, path: &Path, weight_type: WeightType) -> Result<Weights> {
        let whole = map_file(path)?;
        let packed = whole.slice(self.from as usize..whole.bytes().len());
        let packed = packed.ok_or_else(|| Error::io(self.name, "became shorter while it was written"))?;
        super::build_weights(read_packed(&Safetensors::open_embedded(path, packed)?, weight_type)?)
    }
}

/// Writer of aligned 2 MiB blocks, so that file systems that support huge pages can use them for the file.
struct BlockWriter<'a> {
    file: &'a File,
    buf: Vec<u8>,
}

impl BlockWriter<'_> {
    const SIZE: usize = 2 << 20;
}

impl Write for BlockWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(Self::SIZE - self.buf.len());
        self.buf.extend_from_slice(&bytes[..n]);
        if self.buf.len() == Self::SIZE {
            self.flush()?;
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        let mut file = self.file;
        file.write_all(&self.buf)?;
        self.buf.clear();
        Ok(())
    }
}

/// Storage of each tensor of [`model_tensors`], to estimate sizes before the file is checked: unreadable entries count
/// as f32.
pub fn tensor_storages(source: &Safetensors) -> Vec<Storage> {
    let dtypes = read_dtypes(source);
    let storage = |spec: &TensorSpec| {
        let found = Storage::from_name(spec, dtypes.get(&spec.name).map(String::as_str));
        found.unwrap_or(Storage::Rows(BlockType::F32))
    };
    model_tensors().iter().map(storage).collect()
}

/// The error of a packed file that cannot be used, with the remedy.
fn unusable_file(source: &Safetensors, why: String) -> Error {
    Error::model(source.path(), format!("{why}; create it again with antigravity pack"))
}

fn metadata_value<'a>(source: &'a Safetensors, key: &str) -> Result<&'a String> {
    source.metadata().get(key).ok_or_else(|| unusable_file(source, format!("metadata {key} is missing")))
}

/// Checks that a packed file is of this program's layout and model.
///
/// # Errors
///
/// [`Error::Model`]: it has another version or model.
pub(super) fn check_packed(source: &Safetensors) -> Result<()> {
    if read_layout_version(source) != Some(LAYOUT_VERSION) {
        let found = source.metadata().get(key::LAYOUT_VERSION).map_or("", String::as_str);
        return Err(unusable_file(
            source,
            format!("packed layout {found:?}; this program reads {LAYOUT_VERSION}"),
        ));
    }
    check_config(source.path(), metadata_value(source, key::CONFIG)?)
}

/// Maps a packed file that [`check_packed`] accepts and that has this weight type.
///
/// # Errors
///
/// [`Error::Model`]: it is damaged, or holds a scale or a vector that is not finite.
pub(super) fn read_packed(source: &Safetensors, weight_type: WeightType) -> Result<LoadedModel> {
    let err = |why: String| unusable_file(source, why);
    let dtypes: HashMap<String, String> = serde_json::from_str(metadata_value(source, key::DTYPES)?)
        .map_err(|e| err(format!("metadata {}: {e}", key::DTYPES)))?;
    let mut tensors = HashMap::new();
    let mut specs = model_tensors();
    if mtp::is_packed(source) {
        specs.extend(mtp_tensors());
    }
    for spec in specs {
        let name = dtypes.get(&spec.name).map(String::as_str);
        let storage = Storage::from_name(&spec, name)
            .ok_or_else(|| err(format!("type {:?} of {}", name.unwrap_or_default(), spec.name)))?;
        let parts = storage.plane_specs(&spec);
        let planes =
            parts.iter().map(|part| read_plane(source, &spec, part)).collect::<std::result::Result<_, _>>();
        let loaded = LoadedTensor { storage, planes: planes.map_err(err)? };
        check_finite(&spec, &loaded).map_err(err)?;
        check_zeros(source, &spec, &loaded)?;
        tensors.insert(spec.name, loaded);
    }
    let fingerprint = metadata_value(source, key::SOURCE)?.clone();
    let calibration = read_calibration(source).map_err(err)?;
    let from_gguf = source.get(GGUF_TENSOR).is_some();
    Ok(LoadedModel { tensors, calibration, weight_type, fingerprint, file: source.path().into(), from_gguf })
}

/// The file's calibration, if it has one of this program's revision.
fn read_calibration(source: &Safetensors) -> std::result::Result<Option<Calibration>, String> {
    let name = Calibration::tensor_name();
    let Some(tensor) = source.get(&name) else { return Ok(None) };
    let found = tensor.data.bytes().get(..Calibration::FILE_BYTES).and_then(Calibration::from_bytes);
    found.map(Some).ok_or_else(|| format!("tensor {name} does not hold a calibration"))
}

/// One plane of a tensor, without padding.
fn read_plane(
    source: &Safetensors,
    spec: &TensorSpec,
    part: &PlaneSpec,
) -> std::result::Result<MappedSlice, String> {
    let name = format!("{}{}", spec.name, part.suffix);
    let t = source.get(&name).ok_or_else(|| format!("tensor {name} is missing"))?;
    let (found, want) = (t.data.bytes().len(), padded_len(part.len));
    let plane = t.data.slice(0..part.len).filter(|_| t.dtype == Dtype::U8 && found == want);
    plane.ok_or_else(|| format!("tensor {name} has {found} bytes, not {want}"))
}

/// Rejects tensors of zeros: for quantised blocks, scales of zero.
fn check_zeros(source: &Safetensors, spec: &TensorSpec, loaded: &LoadedTensor) -> Result<()> {
    let (data, parts) = match (loaded.storage, &loaded.planes[..]) {
        (Storage::Blocks(_), [_, scales]) => (scales, spec.rows.div_ceil(GROUP_ROWS)),
        (_, [data]) => (data, spec.rows),
        _ => return Ok(()),
    };
    zeros::check_not_zeros(spec, &StoredValues { file: source.path(), name: &spec.name, data, parts })
}

/// Rejects scales and vectors that are NaN or infinite.
fn check_finite(spec: &TensorSpec, loaded: &LoadedTensor) -> std::result::Result<(), String> {
    let (finite, what) = match (loaded.storage, &loaded.planes[..]) {
        (Storage::Blocks(format), [_, scales]) => {
            let (_, group) = format.group_bytes(spec.cols);
            let mut groups = scales.bytes().chunks_exact(group);
            (groups.all(|scales| format.are_scales_finite(scales)), "has a scale that is")
        }
        (_, [data]) if spec.role == TensorRole::Vector => {
            (Dtype::F32.to_f32(data.bytes()).iter().all(|x| x.is_finite()), "holds")
        }
        _ => return Ok(()),
    };
    if finite { Ok(()) } else { Err(format!("tensor {} {what} NaN or infinite", spec.name)) }
}
