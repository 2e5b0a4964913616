//! Products of many tokens on integer tensor cores: see `kernels/nvidia/gemm.cl`.

use super::super::defines::Defines;
use super::super::kernels::{COMMON, GEMM_EPILOGUE};
use super::super::shapes::GEMM_ITEMS;
use super::super::storage::{MatrixStorage, Step};
use super::GEMM;
use numeric::quant::format::Format;
use opencl_runtime::device_info::DeviceInfo;

/// Warps of a work-group.
const WARPS: usize = GEMM_ITEMS / 32;

/// Tensor cores that multiply with packed Q4_0 matrices.
#[derive(Debug, Clone, Copy)]
pub struct TensorCores(());

impl TensorCores {
    /// Tensor cores of a device; `None` if these kernels cannot use them.
    pub fn of(facts: &DeviceInfo) -> Option<Self> {
        facts.compute_capability.filter(|&cc| cc >= (8, 0)).map(|_| Self(()))
    }

    /// True if they multiply with a matrix of this storage.
    pub fn takes(self, storage: MatrixStorage) -> bool {
        storage == MatrixStorage::Blocks(Format::Q4_0)
    }

    /// True if they also multiply it with few tokens: one warp per group of rows then fills the device.
    pub fn takes_few(self, step: Step, storage: MatrixStorage) -> bool {
        self.takes(storage) && has_many_rows(step)
    }

    /// Rows and tokens of a work-group.
    pub fn tile(self, step: Step) -> [usize; 2] {
        let groups = groups_of_warp(step);
        // Use fewer tokens if there are few rows, so that all multiprocessors have work.
        [WARPS * 16 * groups, 32 * groups]
    }

    /// Rows and tokens of a work-group for few tokens.
    pub fn few_tile(self) -> [usize; 2] {
        [16 * WARPS, 8]
    }

    /// Sources of the kernel, and its options for a tile of rows and tokens.
    pub fn source(self, defines: Defines, [rows, tokens]: [usize; 2]) -> (&'static [&'static str], Defines) {
        let d = defines
            .add_value("WARPS", WARPS)
            .add_value("TOKENS", tokens)
            .add_value("ROW_GROUPS", rows / (16 * WARPS));
        (&[COMMON, GEMM_EPILOGUE, GEMM], d)
    }
}

/// True if a step has enough groups of sixteen rows for all multiprocessors, with two per warp.
fn has_many_rows(step: Step) -> bool {
    step.row_groups() * step.matrix_count() >= 512
}

/// Groups of sixteen rows per warp. Two take four times as long to compile, and of the head only few tokens are
/// computed.
fn groups_of_warp(step: Step) -> usize {
    if has_many_rows(step) && step != Step::Head { 2 } else { 1 }
}
