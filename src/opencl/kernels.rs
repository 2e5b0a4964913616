//! Kernels of the forward pass: their sources, compiler options and work-group sizes.
//!
//! A program is compiled for one step and one storage of its matrix, so all sizes are constants, and the registers of
//! one kernel do not depend on another.

pub(super) use super::kernel_name::variant_of;
pub use super::kernel_name::{ExpertStep, KernelName, MatmulInput, Observed, RecurrentStep};

use super::defines::{Defines, LayerView};
use super::kernel_name::{input_flag, kernel_symbol};
use super::shapes::*;
use super::storage::{Activations, MatrixStorage, Step};
use super::variants::{BASELINE, ProductForm, Tokens, Variant, VariantPair};
use crate::dims::*;
use numeric::kv::KvTypes;
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, FailureKind, Result};
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
const PER_LAYER: &str = kernel_text!("per_layer");
const POST_NORM: &str = kernel_text!("post_norm");
const QK_NORM_TEXT: &str = kernel_text!("qk_norm");
const GATE: &str = kernel_text!("gate");
const RECURRENT: &str = kernel_text!("recurrent");
const EXPERTS_TEXT: &str = kernel_text!("experts");

/// Sources of the variants.
pub(super) const SOURCES: [&str; 8] =
    [COMMON, BLOCKS, WHOLE_ROWS, GEMV, GEMM, GEMM_ROWS, GEMM_EPILOGUE, ACTIVATIONS];

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
    /// Kernels without a program, while they are only listed.
    listed: Option<Vec<KernelName>>,
}

impl Kernels {
    /// Builds nothing yet.
    pub fn new(device: &Device, types: KvTypes, set: KernelSet, variants: VariantPair) -> Result<Self> {
        if HEAD_DIM > MAX_HEAD_DIM {
            let message = format!(
                "head size {HEAD_DIM} exceeds the maximum of {MAX_HEAD_DIM}; use `EngineOptions::backend` cpu"
            );
            return Err(Failure::new(FailureKind::Unsupported, message));
        }
        Ok(Self {
            device: device.clone(),
            shapes: Shapes::of(device, set),
            types,
            set,
            variants: if set == KernelSet::Baseline { VariantPair::BASELINE } else { variants },
            few: false,
            programs: HashMap::new(),
            listed: None,
        })
    }

    /// Adds kernels for few tokens, if passes often have `tokens` tokens.
    pub fn with_few(self, tokens: usize) -> Self {
        Self { few: tokens > 1 && self.set == KernelSet::Tuned, ..self }
    }

    /// True if few tokens have a kernel of their own, beside that of a variant for many.
    pub fn has_few(&self, storage: MatrixStorage, variant: &Variant) -> bool {
        self.few && storage.activation_form() == Activations::Quantised && !variant.by_rows()
    }

    /// Sizes for this device.
    pub fn device_shapes(&self) -> Shapes {
        self.shapes
    }

