//! The runs of a pass, each with its tokens' places in the pass and the cache rows of its sequence.

use crate::device::{Extent, HostRows, Logits, Run, reuse_memory};
use crate::dims::{DIM, LAYERS, VOCAB, is_sliding};
use files::Result;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

/// One run of a pass.
pub(super) struct PassRun<'a> {
    pub span: RunSpan,
    /// Rows of its cache, the new ones included.
    pub rows: &'a mut dyn HostRows,
    /// Destination of the final states of its last tokens: `[token][DIM]`.
    pub hidden: &'a mut [f32],
    /// Residual that the layers before or behind exchange with this device: `[token][DIM]`.
    pub residual: &'a mut [f32],
    logits: Logits<'a>,
}

/// Place of a run's tokens in the cache, the sequence and the pass.
#[derive(Clone, Copy)]
pub(super) struct RunSpan {
    /// Shape of its cache before the pass.
    pub extent: Extent,
    /// Position of its first token.
    pub pos: usize,
    /// Index of its first token in the pass.
    pub first: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of observed tokens, counted from the end.
    pub observe: usize,
    /// Number of tokens, counted from the end, that go through all of the last layer: those whose logits or final states
    /// are wanted, or all if attention is observed in that layer.
    pub kept: usize,
}

impl RunSpan {
    /// Slots (positions in a sliding-window layer) before the rows of its tokens.
    pub fn slots_before(&self, layer: usize) -> usize {
        if is_sliding(layer) { self.pos } else { self.extent.len }
    }
}

/// The runs of a pass. Tasks of different runs write to different caches, so that no task waits for a lock.
#[derive(Default)]
pub(super) struct PassRuns<'a>(Vec<RwLock<PassRun<'a>>>);

impl<'a> PassRuns<'a> {
    /// Takes the slots of all new tokens and borrows the rows of their caches.
    ///
    /// # Errors
    ///
    /// Errors of [`Cache::host_rows`](crate::device::KvCache::host_rows); [`release_slots`] gives the slots back.
    pub fn borrow_rows<'r: 'a>(&mut self, runs: &'a mut [Run<'r>]) -> Result<()> {
        let mut first = 0;
        runs.iter_mut().for_each(|run| {
            let (extent, tokens) = (run.cache.extent(), run.tokens.len());
            assert!(tokens > 0 && extent.has_room(run.pos, tokens), "a run has free slots");
            run.cache.set_len(extent.len + tokens);
        });
        for Run { cache, tokens, pos, logits, observed_tokens: observe, hidden, residual, .. } in runs {
            let (extent, tokens) = (cache.extent(), tokens.len());
            let extent = Extent { len: extent.len - tokens, ..extent };
            let logits = logits.reborrow();
            let observe = (*observe).min(tokens);
            let kept = match logits {
                _ if observe > 0 && !is_sliding(LAYERS - 1) => tokens,
                Logits::None => 0,
                Logits::Last(_) => 1,
                Logits::All(_) => tokens,
            };
            let kept = kept.max(hidden.len() / DIM);
            let rows = cache.host_rows()?;
            let span = RunSpan { extent, pos: *pos, first, tokens, observe, kept };
            self.0.push(RwLock::new(PassRun { span, rows, hidden, residual, logits }));
            first += tokens;
        }
        Ok(())
    }

    /// Empties the list and keeps its memory for the runs of the next pass.
    pub fn into_empty<'b>(self) -> PassRuns<'b> {
        PassRuns(reuse_memory(self.0))
    }

    /// Number of runs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Borrows a run, shared with other readers.
    pub fn read_run(&self, run: usize) -> RwLockReadGuard<'_, PassRun<'a>> {
        self.0[run].read().expect("invariant: no job panics")
    }

    /// Borrows a run for writing.
    pub fn write_run(&self, run: usize) -> RwLockWriteGuard<'_, PassRun<'a>> {
        self.0[run].write().expect("invariant: no job panics")
    }

    /// All runs, exclusively.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut PassRun<'a>> {
        self.0.iter_mut().map(|s| s.get_mut().expect("invariant: no job panics"))
    }

    /// Replaces the residual of all tokens, `[token][DIM]`, by that of the layers before this device's.
    pub fn read_residual(&mut self, x: &mut [f32]) {
        for run in self.iter_mut() {
            x[run.span.first * DIM..][..run.residual.len()].copy_from_slice(run.residual);
        }
    }

    /// Hands the residual of all tokens on to the layers behind this device's.
    pub fn write_residual(&mut self, x: &[f32]) {
        for run in self.iter_mut() {
            run.residual.copy_from_slice(&x[run.span.first * DIM..][..run.span.tokens * DIM]);
        }
    }

    /// Number of tokens that go through all of the last layer.
    pub fn tokens_in_last_layer(&mut self) -> usize {
        self.iter_mut().map(|seq| seq.span.kept).sum()
    }

    /// Sends the last token of the pass through all of the last layer, even if its logits are not wanted.
    pub fn force_last_token(&mut self) {
        if let Some(seq) = self.iter_mut().last() {
            seq.span.kept = seq.span.kept.max(1);
        }
    }

    /// True if all threads compute the run together; otherwise it is one task among those of other runs.
    pub fn uses_all_threads(&self, run: usize) -> bool {
        let RunSpan { tokens, observe, .. } = self.read_run(run).span;
        self.len() == 1 || tokens > 1 || observe > 0
    }
}

impl PassRun<'_> {
    /// Leaves only the kept tokens, from token `first` of the pass on. Returns their former range in the pass.
    pub fn keep_output_tokens(&mut self, first: usize) -> std::ops::Range<usize> {
        let RunSpan { tokens, kept, observe, .. } = self.span;
        let left = tokens - kept;
        let from = self.span.first + left;
        self.span.extent.len += left;
        self.span.pos += left;
        (self.span.first, self.span.tokens, self.span.observe) = (first, kept, observe.min(kept));
        from..from + kept
    }

    /// Range in the pass of the tokens whose logits are wanted.
    pub fn output_tokens(&self) -> std::ops::Range<usize> {
        let RunSpan { first, tokens, .. } = self.span;
        let end = first + tokens;
        match self.logits {
            Logits::None => end..end,
            Logits::Last(_) => end - 1..end,
            Logits::All(_) => first..end,
        }
    }

    /// Destinations of their logits, `[VOCAB]` each.
    pub fn logits_rows(&mut self) -> impl Iterator<Item = &mut [f32]> {
        let wanted = self.output_tokens().len();
        let all: &mut [f32] = match &mut self.logits {
            Logits::None => &mut [],
            Logits::Last(logits) | Logits::All(logits) => logits,
        };
        assert_eq!(all.len(), wanted * VOCAB);
        all.chunks_exact_mut(VOCAB)
    }
}

/// Gives back the slots of tokens that were not computed.
pub(super) fn release_slots(runs: &mut [Run<'_>]) {
    for run in runs {
        let len = run.cache.extent().len;
        run.cache.set_len(len - run.tokens.len());
    }
}
