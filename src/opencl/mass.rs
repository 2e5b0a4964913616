//! The attention that slots receive, summed where attention is computed: on the device, or on the host.

use super::floats;
use super::kernels::Kernels;
use super::model::Model;
use super::rows::Rows;
use super::scratch::Scratch;
use super::steps::{AttendOn, Launches, ObservedBuffers};
use crate::dims::*;
use crate::model::backend;
use opencl_runtime::buffer::{Access, Buffer, Place};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Mass of all slots, by layer: `[kv_head][capacity]`.
enum Sums {
    Device {
        layers: Vec<Buffer>,
        /// Largest scores and softmax sums of many tokens: `[token][HEADS][2]`
        softmax: Buffer,
    },
    Host(Vec<Vec<f32>>),
}

/// Mass of all slots, and what is to be added to it.
pub struct Mass {
    sums: Sums,
    capacity: usize,
    /// Last tokens of a pass that are observed.
    tokens: usize,
    /// Slots that have a mass: the first so many. Those that follow have none, whatever stands there.
    there: usize,
}

impl Mass {
    /// No mass yet, for rows and scratch of these sizes.
    pub fn new(device: &Device, (capacity, max_tokens): (usize, usize), attend: AttendOn) -> Result<Self> {
        let buffer = |len: usize| device.buffer(len, Access::ReadWrite, Place::Device);
        let sums = match attend {
            AttendOn::Host => Sums::Host(vec![vec![0.0; KV_HEADS * capacity]; LAYERS]),
            AttendOn::Device => Sums::Device {
                layers: (0..LAYERS).map(|_| buffer(4 * KV_HEADS * capacity)).collect::<Result<_>>()?,
                softmax: buffer(4 * 2 * HEADS * max_tokens)?,
            },
        };
        Ok(Self { sums, capacity, tokens: 0, there: 0 })
    }

    /// The same for another capacity and `len` filled slots.
    pub fn resized(
        &mut self,
        device: &Device,
        (capacity, max_tokens): (usize, usize),
        len: usize,
    ) -> Result<Self> {
        let attend = match self.sums {
            Sums::Host(_) => AttendOn::Host,
            Sums::Device { .. } => AttendOn::Device,
        };
        let mut grown = Self { tokens: self.tokens, ..Self::new(device, (capacity, max_tokens), attend)? };
        let mut mass = vec![0.0; KV_HEADS * len];
        for layer in 0..LAYERS {
            self.read(layer, len, &mut mass)?;
            grown.write(layer, len, &mass)?;
        }
        Ok(grown)
    }

    /// Has the device's attention observed, if attention is the device's.
    pub fn bind(
        &self,
        launches: &mut Launches,
        kernels: &mut Kernels,
        model: &Model,
        (scratch, rows): (&Scratch, &Rows),
    ) -> Result<()> {
        match &self.sums {
            Sums::Host(_) => Ok(()),
            Sums::Device { layers, softmax } => {
                let buffers = ObservedBuffers { softmax, mass: layers };
                launches.observe(kernels, &model.matrices, (scratch, rows), buffers)
            }
        }
    }

    /// From now on so many tokens of each pass are observed.
    pub fn set_tokens(&mut self, tokens: usize) {
        self.tokens = tokens;
    }

    /// How many of the `n` tokens of a pass are.
    pub fn observed(&self, n: usize) -> usize {
        self.tokens.min(n)
    }

    /// Slots that have a mass.
    pub fn there(&self) -> usize {
        self.there
    }

    /// After a pass, or a rewind, of which these slots have a mass.
    pub fn set_there(&mut self, slots: usize) {
        self.there = slots;
    }

    /// For attention on the host over `slots` slots, new ones included, of a pass of `n` tokens.
    pub fn on_host(&mut self, layer: usize, slots: usize, n: usize) -> Option<backend::Mass<'_>> {
        let (tokens, there, capacity) = (self.observed(n), self.there, self.capacity);
        match &mut self.sums {
            Sums::Host(layers) if tokens > 0 => {
                let sums = &mut layers[layer][..];
                sums.chunks_exact_mut(capacity).for_each(|head| head[there..slots].fill(0.0));
                Some(backend::Mass { sums, tokens })
            }
            _ => None,
        }
    }

    /// Moves the mass of `slots` of `len` filled ones to slots `0..`.
    pub fn keep(&mut self, (layer, kv_head): (usize, usize), slots: &[u32], len: usize) -> Result<()> {
        self.fill_up(len)?;
        let mut mass = vec![0.0; len];
        let start = kv_head * self.capacity;
        self.get(layer, start, &mut mass)?;
        for (to, &from) in slots.iter().enumerate() {
            mass[to] = mass[from as usize];
        }
        self.put(layer, start, &mass[..slots.len()])
    }

    /// Copies the mass of `len` filled slots out: `[kv_head][slot]`.
    pub fn read(&mut self, layer: usize, len: usize, mass: &mut [f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * len);
        self.fill_up(len)?;
        let mut heads = mass.chunks_exact_mut(len.max(1)).enumerate();
        heads.try_for_each(|(head, mass)| self.get(layer, head * self.capacity, mass))
    }

    /// Replaces it.
    pub fn write(&mut self, layer: usize, len: usize, mass: &[f32]) -> Result<()> {
        assert_eq!(mass.len(), KV_HEADS * len);
        self.fill_up(len)?;
        let capacity = self.capacity;
        let mut heads = mass.chunks_exact(len.max(1)).enumerate();
        heads.try_for_each(|(head, mass)| self.put(layer, head * capacity, mass))
    }

    /// Makes the first `len` slots have a mass.
    fn fill_up(&mut self, len: usize) -> Result<()> {
        if self.there < len {
            let zeros = vec![0.0; len - self.there];
            for layer in 0..LAYERS {
                (0..KV_HEADS).try_for_each(|head| {
                    let start = head * self.capacity + self.there;
                    self.put(layer, start, &zeros)
                })?;
            }
            self.there = len;
        }
        Ok(())
    }

    fn get(&self, layer: usize, start: usize, mass: &mut [f32]) -> Result<()> {
        match &self.sums {
            Sums::Device { layers, .. } => layers[layer].read(4 * start, floats::bytes_mut(mass)),
            Sums::Host(layers) => {
                mass.copy_from_slice(&layers[layer][start..][..mass.len()]);
                Ok(())
            }
        }
    }

    fn put(&mut self, layer: usize, start: usize, mass: &[f32]) -> Result<()> {
        match &mut self.sums {
            Sums::Device { layers, .. } => layers[layer].write(4 * start, floats::bytes(mass)),
            Sums::Host(layers) => {
                layers[layer][start..][..mass.len()].copy_from_slice(mass);
                Ok(())
            }
        }
    }
}
