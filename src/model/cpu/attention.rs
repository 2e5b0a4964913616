//! Attention: stores new rows in the cache, and each query attends to all slots up to its own. In observed passes, the
//! attention that each slot receives is added to its mass.

use super::attention_inputs::AttentionInputs;
use super::kv;
use super::runs::{PassRuns, RunSpan};
use super::softmax_cell::AtomicSoftmax;
use super::steps::{K_AT, KV_PAD, QKV, Scratch, alloc_partials, count_partials};
use crate::device::{AttentionFn, AttentionJob};
use crate::dims::*;
use crate::weights::{HeadCalibration, Layer, Weights};
use files::Result;
use files::config::QkNorm;
use numeric::kv::{KvType, KvTypes, hadamard_transform};
use numeric::pool::Pool;
use numeric::simd::attend::{FULL_ATTENTION, Partial};
use numeric::simd::{Isa, kv_row, ops};
use std::sync::Mutex;

/// A layer that attends, with its index, or that of a layer of the same shape.
#[derive(Clone, Copy)]
pub(super) struct AttentionLayer<'a> {
    pub index: usize,
    pub weights: &'a Layer,
    /// Calibration of the keys that it reads.
    pub calibration: &'a [f32],
}

impl<'a> AttentionLayer<'a> {
    /// A layer of the model.
    pub fn of(weights: &'a Weights, index: usize) -> Self {
        let calibration = weights.layer_calibration(kv_layer(index));
        Self { index, weights: &weights.layers[index], calibration }
    }
}

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
        layer: AttentionLayer<'_>,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        let index = layer.index;
        let [_, norm] = layer.weights.qk_norms();
        let keys = KeyTransform { layer: index, norm, calibration: layer.calibration };
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
        let width = head_dim(keys.layer);
        let projected = kv_head * kv_heads(keys.layer) / KV_HEADS;
        let mut k = copy_head(row, K_AT, projected, width);
        norm_and_rotate(isa, &mut k, (keys.layer, keys.norm), self.angles_of(t));
        let values_at = if values_are_keys(keys.layer) { K_AT } else { K_AT + KV_PAD };
        let mut v = copy_head(row, values_at, projected, width);
        if VALUE_NORM {
            v = norm_head(isa, &v, &[1.0; HEAD_DIM][..width]);
        }
        if types.k.is_rotated() {
            HeadCalibration::of_head(keys.calibration, kv_head).encode_key(&mut k);
        }
        if types.v.is_rotated() {
            hadamard_transform(&mut v);
        }
        kv_row::encode_row(isa, types.k, &k, &mut ks[place * k_bytes..][..k_bytes]);
        kv_row::encode_row(isa, types.v, &v, &mut vs[place * v_bytes..][..v_bytes]);
    }

    /// Computes attention of the new tokens, whose rows are already in their caches, into `att`.
    pub(super) fn compute_attention(
        &mut self,
        layer: AttentionLayer<'_>,
        seqs: &PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        let index = layer.index;
        let mut att = std::mem::take(&mut self.att);
        let mut partials = std::mem::take(&mut self.partials);
        for run in (0..seqs.len()).filter(|&run| seqs.uses_all_threads(run)) {
            let seq = seqs.read_run(run);
            let RunSpan { first, tokens, .. } = seq.span;
            let att = &mut att[first * Q_DIM..][..tokens * Q_DIM];
            let rows = seq.rows.layer_rows(kv_layer(index));
            let heads = self.attention_heads(layer, seq.span, rows, isa);
            heads.attend_all(pool, tokens, att, &mut partials);
        }
        if (0..seqs.len()).any(|run| !seqs.uses_all_threads(run)) {
            let att = &mut att[..self.run_of.len() * Q_DIM];
            pool.run_tiles(att, Q_DIM, (1, GROUP * HEAD_DIM), |mut tile| {
                let run = self.run_of[tile.row] as usize;
                if !seqs.uses_all_threads(run) {
                    let seq = seqs.read_run(run);
                    let rows = seq.rows.layer_rows(kv_layer(index));
                    let heads = self.attention_heads(layer, seq.span, rows, isa);
                    heads.attend_one_token(tile.col, tile.row_mut(0));
                }
            });
        }
        (self.att, self.partials) = (att, partials);
    }

    /// Adds the attention of observed tokens to the mass of the layer's slots. Sliding-window layers have no mass, and
    /// layers that read another's slots add nothing to it.
    pub(super) fn record_mass(
        &self,
        layer: AttentionLayer<'_>,
        seqs: &mut PassRuns<'_>,
        pool: &Pool,
        isa: Isa,
    ) {
        let index = layer.index;
        for seq in seqs.iter_mut().filter(|seq| seq.span.observe > 0 && has_mass(index)) {
            let rows = seq.rows.layer_rows_mut(index);
            let mass = rows.mass.expect("a cache that is observed has mass");
            let heads = self.attention_heads(layer, seq.span, (&*rows.k, &*rows.v), isa);
            heads.observe(pool, seq.span.tokens, mass);
        }
    }

    /// Everything that attention of a run reads in one layer, and the notes on observed tokens' softmax.
    #[allow(clippy::type_complexity, reason = "closures have no names")]
    fn attention_heads<'a>(
        &'a self,
        layer: AttentionLayer<'a>,
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
        let query = move |t, h| self.rotated_query(layer, types, (first + t, h), isa);
        let rows = move |kv_head| (kv::head_rows(k, kv_head), kv::head_rows(v, kv_head));
        let notes = self.notes.get(first * HEADS..).unwrap_or_default();
        let (before, capacity, window) = (
            span.slots_before(layer.index),
            extent.rows_per_head(layer.index),
            attention_window(layer.index).unwrap_or(FULL_ATTENTION),
        );
        let (first, sinks, calibration) = (tokens - observe, layer.weights.sink_logits(), layer.calibration);
        AttentionInputs {
            query,
            rows,
            types,
            before,
            capacity,
            window,
            isa,
            first,
            notes,
            sinks,
            calibration,
        }
    }

    /// Adds the squares of `n` tokens' queries of a layer to `sums`: `[kv_head][HEAD_DIM]`.
    pub(super) fn add_squares(&self, layer: AttentionLayer<'_>, isa: Isa, n: usize, sums: &mut [f64]) {
        for (t, h) in (0..n).flat_map(|t| (0..HEADS).map(move |h| (t, h))) {
            let query = self.rotated_query(layer, KvTypes::same(KvType::F32), (t, h), isa);
            let sums = &mut sums[h / GROUP * HEAD_DIM..];
            sums.iter_mut().zip(query).for_each(|(sum, q)| *sum += f64::from(q) * f64::from(q));
        }
    }

    /// Cosines and sines of token `t`, `[ANGLES]` each.
    fn angles_of(&self, t: usize) -> [&[f32]; 2] {
        [&self.cos, &self.sin].map(|angles| &angles[t * ANGLES..][..ANGLES])
    }

    /// Query of token `t` and head `h`, rotated and scaled to match the layer's stored keys.
    fn rotated_query(
        &self,
        layer: AttentionLayer<'_>,
        types: KvTypes,
        (t, h): (usize, usize),
        isa: Isa,
    ) -> [f32; HEAD_DIM] {
        let mut q = copy_head(&self.qkv[t * QKV..][..QKV], 0, h, head_dim(layer.index));
        let [norm, _] = layer.weights.qk_norms();
        norm_and_rotate(isa, &mut q, (layer.index, norm), self.angles_of(t));
        q.iter_mut().for_each(|x| *x *= ATTENTION_SCALE as f32);
        if QUERY_GROWTH.is_some() {
            let growth = self.cos[(t + 1) * ANGLES - 1];
            q.iter_mut().for_each(|x| *x *= growth);
        }
        if types.k.is_rotated() {
            HeadCalibration::of_head(layer.calibration, h / GROUP).encode_query(&mut q);
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
        let AttentionJob {
            tokens, before, window, queries, stride, k, v, capacity, types, att, mass, ..
        } = job;
        let [sinks, calibration] = job.sinks;
        let query = |t: usize, h: usize| copy_head(&queries[t * stride..], 0, h, HEAD_DIM);
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
        let heads = AttentionInputs {
            query,
            rows,
            types,
            before,
            capacity,
            window,
            isa,
            first,
            notes: &notes,
            sinks,
            calibration,
        };
        heads.attend_all(&pool, tokens, att, &mut partials);
        if let Some(mass) = mass {
            heads.observe(&pool, tokens, mass.sums);
        }
    }))
}

