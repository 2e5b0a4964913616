//! Launches of a mixture of experts, behind the product that scores the experts. Nothing is read back: the kernels find
//! the experts of a token in a buffer. A launch computes a product of each token with each of its experts.

use super::Binder;
use crate::dims::{DIM, EXPERTS, HAS_BRANCHES, HAS_FFN_BESIDE, has_experts};
use crate::opencl::kernels::{ExpertStep, KernelName};
use crate::opencl::pass::Pass;
use crate::opencl::shapes::ACTIVATIONS_ITEMS;
use crate::opencl::step_launch::{Launch, MatmulLaunches};
use crate::opencl::storage::Step;
use crate::opencl::weights::LayerWeights;
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
    /// Sum of the outputs, which joins the residual.
    add: Launch,
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
            add: self.bind_launch(KernelName::Experts(ExpertStep::Add), &add)?,
        })
    }
}

impl ExpertLaunches {
    /// Queues the choice of the experts of `n` tokens, and the first half of their feed-forwards.
    pub fn gate_up(&self, device: &Device, n: usize) -> Result<()> {
        self.choose.run(device, [n, 1])?;
        self.gate_up.launch_products(device, n * EXPERTS.used)?;
        self.shared.as_ref().map_or(Ok(()), |[gate_up, _]| gate_up.launch_products(device, n))
    }

    /// Queues the second half, and the sum.
    pub fn down(&self, device: &Device, n: usize) -> Result<()> {
        self.down.launch_products(device, n * EXPERTS.used)?;
        self.shared.as_ref().map_or(Ok(()), |[_, down]| down.launch_products(device, n))?;
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
