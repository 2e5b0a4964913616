//! Matrices as bytes for upload, and the mixtures of storage that a step supports.

use crate::model::weights::{Attention, FeedForward, Ffn, Layer, Matrix, Mixer, MixtureOfExperts};
use crate::opencl::storage::{Activations, MatrixStorage};
use files::blocks::Dtype;
use numeric::quant::format::GROUP_ROWS;
use opencl_runtime::failure::{Failure, FailureKind, Result};
use std::borrow::Cow;

/// A matrix as bytes, in groups of sixteen rows.
#[derive(Clone)]
pub struct Upload<'a> {
    rows: usize,
    /// Columns.
    pub cols: usize,
    /// Storage of the bytes.
    pub storage: MatrixStorage,
    /// Quants, or rows.
    pub quants: Cow<'a, [u8]>,
    /// Scales; empty for unquantised rows.
    pub scales: &'a [u8],
}

/// Returns the matrices of a layer's steps. All matrices of a step read the same form of input. Gate and up, which one
/// kernel reads, have the same storage: f32 if they are unquantised and differ.
///
/// # Errors
///
/// A build failure for other mixtures.
pub fn of_layer(l: &Layer) -> Result<Vec<Vec<Upload<'_>>>> {
    let ffn = match &l.ffn {
        Ffn::Usual(w) => of_feed_forward(w)?.to_vec(),
        Ffn::Wide(w) => of_feed_forward(w)?.to_vec(),
        Ffn::Experts(w) => of_experts(w)?,
        Ffn::None => Vec::new(),
    };
    let per_layer = l.per_layer.iter().flat_map(|w| [vec![Upload::of(&w.gate)], vec![Upload::of(&w.out)]]);
    Ok(of_mixers(l)?.into_iter().chain(ffn).chain(per_layer).collect())
}

/// The first of [`of_layer`]: before and after each mixer.
///
/// # Errors
///
/// See [`of_layer`].
pub fn of_mixers(l: &Layer) -> Result<Vec<Vec<Upload<'_>>>> {
    let mixer = match &l.mixer {
        Mixer::Attention(a) => Some(of_attention(a)),
        Mixer::LocalAttention(a) => Some(of_attention(a)),
        Mixer::ShortConv(w) => Some((vec![Upload::of(&w.w_in)], Upload::of(&w.w_out))),
        Mixer::DeltaNet(w) => {
            let inputs = vec![Upload::of(&w.qkv), Upload::of(&w.z), Upload::of(&w.b), Upload::of(&w.a)];
            Some((inputs, Upload::of(&w.w_out)))
        }
        Mixer::None => None,
    };
    let mamba = l.mamba.as_ref().map(|w| (vec![Upload::of(&w.w_in)], Upload::of(&w.w_out)));
    let mixers: Vec<_> = mixer.into_iter().chain(mamba).collect();
    let inputs: Vec<_> = mixers.iter().flat_map(|(inputs, _)| inputs).cloned().collect();
    if inputs.iter().any(|p| p.storage.activation_form() != inputs[0].storage.activation_form()) {
        let names = match (&l.mixer, &l.mamba) {
            (Mixer::Attention(_) | Mixer::LocalAttention(_), None) => "q, k and v",
            _ => "the input projections",
        };
        return Err(mixed_storage_error(names, &inputs));
    }
    Ok(mixers.into_iter().flat_map(|(inputs, out)| [inputs, vec![out]]).collect())
}

fn of_experts(w: &MixtureOfExperts) -> Result<Vec<Vec<Upload<'_>>>> {
    let experts = [gate_up(Some(Upload::of(&w.gate)), Upload::of(&w.up))?, vec![Upload::of(&w.down)]];
    let mut router = vec![Upload::of(&w.router)];
    let gate = w.shared.as_ref().and_then(|(_, gate)| gate.as_ref());
    router.extend(gate.map(Upload::of));
    if router.iter().any(|m| m.storage.activation_form() != router[0].storage.activation_form()) {
        return Err(mixed_storage_error("router and shared expert's gate", &router));
    }
    let beside = w.shared.as_ref().map(|(shared, _)| shared).or(w.branches.as_ref().map(|w| &w.shared));
    let beside = beside.map(of_feed_forward).transpose()?;
    Ok([&experts[..], &[router], beside.as_ref().map_or(&[], |steps| &steps[..])].concat())
}

