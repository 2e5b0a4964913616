//! Whole GGUF files of the baked model: the tensors of its checkpoint, encoded and ordered as a converter would.

use super::encoder::encode;
use super::writer::{F32, Parts, STRING, U32, info, pair, text};
use antigravity::dims::*;
use files::blocks::BlockType;
use files::config::RopeScaling;
use files::source::Safetensors;
use files::source::gguf::names::{ROPE_FREQS, RowOrder, to_gguf_name};
use std::fs;
use std::path::Path;

/// A tensor as it shall stand in the file.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub block: BlockType,
    /// `[rows, cols]` or `[len]`
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A model as it shall stand in a file.
#[derive(Clone)]
pub struct File {
    pub pairs: Vec<Vec<u8>>,
    pub tensors: Vec<Tensor>,
}

impl File {
    /// The tensors of a checkpoint: vectors in F32, matrices in the type that `choose` gives by the checkpoint's name.
    pub fn of(checkpoint: &Safetensors, choose: impl Fn(&str) -> BlockType) -> Self {
        let mut tensors: Vec<Tensor> = checkpoint.tensors().map(|t| converted(t, &choose)).collect();
        if ROPE.scaling != RopeScaling::Unscaled {
            let divisor =
                |i: usize| (1.0 / ROPE.scaling.frequency_multiplier(i, ROPE.base_frequency(i))) as f32;
            let bytes = (0..HEAD_DIM / 2).flat_map(|i| divisor(i).to_le_bytes()).collect();
            let (name, shape) = (ROPE_FREQS.to_string(), vec![HEAD_DIM / 2]);
            tensors.push(Tensor { name, block: BlockType::F32, shape, bytes });
        }
        let arch = ARCH.name();
        let number = |key: &str, n: usize| pair(&format!("{arch}.{key}"), U32, (n as u32).to_le_bytes());
        let float = |key: &str, x: f64| pair(&format!("{arch}.{key}"), F32, (x as f32).to_le_bytes());
        let pairs = vec![
            pair("general.architecture", STRING, text(arch)),
            number("block_count", LAYERS),
            number("embedding_length", DIM),
            number("feed_forward_length", FFN_DIM),
            number("attention.head_count", HEADS),
            number("attention.head_count_kv", KV_HEADS),
            number("attention.key_length", HEAD_DIM),
            number("attention.value_length", HEAD_DIM),
            number("context_length", MAX_POSITION),
            float("attention.layer_norm_rms_epsilon", NORM_EPS),
            float("rope.freq_base", ROPE.theta),
        ];
        Self { pairs, tensors }
    }

    /// The tensor that the file calls `name`.
    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no tensor {name}"))
    }

    pub fn write(&self, path: &Path) {
        let (mut parts, mut offset) = (Parts::default(), 0);
        for pair in &self.pairs {
            parts = parts.pair(pair.clone());
        }
        for t in &self.tensors {
            let dims: Vec<u64> = t.shape.iter().rev().map(|n| *n as u64).collect();
            parts = parts.info(info(&t.name, &dims, t.block.id(), offset));
            offset += t.bytes.len().next_multiple_of(32) as u64;
        }
        let mut bytes = parts.bytes();
        for t in &self.tensors {
            bytes.extend(&t.bytes);
            bytes.resize(bytes.len().next_multiple_of(32), 0);
        }
        fs::write(path, bytes).unwrap();
    }
}

fn converted(t: &files::source::Tensor, choose: &impl Fn(&str) -> BlockType) -> Tensor {
    let values = t.dtype.to_f32(t.data.bytes());
    let (rows, cols, block) = match t.shape[..] {
        [rows, cols] => (rows, cols, choose(&t.name)),
        _ => (values.len(), 1, BlockType::F32),
    };
    let order = RowOrder::for_tensor(ARCH, &t.name, HEAD_DIM);
    let mut placed = vec![&[][..]; rows];
    for (row, values) in values.chunks_exact(cols).enumerate() {
        placed[order.file_row(row)] = values;
    }
    let bytes = placed.iter().flat_map(|row| encode(block, row)).collect();
    Tensor { name: to_gguf_name(ARCH, &t.name).unwrap(), block, shape: t.shape.clone(), bytes }
}
