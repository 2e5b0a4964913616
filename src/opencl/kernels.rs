//! The kernels of the forward pass: which source, which options, which work-groups.
//!
//! A program is compiled for one step and one way of storing its matrix, so that every size is a constant and one
//! kernel's registers do not depend on another's.

use super::defines::{CHUNK, Defines, Sight};
use super::storage::{Activations, Step, Storage};
use crate::dims::*;
use numeric::kv::KvTypes;
use numeric::quant::format::Format;
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};
use opencl_runtime::program::{Kernel, Program, Source};
use opencl_runtime::program_cache::Verdict;
use std::collections::HashMap;

pub(super) const COMMON: &str = include_str!("../../kernels/common.cl");
pub(super) const KV: &str = include_str!("../../kernels/kv.cl");
const BLOCKS: &str = include_str!("../../kernels/blocks.cl");
const GEMV: &str = include_str!("../../kernels/gemv.cl");
const GEMM: &str = include_str!("../../kernels/gemm.cl");
const GEMM_PUT: &str = include_str!("../../kernels/gemm_put.cl");
const GEMM_NVIDIA: &str = include_str!("../../kernels/gemm_nvidia.cl");
pub(super) const NVIDIA: &str = include_str!("../../kernels/nvidia.cl");
pub(super) const ATTEND_NVIDIA: &str = include_str!("../../kernels/attend_nvidia.cl");
pub(super) const DECODE_NVIDIA: &str = include_str!("../../kernels/decode_nvidia.cl");
const ACTIVATIONS: &str = include_str!("../../kernels/activations.cl");
const ROPE: &str = include_str!("../../kernels/rope.cl");
const ATTEND: &str = include_str!("../../kernels/attend.cl");
const ATTEND_ONE: &str = include_str!("../../kernels/attend_one.cl");
const MERGE: &str = include_str!("../../kernels/merge.cl");
const OBSERVE: &str = include_str!("../../kernels/observe.cl");
const POST_NORM: &str = include_str!("../../kernels/post_norm.cl");

/// Items of a work-group of `gemm`.
pub const GEMM_ITEMS: usize = 256;
/// Items of a work-group of `activations`.
pub const ACTIVATIONS_ITEMS: usize = 128;
/// Items of a work-group of `merge`.
pub const MERGE_ITEMS: usize = 64;
/// Items of a work-group of `rope`.
pub const ROPE_ITEMS: usize = 32;
/// Items of a work-group of `observe`, a slot each.
pub const OBSERVE_ITEMS: usize = 64;
/// Chunks that the output projection merges itself: more would be read once too often.
pub const FUSED_CHUNKS: usize = 8;
/// Floats of local memory for the parts of a `gemv`.
const PART_FLOATS: usize = 4096;
/// Widest head that decode attention takes.
const WIDEST_HEAD: usize = 256;

/// What a kernel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Name {
    /// One token times a matrix; `gate_up` leaves its result as `next` reads it.
    Gemv { step: Step, storage: Storage, input: Input, next: Activations },
    /// Many tokens times a matrix.
    Gemm(Step, Storage),
    /// The input of a `gemm` over so many columns, as its matrix reads it.
    Activations(Input, usize, Activations),
    /// Position, and rows of the cache.
    Rope(Sight),
    /// Attention of many tokens.
    Attend(Sight),
    /// The same of one, with its position and rows, in chunks.
    AttendOne(Sight),
    /// Puts chunks together.
    Merge,
    /// Adds attention to the mass of slots.
    Observe(Observed, Sight),
    /// The norm of what joins the residual.
    PostNorm,
}

/// Of what `observe` follows the attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "they say it")]
pub enum Observed {
    OneToken,
    ManyTokens,
}

/// Where the input of a matrix comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Input {
    /// The residual, normed.
    Norm,
    /// Parts of attention over the last `window` positions; over all slots where it is 0.
    Merge {
        /// Positions.
        window: usize,
    },
    /// Attention's output.
    Att,
    /// silu(gate) * up: as `gemv` wrote it, or still to be computed from both.
    Ffn,
}

/// Work-group shape of a `gemv`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GemvShape {
    /// Groups of sixteen rows of the result in a tile.
    pub tile_groups: usize,
    /// Blocks that are read at the same time; of quantised matrices only.
    pub slices: usize,
    /// Blocks whose sums wait in local memory; of quantised matrices only.
    pub pass: usize,
    /// Items of a group.
    pub items: usize,
}

