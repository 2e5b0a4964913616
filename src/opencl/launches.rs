//! Launches of the forward pass: one kernel object per layer and step, with its buffers bound once. Launches that use a
//! cache are bound to it and stored with it ([`cached`]); the others belong to the device.

mod cached;
mod experts;
mod per_layer;
mod products;
mod recurrent;

pub use cached::{CacheLaunches, CacheLayer};
pub use experts::ExpertLaunches;
pub use per_layer::PerLayerLaunches;

use super::batched_attention::{self, BatchedAttention};
use super::by_layer::ByLayer;
use super::defines::LayerView;
use super::kernels::{KernelName, Kernels, MatmulInput, RecurrentStep, variant_of};
use super::scratch::Scratch;
use super::step_launch::{Launch, MatmulLaunch, MatmulLaunches, Tiles};
use super::storage::{Activations, Step};
use super::variants::{BASELINE, Feature, Tokens};
use super::weights::{Chunk, LayerWeights, Matrices, StepWeights};
use crate::dims::*;
use files::config::QkNorm;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::failure::Result;

/// Launches of one layer in a pass of one token. Each covers the listed steps, of all mixers of the layer.
pub struct OneToken {
    /// norm, qkv
    pub qkv: MatmulLaunches,
    /// End of attend, and out, for at most `FUSED_CHUNKS` chunks of attention. Empty if the host computes attention, or
    /// if [`merges_in_out`] denies it.
    pub out: MatmulLaunches,
    /// out
    pub out_merged: MatmulLaunches,
    /// norm, gate_up; in layers with experts norm and their scores. Empty, like `down`, if the host computes both.
    pub gate_up: MatmulLaunches,
    /// down; empty in layers with experts
    pub down: MatmulLaunches,
    /// Gate and projection of the layer's embedding of the token, if it has one.
    pub per_layer: Option<[MatmulLaunches; 2]>,
}

/// Launches of one layer in a pass of many tokens; none for a part that the layer lacks.
#[allow(missing_docs, reason = "the names are the steps' names")]
pub struct ManyTokens {
    pub norm: Option<Launch>,
    /// Of all mixers.
    pub qkv: MatmulLaunches,
    /// Of each mixer the launch that converts its output to the form that `out` reads, and `out`.
    pub outs: Vec<(Launch, MatmulLaunches)>,
    /// `None` if the host computes the feed-forward.
    pub ffn_norm: Option<Launch>,
    /// In layers with experts their scores.
    pub gate_up: MatmulLaunches,
    /// silu(gate) * up, in the form that `down` reads; `None` in layers with experts.
    pub silu: Option<Launch>,
    /// Empty in layers with experts.
    pub down: MatmulLaunches,
    /// Gate and projection of the layer's embeddings of the tokens, if it has such, each with its input.
    pub per_layer: Option<[(Launch, MatmulLaunches); 2]>,
}

/// Place that computes attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they say it")]
pub enum AttendOn {
    Device,
    Host,
}

/// All launches that use no cache.
pub struct Launches {
    /// Per-layer launches for single tokens. Empty when the persistent kernel is used; passes it cannot compute use the
    /// kernels for many tokens.
    pub one: ByLayer<OneToken>,
    /// Per-layer launches for many tokens; empty if the device takes one token at a time.
    pub many: ByLayer<ManyTokens>,
    /// By layer: the norms of outputs, in the order of [`LayerWeights::post_norms`].
    pub post_norms: ByLayer<Vec<Launch>>,
    /// By layer: experts, if it has such.
    pub experts: ByLayer<Option<ExpertLaunches>>,
    /// Embeddings of tokens for all layers, if the model has such.
    pub per_layer: Option<PerLayerLaunches>,
    /// By layer: the norm of all queries, and of all keys, of a token. Empty if the model has none.
    pub qk_norms: ByLayer<Launch>,
    /// Gate of attention's output, if the model has one.
    pub gate: Option<Launch>,
    /// By layer: preparation and gate of a delta net or of Mamba2; `None` for other layers.
    pub around_update: ByLayer<Option<[Launch; 2]>>,
    /// Final norm and output head of one token.
    pub head: MatmulLaunches,
    /// Final norm of several tokens.
    pub norm: Option<Launch>,
    /// Output head of several tokens.
    pub heads: MatmulLaunches,
    /// End of attend for one token, unless `out` includes it; `None` if the host computes attention, or if `one` is
    /// empty.
    pub merge: Option<Launch>,
    /// Attention of several runs with one token each, if such passes are expected.
    pub batched: Option<BatchedAttention>,
    /// Queries of a work-group of prefill attention.
    pub queries: usize,
    /// Value of [`Scratch::slots`] when they were bound.
    pub slots: usize,
}

