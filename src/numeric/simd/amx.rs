//! AMX: products in Q4_0, IQ4_NL and IQ4_XS of sixteen tokens and sixteen rows with `tdpbssd`.
//!
//! A block of 32 columns fills half the depth of a tile, because each block has its own scales: the sums of one block
//! go from the tile to memory and from there, scaled, into sixteen AVX-512 registers. Weights are unpacked to signed
//! bytes once for all tokens; a packed vector of sixteen rows and four columns becomes one row of the tile. Activations
//! have been interleaved to tiles before ([`super::products::interleave`]).
//!
//! Cycles of an Emerald Rapids core per block of a tile (fastest of sixteen cores; the half of them whose other
//! hyper-thread was busy took 1.4 times as long):
//!
//! - The tile instructions alone take 25, the scaling alone 24: 48 vector operations on two ports.
//! - During tile instructions one of these ports does only integers and shuffles, so both together take at least 48. In
//!   the order below they take 49 to 55. A long prompt runs at a lower clock, where 48 cycles would be 0.76 TOPS per
//!   core; 0.70 to 0.73 were measured.
//! - The order matters: scaling in one piece after the tile instructions takes 66 (on the cores with a busy
//!   hyper-thread 103 instead of 70). Rows of activations that are 40 bytes apart and cross cache lines also take 66.
//! - `tdpbf16ps` gives exact float sums of such small integers and saves a third of the vector operations, but its
//!   operands are twice as large: 60 and more.
//!
//! The tile instructions are `asm!`, which also keeps the compiler from moving them across `ldtilecfg`.

use super::block_formats::{SixteenRows, load_scales};
use super::groups::{Groups, MOST_GROUPS, Q4Group, QUANT_BYTES, level_table};
use crate::quant::activations::ActTile;
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Tokens of one tile.
const TOKENS: usize = ActTile::TOKENS;
/// Number of blocks whose weights are unpacked at once.
const DEPTH: usize = 64;
/// Number of blocks between the multiplication of a block and its scaling.
const LAG: usize = 3;

