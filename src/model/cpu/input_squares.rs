//! Mean squares of the inputs of matrices, by which quantised types weigh the errors of their columns.

use super::acts::Activations;
use super::steps::Scratch;
use super::{CpuDevice, CpuOptions};
use crate::device::{Device, Logits, Run};
use crate::dims::*;
use crate::weights::Weights;
use files::Result;
use files::blocks::BLOCK;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::sync::Arc;

/// Share of a matrix's mean that every column has at least.
const LEAST: f64 = 1e-4;

/// Maximum number of tokens of a pass.
const PASS: usize = 256;

/// Input of some matrices of a layer.
#[derive(Clone, Copy)]
pub(super) enum InputOf {
    /// Queries, keys, values and gates, or the projections of a recurrent layer.
    Mixer,
    /// The mixer's output projection.
    MixerOut,
    /// That of Mamba2, which may be beside it.
    MambaOut,
    /// Gate and up; of the experts alone if a feed-forward beside them has another input.
    Ffn,
    /// Down.
    FfnDown,
}

/// Sums of squares over the tokens of a text: of the inputs of each layer, `[layer][input]`, then of the output head.
#[derive(Debug, Clone, PartialEq)]
pub struct InputSquares(Vec<Vec<f64>>);

impl InputSquares {
    const PER_LAYER: usize = 5;

    /// Without any inputs: all columns count alike.
    pub fn without_inputs() -> Self {
        Self(vec![Vec::new(); LAYERS * Self::PER_LAYER + 1])
    }

    /// Measures the inputs of these weights' matrices over a text.
    ///
    /// # Errors
    ///
    /// `Memory` if there is not enough for the pass.
    pub fn measure(weights: Arc<Weights>, tokens: &[u32], threads: usize) -> Result<Self> {
        let (slots, kv_types) = (tokens.len(), KvTypes::same(KvType::F32));
        let options = CpuOptions { threads, isa: Isa::detect()?, kv_types, slots, max_tokens: PASS };
        let mut device = CpuDevice::new(weights, options)?;
        let mut cache = device.new_cache(slots)?;
        let (mut hidden, mut of_head) = (vec![0.0; PASS * DIM], Vec::new());
        device.inputs = Some(Self::without_inputs());
        for (i, tokens) in tokens.chunks(PASS).enumerate() {
            let hidden = &mut hidden[..tokens.len() * DIM];
            let run = Run::new(&mut *cache, tokens, i * PASS, Logits::None);
            device.forward(&mut [Run { hidden, known_len: slots, ..run }], None)?;
            add_rows(&mut of_head, DIM, hidden.chunks_exact(DIM).map(|row| row.to_vec()));
        }
        let mut squares = device.inputs.take().unwrap_or_else(Self::without_inputs);
        squares.0[LAYERS * Self::PER_LAYER] = of_head;
        Ok(squares)
    }

    /// Adds rows of a layer's input, `width` values each.
    pub(super) fn add(
        &mut self,
        layer: usize,
        of: InputOf,
        x: &Activations,
        (width, rows): (usize, impl Iterator<Item = usize>),
    ) {
        let row = |t: usize| -> Vec<f32> {
            if !x.floats.is_empty() {
                return x.floats[t * width..][..width].to_vec();
            }
            let blocks = &x.blocks[t * (width / BLOCK)..][..width / BLOCK];
            blocks.iter().flat_map(|block| block.q.map(|q| f32::from(q) * block.d)).collect()
        };
        add_rows(&mut self.0[layer * Self::PER_LAYER + of as usize], width, rows.map(row));
    }

    /// Adds the inputs of a layer's projections of what its mixers computed.
    pub(super) fn add_mixer_outputs(&mut self, layer: usize, s: &Scratch, n: usize) {
        if is_recurrent(layer) {
            let of = if HAS_MAMBA { InputOf::MambaOut } else { InputOf::MixerOut };
            self.add(layer, of, &s.mixed, (MIXED, 0..n));
        }
        if LAYER_KINDS[layer].is_attention() {
            self.add(layer, InputOf::MixerOut, &s.att_in, (HEADS * head_dim(layer), 0..n));
        }
    }

    /// Adds the inputs of a layer's down projection.
    pub(super) fn add_gated_ups(&mut self, layer: usize, s: &Scratch, n: usize) {
        if has_experts(layer) {
            self.add(layer, InputOf::FfnDown, &s.experts.ffn, (EXPERTS.dim, s.experts.used_rows()));
        } else if has_ffn(layer) {
            self.add(layer, InputOf::FfnDown, &s.ffn, (ffn_dim(layer), 0..n));
        }
    }

    /// Importance of the columns of the engine's tensor `name`, 1 in the mean and none of them 0; empty for tensors
    /// whose inputs were not measured.
    pub fn column_weights(&self, name: &str) -> Vec<f32> {
        let sums = Self::input_of(name).map_or(&[][..], |i| &self.0[i]);
        let mean = sums.iter().sum::<f64>() / sums.len().max(1) as f64;
        if mean > 0.0 && mean.is_finite() {
            sums.iter().map(|sum| (sum / mean).max(LEAST) as f32).collect()
        } else {
            Vec::new()
        }
    }

    /// Sets the sums of the columns of the engine's tensor `name`; false if its inputs are not measured.
    pub fn set_columns(&mut self, name: &str, sums: Vec<f64>) -> bool {
        let input = Self::input_of(name);
        if let Some(input) = input {
            self.0[input] = sums;
        }
        input.is_some()
    }

    /// Index of the input of the engine's tensor `name`.
    fn input_of(name: &str) -> Option<usize> {
        let inputs = [
            ("self_attn.o_proj", InputOf::MixerOut),
            ("mamba.out_proj", InputOf::MambaOut),
            (".out_proj", InputOf::MixerOut),
            ("mlp.down_proj", InputOf::FfnDown),
            ("mlp.experts.down_proj", InputOf::FfnDown),
            ("mlp.", InputOf::Ffn),
            ("self_attn.", InputOf::Mixer),
            ("linear_attn.", InputOf::Mixer),
            ("conv.in_proj", InputOf::Mixer),
            ("mamba.in_proj", InputOf::Mixer),
        ];
        let number = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
        let layer: Option<usize> = number.and_then(|(number, _)| number.parse().ok());
        match layer.filter(|layer| *layer < LAYERS) {
            Some(_) if name.contains("mlp.shared_expert.down_proj") => None,
            Some(_) if HAS_BRANCHES && name.contains("mlp.shared_expert.") => None,
            Some(layer) => {
                let of = inputs.iter().find(|(part, _)| name.contains(part));
                of.map(|(_, of)| layer * Self::PER_LAYER + *of as usize)
            }
            None => (name == "lm_head.weight").then_some(LAYERS * Self::PER_LAYER),
        }
    }
}

fn add_rows(sums: &mut Vec<f64>, width: usize, rows: impl Iterator<Item = Vec<f32>>) {
    sums.resize(width, 0.0);
    for row in rows {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(x) * f64::from(x));
    }
}
