//! Products of quantised matrices with activations; chooses the kernel for the format and instruction set.
//!
//! The number of columns is baked into the program. The Q4_0 kernels of AVX2 and AVX-VNNI take it as a const parameter,
//! all others at run time, which is as fast or faster and is compiled once for all models. Const against run time,
//! kernels alone, 256 to 8,192 columns:
//!
//! - AVX2 on an EPYC: four tokens at once 8 to 12 % faster (6.57 against 7.14 ns per block and token), because the
//!   compiler spills fewer registers; one token the same (7.83 against 7.87 ns). Prefill of Llama 3.2 1B
//!   on one thread gains 11 %, decode nothing.
//! - AVX-VNNI, by the model of llvm-mca 14: four tokens 25.2 against 27.2 cycles; one and two tokens the same.
//! - AVX-512, by the same model: within 1.5 %, but eleven tokens took 14 % longer.
//! - NEON with dotprod or i8mm, instructions of the loops: one token the same; four and eight tokens the same to 10 %
//!   more, because tokens are further apart than the offset of a load reaches.
//! - Other formats on AVX2: no difference above the noise (5 %), and 250 KiB more code for each number of columns.

use super::groups::{Groups, IQ4, IQ4_XS, MOST_GROUPS, Q4, Q4Group};
#[cfg(target_arch = "aarch64")]
use super::neon;
use super::{Isa, block_formats};
#[cfg(target_arch = "x86_64")]
use super::{amx, avx_vnni, avx2, avx512};
use crate::quant::activations::{ActBlock, ActTile};
use crate::quant::format::Format;
use files::blocks::BLOCK;

/// Maximum tokens that [`Isa::tile_shape`] returns. Up to this number, weights unpacked for AMX and their sums stay in
/// the second-level cache.
pub const MAX_TOKENS: usize = 256;

/// Multiplies a matrix of `COLS` columns with the activations of some tokens: `out[group][token][row]`. See
/// [`format`](crate::quant::format) for the definition.
///
/// `activations` is `[token][block]`. `tiles` has the whole tiles of the same tokens, `[tile][block]`, or is empty (see
/// [`Isa::act_tiles`]); only formats of which [`Format::reads_tiles`] is true read them.
pub fn multiply<const COLS: usize>(
    isa: Isa,
    w: Groups<'_>,
    activations: &[ActBlock],
    tiles: &[ActTile],
    out: &mut [[f32; 16]],
) {
    assert!(w.blocks * BLOCK == COLS);
    multiply_by(TileKernel { isa, q4: q4_tile::<COLS> }, w, activations, tiles, out);
}

