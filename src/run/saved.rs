//! Saved sessions: everything that a text or a conversation needs to continue as if it had never stopped.
//!
//! | bytes | |
//! |---|---|
//! | 7 | `AGSAVED` |
//! | 1 | the version, a digit: 8. It is also raised when the rows of a KV type change. Version 7, without `padding`, is read too, and 4 to 6 of models without sliding-window layers: keys of q4 have no scales, and their means are not subtracted (4) or subtracted (5) |
//! | 8 | `n`, little endian |
//! | `n` | JSON: model, types, calibration of the keys, tokens and evictions, random state, held-back text (`Header`) |
//! | 4 | CRC-32 of everything before, little endian |
//! | … | for each layer: the key rows, `[kv_head][padding][slot][row bytes]`; the value rows; if attention is observed, its mass, `[kv_head][slot]` f32, little endian. Sliding-window layers have the rows of the latest positions instead, and no mass |
//! | 4 | CRC-32 of everything before, little endian |
//!
//! Rows move between cache and file layer by layer. A head's rows of 64 KiB or more begin at a multiple of 16 KiB, after
//! `padding` of zeros, so that sessions that load the file can map them and share their memory. A file appears complete
//! or not at all. It is not trusted: its size is checked against its header before memory is allocated.

use crate::dims::{
    HEAD_DIM, KV_HEADS, SLIDING_LAYERS, STATE, STATE_BYTES, VOCAB, attention_layers, is_sliding,
};
use crate::model::device::{KvRows, RowsInFile};
use crate::model::weights::{HeadCalibration, SubtractedMean};
use crate::run::engine::Engine;
use crate::run::generate::stream::ResumePoint;
use crate::run::placement::Checkpoint;
use crate::run::session::{Sequence, Session};
use crc32fast::Hasher;
use files::atomic_file::AtomicFile;
use files::error::escape;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::kv_row;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use text::chat::ConversationState;
use text::sampler::{Rng, SamplerOptions};

/// The first bytes of a file.
pub const MAGIC: &[u8; 7] = b"AGSAVED";
/// The byte after them.
pub const VERSION: u8 = b'8';
/// Earlier versions: rows without padding; of all slots in sliding-window layers too; means subtracted from keys; keys as
/// they are.
const WITHOUT_PADDING: u8 = b'7';
const WITHOUT_RINGS: u8 = b'6';
const WITHOUT_SCALES: u8 = b'5';
const WHOLE_KEYS: u8 = b'4';
/// Bytes before the header.
const PREFIX: u64 = 16;
/// Bytes of a checksum.
const SUM: u64 = 4;
/// Maximum length of a header: about thirty million tokens.
const MAX_HEADER: u64 = 1 << 28;

/// Minimum bytes of a head's rows that are aligned, and their alignment: the largest page of a phone.
const ALIGN_FROM: u64 = 64 << 10;
const ALIGN: u64 = 16 << 10;

/// Bytes of padding before rows of `len` bytes at byte `at` of a file.
fn count_padding(version: u8, at: u64, len: u64) -> u64 {
    if version <= WITHOUT_PADDING || len < ALIGN_FROM { 0 } else { at.next_multiple_of(ALIGN) - at }
}

/// State that is saved besides the sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedState {
    /// Seed of the random numbers.
    pub seed: u64,
    /// Current random state.
    pub rng: Rng,
    /// Kind of text.
    pub content: SavedContent,
}

/// Kind of text of a sequence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum SavedContent {
    /// One text, with the state to continue from.
    Text(ResumePoint),
    /// A conversation.
    Chat(ConversationState),
}

impl SavedState {
    /// The random state to continue with; `None` if another seed is `chosen`. Sets the seed in `options`.
    pub fn resume_rng(&self, chosen: Option<u64>, options: &mut SamplerOptions) -> Option<Rng> {
        options.seed = chosen.unwrap_or(self.seed);
        (options.seed == self.seed).then(|| self.rng.clone())
    }

    /// Checks that every token id outside the sequence is `known`.
    fn all_ids(&self, known: impl Fn(u32) -> bool) -> bool {
        match &self.content {
            SavedContent::Text(pause) => pause.tokens.iter().copied().all(known),
            SavedContent::Chat(chat) => chat.all_ids().all(known),
        }
    }
}

