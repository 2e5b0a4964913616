//! Forward pass: the CPU's steps in the CPU's order. A step is one launch, a few launches, part of a launch, or runs on
//! the host.
//!
//! In a pass of one token, launches cover several steps (`kernels/gemv.cl`); in a pass of more tokens, a step has a
//! launch or two. Only rope, attend and observe know that tokens belong to different sequences: they are launched for
//! each run. An exception are runs of one token each, which attend in one launch ([`super::batched_attention`]). On
//! NVIDIA a single launch computes a pass of one token, or of one token of each of several sequences
//! ([`super::nvidia`]).

use super::cache::OpenClCache;
use super::defines::GATED_PARTS;
use super::host_attention::HostAttention;
use super::launches::{Launches, ManyTokens, merges_in_out};
use super::logits::{output_rows, output_tokens};
use super::nvidia::PersistentKernels;
use super::run_span::RunSpan;
use super::scratch::Scratch;
use super::shapes::{CONVOLVE_ITEMS, FUSED_CHUNKS, OBSERVE_ITEMS};
use super::step_launch::Launch;
use super::weights::Model;
use crate::dims::*;
use crate::model::device::{CancelToken, ExpertsFn, Run};
use crate::model::rope::Frequencies;
use crate::model::trace::Steps;
use files::Error;
use numeric::simd::{Isa, ops};
use opencl_runtime::buffer::ReadbackBuffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// A forward pass in progress.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub launches: &'a mut Launches,
    /// Kernels that compute all of this pass in one launch.
    pub persistent: Option<&'a mut PersistentKernels>,
    pub scratch: &'a mut Scratch,
    pub readback: Option<&'a mut ReadbackBuffer>,
    pub host: Option<&'a mut HostAttention>,
    /// Experts on the host.
    pub experts: Option<&'a mut ExpertsFn>,
    pub cancel: Option<&'a CancelToken>,
    pub frequencies: &'a Frequencies,
    /// Tokens of all runs together.
    pub n: usize,
    /// Number of tokens that continue after keys and values of the last layer, if not all do: those with logits to be
    /// read. They have been moved to the front.
    pub kept_tokens: Option<usize>,
    pub steps: Steps<'a>,
}