/// Returns true if the CPU has AMX for bytes and the operating system lets this process use it.
pub fn is_amx_granted() -> bool {
    const TILE: u32 = 1 << 24;
    const INT8: u32 = 1 << 25;
    const TILE_STATE: u64 = 0b11 << 17;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    if __cpuid_count(7, 0).edx & (TILE | INT8) != (TILE | INT8) {
        return false;
    }
    // SAFETY: a CPU with AMX has XGETBV, and every operating system that exposes AMX to programs enables it.
    let enabled = __cpuid(1).ecx & (1 << 27) != 0 && unsafe { xcr0() } & TILE_STATE == TILE_STATE;
    // SAFETY: requests a permission for the process and accesses none of its memory. Requesting twice is harmless.
    enabled && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

#[target_feature(enable = "xsave")]
fn xcr0() -> u64 {
    // SAFETY: register 0 exists wherever XGETBV does.
    unsafe { _xgetbv(0) }
}

/// Weights of one block and group: eight rows of a tile, then the scales.
#[repr(C, align(64))]
struct Unpacked {
    /// `[columns 4k .. 4k + 4][row][column]`
    quants: [[i8; 64]; 8],
    /// `[row]`
    scales: [f32; 16],
}

/// A tile of sums: `[token][row]`
#[repr(C, align(64))]
struct Sums([[i32; 16]; TOKENS]);

/// The operand of `ldtilecfg`: palette 1 and the shape of each tile.
#[repr(C, align(64))]
struct TileConfig([u8; 64]);

impl TileConfig {
    /// Takes the number of rows and the bytes of a row for each tile.
    const fn new(shapes: [(u8, u8); 6]) -> Self {
        let mut c = [0; 64];
        c[0] = 1;
        let mut tile = 0;
        while tile < shapes.len() {
            (c[48 + tile], c[16 + 2 * tile]) = shapes[tile];
            tile += 1;
        }
        Self(c)
    }
}

/// Two sets of activations, weights and sums.
static CONFIG: TileConfig = TileConfig::new([(16, 32), (8, 64), (16, 64), (16, 32), (8, 64), (16, 64)]);
/// Six whole tiles.
static WHOLE: TileConfig = TileConfig::new([(16, 64); 6]);

/// Multiplies the groups of `w` with whole tiles of tokens: `out[group][token]`. Returns the number of tokens done: all
/// in `tiles`, which is `[tile][block]`, or none if there are too few blocks.
///
/// # Safety
///
/// [`is_amx_granted`] is true. `w.quants` and `w.scales` hold the groups, `tiles` holds rows of `w.blocks` blocks,
/// `out` holds `tokens` rows for each group, and the tiles have no more tokens than that.
// Not inlined: otherwise its 144 KiB of buffers are on the stack of every product, and each call touches them page by
// page. The story model generates 1.34 times as fast this way.
#[inline(never)]
pub unsafe fn q4<const F: usize>(
    w: Groups<'_>,
    tiles: &[ActTile],
    tokens: usize,
    out: *mut [f32; 16],
) -> usize {
    let blocks = w.blocks;
    let whole = tiles.len() / blocks;
    if whole == 0 {
        return 0;
    }
    // Parts of nearly equal depth.
    let depth = blocks.div_ceil(blocks.div_ceil(DEPTH));
    if (blocks - 1) % depth + 1 < LAG {
        return 0;
    }
    assert!(w.groups <= MOST_GROUPS);
    let mut panel = MaybeUninit::<[Unpacked; MOST_GROUPS * DEPTH]>::uninit();
    let panel: *mut Unpacked = panel.as_mut_ptr().cast();
    asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly, preserves_flags));
    for g in 0..w.groups {
        out.add(g * tokens).write_bytes(0, whole * TOKENS);
    }
    for from in (0..blocks).step_by(depth) {
        let depth = depth.min(blocks - from);
        for g in 0..w.groups {
            unpack::<F>(w.q4(g), from..from + depth, panel.add(g * DEPTH));
        }
        let tiles = (tiles.as_ptr().add(from), blocks, whole);
        add_products((panel, w.groups, depth), tiles, (out, tokens));
    }
    asm!("tilerelease", options(nostack, nomem, preserves_flags));
    whole * TOKENS
}

/// Unpacks the weights and scales of some blocks of `w` into `panel`, which has room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<const F: usize>(w: Q4Group<'_>, blocks: Range<usize>, panel: *mut Unpacked) {
    let (mask, eight) = (_mm512_set1_epi8(15), _mm512_set1_epi8(8));
    for (i, b) in blocks.enumerate() {
        let to = &raw mut (*panel.add(i)).quants;
        for v in 0..4 {
            let x = _mm512_loadu_si512(w.quants.as_ptr().add(b * QUANT_BYTES + v * 64).cast());
            let (mut low, mut high) =
                (_mm512_and_si512(x, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(x), mask));
            if let Some(table) = const { level_table::<F>() } {
                let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
                (low, high) = (_mm512_shuffle_epi8(table, low), _mm512_shuffle_epi8(table, high));
            }
            let (low, high) = (_mm512_sub_epi8(low, eight), _mm512_sub_epi8(high, eight));
            _mm512_store_si512(to.cast::<__m512i>().add(v), low);
            _mm512_store_si512(to.cast::<__m512i>().add(4 + v), high);
        }
        let scale = load_scales::<SixteenRows, F>(w.scales.as_ptr(), 0, b).d;
        _mm512_store_ps((&raw mut (*panel.add(i)).scales).cast(), scale);
    }
}

