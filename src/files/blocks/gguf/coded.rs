//! GGUF blocks whose integers are codes of a few bits for levels, small integers: the formats of one to four bits with
//! tables, grids or a scale for each sixteen values.
//!
//! A value is `d * factor * scale * level`, in Q2_K minus `dmin * min`. `d` and `dmin` are f16 of the block, the scale
//! belongs to sixteen values, and `level` is that of the value's [`Code`]. A block is read in parts of 32 values, which
//! are what the packed layout of `numeric` holds.

use super::grids::{self, Grid};
use super::superblock::VALUES;
use crate::blocks::{BLOCK, BlockType};
use half::f16;
use std::array::from_fn;

/// Codes of 32 values: byte `k` of word `v` is that of value `4v + k`. Reading them one by one takes about five times
/// as long.
pub type Words = [u32; BLOCK / 4];

/// A part of a block.
pub struct Part {
    pub codes: Words,
    /// Scale of each sixteen values, as [`ScaleCode`] has it.
    pub scales: [u8; 2],
}

/// The meaning of a byte of [`Part::scales`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleCode {
    /// None: the scale is 1.
    One,
    /// A signed integer.
    Signed,
    /// The low nibble is the scale, the high one the minimum.
    WithMinimum,
    /// A power of two: E8M0, whose lowest is 2^-127.
    Exponent,
    /// UE4M3 divided by 256: the byte without sign, shifted left by 7, is this f16.
    Minifloat,
}

impl ScaleCode {
    /// The scale of a byte, and its minimum.
    pub fn decode(self, byte: u8) -> (f32, f32) {
        match self {
            ScaleCode::One => (1.0, 0.0),
            ScaleCode::Signed => (f32::from(byte as i8), 0.0),
            ScaleCode::WithMinimum => (f32::from(byte & 15), f32::from(byte >> 4)),
            ScaleCode::Exponent => (f32::from_bits((u32::from(byte) << 23).max(1 << 22)), 0.0),
            ScaleCode::Minifloat => (f16::from_bits(u16::from(byte) << 7).to_f32(), 0.0),
        }
    }
}

/// Coding of the values of a block type.
#[derive(Clone, Copy)]
pub struct Code {
    /// Levels of codes.
    pub levels: [i8; 16],
    pub factor: f32,
    pub scale: ScaleCode,
    /// Reads `d` and `dmin` of a block, 1 and 0 if it has none.
    pub read_halves: ReadHalves,
    /// Reads a part of a block by its index.
    pub read_part: ReadPart,
}

type ReadHalves = fn(&[u8]) -> [f16; 2];
type ReadPart = fn(&[u8], usize) -> Part;

/// Levels of consecutive codes, from `first` on, `step` apart.
const fn linear_levels(first: i8, step: i8) -> [i8; 16] {
    let (mut levels, mut i) = ([0; 16], 0);
    while i < 16 {
        levels[i] = first + step * i as i8;
        i += 1;
    }
    levels
}

