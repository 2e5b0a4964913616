//! Model weights in device memory, as on the CPU: in the layout of [`numeric::quant::format`], or row-major. Matrices
//! of one step with the same storage are adjacent; they are split by rows if a buffer would be too large.

mod calibration;
mod shared;
mod upload;

use super::by_layer::ByLayer;
use super::defines::{KV_PAD, Q_PAD, QKV};
use super::storage::{Activations, MatrixStorage, Step};
use super::variants::VariantPair;
use crate::dims::*;
use crate::model::weights::{Attention, Ffn, Layer, Mixer, PerLayerEmbeddings, Weights};
use files::config::QkNorm;
use opencl_runtime::arena::Arena;
use opencl_runtime::buffer::{Access, Buffer, Place, bytes_of};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, FailureKind, Result};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use upload::Upload;

pub use calibration::{calibration, calibration_bytes};

/// Rows `16 * first..16 * (first + groups)` of a step's result.
pub struct Chunk {
    /// Storage of the rows.
    pub storage: MatrixStorage,
    /// `[half][group]` quants, or `[half][row]`.
    pub quants: Buffer,
    /// `[half][group]` scales; `None` for unquantised rows.
    pub scales: Option<Buffer>,
    /// First group of the result.
    pub first: usize,
    /// Groups of the result.
    pub groups: usize,
}

/// The matrices of one step of one layer.
pub struct StepWeights {
    /// Form of the activations that they are multiplied with.
    pub reads: Activations,
    /// In ascending order of rows.
    pub chunks: Vec<Chunk>,
}

impl StepWeights {
    /// True if variants of kernels multiply with them.
    pub fn is_quantised(&self) -> bool {
        self.reads == Activations::Quantised
    }
}

/// One layer in the device's memory.
pub struct LayerWeights {
    /// Matrices of each of [`Step::of_layer`]; without those of a feed-forward that the host computes.
    pub steps: Vec<(Step, StepWeights)>,
    /// True if the CPU computes its feed-forward, which has experts.
    pub leaves_experts: bool,
    /// Weights of the norm before attention (`[DIM]`), then its biases.
    pub attn_norm: Option<Buffer>,
    /// Norm before the feed-forward layer, likewise.
    pub ffn_norm: Option<Buffer>,
    /// `[QKV]`, zeros in the padding; `None` if the model has no such bias.
    pub qkv_bias: Option<Buffer>,
    /// `[DIM]`
    pub o_bias: Option<Buffer>,
    /// `[q | k][HEAD_DIM]`
    pub qk_norm: Option<Buffer>,
    /// `[DIM]`, norms behind attention, behind the feed-forward, and of the layer's embedding of a token, as far as the
    /// model has them. If layers have factors, each is followed by that of the residual.
    pub post_norms: Vec<Buffer>,
    /// Biases of the scores of experts, then those of their choice, then factors of their weights: `[EXPERTS.count]`
    /// each.
    pub router_bias: Option<Buffer>,
    /// Norms of the inputs of the router and of the experts, where they are not `ffn_norm`.
    pub router_norm: Option<Buffer>,
    pub experts_norm: Option<Buffer>,
    /// Norms of the outputs of the experts and of the feed-forward beside them: `[DIM]` each.
    pub branch_norms: Option<Buffer>,
    /// `[FFN_DIM]`; of experts `[gate | up][EXPERT_ROWS]`
    pub up_bias: Option<Buffer>,
    /// `[DIM]`; of experts `[EXPERT_DOWN_ROWS]`
    pub down_bias: Option<Buffer>,
    /// Taps of a recurrent layer's convolution: `[CONV_TAPS][CONV_CHANNELS]`; of Mamba2 its biases follow.
    pub taps: Option<Buffer>,
    /// Of a delta net: `[bias | decay][value_heads]`; of Mamba2 `[bias | decay | skip][heads]`
    pub head_factors: Option<Buffer>,
    /// Norm of the output of a delta net, `[value_dim]`, or of Mamba2, `[MAMBA_DIM]`
    pub mixed_norm: Option<Buffer>,
    /// Consecutive heads that share a key head of a delta net, or a group of Mamba2; 0 for other layers.
    pub shared_run: usize,
}

impl LayerWeights {
    /// Weights of a step.
    ///
    /// # Panics
    ///
    /// If the layer does not have it.
    pub fn step(&self, step: Step) -> &StepWeights {
        let found = self.steps.iter().find(|(own, _)| *own == step);
        &found.expect("invariant: a step of the layer").1
    }