impl Launches {
    /// True if the layers have kernels for one token.
    pub fn has_one(&self) -> bool {
        !self.one.is_empty()
    }
}

/// True if the product after attention may merge its chunks.
pub(super) fn merges_in_out(layer: usize) -> bool {
    let has_more = HAS_ATTENTION_GATE || ATTENTION_OUT_SCALE != 1.0 || is_recurrent(layer);
    has_attention(layer) && !has_more && !has_local_heads(layer)
}

/// Products of a layer's feed-forward, as far as it has them; of experts only their scores.
fn ffn_steps(l: &LayerWeights, layer: usize) -> [Option<Step>; 2] {
    match Step::of_ffn(layer) {
        _ if l.leaves_experts => [None; 2],
        _ if has_experts(layer) => [Some(Step::Router), None],
        [gate_up, down] => [Some(*gate_up), Some(*down)],
        _ => [None; 2],
    }
}

/// Buffers of a product besides its matrix and the state; see `kernels/gemv.cl`.
struct MatmulBuffers<'a> {
    input: &'a Buffer,
    scales: &'a Buffer,
    out: &'a Buffer,
    extra: &'a Buffer,
    /// Sums of activations, or the experts chosen, if the kernel reads them.
    sums: Option<&'a Buffer>,
}

/// Binds launches to buffers.
pub struct Binder<'a> {
    /// Builds kernels.
    pub kernels: &'a mut Kernels,
    /// Weights.
    pub matrices: &'a Matrices,
    /// Calibration of keys and queries, by layer; empty if there is none.
    pub calibration: &'a [Buffer],
    /// Buffers of a pass.
    pub scratch: &'a Scratch,
    /// Place that computes attention.
    pub attend: AttendOn,
    /// True if the layers need kernels for one token.
    pub needs_one: bool,
}

