//! GGUF blocks of 256 values, the K-quants: Q4_K, Q5_K, Q6_K.
//!
//! Q4_K and Q5_K have eight parts of 32 values. Part `p` has a scale and a minimum of six bits, packed into twelve
//! bytes by [`unpack_scale_min`]; the values of parts `2c` and `2c + 1` lie in the low and high nibbles of bytes
//! `32c .. 32c + 32`. Q6_K has sixteen parts of 16 values with a signed scale of eight bits each.

use crate::blocks::read_f16;
use std::array::from_fn;

/// Values in one block.
pub const VALUES: usize = 256;

/// Q4_K, 144 bytes: `d` f16, `dmin` f16, `scales[12]`, `qs[128]`. Value: `d * scale[p] * nibble - dmin * min[p]`.
pub fn q4_k(block: &[u8; 144]) -> [f32; VALUES] {
    let (levels, mins) = decode_scales(block);
    from_fn(|i| levels[i / 32] * f32::from(nibble(&block[16..], i)) - mins[i / 32])
}

/// Q5_K, 176 bytes: `d` f16, `dmin` f16, `scales[12]`, `qh[32]`, `qs[128]`. As Q4_K with a fifth bit: for value `i`,
/// bit `i / 32` of `qh[i % 32]`.
pub fn q5_k(block: &[u8; 176]) -> [f32; VALUES] {
    let (levels, mins) = decode_scales(block);
    from_fn(|i| {
        let bit = block[16 + i % 32] >> (i / 32) & 1;
        let q = nibble(&block[48..], i) | bit << 4;
        levels[i / 32] * f32::from(q) - mins[i / 32]
    })
}

/// Q6_K, 210 bytes: `ql[128]`, `qh[64]`, `scales[16]` i8, `d` f16. Value: `d * scale[i / 16] * (q - 32)`.
///
/// Each half of 128 values has 64 bytes of `ql` and 32 of `qh`. In a half, value `i` has its low four bits in byte
/// `i % 64` of `ql` (low nibbles first: values 0 to 63) and its high two in byte `i % 32` of `qh`, from bit
/// `2 * (i / 32)` on.
pub fn q6_k(block: &[u8; 210]) -> [f32; VALUES] {
    let d = read_f16(block, 208);
    let levels: [f32; 16] = from_fn(|p| d * f32::from(block[192 + p] as i8));
    from_fn(|i| {
        let (half, i_in) = (i / 128, i % 128);
        let low = block[64 * half + i_in % 64] >> (i_in / 64 * 4) & 15;
        let high = block[128 + 32 * half + i_in % 32] >> (i_in / 32 * 2) & 3;
        levels[i / 16] * f32::from((low | high << 4) as i8 - 32)
    })
}

/// Decodes each part's factor of `q` and the minimum subtracted from the product; both are exact in f32.
fn decode_scales(block: &[u8]) -> ([f32; 8], [f32; 8]) {
    let (d, dmin) = (read_f16(block, 0), read_f16(block, 2));
    let scales = from_fn(|z| block[4 + z]);
    let six = from_fn::<_, 8, _>(|p| unpack_scale_min(&scales, p));
    (six.map(|(level, _)| d * f32::from(level)), six.map(|(_, min)| dmin * f32::from(min)))
}

/// Reads the scale and minimum of part `p`. In the first four parts, they are the low six bits of bytes `p` and
/// `p + 4`. In the others, their low four bits are in byte `p + 4` (scale low, minimum high), and their high two bits
/// are the high bits of bytes `p - 4` and `p`.
pub fn unpack_scale_min(scales: &[u8; 12], p: usize) -> (u8, u8) {
    if p < 4 {
        return (scales[p] & 63, scales[p + 4] & 63);
    }
    let (low, level, min) = (scales[p + 4], scales[p - 4] >> 6, scales[p] >> 6);
    (low & 15 | level << 4, low >> 4 | min << 4)
}

/// Reads four-bit integer `i` of a Q4_K or Q5_K block.
fn nibble(qs: &[u8], i: usize) -> u8 {
    qs[i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn six_bit_scales_use_every_bit_once() {
        let mut seen = [0u8; 8 * 12];
        for bit in 0..96 {
            let mut scales = [0u8; 12];
            scales[bit / 8] = 1 << (bit % 8);
            let found: Vec<(usize, u8, u8)> = (0..8)
                .map(|p| (p, unpack_scale_min(&scales, p).0, unpack_scale_min(&scales, p).1))
                .filter(|&(_, level, min)| level | min != 0)
                .collect();
            let &[(p, level, min)] = &found[..] else { panic!("bit {bit}: {found:?}") };
            assert!(level.count_ones() + min.count_ones() == 1 && level.max(min) < 64, "bit {bit}");
            let place = if level != 0 { level.trailing_zeros() } else { 6 + min.trailing_zeros() };
            seen[p * 12 + place as usize] += 1;
        }
        assert_eq!(seen, [1; 96]);
    }

    /// The only value that differs from the others when one stored bit is set.
    fn changed<const N: usize>(
        decode: fn(&[u8; N]) -> [f32; VALUES],
        base: [u8; N],
        bit: usize,
    ) -> (usize, f32) {
        let mut block = base;
        block[bit / 8] ^= 1 << (bit % 8);
        let (before, after) = (decode(&base), decode(&block));
        let differing: Vec<usize> = (0..VALUES).filter(|&i| before[i] != after[i]).collect();
        assert_eq!(differing.len(), 1, "bit {bit} changes {differing:?}");
        (differing[0], after[differing[0]] - before[differing[0]])
    }

    #[test]
    fn every_stored_bit_is_one_bit_of_one_value() {
        // Scales of 1 everywhere: d = 1, six-bit scales 1, minima 0.
        let scales = [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1];
        let mut q4 = [0; 144];
        let mut q5 = [0; 176];
        (q4[1], q5[1]) = (0x3c, 0x3c);
        q4[4..16].copy_from_slice(&scales);
        q5[4..16].copy_from_slice(&scales);
        let mut q6 = [0; 210];
        q6[192..208].fill(1);
        q6[209] = 0x3c;
        let mut sums = [[0.0; VALUES]; 3];
        let mut put = |format: usize, (i, by): (usize, f32)| sums[format][i] += by;
        (16 * 8..144 * 8).for_each(|bit| put(0, changed(q4_k, q4, bit)));
        (16 * 8..176 * 8).for_each(|bit| put(1, changed(q5_k, q5, bit)));
        (0..192 * 8).for_each(|bit| put(2, changed(q6_k, q6, bit)));
        assert_eq!(sums, [[15.0; VALUES], [31.0; VALUES], [63.0; VALUES]]);
    }
}
