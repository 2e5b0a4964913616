//! Attention: stores new rows in the cache, and each query attends to all slots up to its own. In observed passes, the
//! attention that each slot receives is added to its mass.

use super::kv;
use super::runs::{PassRuns, RunSpan};
use super::softmax_cell::AtomicSoftmax;
use super::steps::{KV_PAD, Q_PAD, QKV, Scratch, alloc_partials, count_partials};
use crate::device::{AttentionFn, AttentionJob};
use crate::dims::*;
use crate::weights::{Channels, Weights};
use files::Result;
use numeric::kv::{KvType, KvTypes, hadamard_transform};
use numeric::pool::Pool;
use numeric::simd::attend::{
    self, CHUNK, FULL_ATTENTION, KvChunk, MAX_QUERIES, ObservedQueries, Partial, SoftmaxState, attend,
    merge_partial,
};
use numeric::simd::{Isa, kv_row, ops};
use std::ops::Range;
use std::sync::Mutex;

/// Query heads and tokens of one attention task.
const TASK_HEADS: usize = if GROUP < MAX_QUERIES { GROUP } else { MAX_QUERIES };
const TASK_TOKENS: usize = MAX_QUERIES / TASK_HEADS;
/// Maximum number of queries observed at once; all queries of a token go together.
const OBSERVED: usize = if GROUP < MAX_QUERIES { MAX_QUERIES / GROUP * GROUP } else { GROUP };

/// The weights and a layer's index.
type WeightsLayer<'a> = (&'a Weights, usize);

/// Norm and calibration of a layer's keys.
#[derive(Clone, Copy)]
struct KeyTransform<'a> {
    layer: usize,
    norm: &'a [f32],
    calibration: &'a [f32],
}

impl Scratch {
    /// Norms and rotates the new keys and stores them with the values. A run of many tokens is one task per KV head,
    /// each run of one token is one task.
    pub(super) fn store_keys_values(
        &self,
        weights: &Weights,
        index: usize,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        let norm = &weights.layers[index].k_norm;
        let keys = KeyTransform { layer: index, norm, calibration: weights.layer_calibration(index) };
        let of_one_token = |run: usize| {
            let mut seq = seqs.write_run(run);
            let RunSpan { first, extent, .. } = seq.span;
            let at = (extent.types, seq.span.slots_before(index) % extent.rows_per_head(index));
            for (kv_head, mut rows) in
                kv::head_rows_mut(seq.rows.layer_rows_mut(index)).into_iter().enumerate()
            {
                self.store_row(keys, (first, kv_head), isa, at, &mut rows);
            }
        };
        for run in (0..seqs.len()).filter(|&run| seqs.uses_all_threads(run)) {
            let mut seq = seqs.write_run(run);
            let RunSpan { first, tokens, extent, .. } = seq.span;
            let before = seq.span.slots_before(index);
            let heads = kv::head_rows_mut(seq.rows.layer_rows_mut(index)).map(Mutex::new);
            pool.run(if tokens == 1 { 1 } else { KV_HEADS }, &|task| {
                let range = if tokens == 1 { 0..KV_HEADS } else { task..task + 1 };
                for kv_head in range {
                    let mut rows = heads[kv_head].lock().expect("invariant: no job panics");
                    for t in 0..tokens {
                        let at = (extent.types, (before + t) % extent.rows_per_head(index));
                        self.store_row(keys, (first + t, kv_head), isa, at, &mut rows);
                    }
                }
            });
        }
        if (0..seqs.len()).any(|run| !seqs.uses_all_threads(run)) {
            pool.run(seqs.len(), &|run| {
                if !seqs.uses_all_threads(run) {
                    of_one_token(run);
                }
            });
        }
    }

