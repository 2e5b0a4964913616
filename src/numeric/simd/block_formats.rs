//! Products in all formats except Q4_0, and in Q4_0 for plain Rust; [`crate::quant::format`] defines them.
//!
//! One kernel for all formats is written over [`rows::BlockKernel`] and compiled for every instruction set except
//! AVX-512, whose own kernel reads activations in place ([`avx512::tile`]). Cycles of a block of 32 columns x 16 rows x
//! 1 token on one core of an EPYC 9004 at 2.6 GHz, for four groups of 64 blocks in the second-level cache. (AVX-VNNI's
//! instruction was encoded as AVX-512, which this CPU has. Q4_0 is for comparison: its kernels are those of
//! [`super::products`].)
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
//! Formats of fewer bits, with AVX-512's own kernel:
//!
//! | format | AVX2, 4 tokens | AVX-512, 1 | AVX-512, 8 |
//! |---|---:|---:|---:|
//! | Q4_0 | 15.5 | 11.0 | 7.2 |
//! | IQ4_NL | 24.9 | 13.9 | 7.4 |
//! | IQ4_XS | 25.7 | 15.5 | 7.7 |
//! | MXFP4 | 15.8 | 18.2 | 8.0 |
//! | NVFP4 | 19.7 | 16.1 | 9.3 |
//! | IQ3_XXS | 25.8 | 15.6 | 8.2 |
//! | IQ3_S | 15.8 | 15.5 | 7.7 |
//! | Q3_K | 20.8 | 19.6 | 9.7 |
//! | IQ2_XXS | 27.9 | 22.6 | 8.1 |
//! | IQ2_XS, IQ2_S | 33.3 | 23.9 | 9.9 |
//! | IQ1_S | 18.0 | 22.3 | 8.0 |
//! | IQ1_M | 21.5 | 23.4 | 9.9 |
//! | Q2_K | 22.3 | 18.7 | 11.9 |
//! | TQ1_0, TQ2_0 | 14.4 | 11.4 | 7.6 |
//! | Q2_0 | 13.9 | 11.2 | 7.5 |
//! | Q1_0 | 15.5 | 15.3 | 7.4 |
//!
//! Levels of eight bits cost AVX2 what Q8_0 costs: their products fill an i16 in pairs. With AVX-VNNI, four tokens take
//! 10.3 cycles in IQ4_NL and 12.2 in Q4_0. A kernel of IQ4_NL for up to sixteen tokens on AVX-512, like that of Q4_0, was
//! 6 % slower than this one.
//!
//! So one token reads 9 to 31 bytes of weights per cycle, while memory delivers five or six to one thread. One group at
//! a time takes 1 to 3 cycles more with AVX2, because activations are then laid out for only sixteen rows. The table's
//! rows for AVX-512 were measured with the shared kernel: its own kernel takes 0.92 to 0.95 of that for eight tokens
//! and four groups, 0.88 to 0.93 for two groups, 0.79 to 0.89 for one, and the same time for one token. Twelve tokens
//! at once are no faster. Q4_0 with the shared kernel on AVX2, against its own: one token 9.3 and 7.8 ns, four tokens
//! 7.3 and 6.6 ns.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
mod rows;
#[cfg(test)]
mod tests;

use super::Isa;
use super::groups::Groups;
use crate::quant::activations::ActBlock;
use crate::quant::format::Format;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::SixteenRows;
pub(super) use kernel::load_scales;
use kernel::{Tokens, tile};
#[cfg(target_arch = "aarch64")]
pub(super) use neon::FourRows;
use plain::multiply_plainly;

/// Runs the kernel of the matrix's format, one of those listed.
macro_rules! run_kernel_of {
    ($isa:ident, $w:ident, $x:ident, $out:ident, $($run:ident: $($format:ident)*;)*) => {
        match $w.format.kernel_format() {
            $($(Format::$format => $run::<{ Format::$format as usize }>($isa, $w, $x, $out),)*)*
            other => unreachable!("{other:?} has the kernels of another format"),
        }
    };
}