/// Adds the products of `depth` blocks of each group, [`DEPTH`] apart, and of each of `whole` rows of tiles,
/// `stride` apart, to `out[group][token]`, `tokens` apart.
///
/// The work is one sequence of steps. Each step multiplies a block, stores the sums of the previous block, and scales
/// those of the block [`LAG`] steps before. The sequence continues across the ends of tiles.
///
/// # Safety
///
/// The pointers lead to as many blocks, tiles and rows as these numbers say, `LAG <= depth <= DEPTH`, the tiles are
/// configured by [`CONFIG`], and no other code changes them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn add_products(
    (panel, groups, depth): (*const Unpacked, usize, usize),
    (tiles, stride, whole): (*const ActTile, usize, usize),
    (out, tokens): (*mut [f32; 16], usize),
) {
    let mut sums = MaybeUninit::<[Sums; LAG + 1]>::uninit();
    let sums: *mut Sums = sums.as_mut_ptr().cast();
    let mut acc = [_mm512_setzero_ps(); TOKENS];
    macro_rules! load {
        ($tile:tt, $from:expr, $pitch:literal) => {
            asm!(
                concat!("tileloadd ", $tile, ", [{from} + {pitch}]"),
                from = in(reg) $from,
                pitch = in(reg) $pitch as usize,
                out($tile) _,
                options(nostack, preserves_flags),
            )
        };
    }
    macro_rules! multiply {
        ($x:tt, $w:tt, $sum:tt) => {
            asm!(
                concat!("tilezero ", $sum),
                concat!("tdpbssd ", $sum, ", ", $x, ", ", $w),
                out($sum) _,
                options(nostack, preserves_flags),
            )
        };
    }
    macro_rules! store {
        ($step:expr, $sum:tt) => {
            asm!(
                concat!("tilestored [{to} + {pitch}], ", $sum),
                to = in(reg) sums.add($step % (LAG + 1)),
                pitch = in(reg) 64usize,
                options(nostack, preserves_flags),
            )
        };
    }
    macro_rules! scale {
        ($step:expr, $of:expr, $($t:literal)*) => {{
            let sums = sums.add($step % (LAG + 1)).cast::<__m512i>();
            let scale = _mm512_load_ps((*$of.0).scales.as_ptr());
            let ds = (&raw const (*$of.1).d).cast::<f32>();
            $(
                let d = _mm512_mul_ps(scale, _mm512_set1_ps(ds.add($t).read()));
                let sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums.add($t)));
                acc[$t] = _mm512_fmadd_ps(sum, d, acc[$t]);
            )*
        }};
    }
    // Two sets of tiles in turn.
    macro_rules! by_turns {
        ($do:ident, $step:expr, $($what:expr),*) => {
            if $step % 2 == 0 {
                $do!(("tmm0", "tmm1", "tmm2"), "tmm5", $step, $($what),*)
            } else {
                $do!(("tmm3", "tmm4", "tmm5"), "tmm2", $step, $($what),*)
            }
        };
    }
    macro_rules! begin {
        (($x:tt, $w:tt, $sum:tt), $before:tt, $step:expr, $block:expr) => {{
            load!($x, $block.1, 32);
            load!($w, $block.0, 64);
            multiply!($x, $w, $sum);
            if $step > 0 {
                store!($step - 1, $before);
            }
        }};
    }
    macro_rules! both {
        (($x:tt, $w:tt, $sum:tt), $before:tt, $step:expr, $block:expr, $earlier:expr) => {{
            load!($x, $block.1, 32);
            scale!($step - LAG, $earlier, 0 1 2 3);
            load!($w, $block.0, 64);
            scale!($step - LAG, $earlier, 4 5 6 7);
            multiply!($x, $w, $sum);
            scale!($step - LAG, $earlier, 8 9 10 11);
            store!($step - 1, $before);
            scale!($step - LAG, $earlier, 12 13 14 15);
        }};
    }
    macro_rules! end {
        ($tiles:tt, $before:tt, $step:expr, ) => {
            store!($step - 1, $before)
        };
    }
    let mut step = 0;
    // The tile whose last blocks are not scaled yet, and the destination of its sums.
    let mut earlier: Option<(*const Unpacked, *const ActTile, *mut [f32; 16])> = None;
    for t in 0..whole {
        for g in 0..groups {
            let (w, x) = (panel.add(g * DEPTH), tiles.add(t * stride));
            for b in 0..LAG {
                let block = (w.add(b), x.add(b));
                if let Some((w, x, _)) = earlier {
                    let earlier = (w.add(depth - LAG + b), x.add(depth - LAG + b));
                    by_turns!(both, step, block, earlier);
                } else {
                    by_turns!(begin, step, block);
                }
                step += 1;
            }
            let out = out.add(g * tokens + t * TOKENS);
            let before = earlier.map(|(_, _, out)| out);
            for (t, acc) in acc.iter_mut().enumerate() {
                if let Some(before) = before {
                    _mm512_storeu_ps(before.add(t).cast(), *acc);
                }
                *acc = _mm512_loadu_ps(out.add(t).cast());
            }
            for b in LAG..depth {
                let block = (w.add(b), x.add(b));
                let earlier = (w.add(b - LAG), x.add(b - LAG));
                by_turns!(both, step, block, earlier);
                step += 1;
            }
            earlier = Some((w, x, out));
        }
    }
    let Some((w, x, out)) = earlier else { return };
    by_turns!(end, step,);
    for b in depth - LAG..depth {
        let last = (w.add(b), x.add(b));
        scale!(step - depth + b, last, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }
    for (t, acc) in acc.iter().enumerate() {
        _mm512_storeu_ps(out.add(t).cast(), *acc);
    }
}

