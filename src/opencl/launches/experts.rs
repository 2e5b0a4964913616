//! Launches of a mixture of experts, behind the product that scores the experts. Nothing is read back: the kernels find
//! the experts of a token in a buffer. For few tokens a launch computes a product of each with each of its experts; for
//! many one of each expert with all its tokens, so that its rows are read once.

use super::{Binder, MatmulBuffers};
use crate::dims::{DIM, EXPERTS, HAS_BRANCHES, HAS_FFN_BESIDE, has_experts};
use crate::opencl::kernels::{ExpertStep, KernelName, MatmulInput};
use crate::opencl::pass::Pass;
use crate::opencl::shapes::ACTIVATIONS_ITEMS;
use crate::opencl::step_launch::{Launch, MatmulLaunches};
use crate::opencl::storage::Step;
use crate::opencl::variants::BASELINE;
use crate::opencl::weights::{Chunk, LayerWeights};
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Launches of a layer with experts.
pub struct ExpertLaunches {
    /// Choice of each token's experts by their scores.
    choose: Launch,
    /// norm, gate_up
    gate_up: MatmulLaunches,
    /// down
    down: MatmulLaunches,
    /// Both, of the feed-forward beside the experts, if there is one.
    shared: Option<[MatmulLaunches; 2]>,
    /// All of these, of many tokens, if the device takes so many.
    many: Option<ManyExperts>,
    /// Sum of the outputs, which joins the residual.
    add: Launch,
}

/// Launches of a layer's experts in a pass of many tokens.
struct ManyExperts {
    /// Lists of each expert's tokens.
    sort: Launch,
    norm: Launch,
    gate_up: MatmulLaunches,
    /// silu(gate) * up of each choice.
    silu: Launch,
    down: MatmulLaunches,
    /// Both, of the feed-forward beside the experts, each with its input.
    shared: Option<[(Launch, MatmulLaunches); 2]>,
}

impl Binder<'_> {
    /// Binds the launches of a layer with experts.
    pub(super) fn bind_experts(&mut self, l: &LayerWeights) -> Result<ExpertLaunches> {
        let s = self.scratch;
        let bias = l.router_bias.as_ref().unwrap_or(&s.none);
        let choose = [&s.scores, bias, &s.choices];
        let norms = l.branch_norms.as_ref().unwrap_or(&s.none);
        let add = [s.state.buffer(), &s.scores, &s.choices, &s.expert_out, &s.shared_out, &s.post, norms];
        Ok(ExpertLaunches {
            choose: self.bind_launch(KernelName::Experts(ExpertStep::Choose), &choose)?,
            gate_up: self.bind_one(Step::ExpertGateUp, l)?,
            down: self.bind_one(Step::ExpertDown, l)?,
            shared: HAS_FFN_BESIDE
                .then(|| Ok([self.bind_one(Step::SharedGateUp, l)?, self.bind_one(Step::SharedDown, l)?]))
                .transpose()?,
            many: (s.max_tokens > 1).then(|| self.bind_many_experts(l)).transpose()?,
            add: self.bind_launch(KernelName::Experts(ExpertStep::Add), &add)?,
        })
    }

    fn bind_many_experts(&mut self, l: &LayerWeights) -> Result<ManyExperts> {
        let s = self.scratch;
        let [up_bias, down_bias] = [&l.up_bias, &l.down_bias].map(|bias| bias.as_ref().unwrap_or(&s.none));
        let [of_input, of_ffn] = [Step::ExpertGateUp, Step::ExpertDown].map(|step| l.step(step).reads);
        let norm = l.ffn_norm_of(Step::ExpertGateUp);
        let input = if norm.is_some() { MatmulInput::Norm } else { MatmulInput::Residual };
        let norm = [s.state.buffer(), norm.unwrap_or(&s.none)];
        let silu = KernelName::Activations(MatmulInput::ExpertFfn, of_ffn);
        let silu_buffers = [&s.expert_out, up_bias, &s.expert_acts, &s.expert_scales, &s.none, &s.choices];
        let mut silu = self.bind_launch(silu, &silu_buffers)?;
        silu.set_ints(&[0, 0])?;
        let gate_up = [&s.acts, &s.act_scales, &s.expert_out, &s.none];
        let down = [&s.expert_acts, &s.expert_scales, &s.expert_out, down_bias];
        let shared = [Step::SharedGateUp, Step::SharedDown];
        Ok(ManyExperts {
            sort: self.bind_launch(KernelName::Experts(ExpertStep::Sort), &[&s.choices, &s.sorted])?,
            norm: self.bind_inputs(KernelName::Activations(input, of_input), norm)?,
            gate_up: self.bind_chosen(Step::ExpertGateUp, l, gate_up)?,
            silu,
            down: self.bind_chosen(Step::ExpertDown, l, down)?,
            shared: HAS_FFN_BESIDE
                .then(|| Ok([self.bind_many(shared[0], l)?, self.bind_many(shared[1], l)?]))
                .transpose()?,
        })
    }

    /// Products of each expert and all tokens that have chosen it.
    fn bind_chosen(&mut self, step: Step, l: &LayerWeights, buffers: [&Buffer; 4]) -> Result<MatmulLaunches> {
        let ([input, scales, out, extra], sorted) = (buffers, &self.scratch.sorted);
        let product = |chunk: &Chunk| {
            let operands = MatmulBuffers { input, scales, out, extra, sums: Some(sorted) };
            let name = KernelName::Gemm(step, chunk.storage, BASELINE);
            let mut p = self.bind_product(name, chunk, &operands)?;
            p.tiles.launch.set_ints(&[p.rows[0], p.rows[1], 0, 0])?;
            p.tiles.tile = self.kernels.device_shapes().gemm_tile(step, chunk.storage, BASELINE);
            p.tiles.groups = (step.rows_and_cols().0 * step.matrix_count()).div_ceil(p.tiles.tile[0]);
            Ok(p)
        };
        l.step(step).chunks.iter().map(product).collect::<Result<_>>().map(MatmulLaunches)
    }
}