/// The JSON part of a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SessionHeader {
    /// Fingerprint of the model's files.
    model: String,
    /// Weight type.
    weights: String,
    /// Element types of the rows: keys, values.
    kv: [String; 2],
    /// Checksum of the calibration of keys (in version 5, of its means); `None` if there is none.
    #[serde(default, alias = "key_means")]
    calibration: Option<String>,
    sequence: Sequence,
    state: SavedState,
    /// Version of the file.
    #[serde(skip)]
    version: u8,
}

/// Saves a session. `file` always holds either the old or the new content.
///
/// # Errors
///
/// `Other`: the file cannot be written.
pub fn save_session(file: &Path, session: &mut Session, engine: &Engine, state: SavedState) -> Result<()> {
    let failed = |e: io::Error| Error::io(file, format!("cannot save the session: {e}"));
    let types = session.extent().types;
    let header = SessionHeader {
        model: engine.weights().fingerprint.clone(),
        weights: engine.options().weight_type.to_string(),
        kv: [types.k, types.v].map(|t| t.name().into()),
        calibration: calibration_checksum(VERSION, types, engine),
        sequence: session.sequence(),
        state,
        version: VERSION,
    };
    let json = serde_json::to_vec(&header).map_err(|e| failed(e.into()))?;
    if json.len() as u64 > MAX_HEADER {
        return Err(failed(io::Error::new(ErrorKind::FileTooLarge, "too many tokens")));
    }
    let unfinished = AtomicFile::create(file).map_err(failed)?;
    if !file.exists() {
        // Readable only by the owner, unless the user changes that. Some file systems have no modes.
        let _ = unfinished.file.set_permissions(Permissions::from_mode(0o600));
    }
    let mut out = Checksummed::new(&unfinished.file);
    let length = (json.len() as u64).to_le_bytes();
    out.write_bytes(&[MAGIC, &[VERSION][..], &length, &json].concat()).map_err(failed)?;
    out.put_checksum().map_err(failed)?;
    let (mut rows, mut mass) = (KvRows::default(), Vec::new());
    for layer in attention_layers() {
        session.read_rows(layer, &mut rows)?;
        session.read_mass(layer, &mut mass)?;
        for part in [&rows.k, &rows.v] {
            out.write_heads(part).map_err(failed)?;
        }
        let mass: Vec<u8> = mass.iter().flat_map(|m| m.to_le_bytes()).collect();
        out.write_bytes(&mass).map_err(failed)?;
    }
    let state: Vec<u8> = session.read_state()?.iter().flat_map(|x| x.to_le_bytes()).collect();
    out.write_bytes(&state).map_err(failed)?;
    out.put_checksum().map_err(failed)?;
    unfinished.commit().map_err(failed)
}

/// Calls [`read_session`] for a file that will be written later.
///
/// # Errors
///
/// Errors of [`read_session`]; `Usage` if the file is not writable.
pub fn load_session(file: &Path, session: &mut Session, engine: &Engine) -> Result<Option<SavedState>> {
    check_regular_file(file)?;
    // Reports an unwritable file now, not after the last token. Also removes leftovers of a killed run.
    drop(AtomicFile::create(file).map_err(|e| {
        Error::Usage(format!("`Session` {}: cannot be written: {e}; choose another place", file.display()))
    })?);
    read_session(file, session, engine)
}

fn check_regular_file(file: &Path) -> Result<()> {
    if fs::metadata(file).is_ok_and(|meta| !meta.is_file()) {
        return Err(Error::model(file, "is not a regular file"));
    }
    Ok(())
}

