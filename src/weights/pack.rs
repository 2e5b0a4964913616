//! Quantising a checkpoint into the packed layout, in memory or into a file, and mapping such a file.
//!
//! A packed file is a safetensors container of flat U8 tensors. A quantised matrix `m` is `m.quants` and
//! `m.scales`; an unquantised one, and the embedding, is `m` as stored, with its type in the metadata; a
//! vector is f32. Each is padded to a multiple of 64 bytes, so that every plane of the mapped file is
//! aligned. The metadata hold the layout's version, the model's `config.json` and the source's fingerprint.

use super::region::{AlignedBytes, Plane};
use super::source::{Dtype, Source, Tensor};
use super::{Assembly, LoadOptions, Loaded, Role, Spec, Weights, check_config, find, load_one, table};
use crate::error::{Error, Result};
use crate::quant::packed::{GROUP_ROWS, QUANT_BYTES, SCALE_BYTES};
use crate::quant::{BLOCK, rows};
use rustix::fs::{FlockOperation, flock};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Version of the layout this program writes and reads.
pub const LAYOUT: u32 = 1;
const VERSION_KEY: &str = "antigravity.layout";
const ALIGN: usize = 64;

/// The layout version of a packed file; `None` for anything else.
pub fn layout_version(source: &Source) -> Option<u32> {
    source.metadata().get(VERSION_KEY).map(|v| v.parse().unwrap_or(0))
}

