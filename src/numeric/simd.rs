//! The CPU's instruction sets: detection, dispatch, and the kernels of each.
//!
//! Float steps are written once, over [`lanes::Lanes`] in [`ops`], and compiled for each set. Integer dot products have
//! kernels for each set; [`products`] chooses among them. All sets give the same bits.
//!
//! # Safety
//!
//! The `unsafe` functions in this module and below share one contract, so their bodies do not repeat it:
//!
//! - The CPU has the instruction set they are compiled for. An [`Isa`] proves this: only [`Isa::available`] makes one,
//!   and it asks the CPU. Safe functions take an `Isa` and call only the kernels of that set.
//! - Pointers and slices hold as many blocks, rows and tokens as the other arguments say. The safe function that
//!   chooses the kernel asserts these lengths first. No pointer needs alignment unless its type has it.
//!
//! A `# Safety` section names further requirements of a function.

#![allow(unsafe_op_in_unsafe_fn, reason = "one contract for all, above")]

pub mod attend;
mod block_formats;
pub mod groups;
pub mod int8_peak;
pub mod kv_row;
mod lanes;
pub mod ops;
pub mod products;
pub mod read_bandwidth;
pub mod recurrent;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx_vnni;
#[cfg(target_arch = "aarch64")]
mod neon;

use files::{Error, Result};

/// An instruction set of this CPU. Values are made only by [`Isa::detect`] and [`Isa::available`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 with AVX-VNNI: 256-bit `vpdpbusd`.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with AMX tiles of bytes, which the operating system lets this process use.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// Baseline NEON.
    #[cfg(target_arch = "aarch64")]
    Neon,
    /// NEON with `sdot`.
    #[cfg(target_arch = "aarch64")]
    NeonDot,
    /// NEON with `sdot` and `smmla`.
    #[cfg(target_arch = "aarch64")]
    NeonI8mm,
}

impl Isa {
    /// Lists the sets of this CPU, slowest first.
    pub fn available() -> Vec<Isa> {
        let mut sets = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("fma") && has!("f16c") {
                sets.push(Isa::Avx2);
                if has!("avxvnni") {
                    sets.push(Isa::AvxVnni);
                }
                if has!("avx512f")
                    && has!("avx512bw")
                    && has!("avx512vl")
                    && has!("avx512dq")
                    && has!("avx512vnni")
                {
                    sets.push(Isa::Avx512);
                    if amx::is_amx_granted() {
                        sets.push(Isa::Amx);
                    }
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            sets.push(Isa::Neon);
            use std::arch::is_aarch64_feature_detected as has;
            if has!("dotprod") {
                sets.push(Isa::NeonDot);
                if has!("i8mm") {
                    sets.push(Isa::NeonI8mm);
                }
            }
        }
        sets
    }

    /// Returns the best set, or the one whose [name](Isa::name) or [family](Isa::family) is in `ANTIGRAVITY_SIMD`.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`]: this CPU has no such set.
    pub fn detect() -> Result<Isa> {
        let sets = Self::available();
        let best = *sets.last().expect("invariant: scalar is always there");
        let Some(wanted) = std::env::var_os("ANTIGRAVITY_SIMD") else { return Ok(best) };
        let wanted = wanted.to_string_lossy().into_owned();
        sets.iter().rev().find(|s| s.family() == wanted || s.name() == wanted).copied().ok_or_else(|| {
            let names: Vec<&str> = sets.iter().map(|s| s.name()).collect();
            Error::Usage(format!("ANTIGRAVITY_SIMD={wanted}: this CPU has {}", names.join(", ")))
        })
    }

    /// Short name for `ANTIGRAVITY_SIMD`, which selects the best set of the family.
    pub fn family(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => "neon",
        }
    }

    /// Full name for reports and `ANTIGRAVITY_SIMD`.
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx-int8",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => "neon-i8mm",
            other => other.family(),
        }
    }
}

/// Compiles `generic::<L>` for every instruction set and runs the one for `isa`.
macro_rules! dispatch {
    ($isa:expr, $generic:ident :: <L $(, $c:ident: $ct:ty)*> ( $($arg:ident: $ty:ty),* $(,)? ) $(-> $ret:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn avx2<$(const $c: $ct),*>($($arg: $ty),*) $(-> $ret)? {
            $generic::<$crate::simd::avx2::Avx2 $(, $c)*>($($arg),*)
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        unsafe fn avx512<$(const $c: $ct),*>($($arg: $ty),*) $(-> $ret)? {
            $generic::<$crate::simd::avx512::Avx512 $(, $c)*>($($arg),*)
        }
        use $crate::simd::Isa;
        // SAFETY: scalar lanes need no instruction set; NEON is part of every aarch64 target; an `Isa` of x86 was found
        // on this CPU.
        unsafe {
            match $isa {
                Isa::Scalar => $generic::<$crate::simd::lanes::Scalar $(, $c)*>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 | Isa::AvxVnni => avx2::<$($c),*>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 | Isa::Amx => avx512::<$($c),*>($($arg),*),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => {
                    $generic::<$crate::simd::neon::Neon $(, $c)*>($($arg),*)
                }
            }
        }
    }};
}
pub(crate) use dispatch;

/// Runs `body` for each `i` below `n` (at most 8), unrolled, so that arrays indexed by `i` stay in registers.
macro_rules! unrolled {
    ($n:expr, |$i:ident| $body:block) => {
        $crate::simd::unrolled!(@ $n, $i, $body, 0 1 2 3 4 5 6 7)
    };
    (@ $n:expr, $i:ident, $body:block, $($k:literal)*) => {
        $(if $k < $n {
            let $i = $k;
            $body
        })*
    };
}
pub(crate) use unrolled;

/// Prefetches the cache line at `p`, any address, into the cache of `LEVEL` 1 or 2.
#[inline(always)]
fn prefetch<const LEVEL: u8>(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that never faults, whatever the address; SSE is part of every x86-64 target.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        match LEVEL {
            1 => _mm_prefetch::<_MM_HINT_T0>(p.cast()),
            _ => _mm_prefetch::<_MM_HINT_T1>(p.cast()),
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint that never faults, whatever the address.
    unsafe {
        use std::arch::asm;
        match LEVEL {
            1 => asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)),
            _ => asm!("prfm pldl2keep, [{p}]", p = in(reg) p, options(readonly, nostack, preserves_flags)),
        }
    }
}
