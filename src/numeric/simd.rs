//! The CPU's instruction sets: which one runs, and the kernels each one has under the same names.
//!
//! Float steps are written once over [`lanes::Lanes`] in [`ops`] and compiled once per set; integer
//! dot products have one kernel per set. All sets give the same bits.

pub mod attend;
pub mod kv_row;
mod lanes;
pub mod native;
pub mod ops;
pub mod peak;
pub mod stream;

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
mod scalar;

use crate::quant::act::{ActBlock, ActTile};
use crate::quant::packed::{QUANT_BYTES, SCALE_BYTES};
use files::{Error, Result};

/// An instruction set this CPU has: values are only made by [`Isa::detect`] and [`Isa::available`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// Plain Rust.
    Scalar,
    /// AVX2, FMA, F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The same with AVX-VNNI: 256-bit `vpdpbusd`.
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    /// AVX-512 F, BW, VL, DQ and VNNI.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// The same with AMX tiles of bytes, which the kernel has let this process use.
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
    /// Every set this CPU can run, slowest first.
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
                    if amx::granted() {
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
            Isa::AvxVnni => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => "amx",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon | Isa::NeonDot | Isa::NeonI8mm => "neon",
        }
    }

    /// Name for reports.
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

/// Compiles `generic::<L>` for every instruction set and runs the one `isa` names.
macro_rules! dispatch {
    ($isa:expr, $generic:ident :: <L $(, $c:ident: $ct:ty)*> ( $($arg:ident: $ty:ty),* $(,)? ) $(-> $ret:ty)?) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2<$(const $c: $ct),*>($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled with the features the lanes need.
            unsafe { $generic::<$crate::simd::avx2::Avx2 $(, $c)*>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        fn avx512<$(const $c: $ct),*>($($arg: $ty),*) $(-> $ret)? {
            // SAFETY: this function is compiled with the features the lanes need.
            unsafe { $generic::<$crate::simd::avx512::Avx512 $(, $c)*>($($arg),*) }
        }
        match $isa {
            // SAFETY: scalar lanes need nothing; NEON is part of every aarch64 target; the x86 sets are
            // only named by an `Isa` that was found on this CPU.
            $crate::simd::Isa::Scalar => unsafe {
                $generic::<$crate::simd::lanes::Scalar $(, $c)*>($($arg),*)
            },
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Isa::Avx2 | $crate::simd::Isa::AvxVnni => unsafe {
                avx2::<$($c),*>($($arg),*)
            },
            #[cfg(target_arch = "x86_64")]
            $crate::simd::Isa::Avx512 | $crate::simd::Isa::Amx => unsafe {
                avx512::<$($c),*>($($arg),*)
            },
            #[cfg(target_arch = "aarch64")]
            $crate::simd::Isa::Neon
            | $crate::simd::Isa::NeonDot
            | $crate::simd::Isa::NeonI8mm => unsafe {
                $generic::<$crate::simd::neon::Neon $(, $c)*>($($arg),*)
            },
        }
    }};
}
pub(crate) use dispatch;

/// `body` for each `i` below `n`, unrolled however long it is: arrays indexed by `i` stay in registers.
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

/// Most tokens and groups of rows that [`Isa::tile`] names: for these, weights unpacked for AMX and their sums
/// stay in the second-level cache; and what [`native`] lays out of the activations serves several groups.
pub const MOST_TOKENS: usize = 256;
pub const MOST_GROUPS: usize = 4;

/// Asks for the cache line at `p`, whose address may be anything, to be brought into the cache of `LEVEL` 1 or 2.
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

/// Some groups of sixteen packed rows, which follow each other in memory.
#[derive(Clone, Copy)]
pub struct Q4Groups<'a> {
    /// `[group][block][256]`
    pub quants: &'a [u8],
    /// `[group][block][16]` f16.
    pub scales: &'a [u8],
    /// Groups.
    pub groups: usize,
    /// Blocks of 32 columns.
    pub blocks: usize,
}

/// One of [`Q4Groups`], as the kernels take it.
#[derive(Clone, Copy)]
struct Q4Group<'a> {
    /// `[block][256]`
    quants: &'a [u8],
    /// `[block][16]` f16.
    scales: &'a [u8],
    /// Blocks of 32 columns.
    blocks: usize,
}

impl<'a> Q4Groups<'a> {
    fn group(&self, g: usize) -> Q4Group<'a> {
        let (quants, scales) = (self.blocks * QUANT_BYTES, self.blocks * SCALE_BYTES);
        Q4Group {
            quants: &self.quants[g * quants..][..quants],
            scales: &self.scales[g * scales..][..scales],
            blocks: self.blocks,
        }
    }
}

/// Prefetches what a kernel for one token reads soon: four lines of quants and half a line of scales, 4 KiB
/// later into the second-level cache and 1 KiB later into the first. Past the end of a group lies the one that
/// this thread takes next.
///
/// The arithmetic fills the reorder buffer, so that loads alone do not reach far enough ahead to keep memory
/// busy. Share of the bandwidth of plain reading on an Emerald Rapids Xeon, 1 and 2 threads: without 72 and
/// 75 %; 4 KiB into the first level 91 and 92 %; these two 95 and 97 %. Not better: 8 KiB, two to eight
/// groups side by side. Much worse, 36 %: non-temporal prefetches. On a Zen 4 EPYC 4 KiB straight into the first
/// level is a fifth faster in a loop over this kernel, but a tenth slower in decode.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn ahead(quants: *const u8, scales: *const u8) {
    const FAR: usize = 4096;
    const NEAR: usize = 1024;
    for line in 0..4 {
        prefetch::<2>(quants.wrapping_add(FAR + 64 * line));
        prefetch::<1>(quants.wrapping_add(NEAR + 64 * line));
    }
    prefetch::<2>(scales.wrapping_add(FAR / 8));
    prefetch::<1>(scales.wrapping_add(NEAR / 8));
}

