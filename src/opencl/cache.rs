//! KV cache of one sequence: its rows, the attention mass of its slots, and the launches bound to both. With unified
//! memory the CPU can borrow rows and mass until the device needs them again.

use super::by_layer::ByLayer;
use super::compaction::{Compactor, PendingCompaction};
use super::kv::{DeviceKv, MappedLayer, compact_rows};
use super::launches::{AttendOn, CacheLaunches, CacheLayer};
use super::mass::AttentionMass;
use super::nvidia::BoundDecode;
use crate::dims::{HAS_STATE, LAYERS_BEFORE, STATE, STATE_BYTES, is_sliding, state_range};
use crate::model::device::{Extent, HostLayer, HostRows, KvCache, KvRows};
use files::{Error, Result};
use numeric::kv::{check_capacity, check_kept_slots};
use opencl_runtime::buffer::{Access, Buffer, Place, bytes_of, bytes_of_mut};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Result as Outcome};
use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of the states of a sequence: the current ones, and those after the first token of the last run of several.
pub const STATES_BYTES: usize = 2 * STATE_BYTES;

/// A cache in the memory of an OpenCL device.
pub struct OpenClCache {
    device: Device,
    /// Place that computes attention.
    attend: AttendOn,
    /// The rows.
    pub rows: DeviceKv,
    /// The recurrent state, and that after the first token of the last run of several: `[STATE]` each; `None` for
    /// models without.
    pub state: Option<Buffer>,
    len: usize,
    /// Attention mass; `None` until first written.
    pub mass: Option<AttentionMass>,
    /// Launches bound to the cache; `None` until the first pass, and after rows or mass were reallocated.
    pub launches: Option<CacheLaunches>,
    /// Rows and mass while the CPU has borrowed them.
    borrowed: Option<BorrowedRows>,
    /// Moves rows in device memory, if slots may be evicted there.
    compactor: Option<Arc<Mutex<Compactor>>>,
    /// Compaction of a layer, until all heads have stated their slots.
    pending_compaction: Option<PendingCompaction>,
}

/// Rows and mass borrowed by the CPU.
struct BorrowedRows {
    /// By layer.
    rows: ByLayer<MappedLayer>,
    /// By full-attention layer: `[kv_head][slot]`; empty if there is no mass.
    mass: Vec<Vec<f32>>,
    /// The recurrent states.
    states: [Vec<f32>; 2],
}

impl HostRows for BorrowedRows {
    fn layer_rows(&self, layer: usize) -> (&[u8], &[u8]) {
        let (k, v) = &self.rows[layer];
        (k, v)
    }

    fn layer_rows_mut(&mut self, layer: usize) -> HostLayer<'_> {
        let (k, v) = &mut self.rows[layer];
        let mass = self
            .mass
            .get_mut(LAYERS_BEFORE[layer][0])
            .filter(|_| !is_sliding(layer))
            .map(|mass| &mut mass[..]);
        HostLayer { k: k.bytes_mut(), v: v.bytes_mut(), mass }
    }

    fn layer_states_mut(&mut self, layer: usize) -> [&mut [f32]; 2] {
        self.states.each_mut().map(|state| &mut state[state_range(layer)])
    }
}

/// Converts a failure to a lost device: the sequence can continue on another one.
fn to_lost_device(failure: Failure) -> Error {
    Error::Device(failure.to_string())
}

impl OpenClCache {
    /// An empty cache.
    pub fn new(
        device: &Device,
        rows: DeviceKv,
        attend: AttendOn,
        compactor: Option<Arc<Mutex<Compactor>>>,
    ) -> Outcome<Self> {
        let device = device.clone();
        let (len, mass, launches, on_host, keep) = Default::default();
        let state = HAS_STATE.then(|| device.allocate_buffer(STATES_BYTES, Access::ReadWrite, Place::Device));
        let state = state.transpose()?;
        state.iter().try_for_each(|state| state.fill(0..STATE_BYTES, 0))?;
        Ok(Self {
            device,
            attend,
            rows,
            state,
            len,
            mass,
            launches,
            borrowed: on_host,
            compactor,
            pending_compaction: keep,
        })
    }

    /// Downcasts the cache of a run.
    ///
    /// # Panics
    ///
    /// If it belongs to another device.
    pub fn downcast(cache: &mut dyn KvCache) -> &mut Self {
        let cache: &mut dyn Any = cache;
        cache.downcast_mut().expect("an OpenCL device computes with caches of its own")
    }

