//! Activations of a pass, in the forms that matrices read.

use super::matmul::MatmulInput;
use crate::weights::ActivationForms;
use files::blocks::BLOCK;
use files::{Error, Result};
use numeric::pool::Pool;
use numeric::quant::activations::{ActBlock, ActTile};
use numeric::simd::products::interleave;
use numeric::simd::{Isa, ops};
use std::ops::Range;

/// One layer input of `W` columns as f32, quantised blocks or tiles: those that its matrices read; the others are empty.
/// Inputs of several widths may use the same memory.
pub(super) struct Activations {
    /// `[token][W]`
    pub(super) floats: Vec<f32>,
    /// `[token][W / 32]`
    pub(super) blocks: Vec<ActBlock>,
    /// `[tile][W / 32]`, if the instruction set reads tiles.
    tiles: Vec<ActTile>,
}

impl Activations {
    /// Memory for `tokens` rows of at most `width` columns.
    pub(super) fn new(isa: Isa, tokens: usize, width: usize, reads: ActivationForms) -> Result<Self> {
        let (tiles, blocks) = (isa.act_tiles(tokens), width / BLOCK);
        Ok(Self {
            floats: try_vec(if reads.floats { tokens * width } else { 0 }, 0.0)?,
            blocks: try_vec(if reads.blocks { tokens * blocks } else { 0 }, ActBlock::ZERO)?,
            tiles: try_vec(if reads.tiles { tiles * blocks } else { 0 }, ActTile::ZERO)?,
        })
    }

    /// The first `tokens` rows of `W` columns.
    pub(super) fn as_input<const W: usize>(&self, isa: Isa, tokens: usize) -> MatmulInput<'_> {
        let tiles = &self.tiles[..self.tiles_of::<W>(isa, tokens)];
        MatmulInput { floats: &self.floats, blocks: &self.blocks, tiles, tokens }
    }

    /// Some rows of `W` columns, of which [`Activations::copy_rows`] or [`Activations::quantise_rows`] has made tiles if
    /// they begin at a tile.
    pub(super) fn rows_as_input<const W: usize>(&self, isa: Isa, rows: Range<usize>) -> MatmulInput<'_> {
        let (tokens, wide) = (rows.len(), W / BLOCK);
        let tiles = if self.tiles.is_empty() { 0 } else { isa.act_tiles(tokens) * wide };
        let first_tile = if tiles > 0 { rows.start / ActTile::TOKENS * wide } else { 0 };
        MatmulInput {
            floats: self.floats.get(rows.start * W..).unwrap_or_default(),
            blocks: self.blocks.get(rows.start * wide..).unwrap_or_default(),
            tiles: &self.tiles[first_tile..][..tiles],
            tokens,
        }
    }

    /// Copies a row of `from` into each row, in the forms that its matrices read.
    pub(super) fn copy_rows<const W: usize>(
        &mut self,
        from: &Activations,
        tokens: &[u32],
        pool: &Pool,
        isa: Isa,
    ) {
        copy_rows_of(&mut self.floats, &from.floats, (W, tokens), pool);
        copy_rows_of(&mut self.blocks, &from.blocks, (W / BLOCK, tokens), pool);
        self.arrange_tiles::<W>(pool, isa, tokens.len());
    }

    /// Number of tile blocks for rows `0..tokens`: 0 if no matrix reads tiles.
    fn tiles_of<const W: usize>(&self, isa: Isa, tokens: usize) -> usize {
        (isa.act_tiles(tokens) * (W / BLOCK)).min(self.tiles.len())
    }

    /// Computes rows `0..tokens` with `row(token, destination)` and quantises them where needed.
    pub(super) fn fill_rows<const W: usize>(
        &mut self,
        pool: &Pool,
        isa: Isa,
        tokens: usize,
        row: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let rows = tokens.div_ceil(4 * pool.thread_count());
        if !self.floats.is_empty() {
            pool.run_tiles(&mut self.floats[..tokens * W], W, (rows, W), |mut tile| {
                (0..tile.rows).for_each(|r| row(tile.row + r, tile.row_mut(r)));
            });
            return self.quantise_rows::<W>(pool, isa, tokens);
        }
        let blocks = W / BLOCK;
        pool.run_tiles(&mut self.blocks[..tokens * blocks], blocks, (rows, blocks), |mut tile| {
            let mut h = [0.0; W];
            for r in 0..tile.rows {
                row(tile.row + r, &mut h);
                ops::quantise_activations(isa, &h, tile.row_mut(r));
            }
        });
        self.arrange_tiles::<W>(pool, isa, tokens);
    }

    /// Quantises the floats of rows `0..tokens` to blocks and tiles, if any matrix reads them.
    pub(super) fn quantise_rows<const W: usize>(&mut self, pool: &Pool, isa: Isa, tokens: usize) {
        let (floats, blocks) = (&self.floats, W / BLOCK);
        if !self.blocks.is_empty() {
            let rows = tokens.div_ceil(4 * pool.thread_count());
            pool.run_tiles(&mut self.blocks[..tokens * blocks], blocks, (rows, blocks), |mut tile| {
                for r in 0..tile.rows {
                    ops::quantise_activations(isa, &floats[(tile.row + r) * W..][..W], tile.row_mut(r));
                }
            });
        }
        self.arrange_tiles::<W>(pool, isa, tokens);
    }

    /// Arranges the blocks of rows `0..tokens` in tiles, if any matrix reads tiles.
    pub(super) fn arrange_tiles<const W: usize>(&mut self, pool: &Pool, isa: Isa, tokens: usize) {
        let tiles = self.tiles_of::<W>(isa, tokens);
        let (blocks, wide) = (&self.blocks, W / BLOCK);
        if tiles == 0 {
            return;
        }
        pool.run_tiles(&mut self.tiles[..tiles], wide, (1, wide), |mut tile| {
            let first = tile.row * ActTile::TOKENS;
            interleave(isa, &blocks[first * wide..][..ActTile::TOKENS * wide], tile.row_mut(0));
        });
    }
}

/// Copies row `tokens[r]` of `from`, `width` elements, into row `r` of `to`, unless that is empty.
fn copy_rows_of<T: Copy + Send + Sync>(
    to: &mut [T],
    from: &[T],
    (width, tokens): (usize, &[u32]),
    pool: &Pool,
) {
    if to.is_empty() || tokens.is_empty() {
        return;
    }
    let rows = tokens.len().div_ceil(4 * pool.thread_count());
    pool.run_tiles(&mut to[..tokens.len() * width], width, (rows, width), |mut tile| {
        for r in 0..tile.rows {
            let token = tokens[tile.row + r] as usize;
            tile.row_mut(r).copy_from_slice(&from[token * width..][..width]);
        }
    });
}

/// Allocates scratch; the error names the option that needs less.
pub(super) fn try_vec<T: Clone>(len: usize, zero: T) -> Result<Vec<T>> {
    let mut v = Vec::new();
    v.try_reserve_exact(len).map_err(|_| {
        let mib = (len * size_of::<T>()) >> 20;
        Error::Memory(format!(
            "cannot allocate {mib} MiB of scratch; use a smaller `EngineOptions::prefill_chunk`"
        ))
    })?;
    v.resize(len, zero);
    Ok(v)
}
