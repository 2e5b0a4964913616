//! Drafts by a Gemma 4 assistant. Its input is a token's embedding and the model's final state of the token before it;
//! its layers attend to the model's own keys and values. It predicts the token that follows, and a state to go on from.

use super::acts::try_vec;
use super::attention::{copy_head, norm_and_rotate};
use super::attention_inputs::write_output;
use super::kv::head_rows;
use crate::device::KvCache;
use crate::dims::*;
use crate::rope::{Frequencies, compute_angles};
use crate::weights::{Assistant, AssistantLayer, DenseMatrix, HeadCalibration, Weights};
use files::Result;
use numeric::kv::KvTypes;
use numeric::pool::Pool;
use numeric::quant::format::GROUP_ROWS;
use numeric::simd::attend::{CHUNK, FULL_ATTENTION, KvChunk, Partial, attend, merge_partial};
use numeric::simd::{Isa, ops};
use std::sync::Arc;

/// Query heads of a task of attention.
const TASK_HEADS: usize = 8;
/// Weight bytes of a task.
const TASK_BYTES: usize = 64 << 10;

/// An assistant on the CPU: everything that a prediction needs, except the cache.
pub struct AssistantDevice {
    weights: Arc<Weights>,
    assistant: Arc<Assistant>,
    pool: Pool,
    isa: Isa,
    frequencies: Frequencies,
    /// Cosines and sines of the position: `[ANGLES]`
    cos: Vec<f32>,
    sin: Vec<f32>,
    /// Embedding and state: `[2 * DIM]`
    pair: Vec<f32>,
    /// Residual, and the output of attention or the feed-forward: `[dim]`
    x: Vec<f32>,
    out: Vec<f32>,
    /// Normed residual or output: `[dim]`
    h: Vec<f32>,
    /// `[heads][head width]`
    q: Vec<f32>,
    /// Queries as the stored keys expect them: `[heads]`
    queries: Vec<[f32; HEAD_DIM]>,
    /// Attention over each chunk of the cache: `[kv_head][chunk][query head of the group]`
    partials: Vec<Partial<HEAD_DIM>>,
    /// `[ffn_dim]`
    gate: Vec<f32>,
    up: Vec<f32>,
    /// Scores of the clusters, and the clusters, best first; empty without.
    scores: Vec<f32>,
    ranks: Vec<u32>,
    /// Logits of the tokens of the best clusters, or of all tokens.
    logits: Vec<f32>,
}

