//! The model's weights in the device's memory, as the CPU has them: in the layout of [`numeric::quant::format`], or
//! row-major. Matrices of one step and one form lie together, cut by rows where a buffer
//! may not be so large.

mod part;

use super::defines::{FFN_PAD, KV_PAD, Q_PAD, QKV};
use super::form::{Form, Quantised};
use super::whole;
use crate::dims::*;
use crate::model::weights::{Layer, Matrix, Weights};
use files::mapped::Plane;
use numeric::quant::format::GROUP_ROWS;
use numeric::quant::matrix;
use opencl_runtime::arena::Arena;
use opencl_runtime::buffer::{Access, Buffer, Place};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};
use part::Part;
use std::ops::Range;

/// Matrices that one step multiplies with at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are the steps' names")]
pub enum Step {
    Qkv,
    Out,
    GateUp,
    Down,
    Head,
}

impl Step {
    /// All of them.
    pub const ALL: [Step; 5] = [Step::Qkv, Step::Out, Step::GateUp, Step::Down, Step::Head];

    /// The step's name and its macro.
    pub fn names(self) -> (&'static str, &'static str) {
        match self {
            Step::Qkv => ("qkv", "STEP_QKV"),
            Step::Out => ("out", "STEP_OUT"),
            Step::GateUp => ("gate_up", "STEP_GATE_UP"),
            Step::Down => ("down", "STEP_DOWN"),
            Step::Head => ("head", "STEP_HEAD"),
        }
    }

    /// Rows of the result and columns. Of gate and up together, those of one.
    pub const fn shape(self) -> (usize, usize) {
        match self {
            Step::Qkv => (QKV, DIM),
            Step::Out => (DIM, Q_DIM),
            Step::GateUp => (FFN_DIM, DIM),
            Step::Down => (DIM, FFN_DIM),
            Step::Head => (VOCAB, DIM),
        }
    }

    /// Matrices side by side whose rows the step combines.
    pub const fn halves(self) -> usize {
        if matches!(self, Step::GateUp) { 2 } else { 1 }
    }

    /// Groups of sixteen rows of the result.
    pub const fn groups(self) -> usize {
        match self {
            Step::GateUp => FFN_PAD / GROUP_ROWS,
            step => step.shape().0.div_ceil(GROUP_ROWS),
        }
    }
}

/// Rows `16 * first..16 * (first + groups)` of a step's result.
pub struct Chunk {
    /// How they are stored.
    pub form: Form,
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
    /// What all of them are multiplied with.
    pub reads: Quantised,
    /// In ascending order of rows.
    pub chunks: Vec<Chunk>,
}

/// One layer in the device's memory.
pub struct LayerWeights {
    /// In the order of [`Step::ALL`], without the head.
    pub steps: [StepWeights; 4],
    /// `[DIM]`, before attention.
    pub attn_norm: Buffer,
    /// `[DIM]`, before the feed-forward layer.
    pub ffn_norm: Buffer,
    /// `[QKV]`, zeros where a model has none.
    pub qkv_bias: Option<Buffer>,
    /// `[DIM]`
    pub o_bias: Option<Buffer>,
    /// `[q | k][HEAD_DIM]`
    pub qk_norm: Option<Buffer>,
}

/// All weights but the embedding, whose rows the host looks up.
pub struct DeviceWeights {
    /// Transformer blocks.
    pub layers: Vec<LayerWeights>,
    /// The final norm.
    pub norm: Buffer,
    /// The output projection.
    pub head: StepWeights,
}

impl DeviceWeights {
    /// Copies the weights.
    pub fn upload(device: &Device, weights: &Weights, place: Place) -> Result<Self> {
        let mut to = To::new(device, place, weights)?;
        let to = &mut to;
        Ok(Self {
            layers: weights.layers.iter().map(|l| layer(to, l)).collect::<Result<_>>()?,
            norm: floats(to, &weights.norm)?,
            head: step(to, Step::Head, &[Part::of(&weights.head)])?,
        })
    }

