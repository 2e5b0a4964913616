//! Several devices as one: each computes a range of layers, a stage, and hands the residual on to the next. The first
//! stage embeds the tokens, and the last one has the output head.
//!
//! Each stage holds the rows and states of its own layers, in a cache made by its device. Nothing above the seam knows.
//!
//! A pass of many tokens goes through the stages as a pipeline: it is cut into micro-batches, which each stage computes in
//! order, while the stage behind computes those before. Two stages of equal speed then take `(m + 1) / 2m` of the time for
//! `m` micro-batches: 0.56 for 8, which is 1.78 times as fast as one such device with all layers, if a micro-batch takes
//! its share of the pass's time. Two H200 were 0.8 to 1.0 times as fast as one (`xtask/MEASUREMENTS.md`), and 0.7 without
//! the pipeline. Generated tokens gain nothing: a token needs the one before it, and a pass of a token of each sequence
//! takes about as long with half of them.
//!
//! Matrices are not divided by rows (tensor parallelism). Through OpenCL, a residual goes from one GPU to another through
//! page-locked memory in 24 us, measured on two H200. A stage costs that once for each token; rows would cost it after
//! every matrix: with four in each of 80 layers 80 x 4 x 24 us = 7.7 ms, in which one of these GPUs reads 37 GB of weights.

use crate::device::{
    CancelToken, Device, Extent, HostRows, KvCache, KvRows, Logits, LogitsBuffer, RowsInFile, Run,
    reuse_memory,
};
use crate::dims::*;
use crate::trace::Trace;
use files::{Error, Result};
use numeric::pool::{Pool, run_both};
use std::any::Any;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Fewest tokens of a micro-batch. A product with 4-bit weights multiplies 3.6 times for each byte of them and token, and
/// an H200 200 times in the time of reading a byte: with fewer than 60 tokens, halves of a pass take more than half of
/// its time. So one token of each of 8 sequences is no pipeline: of Llama 3.2 1B, an H200 computes one of 4 in 1.01 ms
/// and of 8 in 1.08; two of them, with half of the layers each, would take 3 x 1.01 / 2 for two halves. An expert gets only
/// its share of the tokens, so it needs more.
const MICRO_BATCH: usize = if HAS_EXPERTS { 64 * EXPERTS.count / EXPERTS.used } else { 64 };
/// Maximum number of micro-batches of a pass for each stage: of two stages, both compute in 7 of 9 steps.
const STAGE_MICRO_BATCHES: usize = 4;

/// A device that computes only some layers.
pub struct Stage {
    device: Box<dyn Device>,
    layers: Range<usize>,
    /// Parts of runs in a micro-batch; empty between passes.
    parts: Vec<Run<'static>>,
}

/// Tokens of a pass, counted over all runs, with their residual: `[token][DIM]`.
type MicroBatch<'a> = (Range<usize>, &'a mut [f32]);

impl Stage {
    /// A device with its layers.
    pub fn new(device: Box<dyn Device>, layers: Range<usize>) -> Self {
        Self { device, layers, parts: Vec::new() }
    }

    /// Computes micro-batches of some runs, and hands each on to the stage behind, until that has failed.
    fn compute_micro_batches<'a>(
        &mut self,
        runs: &mut [Run<'_>],
        (from, to): (Receiver<MicroBatch<'a>>, Option<Sender<MicroBatch<'a>>>),
        cancel: Option<&CancelToken>,
    ) -> Result<()> {
        for (tokens, residual) in from {
            self.compute_micro_batch(runs, (tokens.clone(), &mut *residual), cancel)?;
            if to.as_ref().is_some_and(|to| to.send((tokens, residual)).is_err()) {
                break;
            }
        }
        Ok(())
    }

