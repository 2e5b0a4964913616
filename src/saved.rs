//! Saved sequences (`--session`): tokens, cache rows and random state in one file.
//!
//! Layout, little endian: magic, version, length of a JSON header, header, then for each layer the key
//! rows and the value rows, then FNV-1a of everything before. Written to a temporary name and renamed, so
//! that the file is always whole.

use crate::backend::KvRows;
use crate::dims::{HEAD_DIM, LAYERS};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::sampler::Rng;
use crate::session::{Sequence, Session};
use crate::weights::pack::Unfinished;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::Path;

const MAGIC: &[u8; 8] = b"AGSAVED1";

#[derive(Serialize, Deserialize)]
struct Header {
    model: String,
    kv_types: String,
    slots: usize,
    position: usize,
    tokens: Vec<u32>,
    rng: [u64; 4],
}

/// Writes the sequence and the random state.
pub fn save(file: &Path, session: &mut Session, engine: &Engine, rng: &Rng) -> Result<()> {
    let header = Header {
        model: engine.weights().fingerprint.clone(),
        kv_types: session.backend().kv_types().to_string(),
        slots: session.slots(),
        position: session.position(),
        tokens: session.tokens().to_vec(),
        rng: rng.words(),
    };
    let header = serde_json::to_vec(&header).map_err(|e| Error::io(file, e))?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&(header.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&header);
    let mut rows = KvRows::default();
    for layer in 0..LAYERS {
        session.read_rows(layer, &mut rows)?;
        bytes.extend_from_slice(&rows.k);
        bytes.extend_from_slice(&rows.v);
    }
    let sum = checksum(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    let write = || -> std::io::Result<()> {
        let mut unfinished = Unfinished::create(file)?;
        unfinished.file.write_all(&bytes)?;
        unfinished.finish(file)
    };
    write().map_err(|e| Error::io(file, format!("cannot save the session: {e}")))
}

/// Restores a sequence; `None` when there is no such file yet.
pub fn load(file: &Path, session: &mut Session, engine: &Engine) -> Result<Option<Rng>> {
    let bytes = match std::fs::metadata(file) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Ok(meta) if !meta.is_file() => return Err(Error::model(file, "is not a regular file")),
        _ => std::fs::read(file).map_err(|e| Error::model(file, format!("cannot read: {e}")))?,
    };
    let bad = |what: &str| Error::model(file, format!("{what}; delete it to start a new session"));
    let body = bytes.len().checked_sub(8).filter(|_| bytes.starts_with(MAGIC));
    let body = body.ok_or_else(|| bad("is not a saved session of this version"))?;
    if checksum(&bytes[..body]).to_le_bytes() != bytes[body..] {
        return Err(bad("is damaged"));
    }
    let length = bytes[..body].get(8..16).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes);
    let end = length.and_then(|n| usize::try_from(n).ok()?.checked_add(16));
    let header = end.and_then(|end| bytes[..body].get(16..end)).ok_or_else(|| bad("is damaged"))?;
    let mut rows = &bytes[16 + header.len()..body];
    let header: Header = serde_json::from_slice(header).map_err(|_| bad("is damaged"))?;
    let types = session.backend().kv_types();
    if header.model != engine.weights().fingerprint {
        return Err(bad("was saved with another model"));
    }
    if header.kv_types != types.to_string() {
        let kind = &header.kv_types;
        return Err(Error::Usage(format!("--session {}: was saved with --kv-type {kind}", file.display())));
    }
    if header.slots > session.backend().capacity() {
        return Err(Error::Usage(format!(
            "--session {}: holds {} slots; raise --max-seq-len",
            file.display(),
            header.slots
        )));
    }
    let shape = KvRows::zeroed(types, header.slots, HEAD_DIM);
    let mut layers = Vec::with_capacity(LAYERS);
    for _ in 0..LAYERS {
        let mut take = |n: usize| {
            let (now, rest) = rows.split_at_checked(n)?;
            rows = rest;
            Some(now.to_vec())
        };
        let pair = take(shape.k.len()).zip(take(shape.v.len()));
        let (k, v) = pair.ok_or_else(|| bad("is damaged"))?;
        layers.push(KvRows { k, v });
    }
    let rng = Rng::restore(header.rng).ok_or_else(|| bad("is damaged"))?;
    let tokens = header.tokens;
    let sequence = Sequence { slots: tokens.len(), tokens, cuts: vec![], prefix: 0, dense: 0, since: None };
    session.restore(sequence, |layer, rows, _| {
        *rows = std::mem::take(&mut layers[layer]);
        Ok(())
    })?;
    Ok(Some(rng))
}

/// FNV-1a, eight bytes at a time.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64, |hash, chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        (hash ^ u64::from_le_bytes(word)).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
    })
}