    /// Moves the weights to memory that the device and the CPU see: afterwards `weights` are views on it. A matrix
    /// that had to be cut in chunks, or widened, stays with the CPU as well.
    pub fn share(device: &Device, weights: &mut Weights) -> Result<Self> {
        let mut to = To::new(device, Place::HostVisible, weights)?;
        let to = &mut to;
        let mut layers = Vec::with_capacity(weights.layers.len());
        for l in &mut weights.layers {
            let on_device = layer(to, l)?;
            let [qkv, out, gate_up, down] = &on_device.steps;
            adopt_rows(&mut l.wq, qkv, 0)?;
            adopt_rows(&mut l.wk, qkv, Q_PAD / GROUP_ROWS)?;
            adopt_rows(&mut l.wv, qkv, (Q_PAD + KV_PAD) / GROUP_ROWS)?;
            adopt_rows(&mut l.wo, out, 0)?;
            if let [both] = &gate_up.chunks[..] {
                adopt(&mut l.gate, both, 0)?;
                adopt(&mut l.up, both, FFN_PAD / GROUP_ROWS)?;
            }
            adopt_rows(&mut l.down, down, 0)?;
            layers.push(on_device);
        }
        let head = step(to, Step::Head, &[Part::of(&weights.head)])?;
        adopt_rows(&mut weights.head, &head, 0)?;
        Ok(Self { layers, norm: floats(to, &weights.norm)?, head })
    }
}

/// [`adopt`] for a matrix whose rows are those of a step's result from group `first` on, if one chunk has them all.
fn adopt_rows<const ROWS: usize, const COLS: usize>(
    matrix: &mut Matrix<ROWS, COLS>,
    step: &StepWeights,
    first: usize,
) -> Result<()> {
    let end = first + ROWS.div_ceil(GROUP_ROWS);
    match step.chunks.iter().find(|c| c.first <= first && end <= c.first + c.groups) {
        Some(chunk) => adopt(matrix, chunk, first - chunk.first),
        None => Ok(()),
    }
}

/// Makes a matrix a view on the device's copy, which begins at group `first` of a chunk, unless that is another form.
fn adopt<const ROWS: usize, const COLS: usize>(
    matrix: &mut Matrix<ROWS, COLS>,
    chunk: &Chunk,
    first: usize,
) -> Result<()> {
    if Part::of(matrix).form != chunk.form {
        return Ok(());
    }
    let (group, scale) = chunk.form.group_bytes(COLS);
    let view = |buffer: &Buffer, range: Range<usize>| {
        let plane = Plane::shared(buffer.clone().freeze()?);
        Ok(plane.slice(range).expect("invariant: the chunk holds all of the matrix"))
    };
    let end = first + ROWS.div_ceil(GROUP_ROWS);
    let quants = |len: usize| view(&chunk.quants, first * group..first * group + len);
    let scales = || {
        let scales = chunk.scales.as_ref().expect("invariant: quantised matrices have scales");
        view(scales, first * scale..end * scale)
    };
    let all = (end - first) * group;
    // What was mapped from a file is read from the device's memory from now on, so it need not stay as well.
    match matrix {
        Matrix::Dense { dtype, data } => {
            data.release();
            *data = quants(ROWS * COLS * dtype.size())?;
        }
        Matrix::Quantised(w) => {
            w.release();
            *w = matrix::Quantised::new(w.format(), quants(all)?, scales()?)
                .expect("invariant: lengths are those of the shape");
        }
    }
    Ok(())
}

/// Where weights go.
struct To<'a> {
    device: &'a Device,
    matrices: Arena<'a>,
    floats: Arena<'a>,
}

impl<'a> To<'a> {
    fn new(device: &'a Device, place: Place, weights: &Weights) -> Result<Self> {
        let (matrices, floats) = sizes(weights)?;
        let arena = |sizes: &[usize], place: Place| whole::arena(device, sizes, Access::ReadOnly, place);
        // The CPU has its own copy of the small ones.
        let small = if place == Place::HostVisible { Place::Device } else { place };
        Ok(Self { device, matrices: arena(&matrices, place), floats: arena(&floats, small) })
    }
}