    /// Computes a micro-batch.
    fn compute_micro_batch(
        &mut self,
        runs: &mut [Run<'_>],
        (tokens, mut residual): MicroBatch<'_>,
        cancel: Option<&CancelToken>,
    ) -> Result<()> {
        let (mut parts, mut before) = (reuse_memory(std::mem::take(&mut self.parts)), 0);
        for run in runs {
            let len = run.tokens.len();
            let [from, to] = [tokens.start, tokens.end].map(|token| token.saturating_sub(before).min(len));
            before += len;
            if from < to {
                let own;
                (own, residual) = residual.split_at_mut((to - from) * DIM);
                parts.push(cut_run(run, from..to, own));
            }
        }
        let computed = self.device.forward(&mut parts, cancel);
        self.parts = reuse_memory(parts);
        computed
    }
}

/// Some tokens of a run as a run of its own.
fn cut_run<'a>(run: &'a mut Run<'_>, tokens: Range<usize>, residual: &'a mut [f32]) -> Run<'a> {
    let Range { start, end } = tokens;
    let all = run.tokens.len();
    let hidden = [start, end].map(|token| token.saturating_sub(all - run.hidden.len() / DIM) * DIM);
    Run {
        cache: &mut *run.cache,
        tokens: &run.tokens[tokens],
        pos: run.pos + start,
        known_len: run.known_len,
        logits: match &mut run.logits {
            Logits::Last(logits) if end == all => Logits::Last(logits),
            Logits::All(logits) => Logits::All(&mut logits[start * VOCAB..end * VOCAB]),
            _ => Logits::None,
        },
        observed_tokens: end.saturating_sub(start.max(all - run.observed_tokens.min(all))),
        hidden: &mut run.hidden[hidden[0]..hidden[1]],
        residual,
    }
}

/// Computes micro-batches on all stages at once, each on a thread of its own. Returns the failure of the first stage that
/// fails; those before it then stop after their micro-batch, and those behind it after those that have passed it.
fn run_pipeline<'a>(
    stages: &mut [Stage],
    runs: &mut [Vec<Run<'_>>],
    from: Receiver<MicroBatch<'a>>,
    cancel: Option<&CancelToken>,
) -> Result<()> {
    let (Some((stage, stages)), Some((own, runs))) = (stages.split_first_mut(), runs.split_first_mut())
    else {
        return Ok(());
    };
    if stages.is_empty() {
        return stage.compute_micro_batches(own, (from, None), cancel);
    }
    let (to, from_here) = channel();
    let (mut from_here, mut here, mut behind) = (Some(from_here), Ok(()), Ok(()));
    let others = || {
        if let Some(from) = from_here.take() {
            behind = run_pipeline(stages, runs, from, cancel);
        }
    };
    run_both(others, || here = stage.compute_micro_batches(own, (from, Some(to)), cancel));
    here.and(behind)
}

/// The largest first layer of a stage: later layers read rows of this one or of those behind it.
pub const LAST_CUT: usize = {
    let (mut layer, mut first) = (FIRST_SHARING_LAYER, LAYERS - 1);
    while layer < LAYERS {
        if kv_layer(layer) < first {
            first = kv_layer(layer);
        }
        layer += 1;
    }
    first
};

/// The layers of stages with these numbers of layers.
///
/// # Errors
///
/// `Usage` if a stage has none, if they are not all layers of the model together, or if a stage would need rows of an
/// earlier one.
pub fn stage_ranges(counts: &[usize]) -> Result<Vec<Range<usize>>> {
    let all = counts.iter().fold(0usize, |sum, &n| sum.saturating_add(n));
    if all != LAYERS || counts.contains(&0) {
        return Err(Error::Usage(format!(
            "`EngineOptions::split` has {all} layers, but the model has {LAYERS}; give each device at least one, and all \
             {LAYERS} together"
        )));
    }
    let mut end = 0;
    let next = |&count| {
        end += count;
        end - count..end
    };
    let ranges: Vec<Range<usize>> = counts.iter().map(next).collect();
    match ranges.last() {
        Some(last) if last.start > LAST_CUT => Err(Error::Usage(format!(
            "`EngineOptions::split`: the last device begins with layer {}, but layers of this model share keys and values \
             from layer {LAST_CUT} on; give it at least the last {} layers",
            last.start,
            LAYERS - LAST_CUT
        ))),
        _ => Ok(ranges),
    }
}

/// Devices that compute a pass one after the other, or its micro-batches at the same time.
pub struct SplitDevice {
    stages: Vec<Stage>,
    /// Residual of the tokens of a pass: `[token][DIM]`.
    residual: Vec<f32>,
    max_tokens: usize,
    trace: Option<Trace>,
    /// Runs of a pass by stage; empty between passes.
    runs: Vec<Vec<Run<'static>>>,
}

impl SplitDevice {
    /// Combines stages, whose layers are all of the model in order.
    pub fn new(stages: Vec<Stage>) -> Self {
        let starts = stages.iter().map(|stage| stage.layers.start).chain([LAYERS]);
        assert!(starts.eq([0].into_iter().chain(stages.iter().map(|stage| stage.layers.end))));
        let max_tokens = stages.iter().map(|stage| stage.device.max_tokens()).min().unwrap_or(1);
        let runs = stages.iter().map(|_| Vec::new()).collect();
        Self { stages, residual: vec![0.0; max_tokens * DIM], max_tokens, trace: None, runs }
    }

