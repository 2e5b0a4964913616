//! Attention over rows of a cache: by tasks of some heads and tokens, or by chunks where one token has long rows.

use super::softmax_cell::AtomicSoftmax;
use crate::dims::*;
use crate::weights::HeadCalibration;
use numeric::kv::{KvTypes, hadamard_transform};
use numeric::pool::Pool;
use numeric::simd::Isa;
use numeric::simd::attend::{
    self, CHUNK, KvChunk, MAX_QUERIES, ObservedQueries, Partial, SoftmaxState, attend, merge_partial,
};
use std::ops::Range;

/// Query heads and tokens of one attention task.
const TASK_HEADS: usize = if GROUP < MAX_QUERIES { GROUP } else { MAX_QUERIES };
const TASK_TOKENS: usize = MAX_QUERIES / TASK_HEADS;
/// Maximum number of queries observed at once; all queries of a token go together.
const OBSERVED: usize = if GROUP < MAX_QUERIES { MAX_QUERIES / GROUP * GROUP } else { GROUP };

/// Inputs of an attention task: queries by token and head, rows by KV head.
pub(super) struct AttentionInputs<'a, Q, R> {
    pub(super) query: Q,
    pub(super) rows: R,
    pub(super) types: KvTypes,
    /// Filled slots, or positions, before the new tokens.
    pub(super) before: usize,
    /// Rows of a head.
    pub(super) capacity: usize,
    /// Slots that a query sees, its own included.
    pub(super) window: usize,
    pub(super) isa: Isa,
    /// The first observed token; the number of tokens if none is.
    pub(super) first: usize,
    /// Softmax of observed tokens: `[token - first][HEADS]`.
    pub(super) notes: &'a [AtomicSoftmax],
    /// Logits that take part in the softmax of each head, and whose share is dropped: `[HEADS]`, empty without.
    pub(super) sinks: &'a [f32],
    /// Calibration of the layer's keys, by which sinks are shifted like the scores.
    pub(super) calibration: &'a [f32],
}

