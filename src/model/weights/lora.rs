//! Adapters that are added to a checkpoint's matrices while these are loaded.
//!
//! Each value is `w + s1 * d1 + s2 * d2 …` in f32, in the order of the adapters, where `d` is the sum of `b * a` in the
//! order of the rank. The rows of an adapter are in the order of the checkpoints of its kind, whatever the model's file
//! is.

use super::checkpoint::{Checkpoint, gguf_name, gguf_order, names_in_files};
use super::spec::{CheckpointPlace, HEAD, TensorRole, TensorSpec};
use crate::dims::{ARCH, HEADS_PER_KEY, MODEL};
use files::blocks::gguf::decode_values;
use files::lora::{LoraAdapter, LoraPair};
use files::source::gguf::names::RowOrder;
use files::{Error, Result};
use numeric::with_avx2;

/// Product of an adapter's factors that is added to a stored tensor.
#[derive(Debug, Clone)]
pub struct LoraDelta {
    pair: LoraPair,
    /// First row of the tensor among those of `b`, and their order.
    first: usize,
    order: RowOrder,
}

/// A delta with its first factor decoded.
pub(super) struct DecodedDelta<'a> {
    delta: &'a LoraDelta,
    /// `[rank][cols]`
    a: Vec<f32>,
}

/// Name in the adapter of the matrix of a spec, if it changes it.
fn find_name(adapter: &LoraAdapter, spec: &TensorSpec) -> Option<String> {
    // A tied head is stored as the embedding, but has a name of its own.
    let plain = if spec.name == HEAD { HEAD } else { &spec.stored.name };
    let names = match adapter.gguf_architecture {
        Some(_) => vec![gguf_name(spec, plain)],
        None => names_in_files(plain).collect(),
    };
    names.into_iter().find(|name| adapter.pairs.contains_key(name))
}

/// True if the adapter changes the matrix of a spec.
pub(super) fn is_adapted(adapters: &[LoraAdapter], spec: &TensorSpec) -> bool {
    adapters.iter().any(|adapter| find_name(adapter, spec).is_some())
}

/// The deltas of a spec's tensor, in the order of the adapters.
pub(super) fn find_deltas(adapters: &[LoraAdapter], spec: &TensorSpec) -> Vec<LoraDelta> {
    let CheckpointPlace { first, order, .. } = spec.stored;
    let delta = |adapter: &LoraAdapter| {
        let pair = adapter.pairs.get(&find_name(adapter, spec)?)?.clone();
        let order = if adapter.gguf_architecture.is_some() { gguf_order(spec) } else { order };
        Some(LoraDelta { pair, first, order })
    };
    adapters.iter().filter_map(delta).collect()
}

/// Checks that every matrix of the adapters can be added to one of the checkpoint's.
///
/// # Errors
///
/// [`Error::Usage`]: the model is packed. [`Error::Model`]: a name or shape does not fit, or the model is quantised.
pub(super) fn check_adapters(checkpoint: &Checkpoint, adapters: &[LoraAdapter]) -> Result<()> {
    if let (Some(first), Some(_)) = (adapters.first(), checkpoint.packed()) {
        return Err(Error::Usage(format!(
            "`EngineOptions::lora` {}: {} is packed, and adapters are added before; give the checkpoint it was packed from",
            first.file.display(),
            checkpoint.path().display()
        )));
    }
    let specs = checkpoint.tensor_specs();
    for adapter in adapters {
        let err = |why: String| Error::model(&adapter.file, why);
        if let Some(found) = adapter.gguf_architecture.as_ref().filter(|name| *name != ARCH.gguf_name()) {
            let want = ARCH.gguf_name();
            return Err(err(format!(
                "metadata \"general.architecture\" is {found:?}; {MODEL} needs {want:?}; give an adapter for this model"
            )));
        }
        let mut unused: Vec<&String> = adapter.pairs.keys().collect();
        for spec in &specs {
            let Some(name) = find_name(adapter, spec) else { continue };
            check_pair(checkpoint, spec, (adapter, &name))?;
            unused.retain(|other| **other != name);
        }
        if let Some(name) = unused.first() {
            return Err(err(format!("{name} is no matrix of {MODEL}; give an adapter for this model")));
        }
    }
    Ok(())
}

/// Checks that one pair can be added to the tensor of a spec.
fn check_pair(
    checkpoint: &Checkpoint,
    spec: &TensorSpec,
    (adapter, name): (&LoraAdapter, &str),
) -> Result<()> {
    let LoraPair { a, b, .. } = &adapter.pairs[name];
    let err = |why: String| Err(Error::model(&adapter.file, format!("adapter of {name}: {why}")));
    if spec.role != TensorRole::Matrix {
        let remedy = "only matrices that are multiplied can have adapters; merge it into its model with PEFT";
        return err(format!("this is looked up by row or a vector; {remedy}"));
    }
    let (found, want) = ([b.shape[0], a.shape[1]], [spec.stored.of, spec.cols]);
    if found != want {
        return err(format!(
            "its product is {found:?}; the model's matrix is {want:?}; give an adapter for this model"
        ));
    }
    let stored = checkpoint.find_tensor(spec)?;
    if stored.element_type().is_none() {
        return Err(Error::model(
            &stored.file,
            format!(
                "tensor {} has type {}, to which no adapter can be added; give an unquantised model (F32, F16, BF16)",
                stored.name,
                stored.block.name()
            ),
        ));
    }
    // Value heads are in another order in GGUF files, and so are the columns of the matrix behind them.
    let kind = |is_gguf: bool| if is_gguf { "GGUF" } else { "safetensors" };
    let [found, want] = [adapter.gguf_architecture.is_some(), checkpoint.gguf().is_some()].map(kind);
    if spec.name.contains(".linear_attn.") && HEADS_PER_KEY > 1 && found != want {
        return err(format!(
            "the adapter is {found}, the model {want}, which order heads differently; give {want}"
        ));
    }
    Ok(())
}

impl LoraDelta {
    /// Bytes of the first factor, decoded.
    pub fn decoded_bytes(&self) -> u64 {
        self.pair.a.shape.iter().fold(4, |bytes: u64, n| bytes.saturating_mul(*n as u64))
    }

    pub(super) fn decode(&self) -> DecodedDelta<'_> {
        DecodedDelta { delta: self, a: self.pair.a.to_f32() }
    }

    /// Lets the system take back the pages of the file.
    pub(super) fn release_pages(&self) {
        self.pair.a.data.release_pages();
        self.pair.b.data.release_pages();
    }
}

impl DecodedDelta<'_> {
    /// Adds row `row` of the delta to that of the matrix.
    pub(super) fn add_to_row(&self, row: usize, values: &mut [f32]) {
        let LoraDelta { pair, first, order } = self.delta;
        let mut b = vec![0.0; pair.b.shape[1]];
        decode_values(pair.b.block, pair.b.row_bytes(first + order.file_row(row)), &mut b);
        let mut sums = vec![0.0; values.len()];
        with_avx2(
            #[inline(always)]
            || {
                for (b, a) in b.iter().zip(self.a.chunks_exact(sums.len())) {
                    sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += b * a);
                }
                values.iter_mut().zip(&sums).for_each(|(value, sum)| *value += pair.scale * sum);
            },
        )
    }
}
