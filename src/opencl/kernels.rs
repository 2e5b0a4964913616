//! The kernels of the forward pass: which source, which options, which work-groups.
//!
//! A program is compiled for one step and one way of storing its matrix, so that every size is a constant and one
//! kernel's registers do not depend on another's.

use super::defines::{Defines, LayerView};
use super::shapes::*;
use super::storage::{Activations, Step, Storage};
use super::variants::{BASELINE, Form, Tokens, Variant, VariantPair};
use crate::dims::*;
use numeric::kv::KvTypes;
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};
use opencl_runtime::program::{Kernel, Program, Source};
use opencl_runtime::program_cache::Verdict;
use std::collections::HashMap;

pub(super) const COMMON: &str = kernel_text!("common");
pub(super) const KV: &str = kernel_text!("kv");
const BLOCKS: &str = kernel_text!("blocks");
const GEMV: &str = kernel_text!("gemv");
const ROWS: &str = kernel_text!("rows");
const GEMM_ROWS: &str = kernel_text!("gemm_rows");
const GEMM: &str = kernel_text!("gemm");
const GEMM_FEW: &str = kernel_text!("gemm_few");
pub(super) const GEMM_PUT: &str = kernel_text!("gemm_put");
const ACTIVATIONS: &str = kernel_text!("activations");
const ROPE: &str = kernel_text!("rope");
const ATTEND: &str = kernel_text!("attend");
pub(super) const ATTEND_ONE: &str = kernel_text!("attend_one");
const MERGE: &str = kernel_text!("merge");
const OBSERVE: &str = kernel_text!("observe");
const KEEP: &str = kernel_text!("keep");
const POST_NORM: &str = kernel_text!("post_norm");

/// The texts that variants are made of.
pub(super) const SOURCES: [&str; 8] = [COMMON, BLOCKS, ROWS, GEMV, GEMM, GEMM_ROWS, GEMM_PUT, ACTIVATIONS];

/// A kernel, by what it computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelName {
    /// One token times a matrix; `gate_up` leaves its result as `next` reads it.
    Gemv { step: Step, storage: Storage, input: Input, next: Activations, variant: &'static Variant },
    /// Many tokens times a matrix.
    Gemm(Step, Storage, &'static Variant),
    /// At most [`FEW`] tokens times a matrix of blocks.
    GemmFew(Step, Storage),
    /// The input of a `gemm`, as its matrix reads it.
    Activations(Input, Activations),
    /// Position, and rows of the cache.
    Rope(LayerView),
    /// Attention of many tokens.
    Attend(LayerView),
    /// The same of one, with its position and rows, in chunks.
    AttendOne(LayerView),
    /// The same of a token each of several runs.
    AttendSeveral(LayerView),
    /// Puts chunks together.
    Merge,
    /// The same of several runs.
    MergeSeveral,
    /// Adds attention to the mass of slots.
    Observe(Observed, LayerView),
    /// The norm of what joins the residual.
    PostNorm,
    /// Eviction.
    Keep,
}

/// The attention that `observe` follows.
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

impl Input {
    /// Its columns.
    fn cols(self) -> usize {
        match self {
            Input::Norm => DIM,
            Input::Merge { .. } | Input::Att => Q_DIM,
            Input::Ffn => FFN_DIM,
        }
    }
}

/// A set of kernels. Where one computes wrong results, the next is tried, and after the last the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelSet {
    /// The fastest that the device has.
    Tuned,
    /// The variants that every device runs.
    Baseline,
}

impl KernelSet {
    /// All of them, in the order in which they are tried.
    pub const ALL: [Self; 2] = [Self::Tuned, Self::Baseline];
}

/// Builds programs and hands out kernels; each program is built once.
pub struct Kernels {
    device: Device,
    shapes: Shapes,
    types: KvTypes,
    set: KernelSet,
    variants: VariantPair,
    /// Whether there are kernels for few tokens.
    few: bool,
    programs: HashMap<KernelName, Program>,
}

impl Kernels {
    /// Builds nothing yet.
    pub fn new(device: &Device, types: KvTypes, set: KernelSet, variants: VariantPair) -> Result<Self> {
        if HEAD_DIM > WIDEST_HEAD {
            let message =
                format!("heads of {HEAD_DIM} are wider than {WIDEST_HEAD}; use `EngineOptions::backend` cpu");
            return Err(Failure::new(Kind::Absent, message));
        }
        Ok(Self {
            device: device.clone(),
            shapes: Shapes::of(device, set),
            types,
            set,
            variants: if set == KernelSet::Baseline { VariantPair::BASELINE } else { variants },
            few: false,
            programs: HashMap::new(),
        })
    }