impl AssistantDevice {
    /// Allocates the buffers and starts the threads.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new(weights: &Arc<Weights>, assistant: Assistant, isa: Isa, threads: usize) -> Result<Self> {
        let Assistant { dim, heads, ffn_dim, clusters, .. } = &assistant;
        let (count, logits) = clusters.as_ref().map_or((0, VOCAB), |clusters| {
            let count = clusters.centroids.rows;
            (count, clusters.used * (VOCAB / count))
        });
        let floats = |len| try_vec(len, 0.0f32);
        Ok(Self {
            weights: Arc::clone(weights),
            pool: Pool::new(threads),
            isa,
            frequencies: Frequencies::new(),
            cos: floats(ANGLES)?,
            sin: floats(ANGLES)?,
            pair: floats(2 * DIM)?,
            x: floats(*dim)?,
            out: floats(*dim)?,
            h: floats(*dim)?,
            q: floats(heads * HEAD_DIM)?,
            queries: try_vec(*heads, [0.0; HEAD_DIM])?,
            partials: Vec::new(),
            gate: floats(*ffn_dim)?,
            up: floats(*ffn_dim)?,
            scores: floats(count)?,
            ranks: (0..count as u32).collect(),
            logits: floats(logits)?,
            assistant: Arc::new(assistant),
        })
    }

    /// Predicts the token after `token`, which follows what `cache` holds and is at position `pos`, and replaces `state`
    /// (`[DIM]`) by the state to predict the next one from. Drafted tokens have no keys and values: for all of a draft,
    /// the cache and `pos` stay the same.
    ///
    /// # Errors
    ///
    /// Errors of the cache.
    ///
    /// # Panics
    ///
    /// If the CPU cannot address the cache.
    pub fn predict_token(
        &mut self,
        cache: &mut dyn KvCache,
        (token, pos): (u32, usize),
        state: &mut [f32],
    ) -> Result<u32> {
        let (assistant, isa, eps) = (Arc::clone(&self.assistant), self.isa, NORM_EPS as f32);
        let (embedding, before) = self.pair.split_at_mut(DIM);
        self.weights.embed_token(token as usize, pos, embedding);
        before.copy_from_slice(state);
        compute_angles(pos, self.frequencies.for_position(pos, 0), &mut self.cos, &mut self.sin);
        multiply_matrix(&assistant.pre_projection, &self.pair, &mut self.x, &self.pool, isa);
        for layer in &assistant.layers {
            self.attend(layer, cache, pos)?;
            let pool = &self.pool;
            add_normed(isa, &mut self.x, &self.out, &layer.attn_post_norm, &mut self.h);
            ops::rms_norm(isa, &self.x, &layer.ffn_norm, eps, &mut self.h);
            multiply_matrix(&layer.gate, &self.h, &mut self.gate, pool, isa);
            multiply_matrix(&layer.up, &self.h, &mut self.up, pool, isa);
            ops::gelu_mul(isa, &mut self.gate, &self.up);
            multiply_matrix(&layer.down, &self.gate, &mut self.out, pool, isa);
            add_normed(isa, &mut self.x, &self.out, &layer.ffn_post_norm, &mut self.h);
            self.x.iter_mut().for_each(|x| *x *= layer.scalar);
        }
        ops::rms_norm(isa, &self.x, &assistant.norm, eps, &mut self.h);
        multiply_matrix(&assistant.post_projection, &self.h, state, &self.pool, isa);
        self.compute_logits();
        // Of equal logits, the first: `max_by` prefers the last.
        let best = self.logits.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1));
        Ok(token_at(&assistant, &self.ranks, best.map_or(0, |(place, _)| place)))
    }

    /// Tokens that the last prediction chose from, with their logits.
    pub fn predicted_logits(&self) -> impl Iterator<Item = (u32, f32)> {
        self.logits.iter().enumerate().map(|(i, logit)| (token_at(&self.assistant, &self.ranks, i), *logit))
    }

    /// Computes the logits of the normed residual: of the tokens of the best clusters if there are clusters. All tokens
    /// of the vocabulary otherwise, because the last of Gemma's tokens are single characters, such as the comma.
    fn compute_logits(&mut self) {
        let Self { assistant, pool, isa, h, scores, ranks, logits, .. } = self;
        let Assistant { head, clusters, .. } = &**assistant;
        let Some(clusters) = clusters else { return multiply_matrix(head, h, logits, pool, *isa) };
        multiply_matrix(&clusters.centroids, h, scores, pool, *isa);
        let order = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
        ranks.sort_unstable_by(order);
        let (len, row_bytes) = (logits.len(), h.len() * head.dtype.byte_size());
        pool.run_columns(logits, len, (TASK_BYTES / row_bytes).max(1), |mut tile| {
            let first = tile.col;
            for (i, logit) in tile.row_mut(0).iter_mut().enumerate() {
                let at = token_at(assistant, ranks, first + i) as usize * row_bytes;
                let row = head.data.slice(at..at + row_bytes).expect("invariant: a row for each token");
                let mut product = [[0.0; GROUP_ROWS]];
                ops::dense_group(*isa, &row, head.dtype, 0, h, &mut product);
                *logit = product[0][0];
            }
        });
    }

    /// Computes attention of a layer over the rows in the cache, and its projection, into `out`.
    fn attend(&mut self, w: &AssistantLayer, cache: &mut dyn KvCache, pos: usize) -> Result<()> {
        let (extent, isa, layer, heads) = (cache.extent(), self.isa, w.kv_layer, self.queries.len());
        let (types, width, group) = (extent.types, head_dim(layer), heads / KV_HEADS);
        // The token's own row, which the window counts too, is not there.
        let (filled, window) = match attention_window(layer) {
            Some(window) => (pos, (window - 1).max(1)),
            None => (extent.len, FULL_ATTENTION),
        };
        ops::rms_norm(isa, &self.x, &w.attn_norm, NORM_EPS as f32, &mut self.h);
        let q_dim = heads * width;
        multiply_matrix(&w.wq, &self.h, &mut self.q[..q_dim], &self.pool, isa);
        self.rotate_queries(w, types);
        let (k, v) = cache.host_rows()?.layer_rows(layer);
        let (first, capacity) = (filled.saturating_sub(window) / CHUNK, extent.rows_per_head(layer));
        let (chunks, queries) = (filled.div_ceil(CHUNK) - first, &self.queries);
        self.partials.resize(KV_HEADS * chunks * group, Partial::EMPTY);
        self.pool.run_tiles(&mut self.partials, group, (1, TASK_HEADS), |mut tile| {
            let (kv_head, chunk) = (tile.row / chunks, first + tile.row % chunks);
            let from = chunk * CHUNK % capacity;
            let k = &head_rows(k, kv_head)[from * types.k.row_bytes(HEAD_DIM)..];
            let v = &head_rows(v, kv_head)[from * types.v.row_bytes(HEAD_DIM)..];
            let queries = &queries[kv_head * group + tile.col..][..tile.cols];
            let visible = &[filled - chunk * CHUNK; TASK_HEADS][..tile.cols];
            attend::<HEAD_DIM>(isa, KvChunk { k, v, types, window }, queries, visible, tile.row_mut(0));
        });
        // The queries are not needed any more: their place takes attention's output.
        for (head, out) in self.q[..q_dim].chunks_exact_mut(width).enumerate() {
            let (kv_head, of_group) = (head / group, head % group);
            let mut state = Partial::EMPTY;
            for chunk in 0..chunks {
                merge_partial(isa, &mut state, &self.partials[(kv_head * chunks + chunk) * group + of_group]);
            }
            let mut whole = [0.0; HEAD_DIM];
            write_output(types, &state, &mut whole);
            out.copy_from_slice(&whole[..width]);
        }
        multiply_matrix(&w.wo, &self.q[..q_dim], &mut self.out, &self.pool, isa);
        Ok(())
    }

    /// Norms, rotates and scales the queries of a layer to match the stored keys.
    fn rotate_queries(&mut self, w: &AssistantLayer, types: KvTypes) {
        let (layer, width) = (w.kv_layer, head_dim(w.kv_layer));
        let calibration = self.weights.layer_calibration(layer);
        let group = self.queries.len() / KV_HEADS;
        for (head, query) in self.queries.iter_mut().enumerate() {
            *query = copy_head(&self.q, 0, head, width);
            norm_and_rotate(self.isa, query, (layer, &w.q_norm), [&self.cos, &self.sin]);
            query.iter_mut().for_each(|x| *x *= ATTENTION_SCALE as f32);
            if types.k.is_rotated() {
                HeadCalibration::of_head(calibration, head / group).encode_query(query);
            }
        }
    }
}

