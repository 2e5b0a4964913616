//! Products of many tokens on integer tensor cores: see `kernels/nvidia/gemm.cl`.

use super::super::defines::Defines;
use super::super::kernels::{COMMON, GEMM_PUT};
use super::super::shapes::GEMM_ITEMS;
use super::super::storage::{Step, Storage};
use super::GEMM;
use numeric::quant::format::Format;
use opencl_runtime::facts::Facts;

/// Warps of a work-group.
const WARPS: usize = GEMM_ITEMS / 32;

/// Tensor cores that multiply matrices of packed Q4_0.
#[derive(Debug, Clone, Copy)]
pub struct TensorCores(());

impl TensorCores {
    /// The tensor cores of a device; `None` where it has none that these kernels can use.
    pub fn of(facts: &Facts) -> Option<Self> {
        facts.compute_capability.filter(|&cc| cc >= (8, 0)).map(|_| Self(()))
    }

    /// True for a matrix that they multiply.
    pub fn takes(self, storage: Storage) -> bool {
        storage == Storage::Blocks(Format::Q4_0)
    }

    /// True where they multiply it with few tokens too: a warp for each group of rows keeps the device busy.
    pub fn takes_few(self, step: Step, storage: Storage) -> bool {
        self.takes(storage) && has_many_rows(step)
    }

    /// Rows and tokens of a work-group.
    pub fn tile(self, step: Step) -> [usize; 2] {
        let groups = groups_of_warp(step);
        // Fewer tokens where rows are few, so that all multiprocessors have some.
        [WARPS * 16 * groups, 32 * groups]
    }

    /// Rows and tokens of a work-group where tokens are few.
    pub fn few_tile(self) -> [usize; 2] {
        [16 * WARPS, 8]
    }

    /// The parts of the kernel's text, and what it is compiled with for tiles of so many rows and tokens.
    pub fn source(self, defines: Defines, [rows, tokens]: [usize; 2]) -> (&'static [&'static str], Defines) {
        let d = defines.with("WARPS", WARPS).with("TOKENS", tokens).with("ROW_GROUPS", rows / (16 * WARPS));
        (&[COMMON, GEMM_PUT, GEMM], d)
    }
}

/// True for a step with groups of sixteen rows enough for all multiprocessors, even two for each warp.
fn has_many_rows(step: Step) -> bool {
    step.groups() * step.halves() >= 512
}

/// Groups of sixteen rows that a warp takes. Two take four times as long to compile, and of the head few tokens are wanted.
fn groups_of_warp(step: Step) -> usize {
    if has_many_rows(step) && step != Step::Head { 2 } else { 1 }
}