fn of_attention<const Q: usize, const KV: usize>(a: &Attention<Q, KV>) -> (Vec<Upload<'_>>, Upload<'_>) {
    let keys = [&a.wk, &a.wv].into_iter().flatten().map(Upload::of);
    let gate = a.gate.as_ref().map(Upload::of);
    (std::iter::once(Upload::of(&a.wq)).chain(keys).chain(gate).collect(), Upload::of(&a.wo))
}

fn of_feed_forward<const W: usize>(w: &FeedForward<W>) -> Result<[Vec<Upload<'_>>; 2]> {
    Ok([gate_up(w.gate.as_ref().map(Upload::of), Upload::of(&w.up))?, vec![Upload::of(&w.down)]])
}

fn gate_up<'a>(gate: Option<Upload<'a>>, up: Upload<'a>) -> Result<Vec<Upload<'a>>> {
    let Some(gate) = gate else { return Ok(vec![up]) };
    let both = vec![gate, up];
    if both[0].storage == both[1].storage {
        return Ok(both);
    }
    if both.iter().all(|p| p.storage.activation_form() == Activations::Floats) {
        Ok(both.iter().map(Upload::to_f32).collect())
    } else {
        Err(mixed_storage_error("gate and up", &both))
    }
}

fn mixed_storage_error(names: &str, parts: &[Upload<'_>]) -> Failure {
    let kinds: Vec<String> = parts.iter().map(|p| p.storage.to_string()).collect();
    let kinds = kinds.join(" and ");
    let message = format!(
        "{names} of a layer are {kinds}, which no kernel supports together; use `EngineOptions::backend` cpu"
    );
    Failure::new(FailureKind::Build, message)
}

impl<'a> Upload<'a> {
    /// Views a matrix as bytes.
    pub fn of<const ROWS: usize, const COLS: usize>(m: &'a Matrix<ROWS, COLS>) -> Self {
        let all = 0..ROWS.div_ceil(GROUP_ROWS);
        let (storage, quants, scales) = match m {
            Matrix::Quantised(w) => (MatrixStorage::Blocks(w.format()), w.quants(all.clone()), w.scales(all)),
            Matrix::Dense { dtype, data } => (dense_storage(*dtype), data.bytes(), [].as_slice()),
        };
        Upload { rows: ROWS, cols: COLS, storage, quants: quants.into(), scales }
    }

    /// Groups of sixteen rows.
    pub fn groups(&self) -> usize {
        self.rows.div_ceil(GROUP_ROWS)
    }

    /// True if both have the same storage.
    pub fn has_same_storage(&self, other: &Self) -> bool {
        self.storage == other.storage
    }

    /// Converts unquantised rows to f32.
    fn to_f32<'b>(&self) -> Upload<'b> {
        let dtype = match self.storage {
            MatrixStorage::F16 => Dtype::F16,
            MatrixStorage::Bf16 => Dtype::BF16,
            _ => Dtype::F32,
        };
        let bytes = dtype.to_f32(&self.quants).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
        Upload {
            rows: self.rows,
            cols: self.cols,
            storage: MatrixStorage::F32,
            quants: bytes.into(),
            scales: &[],
        }
    }
}

fn dense_storage(dtype: Dtype) -> MatrixStorage {
    match dtype {
        Dtype::F32 => MatrixStorage::F32,
        Dtype::F16 => MatrixStorage::F16,
        Dtype::BF16 => MatrixStorage::Bf16,
        _ => unreachable!("invariant: not a weight type"),
    }
}