    /// Norm of the input of a step of the feed-forward.
    pub fn ffn_norm_of(&self, step: Step) -> Option<&Buffer> {
        let own = match step {
            Step::Router => self.router_norm.as_ref(),
            Step::ExpertGateUp => self.experts_norm.as_ref(),
            _ => None,
        };
        own.or(self.ffn_norm.as_ref())
    }
}

/// Vectors of a layer's mixers, in the order of upload; empty if it has none.
#[derive(Default)]
struct MixerVectors {
    qkv_bias: Vec<f32>,
    o_bias: Vec<f32>,
    qk_norm: Vec<f32>,
    taps: Vec<f32>,
    head_factors: Vec<f32>,
    mixed_norm: Vec<f32>,
}

impl MixerVectors {
    fn of(l: &Layer) -> Self {
        let mut all = Self::default();
        match &l.mixer {
            Mixer::Attention(a) => all.add_attention(a),
            Mixer::LocalAttention(a) => all.add_attention(a),
            Mixer::ShortConv(w) => all.taps = w.taps.clone(),
            Mixer::DeltaNet(w) => {
                all.taps = w.taps.clone();
                all.head_factors = [w.bias.as_slice(), w.decay.as_slice()].concat();
                all.mixed_norm = w.norm.clone();
            }
            Mixer::None => {}
        }
        if let Some(w) = &l.mamba {
            all.taps = w.taps.clone();
            all.taps.extend(&w.conv_bias);
            all.taps.resize((CONV_TAPS + 1) * CONV_CHANNELS, 0.0);
            all.head_factors = [w.bias.as_slice(), w.decay.as_slice(), w.skip.as_slice()].concat();
            all.mixed_norm = w.norm.clone();
        }
        all
    }

    fn add_attention<const Q: usize, const KV: usize>(&mut self, a: &Attention<Q, KV>) {
        if QKV_BIAS {
            self.qkv_bias = vec![0.0; QKV];
            for (at, part) in [(0, &a.q_bias), (Q_PAD, &a.k_bias), (Q_PAD + KV_PAD, &a.v_bias)] {
                self.qkv_bias[at..at + part.len()].copy_from_slice(part);
            }
        }
        self.o_bias = a.o_bias.clone();
        self.qk_norm = [&a.q_norm, &a.k_norm].into_iter().flat_map(|norm| pad_norm(norm)).collect();
    }
}

/// A norm of narrower heads with zeros behind its weights; of all heads together as it is.
fn pad_norm(norm: &[f32]) -> Vec<f32> {
    let mut norm = norm.to_vec();
    if QK_NORM == QkNorm::PerHead {
        norm.resize(HEAD_DIM, 0.0);
    }
    norm
}

/// A device with the model's weights in its memory, shared by all its users.
pub struct Model {
    pub(super) device: Device,
    pub(super) weights: Arc<Weights>,
    pub(super) matrices: Matrices,
    /// Selected kernel variants, once known.
    variants: Mutex<Option<VariantPair>>,
    /// True once the user was told that the kernels are not the fastest.
    told: AtomicBool,
}

impl Model {
    /// Combines a device, weights, and their copy on it.
    pub fn new(device: Device, weights: Arc<Weights>, matrices: Matrices) -> Self {
        Self { device, weights, matrices, variants: Mutex::new(None), told: AtomicBool::new(false) }
    }

    /// Variants of the kernels: forced by [`super::variants::VARIANT_VARIABLE`], otherwise those set, otherwise the
    /// baseline.
    ///
    /// # Errors
    ///
    /// See [`VariantPair::from_environment`].
    pub fn kernel_variants(&self) -> files::Result<VariantPair> {
        let forced = VariantPair::from_environment(self.device.info())?;
        Ok(forced.or(*self.lock_variants()).unwrap_or(VariantPair::BASELINE))
    }

    /// True once variants were set.
    pub(super) fn has_variants(&self) -> bool {
        self.lock_variants().is_some()
    }

    /// Sets the variants of the kernels.
    pub fn set_variants(&self, variants: VariantPair) {
        *self.lock_variants() = Some(variants);
    }