/// Tokens of an expert, on average, from which on its rows are worth sorting tokens for.
const SHARING_TOKENS: usize = 2;

impl ExpertLaunches {
    /// The launches for many tokens, if `n` are.
    fn for_many(&mut self, n: usize) -> Option<&mut ManyExperts> {
        self.many.as_mut().filter(|_| (n * EXPERTS.used).checked_div(EXPERTS.count) >= Some(SHARING_TOKENS))
    }

    /// Queues the choice of the experts of `n` tokens, and the first half of their feed-forwards.
    pub fn gate_up(&mut self, device: &Device, n: usize) -> Result<()> {
        self.choose.run(device, [n, 1])?;
        if let Some(many) = self.for_many(n) {
            many.sort.set_ints(&[(n * EXPERTS.used) as i32])?.run(device, [1, 1])?;
            many.norm.run(device, [n, 1])?;
            many.gate_up.launch_chosen(device, (n, EXPERTS.count))?;
            many.silu.run(device, [n * EXPERTS.used, 1])?;
            let Some([(norm, gate_up), (silu, _)]) = &mut many.shared else { return Ok(()) };
            norm.run(device, [n, 1])?;
            gate_up.launch_many(device, n)?;
            return silu.run(device, [n, 1]);
        }
        self.gate_up.launch_products(device, n * EXPERTS.used)?;
        self.shared.as_ref().map_or(Ok(()), |[gate_up, _]| gate_up.launch_products(device, n))
    }

    /// Queues the second half, and the sum.
    pub fn down(&mut self, device: &Device, n: usize) -> Result<()> {
        if let Some(many) = self.for_many(n) {
            many.down.launch_chosen(device, (n, EXPERTS.count))?;
            many.shared.as_mut().map_or(Ok(()), |[_, (_, down)]| down.launch_many(device, n))?;
        } else {
            self.down.launch_products(device, n * EXPERTS.used)?;
            self.shared.as_ref().map_or(Ok(()), |[_, down]| down.launch_products(device, n))?;
        }
        // Norms need a whole token in each work-group.
        self.add.run(device, [if HAS_BRANCHES { 1 } else { DIM.div_ceil(ACTIVATIONS_ITEMS) }, n])
    }
}

impl Pass<'_> {
    /// Computes the feed-forward of a layer with experts on the host; `false` if the device does.
    pub fn run_host_experts(&mut self, layer: usize) -> Result<bool> {
        let Some(experts) = self.experts.as_mut().filter(|_| has_experts(layer)) else { return Ok(false) };
        self.scratch.change_residuals(self.n, |residual| experts(layer, residual))?;
        self.end_step("down", layer)?;
        Ok(true)
    }
}