/// Tile of prefill attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttendShape {
    /// Queries of a work-group, four items each.
    pub queries: usize,
    /// Slots at a time.
    pub slots: usize,
}

/// Which kernels are used where there is a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variants {
    /// The fastest, and a token in one launch where the device has that.
    OneLaunch,
    /// The fastest, a launch or more a step.
    Fastest,
    /// Those that every device runs.
    Baseline,
}

impl Variants {
    /// What a verdict on all kernels together is noted under.
    fn note(self) -> &'static str {
        match self {
            Variants::OneLaunch => "forward, one launch",
            Variants::Fastest => "forward",
            Variants::Baseline => "forward, baseline",
        }
    }
}

/// Set to the name of a kernel, that kernel computes nonsense; for tests.
pub const CORRUPT_VARIABLE: &str = "ANTIGRAVITY_OPENCL_CORRUPT";

/// Items that share a query in `attend`.
pub const SHARE: usize = 4;

/// Sizes that depend on the device and not on the model alone.
#[derive(Debug, Clone, Copy)]
pub struct Shapes {
    /// Most items of a work-group.
    max_items: usize,
    /// Work-groups that keep the device busy.
    busy: usize,
    /// Items of a group of decode attention.
    pub one_items: usize,
    /// Tile of prefill attention; `None` where none fits.
    pub attend: Option<AttendShape>,
    /// One instruction for four products.
    dot_ptx: bool,
    /// Whether packed matrices are multiplied on NVIDIA's integer tensor cores.
    tensor_cores: bool,
    /// The compiler has an option for correctly rounded quotients.
    correct_divide: bool,
}

impl Shapes {
    /// Those of a device.
    pub fn of(device: &Device, variants: Variants) -> Self {
        let facts = device.facts();
        let units = facts.compute_units.max(1) as usize;
        // Local memory of queries, of a tile of rows, and of their scores.
        let fits = |s: &AttendShape| {
            let floats = (s.queries + s.slots) * (HEAD_DIM + 1) + s.queries * (CHUNK + 16);
            4 * floats as u64 <= facts.local_memory && s.queries * SHARE <= facts.max_work_group
        };
        let tiles = [(32, 32), (32, 16), (16, 32), (16, 16), (8, 16), (8, 8)];
        let tiles = tiles.map(|(queries, slots)| AttendShape { queries, slots });
        Self {
            max_items: facts.max_work_group.max(1),
            busy: 4 * units,
            one_items: HEAD_DIM.next_power_of_two().max(128),
            attend: tiles.into_iter().find(fits),
            // Instructions of compute capability 6.1.
            correct_divide: facts.correct_divide,
            dot_ptx: variants != Variants::Baseline
                && facts.compute_capability.is_some_and(|cc| cc >= (6, 1)),
            tensor_cores: variants != Variants::Baseline
                && facts.compute_capability.is_some_and(|cc| cc >= (8, 0)),
        }
    }

    /// Whether prefill has kernels for many tokens at once.
    pub fn batches(&self) -> bool {
        self.attend.is_some() && self.max_items >= GEMM_ITEMS
    }

    /// Work-groups of `gemv`: about 256 items that each load a few blocks, fewer where the device has none such.
    pub fn gemv(&self, step: Step, storage: Storage) -> GemvShape {
        let tile_groups = match step {
            // `down` reads blocks of 32.
            Step::GateUp => 2,
            Step::Head => 4,
            _ => 1,
        };
        let (groups, most) = (tile_groups * step.halves(), self.max_items.min(256));
        if storage.reads() == Activations::Floats {
            return GemvShape { tile_groups, slices: 0, pass: 0, items: most / 16 * 16 };
        }
        let blocks = step.shape().1 / 32;
        // Four items a block and group; at least one a row, to add up.
        let slices = blocks.next_power_of_two().min(most / (4 * groups)).max(4);
        // Of each row a sum and a scale, and where there are floors that and, of a block, the sum of activations.
        let floats = if storage.floors() { 3 * 16 * groups + 1 } else { 2 * 16 * groups };
        let pass = blocks.min(PART_FLOATS / floats);
        GemvShape { tile_groups, slices, pass, items: 4 * groups * slices }
    }