    fn lock_variants(&self) -> MutexGuard<'_, Option<VariantPair>> {
        self.variants.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True on the first call: the user has not been told yet that the kernels are not the fastest.
    pub fn take_untold(&self) -> bool {
        !self.told.swap(true, Ordering::Relaxed)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The layers that it computes.
    pub fn layer_range(&self) -> Range<usize> {
        self.matrices.layers.layer_range()
    }

    /// True if it leaves experts to the CPU.
    pub fn leaves_experts(&self) -> bool {
        self.matrices.layers.values().any(|l| l.leaves_experts)
    }
}

/// All weights but the embedding, whose rows the host looks up.
pub struct Matrices {
    /// Transformer blocks.
    pub(super) layers: ByLayer<LayerWeights>,
    /// Projection and norm of the embeddings that all layers have of a token, if the model has such.
    pub(super) per_layer: Option<(StepWeights, Buffer)>,
    /// Final norm.
    pub(super) norm: Buffer,
    /// Output head; without chunks on the stage of a split that is not the last.
    pub(super) head: StepWeights,
}

impl Matrices {
    /// Copies the weights to the device.
    ///
    /// # Errors
    ///
    /// `Memory` if there is no room for them, `Device` if the device fails.
    pub fn copy(device: &Device, weights: &Weights, place: Place) -> files::Result<Self> {
        Self::copy_layers(device, weights, (&DeviceLayers::ALL, place))
    }

    /// [`Matrices::copy`] of what a device needs that computes only some layers.
    ///
    /// # Errors
    ///
    /// See [`Matrices::copy`].
    pub fn copy_layers(
        device: &Device,
        weights: &Weights,
        (part, place): (&DeviceLayers, Place),
    ) -> files::Result<Self> {
        let mut to = Uploader::new(device, weights, (part, place))?;
        let (to, layers) = (&mut to, part.layers.clone());
        let (is_last, head) = (layers.end == LAYERS, Upload::of(&weights.head));
        // In the order of `upload_sizes`.
        let copied = Self {
            layers: ByLayer::try_new(layers, |i| upload_layer(to, &weights.layers[i], i))?,
            per_layer: upload_per_layer(to, weights.per_layer.as_ref())?,
            norm: upload_floats(to, &weights.norm)?,
            head: if is_last {
                upload_step(to, Step::Head, &[head])?
            } else {
                StepWeights { reads: head.storage.activation_form(), chunks: Vec::new() }
            },
        };
        device.finish()?;
        Ok(copied)
    }
}

/// The layers of a device.
#[derive(Debug, Clone)]
pub struct DeviceLayers {
    /// Their range.
    pub layers: Range<usize>,
    /// True if the CPU computes feed-forwards with experts.
    pub leaves_experts: bool,
}

impl DeviceLayers {
    /// All layers with all that they have.
    pub const ALL: Self = Self { layers: 0..LAYERS, leaves_experts: false };

    /// Matrices of a layer's steps, and the vectors of its feed-forward, as far as the device has them.
    fn split_layer<'l>(&self, l: &'l Layer) -> Result<(Vec<Vec<Upload<'l>>>, FfnVectors)> {
        match &l.ffn {
            Ffn::Experts(_) if self.leaves_experts => Ok((upload::of_mixers(l)?, Default::default())),
            ffn => Ok((upload::of_layer(l)?, ffn_vectors(ffn))),
        }
    }
}

const _: () = assert!(!HAS_EXPERTS || !HAS_PER_LAYER, "the last steps of a layer can be its experts'");

/// Destination of weights.
struct Uploader<'a> {
    device: &'a Device,
    part: DeviceLayers,
    matrices: Arena<'a>,
    floats: Arena<'a>,
}

impl<'a> Uploader<'a> {
    fn new(device: &'a Device, weights: &Weights, (part, place): (&DeviceLayers, Place)) -> Result<Self> {
        let (matrices, floats) = upload_sizes(weights, part)?;
        let arena = |sizes: &[usize], place: Place| Arena::new(device, sizes, Access::ReadOnly, place);
        // The CPU has its own copy of the small ones.
        let small = if place == Place::HostVisible { Place::Device } else { place };
        let (matrices, floats) = (arena(&matrices, place), arena(&floats, small));
        Ok(Self { device, part: part.clone(), matrices, floats })
    }
}

