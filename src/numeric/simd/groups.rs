//! Groups of sixteen rows of a quantised matrix, as the kernels of products take them.

#[cfg(target_arch = "x86_64")]
use super::prefetch;
use crate::quant::format::Format;

/// Most groups of rows that [`Isa::tile`](super::Isa::tile) names. Activations that are laid out for a kernel serve all
/// of them.
pub const MOST_GROUPS: usize = 4;

/// Bytes of quants of one group and one block of Q4_0.
pub(super) const QUANT_BYTES: usize = Format::Q4_0.quant_bytes();
/// Bytes of scales of one group and one block of Q4_0.
pub(super) const SCALE_BYTES: usize = Format::Q4_0.scale_bytes();

/// Consecutive groups of sixteen rows of a matrix, in the layout of [`format`](crate::quant::format).
#[derive(Clone, Copy)]
pub struct Groups<'a> {
    /// How they are stored.
    pub format: Format,
    /// `[group][block][quant_bytes]`
    pub quants: &'a [u8],
    /// `[group][span][scale_bytes]`
    pub scales: &'a [u8],
    /// Number of groups.
    pub groups: usize,
    /// Blocks of 32 columns, whole spans.
    pub blocks: usize,
}

/// One group of Q4_0, as the kernels take it.
#[derive(Clone, Copy)]
pub(super) struct Q4Group<'a> {
    /// `[block][256]`
    pub quants: &'a [u8],
    /// `[block][16]` f16.
    pub scales: &'a [u8],
    /// Blocks of 32 columns.
    pub blocks: usize,
}

impl<'a> Groups<'a> {
    /// Some of the groups, of Q4_0.
    #[cfg(target_arch = "aarch64")]
    pub(super) fn part(&self, groups: std::ops::Range<usize>) -> Self {
        let plane = |plane: &'a [u8], bytes| &plane[groups.start * bytes..groups.end * bytes];
        let quants = plane(self.quants, self.blocks * QUANT_BYTES);
        let scales = plane(self.scales, self.blocks * SCALE_BYTES);
        Self { quants, scales, groups: groups.len(), ..*self }
    }

    /// One of the groups, of Q4_0.
    #[inline(always)]
    pub(super) fn q4(&self, g: usize) -> Q4Group<'a> {
        let (quants, scales) = (self.blocks * QUANT_BYTES, self.blocks * SCALE_BYTES);
        Q4Group {
            quants: &self.quants[g * quants..][..quants],
            scales: &self.scales[g * scales..][..scales],
            blocks: self.blocks,
        }
    }
}

/// Prefetches what a kernel reads soon: four lines of quants and half a line of scales. What is 4 KiB ahead goes into
/// the second-level cache, what is 1 KiB ahead into the first. Past the end of a group lies the group that this thread
/// takes next.
///
/// The arithmetic fills the reorder buffer, so loads alone do not reach far enough ahead to keep memory busy. Share of
/// the bandwidth of plain reading on an Emerald Rapids Xeon, with 1 and 2 threads: no prefetch 72 and 75 %; 4 KiB ahead
/// into the first level 91 and 92 %; these two 95 and 97 %. Not better: 8 KiB, or two to eight groups side by side.
/// Much worse, 36 %: non-temporal prefetches. On a Zen 4 EPYC, 4 KiB ahead straight into the first level is a fifth
/// faster in a loop over this kernel, but a tenth slower in decode.
///
/// For several tokens, whose arithmetic fills the buffer all the more, a loop over weights in memory on one thread of
/// that EPYC took, without and with them: 4 tokens 22.0 and 16.0 ns a block, 8 tokens 37.0 and 26.2, 16 tokens 56.8 and
/// 50.2. A prompt's tiles, which find most weights in the second-level cache, lost nothing beyond the noise. AVX2 has
/// them for one token only.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn ahead(quants: *const u8, scales: *const u8) {
    const FAR: usize = 4096;
    const NEAR: usize = 1024;
    for line in 0..4 {
        prefetch::<2>(quants.wrapping_add(FAR + 64 * line));
        prefetch::<1>(quants.wrapping_add(NEAR + 64 * line));
    }
    prefetch::<2>(scales.wrapping_add(FAR / 8));
    prefetch::<1>(scales.wrapping_add(NEAR / 8));
}