/// `kvalues_iq4nl` of ggml.
pub const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of E2M1.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Magnitudes of three digits, then, with the sign in bit 2, their negatives.
const IQ2: [i8; 16] = [8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// Magnitudes of eight digits, then their negatives.
const IQ3_XXS: [i8; 16] = [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];
const IQ3_S: [i8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];
/// Eight times the digits less one, each shifted down and up by an eighth.
const IQ1: [i8; 16] = [-9, -7, -1, 1, 7, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

impl BlockType {
    /// Coding of the type's values; `None` for types that are not coded.
    pub const fn get_code(self) -> Option<Code> {
        use ScaleCode::*;
        let (levels, factor, scale, read_halves, read_part): (
            [i8; 16],
            f32,
            ScaleCode,
            ReadHalves,
            ReadPart,
        ) = match self {
            BlockType::Q1_0 => (linear_levels(-1, 2), 1.0, One, |b| d_at(b, 0), q1_0),
            BlockType::Q2_0 => (linear_levels(-1, 1), 1.0, One, |b| d_at(b, 0), q2_0),
            BlockType::TQ1_0 => (linear_levels(-1, 1), 1.0, One, |b| d_at(b, 52), tq1_0),
            BlockType::TQ2_0 => (linear_levels(-1, 1), 1.0, One, |b| d_at(b, 64), tq2_0),
            BlockType::Q2_K => {
                (linear_levels(0, 1), 1.0, WithMinimum, |b| [read_half(b, 80), read_half(b, 82)], q2_k)
            }
            BlockType::Q3_K => (linear_levels(-4, 1), 1.0, Signed, |b| d_at(b, 108), q3_k),
            BlockType::IQ1_S => (IQ1, 0.125, Signed, |b| d_at(b, 0), iq1_s),
            BlockType::IQ1_M => (IQ1, 0.125, Signed, iq1_m_halves, iq1_m),
            BlockType::IQ2_XXS => (IQ2, 0.125, Signed, |b| d_at(b, 0), iq2_xxs),
            BlockType::IQ2_XS => (IQ2, 0.125, Signed, |b| d_at(b, 0), iq2_xs),
            BlockType::IQ2_S => (IQ2, 0.125, Signed, |b| d_at(b, 0), iq2_s),
            BlockType::IQ3_XXS => (IQ3_XXS, 0.25, Signed, |b| d_at(b, 0), iq3_xxs),
            BlockType::IQ3_S => (IQ3_S, 1.0, Signed, |b| d_at(b, 0), iq3_s),
            BlockType::IQ4_NL => (IQ4, 1.0, One, |b| d_at(b, 0), iq4_nl),
            BlockType::IQ4_XS => (IQ4, 1.0, Signed, |b| d_at(b, 0), iq4_xs),
            BlockType::MXFP4 => (E2M1, 0.5, Exponent, |_| [f16::ONE, f16::ZERO], mxfp4_part),
            BlockType::NVFP4 => (E2M1, 128.0, Minifloat, |_| [f16::ONE, f16::ZERO], nvfp4_part),
            _ => return None,
        };
        Some(Code { levels, factor, scale, read_halves, read_part })
    }
}

impl Code {
    /// Decodes whole blocks. All products are exact in f32, so their order is of no importance.
    pub fn decode(&self, block: BlockType, bytes: &[u8], values: &mut [f32]) {
        let of_block = values.chunks_exact_mut(block.values_per_block());
        for (bytes, values) in bytes.chunks_exact(block.bytes_per_block()).zip(of_block) {
            let [d, dmin] = (self.read_halves)(bytes).map(f16::to_f32);
            for (p, values) in values.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
                let part = (self.read_part)(bytes, p);
                let scales = part.scales.map(|byte| self.scale.decode(byte));
                let codes = part.codes.map(u32::to_le_bytes);
                for (i, (value, code)) in values.iter_mut().zip(codes.as_flattened()).enumerate() {
                    let (scale, minimum) = scales[i / 16];
                    *value = d * self.factor * scale * f32::from(self.levels[usize::from(*code)]);
                    if self.scale == ScaleCode::WithMinimum {
                        *value -= dmin * minimum;
                    }
                }
            }
        }
    }
}

fn read_half(block: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([block[at], block[at + 1]])
}

fn d_at(block: &[u8], at: usize) -> [f16; 2] {
    [read_half(block, at), f16::ZERO]
}

fn read_u16(block: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes([block[at], block[at + 1]]))
}

fn read_u32(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(from_fn(|i| block[at + i]))
}

/// Extracts the `N` bits from bit `shift` on of each of the first 32 bytes.
#[inline(always)]
pub fn extract_bits<const N: usize>(bytes: &[u8], shift: usize) -> Words {
    let words = bytes[..BLOCK].as_chunks().0;
    from_fn(|v| u32::from_le_bytes(words[v]) >> shift & (0x0101_0101 * ((1 << N) - 1)))
}

