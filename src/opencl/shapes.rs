//! Sizes of work-groups and tiles that depend on the device.

use super::defines::ATTN_BLOCK;
use super::kernels::KernelSet;
use super::nvidia::TensorCores;
use super::storage::{Activations, MatrixStorage, Step};
use super::variants::{BASELINE, Variant};
use crate::dims::*;
use opencl_runtime::device::Device;
use opencl_runtime::device_info::DeviceType;

/// Work-items of a work-group of `gemm`.
pub const GEMM_ITEMS: usize = 256;
/// Work-items of a work-group of `gemm` by whole rows: lines of [`LINE`].
pub const GEMM_ROWS_ITEMS: usize = 64;
/// Work-items whose rows are adjacent.
pub const LINE: usize = 16;
/// Tokens processed by such a work-group.
pub const GEMM_ROWS_TOKENS: usize = 64;
/// Work-items of a work-group of `activations`.
pub const ACTIVATIONS_ITEMS: usize = 128;
/// Work-items of a work-group of `merge`.
pub const MERGE_ITEMS: usize = 64;
/// Work-items of a work-group of `rope`.
pub const ROPE_ITEMS: usize = 32;
/// Work-items of a work-group of `convolve`, one channel each.
pub const CONVOLVE_ITEMS: usize = 64;
/// Work-items of a work-group of `update_state`: sixteen columns, sixteen lanes.
pub const UPDATE_ITEMS: usize = 256;
/// Work-items of a work-group of `observe`, one slot each.
pub const OBSERVE_ITEMS: usize = 64;
/// Maximum chunks merged by the output projection itself; more would be read too often.
pub const FUSED_CHUNKS: usize = 8;
/// Floats of local memory for the partial sums of a `gemv`.
const PART_FLOATS: usize = 4096;
/// Maximum runs of one token each in one attention launch.
pub const MAX_BATCH_RUNS: usize = 16;
/// Maximum tokens of the kernels for few tokens; each group of tokens reads the weights once more, from a cache.
pub const MAX_FEW_TOKENS: usize = 16;
/// Maximum head size of decode attention.
pub const MAX_HEAD_DIM: usize = 512;

/// Work-group shape of a `gemv`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemvShape {
    /// Groups of sixteen result rows in a tile.
    pub tile_groups: usize,
    /// Blocks read at the same time; only for quantised matrices, unless by whole rows.
    pub slices: usize,
    /// Blocks whose sums are held in local memory; only for quantised matrices.
    pub pass: usize,
    /// Work-items of a work-group.
    pub items: usize,
}

/// Tile of prefill attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttendShape {
    /// Queries of a work-group.
    pub queries: usize,
    /// Slots processed at a time.
    pub slots: usize,
    /// Queries of a work-item, each with four slots.
    pub each: usize,
}

impl AttendShape {
    /// Work-items of a work-group.
    pub fn items(self) -> usize {
        self.queries / self.each * (self.slots / 4)
    }

    /// Bytes of local memory: queries, rows, scores, and a few numbers per query.
    fn local_memory(self) -> u64 {
        let width = HEAD_DIM.next_multiple_of(16);
        let of_query = width + ATTN_BLOCK + 4 + 16 + self.items() / self.queries + 2;
        4 * (self.queries * of_query + self.slots * (width + 4)) as u64
    }
}

/// Tile of `gemm` for few tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FewShape {
    /// Blocks summed at once, by four work-items each.
    pub slices: usize,
    /// Tokens.
    pub tokens: usize,
}

/// Sizes that depend on the device.
#[derive(Debug, Clone, Copy)]
pub struct Shapes {
    /// Maximum work-items of a work-group.
    max_items: usize,
    /// Number of work-groups that fill the device; then that of small work-groups with sixteen work-items.
    groups_to_fill: usize,
    small_groups_to_fill: usize,
    /// Work-items of a work-group of decode attention: one per element of a head, from 64 to 256.
    pub one_items: usize,
    /// Tile of prefill attention; `None` if none fits.
    pub attend: Option<AttendShape>,
    /// True if one PTX instruction computes four products.
    pub dot_ptx: bool,
    /// NVIDIA's integer tensor cores, if packed matrices are multiplied on them.
    pub tensor_cores: Option<TensorCores>,
    /// Bytes of local memory.
    local_memory: u64,
}

impl Shapes {
    /// Sizes for a device and a set of kernels.
    pub fn of(device: &Device, set: KernelSet) -> Self {
        let facts = device.info();
        let units = facts.compute_units.max(1) as usize;
        let fits = |s: &AttendShape| {
            // Four queries need a hundred registers.
            let registers = s.each == 2 || facts.compute_capability.is_some();
            registers && s.local_memory() <= facts.local_memory && s.items() <= facts.max_work_group
        };
        let tiles = [(32, 64, 4), (32, 32, 2), (16, 64, 2), (16, 32, 2), (8, 32, 2), (8, 16, 2), (4, 16, 2)];
        let tiles = tiles.map(|(queries, slots, each)| AttendShape { queries, slots, each });
        Self {
            max_items: facts.max_work_group.max(1),
            groups_to_fill: 4 * units,
            small_groups_to_fill: if facts.device_type == DeviceType::Cpu { 4 * units } else { 32 * units },
            one_items: HEAD_DIM.next_power_of_two().clamp(64, 256),
            attend: tiles.into_iter().find(fits),
            local_memory: facts.local_memory,
            // Instructions of compute capability 6.1.
            dot_ptx: set == KernelSet::Tuned && facts.compute_capability.is_some_and(|cc| cc >= (6, 1)),
            tensor_cores: TensorCores::of(facts).filter(|_| set == KernelSet::Tuned),
        }
    }

