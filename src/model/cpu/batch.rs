//! Several sequences that share weights, threads and buffers: one pass computes a token of each, so that weights are
//! read once for all.

use super::cache::Cache;
use super::{CpuOptions, Runner};
use crate::dims::VOCAB;
use crate::model::backend::{CancelToken, Logits};
use crate::model::trace::Recorder;
use crate::model::weights::Weights;
use files::Result;
use std::sync::{Arc, RwLock};

/// Whose tokens a pass computes.
pub(super) enum Rows<'a> {
    /// Tokens that follow each other in one sequence, from position `pos` on.
    Run { cache: &'a mut Cache, tokens: &'a [u32], pos: usize },
    /// One token of each of some sequences that evict nothing, so that slots are positions: `(sequence, token)`, no
    /// sequence twice. Tasks of different tokens write into different caches.
    Each { caches: &'a [RwLock<Cache>], tokens: &'a [(usize, u32)] },
}

impl Rows<'_> {
    /// Tokens.
    pub fn count(&self) -> usize {
        match self {
            Rows::Run { tokens, .. } => tokens.len(),
            Rows::Each { tokens, .. } => tokens.len(),
        }
    }

    /// Token `t` and its RoPE position.
    pub fn token(&self, t: usize) -> (u32, usize) {
        match self {
            Rows::Run { tokens, pos, .. } => (tokens[t], pos + t),
            Rows::Each { caches, tokens } => {
                let (sequence, token) = tokens[t];
                (token, len(&caches[sequence]))
            }
        }
    }

    /// RoPE position of the last token.
    pub fn last_position(&self) -> usize {
        self.token(self.count() - 1).1
    }

    /// Whether every token has a free slot, and no other's.
    pub fn fit(&self) -> bool {
        match self {
            Rows::Run { cache, tokens, .. } => cache.len() + tokens.len() <= cache.capacity(),
            Rows::Each { caches, tokens } => {
                let free = |sequence: usize| {
                    let cache = caches[sequence].read().expect("invariant: no job panics");
                    cache.len() < cache.capacity()
                };
                let once = |i: usize| tokens[..i].iter().all(|t| t.0 != tokens[i].0);
                (0..tokens.len()).all(|i| once(i) && free(tokens[i].0))
            }
        }
    }

    /// The tokens count from now on.
    pub fn done(&mut self) {
        match self {
            Rows::Run { cache, tokens, .. } => cache.set_len(cache.len() + tokens.len()),
            Rows::Each { caches, tokens } => {
                for &(sequence, _) in *tokens {
                    let mut cache = caches[sequence].write().expect("invariant: no job panics");
                    let len = cache.len() + 1;
                    cache.set_len(len);
                }
            }
        }
    }
}

fn len(cache: &RwLock<Cache>) -> usize {
    cache.read().expect("invariant: no job panics").len()
}

/// Sequences of one model on the CPU that are decoded together. What each computes are the bits that it would compute
/// alone in a [`super::CpuBackend`].
pub struct CpuBatch {
    runner: Runner,
    /// By sequence.
    caches: Vec<RwLock<Cache>>,
    cancel: Option<CancelToken>,
}

impl CpuBatch {
    /// Room for so many sequences, each of `options.capacity` slots, all empty.
    ///
    /// # Errors
    ///
    /// `Memory` where it does not fit.
    pub fn new(weights: Arc<Weights>, mut options: CpuOptions, sequences: usize) -> Result<Self> {
        assert!(sequences > 0);
        options.max_tokens = options.max_tokens.clamp(1, options.capacity.max(1)).max(sequences);
        let cache = || Cache::new(options.kv_types, options.capacity).map(RwLock::new);
        let caches = (0..sequences).map(|_| cache()).collect::<Result<_>>()?;
        Ok(Self { runner: Runner::new(weights, options)?, caches, cancel: None })
    }

    /// Sequences there is room for.
    pub fn sequences(&self) -> usize {
        self.caches.len()
    }

    /// Most tokens that [`CpuBatch::prefill`] takes at once.
    pub fn max_tokens(&self) -> usize {
        self.runner.max_tokens
    }

    /// Tokens of a sequence.
    pub fn len(&self, sequence: usize) -> usize {
        len(&self.caches[sequence])
    }

    /// Whether a sequence has no token.
    pub fn is_empty(&self, sequence: usize) -> bool {
        self.len(sequence) == 0
    }

    /// Keeps the first `len` tokens of a sequence.
    pub fn set_len(&mut self, sequence: usize, len: usize) {
        self.cache(sequence).set_len(len);
    }

    fn cache(&mut self, sequence: usize) -> &mut Cache {
        self.caches[sequence].get_mut().expect("invariant: no job panics")
    }

    /// As [`crate::model::backend::Backend::record`].
    pub fn record(&mut self, recorder: Option<Recorder>) -> Option<Recorder> {
        std::mem::replace(&mut self.runner.recorder, recorder)
    }

    /// As [`crate::model::backend::Backend::heed`].
    pub fn heed(&mut self, cancel: Option<&CancelToken>) {
        self.cancel = cancel.cloned();
    }

    /// Appends tokens to one sequence, as [`crate::model::backend::Backend::forward`] does.
    ///
    /// # Errors
    ///
    /// `Interrupted`, after which none of them counts.
    pub fn prefill(&mut self, sequence: usize, tokens: &[u32], out: Logits<'_>) -> Result<()> {
        let Self { runner, caches, cancel } = self;
        let cache = caches[sequence].get_mut().expect("invariant: no job panics");
        let pos = cache.len();
        runner.pool.heed(cancel.as_ref());
        runner.pass(&mut Rows::Run { cache, tokens, pos }, &mut None, out)
    }

    /// Appends one token to each of some sequences, `(sequence, token)`, and computes their logits: `[token][VOCAB]`.
    /// Never allocates.
    ///
    /// # Errors
    ///
    /// `Interrupted`, after which none of them counts.
    pub fn decode(&mut self, tokens: &[(usize, u32)], logits: &mut [f32]) -> Result<()> {
        assert_eq!(logits.len(), tokens.len() * VOCAB);
        let Self { runner, caches, cancel } = self;
        runner.pool.heed(cancel.as_ref());
        runner.pass(&mut Rows::Each { caches, tokens }, &mut None, Logits::All(logits))
    }
}
