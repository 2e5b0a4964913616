//! One device with the KV cache of one sequence, and the validity of its rows.

use super::state_history::{Checkpoint, StateHistory, max_checkpoints};
use crate::dims::{
    FULL_ATTENTION_LAYERS, HEAD_DIM, KV_HEADS, SLIDING_LAYERS, WINDOW, attention_layers,
    full_attention_layers, is_sliding,
};
use crate::model::device::{Extent, KvCache, KvRows, Logits, Run, SharedDevice, lock_device};
use crate::model::trace::Trace;
use files::Result;
use std::ops::Range;
use std::sync::Arc;

/// Slots copied at a time: a few hundred KiB of rows.
const SLOTS: usize = 64;

/// Positions whose rows a cache has in its sliding-window layers: the latest, as far back as the ring reaches, and
/// enough for the next token.
#[derive(Debug, Clone, Copy, Default)]
struct WindowRows {
    from: usize,
    end: usize,
}

impl WindowRows {
    /// Adds the rows of these positions, in a ring of `ring` rows.
    fn extend(&mut self, positions: Range<usize>, ring: usize) {
        self.from = self.from.max(positions.end.saturating_sub(ring));
        self.end = positions.end;
    }

    /// True if all rows that a token at this position sees are there.
    fn covers_window(self, pos: usize) -> bool {
        SLIDING_LAYERS == 0 || pos <= self.end && (self.from == 0 || pos + 1 >= self.from + WINDOW)
    }

    /// Keeps the rows before this position, or none if they do not suffice.
    fn truncate(&mut self, pos: usize) {
        let end = self.end.min(pos);
        *self = if end > 0 && self.covers_window(end) { Self { end, ..*self } } else { Self::default() };
    }
}

/// Number of slots and tokens at the beginning of a sequence.
#[derive(Debug, Clone, Copy)]
struct SequencePrefix {
    slots: usize,
    tokens: usize,
}

impl SequencePrefix {
    const ALL: Self = Self { slots: usize::MAX, tokens: usize::MAX };
}

/// Positions of the tokens of a run.
#[derive(Clone, Copy)]
pub struct RunPosition {
    /// Position of the first one.
    pub pos: usize,
    /// Length of the sequence as far as it is known: see [`Run::known_len`].
    pub known: usize,
}

/// A device with the KV cache of one sequence.
pub struct DeviceCache {
    pub(super) device: SharedDevice,
    pub(super) cache: Box<dyn KvCache>,
    window: WindowRows,
    state: StateHistory,
    max_tokens: usize,
    /// Beginning of the sequence that is unchanged since the last switch, so that the other device still has its rows.
    unchanged: SequencePrefix,
    /// True if sliding-window layers have room for more positions than slots.
    outlasts: bool,
    /// Number of observed tokens of each pass, counted from its end.
    observed: usize,
    /// True if the mass belongs to this sequence.
    mass_is_valid: bool,
}

impl DeviceCache {
    /// An empty cache of `slots` slots on a device.
    ///
    /// # Errors
    ///
    /// `Memory`.
    pub fn new(device: SharedDevice, slots: usize) -> Result<Self> {
        let cache = lock_device(&device).new_cache(slots)?;
        Ok(Self::from_parts(device, cache))
    }

    /// An empty cache that this device can compute with.
    pub fn from_parts(device: SharedDevice, cache: Box<dyn KvCache>) -> Self {
        let max_tokens = lock_device(&device).max_tokens();
        Self {
            device,
            cache,
            window: WindowRows::default(),
            state: StateHistory::new(max_checkpoints(1)),
            max_tokens,
            unchanged: SequencePrefix::ALL,
            outlasts: false,
            observed: 0,
            mass_is_valid: false,
        }
    }

    /// The device.
    pub fn device(&self) -> SharedDevice {
        Arc::clone(&self.device)
    }

    /// True if it is on this device.
    pub fn is_on(&self, device: &SharedDevice) -> bool {
        Arc::ptr_eq(&self.device, device)
    }

    /// The device's name, for reports.
    pub fn name(&self) -> String {
        lock_device(&self.device).name()
    }

    /// The cache.
    pub fn cache(&mut self) -> &mut dyn KvCache {
        &mut *self.cache
    }

    /// The shape of the cache.
    pub fn extent(&self) -> Extent {
        self.cache.extent()
    }

    /// Slots in use.
    pub fn filled_slots(&self) -> usize {
        self.extent().len
    }

    /// Free slots.
    pub fn free_slots(&self) -> usize {
        let Extent { slots, len, .. } = self.extent();
        slots - len
    }

    /// Maximum number of tokens of a pass.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Swaps the device that computes with the cache.
    pub(super) fn swap_device(&mut self, device: &mut SharedDevice) {
        std::mem::swap(&mut self.device, device);
        self.max_tokens = lock_device(&self.device).max_tokens();
    }

