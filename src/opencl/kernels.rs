//! The kernels of the forward pass: which source, which options, which work-groups.
//!
//! A program is compiled for one step and one way of storing its matrix, so that every size is a constant and one
//! kernel's registers do not depend on another's.

use super::defines::{CHUNK, Defines, Sight};
use super::storage::{Activations, Step, Storage};
use super::ways::{Form, Tokens, Way, Ways};
use crate::dims::*;
use numeric::kv::KvTypes;
use numeric::quant::format::Format;
use opencl_runtime::device::Device;
use opencl_runtime::facts::DeviceType;
use opencl_runtime::failure::{Failure, Kind, Result};
use opencl_runtime::program::{Kernel, Program, Source};
use opencl_runtime::program_cache::Verdict;
use std::collections::HashMap;

pub(super) const COMMON: &str = include_str!("../../kernels/common.cl");
pub(super) const KV: &str = include_str!("../../kernels/kv.cl");
const BLOCKS: &str = include_str!("../../kernels/blocks.cl");
const GEMV: &str = include_str!("../../kernels/gemv.cl");
const ROWS: &str = include_str!("../../kernels/rows.cl");
const GEMM_ROWS: &str = include_str!("../../kernels/gemm_rows.cl");
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

/// All of which variants are made.
pub(super) const SOURCES: [&str; 8] = [COMMON, BLOCKS, ROWS, GEMV, GEMM, GEMM_ROWS, GEMM_PUT, ACTIVATIONS];

/// Items of a work-group of `gemm`.
pub const GEMM_ITEMS: usize = 256;
/// Items of a work-group of `gemm` whose items have whole rows: lines of [`LINE`].
const GEMM_ROWS_ITEMS: usize = 64;
/// Items whose rows follow each other.
const LINE: usize = 16;
/// Tokens that such a work-group goes through.
const GEMM_ROWS_TOKENS: usize = 64;
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
    Gemv { step: Step, storage: Storage, input: Input, next: Activations, way: Way },
    /// Many tokens times a matrix.
    Gemm(Step, Storage, Way),
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
    /// Blocks that are read at the same time; of quantised matrices only, where an item has no whole rows.
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

/// Set to the name of a kernel, that kernel computes nonsense; `gemm:rows` is one variant of it. For tests.
pub const CORRUPT_VARIABLE: &str = "ANTIGRAVITY_OPENCL_CORRUPT";

/// Items that share a query in `attend`.
pub const SHARE: usize = 4;

