//! Writing a checkpoint as a packed file, and mapping such a file.
//!
//! A packed file is a safetensors container of flat U8 tensors. A matrix `m` in blocks is `m.quants` and
//! `m.scales`; one of elements, and the embedding, is `m` as stored, unless the output projection has its values; a
//! vector is f32. The metadata have the type of each that is neither Q4_0 nor a vector. Each is padded to a multiple of 64 bytes, so that every plane of the
//! mapped file is aligned. The metadata hold besides the layout's version, the model's `config.json` (for a GGUF
//! file, what its header says), what weights were asked for and the source's fingerprint. What a GGUF file says of
//! tokenizer and chat template comes along as one more tensor, a GGUF file without tensors.

use super::checkpoint::Checkpoint;
use super::convert::load_one;
use super::{Assembly, Form, LoadOptions, Loaded, Role, Spec, WeightType, Weights, check_config, table};
use files::atomic_file::Unfinished;
use files::mapped::Plane;
use files::packed_file::{GGUF, LAYOUT, VERSION_KEY, layout_version};
use files::source::gguf::Gguf;
use files::source::gguf::block::BlockType;
use files::source::{Dtype, Source};
use files::{Error, Result};
use numeric::quant::format::Format;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

const WEIGHTS_KEY: &str = "weights";
const ALIGN: usize = 64;

/// What the matrices of a packed file became; of other safetensors, what they would become by default.
pub fn weight_type(source: &Source) -> WeightType {
    let found = source.metadata().get(WEIGHTS_KEY).filter(|_| layout_version(source).is_some());
    let settled = found.and_then(|name| name.parse().ok()).filter(|t| *t != WeightType::Auto);
    settled.unwrap_or(WeightType::Q4_0)
}

/// One flat tensor of a packed file.
struct Part {
    name: String,
    len: usize,
}

fn padded(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// The flat tensors that a spec becomes, before padding.
fn parts(spec: &Spec, form: Form) -> Vec<Part> {
    let part = |suffix: &str, len| Part { name: format!("{}{suffix}", spec.name), len };
    let (quants, scales) = form.bytes(spec);
    match form {
        Form::Rows(_) => vec![part("", quants)],
        Form::Blocks(_) => vec![part(".quants", quants), part(".scales", scales)],
        Form::Head => Vec::new(),
    }
}

/// Packs a checkpoint into `out`, which appears whole or not at all; returns its size.
///
/// Tensors are converted and written one after another: peak memory is one packed tensor. `config` is the text of a
/// `config.json`.
pub fn write(source: &Checkpoint, config: &str, out: &Path, options: &LoadOptions<'_>) -> Result<u64> {
    if source.packed().is_some() {
        return Err(Error::Usage(format!("{}: is packed already", source.path().display())));
    }
    let (specs, weight_type) = (table(), source.settle(options.weight_type));
    let mut dtypes = Map::new();
    let mut header = Map::new();
    let mut offset = 0;
    for spec in &specs {
        let form = Form::of(spec, source.find(spec)?.block, weight_type);
        if let Some(name) = form.name(spec) {
            dtypes.insert(spec.name.clone(), json!(name));
        }
        for part in parts(spec, form) {
            let end = offset + padded(part.len);
            header.insert(part.name, entry(offset..end));
            offset = end;
        }
    }
    let gguf = source.gguf().map(Gguf::without_tensors).unwrap_or_default();
    if !gguf.is_empty() {
        header.insert(GGUF.into(), entry(offset..offset + padded(gguf.len())));
        offset += padded(gguf.len());
    }
    let metadata = json!({
        VERSION_KEY: LAYOUT.to_string(),
        "model": crate::dims::MODEL,
        "config": config,
        WEIGHTS_KEY: weight_type.to_string(),
        "source": source.fingerprint(),
        "dtypes": Value::Object(dtypes).to_string(),
    });
    header.insert("__metadata__".into(), metadata);
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize((header.len() + 8).next_multiple_of(ALIGN) - 8, b' ');

    let file = Unfinished::create(out).map_err(|e| Error::io(out, format!("cannot create: {e}")))?;
    let fail =
        |e: io::Error| Error::io(out, format!("cannot write: {e}; free space or choose another --out"));
    let mut w = Blocks { file: &file.file, buf: Vec::with_capacity(Blocks::SIZE) };
    w.write_all(&(header.len() as u64).to_le_bytes()).map_err(fail)?;
    w.write_all(&header).map_err(fail)?;
    let mut put = |bytes: &[u8]| {
        w.write_all(bytes)?;
        w.write_all(&[0; ALIGN][..padded(bytes.len()) - bytes.len()])
    };
    for (i, spec) in specs.iter().enumerate() {
        (options.progress)(i, specs.len());
        match load_one(source, spec, weight_type, options)? {
            Loaded::Quantised { quants, scales, .. } => {
                put(quants.bytes()).and_then(|()| put(scales.bytes()))
            }
            Loaded::Vector(v) => put(&v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
            Loaded::Rows { data, .. } => {
                let result = put(data.bytes());
                data.release();
                result
            }
            Loaded::Head => Ok(()),
        }
        .map_err(fail)?;
    }
    put(&gguf).map_err(fail)?;
    (options.progress)(specs.len(), specs.len());
    w.flush().map_err(fail)?;
    drop(w);
    file.finish(out).map_err(fail)?;
    Ok((8 + header.len() + offset) as u64)
}

/// A tensor of bytes in the header of a safetensors file.
fn entry(range: std::ops::Range<usize>) -> Value {
    json!({"dtype": "U8", "shape": [range.len()], "data_offsets": [range.start, range.end]})
}

/// Writes a file in aligned blocks of 2 MiB, so that file systems which can keep it in huge pages.
struct Blocks<'a> {
    file: &'a File,
    buf: Vec<u8>,
}

impl Blocks<'_> {
    const SIZE: usize = 2 << 20;
}