    /// Filled slots.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Persistent kernel for one token, if the device and this cache support it.
    pub fn bound_decode(&mut self) -> Option<&mut BoundDecode> {
        self.launches.as_mut().and_then(|launches| launches.decode.as_mut())
    }

    /// Launches of one layer.
    ///
    /// # Panics
    ///
    /// If they are not bound yet.
    pub fn layer(&mut self, layer: usize) -> &mut CacheLayer {
        &mut self.launches.as_mut().expect("bound before the pass").layers[layer]
    }

    /// Ends a pass that has filled `new` slots; an observed pass has also given mass to all slots.
    pub fn advance_len(&mut self, new: usize, observed: bool) {
        self.len += new;
        if let Some(mass) = self.mass.as_mut().filter(|_| observed) {
            mass.set_filled(self.len);
        }
    }

    /// Takes rows, mass and state back from the CPU, and queues a pending compaction.
    pub fn take_back(&mut self) -> Result<()> {
        self.run_compaction().map_err(to_lost_device)?;
        let Some(BorrowedRows { rows, mass, states }) = self.borrowed.take() else { return Ok(()) };
        for (i, state) in states.iter().enumerate() {
            let write = |to: &Buffer| to.write(i * STATE_BYTES, bytes_of(state));
            self.state.as_ref().map_or(Ok(()), write).map_err(to_lost_device)?;
        }
        let mut views = rows.into_values().flat_map(|(k, v)| [k, v]);
        views.try_for_each(|view| view.unmap()).map_err(to_lost_device)?;
        match &mut self.mass {
            Some(sums) => sums.write_all(&mass, self.len).map_err(to_lost_device),
            None => Ok(()),
        }
    }

    /// Queues the pending compaction of a layer.
    fn run_compaction(&mut self) -> Outcome<()> {
        let (Some(keep), Some(compactor)) = (self.pending_compaction.take(), &self.compactor) else {
            return Ok(());
        };
        let layer = keep.layer();
        let rows = self.rows.layer(layer).expect("invariant: the device has what it moves");
        let mut planes =
            vec![(&rows.k, self.rows.plane_row_bytes(0)), (&rows.v, self.rows.plane_row_bytes(1))];
        let mass = self.mass.as_ref().and_then(|mass| mass.on_device());
        planes.extend(mass.map(|layers| (&layers[LAYERS_BEFORE[layer][0]], 4)));
        let mut compactor = compactor.lock().unwrap_or_else(PoisonError::into_inner);
        compactor.run(&keep, &planes, self.rows.slots())
    }
}

impl KvCache for OpenClCache {
    fn extent(&self) -> Extent {
        let (types, slots) = (self.rows.types(), self.rows.slots());
        Extent { types, slots, ring: self.rows.ring().rows_per_head(slots), len: self.len }
    }

    fn read_state(&mut self, state: &mut [f32]) -> files::Result<()> {
        self.take_back()?;
        Ok(self.state.iter().try_for_each(|from| from.read(0, bytes_of_mut(state)))?)
    }

    fn write_state(&mut self, state: &[f32]) -> files::Result<()> {
        self.take_back()?;
        Ok(self.state.iter().try_for_each(|to| to.write(0, bytes_of(state)))?)
    }

    fn restore_first_state(&mut self) -> files::Result<()> {
        self.take_back()?;
        let first = STATE_BYTES..STATES_BYTES;
        Ok(self.state.iter().try_for_each(|state| state.copy_to(first.clone(), state, 0))?)
    }

    fn set_len(&mut self, len: usize) {
        let slots = self.rows.slots();
        assert!(len <= slots);
        let before = std::mem::replace(&mut self.len, len);
        if len == 0 {
            match (&mut self.borrowed, &self.state) {
                // The device gets it when the CPU gives it back.
                (Some(borrowed), _) => borrowed.states[0].fill(0.0),
                // A device that fails here is lost in the next pass.
                (None, Some(state)) => _ = state.fill(0..STATE_BYTES, 0),
                (None, None) => {}
            }
        }
        if let Some(mass) = &mut self.mass {
            mass.set_filled(mass.filled().min(before.min(len)));
        }
        // The CPU adds to existing values.
        for layer in self.borrowed.iter_mut().flat_map(|host| &mut host.mass) {
            layer.chunks_exact_mut(slots.max(1)).for_each(|head| head[before.min(len)..len].fill(0.0));
        }
    }

