//! Eviction in device memory: a kernel (`kernels/compact_kv.cl`) moves the retained rows of a layer to the front, once
//! all heads have stated their slots.

use super::step_launch::Launch;
use crate::dims::KV_HEADS;
use opencl_runtime::buffer::{Access, Buffer, Place};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Maximum bytes of the slot list of a layer.
pub fn slot_list_bytes(slots: usize) -> usize {
    4 * KV_HEADS * slots
}

/// Kernel that moves rows, and its slot list.
pub struct Compactor {
    device: Device,
    launch: Launch,
    /// `[kv_head][kept]`; `None` until the first eviction.
    slots: Option<Buffer>,
}

impl Compactor {
    /// Creates a compactor from the unbound kernel.
    pub fn new(device: &Device, launch: Launch) -> Self {
        Self { device: device.clone(), launch, slots: None }
    }

    /// Queues the compaction of planes of a layer, given with the bytes of a row; all have `all` rows per head.
    pub fn run(&mut self, keep: &PendingCompaction, planes: &[(&Buffer, usize)], all: usize) -> Result<()> {
        if keep.kept == 0 {
            return Ok(());
        }
        if self.slots.as_ref().is_none_or(|slots| slots.len() < slot_list_bytes(all)) {
            self.slots =
                Some(self.device.allocate_buffer(slot_list_bytes(all), Access::ReadWrite, Place::Device)?);
        }
        let slots = self.slots.as_ref().expect("made above");
        let bytes: Vec<u8> = keep.slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        slots.write(0, &bytes)?;
        for (plane, row) in planes {
            let launch = self.launch.rebind_buffer(0, plane)?.rebind_buffer(1, slots)?;
            launch
                .set_ints(&[row / 2, all, keep.kept, 0].map(|n| n as i32))?
                .run(&self.device, [KV_HEADS, 1])?;
            // Do not keep a cache alive after its sequence has ended.
            self.launch.release_buffers(0..1);
        }
        Ok(())
    }
}

/// Slots to keep in a layer.
pub struct PendingCompaction {
    layer: usize,
    kept: usize,
    /// `[kv_head][kept]`; the first slots for heads that have not been set.
    slots: Vec<u32>,
    has_head: [bool; KV_HEADS],
}

impl PendingCompaction {
    /// Creates a list that moves nothing.
    pub fn new(layer: usize, kept: usize) -> Self {
        let slots = (0..KV_HEADS).flat_map(|_| 0..kept as u32).collect();
        Self { layer, kept, slots, has_head: [false; KV_HEADS] }
    }

    /// Layer to compact.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// True if a head's slots can be added.
    pub fn accepts_head(&self, (layer, kv_head): (usize, usize), kept: usize) -> bool {
        (self.layer, self.kept) == (layer, kept) && !self.has_head[kv_head]
    }

    /// Sets the slots to keep for a head.
    pub fn set_head(&mut self, kv_head: usize, slots: &[u32]) {
        self.slots[kv_head * self.kept..][..self.kept].copy_from_slice(slots);
        self.has_head[kv_head] = true;
    }

    /// True if all heads have been set.
    pub fn is_complete(&self) -> bool {
        self.has_head.iter().all(|&told| told)
    }
}