/// Bytes of matrices and of floats, in the order in which they are uploaded and uncut.
fn sizes(weights: &Weights) -> Result<(Vec<usize>, Vec<usize>)> {
    let mut matrices = Vec::new();
    let mut of_step = |parts: &[Part<'_>]| {
        for run in parts.chunk_by(Part::same_form) {
            let (group, scale) = run[0].form.group_bytes(run[0].cols);
            let groups: usize = run.iter().map(Part::groups).sum();
            matrices.extend([group * groups, scale * groups].into_iter().filter(|&n| n > 0));
        }
    };
    let mut floats = Vec::new();
    for l in &weights.layers {
        part::of_layer(l)?.iter().for_each(|parts| of_step(parts));
        let biases = [if QKV_BIAS { QKV } else { 0 }, l.o_bias.len(), l.q_norm.len() + l.k_norm.len()];
        floats.extend([DIM, DIM].into_iter().chain(biases).filter(|&n| n > 0).map(|n| 4 * n));
    }
    of_step(&[Part::of(&weights.head)]);
    floats.push(4 * DIM);
    Ok((matrices, floats))
}

fn layer(to: &mut To<'_>, l: &Layer) -> Result<LayerWeights> {
    let mut bias = vec![0.0; if QKV_BIAS { QKV } else { 0 }];
    if QKV_BIAS {
        for (at, part) in [(0, &l.q_bias), (Q_PAD, &l.k_bias), (Q_PAD + KV_PAD, &l.v_bias)] {
            bias[at..at + part.len()].copy_from_slice(part);
        }
    }
    let some = |to: &mut To<'_>, values: &[f32]| (!values.is_empty()).then(|| floats(to, values)).transpose();
    let [qkv, out, gate_up, down] = part::of_layer(l)?;
    Ok(LayerWeights {
        steps: [
            step(to, Step::Qkv, &qkv)?,
            step(to, Step::Out, &out)?,
            step(to, Step::GateUp, &gate_up)?,
            step(to, Step::Down, &down)?,
        ],
        attn_norm: floats(to, &l.attn_norm)?,
        ffn_norm: floats(to, &l.ffn_norm)?,
        qkv_bias: some(to, &bias)?,
        o_bias: some(to, &l.o_bias)?,
        qk_norm: some(to, &[l.q_norm.as_slice(), l.k_norm.as_slice()].concat())?,
    })
}

fn floats(to: &mut To<'_>, values: &[f32]) -> Result<Buffer> {
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    to.floats.buffer_of(&bytes)
}

/// Uploads the matrices of one step, those of one form side by side in as few chunks as buffers of the device allow.
fn step(to: &mut To<'_>, step: Step, parts: &[Part<'_>]) -> Result<StepWeights> {
    let mut chunks = Vec::new();
    let mut first = 0;
    for run in parts.chunk_by(Part::same_form) {
        self::run(to, (step, first), run, &mut chunks)?;
        first += run.iter().map(Part::groups).sum::<usize>();
    }
    Ok(StepWeights { reads: parts[0].form.reads(), chunks })
}

/// Uploads matrices of one form, which begin at this group of the step's result.
fn run(
    to: &mut To<'_>,
    (step, start): (Step, usize),
    run: &[Part<'_>],
    chunks: &mut Vec<Chunk>,
) -> Result<()> {
    let (form, cols, halves) = (run[0].form, run[0].cols, step.halves());
    let (group, scale) = form.group_bytes(cols);
    let groups = run.iter().map(Part::groups).sum::<usize>() / halves;
    // Pairs of groups: `gate_up` writes blocks of 32.
    let most = usize::try_from(to.device.facts().max_alloc).unwrap_or(usize::MAX) / (group * halves) / 2 * 2;
    if most == 0 {
        let (name, bytes) = (step.names().0, 2 * group * halves);
        let message = format!("the device allows no buffer of {bytes} bytes, which {name} needs for 32 rows");
        return Err(Failure::new(Kind::Memory, message));
    }
    for first in (0..groups).step_by(most) {
        let n = most.min(groups - first);
        let mut buffer = |bytes: usize| to.matrices.buffer(n * halves * bytes);
        let quants = buffer(group)?;
        let scales = if scale > 0 { Some(buffer(scale)?) } else { None };
        let chunk = Chunk { form, quants, scales, first: start + first, groups: n };
        if halves == 2 {
            run[0].write(first..first + n, &chunk, 0)?;
            run[1].write(first..first + n, &chunk, n)?;
        } else {
            let mut start = 0;
            for part in run {
                let (from, to) = (first.max(start), (first + n).min(start + part.groups()));
                if from < to {
                    part.write(from - start..to - start, &chunk, from - first)?;
                }
                start += part.groups();
            }
        }
        chunks.push(chunk);
    }
    Ok(())
}