    /// Stores key and value of token `t` and a KV head in row `place` of the head.
    #[inline(always)]
    fn store_row(
        &self,
        keys: KeyTransform<'_>,
        (t, kv_head): (usize, usize),
        isa: Isa,
        (types, place): (KvTypes, usize),
        (ks, vs): &mut (&mut [u8], &mut [u8]),
    ) {
        let (k_bytes, v_bytes) = (types.k.row_bytes(HEAD_DIM), types.v.row_bytes(HEAD_DIM));
        let row = &self.qkv[t * QKV..][..QKV];
        let mut k = copy_head(row, Q_PAD, kv_head);
        if QK_NORM {
            k = norm_head(isa, &k, keys.norm);
        }
        self.rotate_head(isa, &mut k, keys.layer, t);
        let mut v = copy_head(row, Q_PAD + KV_PAD, kv_head);
        if types.k.is_rotated() {
            Channels::of_head(keys.calibration, kv_head).encode_key(&mut k);
        }
        if types.v.is_rotated() {
            hadamard_transform(&mut v);
        }
        kv_row::encode_row(isa, types.k, &k, &mut ks[place * k_bytes..][..k_bytes]);
        kv_row::encode_row(isa, types.v, &v, &mut vs[place * v_bytes..][..v_bytes]);
    }

    /// Rotates a head of token `t` as the layer does (RoPE).
    #[inline(always)]
    fn rotate_head(&self, isa: Isa, head: &mut [f32; HEAD_DIM], layer: usize, t: usize) {
        if ROPE_DIM > 0 {
            let from = t * ANGLES + first_angle(layer);
            let (cos, sin) = (&self.cos[from..][..ROPE_DIM / 2], &self.sin[from..][..ROPE_DIM / 2]);
            ops::apply_rope(isa, &mut head[..ROPE_DIM], cos, sin);
        }
    }

    /// Computes attention of the new tokens, whose rows are already in their caches, into `att`.
    pub(super) fn compute_attention(
        &mut self,
        weights: &Weights,
        index: usize,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        let mut att = std::mem::take(&mut self.att);
        let mut partials = std::mem::take(&mut self.partials);
        for run in (0..seqs.len()).filter(|&run| seqs.uses_all_threads(run)) {
            let seq = seqs.read_run(run);
            let RunSpan { first, tokens, .. } = seq.span;
            let att = &mut att[first * Q_DIM..][..tokens * Q_DIM];
            let heads = self.attention_heads((weights, index), seq.span, seq.rows.layer_rows(index), isa);
            heads.attend_all(pool, tokens, att, &mut partials);
        }
        if (0..seqs.len()).any(|run| !seqs.uses_all_threads(run)) {
            let att = &mut att[..self.run_of.len() * Q_DIM];
            pool.run_tiles(att, Q_DIM, (1, GROUP * HEAD_DIM), |mut tile| {
                let run = self.run_of[tile.row] as usize;
                if !seqs.uses_all_threads(run) {
                    let seq = seqs.read_run(run);
                    let heads =
                        self.attention_heads((weights, index), seq.span, seq.rows.layer_rows(index), isa);
                    heads.attend_one_token(tile.col, tile.row_mut(0));
                }
            });
        }
        (self.att, self.partials) = (att, partials);
    }

    /// Adds the attention of observed tokens to the mass of the layer's slots; sliding-window layers have no mass.
    pub(super) fn record_mass(
        &self,
        weights: &Weights,
        index: usize,
        seqs: &mut PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        for seq in seqs.iter_mut().filter(|seq| seq.span.observe > 0 && !is_local(index)) {
            let rows = seq.rows.layer_rows_mut(index);
            let mass = rows.mass.expect("a cache that is observed has mass");
            let heads = self.attention_heads((weights, index), seq.span, (&*rows.k, &*rows.v), isa);
            heads.observe(pool, seq.span.tokens, mass);
        }
    }

