//! One sequence on the CPU, driven by hand.

use antigravity::dims::{KV_HEADS, LAYERS, attention_layers};
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, KvCache, KvRows, Logits, Run};
use antigravity::model::weights::Weights;
use std::sync::Arc;

pub struct CpuSequence {
    pub device: CpuDevice,
    pub cache: Box<dyn KvCache>,
    /// Number of observed tokens of each pass, the last ones.
    pub observe: usize,
}

impl CpuSequence {
    /// An empty cache of as many slots as the options say.
    pub fn new(weights: Arc<Weights>, options: CpuOptions) -> Self {
        let mut device = CpuDevice::new(weights, options).unwrap();
        let cache = device.new_cache(options.slots).unwrap();
        Self { device, cache, observe: 0 }
    }

    /// From now on, the last `tokens` tokens of each pass are observed.
    pub fn observe(&mut self, tokens: usize) {
        if tokens > 0 {
            let mut mass = vec![0.0; KV_HEADS * self.len()];
            self.cache.read_mass(0, &mut mass).unwrap();
            self.cache.write_mass(0, &mass).unwrap();
        }
        self.observe = tokens;
    }

    pub fn len(&self) -> usize {
        self.cache.extent().len
    }

    /// One pass: the tokens that follow those in the cache.
    pub fn forward(&mut self, tokens: &[u32], logits: Logits<'_>) {
        let pos = self.len();
        self.forward_at(tokens, pos, logits);
    }

    /// [`CpuSequence::forward`] with another RoPE position of the first token.
    pub fn forward_at(&mut self, tokens: &[u32], pos: usize, logits: Logits<'_>) {
        let run = Run { observed_tokens: self.observe, ..Run::new(&mut *self.cache, tokens, pos, logits) };
        self.device.forward(&mut [run], None).unwrap();
    }

    /// The mass of all filled slots: `[layer][kv_head][slot]`.
    pub fn mass(&mut self) -> Vec<f32> {
        let of_layer = KV_HEADS * self.len();
        let mut mass = vec![f32::NAN; LAYERS * of_layer];
        for (layer, mass) in mass.chunks_mut(of_layer).enumerate() {
            self.cache.read_mass(layer, mass).unwrap();
        }
        mass
    }

    /// The rows of all filled slots, by layer.
    pub fn rows(&mut self) -> Vec<KvRows> {
        let slots = 0..self.len();
        let of_layer = |layer| {
            let mut rows = KvRows::default();
            self.cache.read_rows(layer, slots.clone(), &mut rows).unwrap();
            rows
        };
        attention_layers().map(of_layer).collect()
    }
}