    /// Adds kernels for few tokens, where passes are to have `tokens` often.
    pub fn with_few(self, tokens: usize) -> Self {
        Self { few: tokens > 1 && self.set == KernelSet::Tuned, ..self }
    }

    /// True where few tokens have a kernel of their own beside that of a variant for many.
    pub fn has_few(&self, storage: Storage, variant: &Variant) -> bool {
        self.few && storage.reads() == Activations::Quantised && !variant.by_rows()
    }

    /// Sizes of this device.
    pub fn shapes(&self) -> Shapes {
        self.shapes
    }

    /// The variant that multiplies with a matrix stored so.
    pub fn variant(&self, tokens: Tokens, storage: Storage) -> &'static Variant {
        match storage.reads() {
            Activations::Floats => BASELINE,
            _ => self.variants.get(tokens),
        }
    }

    /// Changes the variant for a number of tokens.
    pub fn set_variant(&mut self, tokens: Tokens, variant: &'static Variant) {
        self.variants.set(tokens, variant);
    }

    /// The form in which many tokens' activations are handed to matrices that read them so.
    pub fn activations(&self, reads: Activations) -> Activations {
        match (reads, self.variants.many.form) {
            (Activations::Quantised, Form::Floats) => Activations::Integers,
            _ => reads,
        }
    }

    /// The verdict on all kernels so far and `others` together; `None` where it is not known.
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

    /// Name that the verdict is noted under: on these kernels and no others together.
    fn note(&self) -> String {
        format!("forward, {:?}{}", self.set, if self.few { ", few tokens" } else { "" })
    }

    /// Builds what will be needed later, so that it counts for the verdict and fails now.
    pub fn require(&mut self, name: KernelName) -> Result<()> {
        self.kernel(name).map(drop)
    }

    /// A kernel of its own, for arguments of its own.
    pub fn kernel(&mut self, name: KernelName) -> Result<Kernel> {
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
    pub fn items(&self, name: KernelName) -> usize {
        match name {
            KernelName::Gemv { step, storage, variant, .. } => self.shapes.gemv(step, storage, variant).items,
            KernelName::Gemm(_, _, variant) if variant.by_rows() => GEMM_ROWS_ITEMS,
            KernelName::Gemm(..) => GEMM_ITEMS,
            KernelName::GemmFew(step, storage)
                if self.shapes.few_on_tensor_cores(step, storage).is_some() =>
            {
                GEMM_ITEMS
            }
            KernelName::GemmFew(step, _) => 4 * self.shapes.few(step).slices,
            KernelName::Activations(..) => ACTIVATIONS_ITEMS,
            KernelName::Rope(_) => ROPE_ITEMS,
            KernelName::Attend(_) => self.shapes.attend.map_or(0, AttendShape::items),
            KernelName::AttendOne(_) | KernelName::AttendSeveral(_) => self.shapes.one_items,
            KernelName::Merge | KernelName::MergeSeveral => MERGE_ITEMS,
            KernelName::Observe(..) => OBSERVE_ITEMS,
            KernelName::PostNorm | KernelName::Keep => ACTIVATIONS_ITEMS,
        }
    }

    /// The same as the group has them, in lines.
    pub fn local(&self, name: KernelName) -> [usize; 2] {
        match name {
            KernelName::Gemm(_, _, variant) if variant.by_rows() => [LINE, GEMM_ROWS_ITEMS / LINE],
            _ => [self.items(name), 1],
        }
    }

    fn build(&self, name: KernelName) -> Result<Program> {
        let (text, defines) = self.source(name);
        let source = Source { name: symbol(name), text: &text, options: defines.as_str() };
        if self.shapes.dot_ptx || variant_of(name) != BASELINE {
            Program::build_variant(&self.device, &source)
        } else {
            Program::build(&self.device, &source)
        }
    }

    fn source(&self, name: KernelName) -> (String, Defines) {
        let s = &self.shapes;
        let mut defines = Defines::of_model().with("WG", self.items(name)).of_device(self.device.facts());
        if s.dot_ptx {
            defines = defines.flag("DOT_PTX");
        }
        let of_layer = |d: Defines, view: LayerView| d.of_cache(self.types).of_view(view);
        let (parts, defines): (&'static [&'static str], _) = match name {
            KernelName::Gemv { .. } => self.of_gemv(name, defines),
            KernelName::Gemm(step, storage, variant) => self.of_gemm((step, storage, variant), defines),
            KernelName::GemmFew(step, storage) => self.of_gemm_few((step, storage), defines),
            KernelName::Activations(input, quantised) => {
                let quantised = match quantised {
                    Activations::Floats => 0,
                    Activations::Quantised => 1,
                    Activations::Integers => 2,
                };
                let d = defines.with("COLS", input.cols()).with("QUANTISED", quantised);
                (&[COMMON, ACTIVATIONS], d.flag(input_flag(input)))
            }
            KernelName::Rope(view) => (&[COMMON, KV, ROPE], of_layer(defines, view)),
            KernelName::Attend(view) => {
                let tile = s.attend.unwrap_or(AttendShape { queries: 4, slots: 16, each: 2 });
                let d = of_layer(defines, view).with("QUERIES", tile.queries).with("SLOTS", tile.slots);
                (&[COMMON, KV, ATTEND], d.with("EACH", tile.each))
            }
            KernelName::AttendOne(view) => (&[COMMON, KV, ATTEND_ONE], of_layer(defines, view)),
            KernelName::AttendSeveral(view) => {
                (&[COMMON, KV, ATTEND_ONE], of_layer(defines, view).with("SEVERAL", SEVERAL))
            }
            KernelName::MergeSeveral => {
                (&[COMMON, KV, MERGE], defines.of_cache(self.types).with("SEVERAL", SEVERAL))
            }
            KernelName::Merge => (&[COMMON, KV, MERGE], defines.of_cache(self.types)),
            KernelName::PostNorm => (&[COMMON, POST_NORM], defines),
            KernelName::Keep => (&[KEEP], defines),
            KernelName::Observe(observed, view) => {
                let d = of_layer(defines, view);
                (&[COMMON, KV, OBSERVE], if observed == Observed::OneToken { d.flag("ONE") } else { d })
            }
        };
        (parts.concat(), defines)
    }

    /// Options that every product is compiled with.
    fn of_matrix(&self, defines: Defines, step: Step, storage: Storage, variant: &Variant) -> Defines {
        let (rows, cols) = step.shape();
        let d = defines.option(&variant.options(self.device.facts())).flag(step.names().1);
        d.with("ROWS", rows).with("COLS", cols).with("W_TYPE", storage.number())
    }

    fn of_gemv(&self, name: KernelName, defines: Defines) -> (&'static [&'static str], Defines) {
        let KernelName::Gemv { step, storage, input, next, variant } = name else {
            unreachable!("invariant: the caller has looked")
        };
        let (shape, by_rows) = (self.shapes.gemv(step, storage, variant), variant.by_rows());
        let mut d = self.of_matrix(defines, step, storage, variant).with("TILE_GROUPS", shape.tile_groups);
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
        (step, storage, variant): (Step, Storage, &Variant),
        defines: Defines,
    ) -> (&'static [&'static str], Defines) {
        let d = self.of_matrix(defines, step, storage, variant);
        if variant.by_rows() {
            let d = d.with("EACH", variant.rows).with("TOKENS", variant.tokens);
            return (
                &[COMMON, BLOCKS, ROWS, GEMM_PUT, GEMM_ROWS],
                d.with("TURNS", GEMM_ROWS_TOKENS / variant.tokens),
            );
        }
        match self.shapes.on_tensor_cores(storage, variant) {
            Some(cores) => cores.source(d, cores.tile(step)),
            None => (&[COMMON, BLOCKS, GEMM_PUT, GEMM], d),
        }
    }

    fn of_gemm_few(
        &self,
        (step, storage): (Step, Storage),
        defines: Defines,
    ) -> (&'static [&'static str], Defines) {
        let (s, d) = (&self.shapes, self.of_matrix(defines, step, storage, BASELINE).flag("FEW"));
        if let Some(cores) = s.few_on_tensor_cores(step, storage) {
            return cores.source(d, cores.few_tile());
        }
        let FewShape { slices, tokens } = s.few(step);
        let d = d.flag("W_HELD").with("TOKENS", tokens).with("SLICES", slices);
        (&[COMMON, BLOCKS, GEMM_PUT, GEMM_FEW], if s.tensor_cores.is_some() { d.flag("TENSOR") } else { d })
    }
}

/// The variant that computes a product.
pub(super) fn variant_of(name: KernelName) -> &'static Variant {
    match name {
        KernelName::Gemv { variant, .. } | KernelName::Gemm(_, _, variant) => variant,
        _ => BASELINE,
    }
}

fn symbol(name: KernelName) -> &'static str {
    match name {
        KernelName::Gemv { .. } => "gemv",
        KernelName::Gemm(..) | KernelName::GemmFew(..) => "gemm",
        KernelName::Activations(..) => "activations",
        KernelName::Rope(_) => "rope",
        KernelName::Attend(_) => "attend",
        KernelName::AttendOne(_) | KernelName::AttendSeveral(_) => "attend_one",
        KernelName::Merge | KernelName::MergeSeveral => "merge",
        KernelName::Observe(..) => "observe",
        KernelName::PostNorm => "post_norm",
        KernelName::Keep => "keep",
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