/// A function that multiplies a group with a tile of tokens.
type GroupKernel = fn(Isa, Q4Group<'_>, &[ActBlock], &mut [[f32; 16]]);

/// An instruction set, and its function for Q4_0.
struct TileKernel {
    isa: Isa,
    q4: GroupKernel,
}

impl TileKernel {
    /// The function for a format; `None` if [`block_formats`] has its kernels.
    fn find_group_kernel(&self, format: Format) -> Option<GroupKernel> {
        match (self.isa, format) {
            (Isa::Scalar, _) => None,
            (_, Format::Q4_0) => Some(self.q4),
            #[cfg(target_arch = "aarch64")]
            (Isa::NeonDot | Isa::NeonI8mm, Format::IQ4_NL) => Some(q4_dot_tile::<IQ4>),
            #[cfg(target_arch = "aarch64")]
            (Isa::NeonDot | Isa::NeonI8mm, Format::IQ4_XS) => Some(q4_dot_tile::<IQ4_XS>),
            _ => None,
        }
    }
}

/// The part of [`multiply`] that does not depend on the number of columns, compiled once for all models.
fn multiply_by(
    kernel: TileKernel,
    w: Groups<'_>,
    activations: &[ActBlock],
    tiles: &[ActTile],
    out: &mut [[f32; 16]],
) {
    let isa = kernel.isa;
    assert!(w.groups > 0 && out.len().is_multiple_of(w.groups));
    let tokens = out.len() / w.groups;
    assert!(activations.len() >= w.blocks * tokens);
    let (quants, scales) = w.format.group_bytes(w.blocks * BLOCK);
    assert!(w.quants.len() >= w.groups * quants && w.scales.len() >= w.groups * scales);
    let done = match w.format {
        Format::Q4_0 => multiply_tiles::<Q4>(isa, w, tiles, out),
        Format::IQ4_NL => multiply_tiles::<IQ4>(isa, w, tiles, out),
        Format::IQ4_XS => multiply_tiles::<IQ4_XS>(isa, w, tiles, out),
        _ => 0,
    };
    let Some(kernel) = kernel.find_group_kernel(w.format) else {
        return block_formats::multiply(isa, w, activations, done, out);
    };
    for (g, out) in out.chunks_exact_mut(tokens.max(1)).enumerate() {
        let (w, mut activations, mut out) = (w.q4(g), &activations[done * w.blocks..], &mut out[done..]);
        while !out.is_empty() {
            let n = isa.tokens_of_group(out.len());
            let (now, rest) = out.split_at_mut(n);
            assert!(activations.len() >= n * w.blocks);
            kernel(isa, w, activations, now);
            out = rest;
            activations = &activations[n * w.blocks..];
        }
    }
}

/// Multiplies whole tiles of tokens, if there are any, in format `F`. Returns the number of tokens done.
fn multiply_tiles<const F: usize>(
    isa: Isa,
    w: Groups<'_>,
    tiles: &[ActTile],
    out: &mut [[f32; 16]],
) -> usize {
    assert!(tiles.is_empty() || tiles.len() == w.blocks * (out.len() / w.groups / ActTile::TOKENS));
    match isa {
        // SAFETY: `Isa::Amx` is only made where `amx::is_amx_granted`. `multiply_by` checked the planes and `out`,
        // `tiles` was checked above.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => unsafe { amx::q4::<F>(w, tiles, out.len() / w.groups, out.as_mut_ptr()) },
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot | Isa::NeonI8mm => q4_multi_group::<F>(isa, w, tiles, out),
        _ => 0,
    }
}

/// Runs the kernel for `$out.len()` tokens.
macro_rules! kernel {
    ($set:ident::$name:ident, ($w:ident, $activations:ident, $out:ident), $({$n:literal $(, $cols:ident)?})*) => {
        match $out.len() {
            // SAFETY: the set was found on this CPU; a `Q4Group` holds its blocks, which are `COLS / 32`;
            // `multiply_by` checked that `activations` has a row for each token of `out`.
            $($n => unsafe {
                $set::$name::<$n $(, $cols)?>($w, $activations.as_ptr(), $out.as_mut_ptr())
            },)*
            n => unreachable!("no kernel for {n} tokens"),
        }
    };
}

/// Computes a tile of tokens, as many as [`Isa::tokens_at_once`] returns; `w` has `COLS` columns.
fn q4_tile<const COLS: usize>(isa: Isa, w: Q4Group<'_>, activations: &[ActBlock], out: &mut [[f32; 16]]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => kernel!(avx2::q4, (w, activations, out), {1, COLS} {2, COLS} {4, COLS}),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => kernel!(avx_vnni::q4, (w, activations, out), {1, COLS} {2, COLS} {4, COLS}),
        _ => q4_tile_dyn(isa, w, activations, out),
    }
}

/// Computes a tile of tokens on sets whose kernels take any number of columns.
fn q4_tile_dyn(isa: Isa, w: Q4Group<'_>, activations: &[ActBlock], out: &mut [[f32; 16]]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => {
            kernel!(avx512::q4, (w, activations, out),
                {1} {2} {3} {4} {5} {6} {7} {8} {9} {10} {11} {12} {13} {14} {15} {16})
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => kernel!(neon::q4, (w, activations, out), {1} {2} {4}),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot | Isa::NeonI8mm => q4_dot_tile::<Q4>(isa, w, activations, out),
        _ => unreachable!("invariant: `multiply_by` and `q4_tile` handle the other sets"),
    }
}

/// Computes one or two tokens in format `F` with dotprod; [`q4_multi_group`] has left no more.
#[cfg(target_arch = "aarch64")]
fn q4_dot_tile<const F: usize>(_: Isa, w: Q4Group<'_>, activations: &[ActBlock], out: &mut [[f32; 16]]) {
    match out.len() {
        // SAFETY: see `kernel!`; the callers checked the set.
        1 => unsafe { neon::q4_dot::<F, 1>(w, activations.as_ptr(), out.as_mut_ptr()) },
        2 => unsafe { neon::q4_dot::<F, 2>(w, activations.as_ptr(), out.as_mut_ptr()) },
        n => unreachable!("no kernel for {n} tokens"),
    }
}