    /// Everything that attention of a run reads in one layer, and the notes on observed tokens' softmax.
    #[allow(clippy::type_complexity, reason = "closures have no names")]
    fn attention_heads<'a>(
        &'a self,
        at: WeightsLayer<'a>,
        span: RunSpan,
        (k, v): (&'a [u8], &'a [u8]),
        isa: Isa,
    ) -> AttentionInputs<
        'a,
        impl Fn(usize, usize) -> [f32; HEAD_DIM] + Sync + 'a,
        impl Fn(usize) -> (&'a [u8], &'a [u8]) + Sync + 'a,
    > {
        let RunSpan { extent, first, tokens, observe, .. } = span;
        let types = extent.types;
        let query = move |t, h| self.rotated_query(at, types, (first + t, h), isa);
        let rows = move |kv_head| (kv::head_rows(k, kv_head), kv::head_rows(v, kv_head));
        let notes = self.notes.get(first * HEADS..).unwrap_or_default();
        let (before, capacity, window) = (
            span.slots_before(at.1),
            extent.rows_per_head(at.1),
            attention_window(at.1).unwrap_or(FULL_ATTENTION),
        );
        AttentionInputs { query, rows, types, before, capacity, window, isa, first: tokens - observe, notes }
    }

    /// Adds the squares of `n` tokens' queries of a layer to `sums`: `[kv_head][HEAD_DIM]`.
    pub(super) fn add_squares(&self, layer: WeightsLayer<'_>, isa: Isa, n: usize, sums: &mut [f64]) {
        for (t, h) in (0..n).flat_map(|t| (0..HEADS).map(move |h| (t, h))) {
            let query = self.rotated_query(layer, KvTypes::same(KvType::F32), (t, h), isa);
            let sums = &mut sums[h / GROUP * HEAD_DIM..];
            sums.iter_mut().zip(query).for_each(|(sum, q)| *sum += f64::from(q) * f64::from(q));
        }
    }

    /// Query of token `t` and head `h`, rotated and scaled to match the layer's stored keys.
    fn rotated_query(
        &self,
        (weights, index): WeightsLayer<'_>,
        types: KvTypes,
        (t, h): (usize, usize),
        isa: Isa,
    ) -> [f32; HEAD_DIM] {
        let mut q = copy_head(&self.qkv[t * QKV..][..QKV], 0, h);
        if QK_NORM {
            q = norm_head(isa, &q, &weights.layers[index].q_norm);
        }
        self.rotate_head(isa, &mut q, index, t);
        q.iter_mut().for_each(|x| *x *= ATTENTION_SCALE as f32);
        if types.k.is_rotated() {
            Channels::of_head(weights.layer_calibration(index), h / GROUP).encode_query(&mut q);
        }
        q
    }
}

/// Attention on the CPU for a device that keeps its rows elsewhere, with its own threads and scratch for `capacity`
/// slots; scratch grows for longer caches.
pub fn attention_for_device(threads: usize, isa: Isa, capacity: usize) -> Result<AttentionFn> {
    let pool = Pool::new(threads);
    let mut partials = alloc_partials(capacity)?;
    let mut notes: Vec<AtomicSoftmax> = Vec::new();
    Ok(Box::new(move |job: AttentionJob<'_>| {
        let AttentionJob { tokens, before, window, queries, stride, k, v, capacity, types, att, mass } = job;
        let query = |t: usize, h: usize| copy_head(&queries[t * stride..], 0, h);
        let rows = |kv_head: usize| {
            let from = kv_head * capacity;
            (&k[from * types.k.row_bytes(HEAD_DIM)..], &v[from * types.v.row_bytes(HEAD_DIM)..])
        };
        let needed = count_partials(capacity.min(before + tokens));
        if partials.len() < needed {
            partials.resize(needed, Partial::EMPTY);
        }
        let observed = mass.as_ref().map_or(0, |mass| mass.tokens.min(tokens));
        if notes.len() < observed * HEADS {
            notes.resize_with(observed * HEADS, AtomicSoftmax::default);
        }
        let (window, first) = (window.unwrap_or(FULL_ATTENTION), tokens - observed);
        let heads =
            AttentionInputs { query, rows, types, before, capacity, window, isa, first, notes: &notes };
        heads.attend_all(&pool, tokens, att, &mut partials);
        if let Some(mass) = mass {
            heads.observe(&pool, tokens, mass.sums);
        }
    }))
}

