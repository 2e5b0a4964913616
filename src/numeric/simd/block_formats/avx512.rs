//! All sixteen rows in a register of 512 bits: `vpdpbusd`.

use super::super::unrolled;
use super::kernel::{RUN, Tokens, add_block, load_scales, unpack, zero_point};
use super::rows::BlockKernel;
use crate::quant::activations::ActBlock;
use crate::quant::format::{Format, ScaleKind};
use crate::simd::groups::{Groups, prefetch_block, prefetch_distance};
use files::blocks::BLOCK;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Sixteen rows in a register.
pub struct SixteenRows;

// SAFETY: every intrinsic below belongs to the features of `Isa::Avx512`; memory accesses are unaligned and stay within
// the trait's contract.
unsafe impl BlockKernel for SixteenRows {
    const ROWS: usize = 16;
    const SIGNED: bool = false;
    type Bytes = __m512i;
    type Sums = __m512i;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> __m512i {
        _mm512_loadu_si512(p.cast())
    }
    #[inline(always)]
    unsafe fn splat_byte(x: u8) -> __m512i {
        _mm512_set1_epi8(x as i8)
    }
    #[inline(always)]
    unsafe fn and(a: __m512i, b: __m512i) -> __m512i {
        _mm512_and_si512(a, b)
    }
    #[inline(always)]
    unsafe fn or(a: __m512i, b: __m512i) -> __m512i {
        _mm512_or_si512(a, b)
    }
    #[inline(always)]
    unsafe fn xor(a: __m512i, b: __m512i) -> __m512i {
        _mm512_xor_si512(a, b)
    }
    #[inline(always)]
    unsafe fn load_table(table: &[u8; 16]) -> __m512i {
        _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()))
    }
    #[inline(always)]
    unsafe fn look_up(table: __m512i, a: __m512i) -> __m512i {
        _mm512_shuffle_epi8(table, a)
    }
    #[inline(always)]
    unsafe fn shift_left<const N: i32>(a: __m512i) -> __m512i {
        _mm512_sll_epi16(a, _mm_cvtsi32_si128(N))
    }
    #[inline(always)]
    unsafe fn shift_right<const N: i32>(a: __m512i) -> __m512i {
        _mm512_srl_epi16(a, _mm_cvtsi32_si128(N))
    }
    #[inline(always)]
    unsafe fn splat_sum(x: i32) -> __m512i {
        _mm512_set1_epi32(x)
    }
    #[inline(always)]
    unsafe fn dot_half_block<const BITS: usize>(mut sums: __m512i, w: [__m512i; 4], q: *const i8) -> __m512i {
        for (v, w) in w.into_iter().enumerate() {
            let a = _mm512_set1_epi32(q.cast::<i32>().add(v).read_unaligned());
            sums = _mm512_dpbusd_epi32(sums, w, a);
        }
        sums
    }
    #[inline(always)]
    unsafe fn sums_to_floats(sums: __m512i) -> __m512 {
        _mm512_cvtepi32_ps(sums)
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        _mm512_set1_ps(x)
    }
    #[inline(always)]
    unsafe fn load_floats(p: *const f32) -> __m512 {
        _mm512_loadu_ps(p)
    }
    #[inline(always)]
    unsafe fn store(x: __m512, p: *mut f32) {
        _mm512_storeu_ps(p, x)
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const u8) -> __m512 {
        _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> [__m512; 2] {
        let x = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()));
        let low = _mm512_and_si512(x, _mm512_set1_epi32(15));
        [_mm512_cvtepi32_ps(low), _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(x))]
    }
    #[inline(always)]
    unsafe fn load_exponents(p: *const u8) -> __m512 {
        let x = _mm512_slli_epi32::<23>(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())));
        _mm512_castsi512_ps(_mm512_max_epi32(x, _mm512_set1_epi32(1 << 22)))
    }
    #[inline(always)]
    unsafe fn load_minifloats(p: *const u8) -> __m512 {
        _mm512_cvtph_ps(_mm256_slli_epi16::<7>(_mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()))))
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        _mm512_mul_ps(a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        _mm512_fmadd_ps(a, b, c)
    }
    #[inline(always)]
    unsafe fn sum_bytes(q: *const i8) -> i32 {
        super::avx2::sum_bytes(q)
    }
}

