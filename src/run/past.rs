//! The KV cache of a sequence as f32 numbers, outside of any device: `past_key_values`, as transformers calls it.
//!
//! Keys are as attention sees them: after RoPE, whatever form the cache stores (q4: mean subtracted, scaled, rotated).
//! After import, an f32 or f16 cache has the same bits. A q8 cache has the same bits too, and a q4 cache the same
//! numbers, except in blocks whose scale loses bits: those whose largest value is below 0.001. A q4 block whose largest
//! integer is 7 may come back mirrored: scale and integers with the other sign. Heads that are narrower than the cache's
//! are rounded anew in a q4 cache.

use crate::dims::{
    FIRST_SHARING_LAYER, HAS_STATE, HEAD_DIM, KV_HEADS, LEARNED_POSITIONS, MAX_POSITION, VOCAB, WINDOW,
    full_attention_layers, head_dim, is_sliding,
};
use crate::model::device::KvRows;
use crate::model::weights::HeadCalibration;
use crate::run::engine::Engine;
use crate::run::session::{PastEviction, Sequence, Session};
use files::{Error, Result};
use numeric::kv::{KvType, hadamard_transform};
use numeric::simd::{Isa, kv_row};

/// Keys, values and tokens of a sequence. All full-attention layers have the same number of slots. A sliding-window
/// layer has the latest positions, enough for its window.
#[derive(Debug, Clone, PartialEq)]
pub struct PastKeyValues {
    /// All tokens of the sequence, evicted ones included. Their number is the next position. Draft lookup, penalties,
    /// prefix reuse, saved sessions and recomputing a lost device's rows depend on them.
    pub tokens: Vec<u32>,
    /// Keys and values of each layer that has some; the last layers of some models read those of earlier ones.
    pub layers: Vec<LayerKeyValues>,
}

/// Keys and values of one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerKeyValues {
    /// Keys after RoPE: `[kv_head][slot][head_dim]`, with the width of the layer's heads.
    pub keys: Vec<f32>,
    /// Values: `[kv_head][slot][head_dim]`.
    pub values: Vec<f32>,
    /// Position of each slot's token: `[kv_head][slot]`, ascending in a head. After an eviction and in sliding-window
    /// layers, slots differ from positions.
    pub positions: Vec<u32>,
}

/// Rejects models whose sequences have more than keys and values.
fn check_rows_suffice() -> Result<()> {
    if !HAS_STATE {
        return Ok(());
    }
    Err(Error::Usage(
        "PastKeyValues: this model has layers with a recurrent state; use a saved session".into(),
    ))
}

impl PastKeyValues {
    /// Slots of a head in full-attention layers; the number of tokens if there is no such layer.
    pub fn slots(&self) -> usize {
        let global = full_attention_layers().next().and_then(|layer| self.layers.get(layer));
        global.map_or(self.tokens.len(), LayerKeyValues::slots)
    }

    /// Positions of all heads of full-attention layers: `[layer * KV_HEADS + kv_head][slot]`.
    fn head_positions(&self) -> impl Iterator<Item = &[u32]> {
        let slots = self.slots().max(1);
        full_attention_layers().flat_map(move |layer| self.layers[layer].positions.chunks_exact(slots))
    }

    /// First position whose rows sliding-window layers have.
    fn oldest_position(&self) -> usize {
        let local = (0..FIRST_SHARING_LAYER).find(|&layer| is_sliding(layer));
        local.and_then(|layer| self.layers[layer].positions.first()).map_or(0, |&p| p as usize)
    }

