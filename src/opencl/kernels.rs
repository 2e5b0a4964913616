//! Kernels of the forward pass: their sources, compiler options and work-group sizes.
//!
//! A program is compiled for one step and one storage of its matrix, so all sizes are constants, and the registers of
//! one kernel do not depend on another.

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
const WHOLE_ROWS: &str = kernel_text!("whole_rows");
const GEMM_ROWS: &str = kernel_text!("gemm_rows");
const GEMM: &str = kernel_text!("gemm");
const GEMM_FEW: &str = kernel_text!("gemm_few");
pub(super) const GEMM_EPILOGUE: &str = kernel_text!("gemm_epilogue");
const ACTIVATIONS: &str = kernel_text!("activations");
const ROPE: &str = kernel_text!("rope");
const ATTEND: &str = kernel_text!("attend");
pub(super) const ATTEND_ONE: &str = kernel_text!("attend_one");
const MERGE: &str = kernel_text!("merge");
const OBSERVE: &str = kernel_text!("observe");
const COMPACT_KV: &str = kernel_text!("compact_kv");
const POST_NORM: &str = kernel_text!("post_norm");

/// Sources of the variants.
pub(super) const SOURCES: [&str; 8] =
    [COMMON, BLOCKS, WHOLE_ROWS, GEMV, GEMM, GEMM_ROWS, GEMM_EPILOGUE, ACTIVATIONS];

/// A kernel, identified by its task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KernelName {
    /// Product of one token and a matrix; `gate_up` stores its result as `next` reads it.
    Gemv { step: Step, storage: Storage, input: Input, next: Activations, variant: &'static Variant },
    /// Product of many tokens and a matrix.
    Gemm(Step, Storage, &'static Variant),
    /// Product of at most [`FEW`] tokens and a matrix of blocks.
    GemmFew(Step, Storage),
    /// Converts the input of a `gemm` to the form that its matrix reads.
    Activations(Input, Activations),
    /// RoPE, and new rows of the cache.
    Rope(LayerView),
    /// Attention of many tokens.
    Attend(LayerView),
    /// RoPE and attention of one token, in chunks.
    AttendOne(LayerView),
    /// Attention of several runs with one token each.
    AttendSeveral(LayerView),
    /// Merges the chunks of one token.
    Merge,
    /// Merges the chunks of several runs.
    MergeSeveral,
    /// Adds attention to the mass of slots.
    Observe(Observed, LayerView),
    /// Norm of an output before it is added to the residual.
    PostNorm,
    /// Eviction.
    CompactKv,
}

/// Attention that `observe` follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "they say it")]
pub enum Observed {
    OneToken,
    ManyTokens,
}

/// Source of a matrix's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Input {
    /// Normed residual.
    Norm,
    /// Chunks of attention over the last `window` positions; over all slots if it is 0.
    Merge {
        /// Positions.
        window: usize,
    },
    /// Attention's output.
    Att,
    /// silu(gate) * up: as stored by `gemv`, or still to be computed from both.
    Ffn,
}

impl Input {
    /// Number of columns.
    fn cols(self) -> usize {
        match self {
            Input::Norm => DIM,
            Input::Merge { .. } | Input::Att => Q_DIM,
            Input::Ffn => FFN_DIM,
        }
    }
}

/// A set of kernels. If one computes wrong results, the next set is tried, and finally the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelSet {
    /// Fastest kernels that the device supports.
    Tuned,
    /// Kernels that every device can run.
    Baseline,
}

impl KernelSet {
    /// All sets, in the order tried.
    pub const ALL: [Self; 2] = [Self::Tuned, Self::Baseline];
}

/// Builds programs and creates kernels; each program is built once.
pub struct Kernels {
    device: Device,
    shapes: Shapes,
    types: KvTypes,
    set: KernelSet,
    variants: VariantPair,
    /// True if there are kernels for few tokens.
    few: bool,
    programs: HashMap<KernelName, Program>,
}

impl Kernels {
    /// Builds nothing yet.
    pub fn new(device: &Device, types: KvTypes, set: KernelSet, variants: VariantPair) -> Result<Self> {
        if HEAD_DIM > WIDEST_HEAD {
            let message = format!(
                "head size {HEAD_DIM} exceeds the maximum of {WIDEST_HEAD}; use `EngineOptions::backend` cpu"
            );
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

    /// Adds kernels for few tokens, if passes often have `tokens` tokens.
    pub fn with_few(self, tokens: usize) -> Self {
        Self { few: tokens > 1 && self.set == KernelSet::Tuned, ..self }
    }

    /// True if few tokens have a kernel of their own, beside that of a variant for many.
    pub fn has_few(&self, storage: Storage, variant: &Variant) -> bool {
        self.few && storage.reads() == Activations::Quantised && !variant.by_rows()
    }

    /// Sizes for this device.
    pub fn shapes(&self) -> Shapes {
        self.shapes
    }

    /// Variant that multiplies with a matrix of this storage.
    pub fn variant(&self, tokens: Tokens, storage: Storage) -> &'static Variant {
        match storage.reads() {
            Activations::Floats => BASELINE,
            _ => self.variants.get(tokens),
        }
    }

    /// Sets the variant for a number of tokens.
    pub fn set_variant(&mut self, tokens: Tokens, variant: &'static Variant) {
        self.variants.set(tokens, variant);
    }

    /// Form in which the activations of many tokens are passed to matrices that read `reads`.
    pub fn activations(&self, reads: Activations) -> Activations {
        match (reads, self.variants.many.form) {
            (Activations::Quantised, Form::Floats) => Activations::Integers,
            _ => reads,
        }
    }

    /// Combined self-test result of all kernels built so far and of `others`; `None` if unknown.
    pub fn verdict<'a>(&'a self, others: impl Iterator<Item = &'a Program>) -> Option<Verdict> {
        let note = self.note();
        let mut all = self.programs.values().chain(others).map(|p| p.verdict(&note));
        all.try_fold(Verdict::Passed, |all, one| {
            Some(if one? == Verdict::Failed { Verdict::Failed } else { all })
        })
    }