    /// A run of a pass that appends `tokens`.
    pub fn run<'a>(&'a mut self, tokens: &'a [u32], at: RunPosition, logits: Logits<'a>) -> Run<'a> {
        let RunPosition { pos, known } = at;
        let observe = if FULL_ATTENTION_LAYERS != 0 { self.observed.min(tokens.len()) } else { 0 };
        self.window.extend(pos..pos + tokens.len(), self.cache.extent().ring);
        self.state.begin_pass(pos..pos + tokens.len());
        Run {
            cache: &mut *self.cache,
            tokens,
            pos,
            known_len: known,
            logits,
            observed_tokens: observe,
            hidden: &mut [],
            residual: &mut [],
        }
    }

    /// Ends a run whose pass did not fail.
    pub fn end_run(&mut self) {
        self.state.end_pass();
    }

    /// Rewinds to `slots` slots and `tokens` tokens.
    pub fn truncate(&mut self, slots: usize, tokens: usize) {
        self.cache.set_len(slots);
        self.window.truncate(tokens);
        self.state.truncate(&mut *self.cache, tokens);
        let SequencePrefix { slots: same, tokens: same_tokens } = self.unchanged;
        self.unchanged = SequencePrefix { slots: same.min(slots), tokens: same_tokens.min(tokens) };
    }

    /// Ends an eviction: `kept` slots are in use, and the first `same` of them did not move.
    pub fn end_eviction(&mut self, kept: usize, same: usize) {
        self.cache.set_len(kept);
        self.unchanged.slots = self.unchanged.slots.min(same);
    }

    /// True if the sequence can continue after its first `tokens` tokens: sliding-window layers still have the rows, and
    /// the recurrent state there is known.
    pub fn can_continue_from(&self, tokens: usize) -> bool {
        self.window.covers_window(tokens) && self.state.holds_state(tokens)
    }

    /// True if the recurrent state is that after the first `tokens` tokens.
    pub fn has_state_of(&self, tokens: usize) -> bool {
        self.state.is_at(tokens)
    }

    /// Numbers of tokens, at most `most`, after which the recurrent state is known, from the largest down.
    pub fn known_states(&self, most: usize) -> impl Iterator<Item = usize> {
        self.state.list_places(most)
    }

    /// Limits the number of checkpoints of the recurrent state.
    pub fn limit_checkpoints(&mut self, most: usize) {
        self.state = StateHistory::new(most);
    }

    /// Saves a checkpoint of the recurrent state.
    pub fn save_checkpoint(&mut self) -> Result<()> {
        self.state.save(&mut *self.cache)
    }

    /// Saves a checkpoint if the last one is some way back.
    pub fn save_checkpoint_if_far(&mut self) -> Result<()> {
        self.state.save_if_far(&mut *self.cache)
    }

    /// Copies of all checkpoints, and of the current state as the last.
    pub fn export_states(&mut self) -> Result<Vec<Checkpoint>> {
        self.state.export_checkpoints(&mut *self.cache)
    }

    /// Replaces the recurrent state by that after the first `tokens` tokens, and the checkpoints by these.
    pub fn import_states(&mut self, states: &[Checkpoint], tokens: usize) {
        self.state.import_checkpoints(&mut *self.cache, states, tokens);
    }

    /// First position whose rows sliding-window layers have.
    pub fn oldest_position(&self) -> usize {
        if SLIDING_LAYERS != 0 { self.window.from } else { 0 }
    }

    /// Records that sliding-window layers now hold the rows of these positions.
    pub fn set_window(&mut self, positions: Range<usize>) {
        self.window = WindowRows { from: positions.start, end: positions.end };
        self.window.extend(positions, self.extent().ring);
    }

    /// Enlarges sliding-window layers for more positions than there are slots.
    pub fn reserve_window_rows(&mut self) -> Result<()> {
        self.outlasts = true;
        self.cache.reserve_window_rows()
    }

    /// Changes the number of slots.
    pub fn resize(&mut self, slots: usize) -> Result<()> {
        self.cache.resize(slots)
    }

    /// Keeps the rows that `other` has not changed since the last switch, and resizes to its size.
    pub(super) fn keep_common(&mut self, other: &DeviceCache) -> Result<()> {
        self.cache.set_len(self.filled_slots().min(other.unchanged.slots));
        self.window.truncate(other.unchanged.tokens);
        if self.extent().slots != other.extent().slots {
            self.resize(other.extent().slots)?;
        }
        if other.outlasts { self.reserve_window_rows() } else { Ok(()) }
    }

    /// Copies missing rows from `other`, for a sequence of `tokens` tokens. Returns the number of slots and bytes
    /// copied.
    pub(super) fn copy_missing_rows(
        &mut self,
        other: &mut DeviceCache,
        tokens: usize,
    ) -> Result<(usize, u64)> {
        self.keep_common(other)?;
        let (len, ring) = (other.filled_slots(), self.extent().ring);
        let (from, there) = (other.window.from, self.window);
        let first = if there.end < from { from } else { there.end };
        let first = first.max(tokens.saturating_sub(ring));
        // If copying fails, the overwritten rows are lost.
        self.window.from = there.from.max(tokens.saturating_sub(ring));
        let slots = self.filled_slots()..len;
        let copied = slots.len();
        let bytes = copy_rows(&mut *other.cache, &mut *self.cache, [slots, first..tokens])?;
        let from = if first > there.end { first } else { there.from };
        self.window = WindowRows { from, end: first };
        self.window.extend(first..tokens, ring);
        if other.mass_is_valid {
            copy_mass(&mut *other.cache, &mut *self.cache)?;
        }
        let states = other.state.export_checkpoints(&mut *other.cache)?;
        self.state.most = other.state.most;
        self.state.import_checkpoints(&mut *self.cache, &states, tokens);
        (self.mass_is_valid, self.observed) = (other.mass_is_valid, other.observed);
        (self.unchanged, other.unchanged) = (SequencePrefix::ALL, SequencePrefix::ALL);
        Ok((copied, bytes))
    }

    /// Allocates the mass, so that no pass has to.
    pub fn allocate_mass(&mut self) -> Result<()> {
        let Some(layer) = full_attention_layers().next() else { return Ok(()) };
        let mut mass = vec![0.0; KV_HEADS * self.filled_slots()];
        self.cache.read_mass(layer, &mut mass)?;
        self.cache.write_mass(layer, &mass)
    }

    /// Observes the last `tokens` tokens of the next passes; their attention is added to the mass.
    pub fn set_observed(&mut self, tokens: usize) {
        self.mass_is_valid |= tokens > 0;
        self.observed = tokens;
    }

    /// Number of observed tokens of a pass.
    pub fn observed_tokens(&self) -> usize {
        self.observed
    }

    /// Clears the mass.
    pub fn zero_mass(&mut self) -> Result<()> {
        self.mass_is_valid = false;
        let zeros = vec![0.0; KV_HEADS * self.filled_slots()];
        full_attention_layers().try_for_each(|layer| self.cache.write_mass(layer, &zeros))
    }

    /// Copies the mass of one full-attention layer out: `[kv_head][slot]`, empty if nothing was observed.
    pub fn read_mass(&mut self, layer: usize, mass: &mut Vec<f32>) -> Result<()> {
        mass.clear();
        if self.mass_is_valid {
            mass.resize(KV_HEADS * self.filled_slots(), 0.0);
            self.cache.read_mass(layer, mass)?;
        }
        Ok(())
    }

    /// Sets the mass of one layer, unless `mass` is empty.
    pub fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        if mass.is_empty() {
            return Ok(());
        }
        self.mass_is_valid = true;
        self.cache.write_mass(layer, mass)
    }

    /// Starts or ends the device's trace.
    pub fn set_trace(&mut self, trace: Option<Trace>) -> Option<Trace> {
        lock_device(&self.device).set_trace(trace)
    }

    /// Adds a mark to the trace, if there is one.
    pub fn mark_trace(&mut self, name: &str) {
        let mut device = lock_device(&self.device);
        if let Some(mut trace) = device.set_trace(None) {
            trace.add_mark(name);
            device.set_trace(Some(trace));
        }
    }
}