    /// Checks that this can be a sequence of this program's model.
    fn validate(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::Usage(format!("PastKeyValues: {what}")));
        if self.layers.len() != FIRST_SHARING_LAYER {
            return wrong(format!("{} layers, but the model has {FIRST_SHARING_LAYER}", self.layers.len()));
        }
        if let Some(id) = self.tokens.iter().find(|&&id| id as usize >= VOCAB) {
            return wrong(format!("token id {id}: the vocabulary ends at {}", VOCAB - 1));
        }
        let (tokens, slots) = (self.tokens.len(), self.slots());
        if LEARNED_POSITIONS && tokens > MAX_POSITION {
            return wrong(format!(
                "{tokens} tokens, but the model has only {MAX_POSITION} learned positions"
            ));
        }
        if slots > tokens || (slots == 0) != (tokens == 0) {
            return wrong(format!(
                "{slots} slots for {tokens} tokens; give every token, and a slot at least"
            ));
        }
        let oldest = self.oldest_position();
        if oldest > 0 && oldest.saturating_add(WINDOW) > tokens + 1 {
            return wrong(format!(
                "sliding-window layers begin at position {oldest}, but the next token sees {WINDOW} positions"
            ));
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let rows = if is_sliding(i) { tokens - oldest } else { slots };
            layer.check_shape(rows, head_dim(i)).or_else(|what| wrong(format!("layer {i}: {what}")))?;
            let recent = |head: &[u32]| head.iter().copied().eq(oldest as u32..tokens as u32);
            if is_sliding(i) && !layer.positions.chunks_exact(rows.max(1)).all(recent) {
                return wrong(format!(
                    "layer {i}: `positions` of a sliding-window layer must be those from {oldest} on"
                ));
            }
        }
        let sound = |head: &[u32]| {
            head.is_sorted_by(|a, b| a < b) && head.last().is_none_or(|&p| (p as usize) < tokens)
        };
        if self.head_positions().all(sound) {
            return Ok(());
        }
        wrong(format!("`positions` must ascend in each head and be below the {tokens} tokens"))
    }

    /// Tokens and layout in a session's form.
    fn to_sequence(&self) -> Sequence {
        let (all, slots) = (self.tokens.len(), self.slots());
        let first = |head: &[u32]| (0u32..).zip(head).take_while(|(at, p)| at == *p).count();
        let last = |head: &[u32]| {
            (0..all as u32).rev().zip(head.iter().rev()).take_while(|(at, p)| at == *p).count()
        };
        let evicted = slots < all;
        let dense = all - self.head_positions().map(last).min().unwrap_or(0);
        Sequence {
            tokens: self.tokens.clone(),
            slots,
            cuts: if evicted { vec![PastEviction { tokens: all, kept: slots }] } else { Vec::new() },
            prefix: if evicted { self.head_positions().map(first).min().unwrap_or(0) } else { 0 },
            dense_from: if evicted { dense } else { 0 },
            observed_since: None,
            positions: if evicted {
                self.head_positions().map(<[u32]>::to_vec).collect()
            } else {
                Vec::new()
            },
            oldest: self.oldest_position(),
        }
    }
}

impl LayerKeyValues {
    /// Slots of a head.
    pub fn slots(&self) -> usize {
        self.positions.len() / KV_HEADS
    }

    fn check_shape(&self, slots: usize, width: usize) -> std::result::Result<(), String> {
        let rows = KV_HEADS * slots;
        let lengths = [
            ("positions", self.positions.len(), rows, "[kv_head][slot]"),
            ("keys", self.keys.len(), rows * width, "[kv_head][slot][head_dim]"),
            ("values", self.values.len(), rows * width, "[kv_head][slot][head_dim]"),
        ];
        if let Some((name, found, wanted, shape)) = lengths.into_iter().find(|l| l.1 != l.2) {
            return Err(format!("{found} numbers in `{name}`; `{shape}` needs {wanted}"));
        }
        for (name, numbers) in [("keys", &self.keys), ("values", &self.values)] {
            if let Some(at) = numbers.iter().position(|x| !x.is_finite()) {
                return Err(format!("`{name}` number {at} is {}; give finite ones", numbers[at]));
            }
        }
        Ok(())
    }
}

/// Converter between rows of f32 numbers and rows of a cache.
struct RowCodec<'a> {
    isa: Isa,
    kind: KvType,
    /// Width of the layer's heads; in the cache, zeros follow narrower ones.
    width: usize,
    /// Calibration of the layer's keys; `None` for values.
    calibration: Option<&'a [f32]>,
}

impl RowCodec<'_> {
    /// Decodes `[kv_head][slot][row bytes]` to `[kv_head][slot][head_dim]`.
    fn decode_rows(&self, rows: &[u8], slots: usize) -> Vec<f32> {
        let mut numbers = Vec::with_capacity(KV_HEADS * slots * self.width);
        let mut copy = vec![0; self.kind.row_bytes(HEAD_DIM)];
        for (i, row) in rows.chunks_exact(copy.len()).enumerate() {
            copy.copy_from_slice(row);
            let mut x = [0.0; HEAD_DIM];
            kv_row::update_row(self.isa, self.kind, &mut copy, |stored| x = *stored);
            if self.kind.is_rotated() {
                match self.calibration {
                    Some(layer) => HeadCalibration::of_head(layer, i / slots).decode_key(&mut x),
                    None => hadamard_transform(&mut x),
                }
            }
            numbers.extend_from_slice(&x[..self.width]);
        }
        numbers
    }

    /// Encodes `[kv_head][slot][head_dim]` to `[kv_head][slot][row bytes]`.
    fn encode_rows(&self, numbers: &[f32], slots: usize, rows: &mut [u8]) {
        let heads = numbers.chunks_exact(self.width);
        for (i, (numbers, row)) in heads.zip(rows.chunks_exact_mut(self.kind.row_bytes(HEAD_DIM))).enumerate()
        {
            let mut x = [0.0; HEAD_DIM];
            x[..self.width].copy_from_slice(numbers);
            if self.kind.is_rotated() {
                match self.calibration {
                    Some(layer) => HeadCalibration::of_head(layer, i / slots).encode_key(&mut x),
                    None => hadamard_transform(&mut x),
                }
            }
            kv_row::reencode_row(self.isa, self.kind, &x, row);
        }
    }
}

