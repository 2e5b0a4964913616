//! The attention that slots receive, summed where attention is computed: on the device, or on the host.

use super::kv::gather;
use super::launches::AttendOn;
use crate::dims::*;
use crate::model::device;
use opencl_runtime::buffer::{Access, Buffer, Pieces, Place, bytes_of, bytes_of_mut};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Mass of all slots, by layer that sees all: `[kv_head][slot]`.
enum Sums {
    Device(Vec<Buffer>),
    Host(Vec<Vec<f32>>),
}

/// Mass of all slots of a cache.
pub struct Mass {
    sums: Sums,
    /// Slots of a head.
    slots: usize,
    /// The first slots have a mass: this many. The bytes of the others mean nothing.
    filled: usize,
}

impl Mass {
    /// No mass yet.
    pub fn new(device: &Device, slots: usize, attend: AttendOn) -> Result<Self> {
        let buffer = || device.buffer(4 * KV_HEADS * slots, Access::ReadWrite, Place::Device);
        let sums = match attend {
            AttendOn::Host => Sums::Host(vec![vec![0.0; KV_HEADS * slots]; GLOBAL_LAYERS]),
            AttendOn::Device => Sums::Device((0..GLOBAL_LAYERS).map(|_| buffer()).collect::<Result<_>>()?),
        };
        Ok(Self { sums, slots, filled: 0 })
    }

    /// The same for another number of slots, `len` of which are filled.
    pub fn resized(&mut self, device: &Device, slots: usize, len: usize) -> Result<Self> {
        let attend = match self.sums {
            Sums::Host(_) => AttendOn::Host,
            Sums::Device(_) => AttendOn::Device,
        };
        let mut grown = Self::new(device, slots, attend)?;
        let mut mass = vec![0.0; KV_HEADS * len];
        for layer in global_layers() {
            self.read(layer, len, &mut mass)?;
            grown.write(layer, len, &mass)?;
        }
        Ok(grown)
    }

    /// By layer that sees all, where the device sums.
    pub fn on_device(&self) -> Option<&[Buffer]> {
        match &self.sums {
            Sums::Device(layers) => Some(layers),
            Sums::Host(_) => None,
        }
    }

    /// Slots that have a mass.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// After an observed pass, or a rewind, the first `slots` slots have a mass.
    pub fn set_filled(&mut self, slots: usize) {
        self.filled = slots;
    }

    /// For attention on the host over `slots` slots, new ones included, of a run whose last `tokens` are observed.
    pub fn for_host(&mut self, layer: usize, slots: usize, tokens: usize) -> Option<device::Mass<'_>> {
        let (filled, all) = (self.filled, self.slots);
        match &mut self.sums {
            Sums::Host(layers) if tokens > 0 && !is_local(layer) => {
                let sums = &mut layers[BEFORE[layer][0]][..];
                sums.chunks_exact_mut(all).for_each(|head| head[filled..slots].fill(0.0));
                Some(device::Mass { sums, tokens })
            }
            _ => None,
        }
    }

    /// Moves the mass of `slots` of `len` filled ones to slots `0..`.
    pub fn keep(&mut self, (layer, kv_head): (usize, usize), slots: &[u32], len: usize) -> Result<()> {
        self.fill_up(len)?;
        let (mut mass, layer) = (vec![0.0; len], BEFORE[layer][0]);
        let start = kv_head * self.slots;
        self.get(layer, start, &mut mass)?;
        gather(bytes_of_mut(&mut mass), slots, 4);
        self.put(layer, start, &mass[..slots.len()])
    }

    /// Copies the mass of `len` filled slots out: `[kv_head][slot]`.
    pub fn read(&mut self, layer: usize, len: usize, mass: &mut [f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * len);
        self.fill_up(len)?;
        if let Sums::Device(layers) = &self.sums {
            return layers[BEFORE[layer][0]].read_pieces(self.of_heads(len), bytes_of_mut(mass));
        }
        let mut heads = mass.chunks_exact_mut(len.max(1)).enumerate();
        heads.try_for_each(|(head, mass)| self.get(BEFORE[layer][0], head * self.slots, mass))
    }

    /// The first `len` slots of all heads of a layer.
    fn of_heads(&self, len: usize) -> Pieces {
        Pieces { start: 0, len: 4 * len, count: KV_HEADS, pitch: 4 * self.slots }
    }

    /// Replaces the mass of filled slots.
    pub fn write(&mut self, layer: usize, len: usize, mass: &[f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * len);
        self.fill_up(len)?;
        if let Sums::Device(layers) = &self.sums {
            return layers[BEFORE[layer][0]].write_pieces(self.of_heads(len), bytes_of(mass));
        }
        let slots = self.slots;
        let mut heads = mass.chunks_exact(len.max(1)).enumerate();
        heads.try_for_each(|(head, mass)| self.put(BEFORE[layer][0], head * slots, mass))
    }

    /// All of it, for the CPU to add to: by layer that sees all `[kv_head][slot]`.
    pub fn lend(&mut self, len: usize) -> Result<Vec<Vec<f32>>> {
        self.fill_up(len)?;
        let mut layers = vec![vec![0.0; KV_HEADS * self.slots]; GLOBAL_LAYERS];
        layers.iter_mut().enumerate().try_for_each(|(layer, mass)| self.get(layer, 0, mass))?;
        Ok(layers)
    }

    /// Takes it back with `len` filled slots.
    pub fn take_back(&mut self, layers: &[Vec<f32>], len: usize) -> Result<()> {
        self.filled = len;
        layers.iter().enumerate().try_for_each(|(layer, mass)| self.put(layer, 0, mass))
    }

    /// Makes the first `len` slots have a mass.
    pub fn fill_up(&mut self, len: usize) -> Result<()> {
        if self.filled < len {
            for (layer, head) in (0..GLOBAL_LAYERS).flat_map(|l| (0..KV_HEADS).map(move |h| (l, h))) {
                let (first, end) = (head * self.slots + self.filled, head * self.slots + len);
                match &mut self.sums {
                    Sums::Device(layers) => layers[layer].fill(4 * first..4 * end, 0)?,
                    Sums::Host(layers) => layers[layer][first..end].fill(0.0),
                }
            }
            self.filled = len;
        }
        Ok(())
    }

    /// Of the layer of this number among those that see all.
    fn get(&self, layer: usize, start: usize, mass: &mut [f32]) -> Result<()> {
        match &self.sums {
            Sums::Device(layers) => layers[layer].read(4 * start, bytes_of_mut(mass)),
            Sums::Host(layers) => {
                mass.copy_from_slice(&layers[layer][start..][..mass.len()]);
                Ok(())
            }
        }
    }

    fn put(&mut self, layer: usize, start: usize, mass: &[f32]) -> Result<()> {
        match &mut self.sums {
            Sums::Device(layers) => layers[layer].write(4 * start, bytes_of(mass)),
            Sums::Host(layers) => {
                layers[layer][start..][..mass.len()].copy_from_slice(mass);
                Ok(())
            }
        }
    }
}
