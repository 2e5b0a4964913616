//! Attention mass of slots, summed where attention is computed: on the device, or on the host.

use super::kv::compact_rows;
use super::launches::AttendOn;
use crate::dims::*;
use crate::model::device;
use opencl_runtime::buffer::{Access, Buffer, Place, StridedPieces, bytes_of, bytes_of_mut};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use std::ops::Range;

/// Mass of all slots, by full-attention layer of the device: `[kv_head][slot]`.
enum MassStorage {
    Device(Vec<Buffer>),
    Host(Vec<Vec<f32>>),
}

/// Attention mass of the slots of a cache.
pub struct AttentionMass {
    sums: MassStorage,
    /// The layers that the device computes.
    layers: Range<usize>,
    /// Slots per head.
    slots: usize,
    /// Number of leading slots with valid mass; the values of the others are undefined.
    filled: usize,
}

impl AttentionMass {
    /// Allocates mass without valid slots.
    pub fn new(device: &Device, layers: Range<usize>, slots: usize, attend: AttendOn) -> Result<Self> {
        let count = cache_layers(&layers)[0];
        let buffer = || device.allocate_buffer(4 * KV_HEADS * slots, Access::ReadWrite, Place::Device);
        let sums = match attend {
            AttendOn::Host => MassStorage::Host(vec![vec![0.0; KV_HEADS * slots]; count]),
            AttendOn::Device => MassStorage::Device((0..count).map(|_| buffer()).collect::<Result<_>>()?),
        };
        Ok(Self { sums, layers, slots, filled: 0 })
    }

    /// Copies the mass of `len` filled slots to a new object with another number of slots.
    pub fn copy_resized(&mut self, device: &Device, slots: usize, len: usize) -> Result<Self> {
        let attend = match self.sums {
            MassStorage::Host(_) => AttendOn::Host,
            MassStorage::Device(_) => AttendOn::Device,
        };
        let mut grown = Self::new(device, self.layers.clone(), slots, attend)?;
        let mut mass = vec![0.0; KV_HEADS * len];
        for layer in self.layers.clone().filter(|&layer| has_mass(layer)) {
            self.read(layer, len, &mut mass)?;
            grown.write(layer, len, &mass)?;
        }
        Ok(grown)
    }

    /// Number of the device's full-attention layers before this one.
    fn index(&self, layer: usize) -> usize {
        cache_layers(&(self.layers.start..layer))[0]
    }

    /// Buffer of a full-attention layer, if the device computes the mass.
    pub fn on_device(&self, layer: usize) -> Option<&Buffer> {
        match &self.sums {
            MassStorage::Device(layers) => layers.get(self.index(layer)),
            MassStorage::Host(_) => None,
        }
    }

    /// Number of slots with valid mass.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Sets the number of slots with valid mass, after an observed pass or a rewind.
    pub fn set_filled(&mut self, slots: usize) {
        self.filled = slots;
    }