/// Blocks of activations that stay in the first-level cache while all groups are multiplied with them: 32 of each of
/// eight tokens, 256 of one. With 32 of one token, groups alternate too often to be prefetched: four groups of Q4_K in
/// memory at 18 GB/s instead of 29.
const SWEEP: usize = 256;

/// Data of blocks that the kernel needs besides [`ActBlock`], for a sweep of `T` tokens: the initial values of
/// [`add_block`].
struct SumStarts<const T: usize>([[MaybeUninit<[i32; 4]>; SWEEP / 4]; 2]);

impl<const T: usize> SumStarts<T> {
    /// Blocks of each token, whole runs.
    const BLOCKS: usize = SWEEP / T / RUN * RUN;

    /// Entry of block `b` of token `t`.
    #[inline(always)]
    unsafe fn at(&self, half: usize, t: usize, b: usize) -> *const i32 {
        self.0[half].as_ptr().cast::<i32>().add(t * Self::BLOCKS + b)
    }

    /// Entries of block `b` of token `t` and the next three.
    #[inline(always)]
    fn four(&mut self, half: usize, t: usize, b: usize) -> *mut __m128i {
        self.0[half][(t * Self::BLOCKS + b) / 4].as_mut_ptr().cast()
    }
}

/// Like [`super::kernel::tile`], for all sixteen rows at once; activations are read in place. Missing tokens of `T` are
/// computed as copies of the last one and not stored.
///
/// # Safety
///
/// The CPU has the features of `Isa::Avx512`; the rest as for [`super::kernel::tile`].
#[inline(always)]
pub unsafe fn tile<const F: usize, const T: usize>(w: Groups<'_>, x: Tokens<'_>, out: *mut [f32; 16]) {
    const { assert!(T <= 8 && SumStarts::<T>::BLOCKS.is_multiple_of(RUN)) };
    let (quants, scales) = Format::ALL[F].group_bytes(w.blocks * BLOCK);
    let mut starts = SumStarts::<T>([[MaybeUninit::uninit(); SWEEP / 4]; 2]);
    let acts: [*const ActBlock; T] =
        std::array::from_fn(|t| x.activations.as_ptr().wrapping_add(t.min(x.count - 1) * w.blocks));
    for first in (0..w.blocks).step_by(SumStarts::<T>::BLOCKS) {
        let blocks = first..w.blocks.min(first + SumStarts::<T>::BLOCKS);
        for (t, start) in acts.iter().enumerate() {
            prepare_acts::<F, T>(&mut starts, t, start.add(first), blocks.len());
        }
        for g in 0..w.groups {
            let at = Format::ALL[F].group_bytes(first * BLOCK);
            let (quants, scales) =
                (w.quants.as_ptr().add(g * quants + at.0), w.scales.as_ptr().add(g * scales + at.1));
            let out = out.add(g * x.total + x.first).cast::<f32>();
            sweep::<F, T>((quants, scales), (acts, &starts), blocks.clone(), (out, x.count));
        }
    }
}

