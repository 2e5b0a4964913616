//! Reference decoders of the block formats of GGUF files.
//!
//! Kernels and packers are tested against these decoders, and these against checksums of ggml's own results. In every
//! format the products are exact in f32 (a scale of 11 significant bits and integers of at most 13 bits together) and at
//! most one addition rounds, so the result has the same bits in any order of computation. Layouts are those of ggml's
//! `ggml-common.h`; all numbers are little-endian.
//!
//! [`simple`] has the blocks of 32 values with one scale. [`superblock`] has the K-quants: 256 values in eight or
//! sixteen parts, each with a small integer scale that is multiplied with an f16 scale of the block. [`coded`] has the
//! formats of fewer bits, and those whose integers are indices of a table.

pub mod coded;
mod grids;
pub mod simple;
pub mod superblock;

use super::{BlockType, Dtype};

/// Decodes whole blocks from `bytes` to `values`.
///
/// # Panics
///
/// The lengths do not match.
pub fn decode_values(block: BlockType, bytes: &[u8], values: &mut [f32]) {
    let blocks = bytes.len() / block.bytes_per_block();
    assert_eq!(
        (blocks * block.bytes_per_block(), blocks * block.values_per_block()),
        (bytes.len(), values.len()),
        "{block:?}"
    );
    match block {
        BlockType::F32 => Dtype::F32.widen_slice(bytes, values),
        BlockType::F16 => Dtype::F16.widen_slice(bytes, values),
        BlockType::BF16 => Dtype::BF16.widen_slice(bytes, values),
        BlockType::Q4_0 => decode_blocks(bytes, values, simple::q4_0),
        BlockType::Q4_1 => decode_blocks(bytes, values, simple::q4_1),
        BlockType::Q5_0 => decode_blocks(bytes, values, simple::q5_0),
        BlockType::Q5_1 => decode_blocks(bytes, values, simple::q5_1),
        BlockType::Q8_0 => decode_blocks(bytes, values, simple::q8_0),
        BlockType::Q4_K => decode_blocks(bytes, values, superblock::q4_k),
        BlockType::Q5_K => decode_blocks(bytes, values, superblock::q5_k),
        BlockType::Q6_K => decode_blocks(bytes, values, superblock::q6_k),
        coded => coded.get_code().expect("invariant: all other types are coded").decode(coded, bytes, values),
    }
}

fn decode_blocks<const BYTES: usize, const VALUES: usize>(
    bytes: &[u8],
    values: &mut [f32],
    one: impl Fn(&[u8; BYTES]) -> [f32; VALUES],
) {
    for (stored, values) in bytes.as_chunks().0.iter().zip(values.as_chunks_mut().0) {
        *values = one(stored);
    }
}