/// Bytes of unsplit matrices, and of floats, in the order of upload.
fn upload_sizes(weights: &Weights, part: &DeviceLayers) -> Result<(Vec<usize>, Vec<usize>)> {
    let mut matrices = Vec::new();
    let mut of_step = |parts: &[Upload<'_>]| {
        for run in parts.chunk_by(Upload::has_same_storage) {
            let (group, scale) = run[0].storage.group_bytes(run[0].cols);
            let groups: usize = run.iter().map(Upload::groups).sum();
            matrices.extend([group * groups, scale * groups].into_iter().filter(|&n| n > 0));
        }
    };
    let mut floats = Vec::new();
    for l in &weights.layers[part.layers.clone()] {
        let (steps, ffn) = part.split_layer(l)?;
        steps.iter().for_each(|parts| of_step(parts));
        let mixer = MixerVectors::of(l);
        floats.extend(post_norms(l).iter().map(|norm| 4 * norm.len()));
        let all = [
            &l.attn_norm,
            &l.ffn_norm,
            &mixer.qkv_bias,
            &mixer.o_bias,
            &mixer.qk_norm,
            &mixer.taps,
            &mixer.head_factors,
            &mixer.mixed_norm,
        ];
        let all = all.into_iter().chain(&ffn).map(Vec::len);
        floats.extend(all.filter(|&n| n > 0).map(|n| 4 * n));
    }
    if let Some(w) = weights.per_layer.as_ref().filter(|_| HAS_PER_LAYER) {
        of_step(&[Upload::of(&w.projection)]);
        floats.push(4 * w.norm.len());
    }
    if part.layers.end == LAYERS {
        of_step(&[Upload::of(&weights.head)]);
    }
    floats.push(4 * weights.norm.len());
    Ok((matrices, floats))
}

/// Vectors of a feed-forward as [`LayerWeights`] has them, empty without: biases of up, down and router; norms of the
/// inputs of router and experts, and of outputs.
type FfnVectors = [Vec<f32>; 6];

fn ffn_vectors(ffn: &Ffn) -> FfnVectors {
    let biases = |up: &[f32], down: &[f32]| {
        let [router, router_norm, experts_norm, branch_norms] = Default::default();
        [up.to_vec(), down.to_vec(), router, router_norm, experts_norm, branch_norms]
    };
    match ffn {
        Ffn::Usual(w) => biases(&w.up_bias, &w.down_bias),
        Ffn::Wide(w) => biases(&w.up_bias, &w.down_bias),
        Ffn::Experts(w) => {
            let mut all = biases(&[&w.gate_bias[..], &w.up_bias].concat(), &w.down_bias);
            let [_, _, router, of_branches @ ..] = &mut all;
            *router = [&w.router_bias[..], &w.choice_bias].concat();
            if let Some(w) = &w.branches {
                router.extend(&w.expert_scale);
                let outputs = [&w.experts_post_norm[..], &w.shared_post_norm].concat();
                *of_branches = [w.router_norm.clone(), w.experts_norm.clone(), outputs];
            }
            all
        }
        Ffn::None => Default::default(),
    }
}

/// Norms of outputs before they are added to the residual, in the order of the steps; each with a factor of the residual,
/// which is the layer's own for the last one, if layers have such.
fn post_norms(l: &Layer) -> Vec<Vec<f32>> {
    let per_layer = l.per_layer.as_ref().filter(|_| HAS_PER_LAYER).map(|w| &w.norm);
    let norms = [Some(&l.attn_post_norm), Some(&l.ffn_post_norm), per_layer];
    let mut norms: Vec<_> = norms.into_iter().flatten().filter(|norm| !norm.is_empty()).cloned().collect();
    if LAYER_SCALARS {
        norms.iter_mut().for_each(|norm| norm.push(1.0));
        if let Some(scalar) = norms.last_mut().and_then(|norm| norm.last_mut()) {
            *scalar = l.scalar;
        }
    }
    norms
}

fn upload_per_layer(
    to: &mut Uploader<'_>,
    weights: Option<&PerLayerEmbeddings>,
) -> Result<Option<(StepWeights, Buffer)>> {
    let Some(w) = weights.filter(|_| HAS_PER_LAYER) else { return Ok(None) };
    let projection = upload_step(to, Step::PerLayerInputs, &[Upload::of(&w.projection)])?;
    Ok(Some((projection, upload_floats(to, &w.norm)?)))
}

