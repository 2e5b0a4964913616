//! The kernels of the forward pass: which source, which options, which work-groups.
//!
//! A program is compiled for one step and one way of storing its matrix, so that every size is a constant and one
//! kernel's registers do not depend on another's.

use super::defines::{Defines, Sight};
use super::shapes::*;
use super::storage::{Activations, Step, Storage};
use super::ways::{Form, Tokens, Way, Ways};
use crate::dims::*;
use numeric::kv::KvTypes;
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};
use opencl_runtime::program::{Kernel, Program, Source};
use opencl_runtime::program_cache::Verdict;
use std::collections::HashMap;

/// The text of a file of `kernels/`, as `build.rs` leaves it.
macro_rules! kernel {
    ($name:literal) => {
        include_str!(concat!(env!("OUT_DIR"), "/kernels/", $name, ".cl"))
    };
}

/// The same of a file that only NVIDIA runs, which no phone needs.
macro_rules! nvidia_kernel {
    ($name:literal) => {
        if cfg!(target_os = "android") { "" } else { kernel!($name) }
    };
}

pub(super) const COMMON: &str = kernel!("common");
pub(super) const KV: &str = kernel!("kv");
const BLOCKS: &str = kernel!("blocks");
const GEMV: &str = kernel!("gemv");
const ROWS: &str = kernel!("rows");
const GEMM_ROWS: &str = kernel!("gemm_rows");
const GEMM: &str = kernel!("gemm");
const GEMM_FEW: &str = kernel!("gemm_few");
const GEMM_PUT: &str = kernel!("gemm_put");
const GEMM_NVIDIA: &str = nvidia_kernel!("gemm_nvidia");
pub(super) const NVIDIA: &str = nvidia_kernel!("nvidia");
pub(super) const ATTEND_NVIDIA: &str = nvidia_kernel!("attend_nvidia");
pub(super) const DECODE_NVIDIA: &str = nvidia_kernel!("decode_nvidia");
pub(super) const BATCH_NVIDIA: &str = nvidia_kernel!("batch_nvidia");
pub(super) const TEAMS: &str = nvidia_kernel!("teams");
const ACTIVATIONS: &str = kernel!("activations");
const ROPE: &str = kernel!("rope");
const ATTEND: &str = kernel!("attend");
pub(super) const ATTEND_ONE: &str = kernel!("attend_one");
const MERGE: &str = kernel!("merge");
const OBSERVE: &str = kernel!("observe");
const KEEP: &str = kernel!("keep");
const POST_NORM: &str = kernel!("post_norm");

/// All of which variants are made.
pub(super) const SOURCES: [&str; 8] = [COMMON, BLOCKS, ROWS, GEMV, GEMM, GEMM_ROWS, GEMM_PUT, ACTIVATIONS];

/// What a kernel is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Name {
    /// One token times a matrix; `gate_up` leaves its result as `next` reads it.
    Gemv { step: Step, storage: Storage, input: Input, next: Activations, way: Way },
    /// Many tokens times a matrix.
    Gemm(Step, Storage, Way),
    /// At most [`FEW`] tokens times a matrix of blocks.
    GemmFew(Step, Storage),
    /// The input of a `gemm` over so many columns, as its matrix reads it.
    Activations(Input, usize, Activations),
    /// Position, and rows of the cache.
    Rope(Sight),
    /// Attention of many tokens.
    Attend(Sight),
    /// The same of one, with its position and rows, in chunks.
    AttendOne(Sight),
    /// The same of a token each of several runs.
    AttendSeveral(Sight),
    /// Puts chunks together.
    Merge,
    /// The same of several runs.
    MergeSeveral,
    /// Adds attention to the mass of slots.
    Observe(Observed, Sight),
    /// The norm of what joins the residual.
    PostNorm,
    /// Eviction.
    Keep,
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

/// Set to the name of a kernel, that kernel computes nonsense; `gemm:rows` is one variant of it, `gemm:rows:down` that of
/// one step, and `*` any variant but the plain one. For tests.
pub const CORRUPT_VARIABLE: &str = "ANTIGRAVITY_OPENCL_CORRUPT";