    fn resize(&mut self, slots: usize) -> Result<()> {
        check_capacity(slots, self.len)?;
        self.take_back()?;
        let (device, len) = (&self.device, self.len);
        let mass = self.mass.as_mut().map(|m| m.copy_resized(device, slots, len)).transpose()?;
        self.rows = self.rows.copy_resized(device, (slots, self.rows.ring()), len)?;
        (self.mass, self.launches) = (mass, None);
        Ok(())
    }

    fn reserve_window_rows(&mut self) -> Result<()> {
        let (slots, ring) = (self.rows.slots(), self.rows.ring().with_whole_window());
        if ring != self.rows.ring() {
            self.take_back()?;
            self.rows = self.rows.copy_resized(&self.device, (slots, ring), self.len)?;
            self.launches = None;
        }
        Ok(())
    }

    fn retain_slots(&mut self, layer: usize, kv_head: usize, slots: &[u32]) -> Result<()> {
        check_kept_slots(slots, self.len)?;
        assert!(!is_sliding(layer), "nothing is evicted from sliding-window layers");
        let (len, all, rows) =
            (self.len, self.rows.slots(), [self.rows.plane_row_bytes(0), self.rows.plane_row_bytes(1)]);
        if let Some(BorrowedRows { rows: views, mass, .. }) = &mut self.borrowed {
            let (k, v) = &mut views[layer];
            for (view, row) in [k, v].into_iter().zip(rows) {
                compact_rows(&mut view.bytes_mut()[kv_head * all * row..], slots, row);
            }
            if let Some(mass) = mass.get_mut(LAYERS_BEFORE[layer][0]) {
                compact_rows(bytes_of_mut(&mut mass[kv_head * all..]), slots, 4);
            }
            return Ok(());
        }
        if self.rows.compact_host_rows(layer, kv_head, slots) {
            let mass = self.mass.as_mut();
            return Ok(mass.map_or(Ok(()), |mass| mass.compact_mass((layer, kv_head), slots, len))?);
        }
        assert!(self.compactor.is_some(), "invariant: a device that is to evict has a kernel for it");
        if self
            .pending_compaction
            .as_ref()
            .is_some_and(|keep| !keep.accepts_head((layer, kv_head), slots.len()))
        {
            self.run_compaction()?;
        }
        // Slots without mass get 0 before the mass moves.
        self.mass.iter_mut().try_for_each(|mass| mass.fill_up(len))?;
        let keep = self.pending_compaction.get_or_insert_with(|| PendingCompaction::new(layer, slots.len()));
        keep.set_head(kv_head, slots);
        if keep.is_complete() { Ok(self.run_compaction()?) } else { Ok(()) }
    }

    fn read_rows(&mut self, layer: usize, slots: Range<usize>, rows: &mut KvRows) -> Result<()> {
        self.take_back()?;
        Ok(self.rows.read(layer, slots, rows)?)
    }

    fn write_rows(&mut self, layer: usize, slots: Range<usize>, rows: &KvRows) -> Result<()> {
        self.take_back()?;
        Ok(self.rows.write(layer, slots, rows)?)
    }

    fn read_mass(&mut self, layer: usize, mass: &mut [f32]) -> Result<()> {
        self.take_back()?;
        match &mut self.mass {
            Some(sums) => sums.read(layer, self.len, mass)?,
            None => mass.fill(0.0),
        }
        Ok(())
    }

    fn write_mass(&mut self, layer: usize, mass: &[f32]) -> Result<()> {
        self.take_back()?;
        if self.mass.is_none() {
            self.launches = None;
            self.mass = Some(AttentionMass::new(&self.device, self.rows.slots(), self.attend)?);
        }
        let sums = self.mass.as_mut().expect("made above");
        Ok(sums.write(layer, self.len, mass)?)
    }

    fn host_rows(&mut self) -> Result<&mut dyn HostRows> {
        if self.borrowed.is_none() {
            self.run_compaction().map_err(to_lost_device)?;
            let (rows, len) = (self.rows.map_layers().map_err(to_lost_device)?, self.len);
            let mass =
                self.mass.as_mut().map(|mass| mass.read_all(len)).transpose().map_err(to_lost_device)?;
            let mut states = [vec![0.0; STATE], vec![0.0; STATE]];
            for (i, state) in states.iter_mut().enumerate() {
                let read = |from: &Buffer| from.read(i * STATE_BYTES, bytes_of_mut(state));
                self.state.as_ref().map_or(Ok(()), read).map_err(to_lost_device)?;
            }
            self.borrowed = Some(BorrowedRows { rows, mass: mass.unwrap_or_default(), states });
        }
        Ok(self.borrowed.as_mut().expect("made above"))
    }
}