    /// Variant that multiplies with a matrix of this storage.
    pub fn variant_for(&self, tokens: Tokens, storage: MatrixStorage) -> &'static Variant {
        match storage.activation_form() {
            Activations::Floats => BASELINE,
            _ => self.variants.get(tokens),
        }
    }

    /// Sets the variant for a number of tokens.
    pub fn set_variant(&mut self, tokens: Tokens, variant: &'static Variant) {
        self.variants.set(tokens, variant);
    }

    /// Form in which the activations of many tokens are passed to matrices that read `reads`.
    pub fn activation_form(&self, reads: Activations) -> Activations {
        match (reads, self.variants.many.form) {
            (Activations::Quantised, ProductForm::Floats) => Activations::Integers,
            _ => reads,
        }
    }

    /// Combined self-test result of all kernels built so far and of `others`; `None` if unknown.
    pub fn combined_verdict<'a>(&'a self, others: impl Iterator<Item = &'a Program>) -> Option<Verdict> {
        let note = self.verdict_name();
        let mut all = self.programs.values().chain(others).map(|p| p.kernel_verdict(&note));
        all.try_fold(Verdict::Passed, |all, one| {
            Some(if one? == Verdict::Failed { Verdict::Failed } else { all })
        })
    }

    /// Stores the self-test result, also in the program cache.
    pub fn set_verdict<'a>(&'a self, verdict: Verdict, others: impl Iterator<Item = &'a Program>) {
        let note = self.verdict_name();
        self.programs.values().chain(others).for_each(|p| p.set_verdict(&note, verdict));
    }

    /// Name under which the result for exactly this set of kernels is stored.
    fn verdict_name(&self) -> String {
        format!("forward, {:?}{}", self.set, if self.few { ", few tokens" } else { "" })
    }

    /// Builds a kernel that is needed later, so that it is part of the self-test and fails now if at all.
    pub fn require_kernel(&mut self, name: KernelName) -> Result<()> {
        self.create_kernel(name).map(drop)
    }

    /// From here to [`Kernels::stop_listing`], no program is built, and all kernels are placeholders.
    pub fn start_listing(&mut self) {
        self.listed = Some(Vec::new());
    }

    /// The kernels without a program that were asked for meanwhile. Tells the device their number, with `more`.
    pub fn stop_listing(&mut self, more: usize) -> Vec<KernelName> {
        let names = self.listed.take().unwrap_or_default();
        self.device.expect_builds(names.len() + more);
        names
    }

    /// Creates a kernel with arguments of its own.
    pub fn create_kernel(&mut self, name: KernelName) -> Result<Kernel> {
        if let Some(listed) = &mut self.listed {
            if !self.programs.contains_key(&name) && !listed.contains(&name) {
                listed.push(name);
            }
            return Ok(Kernel::create_placeholder(&self.device));
        }
        if !self.programs.contains_key(&name) {
            let program = self.build_program(name)?;
            self.programs.insert(name, program);
        }
        let (symbol, items) = (kernel_symbol(name), self.group_items(name));
        let kernel = self.programs[&name].create_kernel(symbol)?;
        if kernel.max_work_group() < items {
            let most = kernel.max_work_group();
            let message =
                format!("kernel {symbol} needs work-groups of {items} items, the device allows {most}");
            return Err(Failure::new(FailureKind::Build, message));
        }
        Ok(kernel)
    }

    /// Work-items of a work-group.
    pub fn group_items(&self, name: KernelName) -> usize {
        match name {
            KernelName::Gemv { step, storage, variant, .. } => {
                self.shapes.gemv_shape(step, storage, variant).items
            }
            KernelName::Gemm(_, _, variant) if variant.by_rows() => GEMM_ROWS_ITEMS,
            KernelName::Gemm(..) => GEMM_ITEMS,
            KernelName::GemmFew(step, storage)
                if self.shapes.few_on_tensor_cores(step, storage).is_some() =>
            {
                GEMM_ITEMS
            }
            KernelName::GemmFew(step, _) => 4 * self.shapes.few_shape(step).slices,
            KernelName::Activations(..) => ACTIVATIONS_ITEMS,
            KernelName::Rope(_) => ROPE_ITEMS,
            KernelName::Attend(_) => self.shapes.attend.map_or(0, AttendShape::items),
            KernelName::AttendOne(_) | KernelName::AttendBatch(_) => self.shapes.one_items,
            KernelName::Merge | KernelName::MergeBatch => MERGE_ITEMS,
            KernelName::Observe(..) => OBSERVE_ITEMS,
            KernelName::Recurrent(RecurrentStep::Convolve) => CONVOLVE_ITEMS,
            KernelName::Recurrent(RecurrentStep::Update) => UPDATE_ITEMS,
            KernelName::Recurrent(RecurrentStep::Prepare) => ROPE_ITEMS,
            KernelName::Recurrent(RecurrentStep::Gate)
            | KernelName::PostNorm
            | KernelName::QkNorm
            | KernelName::Gate
            | KernelName::Experts(_)
            | KernelName::CompactKv => ACTIVATIONS_ITEMS,
            KernelName::EmbedLayers | KernelName::GateLayer => ROPE_ITEMS,
        }
    }

    /// Shape of a work-group: items per line, lines.
    pub fn group_shape(&self, name: KernelName) -> [usize; 2] {
        match name {
            KernelName::Gemm(_, _, variant) if variant.by_rows() => [LINE, GEMM_ROWS_ITEMS / LINE],
            _ => [self.group_items(name), 1],
        }
    }

    fn build_program(&self, name: KernelName) -> Result<Program> {
        let (text, defines) = self.kernel_source(name);
        let source = Source { name: kernel_symbol(name), text: &text, options: defines.as_str() };
        if self.shapes.dot_ptx || variant_of(name) != BASELINE {
            Program::build_variant(&self.device, &source)
        } else {
            Program::build(&self.device, &source)
        }
    }

    fn kernel_source(&self, name: KernelName) -> (String, Defines) {
        let s = &self.shapes;
        let mut defines =
            Defines::for_model().add_value("WG", self.group_items(name)).add_device(self.device.info());
        if s.dot_ptx {
            defines = defines.add_flag("DOT_PTX");
        }
        let of_layer = |d: Defines, view: LayerView| d.add_cache(self.types).add_view(view);
        let (parts, defines): (&'static [&'static str], _) = match name {
            KernelName::Gemv { .. } => self.gemv_source(name, defines),
            KernelName::Gemm(step, storage, variant) => self.gemm_source((step, storage, variant), defines),
            KernelName::GemmFew(step, storage) => self.gemm_few_source((step, storage), defines),
            KernelName::Activations(input, form) => {
                (&[COMMON, ACTIVATIONS], activation_defines(defines, input, form))
            }
            KernelName::Rope(view) => (&[COMMON, KV, ROPE], of_layer(defines, view)),
            KernelName::Attend(view) => {
                let tile = s.attend.unwrap_or(AttendShape { queries: 4, slots: 16, each: 2 });
                let d =
                    of_layer(defines, view).add_value("QUERIES", tile.queries).add_value("SLOTS", tile.slots);
                (&[COMMON, KV, ATTEND], d.add_value("QUERIES_PER_ITEM", tile.each))
            }
            KernelName::AttendOne(view) => (&[COMMON, KV, ATTEND_ONE], of_layer(defines, view)),
            KernelName::AttendBatch(view) => {
                (&[COMMON, KV, ATTEND_ONE], of_layer(defines, view).add_value("SEVERAL", MAX_BATCH_RUNS))
            }
            KernelName::MergeBatch => {
                (&[COMMON, KV, MERGE], defines.add_cache(self.types).add_value("SEVERAL", MAX_BATCH_RUNS))
            }
            KernelName::Merge => (&[COMMON, KV, MERGE], defines.add_cache(self.types)),
            KernelName::PostNorm => (&[COMMON, POST_NORM], defines),
            KernelName::QkNorm => (&[COMMON, QK_NORM_TEXT], defines),
            KernelName::Gate => (&[COMMON, GATE], defines),
            KernelName::Recurrent(step) => {
                (&[COMMON, RECURRENT], defines.add_recurrent().add_flag(step.names().1))
            }
            KernelName::Experts(step) => {
                (&[COMMON, EXPERTS_TEXT], defines.add_experts().add_flag(step.names().1))
            }
            KernelName::EmbedLayers => (&[COMMON, PER_LAYER], defines.add_per_layer().add_flag("EMBED")),
            KernelName::GateLayer => (&[COMMON, PER_LAYER], defines.add_per_layer()),
            KernelName::CompactKv => (&[COMPACT_KV], defines),
            KernelName::Observe(observed, view) => {
                let d = of_layer(defines, view);
                (&[COMMON, KV, OBSERVE], if observed == Observed::OneToken { d.add_flag("ONE") } else { d })
            }
        };
        (parts.concat(), defines)
    }

    /// Adds the options of every matrix product.
    fn matrix_defines(
        &self,
        defines: Defines,
        step: Step,
        storage: MatrixStorage,
        variant: &Variant,
    ) -> Defines {
        let (rows, cols) = step.rows_and_cols();
        let defines = if step.has_local_heads() { defines.add_local_heads() } else { defines };
        let d = defines.add_option(&variant.compiler_options(self.device.info())).add_flag(step.names().1);
        d.add_value("ROWS", rows).add_value("COLS", cols).add_option(&storage.kernel_options(cols))
    }

    fn gemv_source(&self, name: KernelName, defines: Defines) -> (&'static [&'static str], Defines) {
        let KernelName::Gemv { step, storage, input, next, variant } = name else {
            unreachable!("invariant: the caller has looked")
        };
        let (shape, by_rows) = (self.shapes.gemv_shape(step, storage, variant), variant.by_rows());
        let mut d =
            self.matrix_defines(defines, step, storage, variant).add_value("TILE_GROUPS", shape.tile_groups);
        if by_rows {
            d = d.add_flag("BY_ROWS").add_value("ROWS_PER_ITEM", 1);
        } else if storage.activation_form() == Activations::Quantised {
            d = d.add_value("SLICES", shape.slices).add_value("PASS", shape.pass);
        }
        if step.is_gate_up() && next == Activations::Quantised {
            d = d.add_flag("DOWN_QUANTISED");
        }
        if let Some(count) = step.experts_of_token() {
            d = d.add_experts().add_value("PRODUCTS", count);
        }
        if step.is_chosen() {
            d = d.add_flag("CHOSEN");
        }
        let MatmulInput::Merge { window } = input else {
            let parts: &[&str] =
                if by_rows { &[COMMON, BLOCKS, WHOLE_ROWS, GEMV] } else { &[COMMON, BLOCKS, GEMV] };
            return (parts, d);
        };
        d = d.add_cache(self.types).add_flag("INPUT_MERGE").add_value("WINDOW", window);
        let parts: &[&str] =
            if by_rows { &[COMMON, KV, BLOCKS, WHOLE_ROWS, GEMV] } else { &[COMMON, KV, BLOCKS, GEMV] };
        (parts, d.add_value("FUSED_CHUNKS", FUSED_CHUNKS))
    }

    fn gemm_source(
        &self,
        (step, storage, variant): (Step, MatrixStorage, &Variant),
        defines: Defines,
    ) -> (&'static [&'static str], Defines) {
        let mut d = self.matrix_defines(defines, step, storage, variant);
        if step.is_chosen() {
            return (&[COMMON, BLOCKS, GEMM_EPILOGUE, GEMM], d.add_experts().add_flag("CHOSEN"));
        }
        if step == Step::SharedDown {
            d = d.add_flag("PRODUCTS");
        }
        if variant.by_rows() {
            let d = d.add_value("ROWS_PER_ITEM", variant.rows).add_value("TOKENS", variant.tokens);
            return (
                &[COMMON, BLOCKS, WHOLE_ROWS, GEMM_EPILOGUE, GEMM_ROWS],
                d.add_value("TURNS", GEMM_ROWS_TOKENS / variant.tokens),
            );
        }
        match self.shapes.on_tensor_cores(storage, variant) {
            Some(cores) => cores.source(d, cores.tile(step)),
            None => (&[COMMON, BLOCKS, GEMM_EPILOGUE, GEMM], d),
        }
    }

    fn gemm_few_source(
        &self,
        (step, storage): (Step, MatrixStorage),
        defines: Defines,
    ) -> (&'static [&'static str], Defines) {
        let (s, d) = (&self.shapes, self.matrix_defines(defines, step, storage, BASELINE).add_flag("FEW"));
        let d = if step == Step::SharedDown { d.add_flag("PRODUCTS") } else { d };
        if let Some(cores) = s.few_on_tensor_cores(step, storage) {
            return cores.source(d, cores.few_tile());
        }
        let FewShape { slices, tokens } = s.few_shape(step);
        let d = d.add_flag("W_HELD").add_value("TOKENS", tokens).add_value("SLICES", slices);
        (
            &[COMMON, BLOCKS, GEMM_EPILOGUE, GEMM_FEW],
            if s.tensor_cores.is_some() { d.add_flag("TENSOR") } else { d },
        )
    }
}

/// Adds the options of the conversion of a matrix's input.
fn activation_defines(defines: Defines, input: MatmulInput, form: Activations) -> Defines {
    let quantised = match form {
        Activations::Floats => 0,
        Activations::Quantised => 1,
        Activations::Integers => 2,
    };
    let d = defines.add_value("COLS", input.column_count()).add_value("QUANTISED", quantised);
    let d = match input {
        MatmulInput::LocalAtt => d.add_local_heads(),
        // Their activation function and biases.
        MatmulInput::ExpertFfn => {
            let d = d.add_experts().add_value("ROWS", EXPERTS.dim);
            d.add_flag("CHOSEN").add_flag(Step::ExpertGateUp.names().1)
        }
        _ => d,
    };
    d.add_flag(input_flag(input))
}