    /// Rows and tokens of a work-group of `gemm`.
    pub fn gemm_tile(&self, step: Step, storage: Storage) -> [usize; 2] {
        match storage {
            Storage::Blocks(Format::Q4_0) if self.tensor_cores => {
                [GEMM_ITEMS / 32 * 16 * Self::warp_groups(step), 64]
            }
            storage if storage.reads() == Activations::Quantised => [64, 64],
            _ => [16, 8],
        }
    }

    /// Groups of sixteen rows that a warp of `gemm_nvidia.cl` takes: two where there are enough for all
    /// multiprocessors even so.
    fn warp_groups(step: Step) -> usize {
        if step.groups() * step.halves() >= 512 { 2 } else { 1 }
    }

    /// Work-groups for `groups` groups of sixteen rows: each takes several tiles where the tiles outnumber what the
    /// device runs at once, so that the input is prepared less often.
    pub fn gemv_groups(&self, step: Step, storage: Storage, groups: usize) -> usize {
        groups.div_ceil(self.gemv(step, storage).tile_groups).min(self.busy)
    }
}

/// Builds programs and hands out kernels; each program is built once.
pub struct Kernels {
    device: Device,
    shapes: Shapes,
    types: KvTypes,
    variants: Variants,
    corrupt: Option<String>,
    programs: HashMap<Name, Program>,
}

impl Kernels {
    /// Builds nothing yet.
    pub fn new(device: &Device, types: KvTypes, variants: Variants) -> Result<Self> {
        if HEAD_DIM > WIDEST_HEAD {
            let message =
                format!("heads of {HEAD_DIM} are wider than {WIDEST_HEAD}; use `EngineOptions::backend` cpu");
            return Err(Failure::new(Kind::Absent, message));
        }
        Ok(Self {
            device: device.clone(),
            shapes: Shapes::of(device, variants),
            types,
            variants,
            corrupt: std::env::var(CORRUPT_VARIABLE).ok(),
            programs: HashMap::new(),
        })
    }

    /// Sizes of this device.
    pub fn shapes(&self) -> Shapes {
        self.shapes
    }

    /// Whether all kernels so far and `one`, together, are known to compute what they should.
    pub fn verdict(&self, one: Option<&Program>) -> Option<Verdict> {
        let note = self.variants.note();
        let mut all = self.programs.values().chain(one).map(|p| p.verdict(note));
        all.try_fold(Verdict::Passed, |all, one| {
            Some(if one? == Verdict::Failed { Verdict::Failed } else { all })
        })
    }

    /// Records that, in the cache of programs too.
    pub fn set_verdict(&self, verdict: Verdict, one: Option<&Program>) {
        self.programs.values().chain(one).for_each(|p| p.set_verdict(self.variants.note(), verdict));
    }

    /// Builds what will be needed later, so that it counts for the verdict and fails now.
    pub fn require(&mut self, name: Name) -> Result<()> {
        self.kernel(name).map(drop)
    }

    /// A kernel of its own, for arguments of its own.
    pub fn kernel(&mut self, name: Name) -> Result<Kernel> {
        if !self.programs.contains_key(&name) {
            let program = self.build(name)?;
            self.programs.insert(name, program);
        }
        let (symbol, items) = (symbol(name), self.items(name));
        let kernel = self.programs[&name].kernel(symbol)?;
        if kernel.max_work_group() < items {
            let most = kernel.max_work_group();
            let message = format!("kernel {symbol} needs groups of {items} items, the device allows {most}");
            return Err(Failure::new(Kind::Build, message));
        }
        Ok(kernel)
    }

    /// Items of a group.
    pub fn items(&self, name: Name) -> usize {
        match name {
            Name::Gemv { step, storage, .. } => self.shapes.gemv(step, storage).items,
            Name::Gemm(..) => GEMM_ITEMS,
            Name::Activations(..) => ACTIVATIONS_ITEMS,
            Name::Rope(_) => ROPE_ITEMS,
            Name::Attend(_) => self.shapes.attend.map_or(0, |s| s.queries * SHARE),
            Name::AttendOne(_) => self.shapes.one_items,
            Name::Merge => MERGE_ITEMS,
            Name::Observe(..) => OBSERVE_ITEMS,
            Name::PostNorm => ACTIVATIONS_ITEMS,
        }
    }

    fn build(&self, name: Name) -> Result<Program> {
        let (text, defines) = self.source(name);
        let source = Source { name: symbol(name), text: &text, options: defines.as_str() };
        if self.shapes.dot_ptx {
            Program::build_variant(&self.device, &source)
        } else {
            Program::build(&self.device, &source)
        }
    }