    /// Mass for attention on the host over `slots` slots, new ones included, of a run whose last `tokens` are observed.
    pub fn for_host(
        &mut self,
        layer: usize,
        slots: usize,
        tokens: usize,
    ) -> Option<device::AttentionMass<'_>> {
        let (filled, all, index) = (self.filled, self.slots, self.index(layer));
        match &mut self.sums {
            MassStorage::Host(layers) if tokens > 0 && !is_sliding(layer) => {
                let sums = &mut layers[index][..];
                sums.chunks_exact_mut(all).for_each(|head| head[filled..slots].fill(0.0));
                Some(device::AttentionMass { sums, tokens })
            }
            _ => None,
        }
    }

    /// Moves the mass of `slots`, out of `len` filled ones, to slots `0..`.
    pub fn compact_mass(
        &mut self,
        (layer, kv_head): (usize, usize),
        slots: &[u32],
        len: usize,
    ) -> Result<()> {
        self.fill_up(len)?;
        let (mut mass, layer) = (vec![0.0; len], self.index(layer));
        let start = kv_head * self.slots;
        self.get(layer, start, &mut mass)?;
        compact_rows(bytes_of_mut(&mut mass), slots, 4);
        self.put(layer, start, &mass[..slots.len()])
    }

    /// Reads the mass of `len` filled slots: `[kv_head][slot]`.
    pub fn read(&mut self, layer: usize, len: usize, mass: &mut [f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * len);
        self.fill_up(len)?;
        if let MassStorage::Device(layers) = &self.sums {
            return layers[self.index(layer)].read_pieces(self.head_pieces(len), bytes_of_mut(mass));
        }
        let mut heads = mass.chunks_exact_mut(len.max(1)).enumerate();
        heads.try_for_each(|(head, mass)| self.get(self.index(layer), head * self.slots, mass))
    }

    /// First `len` slots of all heads in a layer.
    fn head_pieces(&self, len: usize) -> StridedPieces {
        StridedPieces { start: 0, len: 4 * len, count: KV_HEADS, pitch: 4 * self.slots }
    }

    /// Writes the mass of `len` filled slots.
    pub fn write(&mut self, layer: usize, len: usize, mass: &[f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * len);
        self.fill_up(len)?;
        if let MassStorage::Device(layers) = &self.sums {
            return layers[self.index(layer)].write_pieces(self.head_pieces(len), bytes_of(mass));
        }
        let (slots, layer) = (self.slots, self.index(layer));
        let mut heads = mass.chunks_exact(len.max(1)).enumerate();
        heads.try_for_each(|(head, mass)| self.put(layer, head * slots, mass))
    }

    /// Reads all mass, so that the CPU can add to it: by full-attention layer, `[kv_head][slot]`.
    pub fn read_all(&mut self, len: usize) -> Result<Vec<Vec<f32>>> {
        self.fill_up(len)?;
        let mut layers = vec![vec![0.0; KV_HEADS * self.slots]; cache_layers(&self.layers)[0]];
        layers.iter_mut().enumerate().try_for_each(|(layer, mass)| self.get(layer, 0, mass))?;
        Ok(layers)
    }

    /// Writes back the mass from [`AttentionMass::read_all`], with `len` filled slots.
    pub fn write_all(&mut self, layers: &[Vec<f32>], len: usize) -> Result<()> {
        self.filled = len;
        layers.iter().enumerate().try_for_each(|(layer, mass)| self.put(layer, 0, mass))
    }

    /// Sets the mass of slots before `len` to 0 where it is not valid yet.
    pub fn fill_up(&mut self, len: usize) -> Result<()> {
        if self.filled < len {
            let layers = 0..cache_layers(&self.layers)[0];
            for (layer, head) in layers.flat_map(|l| (0..KV_HEADS).map(move |h| (l, h))) {
                let (first, end) = (head * self.slots + self.filled, head * self.slots + len);
                match &mut self.sums {
                    MassStorage::Device(layers) => layers[layer].fill(4 * first..4 * end, 0)?,
                    MassStorage::Host(layers) => layers[layer][first..end].fill(0.0),
                }
            }
            self.filled = len;
        }
        Ok(())
    }

    /// Reads mass from `start` on; `layer` counts the device's full-attention layers only.
    fn get(&self, layer: usize, start: usize, mass: &mut [f32]) -> Result<()> {
        match &self.sums {
            MassStorage::Device(layers) => layers[layer].read(4 * start, bytes_of_mut(mass)),
            MassStorage::Host(layers) => {
                mass.copy_from_slice(&layers[layer][start..][..mass.len()]);
                Ok(())
            }
        }
    }

    fn put(&mut self, layer: usize, start: usize, mass: &[f32]) -> Result<()> {
        match &mut self.sums {
            MassStorage::Device(layers) => layers[layer].write(4 * start, bytes_of(mass)),
            MassStorage::Host(layers) => {
                layers[layer][start..][..mass.len()].copy_from_slice(mass);
                Ok(())
            }
        }
    }
}
