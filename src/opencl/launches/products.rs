//! Binding of the products of a layer's steps, by step: where their input is, and where the result goes.

use super::{Binder, MatmulBuffers};
use crate::dims::PRE_NORMS;
use crate::opencl::kernels::{KernelName, MatmulInput};
use crate::opencl::scratch::Scratch;
use crate::opencl::step_launch::{Launch, MatmulLaunches};
use crate::opencl::storage::{Activations, Step};
use crate::opencl::weights::LayerWeights;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::failure::Result;

impl Binder<'_> {
    /// Binds [steps of one token](Binder::bind_one), one after the other.
    pub(super) fn bind_steps(
        &mut self,
        steps: impl IntoIterator<Item = Step>,
        l: &LayerWeights,
    ) -> Result<MatmulLaunches> {
        let products = steps.into_iter().map(|step| Ok(self.bind_one(step, l)?.0));
        products.collect::<Result<Vec<_>>>().map(|all| MatmulLaunches(all.into_iter().flatten().collect()))
    }

    /// Binds a step of one token, including its input.
    ///
    /// # Panics
    ///
    /// For the head, which belongs to no layer.
    pub fn bind_one(&mut self, step: Step, l: &LayerWeights) -> Result<MatmulLaunches> {
        let operands = one_token_buffers(self.scratch, step, l);
        let next = if step.is_gate_up() { l.step(step.matching_down()).reads } else { Activations::Floats };
        let input = match step {
            Step::PerLayerGate => MatmulInput::Residual,
            Step::Qkv | Step::LocalQkv | Step::Mix | Step::Router if PRE_NORMS => MatmulInput::Norm,
            step if step.is_gate_up() && PRE_NORMS => MatmulInput::Norm,
            Step::Qkv | Step::LocalQkv | Step::Mix | Step::Router => MatmulInput::Residual,
            step if step.is_gate_up() => MatmulInput::Residual,
            Step::Out => MatmulInput::Att,
            Step::LocalOut => MatmulInput::LocalAtt,
            Step::MixOut => MatmulInput::Mixed,
            Step::PerLayerOut => MatmulInput::PerLayer,
            Step::WideDown => MatmulInput::WideFfn,
            _ => MatmulInput::Ffn,
        };
        self.bind_gemv(step, l.step(step), (input, next), operands)
    }

    /// Binds a step of many tokens: the launch that converts its input, and the products.
    ///
    /// # Panics
    ///
    /// See [`Binder::bind_one`].
    pub fn bind_many<'l>(&mut self, step: Step, l: &'l LayerWeights) -> Result<(Launch, MatmulLaunches)> {
        let s = self.scratch;
        let w = l.step(step);
        let or_none = |bias| Option::as_ref(bias).unwrap_or(&s.none);
        let reads = self.kernels.activation_form(w.reads);
        let normed = |w: Option<&'l Buffer>| {
            let input = if w.is_some() { MatmulInput::Norm } else { MatmulInput::Residual };
            (input, [s.state.buffer(), w.unwrap_or(&s.none)])
        };
        let input = match step {
            Step::Qkv | Step::LocalQkv | Step::Mix => normed(l.attn_norm.as_ref()),
            step if step.is_gate_up() => normed(l.ffn_norm_of(step)),
            Step::Router => normed(l.ffn_norm_of(step)),
            Step::PerLayerGate => normed(None),
            Step::MixOut => (MatmulInput::Mixed, [&s.mixed, &s.none]),
            Step::Out => (MatmulInput::Att, [&s.att, &s.none]),
            Step::LocalOut => (MatmulInput::LocalAtt, [&s.att, &s.none]),
            Step::PerLayerOut => (MatmulInput::PerLayer, [&s.layer_gate, &s.none]),
            Step::WideDown => (MatmulInput::WideFfn, [&s.gate_up, or_none(&l.up_bias)]),
            Step::SharedDown => (MatmulInput::SharedFfn, [&s.gate_up, &s.none]),
            _ => (MatmulInput::Ffn, [&s.gate_up, or_none(&l.up_bias)]),
        };
        let input = self.bind_inputs(KernelName::Activations(input.0, reads), input.1)?;
        let products = match step {
            Step::PerLayerGate => self.bind_gemm(step, w, [&s.layer_gate, &s.none])?,
            Step::PerLayerOut => self.bind_gemm(step, w, [&s.post, &s.none])?,
            Step::Qkv | Step::LocalQkv => self.bind_gemm(step, w, [&s.qkv, or_none(&l.qkv_bias)])?,
            Step::Mix => self.bind_gemm(step, w, [&s.mix, &s.none])?,
            Step::Router => self.bind_gemm(step, w, [&s.scores, &s.none])?,
            Step::MixOut => self.bind_gemm(step, w, [&s.post, &s.none])?,
            Step::Out | Step::LocalOut => self.bind_gemm(step, w, [&s.post, or_none(&l.o_bias)])?,
            Step::SharedDown => self.bind_gemm(step, w, [&s.shared_out, &s.none])?,
            step if step.is_gate_up() => self.bind_gemm(step, w, [&s.gate_up, &s.none])?,
            _ => self.bind_gemm(step, w, [&s.post, or_none(&l.down_bias)])?,
        };
        Ok((input, products))
    }
}

