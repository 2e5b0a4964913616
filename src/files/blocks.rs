//! Block formats: reference encoders and decoders, against which every kernel is tested.
//!
//! Q4_0 stores 32 weights as one f16 scale and 32 four-bit integers. [`mod@gguf`] decodes all supported GGUF formats.

mod block_type;
mod dtype;
pub mod gguf;

pub use block_type::BlockType;
pub use dtype::Dtype;

use half::f16;

/// Values in one quantisation block.
pub const BLOCK: usize = 32;

/// One Q4_0 block: `value = (nibble - 8) * d`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockQ4 {
    /// Scale.
    pub d: f16,
    /// Element `z` in the low nibble of byte `z`, element `z + 16` in the high one.
    pub qs: [u8; 16],
}

impl BlockQ4 {
    /// Bytes of a block in the interchange format: `d` then `qs`.
    pub const BYTES: usize = 18;

    /// Reads a block from its stored bytes.
    #[inline(always)]
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let [low, high, qs @ ..] = *bytes;
        Self { d: f16::from_le_bytes([low, high]), qs }
    }

    /// Quantises 32 values: `d = max|v| / 7`, `q = round(v / d)` half away from zero, in `[-8, 7]`.
    ///
    /// Rounding uses the f32 scale; the stored scale is rounded to f16. A NaN among the values makes the scale NaN, an
    /// infinity makes it infinite.
    #[inline(always)]
    pub fn quantise(v: &[f32; BLOCK]) -> Self {
        // Integer comparison vectorises, and non-negative floats have the order of their bits.
        let max = v.iter().fold(0, |m: u32, x| m.max(x.to_bits() & 0x7fff_ffff));
        let d = f32::from_bits(max) / 7.0;
        let id = if d == 0.0 { 0.0 } else { 1.0 / d };
        let mut q = [0u8; BLOCK];
        for (q, &v) in q.iter_mut().zip(v) {
            *q = (round_half_away((v * id).clamp(-8.0, 7.0)) + 8) as u8;
        }
        let mut qs = [0u8; 16];
        for z in 0..16 {
            qs[z] = q[z] | (q[z + 16] << 4);
        }
        Self { d: f16::from_f32(d), qs }
    }

    /// Decodes the 32 values.
    pub fn decode(&self) -> [f32; BLOCK] {
        let d = self.d.to_f32();
        std::array::from_fn(|i| (self.nibble_at(i) as i32 - 8) as f32 * d)
    }

    /// The stored integer (0..=15) of element `i`.
    pub fn nibble_at(&self, i: usize) -> u8 {
        if i < 16 { self.qs[i] & 15 } else { self.qs[i - 16] >> 4 }
    }
}

/// Computes `f32::round` for |x| <= 8 with arithmetic that the compiler can vectorise. NaN gives 0.
#[inline(always)]
fn round_half_away(x: f32) -> i32 {
    // `as` saturates and maps NaN to 0; the difference below is exact.
    let whole = x as i32;
    let rest = x - whole as f32;
    whole + (rest >= 0.5) as i32 - (rest <= -0.5) as i32
}

/// Reads the f16 at byte `at`, widened exactly.
fn read_f16(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> Vec<u8> {
        let path = crate::project().join("tests/fixtures/q4_0").join(name);
        std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    #[test]
    fn quantiser_matches_every_vector_bit_for_bit() {
        let input = floats(&fixture("input.f32"));
        let expected = fixture("blocks.q4_0");
        let blocks = input.as_chunks::<BLOCK>().0;
        assert_eq!(blocks.len() * BlockQ4::BYTES, expected.len());
        for (i, (v, want)) in blocks.iter().zip(expected.chunks(BlockQ4::BYTES)).enumerate() {
            let b = BlockQ4::quantise(v);
            assert_eq!(b.d.to_le_bytes(), want[..2], "scale of block {i}");
            assert_eq!(b.qs, want[2..], "quants of block {i}");
        }
    }

    #[test]
    fn rounding_is_f32_round_on_the_clamped_range() {
        for i in -90_000..=90_000 {
            let x = i as f32 / 10_000.0;
            for x in [x, x.next_up(), x.next_down()] {
                let x = x.clamp(-8.0, 7.0);
                assert_eq!(round_half_away(x), x.round() as i32, "{x}");
            }
        }
        assert_eq!(round_half_away(f32::NAN), 0);
    }
}