    /// Number of micro-batches that a pass of `tokens` tokens is cut into. A trace has the steps in order.
    fn count_micro_batches(&self, tokens: usize) -> usize {
        match self.stages.len() {
            stages if stages > 1 && self.trace.is_none() => {
                (tokens / MICRO_BATCH).clamp(1, STAGE_MICRO_BATCHES * stages)
            }
            _ => 1,
        }
    }

    /// Computes the runs of each stage.
    fn compute_stages(&mut self, runs: &mut [Vec<Run<'_>>], cancel: Option<&CancelToken>) -> Result<()> {
        let tokens = runs[0].iter().map(|run| run.tokens.len()).sum();
        let count = self.count_micro_batches(tokens);
        let residual = &mut self.residual[..tokens * DIM];
        if count > 1 {
            let micro_batches = cut_pass(&runs[0], residual, count);
            return run_pipeline(&mut self.stages, runs, micro_batches, cancel);
        }
        self.stages.iter_mut().zip(runs).try_for_each(|(stage, runs)| {
            stage.device.set_trace(self.trace.take());
            let computed = stage.compute_micro_batch(runs, (0..tokens, &mut *residual), cancel);
            self.trace = stage.device.set_trace(None);
            computed
        })
    }
}

/// Cuts a pass into at most `count` micro-batches of about the same length. Runs with a recurrent state stay whole: the
/// state after the first token of the last run can be asked for.
fn cut_pass<'a>(runs: &[Run<'_>], mut residual: &'a mut [f32], count: usize) -> Receiver<MicroBatch<'a>> {
    let ((send, micro_batches), mut from) = (channel(), 0);
    let all = residual.len() / DIM;
    for index in 1..=count {
        let (mut to, mut end) = (all * index / count, 0);
        if HAS_STATE {
            let ends = runs.iter().map(|run| {
                end += run.tokens.len();
                end
            });
            to = ends.into_iter().find(|&end| end >= to).unwrap_or(all);
        }
        if to > from {
            let own;
            (own, residual) = residual.split_at_mut((to - from) * DIM);
            send.send((from..to, own)).expect("invariant: the receiver is here");
            from = to;
        }
    }
    micro_batches
}

impl Device for SplitDevice {
    fn name(&self) -> String {
        let stage =
            |s: &Stage| format!("layers {}-{} on {}", s.layers.start, s.layers.end - 1, s.device.name());
        self.stages.iter().map(stage).collect::<Vec<_>>().join(", ")
    }

    fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    fn new_cache(&mut self, slots: usize) -> Result<Box<dyn KvCache>> {
        let cache = |s: &mut Stage| Ok((s.layers.clone(), s.device.new_cache(slots)?));
        let stages = self.stages.iter_mut().map(cache).collect::<Result<_>>()?;
        Ok(Box::new(SplitCache { stages, len: 0, has_mass: false }))
    }

    fn logits_buffer(&mut self, current: &[f32]) -> Option<LogitsBuffer> {
        self.stages.last_mut()?.device.logits_buffer(current)
    }

    fn thread_pool(&self) -> Option<&Pool> {
        self.stages.iter().find_map(|stage| stage.device.thread_pool())
    }

    fn forward(&mut self, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()> {
        // The mass that earlier stages have collected could not be undone.
        let cancel = cancel.filter(|_| runs.iter().all(|run| run.observed_tokens == 0));
        let by_stage = std::mem::take(&mut self.runs).into_iter();
        let mut by_stage: Vec<Vec<Run<'_>>> = by_stage.map(reuse_memory).collect(); // in place
        runs.iter_mut().for_each(|run| SplitCache::add_runs(run, &mut by_stage));
        let computed = self.compute_stages(&mut by_stage, cancel);
        self.runs = by_stage.into_iter().map(reuse_memory).collect();
        for run in runs {
            let cache = SplitCache::downcast(run.cache);
            match computed {
                Ok(()) => cache.len += run.tokens.len(),
                Err(_) => cache.set_len(cache.len),
            }
        }
        computed
    }

    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        std::mem::replace(&mut self.trace, trace)
    }
}