/// Buffers of a step of one token.
fn one_token_buffers<'a>(s: &'a Scratch, step: Step, l: &'a LayerWeights) -> MatmulBuffers<'a> {
    let [qkv_bias, o_bias, up_bias, down_bias] =
        [&l.qkv_bias, &l.o_bias, &l.up_bias, &l.down_bias].map(|bias| bias.as_ref().unwrap_or(&s.none));
    let (none, sums) = (&s.none, None);
    let ffn_norm = l.ffn_norm_of(step).unwrap_or(none);
    match step {
        Step::Qkv | Step::LocalQkv => {
            let input = l.attn_norm.as_ref().unwrap_or(none);
            MatmulBuffers { input, scales: none, out: &s.qkv, extra: qkv_bias, sums }
        }
        Step::Mix => {
            let input = l.attn_norm.as_ref().unwrap_or(none);
            MatmulBuffers { input, scales: none, out: &s.mix, extra: none, sums }
        }
        Step::Out | Step::LocalOut => {
            MatmulBuffers { input: &s.att, scales: none, out: &s.post, extra: o_bias, sums }
        }
        Step::PerLayerGate => {
            MatmulBuffers { input: none, scales: none, out: &s.layer_gate, extra: none, sums }
        }
        Step::PerLayerOut => {
            MatmulBuffers { input: &s.layer_gate, scales: none, out: &s.post, extra: none, sums }
        }
        Step::MixOut => MatmulBuffers { input: &s.mixed, scales: none, out: &s.post, extra: none, sums },
        Step::GateUp | Step::WideGateUp | Step::SharedGateUp => {
            MatmulBuffers { input: ffn_norm, scales: up_bias, out: &s.acts, extra: &s.act_scales, sums }
        }
        Step::Router => MatmulBuffers { input: ffn_norm, scales: none, out: &s.scores, extra: none, sums },
        Step::ExpertGateUp => MatmulBuffers {
            input: ffn_norm,
            scales: up_bias,
            out: &s.expert_acts,
            extra: &s.expert_scales,
            sums: Some(&s.choices),
        },
        Step::ExpertDown => MatmulBuffers {
            input: &s.expert_acts,
            scales: &s.expert_scales,
            out: &s.expert_out,
            extra: down_bias,
            sums: Some(&s.choices),
        },
        Step::SharedDown => {
            MatmulBuffers { input: &s.acts, scales: &s.act_scales, out: &s.shared_out, extra: none, sums }
        }
        _ => {
            let (input, scales) = (&s.acts, &s.act_scales);
            MatmulBuffers { input, scales, out: &s.post, extra: down_bias, sums }
        }
    }
}