/// Copies the rows missing in `to` (`[slots, positions of sliding-window layers]`) and sets its length to that of
/// `from`. Returns the number of bytes copied.
fn copy_rows(from: &mut dyn KvCache, to: &mut dyn KvCache, lacking: [Range<usize>; 2]) -> Result<u64> {
    let Extent { types, len, .. } = from.extent();
    let mut rows = KvRows::zeroed(types, SLOTS, HEAD_DIM);
    let mut bytes = 0;
    for layer in attention_layers() {
        let Range { start, end } = lacking[usize::from(is_sliding(layer))];
        for start in (start..end).step_by(SLOTS) {
            let slots = start..end.min(start + SLOTS);
            from.read_rows(layer, slots.clone(), &mut rows)?;
            to.write_rows(layer, slots, &rows)?;
            bytes += (rows.k.len() + rows.v.len()) as u64;
        }
    }
    to.set_len(len);
    Ok(bytes)
}

/// Copies the mass of all filled slots, of which both have the same number.
fn copy_mass(from: &mut dyn KvCache, to: &mut dyn KvCache) -> Result<()> {
    let mut mass = vec![0.0; KV_HEADS * from.extent().len];
    full_attention_layers().try_for_each(|layer| {
        from.read_mass(layer, &mut mass)?;
        to.write_mass(layer, &mass)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_reach_back_as_far_as_the_ring_does() {
        let mut rows = WindowRows::default();
        rows.extend(0..WINDOW + 90, WINDOW + 100);
        assert!((0..=WINDOW + 90).all(|pos| rows.covers_window(pos)));
        rows.extend(WINDOW + 90..WINDOW + 150, WINDOW + 100);
        if SLIDING_LAYERS != 0 {
            assert_eq!(rows.from, 50);
            assert!(
                !rows.covers_window(WINDOW + 48)
                    && rows.covers_window(WINDOW + 49)
                    && !rows.covers_window(WINDOW + 151)
            );
            let mut cut = rows;
            cut.truncate(WINDOW + 48);
            assert_eq!((cut.from, cut.end), (0, 0), "too few rows are none");
        }
        rows.truncate(WINDOW + 60);
        assert!(rows.covers_window(WINDOW + 60) && rows.end == WINDOW + 60);
        rows.truncate(0);
        assert_eq!((rows.from, rows.end), (0, 0));
    }
}