/// The rows and states of one sequence, in a cache of each stage.
struct SplitCache {
    /// The caches, and the layers that each has.
    stages: Vec<(Range<usize>, Box<dyn KvCache>)>,
    /// Filled slots, without those of a pass that is being computed.
    len: usize,
    /// True once the mass is allocated.
    has_mass: bool,
}

impl SplitCache {
    /// Downcasts the cache of a run.
    fn downcast(cache: &mut dyn KvCache) -> &mut Self {
        let cache: &mut dyn Any = cache;
        cache.downcast_mut().expect("a split device computes with caches of its own")
    }

    /// The cache that has a layer.
    fn stage_cache(&mut self, layer: usize) -> &mut dyn KvCache {
        let stage = self.stages.iter_mut().find(|(layers, _)| layers.contains(&layer));
        &mut *stage.expect("invariant: stages have all layers").1
    }

    /// Adds a run to those of each stage. Only the last one gives logits and final states.
    fn add_runs<'a>(run: &'a mut Run<'_>, by_stage: &mut [Vec<Run<'a>>]) {
        let caches = Self::downcast(run.cache).stages.iter_mut();
        for ((layers, cache), runs) in caches.zip(&mut *by_stage) {
            let observed_tokens = if layers.clone().any(has_mass) { run.observed_tokens } else { 0 };
            let own = Run::new(&mut **cache, run.tokens, run.pos, Logits::None);
            runs.push(Run { known_len: run.known_len, observed_tokens, ..own });
        }
        if let Some(last) = by_stage.last_mut().and_then(|runs| runs.last_mut()) {
            (last.logits, last.hidden) = (run.logits.reborrow(), &mut *run.hidden);
        }
    }

    fn try_each_cache(&mut self, act: impl FnMut(&mut Box<dyn KvCache>) -> Result<()>) -> Result<()> {
        self.stages.iter_mut().map(|(_, cache)| cache).try_for_each(act)
    }
}

impl KvCache for SplitCache {
    fn extent(&self) -> Extent {
        let extents = self.stages.iter().map(|(_, cache)| cache.extent());
        // The first one that fails to enlarge rings keeps the smaller.
        let smallest = extents.reduce(|a, b| Extent { ring: a.ring.min(b.ring), ..b });
        Extent { len: self.len, ..smallest.expect("invariant: there is a stage") }
    }

    fn set_len(&mut self, len: usize) {
        self.len = len;
        self.stages.iter_mut().for_each(|(_, cache)| cache.set_len(len));
    }

    fn read_state(&mut self, state: &mut [f32]) -> Result<()> {
        self.try_each_cache(|cache| cache.read_state(state))
    }

    fn write_state(&mut self, state: &[f32]) -> Result<()> {
        self.try_each_cache(|cache| cache.write_state(state))
    }

    fn restore_first_state(&mut self) -> Result<()> {
        self.try_each_cache(|cache| cache.restore_first_state())
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        let before = self.extent().slots;
        let resized = self.try_each_cache(|cache| cache.resize(slots));
        if resized.is_err() {
            // Those that were resized have room for what they had.
            let _ = self.try_each_cache(|cache| {
                if cache.extent().slots == before { Ok(()) } else { cache.resize(before) }
            });
        }
        resized
    }

    fn reserve_window_rows(&mut self) -> Result<()> {
        self.try_each_cache(|cache| cache.reserve_window_rows())
    }

    fn retain_slots(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        self.stage_cache(layer).retain_slots(layer, kv_head, slots)
    }

    fn read_rows(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        self.stage_cache(layer).read_rows(layer, slots, rows)
    }

    fn write_rows(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        self.stage_cache(layer).write_rows(layer, slots, rows)
    }

    fn map_rows(&mut self, layer: usize, slots: usize, rows: &RowsInFile<'_>) -> bool {
        self.stage_cache(layer).map_rows(layer, slots, rows)
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        self.stage_cache(layer).read_mass(layer, mass)
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        if !self.has_mass {
            let zeros = vec![0.0; mass.len()];
            for (layers, cache) in &mut self.stages {
                if let Some(first) = layers.clone().find(|&layer| has_mass(layer)) {
                    cache.write_mass(first, &zeros)?;
                }
            }
            self.has_mass = true;
        }
        self.stage_cache(layer).write_mass(layer, mass)
    }

    fn host_rows(&mut self) -> Result<&mut dyn HostRows> {
        panic!("invariant: nothing else computes with the cache of a split device")
    }
}
