//! A matrix in the packed layout of [`format`](super::format).

use super::format::{Format, GROUP_ROWS};
use files::blocks::BLOCK;
use files::mapped::MappedSlice;
use std::ops::Range;

/// A `ROWS` x `COLS` matrix. `COLS` is a multiple of 32.
#[derive(Clone)]
pub struct QuantMatrix<const ROWS: usize, const COLS: usize> {
    format: Format,
    quants: MappedSlice, // [group][block][quant_bytes]
    scales: MappedSlice, // [group][span][scale_bytes]
}

impl<const ROWS: usize, const COLS: usize> QuantMatrix<ROWS, COLS> {
    /// Groups of 16 rows.
    const GROUPS: usize = ROWS.div_ceil(GROUP_ROWS);

    /// Wraps the two planes; `None` if a length does not match format and shape.
    pub fn new(format: Format, quants: MappedSlice, scales: MappedSlice) -> Option<Self> {
        let (of_quants, of_scales) = format.group_bytes(COLS);
        let fits = COLS.is_multiple_of(BLOCK)
            && quants.bytes().len() == Self::GROUPS * of_quants
            && scales.bytes().len() >= Self::GROUPS * of_scales;
        fits.then_some(Self { format, quants, scales })
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Decodes one row into `x` of `COLS` values, equal to those of the file.
    pub fn decode_row(&self, row: usize, x: &mut [f32]) {
        assert!(row < ROWS && x.len() == COLS);
        let (group, lane) = (row / GROUP_ROWS, row % GROUP_ROWS);
        let (quants, scales) = (self.quants(group..group + 1), self.scales(group..group + 1));
        let (blocks, levels) = (quants.chunks_exact(self.format.quant_bytes()), self.format.code_levels());
        for (b, (quants, x)) in blocks.zip(x.as_chunks_mut::<BLOCK>().0).enumerate() {
            let scales = self.format.decode_scales(scales, lane, b);
            for (column, (x, q)) in
                x.iter_mut().zip(self.format.decode_integers(quants, lane, levels.as_ref())).enumerate()
            {
                let product = scales.d * scales.halves[column / 16] * f32::from(q);
                // Adding zero would lose the sign of a negative zero.
                let minimum = scales.minimum * scales.minimums[column / 16];
                *x = if self.format.has_minimum() { product + minimum } else { product };
            }
        }
    }

    /// Releases the pages of a mapped file; see [`MappedSlice::release_pages`].
    pub fn release_pages(&self) {
        self.quants.release_pages();
        self.scales.release_pages();
    }

    /// The memory of the quants and of the scales of some groups.
    pub fn slice_groups(&self, groups: Range<usize>) -> [MappedSlice; 2] {
        let (of_quants, of_scales) = self.format.group_bytes(COLS);
        [(&self.quants, of_quants), (&self.scales, of_scales)].map(|(plane, len)| {
            plane.slice(groups.start * len..groups.end * len).expect("invariant: a plane has all groups")
        })
    }

    /// Quants of some groups.
    #[inline]
    pub fn quants(&self, groups: Range<usize>) -> &[u8] {
        let len = self.format.group_bytes(COLS).0;
        &self.quants.bytes()[groups.start * len..groups.end * len]
    }

    /// Scales of some groups.
    #[inline]
    pub fn scales(&self, groups: Range<usize>) -> &[u8] {
        let len = self.format.group_bytes(COLS).1;
        &self.scales.bytes()[groups.start * len..groups.end * len]
    }
}