impl Write for Blocks<'_> {
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

/// The form of each tensor of the table, as far as the file tells; for sizes, before anything is checked.
pub fn forms(source: &Source) -> Vec<Form> {
    let dtypes = source.metadata().get("dtypes").and_then(|text| serde_json::from_str(text).ok());
    let dtypes: HashMap<String, String> = dtypes.unwrap_or_default();
    let form = |spec: &Spec| {
        let found = Form::from_name(spec, dtypes.get(&spec.name).map(String::as_str));
        found.unwrap_or(Form::Rows(BlockType::F32))
    };
    table().iter().map(form).collect()
}

/// Maps a packed file.
pub(super) fn read(source: &Source) -> Result<Weights> {
    let file = source.path();
    let err = |message: String| Error::model(file, format!("{message}; make it again with antigravity pack"));
    if layout_version(source) != Some(LAYOUT) {
        let found = source.metadata().get(VERSION_KEY).map_or("", String::as_str);
        return Err(err(format!("packed layout {found:?}; this program reads {LAYOUT}")));
    }
    let meta =
        |key: &str| source.metadata().get(key).ok_or_else(|| err(format!("metadata {key} is missing")));
    check_config(file, meta("config")?)?;
    let dtypes: HashMap<String, String> =
        serde_json::from_str(meta("dtypes")?).map_err(|e| err(format!("metadata dtypes: {e}")))?;
    let mut loaded = HashMap::new();
    for spec in table() {
        let name = dtypes.get(&spec.name).map(String::as_str);
        let form = Form::from_name(&spec, name)
            .ok_or_else(|| err(format!("type {:?} of {}", name.unwrap_or_default(), spec.name)))?;
        let plane = |part: &Part| -> Result<Plane> {
            let t = source.get(&part.name).ok_or_else(|| err(format!("tensor {} is missing", part.name)))?;
            if t.dtype != Dtype::U8 || t.data.bytes().len() != padded(part.len) {
                let found = t.data.bytes().len();
                return Err(err(format!("tensor {} has {found} bytes, not {}", part.name, padded(part.len))));
            }
            let plane = t.data.slice(0..part.len);
            plane.ok_or_else(|| err(format!("tensor {} is cut short", part.name)))
        };
        let planes = parts(&spec, form).iter().map(plane).collect::<Result<Vec<Plane>>>()?;
        let value = one(&spec, form, planes).map_err(err)?;
        loaded.insert(spec.name, value);
    }
    let (file, weight_type) = (file.into(), weight_type(source));
    Assembly { loaded, file, weight_type }.assemble(meta("source")?.clone())
}

/// A tensor from its planes, which have the lengths that its form needs; its scales are checked.
fn one(spec: &Spec, form: Form, planes: Vec<Plane>) -> std::result::Result<Loaded, String> {
    let mut planes = planes.into_iter();
    match (form, planes.next(), planes.next()) {
        (Form::Blocks(format), Some(quants), Some(scales)) => {
            if !finite_scales(format, scales.bytes()) {
                return Err(format!("tensor {} has a scale that is NaN or infinite", spec.name));
            }
            Ok(Loaded::Quantised { format, quants, scales })
        }
        (Form::Rows(BlockType::F32), Some(data), None) if spec.role == Role::Vector => {
            let values = Dtype::F32.to_f32(data.bytes());
            match values.iter().all(|x| x.is_finite()) {
                true => Ok(Loaded::Vector(values)),
                false => Err(format!("tensor {} holds NaN or infinity", spec.name)),
            }
        }
        (Form::Rows(block), Some(data), None) => Ok(Loaded::Rows { block, data }),
        (Form::Head, None, None) => Ok(Loaded::Head),
        _ => unreachable!("invariant: each form has its number of planes"),
    }
}

/// True when no f16 among the scales is NaN or infinite.
fn finite_scales(format: Format, scales: &[u8]) -> bool {
    if format.half_bytes() == format.scale_bytes() {
        return finite_f16(scales);
    }
    scales.chunks_exact(format.scale_bytes()).all(|run| finite_f16(&run[..format.half_bytes()]))
}

/// True when no f16 has all exponent bits set.
fn finite_f16(bytes: &[u8]) -> bool {
    let all = bytes.as_chunks::<2>().0.iter().fold(0u16, |bad, b| bad | u16::from(b[1] & 0x7c == 0x7c));
    all == 0
}