/// Restores a sequence and returns the state saved with it; `None` if there is no such file.
///
/// # Errors
///
/// `Usage`: another option is needed. `Model`: the file is damaged, or of another model or version. The session is then
/// unchanged or empty.
pub fn read_session(file: &Path, session: &mut Session, engine: &Engine) -> Result<Option<SavedState>> {
    check_regular_file(file)?;
    if fs::metadata(file).is_err_and(|e| e.kind() == ErrorKind::NotFound) {
        return Ok(None);
    }
    let opened = File::open(file).and_then(|f| Ok((f.metadata()?.len(), f)));
    let (size, stored) = opened.map_err(|e| Error::model(file, format!("cannot read: {e}")))?;
    let mut input = Checksummed::new(&stored);
    let (header, header_end) = read_header(file, &mut input, size)?;
    header.check_compatible(file, session, engine)?;
    let types = session.extent().types;
    let less = match header.version {
        WHOLE_KEYS => Some(SubtractedMean::Nothing),
        WITHOUT_SCALES => Some(SubtractedMean::Mean),
        _ => None,
    };
    let less = less.filter(|_| types.k.is_rotated());
    if header.file_size(session, header_end) != Some(size) {
        return Err(damaged_file(file));
    }
    let tokens = header.sequence.tokens.len();
    let mut state = vec![0.0; if tokens > 0 { STATE } else { 0 }];
    let last = attention_layers().last();
    let (sequence, version) = (header.sequence, header.version);
    session.restore_mapped(sequence, |layer, rows, mass| {
        let mut bytes = vec![0; size_of_val(&mass[..])];
        let damaged = |_| damaged_file(file);
        let keys = input.read_heads(version, &mut rows.k).map_err(damaged)?;
        let values = input.read_heads(version, &mut rows.v).map_err(damaged)?;
        input.read_bytes(&mut bytes).map_err(damaged)?;
        if rows.find_not_finite(types).is_some() {
            let why = "holds NaN or infinity, so its cache overflowed or the file was altered";
            return Err(unusable_file(file, &format!("layer {layer} {why}")));
        }
        if let Some(less) = less {
            convert_old_keys(engine, layer, (types.k, less), &mut rows.k);
        }
        for (m, bytes) in mass.iter_mut().zip(bytes.as_chunks().0) {
            *m = f32::from_le_bytes(*bytes);
        }
        let mut whole = true;
        if Some(layer) == last {
            let mut bytes = vec![0; 4 * state.len()];
            input.read_bytes(&mut bytes).map_err(|_| damaged_file(file))?;
            for (x, bytes) in state.iter_mut().zip(bytes.as_chunks().0) {
                *x = f32::from_le_bytes(*bytes);
            }
            whole = input.checksum_fits().unwrap_or(false) && state.iter().all(|x| x.is_finite());
        }
        if !whole || !mass.iter().all(|m| m.is_finite()) {
            return Err(damaged_file(file));
        }
        // Rows of a sliding-window layer are in a ring.
        let aligned = keys.zip(values).filter(|_| !is_sliding(layer));
        Ok(aligned.map(|(keys, values)| RowsInFile { path: file, file: &stored, heads: [keys, values] }))
    })?;
    session.import_states(&[Checkpoint { tokens, state }]);
    Ok(Some(header.state))
}

/// Checksum of the calibration of keys of these types, in the form of a file of this version.
fn calibration_checksum(version: u8, types: KvTypes, engine: &Engine) -> Option<String> {
    let all = engine.weights().calibration().filter(|_| types.k.is_rotated())?;
    let sum = match version {
        WHOLE_KEYS => return None,
        WITHOUT_SCALES => all.means_checksum(),
        _ => all.checksum(),
    };
    Some(format!("{sum:016x}"))
}

/// Converts the keys of a layer of an older file to the current calibration: `[kv_head][slot][row bytes]`.
fn convert_old_keys(engine: &Engine, layer: usize, (kind, less): (KvType, SubtractedMean), keys: &mut [u8]) {
    let layer = engine.weights().layer_calibration(layer);
    for (kv_head, keys) in keys.chunks_exact_mut((keys.len() / KV_HEADS).max(1)).enumerate() {
        for row in keys.chunks_exact_mut(kind.row_bytes(HEAD_DIM)) {
            kv_row::update_row::<HEAD_DIM>(engine.isa(), kind, row, |k| {
                HeadCalibration::of_head(layer, kv_head).convert_old_key(k, less)
            });
        }
    }
}