impl Binder<'_> {
    /// Builds all kernels that are needed, and binds those that use no cache. `more` programs are built by the caller.
    pub fn bind_launches(&mut self, more: usize) -> Result<Launches> {
        for name in self.list_programs(more)? {
            self.kernels.require_kernel(name)?;
        }
        self.bind_uncached()
    }

    /// Lists the kernels whose programs are to be built, which may take minutes, and tells the device their number, with
    /// `more` that only the caller knows of.
    pub fn list_programs(&mut self, more: usize) -> Result<Vec<KernelName>> {
        self.kernels.start_listing();
        let bound = self.bind_uncached();
        let names = self.kernels.stop_listing(more);
        bound.map(|_| names)
    }

    /// Binds the kernels that use no cache, and builds those that are missing.
    pub fn bind_uncached(&mut self) -> Result<Launches> {
        let (s, m, many) = (self.scratch, self.matrices, self.scratch.max_tokens > 1);
        let one = self.needs_one;
        let recurrent = [(HAS_STATE, RecurrentStep::Convolve), (STATE_WIDTH != 0, RecurrentStep::Update)];
        for (_, step) in recurrent.into_iter().filter(|(has, _)| *has) {
            self.kernels.require_kernel(KernelName::Recurrent(step))?;
        }
        let layers = m.layers.layer_range();
        for view in layers.clone().filter(|&layer| has_attention(layer)).map(LayerView::of) {
            if one && self.attend == AttendOn::Device {
                self.kernels.require_kernel(KernelName::AttendOne(view))?;
            }
            if many || self.attend == AttendOn::Host {
                self.kernels.require_kernel(KernelName::Rope(view))?;
            }
            if many && self.attend == AttendOn::Device {
                self.kernels.require_kernel(KernelName::Attend(view))?;
            }
        }
        let merge = [&s.partials, &s.ml, &s.att];
        let on_device = self.attend == AttendOn::Device;
        let none = layers.start..layers.start;
        let some = |wanted: bool| if wanted { layers.clone() } else { none.clone() };
        Ok(Launches {
            one: ByLayer::try_new(some(one), |i| self.one_token(&m.layers[i], i))?,
            head: self.bind_head()?,
            batched: (many && on_device && s.at_once > 1).then(|| self.batched_attention()).transpose()?,
            merge: (one && on_device).then(|| self.bind_launch(KernelName::Merge, &merge)).transpose()?,
            many: ByLayer::try_new(some(many), |i| self.many_tokens(&m.layers[i], i))?,
            post_norms: ByLayer::try_new(layers.clone(), |i| self.bind_post_norms(&m.layers[i]))?,
            experts: ByLayer::try_new(layers.clone(), |i| {
                (has_experts(i) && !m.layers[i].leaves_experts)
                    .then(|| self.bind_experts(&m.layers[i]))
                    .transpose()
            })?,
            per_layer: self.bind_per_layer()?,
            qk_norms: ByLayer::try_new(some(QK_NORM == QkNorm::Whole), |i| {
                let norm = m.layers[i].qk_norm.as_ref().unwrap_or(&s.none);
                self.bind_launch(KernelName::QkNorm, &[&s.qkv, norm])
            })?,
            gate: HAS_ATTENTION_GATE
                .then(|| self.bind_launch(KernelName::Gate, &[&s.att, &s.qkv]))
                .transpose()?,
            around_update: ByLayer::try_new(layers.clone(), |i| {
                let has_update = STATE_WIDTH != 0 && is_recurrent(i);
                has_update.then(|| self.bind_around_update(&m.layers[i])).transpose()
            })?,
            norm: many.then(|| self.bind_norm(Some(&m.norm), m.head.reads)).transpose()?,
            heads: if many { self.bind_heads()? } else { MatmulLaunches::default() },
            queries: self.kernels.device_shapes().attend.map_or(1, |s| s.queries),
            slots: s.slots,
        })
    }

    /// Attention of several runs with one token each; their rows are bound later.
    fn batched_attention(&mut self) -> Result<BatchedAttention> {
        let (s, m) = (self.scratch, self.matrices);
        let layer = |i: usize| {
            let norm = m.layers[i].qk_norm.as_ref().unwrap_or(&s.none);
            let calibration = self.calibration.get(kv_layer(i)).unwrap_or(&s.none);
            let buffers = [s.state.buffer(), &s.qkv, norm, calibration, &s.partials, &s.ml];
            let launch = self.bind_launch(KernelName::AttendBatch(LayerView::of(i)), &buffers)?;
            Ok(Launch {
                ints: batched_attention::FIRST_ROW_BUFFER + batched_attention::ROW_BUFFERS,
                ..launch
            })
        };
        let attend = ByLayer::try_new(m.layers.layer_range(), layer)?;
        let merge = self.bind_launch(KernelName::MergeBatch, &[&s.partials, &s.ml, &s.att])?;
        Ok(BatchedAttention::new(attend, merge, s.none.clone(), s.at_once))
    }

    /// Creates a kernel and binds its buffers, starting with argument 0.
    fn bind_launch(&mut self, name: KernelName, buffers: &[&Buffer]) -> Result<Launch> {
        let mut kernel = self.kernels.create_kernel(name)?;
        for (i, buffer) in buffers.iter().enumerate() {
            kernel.set_buffer(i, buffer)?;
        }
        Ok(Launch { kernel, local: self.kernels.group_shape(name), ints: buffers.len() })
    }

    fn bind_product(
        &mut self,
        name: KernelName,
        chunk: &Chunk,
        operands: &MatmulBuffers<'_>,
    ) -> Result<MatmulLaunch> {
        let state = self.scratch.state.buffer();
        let Chunk { quants, scales, first, groups, .. } = chunk;
        let scales = scales.as_ref().unwrap_or(quants);
        let variant = variant_of(name);
        // For one token, the words of a row are read one by one.
        let words = if matches!(name, KernelName::Gemm(..)) { variant.rows } else { 1 };
        let image = variant.needs_feature(Feature::Images).then(|| quants.create_image(words)).transpose()?;
        let quants = image.as_ref().unwrap_or(quants);
        let mut buffers =
            vec![quants, scales, state, operands.input, operands.scales, operands.out, operands.extra];
        buffers.extend(operands.sums);
        let tiles = Tiles { launch: self.bind_launch(name, &buffers)?, groups: *groups, tile: [16, 1] };
        Ok(MatmulLaunch { rows: [*first as i32, *groups as i32], tiles, few: None })
    }

    /// Product of one token and the matrices of a step. `input` says where its input comes from, `next` the form of its
    /// result.
    fn bind_gemv(
        &mut self,
        step: Step,
        w: &StepWeights,
        (input, next): (MatmulInput, Activations),
        operands: MatmulBuffers<'_>,
    ) -> Result<MatmulLaunches> {
        let product = |chunk: &Chunk| {
            let storage = chunk.storage;
            let variant = self.kernels.variant_for(Tokens::One, storage);
            // An image may have too few texels for all experts.
            let too_large = step.experts_of_token().is_some() && variant.needs_feature(Feature::Images);
            let variant = if too_large { BASELINE } else { variant };
            let mut p = self.bind_product(
                KernelName::Gemv { step, storage, input, next, variant },
                chunk,
                &operands,
            )?;
            // If chunks are merged, their number is set for each token.
            if !matches!(input, MatmulInput::Merge { .. }) {
                p.tiles.launch.set_ints(&p.rows)?;
            }
            p.tiles.groups = self.kernels.device_shapes().gemv_groups(step, storage, variant, p.tiles.groups);
            Ok(p)
        };
        w.chunks.iter().map(product).collect::<Result<_>>().map(MatmulLaunches)
    }

    /// Product of many tokens and the matrices of a step.
    fn bind_gemm(
        &mut self,
        step: Step,
        w: &StepWeights,
        [out, extra]: [&Buffer; 2],
    ) -> Result<MatmulLaunches> {
        let s = self.scratch;
        let product = |chunk: &Chunk| {
            let variant = self.kernels.variant_for(Tokens::Many, chunk.storage);
            let sums = variant.by_rows().then_some(&s.act_sums);
            let operands = MatmulBuffers { input: &s.acts, scales: &s.act_scales, out, extra, sums };
            let mut p =
                self.bind_product(KernelName::Gemm(step, chunk.storage, variant), chunk, &operands)?;
            let groups = chunk.groups * step.matrix_count();
            p.tiles.tile = self.kernels.device_shapes().gemm_tile(step, chunk.storage, variant);
            p.tiles.groups = (groups * 16).div_ceil(p.tiles.tile[0]);
            if self.kernels.has_few(chunk.storage, variant) {
                let shapes = self.kernels.device_shapes();
                let cores = shapes.few_on_tensor_cores(step, chunk.storage);
                let operands = MatmulBuffers { sums: cores.is_none().then_some(&s.act_sums), ..operands };
                let few =
                    self.bind_product(KernelName::GemmFew(step, chunk.storage), chunk, &operands)?.tiles;
                let tile = shapes.few_tile(step, chunk.storage);
                p.few = Some(Tiles { groups: (groups * 16).div_ceil(tile[0]), tile, ..few });
            }
            Ok(p)
        };
        w.chunks.iter().map(product).collect::<Result<_>>().map(MatmulLaunches)
    }

    /// Final norm and output head of one token.
    fn bind_head(&mut self) -> Result<MatmulLaunches> {
        let (s, m) = (self.scratch, self.matrices);
        let operands =
            MatmulBuffers { input: &m.norm, scales: &s.none, out: &s.logits, extra: &s.none, sums: None };
        self.bind_gemv(Step::Head, &m.head, (MatmulInput::Norm, Activations::Floats), operands)
    }

    /// Output head of several tokens.
    fn bind_heads(&mut self) -> Result<MatmulLaunches> {
        let s = self.scratch;
        self.bind_gemm(Step::Head, &self.matrices.head, [&s.logits, &s.none])
    }

    fn one_token(&mut self, l: &LayerWeights, layer: usize) -> Result<OneToken> {
        let (mixers, [gate_up, down]) = (Step::of_mixers(layer), ffn_steps(l, layer));
        Ok(OneToken {
            qkv: self.bind_steps(mixers.iter().map(|mixer| mixer[0]), l)?,
            out: match self.attend {
                AttendOn::Device if merges_in_out(layer) => self.out_merging(l, attention_window(layer))?,
                _ => MatmulLaunches::default(),
            },
            out_merged: self.bind_steps(mixers.iter().map(|mixer| mixer[1]), l)?,
            gate_up: self.bind_steps(gate_up, l)?,
            down: self.bind_steps(down, l)?,
            per_layer: HAS_PER_LAYER
                .then(|| Ok([self.bind_one(Step::PerLayerGate, l)?, self.bind_one(Step::PerLayerOut, l)?]))
                .transpose()?,
        })
    }

    /// End of attend, and out.
    fn out_merging(&mut self, l: &LayerWeights, window: Option<usize>) -> Result<MatmulLaunches> {
        let s = self.scratch;
        let extra = l.o_bias.as_ref().unwrap_or(&s.none);
        let operands = MatmulBuffers { input: &s.partials, scales: &s.ml, out: &s.post, extra, sums: None };
        let input = MatmulInput::Merge { window: window.unwrap_or(0) };
        self.bind_gemv(Step::Out, l.step(Step::Out), (input, Activations::Floats), operands)
    }

    fn many_tokens(&mut self, l: &LayerWeights, layer: usize) -> Result<ManyTokens> {
        let (mixers, [gate_up, down]) = (Step::of_mixers(layer), ffn_steps(l, layer));
        let mut joined = |steps: &mut dyn Iterator<Item = Step>| {
            let (mut input, mut products) = (None, MatmulLaunches::default());
            for step in steps {
                let (launch, of_step) = self.bind_many(step, l)?;
                input = Some(launch);
                products.0.extend(of_step.0);
            }
            Ok((input, products))
        };
        let (norm, qkv) = joined(&mut mixers.iter().map(|mixer| mixer[0]))?;
        let (ffn_norm, gate_up) = joined(&mut gate_up.into_iter())?;
        let (silu, down) = joined(&mut down.into_iter())?;
        let outs = mixers.iter().map(|mixer| self.bind_many(mixer[1], l)).collect::<Result<_>>()?;
        let per_layer = HAS_PER_LAYER
            .then(|| Ok([self.bind_many(Step::PerLayerGate, l)?, self.bind_many(Step::PerLayerOut, l)?]))
            .transpose()?;
        Ok(ManyTokens { norm, qkv, outs, ffn_norm, gate_up, silu, down, per_layer })
    }

    /// Norm of the residual, or the residual itself, in the form that the matrices of a step read.
    fn bind_norm(&mut self, w: Option<&Buffer>, reads: Activations) -> Result<Launch> {
        let (state, reads) = (self.scratch.state.buffer(), self.kernels.activation_form(reads));
        let input = if w.is_some() { MatmulInput::Norm } else { MatmulInput::Residual };
        self.bind_inputs(KernelName::Activations(input, reads), [state, w.unwrap_or(&self.scratch.none)])
    }

    /// Converts all tokens of a pass to the form that a matrix reads.
    fn bind_inputs(&mut self, name: KernelName, [from, weights]: [&Buffer; 2]) -> Result<Launch> {
        let s = self.scratch;
        let mut launch = self.bind_launch(name, &[from, weights, &s.acts, &s.act_scales, &s.act_sums])?;
        launch.set_ints(&[0, 0])?;
        Ok(launch)
    }
}