/// Head `index` of the part of a q|k|v row that begins at `start`, of `width` elements; zeros follow them.
pub(super) fn copy_head(row: &[f32], start: usize, index: usize, width: usize) -> [f32; HEAD_DIM] {
    let mut head = [0.0; HEAD_DIM];
    head[..width].copy_from_slice(&row[start + index * width..][..width]);
    head
}

/// Norms a head of queries or keys by the weights `norm` and rotates it as the layer does (RoPE).
#[inline(always)]
pub(super) fn norm_and_rotate(
    isa: Isa,
    head: &mut [f32; HEAD_DIM],
    (layer, norm): (usize, &[f32]),
    angles: [&[f32]; 2],
) {
    if QK_NORM == QkNorm::PerHead {
        *head = norm_head(isa, head, norm);
    }
    if ROPE_DIM > 0 {
        let width = rope_dim(layer);
        let [cos, sin] = angles.map(|angles| &angles[first_angle(layer)..][..width / 2]);
        ops::apply_rope(isa, &mut head[..width], cos, sin);
    }
    if QK_NORM == QkNorm::AfterRope {
        *head = norm_head(isa, head, norm);
    }
}

/// Norms as many elements of a head as the norm has weights.
fn norm_head(isa: Isa, x: &[f32; HEAD_DIM], w: &[f32]) -> [f32; HEAD_DIM] {
    let mut out = [0.0; HEAD_DIM];
    ops::rms_norm(isa, &x[..w.len()], w, NORM_EPS as f32, &mut out[..w.len()]);
    out
}
