//! Quantised activations, the input of the integer kernels: blocks of 32 signed bytes with an f32 scale.

use files::blocks::BLOCK;

/// A block of 32 activations: `value = q * d`.
///
/// `offset` is `-8 * sum(q)`. It turns the dot product of stored, unsigned nibbles into the signed one:
/// `sum((w - 8) * q) = sum(w * q) + offset`.
#[repr(C, align(8))]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActBlock {
    /// Scale, `max|x| / 127`.
    pub d: f32,
    /// `-8 * sum(q)`.
    pub offset: i32,
    /// Values in `[-127, 127]`.
    pub q: [i8; BLOCK],
}

impl ActBlock {
    /// A block of zeros.
    pub const ZERO: Self = Self { d: 0.0, offset: 0, q: [0; BLOCK] };

    /// Quantises 32 values (the reference): `q = round_ties_even(x * (127 / max|x|))`, or zeros if all are zero.
    pub fn quantise(x: &[f32; BLOCK]) -> Self {
        let max = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let (d, id) = if max == 0.0 { (0.0, 0.0) } else { (max / 127.0, 127.0 / max) };
        let q: [i8; BLOCK] = std::array::from_fn(|i| (x[i] * id).round_ties_even() as i8);
        Self { d, offset: -8 * q.iter().map(|&v| v as i32).sum::<i32>(), q }
    }
}

/// One block of sixteen tokens interleaved for AMX.
#[cfg(not(target_arch = "aarch64"))]
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActTile {
    /// [`ActBlock::q`] of each token.
    pub q: [[i8; BLOCK]; Self::TOKENS],
    /// [`ActBlock::d`] of each token.
    pub d: [f32; Self::TOKENS],
}

#[cfg(not(target_arch = "aarch64"))]
impl ActTile {
    /// Tokens of a tile.
    pub const TOKENS: usize = 16;
    /// A tile of zeros.
    pub const ZERO: Self = Self { q: [[0; BLOCK]; Self::TOKENS], d: [0.0; Self::TOKENS] };
}

/// One block of four tokens interleaved for `sdot` or `smmla`; the kernel defines the order of tokens.
#[cfg(target_arch = "aarch64")]
#[repr(C, align(16))]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ActTile {
    /// Initial values of the sums: the tokens' offsets plus the bias of the kernel's integer-to-float conversion.
    pub start: [[i32; 4]; 4],
    /// [`ActBlock::q`]
    pub q: [[i8; 16]; 8],
    /// [`ActBlock::d`]
    pub d: [[f32; 4]; 2],
}

#[cfg(target_arch = "aarch64")]
impl ActTile {
    /// Tokens of a tile.
    pub const TOKENS: usize = 4;
    /// A tile of zeros.
    pub const ZERO: Self = Self { start: [[0; 4]; 4], q: [[0; 16]; 8], d: [[0.0; 4]; 2] };
}
