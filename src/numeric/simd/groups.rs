//! Groups of sixteen rows of a quantised matrix, as the kernels of products take them.

#[cfg(target_arch = "x86_64")]
use super::prefetch;
use crate::quant::format::Format;
#[cfg(target_arch = "x86_64")]
use files::blocks::BLOCK;
#[cfg(target_arch = "x86_64")]
use std::sync::LazyLock;

/// Most groups of rows that [`Isa::tile`](super::Isa::tile) names. Activations that are laid out for a kernel serve all
/// of them.
pub const MOST_GROUPS: usize = 4;

/// Q4_0 in [`Format::ALL`].
#[cfg(target_arch = "x86_64")]
pub(super) const Q4: usize = Format::Q4_0 as usize;
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

/// How many bytes of quants ahead a kernel prefetches into the second-level cache.
#[cfg(target_arch = "x86_64")]
const FAR: usize = 4096;

/// How many bytes of quants ahead a kernel for `tokens` prefetches into the first-level cache, on this CPU.
///
/// The arithmetic fills the reorder buffer, so loads alone do not reach far enough ahead to keep memory busy. Share of
/// the bandwidth of plain reading on an Emerald Rapids Xeon, with 1 and 2 threads: no prefetch 72 and 75 %; 4 KiB ahead
/// into the first level 91 and 92 %; 4 KiB ahead into the second level and 1 KiB ahead into the first 95 and 97 %. Not
/// better: 8 KiB, or two to eight groups side by side. Much worse, 36 %: non-temporal prefetches.
///
/// Zen 4 fetches little at a time for prefetches into the second level. GB/s of Q4_0 in memory, 2,048 and 8,192
/// columns, with one thread of an EPYC 9004, which reads 34:
///
/// | tokens | none | 1 KiB | 2 KiB | 4 KiB | 6 KiB |
/// |---|---|---|---|---|---|
/// | 1 | 29 and 27 | 28 and 23 | 30 and 29 | 33 and 32 | 31 and 28 |
/// | 2 | | 28 and 21 | 29 and 25 | 31 and 26 | |
/// | 4 | | 22 and 22 | 21 and 17 | 22 and 17 | |
///
/// More activations and what is prefetched do not fit the first level together.
#[cfg(target_arch = "x86_64")]
pub(super) fn near(tokens: usize) -> usize {
    static AMD: LazyLock<bool> = LazyLock::new(is_amd);
    if tokens <= 2 && *AMD { FAR } else { 1024 }
}

#[cfg(target_arch = "x86_64")]
fn is_amd() -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
}

/// Prefetches what a kernel reads soon after block `b`, counted from where `quants` and `scales` begin, of the format
/// whose index in [`Format::ALL`] is `F`. `near` is [`near`]. Past the end of a group lies the group that this thread
/// takes next.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
pub(super) fn ahead<const F: usize>(quants: *const u8, scales: *const u8, b: usize, near: usize) {
    let format = const { Format::ALL[F] };
    let bytes = format.quant_bytes();
    let quants = quants.wrapping_add(b * bytes);
    for line in 0..bytes / 64 {
        prefetch::<2>(quants.wrapping_add(FAR + 64 * line));
        prefetch::<1>(quants.wrapping_add(near + 64 * line));
    }
    // Of scales that several blocks share, a block's part.
    let each = format.scale_bytes() * BLOCK / format.span();
    let scales = scales.wrapping_add(b * each);
    prefetch::<2>(scales.wrapping_add(FAR / bytes * each));
    prefetch::<1>(scales.wrapping_add(near / bytes * each));
}