/// Computes four tokens and more for all groups at once, if there are tiles. Returns the number of tokens done.
/// [`multiply_by`] has checked the arguments.
#[cfg(target_arch = "aarch64")]
fn q4_multi_group<const F: usize>(
    isa: Isa,
    w: Groups<'_>,
    tiles: &[ActTile],
    out: &mut [[f32; 16]],
) -> usize {
    let (tokens, mut done) = (out.len() / w.groups, 0);
    loop {
        let n = isa.tokens_at_once(tokens - done);
        if n < 4 || tiles.is_empty() {
            return done;
        }
        let kernel = match (isa, n) {
            (Isa::NeonI8mm, 16) => neon::q4_i8mm_groups::<F, 16>,
            (Isa::NeonI8mm, 8) => neon::q4_i8mm_groups::<F, 8>,
            (Isa::NeonI8mm, 4) => neon::q4_i8mm_groups::<F, 4>,
            (_, 12) => neon::q4_dot_groups::<F, 12>,
            (_, 8) => neon::q4_dot_groups::<F, 8>,
            (_, 4) => neon::q4_dot_groups::<F, 4>,
            (_, n) => unreachable!("no kernel for {n} tokens"),
        };
        let tiles = &tiles[done / ActTile::TOKENS * w.blocks..][..n / ActTile::TOKENS * w.blocks];
        for first in (0..w.groups).step_by(MOST_GROUPS) {
            let groups = w.part(first..w.groups.min(first + MOST_GROUPS));
            let out = &mut out[first * tokens + done..];
            // SAFETY: the set was found on this CPU; `w` holds its groups, `tiles` a tile of each four tokens and
            // block, and `out` one row of each group and token, groups `tokens` apart.
            unsafe { kernel(groups, tiles.as_ptr(), (out.as_mut_ptr(), tokens)) };
        }
        done += n;
    }
}

/// Interleaves the blocks of a tile's tokens, `[token][block]`, to one [`ActTile`] per block.
pub fn interleave(isa: Isa, activations: &[ActBlock], tiles: &mut [ActTile]) {
    let blocks = tiles.len();
    assert_eq!(activations.len(), ActTile::TOKENS * blocks);
    for (b, tile) in tiles.iter_mut().enumerate() {
        let acts = std::array::from_fn(|t| &activations[t * blocks + b]);
        *tile = interleave_block(isa, acts);
    }
}

/// Interleaves one block of a tile's tokens.
#[cfg(target_arch = "aarch64")]
fn interleave_block(isa: Isa, acts: [&ActBlock; ActTile::TOKENS]) -> ActTile {
    if isa == Isa::NeonI8mm {
        neon::interleave_block::<true>(acts)
    } else {
        neon::interleave_block::<false>(acts)
    }
}

/// Interleaves one block of a tile's tokens.
#[cfg(not(target_arch = "aarch64"))]
fn interleave_block(_: Isa, acts: [&ActBlock; ActTile::TOKENS]) -> ActTile {
    ActTile { q: acts.map(|act| act.q), d: acts.map(|act| act.d) }
}

impl Isa {
    /// Tokens and groups of rows to pass to [`multiply`] at once when `tokens` are left.
    pub fn tile_shape(self, tokens: usize) -> (usize, usize) {
        #[cfg(target_arch = "x86_64")]
        if self == Isa::Amx && tokens >= ActTile::TOKENS {
            return (MAX_TOKENS, MOST_GROUPS);
        }
        (self.tokens_at_once(tokens), MOST_GROUPS)
    }

    /// Number of whole tiles of `tokens` that [`multiply`] reads after [`interleave`] has made them.
    pub fn act_tiles(self, tokens: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => tokens / ActTile::TOKENS,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot | Isa::NeonI8mm => tokens / ActTile::TOKENS,
            // This instruction set reads no tiles.
            _ => 0,
        }
    }

    /// Number of tokens to compute next with kernels of one group, after those of several groups.
    fn tokens_of_group(self, left: usize) -> usize {
        match self {
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot | Isa::NeonI8mm => left.min(2),
            _ => self.tokens_at_once(left),
        }
    }

    /// Number of tokens to compute next when `left` are left; a kernel is compiled for each possible result.
    fn tokens_at_once(self, left: usize) -> usize {
        match self {
            // All sizes are compiled, so tiles can be nearly equal: a small last tile would waste most of a pass over
            // the weights.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => left.div_ceil(left.div_ceil(16).max(1)),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm if left >= 8 => {
                if left >= 16 {
                    16
                } else {
                    8
                }
            }
            // Nearly equal tiles: sixteen tokens are twice eight.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot if left >= 8 => {
                left.div_ceil(left.div_ceil(12)).next_multiple_of(4).min(left / 4 * 4)
            }
            _ if left >= 4 => 4,
            _ => left.min(2),
        }
    }
}