/// Puts the bits of `high` above the `N` bits of `low`.
#[inline(always)]
pub fn join_bits<const N: usize>(low: Words, high: Words) -> Words {
    from_fn(|v| low[v] | high[v] << N)
}

/// Computes the codes of 32 values one by one.
#[inline(always)]
fn compute_codes(code: impl Fn(usize) -> u8) -> Words {
    from_fn(|v| u32::from_le_bytes(from_fn(|k| code(4 * v + k))))
}

/// Reads runs of `2 * N` values, `N` in the low nibbles of as many bytes and `N` in the high ones.
fn read_nibbles<const N: usize>(qs: &[u8]) -> Words {
    compute_codes(|i| qs[i / (2 * N) * N + i % N] >> (i / N % 2 * 4) & 15)
}

/// Reads eight digits of two bits from a grid for each eight values, four of three bits for each four. Bit `i` of
/// `signs` is the sign of value `i`, above the digit's bits.
#[inline(always)]
fn on_grid<const N: usize, const PER_POINT: usize>(
    grid: &Grid<N>,
    index: impl Fn(usize) -> usize,
    signs: u32,
) -> Words {
    let bits = if PER_POINT == 8 { 2 } else { 3 };
    let points: [u16; 8] = from_fn(|g| if g < BLOCK / PER_POINT { grid[index(g)] } else { 0 });
    compute_codes(|i| {
        let digit = points[i / PER_POINT] >> (bits * (i % PER_POINT)) & ((1 << bits) - 1);
        digit as u8 | ((signs >> i & 1) << bits) as u8
    })
}

/// The signs of eight values from seven bits: an even number of values is negative.
fn even_sign(seven: usize) -> u32 {
    let seven = seven as u32 & 127;
    seven | (seven.count_ones() & 1) << 7
}

/// The signs of 32 values from four times seven bits.
fn even_signs(bits: u32) -> u32 {
    (0..4).fold(0, |all, l| all | even_sign((bits >> (7 * l)) as usize) << (8 * l))
}

/// Q1_0, 18 bytes for 128 values: `d` f16, `qs[16]` with the bits of values in ascending order.
fn q1_0(block: &[u8], p: usize) -> Part {
    Part { codes: compute_codes(|i| block[2 + 4 * p + i / 8] >> (i % 8) & 1), scales: [0; 2] }
}

/// Q2_0, 18 bytes for 64 values: `d` f16, `qs[16]` with two bits of each value in ascending order.
fn q2_0(block: &[u8], p: usize) -> Part {
    Part { codes: compute_codes(|i| block[2 + 8 * p + i / 4] >> (i % 4 * 2) & 3), scales: [0; 2] }
}

/// TQ1_0, 54 bytes: `qs[48]`, `qh[4]`, `d` f16. Bytes are fractions of 256 with five ternary digits, in `qh` four: the
/// first digits of 32 bytes, then their second ones, and so on; then those of 16 and of 4 bytes.
fn tq1_0(block: &[u8], p: usize) -> Part {
    let codes = compute_codes(|i| {
        let (byte, digit) = match 32 * p + i {
            i @ 0..160 => (i % 32, i / 32),
            i @ 160..240 => (32 + i % 16, (i - 160) / 16),
            i => (48 + i % 4, (i - 240) / 4),
        };
        let fraction = block[byte].wrapping_mul([1, 3, 9, 27, 81][digit]);
        ((u16::from(fraction) * 3) >> 8) as u8
    });
    Part { codes, scales: [0; 2] }
}

/// TQ2_0, 66 bytes: `qs[64]`, `d` f16. Two bits of each value, placed as in [`q2_k`].
fn tq2_0(block: &[u8], p: usize) -> Part {
    Part { codes: extract_bits::<2>(&block[p / 4 * 32..], p % 4 * 2), scales: [0; 2] }
}