    /// Stores the self-test result, also in the program cache.
    pub fn set_verdict<'a>(&'a self, verdict: Verdict, others: impl Iterator<Item = &'a Program>) {
        let note = self.note();
        self.programs.values().chain(others).for_each(|p| p.set_verdict(&note, verdict));
    }

    /// Name under which the result for exactly this set of kernels is stored.
    fn note(&self) -> String {
        format!("forward, {:?}{}", self.set, if self.few { ", few tokens" } else { "" })
    }

    /// Builds a kernel that is needed later, so that it is part of the self-test and fails now if at all.
    pub fn require(&mut self, name: KernelName) -> Result<()> {
        self.kernel(name).map(drop)
    }

    /// Creates a kernel with arguments of its own.
    pub fn kernel(&mut self, name: KernelName) -> Result<Kernel> {
        if !self.programs.contains_key(&name) {
            let program = self.build(name)?;
            self.programs.insert(name, program);
        }
        let (symbol, items) = (symbol(name), self.items(name));
        let kernel = self.programs[&name].kernel(symbol)?;
        if kernel.max_work_group() < items {
            let most = kernel.max_work_group();
            let message =
                format!("kernel {symbol} needs work-groups of {items} items, the device allows {most}");
            return Err(Failure::new(Kind::Build, message));
        }
        Ok(kernel)
    }

    /// Work-items of a work-group.
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
            KernelName::PostNorm | KernelName::CompactKv => ACTIVATIONS_ITEMS,
        }
    }

    /// Shape of a work-group: items per line, lines.
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
                (&[COMMON, KV, ATTEND], d.with("QUERIES_PER_ITEM", tile.each))
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
            KernelName::CompactKv => (&[COMPACT_KV], defines),
            KernelName::Observe(observed, view) => {
                let d = of_layer(defines, view);
                (&[COMMON, KV, OBSERVE], if observed == Observed::OneToken { d.flag("ONE") } else { d })
            }
        };
        (parts.concat(), defines)
    }

    /// Adds the options of every matrix product.
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
            d = d.flag("BY_ROWS").with("ROWS_PER_ITEM", 1);
        } else if storage.reads() == Activations::Quantised {
            d = d.with("SLICES", shape.slices).with("PASS", shape.pass);
        }
        if step == Step::GateUp && next == Activations::Quantised {
            d = d.flag("DOWN_QUANTISED");
        }
        let Input::Merge { window } = input else {
            let parts: &[&str] =
                if by_rows { &[COMMON, BLOCKS, WHOLE_ROWS, GEMV] } else { &[COMMON, BLOCKS, GEMV] };
            return (parts, d);
        };
        d = d.of_cache(self.types).flag("INPUT_MERGE").with("WINDOW", window);
        let parts: &[&str] =
            if by_rows { &[COMMON, KV, BLOCKS, WHOLE_ROWS, GEMV] } else { &[COMMON, KV, BLOCKS, GEMV] };
        (parts, d.with("FUSED_CHUNKS", FUSED_CHUNKS))
    }

    fn of_gemm(
        &self,
        (step, storage, variant): (Step, Storage, &Variant),
        defines: Defines,
    ) -> (&'static [&'static str], Defines) {
        let d = self.of_matrix(defines, step, storage, variant);
        if variant.by_rows() {
            let d = d.with("ROWS_PER_ITEM", variant.rows).with("TOKENS", variant.tokens);
            return (
                &[COMMON, BLOCKS, WHOLE_ROWS, GEMM_EPILOGUE, GEMM_ROWS],
                d.with("TURNS", GEMM_ROWS_TOKENS / variant.tokens),
            );
        }
        match self.shapes.on_tensor_cores(storage, variant) {
            Some(cores) => cores.source(d, cores.tile(step)),
            None => (&[COMMON, BLOCKS, GEMM_EPILOGUE, GEMM], d),
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
        (
            &[COMMON, BLOCKS, GEMM_EPILOGUE, GEMM_FEW],
            if s.tensor_cores.is_some() { d.flag("TENSOR") } else { d },
        )
    }
}

/// Variant that computes a product.
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
        KernelName::CompactKv => "compact_kv",
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