/// Implements [`super::products::multiply`], which checked the lengths, for the tokens from `first` on. Q4_0 comes here
/// only for [`Isa::Scalar`].
pub(super) fn multiply(
    isa: Isa,
    w: Groups<'_>,
    activations: &[ActBlock],
    mut first: usize,
    out: &mut [[f32; 16]],
) {
    let total = out.len() / w.groups;
    while first < total {
        let count = tile_tokens(isa, total - first);
        let activations = &activations[first * w.blocks..][..count * w.blocks];
        let x = Tokens { activations, first, count, total };
        run_kernel_of!(isa, w, x, out,
            run_plain_kernel: Q4_0;
            run_kernel: Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K IQ4_NL IQ4_XS;
            run_large_kernel: Q2_K Q3_K IQ3_XXS IQ3_S IQ2_XXS IQ2_S IQ1_S IQ1_M TQ2_0 MXFP4 NVFP4 Q1_0 Q2_0;);
        first += count;
    }
}

/// Number of tokens to compute next when `left` are left; they share unpacked weights.
fn tile_tokens(isa: Isa, left: usize) -> usize {
    left.min(match isa {
        Isa::Scalar => left,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => 8,
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot | Isa::NeonI8mm => 8,
        _ => 4,
    })
}

/// Defines [`tile`] compiled for the features of one set.
macro_rules! compiled {
    ($name:ident, $rows:ty, $features:literal) => {
        #[target_feature(enable = $features)]
        unsafe fn $name<const F: usize, const T: usize>(w: Groups<'_>, x: Tokens<'_>, out: *mut [f32; 16]) {
            tile::<$rows, F, T>(w, x, out)
        }
    };
}

#[cfg(target_arch = "x86_64")]
compiled!(avx2, avx2::EightRows<false>, "avx2,fma,f16c");
#[cfg(target_arch = "x86_64")]
compiled!(avx_vnni, avx2::EightRows<true>, "avx2,fma,f16c,avxvnni");
/// [`avx512::tile`] compiled for its features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn avx512<const F: usize, const T: usize>(w: Groups<'_>, x: Tokens<'_>, out: *mut [f32; 16]) {
    avx512::tile::<F, T>(w, x, out)
}
#[cfg(target_arch = "aarch64")]
compiled!(neon, neon::FourRows<false>, "neon");
#[cfg(target_arch = "aarch64")]
compiled!(neon_dot, neon::FourRows<true>, "neon,dotprod");

/// Defines a function that runs the smallest of its kernels for at least `x.count` tokens: with registers of eight rows,
/// of sixteen and of four, and of four with dotprod.
macro_rules! kernels {
    ($name:ident, $eight:tt $sixteen:tt $four:tt $dot:tt) => {
        fn $name<const F: usize>(isa: Isa, w: Groups<'_>, x: Tokens<'_>, out: &mut [[f32; 16]]) {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => sizes!(avx2, w, x, out, $eight),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni => sizes!(avx_vnni, w, x, out, $eight),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => sizes!(avx512, w, x, out, $sixteen),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon => sizes!(neon, w, x, out, $four),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonDot | Isa::NeonI8mm => sizes!(neon_dot, w, x, out, $dot),
                Isa::Scalar => multiply_plainly::<F>(w, x, out),
            }
        }
    };
}

/// Runs a kernel of one of these sizes.
macro_rules! sizes {
    ($set:ident, $w:ident, $x:ident, $out:ident, [$($n:literal)*]) => {
        match $x.count {
            // SAFETY: `isa` was found on this CPU; `products::multiply` checked the planes, the activations and `out`.
            $(..=$n => unsafe { $set::<F, $n>($w, $x, $out.as_mut_ptr()) },)*
            n => unreachable!("no kernel for {n} tokens"),
        }
    };
}

fn run_plain_kernel<const F: usize>(_: Isa, w: Groups<'_>, x: Tokens<'_>, out: &mut [[f32; 16]]) {
    multiply_plainly::<F>(w, x, out)
}
kernels!(run_kernel, [1 2 4] [1 2 4 6 8] [1 2 4] [1 2 4 8]);
// Each kernel is 2 to 7 KiB of code.
kernels!(run_large_kernel, [1 4] [1 8] [1 4] [1 8]);