/// Q2_K, 84 bytes: `scales[16]`, `qs[64]`, `d` f16, `dmin` f16. Part `p` has bits `2 * (p % 4)` and the next of the
/// first or second 32 bytes of `qs`.
fn q2_k(block: &[u8], p: usize) -> Part {
    let codes = extract_bits::<2>(&block[16 + p / 4 * 32..], p % 4 * 2);
    Part { codes, scales: [block[2 * p], block[2 * p + 1]] }
}

/// Q3_K, 110 bytes: `hmask[32]`, `qs[64]`, `scales[12]`, `d` f16. Low bits as in [`q2_k`], the third in bit `p` of
/// `hmask`. Of the sixteen scales of six bits, 32 too large, the low four bits are in the nibbles of the first eight
/// bytes, the high two in those that follow.
fn q3_k(block: &[u8], p: usize) -> Part {
    let low = extract_bits::<2>(&block[32 + p / 4 * 32..], p % 4 * 2);
    let packed = &block[96..108];
    let scale = |s: usize| {
        let (low, high) = (packed[s % 8] >> (s / 8 * 4) & 15, packed[8 + s % 4] >> (s / 4 * 2) & 3);
        (low | high << 4).wrapping_sub(32)
    };
    Part { codes: join_bits::<2>(low, extract_bits::<1>(block, p)), scales: [scale(2 * p), scale(2 * p + 1)] }
}

/// IQ1_S, 50 bytes: `d` f16, `qs[32]`, `qh[8]` u16. A word of `qh` has the high three bits of four indices, three bits
/// of the scale, and the direction in which the part's values are shifted.
fn iq1_s(block: &[u8], p: usize) -> Part {
    let high = read_u16(block, 34 + 2 * p);
    let index = |l: usize| usize::from(block[2 + 4 * p + l]) | (high >> (3 * l) & 7) << 8;
    let codes = on_grid::<2048, 8>(&grids::IQ1, index, 0);
    let up = if high >> 15 == 0 { 0x0101_0101 } else { 0 };
    Part { codes: codes.map(|digits| 2 * digits + up), scales: [odd_scale(high >> 12 & 7); 2] }
}

/// IQ1_M, 56 bytes: `qs[32]`, `qh[16]`, `scales[4]` u16. A nibble of `qh` has the high three bits of an index and the
/// direction in which its values are shifted. A word of `scales` has four scales of three bits and a nibble of `d`.
fn iq1_m(block: &[u8], p: usize) -> Part {
    let high = |l: usize| usize::from(block[32 + 2 * p + l / 2] >> (l % 2 * 4));
    let index = |l: usize| usize::from(block[4 * p + l]) | (high(l) & 7) << 8;
    let digits = on_grid::<2048, 8>(&grids::IQ1, index, 0);
    let up = |l: usize| if high(l) & 8 == 0 { 0x0101_0101 } else { 0 };
    let packed = read_u16(block, 48 + p / 2 * 2) >> (p % 2 * 6);
    Part {
        codes: from_fn(|v| 2 * digits[v] + up(v / 2)),
        scales: [odd_scale(packed & 7), odd_scale(packed >> 3 & 7)],
    }
}

fn iq1_m_halves(block: &[u8]) -> [f16; 2] {
    let nibble = |i: usize| block[49 + 2 * i] >> 4;
    [f16::from_le_bytes([nibble(0) | nibble(1) << 4, nibble(2) | nibble(3) << 4]), f16::ZERO]
}

/// The odd number after `2 * n`: scales of grids are stored so.
fn odd_scale(n: usize) -> u8 {
    (2 * n + 1) as u8
}

/// IQ2_XXS, 66 bytes: `d` f16, then for each part four indices of a byte each, and a word with four times seven signs
/// and the scale.
fn iq2_xxs(block: &[u8], p: usize) -> Part {
    let (at, word) = (2 + 8 * p, read_u32(block, 6 + 8 * p));
    let codes = on_grid::<256, 8>(&grids::IQ2_XXS, |l| block[at + l].into(), even_signs(word));
    Part { codes, scales: [odd_scale((word >> 28) as usize); 2] }
}