impl Session {
    /// Exports the cache as f32 numbers, for any KV type and device. `engine` must be the one that made the session.
    ///
    /// A generation loop with the cache outside of the model: the last token and the cache go in, logits and the longer
    /// cache come out.
    ///
    /// ```
    /// use antigravity::session::CancelToken;
    /// use antigravity::{Engine, EngineOptions};
    ///
    /// let engine = Engine::load(EngineOptions { max_seq_len: 64, ..EngineOptions::new(antigravity::dims::MODEL_DIR) })?;
    /// let best = |logits: &[f32]| {
    ///     let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    ///     best.map_or(0, |(id, _)| id as u32)
    /// };
    ///
    /// let prompt = engine.encode("Once upon a time")?;
    /// let mut session = engine.session()?;
    /// session.prefill(&prompt, &CancelToken::default())?;
    /// let mut next_token = best(session.logits());
    /// let mut past_key_values = session.past_key_values(&engine)?;
    /// for _ in 0..3 {
    ///     let mut session = engine.session()?.with_past(&past_key_values, &engine)?;
    ///     session.decode(next_token)?;
    ///     next_token = best(session.logits());
    ///     past_key_values = session.past_key_values(&engine)?;
    /// }
    ///
    /// assert_eq!(past_key_values.slots(), prompt.len() + 3);
    /// let third_layer = &past_key_values.layers[2]; // K and V: [kv_head][slot][head_dim]
    /// let shape = antigravity::dims::KV_DIM * (prompt.len() + 3);
    /// assert_eq!((third_layer.keys.len(), third_layer.values.len()), (shape, shape));
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Usage` if the positions of slots are unknown: after evictions with a growing number of protected tokens. Errors
    /// of reading a device's rows.
    pub fn past_key_values(&mut self, engine: &Engine) -> Result<PastKeyValues> {
        check_rows_suffice()?;
        let (types, isa) = (self.extent().types, engine.isa());
        let (mut rows, mut layers) = (KvRows::default(), Vec::with_capacity(FIRST_SHARING_LAYER));
        for (layer, positions) in self.positions()?.into_iter().enumerate() {
            let slots = positions.len() / KV_HEADS;
            self.read_rows(layer, &mut rows)?;
            let (width, calibration) = (head_dim(layer), Some(engine.weights().layer_calibration(layer)));
            layers.push(LayerKeyValues {
                keys: RowCodec { isa, kind: types.k, width, calibration }.decode_rows(&rows.k, slots),
                values: RowCodec { isa, kind: types.v, width, calibration: None }.decode_rows(&rows.v, slots),
                positions,
            });
        }
        Ok(PastKeyValues { tokens: self.tokens().to_vec(), layers })
    }

    /// Replaces the sequence by an exported one, which has no logits until the next token is computed, and no attention
    /// mass. `engine` must be the one that made the session.
    ///
    /// # Errors
    ///
    /// `Usage` if it has another model's shape, is not finite, inconsistent or too long for the cache, or if its heads
    /// kept different slots but the session's eviction policy does not look at attention.
    pub fn with_past(mut self, past: &PastKeyValues, engine: &Engine) -> Result<Self> {
        check_rows_suffice()?;
        past.validate()?;
        let (types, isa) = (self.extent().types, engine.isa());
        let sequence = past.to_sequence();
        let plain = sequence.cuts.is_empty() || sequence.has_contiguous_positions();
        if !plain && !self.tracks_positions() {
            return Err(Error::Usage(
                "PastKeyValues: heads kept different slots; give an `Eviction::policy` that looks at attention".into(),
            ));
        }
        self.restore(sequence, |layer, rows, _| {
            let of = &past.layers[layer];
            let (width, calibration) = (head_dim(layer), Some(engine.weights().layer_calibration(layer)));
            let keys = RowCodec { isa, kind: types.k, width, calibration };
            keys.encode_rows(&of.keys, of.slots(), &mut rows.k);
            let values = RowCodec { isa, kind: types.v, width, calibration: None };
            values.encode_rows(&of.values, of.slots(), &mut rows.v);
            Ok(())
        })?;
        Ok(self)
    }
}
