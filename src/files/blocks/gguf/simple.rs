//! GGUF blocks of 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! The first four store four bits of each value alike: value `z` in the low nibble of byte `z`, value `z + 16` in the
//! high one. The second digit of a name is 0 if values are `q * d`, 1 if they are `q * d + m`.

use crate::blocks::{BLOCK, BlockQ4, read_f16};
use std::array::from_fn;

/// Q4_0, 18 bytes: `d` f16, `qs[16]`. Value: `(nibble - 8) * d`.
pub fn q4_0(block: &[u8; 18]) -> [f32; BLOCK] {
    BlockQ4::from_bytes(block).decode()
}

/// Q4_1, 20 bytes: `d` f16, `m` f16, `qs[16]`. Value: `nibble * d + m`.
pub fn q4_1(block: &[u8; 20]) -> [f32; BLOCK] {
    let (d, m) = (read_f16(block, 0), read_f16(block, 2));
    from_fn(|z| f32::from(nibble(&block[4..], z)) * d + m)
}

/// Q5_0, 22 bytes: `d` f16, `qh` u32, `qs[16]`. Value: `(nibble + 16 * bit - 16) * d`, where `bit` is bit `z` of `qh`.
pub fn q5_0(block: &[u8; 22]) -> [f32; BLOCK] {
    let d = read_f16(block, 0);
    from_fn(|z| f32::from(read_5_bits(&block[2..], z) as i8 - 16) * d)
}

/// Q5_1, 24 bytes: `d` f16, `m` f16, `qh` u32, `qs[16]`. Value: `(nibble + 16 * bit) * d + m`.
pub fn q5_1(block: &[u8; 24]) -> [f32; BLOCK] {
    let (d, m) = (read_f16(block, 0), read_f16(block, 2));
    from_fn(|z| f32::from(read_5_bits(&block[4..], z)) * d + m)
}

/// Q8_0, 34 bytes: `d` f16, `qs[32]` i8. Value: `q * d`.
pub fn q8_0(block: &[u8; 34]) -> [f32; BLOCK] {
    let d = read_f16(block, 0);
    from_fn(|z| f32::from(block[2 + z] as i8) * d)
}

/// Reads four-bit integer `z` of `qs`.
fn nibble(qs: &[u8], z: usize) -> u8 {
    if z < 16 { qs[z] & 15 } else { qs[z - 16] >> 4 }
}

/// Reads five-bit integer `z`; `qh` with the fifth bits is stored before `qs`.
fn read_5_bits(qh_qs: &[u8], z: usize) -> u8 {
    let bit = qh_qs[z / 8] >> (z % 8) & 1;
    nibble(&qh_qs[4..], z) | bit << 4
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// A block of these f16s and bytes.
    fn block<const N: usize>(scales: &[f32], rest: &[u8]) -> [u8; N] {
        let mut bytes: Vec<u8> = scales.iter().flat_map(|&s| f16::from_f32(s).to_le_bytes()).collect();
        bytes.extend(rest);
        bytes.try_into().unwrap()
    }

    /// Low nibbles 0 to 15, high ones 15 to 0.
    fn ramp() -> [u8; 16] {
        from_fn(|z| z as u8 | (15 - z as u8) << 4)
    }

    #[test]
    fn values_lie_where_the_format_says() {
        // What the ramp holds, value by value.
        let low: [f32; BLOCK] = from_fn(|z| if z < 16 { z as f32 } else { 31.0 - z as f32 });
        assert_eq!(q4_0(&block(&[-0.5], &ramp())), low.map(|q| (q - 8.0) * -0.5));
        assert_eq!(q4_1(&block(&[0.25, -3.0], &ramp())), low.map(|q| q * 0.25 - 3.0));
        // The fifth bits of values 0, 9, 16 and 31.
        let high = [1, 2, 1, 128];
        let five: [f32; BLOCK] = from_fn(|z| low[z] + if [0, 9, 16, 31].contains(&z) { 16.0 } else { 0.0 });
        let rest = [&high[..], &ramp()].concat();
        assert_eq!(q5_0(&block(&[2.0], &rest)), five.map(|q| (q - 16.0) * 2.0));
        assert_eq!(q5_1(&block(&[2.0, 0.5], &rest)), five.map(|q| q * 2.0 + 0.5));
        let bytes: [u8; 32] = from_fn(|z| (z as u8).wrapping_mul(17));
        assert_eq!(q8_0(&block(&[0.125], &bytes)), bytes.map(|q| f32::from(q as i8) * 0.125));
    }

    #[test]
    fn products_are_exact_and_a_sum_rounds_once() {
        let scales = [65504.0, 0.333, -1.7, 6e-8, 0.001, -31.99, 1.0];
        for d in scales {
            for m in scales {
                // Exact in f64, so that rounding it is the right answer.
                let (wide_d, wide_m) = (f16::from_f32(d).to_f64(), f16::from_f32(m).to_f64());
                let right = |q: usize| (q as f64 * wide_d + wide_m) as f32;
                let rest = [&[0, 0, 255, 255][..], &ramp().map(|byte| byte & 15 | byte << 4)].concat();
                let five: [f32; BLOCK] = from_fn(right);
                assert_eq!(q5_1(&block(&[d, m], &rest)), five, "{d} {m}");
                assert_eq!(q4_1(&block(&[d, m], &rest[4..])), from_fn(|z| right(z % 16)), "{d} {m}");
            }
        }
    }
}
