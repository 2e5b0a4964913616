//! The list of a device's kernels, so that their programs can be counted before the first is built.

use super::defines::LayerView;
use super::kernels::{KernelName, MatmulInput};
use super::launches::{AttendOn, Binder, matmul_input, result_form};
use super::storage::{Activations, Step};
use super::variants::Tokens;
use super::weights::{LayerWeights, StepWeights};
use crate::dims::attention_window;

/// The steps of a layer that multiply with matrices.
const MATMULS: [Step; 4] = [Step::Qkv, Step::Out, Step::GateUp, Step::Down];

impl Binder<'_> {
    /// All kernels of the launches that it binds, those that use a cache included; some several times.
    pub fn list_kernels(&self) -> Vec<KernelName> {
        let (m, many, one) = (self.matrices, self.scratch.max_tokens > 1, self.needs_one);
        let on_device = self.attend == AttendOn::Device;
        let batched = many && on_device && self.scratch.at_once > 1;
        let mut names = Vec::new();
        let mut add = |wanted: bool, name: KernelName| names.extend(wanted.then_some(name));
        for view in (0..m.layers.len()).map(LayerView::of) {
            add(one && on_device, KernelName::AttendOne(view));
            add(many || !on_device, KernelName::Rope(view));
            add(many && on_device, KernelName::Attend(view));
            add(batched, KernelName::AttendBatch(view));
        }
        add(one && on_device, KernelName::Merge);
        add(batched, KernelName::MergeBatch);
        add(m.layers.iter().any(|l| matches!(l.post_norms, [Some(_), Some(_)])), KernelName::PostNorm);
        let norm = KernelName::Activations(MatmulInput::Norm, self.kernels.activation_form(m.head.reads));
        add(many, norm);
        let head = (MatmulInput::Norm, Activations::Floats);
        names.extend(self.gemv_kernels(Step::Head, &m.head, head));
        names.extend(self.gemm_kernels(Step::Head, &m.head).filter(|_| many));
        for (i, layer) in m.layers.iter().enumerate() {
            if one {
                names.extend(self.layer_gemvs(i, layer));
            }
            if many {
                names.extend(MATMULS.iter().map(|&step| {
                    let reads = self.kernels.activation_form(layer.steps[step as usize].reads);
                    KernelName::Activations(matmul_input(step), reads)
                }));
                names.extend(
                    MATMULS.iter().flat_map(|&step| self.gemm_kernels(step, &layer.steps[step as usize])),
                );
            }
        }
        names
    }

    /// Products of one token in a layer.
    fn layer_gemvs(&self, i: usize, layer: &LayerWeights) -> Vec<KernelName> {
        let merge = MatmulInput::Merge { window: attention_window(i).unwrap_or(0) };
        let merging = (self.attend == AttendOn::Device).then_some((Step::Out, merge));
        let plain = MATMULS.iter().map(|&step| (step, matmul_input(step)));
        plain
            .chain(merging)
            .flat_map(|(step, input)| {
                self.gemv_kernels(step, &layer.steps[step as usize], (input, result_form(step, layer)))
            })
            .collect()
    }

    fn gemv_kernels(
        &self,
        step: Step,
        weights: &StepWeights,
        (input, next): (MatmulInput, Activations),
    ) -> impl Iterator<Item = KernelName> {
        weights.chunks.iter().map(move |chunk| {
            let (storage, variant) = (chunk.storage, self.kernels.variant_for(Tokens::One, chunk.storage));
            KernelName::Gemv { step, storage, input, next, variant }
        })
    }

    fn gemm_kernels(&self, step: Step, weights: &StepWeights) -> impl Iterator<Item = KernelName> {
        weights.chunks.iter().flat_map(move |chunk| {
            let (storage, variant) = (chunk.storage, self.kernels.variant_for(Tokens::Many, chunk.storage));
            let few = self.kernels.has_few(storage, variant);
            let few = few.then_some(KernelName::GemmFew(step, storage));
            [KernelName::Gemm(step, storage, variant)].into_iter().chain(few)
        })
    }
}
