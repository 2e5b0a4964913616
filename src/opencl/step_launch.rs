//! One launch, and the launches of a step's products.

use super::shapes::FEW;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Kernel;
use std::ops::Range;

/// A kernel with its buffers and the items of one work-group, in lines.
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Items of a work-group.
    pub local: [usize; 2],
    /// The first argument after the buffers.
    pub ints: usize,
}

impl Launch {
    /// Queues it over so many work-groups.
    pub fn run(&self, device: &Device, groups: [usize; 2]) -> Result<()> {
        let [items, lines] = self.local;
        device.launch(&self.kernel, &[groups[0] * items, groups[1] * lines], &self.local)
    }

    /// Sets the first argument after the buffers.
    pub fn with(&mut self, ints: &[i32]) -> Result<&mut Self> {
        self.kernel.arg_ints(self.ints, ints)?;
        Ok(self)
    }

    /// Sets a buffer that may be the one that it was last.
    pub fn again(&mut self, index: usize, buffer: &Buffer) -> Result<&mut Self> {
        self.kernel.arg_again(index, buffer)?;
        Ok(self)
    }

    /// Keeps these buffers alive no longer.
    pub fn let_go(&mut self, buffers: Range<usize>) {
        self.kernel.let_go(buffers);
    }

    /// Sets the second argument after the buffers.
    pub fn and(&mut self, ints: &[i32]) -> Result<&mut Self> {
        self.kernel.arg_ints(self.ints + 1, ints)?;
        Ok(self)
    }
}

/// A matrix (or the part of it that one buffer holds) times its input.
pub struct MatmulLaunch {
    /// First group of sixteen rows of the result, groups.
    pub rows: [i32; 2],
    /// What is launched for any number.
    pub tiles: Tiles,
    /// The same for at most [`FEW`] tokens.
    pub few: Option<Tiles>,
}

/// One way of launching a product.
pub struct Tiles {
    /// The kernel.
    pub launch: Launch,
    /// Work-groups: all of `gemv`, or the tiles of rows of `gemm`.
    pub groups: usize,
    /// Rows and tokens of a tile of `gemm`.
    pub tile: [usize; 2],
}

impl MatmulLaunch {
    /// Queues tiles of rows and of tokens of `gemm` on `all` tokens: those that `which` names.
    fn tiles(
        &mut self,
        device: &Device,
        all: usize,
        which: impl FnOnce(&Tiles, usize) -> [Range<usize>; 2],
    ) -> Result<()> {
        let few = self.few.as_mut().filter(|_| all <= FEW);
        let turned = few.is_some();
        let tiles = few.unwrap_or(&mut self.tiles);
        let [rows, tokens] = which(tiles, self.rows[0] as usize);
        if rows.is_empty() || tokens.is_empty() {
            return Ok(());
        }
        // `Part` of `kernels/common.cl`.
        let start = tokens.start << 16 | rows.start;
        let launch = tiles.launch.with(&[self.rows[0], self.rows[1], all as i32, start as i32])?;
        launch.run(device, if turned { [tokens.len(), rows.len()] } else { [rows.len(), tokens.len()] })
    }
}

/// The matrices of a step.
#[derive(Default)]
pub struct MatmulLaunches(pub Vec<MatmulLaunch>);

impl MatmulLaunches {
    /// Queues the product of one token.
    pub fn one(&self, device: &Device) -> Result<()> {
        self.0.iter().try_for_each(|p| p.tiles.launch.run(device, [p.tiles.groups, 1]))
    }

    /// Queues the product of one token whose input is chunks of attention over so many slots, its own included.
    pub fn one_over(&mut self, device: &Device, slots: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|p| {
            let [first, groups] = p.rows;
            p.tiles.launch.with(&[first, groups, slots as i32, 0])?.run(device, [p.tiles.groups, 1])
        })
    }

    /// Queues the product of many tokens.
    pub fn many(&mut self, device: &Device, tokens: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|p| {
            p.tiles(device, tokens, |tiles, _| [0..tiles.groups, 0..tokens.div_ceil(tiles.tile[1])])
        })
    }

    /// Queues the groups of rows from `first` on of the product of many tokens.
    pub fn groups_from(&mut self, device: &Device, tokens: usize, first: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|p| {
            p.tiles(device, tokens, |tiles, start| {
                let rows = first.saturating_sub(start) * 16 / tiles.tile[0];
                [rows..tiles.groups, 0..tokens.div_ceil(tiles.tile[1])]
            })
        })
    }

    /// Queues the groups of rows before `end` of the product of `some` of the many tokens, and what shares tiles with
    /// them.
    pub fn groups_before(
        &mut self,
        device: &Device,
        tokens: usize,
        end: usize,
        some: Range<usize>,
    ) -> Result<()> {
        if some.is_empty() {
            return Ok(());
        }
        self.0.iter_mut().try_for_each(|p| {
            p.tiles(device, tokens, |tiles, start| {
                let rows = (end.saturating_sub(start) * 16).div_ceil(tiles.tile[0]);
                let [_, size] = tiles.tile;
                [0..rows.min(tiles.groups), some.start / size..some.end.div_ceil(size)]
            })
        })
    }
}