impl Isa {
    /// Tokens and groups of rows that [`q4_groups`] and [`native::native_groups`] like to take at once, of `tokens` that are there.
    pub fn tile(self, tokens: usize) -> (usize, usize) {
        #[cfg(target_arch = "x86_64")]
        if self == Isa::Amx && tokens >= amx::TOKENS {
            return (MOST_TOKENS, MOST_GROUPS);
        }
        (self.tokens_at_once(tokens), MOST_GROUPS)
    }

    /// Of so many tokens, how many tiles [`q4_groups`] likes to have laid out by [`lay_out`].
    pub fn act_tiles(self, tokens: usize) -> usize {
        let of_a_tile = match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => ActTile::TOKENS,
            // Tiles that no prompt fills.
            _ => usize::MAX,
        };
        tokens / of_a_tile
    }

    /// The tile of tokens, of those compiled, to begin `left` tokens with.
    fn tokens_at_once(self, left: usize) -> usize {
        match self {
            // All sizes are there but 3, so the tiles can be nearly equal: a small rest would waste most of a
            // pass over the weights.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Amx => match left.div_ceil(left.div_ceil(12).max(1)) {
                3 => 2,
                n => n,
            },
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot | Isa::NeonI8mm if left >= 8 => 8,
            _ if left >= 4 => 4,
            _ => left.min(2),
        }
    }
}

/// Q4_0 rows times the activations of some tokens: `out[group][token][row]`.
///
/// `acts` is `[token][block]`; `tiles` has the whole tiles of the same tokens, `[token / 16][block]`, or nothing
/// (see [`Isa::act_tiles`]). Per block `acc = fma(isum, d_w * d_a, acc)` with the exact integer
/// `isum`, blocks ascending: the contract all sets share.
pub fn q4_groups(isa: Isa, w: Q4Groups<'_>, acts: &[ActBlock], tiles: &[ActTile], out: &mut [[f32; 16]]) {
    assert!(w.groups > 0 && out.len().is_multiple_of(w.groups));
    let tokens = out.len() / w.groups;
    assert!(acts.len() >= w.blocks * tokens);
    assert!(tiles.is_empty() || tiles.len() == w.blocks * (tokens / ActTile::TOKENS));
    assert!(w.quants.len() >= w.groups * w.blocks * QUANT_BYTES);
    assert!(w.scales.len() >= w.groups * w.blocks * SCALE_BYTES);
    let done = match isa {
        // SAFETY: `Isa::Amx` is only made where `amx::granted`; the planes were checked, as were `tiles` and
        // `out`, for `tokens` tokens.
        #[cfg(target_arch = "x86_64")]
        Isa::Amx => unsafe { amx::q4(w, tiles, tokens, out.as_mut_ptr()) },
        _ => 0,
    };
    for (g, out) in out.chunks_exact_mut(tokens.max(1)).enumerate() {
        let (w, mut acts, mut out) = (w.group(g), &acts[done * w.blocks..], &mut out[done..]);
        while !out.is_empty() {
            let n = isa.tokens_at_once(out.len());
            let (now, rest) = out.split_at_mut(n);
            q4_tile(isa, w, acts, now);
            out = rest;
            acts = &acts[n * w.blocks..];
        }
    }
}

/// Puts the blocks of sixteen tokens, `[token][block]`, side by side: `[block]`.
pub fn lay_out(acts: &[ActBlock], tiles: &mut [ActTile]) {
    let blocks = tiles.len();
    assert_eq!(acts.len(), ActTile::TOKENS * blocks);
    for (b, tile) in tiles.iter_mut().enumerate() {
        for (t, act) in acts[b..].iter().step_by(blocks).enumerate() {
            (tile.q[t], tile.d[t]) = (act.q, act.d);
        }
    }
}

/// One tile of tokens whose number is one of [`Isa::tokens_at_once`]; `acts` holds a row for each.
fn q4_tile(isa: Isa, w: Q4Group<'_>, acts: &[ActBlock], out: &mut [[f32; 16]]) {
    macro_rules! kernel {
        ($set:ident, $name:ident, [$($n:literal),*]) => {
            match out.len() {
                // SAFETY: `isa` was found on this CPU; a `Q4Group` holds its blocks; `acts` and `out` have a row
                // for each token.
                $($n => unsafe { $set::$name::<$n>(w, acts.as_ptr(), w.blocks, out.as_mut_ptr()) },)*
                n => unreachable!("no kernel for {n} tokens"),
            }
        };
    }
    assert!(acts.len() >= w.blocks * out.len());
    match isa {
        Isa::Scalar => scalar::q4(w, acts, out),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => kernel!(avx2, q4, [1, 2, 4]),
        #[cfg(target_arch = "x86_64")]
        Isa::AvxVnni => kernel!(avx_vnni, q4, [1, 2, 4]),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => kernel!(avx512, q4, [1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => kernel!(neon, q4, [1, 2, 4]),
        // One pair alone costs as much to put together as `smmla` saves.
        #[cfg(target_arch = "aarch64")]
        Isa::NeonI8mm if out.len() > 2 => kernel!(neon, q4_i8mm, [4, 8]),
        #[cfg(target_arch = "aarch64")]
        Isa::NeonDot | Isa::NeonI8mm => kernel!(neon, q4_dot, [1, 2, 4, 8]),
    }
}