    fn source(&self, name: Name) -> (String, Defines) {
        let s = &self.shapes;
        let mut defines = Defines::of_model().with("WG", self.items(name));
        if s.correct_divide {
            defines = defines.option("-cl-fp32-correctly-rounded-divide-sqrt").flag("CORRECT_DIVIDE");
        }
        if self.corrupt.as_deref() == Some(symbol(name)) {
            defines = defines.flag("CORRUPT");
        }
        if s.dot_ptx {
            defines = defines.flag("DOT_PTX");
        }
        let matrix = |d: Defines, step: Step, storage: Storage| {
            let (rows, cols) = step.shape();
            d.flag(step.names().1).with("ROWS", rows).with("COLS", cols).with("W_TYPE", storage.number())
        };
        let of_layer = |d: Defines, sight: Sight| d.of_cache(self.types).of_sight(sight);
        let (parts, defines): (&[&str], _) = match name {
            Name::Gemv { step, storage, input, next } => {
                let shape = s.gemv(step, storage);
                let mut d = matrix(defines, step, storage).with("TILE_GROUPS", shape.tile_groups);
                if storage.reads() == Activations::Quantised {
                    d = d.with("SLICES", shape.slices).with("PASS", shape.pass);
                }
                if step == Step::GateUp && next == Activations::Quantised {
                    d = d.flag("DOWN_QUANTISED");
                }
                if let Input::Merge { window } = input {
                    let d = d.of_cache(self.types).flag("INPUT_MERGE").with("WINDOW", window);
                    (&[COMMON, KV, BLOCKS, GEMV], d.with("FUSED_CHUNKS", FUSED_CHUNKS))
                } else {
                    (&[COMMON, BLOCKS, GEMV], d)
                }
            }
            Name::Gemm(step, storage) if s.tensor_cores && storage == Storage::Blocks(Format::Q4_0) => {
                let d = matrix(defines, step, storage).with("WARPS", GEMM_ITEMS / 32);
                (&[COMMON, GEMM_PUT, GEMM_NVIDIA], d.with("ROW_GROUPS", Shapes::warp_groups(step)))
            }
            Name::Gemm(step, storage) => (&[COMMON, BLOCKS, GEMM_PUT, GEMM], matrix(defines, step, storage)),
            Name::Activations(input, cols, quantised) => {
                let quantised = (quantised == Activations::Quantised) as usize;
                let d = defines.with("COLS", cols).with("QUANTISED", quantised);
                (&[COMMON, ACTIVATIONS], d.flag(input_flag(input)))
            }
            Name::Rope(sight) => (&[COMMON, KV, ROPE], of_layer(defines, sight)),
            Name::Attend(sight) => {
                let tile = s.attend.unwrap_or(AttendShape { queries: 8, slots: 8 });
                let d = of_layer(defines, sight);
                (&[COMMON, KV, ATTEND], d.with("QUERIES", tile.queries).with("SLOTS", tile.slots))
            }
            Name::AttendOne(sight) => (&[COMMON, KV, ATTEND_ONE], of_layer(defines, sight)),
            Name::Merge => (&[COMMON, KV, MERGE], defines.of_cache(self.types)),
            Name::PostNorm => (&[COMMON, POST_NORM], defines),
            Name::Observe(observed, sight) => {
                let d = of_layer(defines, sight);
                (&[COMMON, KV, OBSERVE], if observed == Observed::OneToken { d.flag("ONE") } else { d })
            }
        };
        (parts.concat(), defines)
    }
}

fn symbol(name: Name) -> &'static str {
    match name {
        Name::Gemv { .. } => "gemv",
        Name::Gemm(..) => "gemm",
        Name::Activations(..) => "activations",
        Name::Rope(_) => "rope",
        Name::Attend(_) => "attend",
        Name::AttendOne(_) => "attend_one",
        Name::Merge => "merge",
        Name::Observe(..) => "observe",
        Name::PostNorm => "post_norm",
    }
}

fn input_flag(input: Input) -> &'static str {
    match input {
        Input::Norm => "INPUT_NORM",
        Input::Merge { .. } => "INPUT_MERGE",
        Input::Att => "INPUT_ATT",
        Input::Ffn => "INPUT_FFN",
    }
}