/// Fills in the entries of token `t` for `n` blocks at `acts`.
#[inline(always)]
unsafe fn prepare_acts<const F: usize, const T: usize>(
    starts: &mut SumStarts<T>,
    t: usize,
    acts: *const ActBlock,
    n: usize,
) {
    let format = const { Format::ALL[F] };
    for b in (0..n).step_by(4) {
        let act = |i: usize| acts.add((b + i).min(n - 1));
        let pair = |i: usize| _mm_castsi128_ps(_mm_loadl_epi64((&raw const (*act(i)).d).cast()));
        let (low, high) = (_mm_movelh_ps(pair(0), pair(1)), _mm_movelh_ps(pair(2), pair(3)));
        let d = _mm_shuffle_ps::<0b10_00_10_00>(low, high);
        let offset = _mm_castps_si128(_mm_shuffle_ps::<0b11_01_11_01>(low, high));
        let float = |sums: __m128i| _mm_castps_si128(_mm_cvtepi32_ps(sums));
        let start = |sums: __m128i| {
            let zero_point = zero_point::<SixteenRows, F>();
            _mm_mullo_epi32(sums, _mm_set1_epi32(-zero_point))
        };
        let sum = _mm_sub_epi32(_mm_setzero_si128(), _mm_srai_epi32::<3>(offset));
        if format.has_half_scales() {
            let sums = |i: usize| {
                let q = _mm_loadu_si128((&raw const (*act(i)).q).cast());
                _mm_dpbusd_epi32(_mm_setzero_si128(), _mm_set1_epi8(1), q)
            };
            let first = _mm_hadd_epi32(_mm_hadd_epi32(sums(0), sums(1)), _mm_hadd_epi32(sums(2), sums(3)));
            let of = |sums| if format.has_minimum() { float(sums) } else { start(sums) };
            _mm_storeu_si128(starts.four(0, t, b), of(first));
            _mm_storeu_si128(starts.four(1, t, b), of(_mm_sub_epi32(sum, first)));
            continue;
        }
        let sign = if format.scale_kind() == ScaleKind::BlockMinimums { -1.0 } else { 1.0 };
        let factor = _mm_mul_ps(_mm_mul_ps(d, _mm_cvtepi32_ps(sum)), _mm_set1_ps(sign));
        let first = if format.has_minimum() { _mm_castps_si128(factor) } else { start(sum) };
        _mm_storeu_si128(starts.four(0, t, b), first);
    }
}

/// Adds some blocks of one group to the sums of `count` tokens at `out`, `[token][row]`.
///
/// `quants`, `scales` and `starts` begin at the first of these blocks, `acts` at the first block of the matrix.
#[inline(always)]
unsafe fn sweep<const F: usize, const T: usize>(
    (mut quants, mut scales): (*const u8, *const u8),
    (acts, starts): ([*const ActBlock; T], &SumStarts<T>),
    blocks: Range<usize>,
    (out, count): (*mut f32, usize),
) {
    let format = const { Format::ALL[F] };
    let (mut acc, near) = ([_mm512_setzero_ps(); T], prefetch_distance(T));
    if blocks.start > 0 {
        unrolled!(T, |t| {
            if t < count {
                acc[t] = _mm512_loadu_ps(out.add(16 * t));
            }
        });
    }
    for run in blocks.clone().step_by(RUN) {
        for b in 0..RUN.min(blocks.end - run) {
            prefetch_block::<F>(quants, scales, b, near);
            let w = unpack::<SixteenRows, F>(quants.add(b * format.quant_bytes()));
            let block_scales = load_scales::<SixteenRows, F>(scales, 0, b);
            let at = run - blocks.start + b;
            unrolled!(T, |t| {
                let act = &*acts[t].add(run + b);
                // The second one is not filled in, and not used, if a block has one scale.
                let second = if format.has_half_scales() { *starts.at(1, t, at) } else { 0 };
                let x = (act.q.as_ptr(), act.d, [*starts.at(0, t, at), second]);
                acc[t] = add_block::<SixteenRows, F>(acc[t], &w, &block_scales, x);
            });
        }
        quants = quants.add(RUN * format.quant_bytes());
        scales = scales.add(RUN * BLOCK / format.scale_span() * format.scale_bytes());
    }
    unrolled!(T, |t| {
        if t < count {
            _mm512_storeu_ps(out.add(16 * t), acc[t]);
        }
    });
}