/// Multiplies two whole tiles twelve times per round, adding to four others in turn. Returns the sum over these. `a` is
/// repeated along the columns of the first tile, `b` along the rows of the second.
///
/// # Safety
///
/// [`is_amx_granted`] is true.
pub unsafe fn multiply_tiles(rounds: u64, (a, b): ([i8; 8], [i8; 8])) -> i64 {
    let x = [[a; 8]; 16];
    let w: [[[i8; 4]; 16]; 16] = std::array::from_fn(|k| {
        let four = std::array::from_fn(|i| b[(4 * k + i) % 8]);
        [four; 16]
    });
    let mut sums = [[[0i32; 16]; 16]; 4];
    let out = sums.as_mut_ptr();
    asm!(
        "ldtilecfg [{config}]",
        "tileloadd tmm0, [{x} + {line}]",
        "tileloadd tmm1, [{w} + {line}]",
        "tilezero tmm2", "tilezero tmm3", "tilezero tmm4", "tilezero tmm5",
        "test {rounds}, {rounds}",
        "jz 3f",
        "2:",
        "tdpbssd tmm2, tmm0, tmm1", "tdpbssd tmm3, tmm0, tmm1",
        "tdpbssd tmm4, tmm0, tmm1", "tdpbssd tmm5, tmm0, tmm1",
        "tdpbssd tmm2, tmm0, tmm1", "tdpbssd tmm3, tmm0, tmm1",
        "tdpbssd tmm4, tmm0, tmm1", "tdpbssd tmm5, tmm0, tmm1",
        "tdpbssd tmm2, tmm0, tmm1", "tdpbssd tmm3, tmm0, tmm1",
        "tdpbssd tmm4, tmm0, tmm1", "tdpbssd tmm5, tmm0, tmm1",
        "dec {rounds}",
        "jnz 2b",
        "3:",
        "tilestored [{a} + {line}], tmm2", "tilestored [{b} + {line}], tmm3",
        "tilestored [{c} + {line}], tmm4", "tilestored [{d} + {line}], tmm5",
        "tilerelease",
        config = in(reg) &raw const WHOLE,
        x = in(reg) x.as_ptr(), w = in(reg) w.as_ptr(), line = in(reg) 64usize,
        rounds = inout(reg) rounds => _,
        a = in(reg) out, b = in(reg) out.add(1), c = in(reg) out.add(2), d = in(reg) out.add(3),
        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
        options(nostack),
    );
    sums.as_flattened().as_flattened().iter().map(|&x| i64::from(x)).sum()
}
