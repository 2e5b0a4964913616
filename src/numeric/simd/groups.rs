//! Groups of sixteen rows of a quantised matrix, the input of product kernels, and their prefetching.

#[cfg(target_arch = "x86_64")]
use super::prefetch;
use crate::quant::format::Format;
use files::blocks::BLOCK;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

/// Maximum groups of rows that [`Isa::tile_shape`](super::Isa::tile_shape) returns. They share the activations laid out
/// for a kernel.
pub const MOST_GROUPS: usize = 4;

/// Index of Q4_0 in [`Format::ALL`].
pub(super) const Q4: usize = Format::Q4_0 as usize;
/// Index of IQ4_NL, which has the layout of Q4_0 and levels of a table.
pub(super) const IQ4: usize = Format::IQ4_NL as usize;
/// Bytes of quants of one group and one block of Q4_0.
pub(super) const QUANT_BYTES: usize = Format::Q4_0.quant_bytes();
/// Index of IQ4_XS, which has the quants of IQ4_NL.
pub(super) const IQ4_XS: usize = Format::IQ4_XS as usize;
/// Bytes of scales of one group and one block of Q4_0.
#[cfg(target_arch = "x86_64")]
pub(super) const SCALE_BYTES: usize = Format::Q4_0.scale_bytes();

/// Consecutive groups of sixteen rows of a matrix, in the layout of [`format`](crate::quant::format).
#[derive(Clone, Copy)]
pub struct Groups<'a> {
    pub format: Format,
    /// `[group][block][quant_bytes]`
    pub quants: &'a [u8],
    /// `[group][span][scale_bytes]`
    pub scales: &'a [u8],
    /// Number of groups.
    pub groups: usize,
    /// Blocks of 32 columns.
    pub blocks: usize,
}

/// Levels of the nibbles of `F`, a format of which [`Format::reads_tiles`] is true, with the zero point of Q4_0 added;
/// they fit i8. `None` for Q4_0, whose nibbles are its levels.
pub(super) const fn level_table<const F: usize>() -> Option<[u8; 16]> {
    let Some(levels) = Format::ALL[F].code_levels() else { return None };
    let (mut table, mut i) = ([0; 16], 0);
    while i < 16 {
        table[i] = (levels[i] as i32 + Format::Q4_0.zero_point()) as u8;
        i += 1;
    }
    Some(table)
}

/// One group in a format of which [`Format::reads_tiles`] is true.
#[derive(Clone, Copy)]
pub(super) struct Q4Group<'a> {
    /// `[block][256]`
    pub quants: &'a [u8],
    /// `[span][scale_bytes]`
    pub scales: &'a [u8],
    /// Blocks of 32 columns.
    pub blocks: usize,
}

impl<'a> Groups<'a> {
    /// Returns some of the groups.
    #[cfg(target_arch = "aarch64")]
    pub(super) fn part(&self, groups: std::ops::Range<usize>) -> Self {
        let plane = |plane: &'a [u8], bytes| &plane[groups.start * bytes..groups.end * bytes];
        let (quants, scales) = self.format.group_bytes(self.blocks * BLOCK);
        let (quants, scales) = (plane(self.quants, quants), plane(self.scales, scales));
        Self { quants, scales, groups: groups.len(), ..*self }
    }

    /// Returns one of the groups of a format of which [`Format::reads_tiles`] is true.
    #[inline(always)]
    pub(super) fn q4(&self, g: usize) -> Q4Group<'a> {
        let (quants, scales) = self.format.group_bytes(self.blocks * BLOCK);
        Q4Group {
            quants: &self.quants[g * quants..][..quants],
            scales: &self.scales[g * scales..][..scales],
            blocks: self.blocks,
        }
    }
}

/// Distance in bytes of quants at which a kernel prefetches into the second-level cache.
#[cfg(target_arch = "x86_64")]
const FAR: usize = 4096;

/// Distance in bytes of quants at which a kernel for `tokens` prefetches into the first-level cache on this CPU.
///
/// The arithmetic fills the reorder buffer, so loads alone do not reach far enough ahead to keep memory busy. Share of
/// the read bandwidth on an Emerald Rapids Xeon, with 1 and 2 threads: no prefetch 72 and 75 %; 4 KiB ahead into the
/// first level 91 and 92 %; 4 KiB ahead into the second level and 1 KiB ahead into the first 95 and 97 %. Not better:
/// 8 KiB, or two to eight groups side by side. Much worse, 36 %: non-temporal prefetches.
///
/// Zen 4 handles few prefetches into the second level at a time. GB/s of Q4_0 in memory, 2,048 and 8,192 columns, with
/// one thread of an EPYC 9004, whose read bandwidth is 34:
///
/// | tokens | none | 1 KiB | 2 KiB | 4 KiB | 6 KiB |
/// |---|---|---|---|---|---|
/// | 1 | 29 and 27 | 28 and 23 | 30 and 29 | 33 and 32 | 31 and 28 |
/// | 2 | | 28 and 21 | 29 and 25 | 31 and 26 | |
/// | 4 | | 22 and 22 | 21 and 17 | 22 and 17 | |
///
/// The activations of more tokens and the prefetched bytes do not fit in the first level together.
#[cfg(target_arch = "x86_64")]
pub(super) fn prefetch_distance(tokens: usize) -> usize {
    static AMD: LazyLock<bool> = LazyLock::new(is_amd);
    if tokens <= 2 && *AMD { FAR } else { 1024 }
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

/// Prefetches the bytes that a kernel reads soon after block `b`, counted from the start of `quants` and `scales`. `F`
/// is the format's index in [`Format::ALL`], `near` the result of [`prefetch_distance`]. After the end of a group comes
/// the group that this thread takes next.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn prefetch_block<const F: usize>(quants: *const u8, scales: *const u8, b: usize, near: usize) {
    let format = const { Format::ALL[F] };
    let bytes = format.quant_bytes();
    let quants = quants.wrapping_add(b * bytes);
    for line in 0..bytes / 64 {
        prefetch::<2>(quants.wrapping_add(FAR + 64 * line));
        prefetch::<1>(quants.wrapping_add(near + 64 * line));
    }
    // If several blocks share scales, a block's part of them.
    let each = format.scale_bytes() * BLOCK / format.scale_span();
    let scales = scales.wrapping_add(b * each);
    prefetch::<2>(scales.wrapping_add(FAR / bytes * each));
    prefetch::<1>(scales.wrapping_add(near / bytes * each));
}
