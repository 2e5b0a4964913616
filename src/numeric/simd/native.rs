//! Products with GGUF's block formats as they are stored; the contract is that of [`crate::quant::native`].
//!
//! One kernel is written for all formats over [`rows::Rows`] and compiled for every instruction set. Cycles of a block
//! of 32 columns x 16 rows x 1 token on one core of an EPYC 9004, counted by its clock of 2.6 GHz, of four groups of 64
//! blocks in the second-level cache (AVX-VNNI's instruction in the encoding of AVX-512, which is what this CPU has):
//!
//! | set | tokens | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q4_K | Q5_K | Q6_K |
//! |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|
//! | AVX2 | 1 | 16.1 | 20.3 | 26.8 | 30.5 | 29.5 | 23.0 | 33.0 | 34.3 |
//! | AVX2 | 4 | 14.7 | 14.7 | 16.8 | 18.2 | 25.3 | 15.5 | 18.1 | 22.0 |
//! | AVX-VNNI | 1 | 14.7 | 18.3 | 23.1 | 24.9 | 24.0 | 19.6 | 27.6 | 26.3 |
//! | AVX-VNNI | 4 | 9.1 | 10.6 | 11.0 | 12.2 | 10.3 | 10.9 | 12.5 | 13.4 |
//! | AVX-512 | 1 | 10.6 | 13.1 | 16.6 | 18.5 | 17.5 | 13.3 | 19.7 | 19.2 |
//! | AVX-512 | 8 | 7.1 | 8.8 | 8.0 | 9.1 | 8.0 | 9.0 | 9.4 | 10.0 |
//!
//! One token thus takes 9 to 31 bytes of weights a cycle, of which memory gives five or six to one thread. One group at
//! a time takes 2 to 4 cycles more with AVX-512, 1 to 3 with AVX2: what is laid out of the activations then serves
//! sixteen rows only. Twelve tokens at once were no faster than eight, and those of Q6_K 60 % slower: not all sums
//! stayed in registers.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod rows;
#[cfg(test)]
mod tests;

use super::Isa;
use crate::quant::act::ActBlock;
use crate::quant::native::Format;
use files::blocks::BLOCK;
use kernel::{Tokens, tile};

/// Some groups of sixteen rows, which follow each other in memory.
#[derive(Clone, Copy)]
pub struct NativeGroups<'a> {
    /// How they are stored.
    pub format: Format,
    /// `[group][block][quant_bytes]`
    pub quants: &'a [u8],
    /// `[group][span][scale_bytes]`
    pub scales: &'a [u8],
    /// Groups.
    pub groups: usize,
    /// Blocks of 32 columns, whole spans.
    pub blocks: usize,
}

/// Rows times the activations of some tokens, `[token][block]`: `out[group][token][row]`.
pub fn native_groups(isa: Isa, w: NativeGroups<'_>, acts: &[ActBlock], out: &mut [[f32; 16]]) {
    assert!(w.groups > 0 && out.len().is_multiple_of(w.groups));
    let of = out.len() / w.groups;
    assert!(acts.len() >= w.blocks * of);
    assert!((w.blocks * BLOCK).is_multiple_of(w.format.span()));
    let (quants, scales) = w.format.group_bytes(w.blocks * BLOCK);
    assert!(w.quants.len() >= w.groups * quants && w.scales.len() >= w.groups * scales);
    let mut first = 0;
    while first < of {
        let count = at_once(isa, of - first);
        let x = Tokens { acts: &acts[first * w.blocks..][..count * w.blocks], first, count, of };
        match w.format {
            Format::Q4_1 => sized::<{ Format::Q4_1 as usize }>(isa, w, x, out),
            Format::Q5_0 => sized::<{ Format::Q5_0 as usize }>(isa, w, x, out),
            Format::Q5_1 => sized::<{ Format::Q5_1 as usize }>(isa, w, x, out),
            Format::Q8_0 => sized::<{ Format::Q8_0 as usize }>(isa, w, x, out),
            Format::Q4_K => sized::<{ Format::Q4_K as usize }>(isa, w, x, out),
            Format::Q5_K => sized::<{ Format::Q5_K as usize }>(isa, w, x, out),
            Format::Q6_K => sized::<{ Format::Q6_K as usize }>(isa, w, x, out),
        }
        first += count;
    }
}

/// Tokens to begin `left` tokens with: as many as share unpacked weights.
fn at_once(isa: Isa, left: usize) -> usize {
    left.min(match isa {
        Isa::Scalar => 1,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => 8,
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot | Isa::NeonI8mm => 8,
        _ => 4,
    })
}

/// [`tile`] for one set, under the set's features.
macro_rules! compiled {
    ($name:ident, $rows:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<const F: usize, const T: usize>(
            w: NativeGroups<'_>,
            x: Tokens<'_>,
            out: *mut [f32; 16],
        ) {
            // SAFETY: as the caller's; this function is compiled with the features the rows need.
            unsafe { tile::<$rows, F, T>(w, x, out) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
compiled!(avx2, avx2::Eight<false>, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compiled!(avx_vnni, avx2::Eight<true>, "avx2,fma,f16c,avxvnni");
#[cfg(target_arch = "x86_64")]
compiled!(avx512, avx512::Sixteen, "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c");
#[cfg(target_arch = "aarch64")]
compiled!(neon, neon::Four<false>, "neon");
#[cfg(target_arch = "aarch64")]
compiled!(neon_dot, neon::Four<true>, "neon,dotprod");

/// The kernel for `x.count` tokens, or the next larger one.
fn sized<const F: usize>(isa: Isa, w: NativeGroups<'_>, x: Tokens<'_>, out: &mut [[f32; 16]]) {
    macro_rules! sizes {
        ($set:ident, $($n:literal)*) => {
            match x.count {
                // SAFETY: `isa` was found on this CPU; `native_groups` checked the planes, the activations
                // and `out`.
                $(..=$n => unsafe { $set::<F, $n>(w, x, out.as_mut_ptr()) },)*
                n => unreachable!("no kernel for {n} tokens"),
            }
        };
    }
    match isa {
        // SAFETY: plain Rust; `native_groups` checked the planes, the activations and `out`.
        Isa::Scalar => unsafe { tile::<rows::Scalar, F, 1>(w, x, out.as_mut_ptr()) },
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => sizes!(avx2, 1 2 4),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => sizes!(avx_vnni, 1 2 4),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => sizes!(avx512, 1 2 4 6 8),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => sizes!(neon, 1 2 4),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot | Isa::NeonI8mm => sizes!(neon_dot, 1 2 4 8),
    }
}
