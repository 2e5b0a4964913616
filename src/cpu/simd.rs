//! The CPU's instruction sets: which one runs, and the kernels each one has under the same names.
//!
//! Float steps are written once over [`lanes::Lanes`] in [`ops`] and compiled once per set; integer
//! dot products have one kernel per set. All sets give the same bits.

pub mod attend;
pub mod kv_row;
mod lanes;
pub mod ops;
pub mod peak;
pub mod stream;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use crate::error::{Error, Result};
use crate::quant::act::ActBlock;
use crate::quant::packed::{QUANT_BYTES, SCALE_BYTES};

/// An instruction set this CPU has: values are only made by [`Isa::detect`] and [`Isa::available`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Baseline NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with `sdot`.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
}

impl Isa {
    /// Every set this CPU can run, slowest first.
    pub fn available() -> Vec<Isa> {
        let mut sets = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                sets.push(Isa::Avx2);
                if has!("avx512f")
                    && has!("avx512bw")
                    && has!("avx512vl")
                    && has!("avx512dq")
                    && has!("avx512vnni")
                {
                    sets.push(Isa::Avx512);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            sets.push(Isa::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                sets.push(Isa::NeonDot);
            }
        }
        sets
    }

    /// The best set, or the one that `ANTIGRAVITY_SIMD` names.
    pub fn detect() -> Result<Isa> {
        let sets = Self::available();
        let best = *sets.last().expect("invariant: scalar is always there");
        let Some(wanted) = std::env::var_os("ANTIGRAVITY_SIMD") else { return Ok(best) };
        let wanted = wanted.to_string_lossy().into_owned();
        sets.iter().rev().find(|s| s.family() == wanted).copied().ok_or_else(|| {
            let mut names: Vec<&str> = sets.iter().map(|s| s.family()).collect();
            names.dedup();
            Error::Usage(format!("ANTIGRAVITY_SIMD={wanted}: this CPU has {}", names.join(", ")))
        })
    }

    /// The value of `ANTIGRAVITY_SIMD` that stands for this set.
    pub fn family(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot => "neon",
        }
    }

    /// Name for reports.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512-vnni",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => "neon-dotprod",
            other => other.family(),
        }
    }
}

/// Compiles `generic::<L>` for every instruction set and runs the one `isa` names.
macro_rules! dispatch {
    ($isa:expr, $generic:ident :: <L $(, $c:ident: $ct:ty)*> ( $($arg:ident: $ty:ty),* $(,)? ) $(-> $ret:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<$(const $c: $ct),*>($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled with the features the lanes need.
            unsafe { $generic::<$crate::cpu::simd::avx2::Avx2 $(, $c)*>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        fn avx512<$(const $c: $ct),*>($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled with the features the lanes need.
            unsafe { $generic::<$crate::cpu::simd::avx512::Avx512 $(, $c)*>($($arg),*) }
        }
        match $isa {
            // SAFETY: scalar lanes need nothing; NEON is part of every aarch64 target; the x86 sets are
            // only named by an `Isa` that was found on this CPU.
            $crate::cpu::simd::Isa::Scalar => unsafe {
                $generic::<$crate::cpu::simd::lanes::Scalar $(, $c)*>($($arg),*)
            },
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::simd::Isa::Avx2 => unsafe { avx2::<$($c),*>($($arg),*) },
            #[cfg(target_arch = "x86_64")]
            $crate::cpu::simd::Isa::Avx512 => unsafe { avx512::<$($c),*>($($arg),*) },
            #[cfg(target_arch = "aarch64")]
            $crate::cpu::simd::Isa::Neon | $crate::cpu::simd::Isa::NeonDot => unsafe {
                $generic::<$crate::cpu::simd::neon::Neon $(, $c)*>($($arg),*)
            },
        }
    }};
}
pub(crate) use dispatch;

/// One group of sixteen packed rows.
#[derive(Clone, Copy)]
pub struct Q4Group<'a> {
    /// `[block][256]`.
    pub quants: &'a [u8],
    /// `[block][16]` f16.
    pub scales: &'a [u8],
    /// Blocks of 32 columns.
    pub blocks: usize,
}

/// Sixteen Q4_0 rows times the activations of `out.len()` tokens: `out[token][row]`.
///
/// `acts` is `[token][block]`. Per block `acc = fma(isum, d_w * d_a, acc)` with the exact integer
/// `isum`, blocks ascending: the contract all sets share.
pub fn q4_group(isa: Isa, w: Q4Group<'_>, acts: &[ActBlock], out: &mut [[f32; 16]]) {
    assert!(w.quants.len() >= w.blocks * QUANT_BYTES && w.scales.len() >= w.blocks * SCALE_BYTES);
    assert!(acts.len() >= w.blocks * out.len());
    let (mut acts, mut out, stride) = (acts, out, w.blocks);
    while !out.is_empty() {
        let n = tokens_at_once(isa, out.len());
        let (now, rest) = out.split_at_mut(n);
        q4_tile(isa, w, acts, now);
        out = rest;
        acts = &acts[n * stride..];
    }
}

/// The largest tile of tokens, of those compiled, that fits `left`.
fn tokens_at_once(isa: Isa, left: usize) -> usize {
    let sizes: &[usize] = match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => &[12, 8, 4, 2, 1],
        _ => &[4, 2, 1],
    };
    *sizes.iter().find(|&&n| n <= left).expect("invariant: one token is always possible")
}

/// One tile of tokens whose number is one of [`tokens_at_once`].
fn q4_tile(isa: Isa, w: Q4Group<'_>, acts: &[ActBlock], out: &mut [[f32; 16]]) {
    macro_rules! kernel {
        ($set:ident, $name:ident, [$($n:literal),*]) => {
            match out.len() {
                // SAFETY: `isa` was found on this CPU; `q4_group` checked the planes and that `acts` has a
                // row for each of `out`.
                $($n => unsafe { $set::$name::<$n>(w, acts.as_ptr(), w.blocks, out.as_mut_ptr()) },)*
                n => unreachable!("no kernel for {n} tokens"),
            }
        };
    }
    match isa {
        Isa::Scalar => scalar::q4(w, acts, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => kernel!(avx2, q4, [1, 2, 4]),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => kernel!(avx512, q4, [1, 2, 4, 8, 12]),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => kernel!(neon, q4, [1, 2, 4]),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot => kernel!(neon, q4_dot, [1, 2, 4]),
    }
}
