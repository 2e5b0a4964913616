//! Prefix cache: KV rows of ended sequences, copied for new prompts that begin with the same tokens.

use crate::dims::{
    CACHE_LAYERS, HAS_STATE, HEAD_DIM, KV_HEADS, LAYERS, ROPE, SLIDING_LAYERS, STATE_BYTES, WINDOW,
    has_cache, is_sliding,
};
use crate::model::device::KvRows;
use crate::run::placement::Checkpoint;
use crate::run::session::{Sequence, Session};
use files::Result;
use numeric::kv::KvTypes;
use std::sync::Arc;

/// Minimum number of tokens worth caching: fewer are computed faster.
const MIN_TOKENS: usize = 8;

/// Group of texts that share rows. Neither speed nor the number of cached tokens reveals anything about other realms.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Realm {
    /// Index of the client's API key.
    pub key: Option<usize>,
    /// A secret of the client's own.
    pub salt: Option<Arc<str>>,
}

/// The rows of one sequence.
struct CachedPrefix {
    /// Realm that may use them.
    realm: Realm,
    tokens: Vec<u32>,
    /// True if its keys have the RoPE frequencies of long sequences: see [`is_long`].
    long: bool,
    /// First position whose rows sliding-window layers have.
    oldest: usize,
    /// Rows of each layer: `[kv_head][slot][row bytes]`.
    rows: Vec<KvRows>,
    /// Recurrent states after some of the tokens, in ascending order.
    states: Vec<Checkpoint>,
    bytes: u64,
}

/// True if keys of this prompt get the RoPE frequencies of long sequences, if the model has such. Prompts of the two
/// kinds cannot share rows.
fn is_long(prompt: usize) -> bool {
    ROPE.long.is_some_and(|long| prompt > long.original_context)
}

impl CachedPrefix {
    /// Number of the prompt's leading tokens whose rows can be copied; never the last token, whose logits are wanted.
    fn shared_tokens(&self, prompt: &[u32]) -> usize {
        if self.long != is_long(prompt.len()) {
            return 0;
        }
        let most = prompt.len().saturating_sub(1);
        let same = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count().min(most);
        let same = if !HAS_STATE {
            same
        } else {
            self.states.iter().map(|state| state.tokens).take_while(|&n| n <= same).last().unwrap_or(0)
        };
        let reaches = SLIDING_LAYERS == 0 || self.oldest == 0 || same + 1 >= self.oldest + WINDOW;
        if reaches && same >= MIN_TOKENS { same } else { 0 }
    }

    /// The sequence of the first `n` tokens.
    fn sequence_of_first(&self, n: usize) -> Sequence {
        Sequence {
            tokens: self.tokens[..n].to_vec(),
            slots: n,
            oldest: self.oldest.min(n),
            ..Sequence::default()
        }
    }

    /// Copies the rows of the first `n` tokens of a layer.
    fn copy_rows(&self, (layer, types): (usize, KvTypes), n: usize, to: &mut KvRows) {
        let first = if is_sliding(layer) { self.oldest } else { 0 };
        let (all, some) = (self.tokens.len() - first, n.saturating_sub(first));
        let from = &self.rows[layer];
        let planes = [(types.k, &from.k, &mut to.k), (types.v, &from.v, &mut to.v)];
        for (kind, from, to) in planes {
            let row = kind.row_bytes(HEAD_DIM);
            for head in 0..KV_HEADS {
                to[head * some * row..][..some * row]
                    .copy_from_slice(&from[head * all * row..][..some * row]);
            }
        }
    }
}

/// Cache of prefixes, ordered from least to most recently used.
pub(super) struct PrefixCache {
    max_bytes: u64,
    entries: Vec<CachedPrefix>,
}

impl PrefixCache {
    /// A cache of at most `most` bytes of rows.
    pub fn new(most: u64) -> Self {
        Self { max_bytes: most, entries: Vec::new() }
    }

    /// Bytes of cached rows.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|kept| kept.bytes).sum()
    }

    /// Copies the longest cached prefix of the prompt in its realm into an empty session. Returns its number of tokens.
    ///
    /// # Errors
    ///
    /// Errors of writing a device's rows; then the session is empty.
    pub fn restore(&mut self, session: &mut Session, prompt: &[u32], realm: &Realm) -> Result<usize> {
        let own = self.entries.iter().enumerate().filter(|(_, kept)| kept.realm == *realm);
        let best = own.map(|(i, kept)| (kept.shared_tokens(prompt), i)).max();
        let Some((n, i)) = best.filter(|&(n, _)| n > 0) else { return Ok(0) };
        let kept = self.entries.remove(i);
        let types = session.extent().types;
        let restored = session.restore(kept.sequence_of_first(n), |layer, rows, _| {
            kept.copy_rows((layer, types), n, rows);
            Ok(())
        });
        if restored.is_ok() {
            session.import_states(&kept.states);
        }
        self.entries.push(kept);
        restored.map(|()| n)
    }

    /// Caches the rows of an ended session whose prompt had `prompt` tokens; evicts the least recently used.
    ///
    /// # Errors
    ///
    /// Errors of reading a device's rows.
    pub fn store(&mut self, session: &mut Session, prompt: usize, realm: &Realm) -> Result<()> {
        session.discard_drafts();
        let tokens = session.tokens();
        let long = is_long(prompt);
        if self.max_bytes == 0 || tokens.len() < MIN_TOKENS || session.has_evicted() {
            return Ok(());
        }
        let is_alike = |kept: &CachedPrefix| kept.long == long && kept.realm == *realm;
        // A prefix of another cached sequence needs no entry of its own.
        if self.entries.iter().any(|kept| is_alike(kept) && kept.tokens.starts_with(tokens)) {
            return Ok(());
        }
        let types = session.extent().types;
        let rows = types.slot_bytes(CACHE_LAYERS, KV_HEADS, HEAD_DIM) * tokens.len();
        let states = session.export_states()?;
        let bytes = (rows + STATE_BYTES * states.len()) as u64;
        let tokens = session.tokens();
        if bytes > self.max_bytes {
            return Ok(());
        }
        self.entries.retain(|kept| !is_alike(kept) || !tokens.starts_with(&kept.tokens));
        while self.bytes() + bytes > self.max_bytes {
            self.entries.remove(0);
        }
        let Sequence { tokens, oldest, .. } = session.sequence();
        let mut rows = Vec::with_capacity(LAYERS);
        for layer in 0..LAYERS {
            let mut of_layer = KvRows::default();
            if has_cache(layer) {
                session.read_rows(layer, &mut of_layer)?;
            }
            rows.push(of_layer);
        }
        self.entries.push(CachedPrefix { realm: realm.clone(), tokens, long, oldest, rows, states, bytes });
        Ok(())
    }
}