/// Token of the logit at this place.
fn token_at(assistant: &Assistant, ranks: &[u32], place: usize) -> u32 {
    let Some(clusters) = &assistant.clusters else { return place as u32 };
    let each = VOCAB / clusters.centroids.rows;
    clusters.tokens[ranks[place / each] as usize * each + place % each]
}

/// Multiplies the rows of a matrix with `x` into `out`.
fn multiply_matrix(w: &DenseMatrix, x: &[f32], out: &mut [f32], pool: &Pool, isa: Isa) {
    let tile = (TASK_BYTES / (x.len() * w.dtype.byte_size())).max(1).next_multiple_of(GROUP_ROWS);
    pool.run_columns(out, w.rows, tile, |mut tile| {
        let first = tile.col;
        for (group, out) in tile.row_mut(0).chunks_mut(GROUP_ROWS).enumerate() {
            let mut products = [[0.0; GROUP_ROWS]];
            ops::dense_group(isa, &w.data, w.dtype, first + group * GROUP_ROWS, x, &mut products);
            out.copy_from_slice(&products[0][..out.len()]);
        }
    });
}

/// Norms `out` and adds it to the residual.
fn add_normed(isa: Isa, x: &mut [f32], out: &[f32], norm: &[f32], h: &mut [f32]) {
    ops::rms_norm(isa, out, norm, NORM_EPS as f32, h);
    ops::add_in_place(isa, x, h);
}