/// Sizes that depend on the device and not on the model alone.
#[derive(Debug, Clone, Copy)]
pub struct Shapes {
    /// Most items of a work-group.
    max_items: usize,
    /// Work-groups that keep the device busy, and small ones of sixteen items.
    busy: usize,
    busy_small: usize,
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
            busy_small: if facts.device_type == DeviceType::Cpu { 4 * units } else { 32 * units },
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
    pub fn gemv(&self, step: Step, storage: Storage, way: Way) -> GemvShape {
        let by_rows = way.form != Form::Tile;
        let tile_groups = match step {
            // `down` reads blocks of 32.
            Step::GateUp => 2,
            _ if by_rows && way.small => 2,
            Step::Head => 4,
            _ if by_rows => 4,
            _ => 1,
        };
        let (groups, most) =
            (tile_groups * step.halves(), self.max_items.min(if way.small { 128 } else { 256 }));
        if by_rows {
            return GemvShape { tile_groups, slices: 0, pass: 0, items: LINE };
        }
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
    pub fn gemm_tile(&self, step: Step, storage: Storage, way: Way) -> [usize; 2] {
        match storage {
            _ if way.form != Form::Tile => [GEMM_ROWS_ITEMS * if way.four { 4 } else { 1 }, GEMM_ROWS_TOKENS],
            Storage::Blocks(Format::Q4_0) if self.tensor_cores && way == Way::PLAIN => {
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
    pub fn gemv_groups(&self, step: Step, storage: Storage, way: Way, groups: usize) -> usize {
        let busy = if way.form == Form::Tile { self.busy } else { self.busy_small };
        groups.div_ceil(self.gemv(step, storage, way).tile_groups).min(busy)
    }
}

/// Builds programs and hands out kernels; each program is built once.
pub struct Kernels {
    device: Device,
    shapes: Shapes,
    types: KvTypes,
    variants: Variants,
    ways: Ways,
    corrupt: Option<String>,
    programs: HashMap<Name, Program>,
}

impl Kernels {
    /// Builds nothing yet.
    pub fn new(device: &Device, types: KvTypes, variants: Variants, ways: Ways) -> Result<Self> {
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
            ways: if variants == Variants::Baseline { Ways::default() } else { ways },
            corrupt: std::env::var(CORRUPT_VARIABLE).ok(),
            programs: HashMap::new(),
        })
    }

    /// Sizes of this device.
    pub fn shapes(&self) -> Shapes {
        self.shapes
    }

    /// How the product of a step with a matrix stored so is computed.
    pub fn way(&self, tokens: Tokens, step: Step, storage: Storage) -> Way {
        match storage.reads() {
            Activations::Floats => Way::PLAIN,
            _ => match (tokens, self.ways.get(tokens, step)) {
                (Tokens::One, way) => Way { four: false, ..way },
                // Tiles are brought to local memory, and have one size.
                (Tokens::Many, way @ Way { form: Form::Tile, .. }) => {
                    Way { image: false, small: false, ..way }
                }
                (Tokens::Many, way) => way,
            },
        }
    }

    /// Changes that of a step.
    pub fn set_way(&mut self, tokens: Tokens, step: Step, way: Way) {
        self.ways.set(tokens, step, way);
    }

    /// How many tokens' activations are handed to the matrices of a step that read them so.
    pub fn activations(&self, step: Step, reads: Activations) -> Activations {
        match (reads, self.ways.get(Tokens::Many, step).form) {
            (Activations::Quantised, Form::Floats) => Activations::Integers,
            _ => reads,
        }
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
            Name::Gemv { step, storage, way, .. } => self.shapes.gemv(step, storage, way).items,
            Name::Gemm(_, _, way) if way.form != Form::Tile => GEMM_ROWS_ITEMS,
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

    /// The same as the group has them, in lines.
    pub fn local(&self, name: Name) -> [usize; 2] {
        match name {
            Name::Gemm(_, _, way) if way.form != Form::Tile => [LINE, GEMM_ROWS_ITEMS / LINE],
            _ => [self.items(name), 1],
        }
    }

    fn build(&self, name: Name) -> Result<Program> {
        let (text, defines) = self.source(name);
        let source = Source { name: symbol(name), text: &text, options: defines.as_str() };
        if self.shapes.dot_ptx || way(name) != Way::PLAIN {
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
        let variant = format!("{}:{}", symbol(name), way(name));
        if self.corrupt.as_deref().is_some_and(|corrupt| corrupt == symbol(name) || corrupt == variant) {
            defines = defines.flag("CORRUPT");
        }
        if s.dot_ptx {
            defines = defines.flag("DOT_PTX");
        }
        let of_layer = |d: Defines, sight: Sight| d.of_cache(self.types).of_sight(sight);
        let (parts, defines): (&'static [&'static str], _) = match name {
            Name::Gemv { .. } => self.of_gemv(name, defines),
            Name::Gemm(step, storage, way) => self.of_gemm((step, storage, way), defines),
            Name::Activations(input, cols, quantised) => {
                let quantised = match quantised {
                    Activations::Floats => 0,
                    Activations::Quantised => 1,
                    Activations::Integers => 2,
                };
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

    /// What every product is compiled with.
    fn of_matrix(&self, defines: Defines, step: Step, storage: Storage, way: Way) -> Defines {
        let (rows, cols) = step.shape();
        let d = defines.option(&way.options(self.device.facts())).flag(step.names().1);
        d.with("ROWS", rows).with("COLS", cols).with("W_TYPE", storage.number())
    }

    fn of_gemv(&self, name: Name, defines: Defines) -> (&'static [&'static str], Defines) {
        let Name::Gemv { step, storage, input, next, way } = name else {
            unreachable!("invariant: the caller has looked")
        };
        let (shape, by_rows) = (self.shapes.gemv(step, storage, way), way.form != Form::Tile);
        let mut d = self.of_matrix(defines, step, storage, way).with("TILE_GROUPS", shape.tile_groups);
        if by_rows {
            d = d.flag("BY_ROWS").with("EACH", 1);
        } else if storage.reads() == Activations::Quantised {
            d = d.with("SLICES", shape.slices).with("PASS", shape.pass);
        }
        if step == Step::GateUp && next == Activations::Quantised {
            d = d.flag("DOWN_QUANTISED");
        }
        let Input::Merge { window } = input else {
            let parts: &[&str] =
                if by_rows { &[COMMON, BLOCKS, ROWS, GEMV] } else { &[COMMON, BLOCKS, GEMV] };
            return (parts, d);
        };
        d = d.of_cache(self.types).flag("INPUT_MERGE").with("WINDOW", window);
        let parts: &[&str] =
            if by_rows { &[COMMON, KV, BLOCKS, ROWS, GEMV] } else { &[COMMON, KV, BLOCKS, GEMV] };
        (parts, d.with("FUSED_CHUNKS", FUSED_CHUNKS))
    }

    fn of_gemm(
        &self,
        (step, storage, way): (Step, Storage, Way),
        defines: Defines,
    ) -> (&'static [&'static str], Defines) {
        let d = self.of_matrix(defines, step, storage, way);
        if way.form != Form::Tile {
            let tokens = if way.small { 4 } else { 8 };
            let d = d.with("EACH", if way.four { 4 } else { 1 }).with("TOKENS", tokens);
            (&[COMMON, BLOCKS, ROWS, GEMM_PUT, GEMM_ROWS], d.with("TURNS", GEMM_ROWS_TOKENS / tokens))
        } else if self.shapes.tensor_cores && way == Way::PLAIN && storage == Storage::Blocks(Format::Q4_0) {
            let d = d.with("WARPS", GEMM_ITEMS / 32);
            (&[COMMON, GEMM_PUT, GEMM_NVIDIA], d.with("ROW_GROUPS", Shapes::warp_groups(step)))
        } else {
            (&[COMMON, BLOCKS, GEMM_PUT, GEMM], d)
        }
    }
}

/// How a product is computed.
pub(super) fn way(name: Name) -> Way {
    match name {
        Name::Gemv { way, .. } | Name::Gemm(_, _, way) => way,
        _ => Way::PLAIN,
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