fn upload_layer(to: &mut Uploader<'_>, l: &Layer, index: usize) -> Result<LayerWeights> {
    let mixer = MixerVectors::of(l);
    let some = |to: &mut Uploader<'_>, values: &[f32]| {
        (!values.is_empty()).then(|| upload_floats(to, values)).transpose()
    };
    let (parts, ffn) = to.part.split_layer(l)?;
    let steps = Step::of_layer(index).into_iter().zip(&parts);
    let [up_bias, down_bias, router_bias, router_norm, experts_norm, branch_norms] = &ffn;
    Ok(LayerWeights {
        steps: steps.map(|(step, parts)| Ok((step, upload_step(to, step, parts)?))).collect::<Result<_>>()?,
        leaves_experts: to.part.leaves_experts && has_experts(index),
        attn_norm: some(to, &l.attn_norm)?,
        ffn_norm: some(to, &l.ffn_norm)?,
        qkv_bias: some(to, &mixer.qkv_bias)?,
        o_bias: some(to, &mixer.o_bias)?,
        qk_norm: some(to, &mixer.qk_norm)?,
        post_norms: post_norms(l).iter().map(|norm| upload_floats(to, norm)).collect::<Result<_>>()?,
        router_bias: some(to, router_bias)?,
        router_norm: some(to, router_norm)?,
        experts_norm: some(to, experts_norm)?,
        branch_norms: some(to, branch_norms)?,
        up_bias: some(to, up_bias)?,
        down_bias: some(to, down_bias)?,
        taps: some(to, &mixer.taps)?,
        head_factors: some(to, &mixer.head_factors)?,
        mixed_norm: some(to, &mixer.mixed_norm)?,
        shared_run: match &l.mixer {
            Mixer::DeltaNet(w) => w.shared_run,
            _ => MAMBA.heads.checked_div(MAMBA.groups).unwrap_or(0),
        },
    })
}

fn upload_floats(to: &mut Uploader<'_>, values: &[f32]) -> Result<Buffer> {
    to.floats.buffer_of(bytes_of(values))
}

/// Uploads the matrices of one step. Those with the same storage are adjacent, in as few chunks as the device allows.
fn upload_step(to: &mut Uploader<'_>, step: Step, parts: &[Upload<'_>]) -> Result<StepWeights> {
    let mut chunks = Vec::new();
    let mut first = 0;
    for run in parts.chunk_by(Upload::has_same_storage) {
        self::upload_matrices(to, (step, first), run, &mut chunks)?;
        first += run.iter().map(Upload::groups).sum::<usize>();
    }
    Ok(StepWeights { reads: parts[0].storage.activation_form(), chunks })
}

/// Uploads matrices with the same storage that start at group `start` of the step's result.
fn upload_matrices(
    to: &mut Uploader<'_>,
    (step, start): (Step, usize),
    run: &[Upload<'_>],
    chunks: &mut Vec<Chunk>,
) -> Result<()> {
    let (storage, cols, halves) = (run[0].storage, run[0].cols, step.matrix_count());
    let (group, scale) = storage.group_bytes(cols);
    let groups = run.iter().map(Upload::groups).sum::<usize>() / halves;
    let unsplit = step.unsplit_groups();
    let most = usize::try_from(to.device.info().max_alloc).unwrap_or(usize::MAX) / (group * halves);
    let most = most / unsplit * unsplit;
    if most == 0 {
        let (name, bytes, rows) = (step.names().0, unsplit * group * halves, 16 * unsplit);
        let message =
            format!("the device allows no buffer of {bytes} bytes, which {name} needs for {rows} rows");
        return Err(Failure::new(FailureKind::Memory, message));
    }
    for first in (0..groups).step_by(most) {
        let n = most.min(groups - first);
        let mut buffer = |bytes: usize| to.matrices.buffer(n * halves * bytes);
        let quants = buffer(group)?;
        let scales = if scale > 0 { Some(buffer(scale)?) } else { None };
        let chunk = Chunk { storage, quants, scales, first: start + first, groups: n };
        if halves == 2 {
            write_groups(&run[0], first..first + n, &chunk, 0)?;
            write_groups(&run[1], first..first + n, &chunk, n)?;
        } else {
            let mut start = 0;
            for part in run {
                let (from, to) = (first.max(start), (first + n).min(start + part.groups()));
                if from < to {
                    write_groups(part, from - start..to - start, &chunk, from - first)?;
                }
                start += part.groups();
            }
        }
        chunks.push(chunk);
    }
    Ok(())
}

/// Writes some groups of a matrix to a chunk, starting at its group `at`; padding rows are zeros.
fn write_groups(matrix: &Upload<'_>, range: Range<usize>, chunk: &Chunk, at: usize) -> Result<()> {
    let (group, scale) = matrix.storage.group_bytes(matrix.cols);
    let end = (range.end * group).min(matrix.quants.len());
    let bytes = &matrix.quants[range.start * group..end];
    chunk.quants.write(at * group, bytes)?;
    let rest = at * group + bytes.len()..(at + range.len()) * group;
    chunk.quants.fill(rest, 0)?;
    match &chunk.scales {
        Some(scales) => scales.write(at * scale, &matrix.scales[range.start * scale..range.end * scale]),
        None => Ok(()),
    }
}
