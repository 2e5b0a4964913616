//! The model's weights in the device's memory, in the layout of [`crate::quant::packed`] (or row-major as
//! stored), matrices of one step together, cut by rows where a buffer may not be so large.

use super::arena::Arena;
use super::buffer::{Access, Buffer, Place};
use super::defines::{FFN_PAD, KV_PAD, Q_PAD, QKV};
use super::device::Device;
use super::failure::{Failure, Kind, Result};
use crate::dims::*;
use crate::quant::BLOCK;
use crate::quant::packed::{GROUP_ROWS, Packed, QUANT_BYTES, SCALE_BYTES};
use crate::weights::region::Plane;
use crate::weights::source::Dtype;
use crate::weights::{Layer, Matrix, Weights};
use std::ops::Range;

/// How a matrix is stored, by the numbers that kernels know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Packed Q4_0.
    Q4 = 0,
    /// f32, row-major.
    F32 = 1,
    /// f16, row-major.
    F16 = 2,
    /// bf16, row-major.
    Bf16 = 3,
}

impl Form {
    /// Bytes of a group of sixteen rows: quants (or rows) and scales.
    pub fn group_bytes(self, cols: usize) -> (usize, usize) {
        match self {
            Form::Q4 => (cols / BLOCK * QUANT_BYTES, cols / BLOCK * SCALE_BYTES),
            Form::F32 => (GROUP_ROWS * cols * 4, 0),
            Form::F16 | Form::Bf16 => (GROUP_ROWS * cols * 2, 0),
        }
    }
}

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
    /// How they are stored.
    pub form: Form,
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
        let mut to = To::new(device, place, weights);
        let to = &mut to;
        Ok(Self {
            layers: weights.layers.iter().map(|l| layer(to, l)).collect::<Result<_>>()?,
            norm: floats(to, &weights.norm)?,
            head: step(to, Step::Head, &[part(&weights.head)])?,
        })
    }

    /// Moves the weights to memory that the device and the CPU see: afterwards `weights` are views on it. A matrix
    /// that had to be cut in chunks, or widened, stays with the CPU as well.
    pub fn share(device: &Device, weights: &mut Weights) -> Result<Self> {
        let mut to = To::new(device, Place::HostVisible, weights);
        let to = &mut to;
        let mut layers = Vec::with_capacity(weights.layers.len());
        for l in &mut weights.layers {
            let on_device = layer(to, l)?;
            let [qkv, out, gate_up, down] = &on_device.steps;
            adopt(&mut l.wq, qkv, 0)?;
            adopt(&mut l.wk, qkv, Q_PAD / GROUP_ROWS)?;
            adopt(&mut l.wv, qkv, (Q_PAD + KV_PAD) / GROUP_ROWS)?;
            adopt(&mut l.wo, out, 0)?;
            adopt(&mut l.gate, gate_up, 0)?;
            adopt(&mut l.up, gate_up, FFN_PAD / GROUP_ROWS)?;
            adopt(&mut l.down, down, 0)?;
            layers.push(on_device);
        }
        let head = step(to, Step::Head, &[part(&weights.head)])?;
        adopt(&mut weights.head, &head, 0)?;
        Ok(Self { layers, norm: floats(to, &weights.norm)?, head })
    }
}

