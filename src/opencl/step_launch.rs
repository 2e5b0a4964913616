//! A launch, and the launches of the products of a step.

use super::shapes::MAX_FEW_TOKENS;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Kernel;
use std::ops::Range;

/// A kernel with its buffers and the shape of a work-group.
pub struct Launch {
    /// The kernel.
    pub kernel: Kernel,
    /// Shape of a work-group: items per line, lines.
    pub local: [usize; 2],
    /// Index of the first argument after the buffers.
    pub ints: usize,
}

impl Launch {
    /// Queues the launch over `groups` work-groups.
    pub fn run(&self, device: &Device, groups: [usize; 2]) -> Result<()> {
        let [items, lines] = self.local;
        device.launch(&self.kernel, &[groups[0] * items, groups[1] * lines], &self.local)
    }

    /// Sets the first argument after the buffers.
    pub fn set_ints(&mut self, ints: &[i32]) -> Result<&mut Self> {
        self.kernel.set_ints(self.ints, ints)?;
        Ok(self)
    }

    /// Sets a buffer, at no cost if it has not changed.
    pub fn rebind_buffer(&mut self, index: usize, buffer: &Buffer) -> Result<&mut Self> {
        self.kernel.rebind_buffer(index, buffer)?;
        Ok(self)
    }

    /// Stops keeping these buffers alive.
    pub fn release_buffers(&mut self, buffers: Range<usize>) {
        self.kernel.release_buffers(buffers);
    }

    /// Sets the second argument after the buffers.
    pub fn set_second_ints(&mut self, ints: &[i32]) -> Result<&mut Self> {
        self.kernel.set_ints(self.ints + 1, ints)?;
        Ok(self)
    }
}

/// Product with a matrix, or with the part of it in one buffer.
pub struct MatmulLaunch {
    /// First group of sixteen result rows, number of groups.
    pub rows: [i32; 2],
    /// Launch for any number of tokens.
    pub tiles: Tiles,
    /// Launch for at most [`MAX_FEW_TOKENS`] tokens.
    pub few: Option<Tiles>,
}

/// Launch of a product, and its tiles.
pub struct Tiles {
    /// The kernel.
    pub launch: Launch,
    /// Number of work-groups of `gemv`, or of row tiles of `gemm`.
    pub groups: usize,
    /// Rows and tokens of a tile of `gemm`.
    pub tile: [usize; 2],
}

impl MatmulLaunch {
    /// Queues tiles of rows and of tokens of `gemm` on `all` tokens, as selected by `which`.
    fn launch_tiles(
        &mut self,
        device: &Device,
        all: usize,
        which: impl FnOnce(&Tiles, usize) -> [Range<usize>; 2],
    ) -> Result<()> {
        let few = self.few.as_mut().filter(|_| all <= MAX_FEW_TOKENS);
        let turned = few.is_some();
        let tiles = few.unwrap_or(&mut self.tiles);
        let [rows, tokens] = which(tiles, self.rows[0] as usize);
        if rows.is_empty() || tokens.is_empty() {
            return Ok(());
        }
        // `Part` of `kernels/common.cl`.
        let start = tokens.start << 16 | rows.start;
        let launch = tiles.launch.set_ints(&[self.rows[0], self.rows[1], all as i32, start as i32])?;
        launch.run(device, if turned { [tokens.len(), rows.len()] } else { [rows.len(), tokens.len()] })
    }
}

/// Products with the matrices of a step.
#[derive(Default)]
pub struct MatmulLaunches(pub Vec<MatmulLaunch>);

impl MatmulLaunches {
    /// Queues the product of one token.
    pub fn launch_one(&self, device: &Device) -> Result<()> {
        self.0.iter().try_for_each(|p| p.tiles.launch.run(device, [p.tiles.groups, 1]))
    }

    /// Queues `products` products with experts; the more there are, the fewer work-groups share one.
    pub fn launch_products(&self, device: &Device, products: usize) -> Result<()> {
        self.0
            .iter()
            .try_for_each(|p| p.tiles.launch.run(device, [p.tiles.groups.div_ceil(products), products]))
    }

    /// Queues the products of `experts` experts, each with those of `n` tokens that have chosen it.
    pub fn launch_chosen(&self, device: &Device, (n, experts): (usize, usize)) -> Result<()> {
        self.0.iter().try_for_each(|p| {
            p.tiles.launch.run(device, [p.tiles.groups, experts * n.div_ceil(p.tiles.tile[1])])
        })
    }

    /// Queues the product of one token whose input is chunks of attention over `slots` slots, its own included.
    pub fn launch_merging(&mut self, device: &Device, slots: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|p| {
            let [first, groups] = p.rows;
            p.tiles.launch.set_ints(&[first, groups, slots as i32, 0])?.run(device, [p.tiles.groups, 1])
        })
    }

    /// Queues the product of many tokens.
    pub fn launch_many(&mut self, device: &Device, tokens: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|p| {
            p.launch_tiles(device, tokens, |tiles, _| [0..tiles.groups, 0..tokens.div_ceil(tiles.tile[1])])
        })
    }

    /// Queues only the groups of rows from `first` on of the product of many tokens.
    pub fn launch_rows_from(&mut self, device: &Device, tokens: usize, first: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|p| {
            p.launch_tiles(device, tokens, |tiles, start| {
                let rows = first.saturating_sub(start) * 16 / tiles.tile[0];
                [rows..tiles.groups, 0..tokens.div_ceil(tiles.tile[1])]
            })
        })
    }

    /// Queues only the groups of rows before `end` for the tokens `some` of the product of many tokens; other rows and
    /// tokens in the same tiles are computed too.
    pub fn launch_rows_before(
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
            p.launch_tiles(device, tokens, |tiles, start| {
                let rows = (end.saturating_sub(start) * 16).div_ceil(tiles.tile[0]);
                let [_, size] = tiles.tile;
                [0..rows.min(tiles.groups), some.start / size..some.end.div_ceil(size)]
            })
        })
    }
}