/// Quantises one matrix into its two planes, groups of rows in parallel.
pub(super) fn quantise(tensor: &Tensor, spec: &Spec, threads: usize) -> Result<(Plane, Plane)> {
    let mut quants = AlignedBytes::zeroed(spec.quants_len())?;
    let mut scales = AlignedBytes::zeroed(spec.scales_len())?;
    let blocks = spec.cols / BLOCK;
    let row_bytes = spec.cols * tensor.dtype.size();
    // Each task is one group of sixteen rows; a mutex hands its two slices to whoever claims it.
    let groups: Vec<_> = quants
        .as_mut_slice()
        .chunks_exact_mut(blocks * QUANT_BYTES)
        .zip(scales.as_mut_slice().chunks_exact_mut(blocks * SCALE_BYTES))
        .map(Mutex::new)
        .collect();
    let next = AtomicUsize::new(0);
    let bad_row = AtomicUsize::new(usize::MAX);
    let work = || {
        loop {
            let g = next.fetch_add(1, Ordering::Relaxed);
            let Some(group) = groups.get(g) else { return };
            let mut planes = group.lock().expect("invariant: claimed once");
            let (quants, scales) = &mut *planes;
            quants.fill(0x88);
            for lane in 0..GROUP_ROWS.min(spec.rows - g * GROUP_ROWS) {
                let row = g * GROUP_ROWS + lane;
                let bytes = &tensor.data.bytes()[row * row_bytes..][..row_bytes];
                if !rows::quantise(tensor.dtype, bytes, lane, (quants, scales)) {
                    bad_row.fetch_min(row, Ordering::Relaxed);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(groups.len()) {
            scope.spawn(work);
        }
        work();
    });
    drop(groups);
    match bad_row.into_inner() {
        usize::MAX => Ok((quants.into_plane(), scales.into_plane())),
        row => Err(Error::model(
            &tensor.file,
            format!(
                "tensor {}, row {row}: holds NaN, infinity or values too large for a f16 scale; \
                 the checkpoint is broken",
                spec.stored_as
            ),
        )),
    }
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
fn parts(spec: &Spec, dtype: Dtype) -> Vec<Part> {
    let part = |suffix: &str, len| Part { name: format!("{}{suffix}", spec.name), len };
    match spec.role {
        Role::Vector => vec![part("", spec.cols * 4)],
        _ if spec.quantises() => vec![part(".quants", spec.quants_len()), part(".scales", spec.scales_len())],
        _ => vec![part("", spec.rows * spec.cols * dtype.size())],
    }
}

/// Packs a checkpoint into `out`, which appears whole or not at all; returns its size.
///
/// Tensors are quantised and written one after another: peak memory is one tensor, stored and packed.
pub fn write(source: &Source, config: &str, out: &Path, options: &LoadOptions<'_>) -> Result<u64> {
    if layout_version(source).is_some() {
        return Err(Error::Usage(format!("{}: is packed already", source.path().display())));
    }
    let specs = table();
    let mut dtypes = Map::new();
    let mut header = Map::new();
    let mut offset = 0;
    for spec in &specs {
        let dtype = find(source, spec)?.dtype;
        if spec.role != Role::Vector && !spec.quantises() {
            dtypes.insert(spec.name.clone(), json!(format!("{dtype:?}")));
        }
        for part in parts(spec, dtype) {
            let end = offset + padded(part.len);
            let entry = json!({"dtype": "U8", "shape": [end - offset], "data_offsets": [offset, end]});
            header.insert(part.name, entry);
            offset = end;
        }
    }
    let metadata = json!({
        VERSION_KEY: LAYOUT.to_string(),
        "model": crate::dims::MODEL,
        "config": config,
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
    for (i, spec) in specs.iter().enumerate() {
        (options.progress)(i, specs.len());
        let mut put = |bytes: &[u8]| {
            w.write_all(bytes)?;
            w.write_all(&[0; ALIGN][..padded(bytes.len()) - bytes.len()])
        };
        match load_one(source, spec, options)? {
            Loaded::Q4 { quants, scales } => put(quants.bytes()).and_then(|()| put(scales.bytes())),
            Loaded::Vector(v) => put(&v.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>()),
            Loaded::Dense { data, .. } => {
                let result = put(data.bytes());
                data.release();
                result
            }
        }
        .map_err(fail)?;
    }
    (options.progress)(specs.len(), specs.len());
    w.flush().map_err(fail)?;
    drop(w);
    file.finish(out).map_err(fail)?;
    Ok((8 + header.len() + offset) as u64)
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

/// A file being written beside its final place, which has the new content or the old one, whatever happens; removed
/// unless finished.
///
/// Its name is always the same, so that what a killed process left is taken over by the next. A lock, which the
/// system releases when its owner dies, keeps two processes from writing at once.
pub(crate) struct Unfinished {
    pub file: File,
    path: Option<PathBuf>,
}

/// How often another process may have finished the file between opening and locking it.
const ATTEMPTS: usize = 1000;

impl Unfinished {
    pub fn create(out: &Path) -> io::Result<Self> {
        let mut name = out.file_name().ok_or(ErrorKind::InvalidFilename)?.to_os_string();
        name.push(".unfinished");
        let path = out.with_file_name(name);
        for _ in 0..ATTEMPTS {
            // A link that somebody put there is not followed.
            let mut options = OpenOptions::new();
            options.write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW);
            let file = options.open(&path)?;
            // Waits for whoever writes it; some file systems have no locks.
            let _ = flock(&file, FlockOperation::LockExclusive);
            // By now it may have been finished or removed.
            let (ours, there) = (file.metadata()?, fs::symlink_metadata(&path));
            if there.is_ok_and(|there| (there.dev(), there.ino()) == (ours.dev(), ours.ino())) {
                file.set_len(0)?;
                return Ok(Self { file, path: Some(path) });
            }
        }
        Err(io::Error::new(ErrorKind::ResourceBusy, "others write it all the time"))
    }

    /// Puts the file in its place, and both on the disk.
    pub fn finish(mut self, out: &Path) -> io::Result<()> {
        self.file.sync_all()?;
        if let Some(path) = &self.path {
            fs::rename(path, out)?;
        }
        self.path = None;
        let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        match File::open(folder).and_then(|folder| folder.sync_all()) {
            // Where folders cannot be opened or synchronised, the system is left to do it.
            Err(e) if !matches!(e.kind(), ErrorKind::PermissionDenied | ErrorKind::InvalidInput) => Err(e),
            _ => Ok(()),
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            let _ = fs::remove_file(path);
        }
    }
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
        let dtype = match dtypes.get(&spec.name).map(String::as_str) {
            None => Dtype::F32,
            Some(name) => {
                Dtype::from_name(name).ok_or_else(|| err(format!("type {name:?} of {}", spec.name)))?
            }
        };
        let plane = |part: &Part| -> Result<Plane> {
            let t = source.get(&part.name).ok_or_else(|| err(format!("tensor {} is missing", part.name)))?;
            if t.dtype != Dtype::U8 || t.data.bytes().len() != padded(part.len) {
                let found = t.data.bytes().len();
                return Err(err(format!("tensor {} has {found} bytes, not {}", part.name, padded(part.len))));
            }
            let plane = t.data.slice(0..part.len);
            plane.ok_or_else(|| err(format!("tensor {} is cut short", part.name)))
        };
        let parts = parts(&spec, dtype);
        let value = match (spec.role, &parts[..]) {
            (Role::Vector, [one]) => {
                let values = Dtype::F32.to_f32(plane(one)?.bytes());
                if values.iter().any(|x| !x.is_finite()) {
                    return Err(err(format!("tensor {} holds NaN or infinity", spec.name)));
                }
                Loaded::Vector(values)
            }
            (_, [quants, scales]) => {
                let (quants, scales) = (plane(quants)?, plane(scales)?);
                if !finite_f16(scales.bytes()) {
                    return Err(err(format!("tensor {} has a scale that is NaN or infinite", spec.name)));
                }
                Loaded::Q4 { quants, scales }
            }
            (_, [one]) => Loaded::Dense { dtype, data: plane(one)? },
            _ => unreachable!("invariant: a tensor has one part or two"),
        };
        loaded.insert(spec.name, value);
    }
    Assembly { loaded, file: file.into() }.assemble(meta("source")?.clone())
}

/// True when no f16 has all exponent bits set.
fn finite_f16(bytes: &[u8]) -> bool {
    let all = bytes.as_chunks::<2>().0.iter().fold(0u16, |bad, b| bad | u16::from(b[1] & 0x7c == 0x7c));
    all == 0
}
