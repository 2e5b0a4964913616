//! Several devices as one: each computes a range of layers, a stage, and hands the residual on to the next. The first
//! stage embeds the tokens, and the last one has the output head.
//!
//! Each stage holds the rows and states of its own layers, in a cache made by its device. Nothing above the seam knows.
//!
//! Matrices are not divided by rows (tensor parallelism). Through OpenCL, a residual goes from one GPU to another through
//! page-locked memory in 24 us, measured on two H200. A stage costs that once for each token; rows would cost it after
//! every matrix: with four in each of 80 layers 80 x 4 x 24 us = 7.7 ms, in which one of these GPUs reads 37 GB of weights.

use crate::device::{
    CancelToken, Device, Extent, HostRows, KvCache, KvRows, Logits, LogitsBuffer, Run, reuse_memory,
};
use crate::dims::*;
use crate::trace::Trace;
use files::{Error, Result};
use numeric::pool::Pool;
use std::any::Any;
use std::ops::Range;

/// A device that computes only some layers.
pub struct Stage {
    /// The device.
    pub device: Box<dyn Device>,
    /// Its layers.
    pub layers: Range<usize>,
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

/// Devices that compute a pass one after the other.
pub struct SplitDevice {
    stages: Vec<Stage>,
    /// Residual of the tokens of a pass: `[token][DIM]`.
    residual: Vec<f32>,
    max_tokens: usize,
    trace: Option<Trace>,
    /// Empty between passes.
    runs: Vec<Run<'static>>,
}

impl SplitDevice {
    /// Combines stages, whose layers are all of the model in order.
    pub fn new(stages: Vec<Stage>) -> Self {
        let starts = stages.iter().map(|stage| stage.layers.start).chain([LAYERS]);
        assert!(starts.eq([0].into_iter().chain(stages.iter().map(|stage| stage.layers.end))));
        let max_tokens = stages.iter().map(|stage| stage.device.max_tokens()).min().unwrap_or(1);
        Self { stages, residual: vec![0.0; max_tokens * DIM], max_tokens, trace: None, runs: Vec::new() }
    }

    /// Computes the layers of one stage.
    fn run_stage(&mut self, index: usize, runs: &mut [Run<'_>], cancel: Option<&CancelToken>) -> Result<()> {
        let (stage, mut residual) = (&mut self.stages[index], &mut self.residual[..]);
        let (is_last, has_mass) = (stage.layers.end == LAYERS, stage.layers.clone().any(has_mass));
        let of_stage = |run| {
            let Run { cache, tokens, pos, known_len, logits, observed_tokens, hidden, .. }: &mut Run<'_> =
                run;
            let (own, rest) = std::mem::take(&mut residual).split_at_mut(tokens.len() * DIM);
            residual = rest;
            Run {
                cache: &mut *SplitCache::downcast(*cache).stages[index].1,
                tokens,
                pos: *pos,
                known_len: *known_len,
                logits: if is_last { logits.reborrow() } else { Logits::None },
                observed_tokens: if has_mass { *observed_tokens } else { 0 },
                hidden: if is_last { hidden } else { &mut [] },
                residual: own,
            }
        };
        let mut of_pass = reuse_memory(std::mem::take(&mut self.runs));
        of_pass.extend(runs.iter_mut().map(of_stage));
        stage.device.set_trace(self.trace.take());
        let computed = stage.device.forward(&mut of_pass, cancel);
        self.trace = stage.device.set_trace(None);
        self.runs = reuse_memory(of_pass);
        computed
    }
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
        Ok(Box::new(SplitCache { stages, has_mass: false }))
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
        for index in 0..self.stages.len() {
            if let Err(failed) = self.run_stage(index, runs, cancel) {
                for run in runs {
                    // The last stage has not added the tokens.
                    let len = run.cache.extent().len;
                    let computed = &mut SplitCache::downcast(run.cache).stages[..index];
                    computed.iter_mut().for_each(|(_, cache)| cache.set_len(len));
                }
                return Err(failed);
            }
        }
        Ok(())
    }

    fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        std::mem::replace(&mut self.trace, trace)
    }
}

/// The rows and states of one sequence, in a cache of each stage.
struct SplitCache {
    /// The caches, and the layers that each has.
    stages: Vec<(Range<usize>, Box<dyn KvCache>)>,
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

    /// Floats of a stage's recurrent layers in the state of the sequence.
    fn state_range(layers: &Range<usize>) -> Range<usize> {
        let before = |end| (0..end).filter(|&layer| is_recurrent(layer)).count() * LAYER_STATE;
        before(layers.start)..before(layers.end)
    }

    fn try_each_cache(&mut self, act: impl FnMut(&mut Box<dyn KvCache>) -> Result<()>) -> Result<()> {
        self.stages.iter_mut().map(|(_, cache)| cache).try_for_each(act)
    }
}

impl KvCache for SplitCache {
    fn extent(&self) -> Extent {
        let extents = self.stages.iter().map(|(_, cache)| cache.extent());
        // The last stage is the last one to fill slots, and the first one that fails to enlarge rings keeps the smaller.
        let smallest = extents.reduce(|a, b| Extent { ring: a.ring.min(b.ring), ..b });
        smallest.expect("invariant: there is a stage")
    }

    fn set_len(&mut self, len: usize) {
        self.stages.iter_mut().for_each(|(_, cache)| cache.set_len(len));
    }

    fn read_state(&mut self, state: &mut [f32]) -> Result<()> {
        let mut whole = vec![0.0; state.len()];
        for (layers, cache) in self.stages.iter_mut().filter(|_| HAS_STATE) {
            cache.read_state(&mut whole)?;
            let own = Self::state_range(layers);
            state[own.clone()].copy_from_slice(&whole[own]);
        }
        Ok(())
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
