//! The recurrent state of a sequence and its checkpoints. Rows of a cache can be cut back to any length, a state cannot:
//! it goes back to a checkpoint, and the tokens after that are computed again.

use crate::dims::{HAS_STATE, STATE, STATE_BYTES, state_range};
use crate::model::device::KvCache;
use files::Result;
use std::ops::Range;

/// Memory for the checkpoints of all sequences, in bytes.
const CHECKPOINT_BYTES: usize = 128 << 20;
/// Tokens of a prompt from one checkpoint to the next.
const CHECKPOINT_INTERVAL: usize = 256;

/// Maximum number of checkpoints of each of `sequences` sequences.
pub fn max_checkpoints(sequences: usize) -> usize {
    match STATE_BYTES {
        0 => 0,
        bytes => (CHECKPOINT_BYTES / bytes / sequences.max(1)).saturating_sub(1).clamp(3, 32),
    }
}

/// Bytes of the states of some layers in the caches of `sequences` sequences: the current one, and the one to restore.
pub fn state_bytes(layers: &Range<usize>, sequences: usize) -> u64 {
    (2 * 4 * state_range(layers).len() as u64).saturating_mul(sequences as u64)
}

/// Bytes of the checkpoints of `sequences` sequences.
pub fn checkpoint_bytes(sequences: usize) -> u64 {
    (max_checkpoints(sequences) as u64).saturating_mul((STATE_BYTES * sequences) as u64)
}

/// A state after some tokens.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    /// Number of tokens.
    pub tokens: usize,
    /// `[STATE]`
    pub state: Vec<f32>,
}

/// The place of a cache's recurrent state in its sequence, and the checkpoints. Does nothing for models without a state.
pub(super) struct StateHistory {
    /// Number of tokens that the cache's state has seen; `None` if a pass failed, or drafted tokens were discarded.
    current: Option<usize>,
    /// Number of tokens of the state that the cache [can restore](KvCache::restore_first_state).
    first: Option<usize>,
    /// Both numbers once the running pass is done.
    next: (usize, Option<usize>),
    /// In ascending order.
    checkpoints: Vec<Checkpoint>,
    /// Maximum number of checkpoints.
    pub most: usize,
}

impl StateHistory {
    /// The history of an empty sequence, with at most `most` checkpoints.
    pub fn new(most: usize) -> Self {
        Self { current: Some(0), first: None, next: (0, None), checkpoints: Vec::new(), most }
    }

    /// True if the state after the first `tokens` tokens is there.
    pub fn holds_state(&self, tokens: usize) -> bool {
        !HAS_STATE
            || tokens == 0
            || self.current == Some(tokens)
            || self.first == Some(tokens)
            || self.checkpoints.iter().any(|checkpoint| checkpoint.tokens == tokens)
    }

    /// True if the cache's state is that after the first `tokens` tokens.
    pub fn is_at(&self, tokens: usize) -> bool {
        !HAS_STATE || self.current == Some(tokens)
    }

    /// Numbers of tokens whose states are there, from `most` down.
    pub fn list_places(&self, most: usize) -> impl Iterator<Item = usize> {
        // In descending order: the cache's states are never behind the last checkpoint.
        let checkpoints = self.checkpoints.iter().rev().map(|checkpoint| checkpoint.tokens);
        self.current.into_iter().chain(self.first).chain(checkpoints).filter(move |&n| HAS_STATE && n <= most)
    }

    /// Begins a pass of these tokens of the sequence.
    pub fn begin_pass(&mut self, tokens: Range<usize>) {
        if HAS_STATE {
            let first = (tokens.len() > 1).then_some(tokens.start + 1);
            (self.current, self.first, self.next) = (None, None, (tokens.end, first));
        }
    }

    /// Ends a pass that did not fail.
    pub fn end_pass(&mut self) {
        if HAS_STATE {
            (self.current, self.first) = (Some(self.next.0), self.next.1);
        }
    }

    /// Goes back to the state after the first `tokens` tokens, if it is there, and drops later checkpoints.
    pub fn truncate(&mut self, cache: &mut dyn KvCache, tokens: usize) {
        if !HAS_STATE {
            return;
        }
        self.checkpoints.retain(|checkpoint| checkpoint.tokens <= tokens);
        if tokens == 0 {
            // The cache was emptied, which clears its state.
            self.current = Some(0);
        } else if self.current != Some(tokens) {
            let found = self.checkpoints.last().filter(|checkpoint| checkpoint.tokens == tokens);
            let restored = if self.first.take_if(|first| *first == tokens).is_some() {
                cache.restore_first_state().is_ok()
            } else {
                found.is_some_and(|checkpoint| cache.write_state(&checkpoint.state).is_ok())
            };
            self.current = restored.then_some(tokens);
        }
        self.first = self.first.filter(|first| *first < tokens);
    }

    /// Saves the cache's state, unless it is already.
    pub fn save(&mut self, cache: &mut dyn KvCache) -> Result<()> {
        let Some(tokens) = self.current.filter(|&n| HAS_STATE && n > 0 && self.most > 0) else {
            return Ok(());
        };
        if self.checkpoints.last().is_some_and(|last| last.tokens >= tokens) {
            return Ok(());
        }
        let mut state = if self.checkpoints.len() < self.most {
            vec![0.0; STATE]
        } else {
            self.checkpoints.remove(self.find_least_useful()).state
        };
        cache.read_state(&mut state)?;
        self.checkpoints.push(Checkpoint { tokens, state });
        Ok(())
    }

    /// Saves the state of a prompt if the last checkpoint is some way back.
    pub fn save_if_far(&mut self, cache: &mut dyn KvCache) -> Result<()> {
        let last = self.checkpoints.last().map_or(0, |last| last.tokens);
        match self.current {
            Some(tokens) if tokens >= last + CHECKPOINT_INTERVAL => self.save(cache),
            _ => Ok(()),
        }
    }

    /// Index of the checkpoint after which the fewest tokens must be computed again without it; never the latest.
    fn find_least_useful(&self) -> usize {
        let before = |i: usize| if i == 0 { 0 } else { self.checkpoints[i - 1].tokens };
        let gap = |i: usize| self.checkpoints[i + 1].tokens - before(i);
        (0..self.checkpoints.len().saturating_sub(1)).min_by_key(|&i| gap(i)).unwrap_or(0)
    }

    /// Copies of the checkpoints and of the current state, in ascending order.
    pub fn export_checkpoints(&self, cache: &mut dyn KvCache) -> Result<Vec<Checkpoint>> {
        let mut all = self.checkpoints.clone();
        if let Some(tokens) = self.current.filter(|&n| HAS_STATE && n > 0)
            && all.last().is_none_or(|last| last.tokens < tokens)
        {
            let mut state = vec![0.0; STATE];
            cache.read_state(&mut state)?;
            all.push(Checkpoint { tokens, state });
        }
        Ok(all)
    }

    /// Replaces the history by the checkpoints up to `tokens` tokens, and goes to the state there.
    pub fn import_checkpoints(&mut self, cache: &mut dyn KvCache, checkpoints: &[Checkpoint], tokens: usize) {
        if HAS_STATE {
            // An empty sequence is saved with a state of no tokens, which is none.
            let kept = checkpoints.iter().filter(|checkpoint| (1..=tokens).contains(&checkpoint.tokens));
            self.checkpoints = kept.cloned().collect();
            (self.current, self.first) = (None, None);
            self.truncate(cache, tokens);
            let surplus = self.checkpoints.len().saturating_sub(self.most.max(1));
            self.checkpoints.drain(..surplus);
        }
    }
}