    /// True if there are kernels for prefill of many tokens at once.
    pub fn supports_batches(&self) -> bool {
        self.attend.is_some() && self.max_items >= GEMM_ITEMS
    }

    /// Shape of a `gemv`: about 256 work-items that load a few blocks each, fewer if the device does not allow so many.
    pub fn gemv_shape(&self, step: Step, storage: MatrixStorage, variant: &Variant) -> GemvShape {
        let by_rows = variant.by_rows();
        let tile_groups = match step {
            // `down` reads blocks of 32.
            step if step.is_gate_up() => 2,
            Step::Head => 4,
            _ if by_rows => 4,
            _ => 1,
        };
        let (groups, most) = (tile_groups * step.matrix_count(), self.max_items.min(256));
        if by_rows {
            return GemvShape { tile_groups, slices: 0, pass: 0, items: LINE };
        }
        if storage.activation_form() == Activations::Floats {
            return GemvShape { tile_groups, slices: 0, pass: 0, items: most / 16 * 16 };
        }
        let blocks = step.rows_and_cols().1 / 32;
        // Four work-items per block and group; at least one per row, for adding up.
        let slices = blocks.next_power_of_two().min(most / (4 * groups)).max(4);
        // Per block also the sum of its activations.
        let floats = 16 * groups * storage.floats_per_product() + 1;
        let pass = blocks.min(PART_FLOATS / floats);
        GemvShape { tile_groups, slices, pass, items: 4 * groups * slices }
    }

    /// Rows and tokens of a work-group of `gemm`.
    pub fn gemm_tile(&self, step: Step, storage: MatrixStorage, variant: &Variant) -> [usize; 2] {
        if variant.by_rows() {
            return [GEMM_ROWS_ITEMS * variant.rows, GEMM_ROWS_TOKENS];
        }
        match self.on_tensor_cores(storage, variant).filter(|_| !step.is_chosen()) {
            Some(cores) => cores.tile(step),
            None if storage.activation_form() == Activations::Quantised => [64, 64],
            None => [16, 8],
        }
    }

    /// Blocks at once and tokens of a work-group of `gemm_few.cl`: as many blocks as local memory allows, so that even
    /// few rows fill the device.
    pub fn few_shape(&self, step: Step) -> FewShape {
        let blocks = step.rows_and_cols().1 / 32;
        let fits = |s: &FewShape| {
            let floats = s.tokens * (16 * s.slices + 4) + 32 * s.slices + 2 * s.tokens * (s.slices + 1);
            4 * floats as u64 <= self.local_memory && 4 * s.slices <= self.max_items
        };
        let shapes = [(64, 8), (32, 8), (64, 4), (32, 4)].map(|(slices, tokens)| FewShape { slices, tokens });
        let enough = |s: &FewShape| s.slices / 2 < blocks || s.slices == 32;
        shapes.into_iter().find(|s| enough(s) && fits(s)).unwrap_or(FewShape { slices: 16, tokens: 4 })
    }

    /// Tensor cores that multiply many tokens with a matrix of this storage, if any.
    pub fn on_tensor_cores(&self, storage: MatrixStorage, variant: &Variant) -> Option<TensorCores> {
        self.tensor_cores.filter(|cores| variant == BASELINE && cores.takes(storage))
    }

    /// Tensor cores that multiply few tokens, if any.
    pub fn few_on_tensor_cores(&self, step: Step, storage: MatrixStorage) -> Option<TensorCores> {
        self.tensor_cores.filter(|cores| cores.takes_few(step, storage))
    }

    /// Rows and tokens of a work-group for few tokens.
    pub fn few_tile(&self, step: Step, storage: MatrixStorage) -> [usize; 2] {
        match self.few_on_tensor_cores(step, storage) {
            Some(cores) => cores.few_tile(),
            None => [16, self.few_shape(step).tokens],
        }
    }

    /// Number of work-groups for `groups` groups of sixteen rows. Each processes several tiles if there are more tiles
    /// than the device runs at once, so that the input is prepared less often.
    pub fn gemv_groups(&self, step: Step, storage: MatrixStorage, variant: &Variant, groups: usize) -> usize {
        let busy = if variant.by_rows() { self.small_groups_to_fill } else { self.groups_to_fill };
        groups.div_ceil(self.gemv_shape(step, storage, variant).tile_groups).min(busy)
    }
}