impl Pass<'_> {
    /// Runs all steps of all layers on the tokens of `runs`, and computes the requested logits.
    pub fn run(&mut self, runs: &mut [Run<'_>]) -> std::result::Result<(), Error> {
        self.embed(runs)?; // rows of the embedding, angles of RoPE
        if self.run_persistent(runs)? {
            return Ok(()); // fused: all that follows
        }
        self.embed_for_layers()?; // embeddings that each layer has of a token
        let layers = self.model.layer_range();
        if layers.start > 0 {
            self.scratch.write_residuals(runs)?; // from the stage before
        }
        for layer in layers.clone() {
            self.check_cancel()?;
            self.norm(layer, |l| &l.norm)?; // RMS norm before attention
            self.qkv(layer, runs)?; // queries, keys and values
            if has_attention(layer) {
                self.rope(layer, runs)?; // keys get their position and join the cache
                self.attend(layer, runs)?; // each query over all slots up to its own, and what each slot received of it
                self.keep_output_tokens(layer, runs)?; // what follows is only for tokens whose logits are wanted
            }
            if is_recurrent(layer) {
                self.mix_tokens(layer, runs)?; // or a convolution, delta net or Mamba2, which updates the state
            }
            if self.n == 0 {
                break;
            }
            self.out(layer, runs)?; // the outputs of attention and of what is in its place or beside it join the residual
            if !self.run_host_experts(layer)? {
                self.norm(layer, |l| &l.ffn_norm)?; // RMS norm before the feed-forward layer
                self.gate_up(layer)?; // silu(gate) * up
                self.down(layer)?; // back to the residual's width, and joins it
            }
            self.add_per_layer(layer)?; // so does the layer's own embedding of the token
            self.trace_residual(layer, runs)?;
            self.begin_device(layer)?;
        }
        if layers.end < LAYERS {
            return Ok(self.read_residuals(runs)?); // for the next stage
        }
        self.head(runs)?; // final RMS norm, one logit per vocabulary entry
        Ok(self.read_states(runs)?) // final states, for drafts by the model itself
    }

    pub(super) fn device(&self) -> &Device {
        &self.model.device
    }

    /// True if the kernels for one token compute a layer's steps.
    pub(super) fn is_single(&self) -> bool {
        self.n == 1 && self.launches.has_one()
    }

    /// True if this layer continues with fewer tokens than it began with.
    fn drops_tokens_in(&self, layer: usize) -> bool {
        self.kept_tokens.is_some() && layer == LAST_WRITING_LAYER
    }

    /// Ends a step; waits for it if steps are timed.
    pub(super) fn end_step(&mut self, step: &'static str, layer: usize) -> Result<()> {
        if self.steps.is_traced() {
            self.device().finish()?;
            self.steps.end_step(step, layer);
        }
        Ok(())
    }

    /// Computes a step for each run.
    fn each_run(
        &mut self,
        layer: usize,
        runs: &mut [Run<'_>],
        step: fn(&mut Self, usize, RunSpan, &mut OpenClCache) -> Result<()>,
    ) -> Result<()> {
        let mut first = 0;
        for run in runs {
            let mut span = RunSpan::of(run, first, layer);
            if self.drops_tokens_in(layer) {
                span.attending = output_rows(run);
            } else if self.kept_tokens.is_some() && layer > LAST_WRITING_LAYER {
                span = span.last_tokens(layer, output_rows(run));
            }
            first += span.tokens;
            if span.tokens == 0 {
                continue;
            }
            step(self, layer, span, OpenClCache::downcast(run.cache))?;
        }
        Ok(())
    }

    fn embed(&mut self, runs: &[Run<'_>]) -> Result<()> {
        self.scratch.upload_tokens(&self.model.weights, runs, self.frequencies)?;
        self.end_step("embed", 0)
    }

    /// Computes the whole pass in one launch; `false` if the device or the caches do not support it.
    fn run_persistent(&mut self, runs: &mut [Run<'_>]) -> Result<bool> {
        match &mut self.persistent {
            Some(persistent) => persistent.run(&self.model.device, self.scratch, runs),
            None => Ok(false),
        }
    }

    /// Returns an error if the pass was cancelled.
    fn check_cancel(&self) -> std::result::Result<(), Error> {
        if let Some(cancel) = self.cancel {
            // Launches are only queued: without waiting, those of all layers would be queued before anyone cancels.
            self.device().finish()?;
            if cancel.is_cancelled() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// For one token, part of `qkv` and `gate_up`.
    fn norm(&mut self, layer: usize, which: fn(&ManyTokens) -> &Option<Launch>) -> Result<()> {
        if self.is_single() {
            return Ok(());
        }
        let norm = which(&self.launches.many[layer]).as_ref();
        norm.map_or(Ok(()), |norm| norm.run(self.device(), [self.n, 1]))?;
        self.end_step("norm", layer)
    }

    fn qkv(&mut self, layer: usize, runs: &[Run<'_>]) -> Result<()> {
        let device = &self.model.device;
        if self.drops_tokens_in(layer) {
            self.narrowed_qkv(layer, runs)?;
            return self.qk_norm(layer);
        }
        if self.is_single() {
            self.launches.one[layer].qkv.launch_one(device)?; // fused: norm, qkv
        } else {
            self.launches.many[layer].qkv.launch_many(device, self.n)?;
        }
        self.qk_norm(layer)?;
        self.end_step("qkv", layer)
    }

    /// Norms all queries, and all keys, of each token together, if the model does that.
    fn qk_norm(&self, layer: usize) -> Result<()> {
        let norm = self.launches.qk_norms.get(layer);
        norm.map_or(Ok(()), |norm| norm.run(self.device(), [self.n, 2]))
    }

    /// Keys and values of all tokens, but queries only of tokens with requested logits.
    fn narrowed_qkv(&mut self, layer: usize, runs: &[Run<'_>]) -> Result<()> {
        let (device, qkv) = (&self.model.device, &mut self.launches.many[layer].qkv);
        let queries = HEADS * head_dim(layer);
        qkv.launch_rows_from(device, self.n, queries / 16)?;
        let mut some = 0..0; // neighbours together
        for token in output_tokens(runs) {
            if token != some.end {
                qkv.launch_rows_before(device, self.n, queries.div_ceil(16), some)?;
                some = token..token;
            }
            some.end += 1;
        }
        qkv.launch_rows_before(device, self.n, queries.div_ceil(16), some)
    }

    fn rope(&mut self, layer: usize, runs: &mut [Run<'_>]) -> Result<()> {
        self.each_run(layer, runs, Self::rope_of_run)
    }

    /// For a single token, part of `attend`, if the device computes that.
    fn rope_of_run(&mut self, layer: usize, span: RunSpan, cache: &mut OpenClCache) -> Result<()> {
        let bound = cache.layer(layer);
        if self.joins_batch(span) || bound.is_single(span.tokens) {
            return Ok(());
        }
        let rope = bound.rope.as_mut().expect("invariant: bound for many tokens and for the host");
        let heads = if has_cache(layer) { HEADS + 2 * KV_HEADS } else { HEADS };
        let (device, groups) = (&self.model.device, [heads, span.tokens]);
        let host = self.host.as_mut().filter(|_| has_cache(layer));
        let Some(host) = host else { return rope.set_ints(&span.as_run())?.run(device, groups) };
        // Only the rows of these tokens.
        rope.set_ints(&RunSpan { before: 0, rows: span.tokens, ..span }.as_run())?.run(device, groups)?;
        host.read_rows((self.scratch, self.readback.as_deref_mut()), (layer, span), cache)?;
        // Timed separately if the host computes attention, otherwise as part of it.
        self.end_step("rope", layer)
    }

    fn attend(&mut self, layer: usize, runs: &mut [Run<'_>]) -> Result<()> {
        self.each_run(layer, runs, Self::attend_of_run)?;
        let device = &self.model.device;
        if let Some(batched) = &mut self.launches.batched {
            batched.run(device, layer)?;
        } else if self.launches.gate.is_none() {
            return Ok(());
        }
        self.launches.gate.as_ref().map_or(Ok(()), |gate| gate.run(device, [self.n, 1]))?;
        self.end_step("attend", layer)
    }

    /// Computes a recurrent layer between its products.
    fn mix_tokens(&mut self, layer: usize, runs: &mut [Run<'_>]) -> Result<()> {
        self.each_run(layer, runs, Self::convolve_run)?;
        if let Some([prepare, _]) = &self.launches.around_update[layer] {
            prepare.run(self.device(), [2 * DELTA_NET.key_heads + 1, self.n])?;
        }
        self.each_run(layer, runs, Self::update_run)?;
        if let Some([_, gate]) = &self.launches.around_update[layer] {
            gate.run(self.device(), [GATED_PARTS, self.n])?;
        }
        self.end_step("mix", layer)
    }

    fn convolve_run(&mut self, layer: usize, span: RunSpan, cache: &mut OpenClCache) -> Result<()> {
        let convolve = cache.layer(layer).convolve.as_mut().expect("invariant: bound for recurrent layers");
        let groups = CONV_CHANNELS.div_ceil(CONVOLVE_ITEMS);
        convolve.set_ints(&span.as_run())?.run(&self.model.device, [groups, 1])
    }

    fn update_run(&mut self, layer: usize, span: RunSpan, cache: &mut OpenClCache) -> Result<()> {
        let Some(update) = &mut cache.layer(layer).update else { return Ok(()) };
        update.set_ints(&span.as_run())?.run(&self.model.device, [STATE_WIDTH / 16, 1])
    }

    fn attend_of_run(&mut self, layer: usize, span: RunSpan, cache: &mut OpenClCache) -> Result<()> {
        if self.joins_batch(span) {
            return self.join_batch(layer, span, cache);
        }
        let (attending, merges) = (span.attending_part(), self.out_merges(layer, span));
        let device = &self.model.device;
        if let Some(host) = self.host.as_mut().filter(|_| attending.tokens > 0) {
            let of_layer = (&*self.model.weights, layer, attending);
            host.attend((self.scratch, self.readback.as_deref_mut()), of_layer, cache)?;
        } else if let Some(one) = cache.layer(layer).attend_one.as_mut().filter(|_| span.tokens == 1) {
            let chunks = span.visible_chunks();
            one.set_ints(&span.as_run())?.run(device, [chunks * KV_HEADS, 1])?; // fused: rope, attend
            if !merges {
                let merge = self.launches.merge.as_mut().expect("invariant: there is one with `attend_one`");
                merge.set_ints(&[span.first as i32, chunks as i32])?.run(device, [HEADS, 1])?;
            }
        } else if self.host.is_none() && attending.tokens > 0 {
            let attend = cache.layer(layer).attend.as_mut().expect("invariant: bound for many tokens");
            let tiles = (attending.tokens * GROUP).div_ceil(self.launches.queries);
            let attend = attend.set_ints(&attending.as_run())?.set_second_ints(&[span.observed as i32])?;
            attend.run(device, [tiles, KV_HEADS])?;
        }
        self.end_step("attend", layer)?;
        self.observe(layer, span, cache)
    }

    /// True if the attention of a run is computed in a batch with others.
    fn joins_batch(&self, span: RunSpan) -> bool {
        self.launches.batched.is_some() && self.n > 1 && span.is_plain_token
    }

    fn join_batch(&mut self, layer: usize, span: RunSpan, cache: &OpenClCache) -> Result<()> {
        let batched = self.launches.batched.as_mut().expect("the caller has looked");
        let rows = cache.rows.layer(kv_layer(layer)).expect("invariant: attention is the device's");
        batched.add(layer, span.as_run(), span.visible_chunks(), rows)?;
        if batched.is_full() { batched.run(&self.model.device, layer) } else { Ok(()) }
    }

    /// Adds the attention just computed to the mass of the slots. Attention on the host has already done so.
    fn observe(&mut self, layer: usize, span: RunSpan, cache: &mut OpenClCache) -> Result<()> {
        if span.observed == 0 || self.host.is_some() {
            return Ok(());
        }
        let massed = cache.mass.as_ref().map_or(0, |mass| mass.filled());
        let bound = cache.layer(layer);
        let launch = if bound.is_single(span.tokens) { &mut bound.observe_one } else { &mut bound.observe };
        let launch = launch.as_mut().expect("invariant: bound with the mass");
        let launch =
            launch.set_ints(&span.as_run())?.set_second_ints(&[span.observed as i32, massed as i32])?;
        launch.run(&self.model.device, [span.filled_slots().div_ceil(OBSERVE_ITEMS), KV_HEADS])?;
        self.end_step("observe", layer)
    }

    /// Moves the tokens that continue to the front.
    fn keep_output_tokens(&mut self, layer: usize, runs: &[Run<'_>]) -> Result<()> {
        let Some(kept) = self.kept_tokens.filter(|_| layer == LAST_WRITING_LAYER) else { return Ok(()) };
        output_tokens(runs).enumerate().try_for_each(|(to, from)| self.scratch.move_token(from, to))?;
        self.n = kept;
        Ok(())
    }

    /// True if `out` merges the chunks of attention.
    fn out_merges(&self, layer: usize, span: RunSpan) -> bool {
        let on_device = self.is_single() && self.kept_tokens.is_none() && self.host.is_none();
        on_device && merges_in_out(layer) && span.visible_chunks() <= FUSED_CHUNKS
    }

    fn out(&mut self, layer: usize, runs: &mut [Run<'_>]) -> Result<()> {
        let span = RunSpan::of(&mut runs[0], 0, layer);
        let (merges, device) = (self.out_merges(layer, span), &self.model.device);
        if merges {
            self.launches.one[layer].out.launch_merging(device, span.filled_slots())?; // fused: the end of attend, out
        } else if self.is_single() {
            self.launches.one[layer].out_merged.launch_one(device)?;
        } else {
            for (input, out) in &mut self.launches.many[layer].outs {
                input.run(device, [self.n, 1])?;
                out.launch_many(device, self.n)?;
            }
        }
        self.post_norm(layer, 0)?;
        self.end_step("out", layer)
    }

    fn gate_up(&mut self, layer: usize) -> Result<()> {
        let device = &self.model.device;
        if self.is_single() {
            self.launches.one[layer].gate_up.launch_one(device)?; // fused: norm, gate_up
        } else {
            let l = &mut self.launches.many[layer];
            l.gate_up.launch_many(device, self.n)?;
            l.silu.as_ref().map_or(Ok(()), |silu| silu.run(device, [self.n, 1]))?;
        }
        let experts = self.launches.experts[layer].as_mut();
        experts.map_or(Ok(()), |experts| experts.gate_up(device, self.n))?;
        self.end_step("gate_up", layer)
    }

    fn down(&mut self, layer: usize) -> Result<()> {
        let device = &self.model.device;
        if self.is_single() {
            self.launches.one[layer].down.launch_one(device)?;
        } else {
            self.launches.many[layer].down.launch_many(device, self.n)?;
        }
        let experts = self.launches.experts[layer].as_mut();
        experts.map_or(Ok(()), |experts| experts.down(device, self.n))?;
        self.post_norm(layer, 1)?;
        self.end_step("down", layer)
    }

    /// Norms the output of attention (0), of the feed-forward layer (1) or of the layer's embedding (2), if the model has
    /// such norms.
    pub(super) fn post_norm(&self, layer: usize, which: usize) -> Result<()> {
        let norm = self.launches.post_norms[layer].get(which);
        norm.map_or(Ok(()), |norm| norm.run(self.device(), [self.n, 1]))
    }

    /// Records the residual of the last token.
    fn trace_residual(&mut self, layer: usize, runs: &[Run<'_>]) -> Result<()> {
        if self.steps.is_traced() {
            let pos = runs.last().map_or(0, |run| run.pos + run.tokens.len() - 1);
            let mut x = [0.0; DIM];
            self.scratch.read_residual(self.n - 1, &mut x)?;
            self.steps.record_residual(pos, layer, &x);
        }
        Ok(())
    }

    /// Lets the device start on the first layer while the rest is queued.
    fn begin_device(&self, layer: usize) -> Result<()> {
        if layer == self.model.layer_range().start { self.device().flush_if_gpu() } else { Ok(()) }
    }

    /// Reads the residual of all tokens for the stage behind this one.
    fn read_residuals(&mut self, runs: &mut [Run<'_>]) -> Result<()> {
        match (&mut self.readback, &mut *runs) {
            (Some(readback), [run]) if self.n == 1 => self.scratch.read_token(readback, run.residual),
            _ => self.scratch.read_residuals(runs),
        }
    }

    /// Reads the residual of the tokens whose final states are wanted, and norms it.
    fn read_states(&mut self, runs: &mut [Run<'_>]) -> Result<()> {
        let mut end = 0;
        for run in runs {
            end += if self.kept_tokens.is_some() { output_rows(run) } else { run.tokens.len() };
            let (first, mut x) = (end - run.hidden.len() / DIM, [0.0; DIM]);
            for (i, state) in run.hidden.chunks_exact_mut(DIM).enumerate() {
                self.scratch.read_residual(first + i, &mut x)?;
                ops::rms_norm(Isa::Scalar, &x, &self.model.weights.norm, NORM_EPS as f32, state);
            }
        }
        Ok(())
    }
}