/// The error of a file that no option makes usable.
fn unusable_file(file: &Path, why: &str) -> Error {
    Error::model(file, format!("{why}; delete it to start over, or give `Session` another file"))
}

fn damaged_file(file: &Path) -> Error {
    unusable_file(file, "is damaged")
}

/// Reads the header of a file of `size` bytes. Returns it with the offset of its end.
fn read_header(file: &Path, input: &mut Checksummed<&File>, size: u64) -> Result<(SessionHeader, u64)> {
    let mut prefix = [0; PREFIX as usize];
    if size < PREFIX || input.read_bytes(&mut prefix).is_err() || !prefix.starts_with(MAGIC) {
        return Err(unusable_file(file, "is not a saved session"));
    }
    let ([_, _, _, _, _, _, _, version], length) = prefix.split_first_chunk().expect("invariant: 16 bytes");
    let older = SLIDING_LAYERS == 0 && [WITHOUT_RINGS, WITHOUT_SCALES, WHOLE_KEYS].contains(version);
    let older = older || *version == WITHOUT_PADDING;
    if *version != VERSION && !older {
        let (found, ours) = (version.escape_ascii(), char::from(VERSION));
        return Err(unusable_file(
            file,
            &format!("has session format {found}, but this program reads {ours}"),
        ));
    }
    let length = length.try_into().map_or(u64::MAX, u64::from_le_bytes);
    let end = length.checked_add(PREFIX + SUM).filter(|&end| length <= MAX_HEADER && end <= size);
    let end = end.ok_or_else(|| damaged_file(file))?;
    let mut json = vec![0; length as usize];
    let whole = input.read_bytes(&mut json).is_ok() && input.checksum_fits().unwrap_or(false);
    let header: Option<SessionHeader> = whole.then(|| serde_json::from_slice(&json).ok()).flatten();
    let header = header.map(|header| SessionHeader { version: *version, ..header });
    Ok((header.ok_or_else(|| damaged_file(file))?, end))
}

impl SessionHeader {
    /// Checks that this run can continue the session.
    fn check_compatible(&self, file: &Path, session: &Session, engine: &Engine) -> Result<()> {
        let ours = &engine.weights().fingerprint;
        if self.model != *ours {
            let theirs = escape(&self.model);
            return Err(unusable_file(
                file,
                &format!("was saved with another model ({theirs}, this is {ours})"),
            ));
        }
        let usage = |what: String| Err(Error::Usage(format!("`Session` {}: {what}", file.display())));
        let set = |flags: String| usage(format!("was saved with {flags}; set that, or give another file"));
        if self.weights != engine.options().weight_type.to_string() {
            return set(format!("`EngineOptions::weight_type` {}", escape(&self.weights)));
        }
        let kv = |i: usize| self.kv[i].parse::<KvType>().map_err(|_| damaged_file(file));
        let (types, ours) = (KvTypes { k: kv(0)?, v: kv(1)? }, session.extent().types);
        if types != ours {
            let (k, v) = (types.k.name(), types.v.name());
            return set(if k == v {
                format!("`EngineOptions::kv_types` {k}")
            } else {
                format!("`KvTypes::k` {k} `KvTypes::v` {v}")
            });
        }
        if self.calibration != calibration_checksum(self.version, types, engine) {
            return Err(unusable_file(
                file,
                "was saved with another calibration, by another version of this program",
            ));
        }
        let known = |id: u32| (id as usize) < VOCAB;
        if !self.sequence.is_consistent() || !self.state.all_ids(known) {
            return Err(damaged_file(file));
        }
        let (slots, capacity) = (self.sequence.slots, session.extent().slots);
        if slots > capacity {
            return usage(format!(
                "holds {slots} tokens but the context has {capacity}; raise `EngineOptions::max_seq_len`"
            ));
        }
        Ok(())
    }