/// Builds programs and hands out kernels; each program is built once.
pub struct Kernels {
    device: Device,
    shapes: Shapes,
    types: KvTypes,
    variants: Variants,
    ways: Ways,
    /// Whether there are kernels for few tokens.
    few: bool,
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
            few: false,
            corrupt: std::env::var(CORRUPT_VARIABLE).ok(),
            programs: HashMap::new(),
        })
    }

    /// The same with kernels for few tokens, where passes are to have `tokens` often.
    pub fn with_few(self, tokens: usize) -> Self {
        Self { few: tokens > 1, ..self }
    }

    /// Whether few tokens have a kernel of their own, where many are multiplied so.
    pub fn has_few(&self, storage: Storage, way: Way) -> bool {
        self.few && storage.reads() == Activations::Quantised && way.form == Form::Tile
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

    /// Whether all kernels so far and `others`, together, are known to compute what they should.
    pub fn verdict<'a>(&'a self, others: impl Iterator<Item = &'a Program>) -> Option<Verdict> {
        let note = self.note();
        let mut all = self.programs.values().chain(others).map(|p| p.verdict(&note));
        all.try_fold(Verdict::Passed, |all, one| {
            Some(if one? == Verdict::Failed { Verdict::Failed } else { all })
        })
    }

    /// Records that, in the cache of programs too.
    pub fn set_verdict<'a>(&'a self, verdict: Verdict, others: impl Iterator<Item = &'a Program>) {
        let note = self.note();
        self.programs.values().chain(others).for_each(|p| p.set_verdict(&note, verdict));
    }

    /// What a verdict is noted under: on these kernels and no others together.
    fn note(&self) -> String {
        let few = if self.few { ", few tokens" } else { "" };
        self.variants.note().to_owned() + few + if self.recorded() { ", recorded" } else { "" }
    }

    /// Whether the launches of a token are recorded.
    pub fn recorded(&self) -> bool {
        self.ways.recorded && self.device.records()
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
            Name::GemmFew(step, storage) if self.shapes.few_by_warps(step, storage) => GEMM_ITEMS,
            Name::GemmFew(step, _) => 4 * self.shapes.few(step).slices,
            Name::Activations(..) => ACTIVATIONS_ITEMS,
            Name::Rope(_) => ROPE_ITEMS,
            Name::Attend(_) => self.shapes.attend.map_or(0, AttendShape::items),
            Name::AttendOne(_) | Name::AttendSeveral(_) => self.shapes.one_items,
            Name::Merge | Name::MergeSeveral => MERGE_ITEMS,
            Name::Observe(..) => OBSERVE_ITEMS,
            Name::PostNorm | Name::Keep => ACTIVATIONS_ITEMS,
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
        if self.corrupt.as_deref().is_some_and(|corrupt| is_corrupt(corrupt, name)) {
            defines = defines.flag("CORRUPT");
        }
        if s.dot_ptx {
            defines = defines.flag("DOT_PTX");
        }
        let of_layer = |d: Defines, sight: Sight| d.of_cache(self.types).of_sight(sight);
        let (parts, defines): (&'static [&'static str], _) = match name {
            Name::Gemv { .. } => self.of_gemv(name, defines),
            Name::Gemm(step, storage, way) => self.of_gemm((step, storage, way), defines),
            Name::GemmFew(step, storage) if s.few_by_warps(step, storage) => {
                let d = self.of_matrix(defines, step, storage, Way::PLAIN).flag("FEW");
                by_warps(d, s.few_tile(step, storage))
            }
            Name::GemmFew(step, storage) => {
                let (shape, d) = (s.few(step), self.of_matrix(defines, step, storage, Way::PLAIN));
                let d =
                    d.flag("FEW").flag("W_HELD").with("TOKENS", shape.tokens).with("SLICES", shape.slices);
                (&[COMMON, BLOCKS, GEMM_PUT, GEMM_FEW], if s.tensor_cores { d.flag("TENSOR") } else { d })
            }
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
                let tile = s.attend.unwrap_or(AttendShape { queries: 4, slots: 16, each: 2 });
                let d = of_layer(defines, sight).with("QUERIES", tile.queries).with("SLOTS", tile.slots);
                (&[COMMON, KV, ATTEND], d.with("EACH", tile.each))
            }
            Name::AttendOne(sight) => (&[COMMON, KV, ATTEND_ONE], of_layer(defines, sight)),
            Name::AttendSeveral(sight) => {
                (&[COMMON, KV, ATTEND_ONE], of_layer(defines, sight).with("SEVERAL", SEVERAL))
            }
            Name::MergeSeveral => {
                (&[COMMON, KV, MERGE], defines.of_cache(self.types).with("SEVERAL", SEVERAL))
            }
            Name::Merge => (&[COMMON, KV, MERGE], defines.of_cache(self.types)),
            Name::PostNorm => (&[COMMON, POST_NORM], defines),
            Name::Keep => (&[KEEP], defines),
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
        } else if self.shapes.by_warps(storage, way) {
            by_warps(d, self.shapes.gemm_tile(step, storage, way))
        } else {
            (&[COMMON, BLOCKS, GEMM_PUT, GEMM], d)
        }
    }
}

/// `gemm_nvidia.cl` with tiles of so many rows and tokens.
fn by_warps(defines: Defines, [rows, tokens]: [usize; 2]) -> (&'static [&'static str], Defines) {
    let warps = GEMM_ITEMS / 32;
    let d = defines.with("WARPS", warps).with("TOKENS", tokens).with("ROW_GROUPS", rows / (16 * warps));
    (&[COMMON, GEMM_PUT, GEMM_NVIDIA], d)
}

/// Whether [`CORRUPT_VARIABLE`] means a kernel.
fn is_corrupt(corrupt: &str, name: Name) -> bool {
    let mut parts = corrupt.split(':');
    let (step, variant) = match name {
        Name::Gemv { step, way, .. } | Name::Gemm(step, _, way) => (step.names().0, way.to_string()),
        Name::GemmFew(step, _) => (step.names().0, "few".into()),
        Name::AttendSeveral(_) => ("", "several".into()),
        _ => ("", String::new()),
    };
    let any = !["", "tile", "few", "several"].contains(&&*variant);
    parts.next() == Some(symbol(name))
        && parts.next().is_none_or(|part| part == variant || (part == "*" && any))
        && parts.next().is_none_or(|part| part == step)
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
        Name::Gemm(..) | Name::GemmFew(..) => "gemm",
        Name::Activations(..) => "activations",
        Name::Rope(_) => "rope",
        Name::Attend(_) => "attend",
        Name::AttendOne(_) | Name::AttendSeveral(_) => "attend_one",
        Name::Merge | Name::MergeSeveral => "merge",
        Name::Observe(..) => "observe",
        Name::PostNorm => "post_norm",
        Name::Keep => "keep",
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