/// IQ2_XS, 74 bytes: `d` f16, `qs[32]` u16, `scales[8]`. A word of `qs` has an index of nine bits and seven signs.
fn iq2_xs(block: &[u8], p: usize) -> Part {
    let word = |l: usize| read_u16(block, 2 + 8 * p + 2 * l);
    let signs = (0..4).fold(0, |all, l| all | even_sign(word(l) >> 9) << (8 * l));
    let codes = on_grid::<512, 8>(&grids::IQ2_XS, |l| word(l) & 511, signs);
    Part { codes, scales: two_scales(block[66 + p]) }
}

/// IQ2_S, 82 bytes: `d` f16, `qs[32]`, `signs[32]`, `qh[8]` with the high two bits of four indices, `scales[8]`.
fn iq2_s(block: &[u8], p: usize) -> Part {
    let index = |l: usize| usize::from(block[2 + 4 * p + l]) | usize::from(block[66 + p] >> (2 * l) & 3) << 8;
    let codes = on_grid::<1024, 8>(&grids::IQ2_S, index, read_u32(block, 34 + 4 * p));
    Part { codes, scales: two_scales(block[74 + p]) }
}

fn two_scales(byte: u8) -> [u8; 2] {
    [odd_scale((byte & 15).into()), odd_scale((byte >> 4).into())]
}

/// IQ3_XXS, 98 bytes: `d` f16, `qs[64]`, then for each part a word as in [`iq2_xxs`].
fn iq3_xxs(block: &[u8], p: usize) -> Part {
    let (at, word) = (2 + 8 * p, read_u32(block, 66 + 4 * p));
    let codes = on_grid::<256, 4>(&grids::IQ3_XXS, |g| block[at + g].into(), even_signs(word));
    Part { codes, scales: [odd_scale((word >> 28) as usize); 2] }
}

/// IQ3_S, 110 bytes: `d` f16, `qs[64]`, `qh[8]` with the ninth bits of eight indices, `signs[32]`, `scales[4]`.
fn iq3_s(block: &[u8], p: usize) -> Part {
    let index = |g: usize| usize::from(block[2 + 8 * p + g]) | usize::from(block[66 + p] >> g & 1) << 8;
    let codes = on_grid::<512, 4>(&grids::IQ3_S, index, read_u32(block, 74 + 4 * p));
    Part { codes, scales: [two_scales(block[106 + p / 2])[p % 2]; 2] }
}

/// IQ4_NL, 18 bytes for 32 values: `d` f16, `qs[16]`.
fn iq4_nl(block: &[u8], _: usize) -> Part {
    Part { codes: read_nibbles::<16>(&block[2..]), scales: [0; 2] }
}

/// IQ4_XS, 136 bytes: `d` f16, `scales_h` u16, `scales_l[4]`, `qs[128]`. Scales of six bits, 32 too large.
fn iq4_xs(block: &[u8], p: usize) -> Part {
    let high = (read_u16(block, 2) >> (2 * p) & 3) as u8;
    let scale = (block[4 + p / 2] >> (p % 2 * 4) & 15 | high << 4).wrapping_sub(32);
    Part { codes: read_nibbles::<16>(&block[8 + 16 * p..]), scales: [scale; 2] }
}

/// MXFP4, 17 bytes for 32 values: the exponent of the scale, `qs[16]`.
fn mxfp4_part(block: &[u8], _: usize) -> Part {
    Part { codes: read_nibbles::<16>(&block[1..]), scales: [block[0]; 2] }
}

/// NVFP4, 36 bytes for 64 values: `d[4]`, `qs[32]`. As in ggml, the sign of a scale is ignored and 0x7f is zero.
fn nvfp4_part(block: &[u8], p: usize) -> Part {
    let scale = |s: usize| if block[s] == 0x7f { 0 } else { block[s] & 0x7f };
    Part { codes: read_nibbles::<8>(&block[4 + 16 * p..]), scales: [scale(2 * p), scale(2 * p + 1)] }
}

const _: () = assert!(VALUES == 8 * BLOCK);