/// Makes a matrix a view on the device's copy, which begins at group `first` of its step's.
fn adopt<const ROWS: usize, const COLS: usize>(
    matrix: &mut Matrix<ROWS, COLS>,
    step: &StepWeights,
    first: usize,
) -> Result<()> {
    let ([chunk], true) = (&step.chunks[..], part(matrix).form == step.form) else { return Ok(()) };
    let (group, scale) = step.form.group_bytes(COLS);
    let view = |buffer: &Buffer, range: Range<usize>| {
        let plane = Plane::shared(buffer.clone().freeze()?);
        Ok(plane.slice(range).expect("invariant: the step holds all its matrices"))
    };
    let end = first + ROWS.div_ceil(GROUP_ROWS);
    // What was mapped from a file is read from the device's memory from now on, so it need not stay as well.
    match matrix {
        Matrix::Dense { data, .. } => data.release(),
        Matrix::Q4(packed) => packed.release(),
    }
    match (matrix, &chunk.scales) {
        (Matrix::Dense { dtype, data }, _) => {
            *data = view(&chunk.quants, first * group..first * group + ROWS * COLS * dtype.size())?;
        }
        (Matrix::Q4(packed), Some(scales)) => {
            let quants = view(&chunk.quants, first * group..end * group)?;
            let scales = view(scales, first * scale..end * scale)?;
            *packed = Packed::new(quants, scales).expect("invariant: lengths are those of the shape");
        }
        (Matrix::Q4(_), None) => unreachable!("invariant: packed matrices have scales"),
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
    fn new(device: &'a Device, place: Place, weights: &Weights) -> Self {
        let (matrices, floats) = sizes(weights);
        let arena = |sizes: &[usize], place: Place| Arena::new(device, sizes, Access::ReadOnly, place);
        // The CPU has its own copy of the small ones.
        let small = if place == Place::HostVisible { Place::Device } else { place };
        Self { device, matrices: arena(&matrices, place), floats: arena(&floats, small) }
    }
}

/// Bytes of matrices and of floats, in the order in which they are uploaded and uncut.
fn sizes(weights: &Weights) -> (Vec<usize>, Vec<usize>) {
    let mut matrices = Vec::new();
    let mut of_step = |step: Step, form: Form| {
        let (group, scale) = form.group_bytes(step.shape().1);
        let groups = step.groups() * step.halves();
        matrices.extend([group * groups, scale * groups].into_iter().filter(|&n| n > 0));
    };
    let mut floats = Vec::new();
    for l in &weights.layers {
        of_step(Step::Qkv, part(&l.wq).form);
        of_step(Step::Out, part(&l.wo).form);
        of_step(Step::GateUp, part(&l.gate).form);
        of_step(Step::Down, part(&l.down).form);
        let biases = [if QKV_BIAS { QKV } else { 0 }, l.o_bias.len(), l.q_norm.len() + l.k_norm.len()];
        floats.extend([DIM, DIM].into_iter().chain(biases).filter(|&n| n > 0).map(|n| 4 * n));
    }
    of_step(Step::Head, part(&weights.head).form);
    floats.push(4 * DIM);
    (matrices, floats)
}

fn layer(to: &mut To<'_>, l: &Layer) -> Result<LayerWeights> {
    let mut bias = vec![0.0; if QKV_BIAS { QKV } else { 0 }];
    if QKV_BIAS {
        for (at, part) in [(0, &l.q_bias), (Q_PAD, &l.k_bias), (Q_PAD + KV_PAD, &l.v_bias)] {
            bias[at..at + part.len()].copy_from_slice(part);
        }
    }
    let some = |to: &mut To<'_>, values: &[f32]| (!values.is_empty()).then(|| floats(to, values)).transpose();
    Ok(LayerWeights {
        steps: [
            step(to, Step::Qkv, &[part(&l.wq), part(&l.wk), part(&l.wv)])?,
            step(to, Step::Out, &[part(&l.wo)])?,
            step(to, Step::GateUp, &[part(&l.gate), part(&l.up)])?,
            step(to, Step::Down, &[part(&l.down)])?,
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

/// One matrix as bytes, in groups of sixteen rows.
struct Part<'a> {
    rows: usize,
    cols: usize,
    form: Form,
    /// Quants, or rows.
    quants: std::borrow::Cow<'a, [u8]>,
    scales: &'a [u8],
}

fn part<const ROWS: usize, const COLS: usize>(m: &Matrix<ROWS, COLS>) -> Part<'_> {
    let (form, quants, scales) = match m {
        Matrix::Q4(packed) => {
            let all = 0..ROWS.div_ceil(GROUP_ROWS);
            (Form::Q4, packed.quants(all.clone()), packed.scales(all))
        }
        Matrix::Dense { dtype: Dtype::F32, data } => (Form::F32, data.bytes(), [].as_slice()),
        Matrix::Dense { dtype: Dtype::F16, data } => (Form::F16, data.bytes(), [].as_slice()),
        Matrix::Dense { dtype: Dtype::BF16, data } => (Form::Bf16, data.bytes(), [].as_slice()),
        Matrix::Dense { dtype: Dtype::U8, .. } => unreachable!("invariant: bytes are not a weight type"),
    };
    Part { rows: ROWS, cols: COLS, form, quants: quants.into(), scales }
}

impl Part<'_> {
    fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// The same as f32.
    fn widened(&self) -> Part<'static> {
        let dtype = match self.form {
            Form::F16 => Dtype::F16,
            Form::Bf16 => Dtype::BF16,
            _ => Dtype::F32,
        };
        let bytes = dtype.to_f32(&self.quants).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        Part { rows: self.rows, cols: self.cols, form: Form::F32, quants: bytes.into(), scales: &[] }
    }

    /// Writes some groups to the given groups of a buffer pair; rows that pad the last group are zeros.
    fn write(&self, range: Range<usize>, chunk: &Chunk, at: usize) -> Result<()> {
        let (group, scale) = self.form.group_bytes(self.cols);
        let end = (range.end * group).min(self.quants.len());
        let bytes = &self.quants[range.start * group..end];
        chunk.quants.write(at * group, bytes)?;
        let rest = at * group + bytes.len()..(at + range.len()) * group;
        chunk.quants.fill(rest, 0)?;
        match &chunk.scales {
            Some(scales) => scales.write(at * scale, &self.scales[range.start * scale..range.end * scale]),
            None => Ok(()),
        }
    }
}

/// Uploads the matrices of one step, in as few chunks as buffers of the device allow.
fn step(to: &mut To<'_>, step: Step, parts: &[Part<'_>]) -> Result<StepWeights> {
    if parts.iter().any(|p| p.form != parts[0].form) {
        let wide: Vec<Part<'_>> = parts.iter().map(Part::widened).collect();
        return self::step(to, step, &wide);
    }
    let device = to.device;
    let (form, cols) = (parts[0].form, parts[0].cols);
    let (group, scale) = form.group_bytes(cols);
    let (groups, halves) = (step.groups(), step.halves());
    // Pairs of groups: `gate_up` writes blocks of 32.
    let most = usize::try_from(device.facts().max_alloc).unwrap_or(usize::MAX) / (group * halves) / 2 * 2;
    if most == 0 {
        let (name, bytes) = (step.names().0, 2 * group * halves);
        let message = format!("the device allows no buffer of {bytes} bytes, which {name} needs for 32 rows");
        return Err(Failure::new(Kind::Memory, message));
    }
    let mut chunks = Vec::new();
    for first in (0..groups).step_by(most) {
        let n = most.min(groups - first);
        let mut buffer = |bytes: usize| to.matrices.buffer(n * halves * bytes);
        let quants = buffer(group)?;
        let scales = if scale > 0 { Some(buffer(scale)?) } else { None };
        let chunk = Chunk { quants, scales, first, groups: n };
        if halves == 2 {
            parts[0].write(first..first + n, &chunk, 0)?;
            parts[1].write(first..first + n, &chunk, n)?;
        } else {
            let mut start = 0;
            for part in parts {
                let (from, to) = (first.max(start), (first + n).min(start + part.groups()));
                if from < to {
                    part.write(from - start..to - start, &chunk, from - first)?;
                }
                start += part.groups();
            }
        }
        chunks.push(chunk);
    }
    Ok(StepWeights { form, chunks })
}
