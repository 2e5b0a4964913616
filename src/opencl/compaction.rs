//! Evictions in the device's memory: rows that stay of a layer move to the front by a kernel (`kernels/keep.cl`), once all
//! heads have said which.

use super::step_launch::Launch;
use crate::dims::KV_HEADS;
use opencl_runtime::buffer::{Access, Buffer, Place};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Bytes of the slots that stay of a layer's heads, at most.
pub fn list_bytes(slots: usize) -> usize {
    4 * KV_HEADS * slots
}

/// The kernel that moves rows, and the slots that it is told.
pub struct Compactor {
    device: Device,
    launch: Launch,
    /// `[kv_head][kept]`; `None` until the first eviction.
    slots: Option<Buffer>,
}

impl Compactor {
    /// With the kernel, to which nothing is bound.
    pub fn new(device: &Device, launch: Launch) -> Self {
        Self { device: device.clone(), launch, slots: None }
    }

    /// Queues the move in planes of a layer, each with the bytes of a row, all of `all` rows a head.
    pub fn run(&mut self, keep: &Keep, planes: &[(&Buffer, usize)], all: usize) -> Result<()> {
        if keep.kept == 0 {
            return Ok(());
        }
        if self.slots.as_ref().is_none_or(|slots| slots.len() < list_bytes(all)) {
            self.slots = Some(self.device.buffer(list_bytes(all), Access::ReadWrite, Place::Device)?);
        }
        let slots = self.slots.as_ref().expect("made above");
        let bytes: Vec<u8> = keep.slots.iter().flat_map(|slot| slot.to_le_bytes()).collect();
        slots.write(0, &bytes)?;
        for (plane, row) in planes {
            let launch = self.launch.again(0, plane)?.again(1, slots)?;
            launch.with(&[row / 2, all, keep.kept, 0].map(|n| n as i32))?.run(&self.device, [KV_HEADS, 1])?;
            // A cache goes when its sequence does.
            self.launch.let_go(0..1);
        }
        Ok(())
    }
}

/// What stays of a layer.
pub struct Keep {
    layer: usize,
    kept: usize,
    /// `[kv_head][kept]`; the first ones of a head that has not said.
    slots: Vec<u32>,
    told: [bool; KV_HEADS],
}

impl Keep {
    /// Nothing moves yet.
    pub fn new(layer: usize, kept: usize) -> Self {
        let slots = (0..KV_HEADS).flat_map(|_| 0..kept as u32).collect();
        Self { layer, kept, slots, told: [false; KV_HEADS] }
    }

    /// Its layer.
    pub fn layer(&self) -> usize {
        self.layer
    }

    /// Whether a head's slots can join.
    pub fn takes(&self, (layer, kv_head): (usize, usize), kept: usize) -> bool {
        (self.layer, self.kept) == (layer, kept) && !self.told[kv_head]
    }

    /// A head keeps these.
    pub fn tell(&mut self, kv_head: usize, slots: &[u32]) {
        self.slots[kv_head * self.kept..][..self.kept].copy_from_slice(slots);
        self.told[kv_head] = true;
    }

    /// Whether all heads have said what they keep.
    pub fn is_complete(&self) -> bool {
        self.told.iter().all(|&told| told)
    }
}