/// Head `index` of the part of a q|k|v row that begins at `start`.
fn copy_head(row: &[f32], start: usize, index: usize) -> [f32; HEAD_DIM] {
    std::array::from_fn(|i| row[start + index * HEAD_DIM + i])
}

fn norm_head(isa: Isa, x: &[f32; HEAD_DIM], w: &[f32]) -> [f32; HEAD_DIM] {
    let mut out = [0.0; HEAD_DIM];
    ops::rms_norm(isa, x, w, NORM_EPS as f32, &mut out);
    out
}

/// Inputs of an attention task: queries by token and head, rows by KV head.
struct AttentionInputs<'a, Q, R> {
    query: Q,
    rows: R,
    types: KvTypes,
    /// Filled slots, or positions, before the new tokens.
    before: usize,
    /// Rows of a head.
    capacity: usize,
    /// Slots that a query sees, its own included.
    window: usize,
    isa: Isa,
    /// The first observed token; the number of tokens if none is.
    first: usize,
    /// Softmax of observed tokens: `[token - first][HEADS]`.
    notes: &'a [AtomicSoftmax],
}

impl<'a, Q, R> AttentionInputs<'a, Q, R>
where
    Q: Fn(usize, usize) -> [f32; HEAD_DIM] + Sync,
    R: Fn(usize) -> (&'a [u8], &'a [u8]) + Sync,
{
    /// Computes attention of `n` tokens, whose rows are already in the cache, into `att`.
    fn attend_all(&self, pool: &Pool, n: usize, att: &mut [f32], partials: &mut [Partial<HEAD_DIM>]) {
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
                    self.store_softmax(0, first + h, &state);
                    self.write_output(&state, out);
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
                        self.write_output(out, &mut tile.row_mut(t)[cols]);
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
    fn attend_one_token(&self, col: usize, att: &mut [f32]) {
        let (first, end) = (col / HEAD_DIM, (col + att.len()) / HEAD_DIM);
        for from in (first..end).step_by(TASK_HEADS) {
            self.attend_tokens::<TASK_HEADS>(0..1, from..end.min(from + TASK_HEADS), |_, h, state| {
                self.write_output(state, &mut att[(from - first + h) * HEAD_DIM..][..HEAD_DIM]);
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
                attend::<HEAD_DIM, TASK_HEADS>(
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
            attend::<HEAD_DIM, N>(self.isa, kv, &queries[..count], &visible[..count], &mut parts[..count]);
            for (state, part) in states[..count].iter_mut().zip(&parts) {
                merge_partial(self.isa, state, part);
            }
        }
        for (i, state) in states[..count].iter().enumerate() {
            put(i / heads.len(), i % heads.len(), state);
        }
    }

    /// Stores the final softmax state of an observed query.
    fn store_softmax(&self, token: usize, head: usize, state: &Partial<HEAD_DIM>) {
        if token >= self.first {
            self.notes[(token - self.first) * HEADS + head].store(SoftmaxState { m: state.m, l: state.l });
        }
    }

    /// Adds the attention of the observed among `n` tokens to `sums`: `[kv_head][slot]`.
    fn observe(&self, pool: &Pool, n: usize, sums: &mut [f32]) {
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

    /// Adds it for the slots of one head from `slot` on, in whole chunks, `N` queries at a time.
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
                attend::add_attention_mass::<HEAD_DIM, N>(self.isa, (self.types.k, k), looks, mass);
            }
        }
    }

    /// Divides by the softmax sum and rotates back, if values are stored rotated.
    fn write_output(&self, state: &Partial<HEAD_DIM>, out: &mut [f32]) {
        out.iter_mut().zip(&state.o).for_each(|(out, o)| *out = o / state.l);
        if self.types.v.is_rotated() {
            hadamard_transform(out);
        }
    }
}