    /// Size of a file whose header ends at `end`, checksum included; `None` if that overflows.
    fn file_size(&self, session: &Session, end: u64) -> Option<u64> {
        let types = session.extent().types;
        let tokens = self.sequence.tokens.len();
        // Otherwise the ranges of rows are empty.
        tokens.checked_sub(self.sequence.oldest)?;
        let mut at = end;
        for layer in attention_layers() {
            let rows = self.sequence.row_range(layer).len() as u64;
            for kind in [types.k, types.v] {
                let len = rows.checked_mul(kind.row_bytes(HEAD_DIM) as u64)?;
                for _ in 0..KV_HEADS {
                    at = at.checked_add(count_padding(self.version, at, len))?.checked_add(len)?;
                }
            }
            if self.sequence.observed_since.is_some() && !is_sliding(layer) {
                at = at.checked_add(rows.checked_mul((KV_HEADS * size_of::<f32>()) as u64)?)?;
            }
        }
        at.checked_add(SUM + if tokens == 0 { 0 } else { STATE_BYTES as u64 })
    }
}

/// A file with the checksum of the bytes written or read so far.
struct Checksummed<F> {
    file: F,
    hasher: Hasher,
    /// Number of these bytes.
    at: u64,
}

impl<F> Checksummed<F> {
    fn new(file: F) -> Self {
        Self { file, hasher: Hasher::new(), at: 0 }
    }

    fn checksum(&self) -> [u8; 4] {
        self.hasher.clone().finalize().to_le_bytes()
    }
}

impl<F: Write> Checksummed<F> {
    fn write_bytes(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
        self.file.write_all(bytes)
    }

    /// Writes rows of all heads, each after its padding.
    fn write_heads(&mut self, rows: &[u8]) -> io::Result<()> {
        for rows in rows.chunks_exact((rows.len() / KV_HEADS).max(1)) {
            let padding = count_padding(VERSION, self.at, rows.len() as u64);
            self.write_bytes(&vec![0; padding as usize])?;
            self.write_bytes(rows)?;
        }
        Ok(())
    }

    /// Writes the checksum of everything so far.
    fn put_checksum(&mut self) -> io::Result<()> {
        self.write_bytes(&self.checksum())
    }
}

impl<F: Read> Checksummed<F> {
    /// Fills `bytes`.
    fn read_bytes(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact(bytes)?;
        self.hasher.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Fills the rows of all heads. Returns the place of the first head's and the distance to the next's if they are
    /// aligned.
    fn read_heads(&mut self, version: u8, rows: &mut [u8]) -> io::Result<Option<(u64, u64)>> {
        let each = rows.len() / KV_HEADS;
        let mut first = None;
        for rows in rows.chunks_exact_mut(each.max(1)) {
            let padding = count_padding(version, self.at, each as u64);
            self.read_bytes(&mut vec![0; padding as usize])?;
            first = first.or(Some(self.at));
            self.read_bytes(rows)?;
        }
        let is_aligned = version > WITHOUT_PADDING && each as u64 >= ALIGN_FROM;
        Ok(first.filter(|_| is_aligned).map(|first| (first, (each as u64).next_multiple_of(ALIGN))))
    }

    /// Reads a checksum and compares it with that of everything so far.
    fn checksum_fits(&mut self) -> io::Result<bool> {
        let (expected, mut found) = (self.checksum(), [0; 4]);
        self.read_bytes(&mut found)?;
        Ok(found == expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_noticed() {
        let mut stored = Vec::new();
        let mut out = Checksummed::new(&mut stored);
        out.write_bytes(b"123456789").expect("memory");
        out.put_checksum().expect("memory");
        out.write_bytes(b"more").expect("memory");
        out.put_checksum().expect("memory");
        // The check value of CRC-32 (IEEE 802.3).
        assert_eq!(stored[9..13], 0xcbf4_3926u32.to_le_bytes());
        let fits = |stored: &[u8]| -> io::Result<(bool, bool)> {
            let mut input = Checksummed::new(stored);
            input.read_bytes(&mut [0; 9])?;
            let first = input.checksum_fits()?;
            input.read_bytes(&mut [0; 4])?;
            Ok((first, input.checksum_fits()?))
        };
        assert_eq!(fits(&stored).expect("whole"), (true, true));
        for bit in 0..stored.len() * 8 {
            let mut other = stored.clone();
            other[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(fits(&other).expect("whole"), (true, true));
        }
        assert!((0..stored.len()).all(|n| fits(&stored[..n]).is_err()));
    }
}