impl<'a, Q, R> AttentionInputs<'a, Q, R>
where
    Q: Fn(usize, usize) -> [f32; HEAD_DIM] + Sync,
    R: Fn(usize) -> (&'a [u8], &'a [u8]) + Sync,
{
    /// Computes attention of `n` tokens, whose rows are already in the cache, into `att`.
    pub(super) fn attend_all(
        &self,
        pool: &Pool,
        n: usize,
        att: &mut [f32],
        partials: &mut [Partial<HEAD_DIM>],
    ) {
        let skipped = self.first_chunk(0);
        let chunks = (self.before + n).div_ceil(CHUNK) - skipped;
        if n == 1 && chunks > 1 && pool.thread_count() > 1 && HEADS * chunks <= partials.len() {
            // One token over a long context: the threads share its chunks, then the partial results are merged.
            let span = (KV_HEADS * chunks).div_ceil(4 * pool.thread_count()).clamp(1, chunks);
            let all = &mut partials[..HEADS * chunks];
            pool.run_tiles(all, chunks * GROUP, (1, span * GROUP), |mut tile| {
                let (kv_head, first) = (tile.row, tile.col / GROUP);
                self.attend_chunks(kv_head, skipped + first, tile.row_mut(0));
            });
            let all = &*all;
            pool.run_tiles(&mut att[..Q_DIM], Q_DIM, (1, GROUP * HEAD_DIM), |mut tile| {
                let first = tile.col / HEAD_DIM;
                let of_head = &all[first * chunks..][..chunks * GROUP];
                for (h, out) in tile.row_mut(0).chunks_exact_mut(HEAD_DIM).enumerate() {
                    let mut state = Partial::EMPTY;
                    of_head[h..].iter().step_by(GROUP).for_each(|p| merge_partial(self.isa, &mut state, p));
                    self.add_sink((0, first + h), &mut state);
                    self.store_softmax(0, first + h, &state);
                    write_output(self.types, &state, out);
                }
            });
        } else {
            let tile = (TASK_TOKENS, TASK_HEADS * HEAD_DIM);
            pool.run_tiles(&mut att[..n * Q_DIM], Q_DIM, tile, |mut tile| {
                let tokens = tile.row..tile.row + tile.rows;
                let first_head = tile.col / HEAD_DIM;
                let last_head = (tile.col + tile.cols) / HEAD_DIM;
                // A tile never spans two KV heads unless TASK_HEADS does not divide GROUP.
                let mut from = first_head;
                while from < last_head {
                    let to = last_head.min((from / GROUP + 1) * GROUP);
                    let at = (from - first_head) * HEAD_DIM;
                    let put = |t: usize, h: usize, out: &Partial<HEAD_DIM>| {
                        let cols = at + h * HEAD_DIM..at + (h + 1) * HEAD_DIM;
                        self.store_softmax(tokens.start + t, from + h, out);
                        write_output(self.types, out, &mut tile.row_mut(t)[cols]);
                    };
                    match n {
                        1 => self.attend_tokens::<TASK_HEADS>(tokens.clone(), from..to, put),
                        _ => self.attend_tokens::<MAX_QUERIES>(tokens.clone(), from..to, put),
                    }
                    from = to;
                }
            });
        }
    }

    /// Computes attention of a run's only new token over all its slots, for the heads of one KV head from column `col`.
    pub(super) fn attend_one_token(&self, col: usize, att: &mut [f32]) {
        let (first, end) = (col / HEAD_DIM, (col + att.len()) / HEAD_DIM);
        for from in (first..end).step_by(TASK_HEADS) {
            self.attend_tokens::<TASK_HEADS>(0..1, from..end.min(from + TASK_HEADS), |_, h, state| {
                write_output(self.types, state, &mut att[(from - first + h) * HEAD_DIM..][..HEAD_DIM]);
            });
        }
    }

    /// Index of the first chunk that a new token sees.
    fn first_chunk(&self, token: usize) -> usize {
        (self.before + token + 1).saturating_sub(self.window) / CHUNK
    }

    /// Rows of one chunk.
    fn kv_chunk(&self, kv_head: usize, chunk: usize) -> KvChunk<'a> {
        let types = self.types;
        let (k, v) = (self.rows)(kv_head);
        let from = chunk * CHUNK % self.capacity;
        KvChunk {
            k: &k[from * types.k.row_bytes(HEAD_DIM)..],
            v: &v[from * types.v.row_bytes(HEAD_DIM)..],
            types,
            window: self.window,
        }
    }

    /// Partials of the only new token over consecutive chunks: `[chunk][query head of the group]`.
    fn attend_chunks(&self, kv_head: usize, first: usize, out: &mut [Partial<HEAD_DIM>]) {
        let slots = self.before + 1;
        let mut queries = [[0.0; HEAD_DIM]; TASK_HEADS];
        for from in (0..GROUP).step_by(TASK_HEADS) {
            let n = TASK_HEADS.min(GROUP - from);
            for (h, q) in queries[..n].iter_mut().enumerate() {
                *q = (self.query)(0, kv_head * GROUP + from + h);
            }
            for (c, out) in out.chunks_exact_mut(GROUP).enumerate() {
                let seen = slots - (first + c) * CHUNK;
                let kv = self.kv_chunk(kv_head, first + c);
                attend::<HEAD_DIM>(
                    self.isa,
                    kv,
                    &queries[..n],
                    &[seen; TASK_HEADS][..n],
                    &mut out[from..from + n],
                );
            }
        }
    }

    /// Computes attention of some tokens and heads of one group, at most `N` pairs. `put(token, head, state)` counts
    /// both from the first.
    fn attend_tokens<const N: usize>(
        &self,
        tokens: Range<usize>,
        heads: Range<usize>,
        mut put: impl FnMut(usize, usize, &Partial<HEAD_DIM>),
    ) {
        let count = tokens.len() * heads.len();
        let mut queries = [[0.0; HEAD_DIM]; N];
        let mut states = [Partial::EMPTY; N];
        let mut parts = [Partial::EMPTY; N];
        for (i, q) in queries[..count].iter_mut().enumerate() {
            *q = (self.query)(tokens.start + i / heads.len(), heads.start + i % heads.len());
        }
        let slots = |i: usize| self.before + tokens.start + i / heads.len() + 1;
        for chunk in self.first_chunk(tokens.start)..slots(count - 1).div_ceil(CHUNK) {
            let visible: [usize; N] = std::array::from_fn(|i| slots(i).saturating_sub(chunk * CHUNK));
            let kv = self.kv_chunk(heads.start / GROUP, chunk);
            attend::<HEAD_DIM>(self.isa, kv, &queries[..count], &visible[..count], &mut parts[..count]);
            for (state, part) in states[..count].iter_mut().zip(&parts) {
                merge_partial(self.isa, state, part);
            }
        }
        for (i, state) in states[..count].iter_mut().enumerate() {
            self.add_sink((tokens.start + i / heads.len(), heads.start + i % heads.len()), state);
            put(i / heads.len(), i % heads.len(), state);
        }
    }

    /// Adds the sink of a head, if the model has such, to the softmax over all its slots: the last term of the sum.
    fn add_sink(&self, (token, head): (usize, usize), state: &mut Partial<HEAD_DIM>) {
        if ATTENTION_SINKS {
            let mut m = self.sinks[head];
            if self.types.k.is_rotated() {
                let keys = HeadCalibration::of_head(self.calibration, head / GROUP);
                m -= keys.score_mean(&(self.query)(token, head));
            }
            merge_partial(self.isa, state, &Partial { m, l: 1.0, o: [0.0; HEAD_DIM] });
        }
    }

    /// Stores the final softmax state of an observed query.
    fn store_softmax(&self, token: usize, head: usize, state: &Partial<HEAD_DIM>) {
        if token >= self.first {
            self.notes[(token - self.first) * HEADS + head].store(SoftmaxState { m: state.m, l: state.l });
        }
    }

    /// Adds the attention of the observed among `n` tokens to `sums`: `[kv_head][slot]`.
    pub(super) fn observe(&self, pool: &Pool, n: usize, sums: &mut [f32]) {
        /// Maximum number of parts of a head; most have no work while few slots are filled.
        const PARTS: usize = 64;
        if self.first == n {
            return;
        }
        let capacity = sums.len() / KV_HEADS;
        let chunks = (self.before + n).div_ceil(CHUNK);
        let span = (KV_HEADS * chunks).div_ceil(4 * pool.thread_count()).clamp(1, chunks);
        let span = span.max(capacity.div_ceil(CHUNK * PARTS));
        pool.run_tiles(sums, capacity, (1, span * CHUNK), |mut tile| {
            let (kv_head, slot) = (tile.row, tile.col);
            match n - self.first {
                1 => self.observe_slots::<GROUP>(kv_head, slot, n, tile.row_mut(0)),
                _ => self.observe_slots::<OBSERVED>(kv_head, slot, n, tile.row_mut(0)),
            }
        });
    }

    /// Adds the mass of one head's slots from `slot` on, in whole chunks, `N` queries at a time.
    fn observe_slots<const N: usize>(&self, kv_head: usize, slot: usize, n: usize, mass: &mut [f32]) {
        let (mut queries, mut softmax) = ([[0.0; HEAD_DIM]; N], [SoftmaxState::default(); N]);
        let row_bytes = self.types.k.row_bytes(HEAD_DIM);
        for first in (self.first..n).step_by(N / GROUP) {
            let tokens = (n - first).min(N / GROUP);
            let sees = self.before + first + tokens;
            if sees <= slot {
                continue;
            }
            for i in 0..tokens * GROUP {
                let (token, head) = (first + i / GROUP, kv_head * GROUP + i % GROUP);
                queries[i] = (self.query)(token, head);
                softmax[i] = self.notes[(token - self.first) * HEADS + head].load();
            }
            let starts = (slot..sees).step_by(CHUNK);
            for (start, mass) in starts.zip(mass.chunks_mut(CHUNK)) {
                let visible: [usize; N] =
                    std::array::from_fn(|t| (self.before + first + t + 1).saturating_sub(start));
                let looks = ObservedQueries {
                    queries: &queries[..tokens * GROUP],
                    softmax: &softmax[..tokens * GROUP],
                    visible: &visible[..tokens],
                };
                let k = &(self.rows)(kv_head).0[start * row_bytes..];
                attend::add_attention_mass::<HEAD_DIM, OBSERVED>(self.isa, (self.types.k, k), looks, mass);
            }
        }
    }
}

/// Divides by the softmax sum and rotates back, if values are stored rotated.
pub(super) fn write_output(types: KvTypes, state: &Partial<HEAD_DIM>, out: &mut [f32]) {
    out.iter_mut().zip(&state.o).for_each(|(out, o)| *out = o / state.l);
    if types.v.is_rotated() {
        hadamard_transform(out);
    }
}
