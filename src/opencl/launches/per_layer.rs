//! Norms of outputs, and the embeddings that each layer has of a token.

use super::{Binder, MatmulBuffers};
use crate::dims::{HAS_PER_LAYER, LAYERS};
use crate::opencl::kernels::{KernelName, MatmulInput};
use crate::opencl::pass::Pass;
use crate::opencl::step_launch::{Launch, MatmulLaunches};
use crate::opencl::storage::{Activations, Step};
use crate::opencl::weights::LayerWeights;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::failure::Result;

/// Embeddings of tokens for all layers.
pub struct PerLayerLaunches {
    /// Projection of the usual embedding of one token; empty if the layers have no kernels for one.
    pub one: MatmulLaunches,
    /// That of many tokens, and its input; `None` if the device takes one token at a time.
    pub many: Option<(Launch, MatmulLaunches)>,
    /// Adds the projections, normed, to the rows of the table.
    pub embed: Launch,
    /// Multiplies a layer's embeddings with their gate.
    pub gate: Launch,
}

impl Binder<'_> {
    /// Norms of outputs before they are added to the residual.
    pub(super) fn bind_post_norms(&mut self, l: &LayerWeights) -> Result<Vec<Launch>> {
        let s = self.scratch;
        let mut launch = |w: &Buffer| self.bind_launch(KernelName::PostNorm, &[s.state.buffer(), &s.post, w]);
        l.post_norms.iter().map(&mut launch).collect()
    }

    /// Embeddings of tokens for all layers, if the model has such.
    pub(super) fn bind_per_layer(&mut self) -> Result<Option<PerLayerLaunches>> {
        let of_model = self.matrices.per_layer.as_ref().filter(|_| HAS_PER_LAYER);
        let Some((projection, norm)) = of_model else { return Ok(None) };
        let (s, step) = (self.scratch, Step::PerLayerInputs);
        let state = s.state.buffer();
        let operands =
            MatmulBuffers { input: &s.none, scales: &s.none, out: &s.projected, extra: &s.none, sums: None };
        let (one, many) = (self.needs_one, s.max_tokens > 1);
        let input = (MatmulInput::Residual, Activations::Floats);
        Ok(Some(PerLayerLaunches {
            one: if one {
                self.bind_gemv(step, projection, input, operands)?
            } else {
                MatmulLaunches::default()
            },
            many: many
                .then(|| {
                    let products = self.bind_gemm(step, projection, [&s.projected, &s.none])?;
                    Ok((self.bind_norm(None, projection.reads)?, products))
                })
                .transpose()?,
            embed: self.bind_launch(KernelName::EmbedLayers, &[state, &s.projected, norm])?,
            gate: self.bind_launch(KernelName::GateLayer, &[state, &s.layer_gate])?,
        }))
    }
}

impl Pass<'_> {
    /// Computes the embeddings of all tokens for all layers.
    pub fn embed_for_layers(&mut self) -> Result<()> {
        let (single, device) = (self.is_single(), &self.model.device);
        let launches = self.launches.per_layer.as_mut().filter(|_| HAS_PER_LAYER);
        let Some(launches) = launches else { return Ok(()) };
        match &mut launches.many {
            Some((input, products)) if !single => {
                input.run(device, [self.n, 1])?;
                products.launch_many(device, self.n)?;
            }
            _ => launches.one.launch_one(device)?,
        }
        launches.embed.run(device, [LAYERS, self.n])?;
        self.end_step("embed", 0)
    }

    /// Adds a layer's embeddings of all tokens to the residual, gated by it and normed.
    pub fn add_per_layer(&mut self, layer: usize) -> Result<()> {
        let (single, device, n) = (self.is_single(), &self.model.device, self.n);
        let launches = self.launches.per_layer.as_mut().filter(|_| HAS_PER_LAYER);
        let Some(launches) = launches else { return Ok(()) };
        let mut gate = || launches.gate.set_ints(&[layer as i32])?.run(device, [n, 1]);
        if single {
            let [to_gate, out] =
                self.launches.one[layer].per_layer.as_ref().expect("invariant: every layer's");
            to_gate.launch_one(device)?;
            gate()?;
            out.launch_one(device)?;
        } else {
            let [(gate_input, to_gate), (out_input, out)] =
                self.launches.many[layer].per_layer.as_mut().expect("invariant: every layer's");
            gate_input.run(device, [n, 1])?;
            to_gate.launch_many(device, n)?;
            gate()?;
            out_input.run(device, [n, 1])?;
            out.launch_many(device, n)?;
        }
        self.post_norm(layer, 2)?;
        self.end_step("per_layer", layer)
    }
}
