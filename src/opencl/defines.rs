//! What every kernel is compiled with: the model's dimensions, from one function, under their Rust names.

use crate::dims::*;
use files::config::Mlp;
use numeric::kv::{KvType, KvTypes};
use opencl_runtime::facts::Facts;

/// Rows of q, k and v in one fused matrix, each padded to whole groups of sixteen.
pub const Q_PAD: usize = Q_DIM.next_multiple_of(16);
/// See [`Q_PAD`].
pub const KV_PAD: usize = KV_DIM.next_multiple_of(16);
/// Rows of the fused matrix: q, then k, then v.
pub const QKV: usize = Q_PAD + 2 * KV_PAD;
/// Rows of gate (and of up) in the fused matrix of both.
pub const FFN_PAD: usize = FFN_DIM.next_multiple_of(16);

pub use crate::model::device::CHUNK;

/// The slots that attention of a layer sees, and the angles that it rotates by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerView {
    /// Slots; 0 is all.
    window: usize,
    /// The first of its angles.
    angles: usize,
}

impl LayerView {
    /// The view of a layer.
    pub fn of(layer: usize) -> Self {
        Self { window: window(layer).unwrap_or(0), angles: angles_of(layer) }
    }
}

/// `-D` options, in the order added.
#[derive(Debug, Clone)]
pub struct Defines(String);

impl Defines {
    /// The model's dimensions.
    pub fn of_model() -> Self {
        let sizes = [
            ("LAYERS", LAYERS),
            ("DIM", DIM),
            ("HEADS", HEADS),
            ("KV_HEADS", KV_HEADS),
            ("HEAD_DIM", HEAD_DIM),
            ("FFN_DIM", FFN_DIM),
            ("VOCAB", VOCAB),
            ("Q_DIM", Q_DIM),
            ("KV_DIM", KV_DIM),
            ("GROUP", GROUP),
            ("Q_PAD", Q_PAD),
            ("KV_PAD", KV_PAD),
            ("QKV", QKV),
            ("FFN_PAD", FFN_PAD),
            ("QKV_BIAS", QKV_BIAS as usize),
            ("O_BIAS", O_BIAS as usize),
            ("QK_NORM", QK_NORM as usize),
            ("ROPE_DIM", ROPE_DIM),
            ("ANGLES", ANGLES),
            ("NORM_BIAS", NORM_BIAS as usize),
            ("POST_NORMS", POST_NORMS as usize),
            ("GATED", GATED as usize),
            ("GELU", !matches!(MLP, Mlp::SwiGlu) as usize),
            ("MLP_BIAS", MLP_BIAS as usize),
        ];
        // No option that lets the compiler round otherwise than written: results are the CPU's bits.
        // Some drivers count warnings on stderr.
        let all = sizes.into_iter().fold(Defines(" -w".into()), |d, (name, n)| d.with(name, n));
        let run = 1 << HEAD_DIM.trailing_zeros();
        let scales = [("RESIDUAL_SCALE", RESIDUAL_SCALE as f32), ("LOGIT_SCALE", LOGIT_SCALE as f32)];
        [
            ("NORM_EPS", NORM_EPS as f32),
            // Of queries, and of the rotation of heads, as the CPU computes them.
            ("Q_SCALE", ATTENTION_SCALE as f32),
            ("ROTATION", 1.0 / (run as f32).sqrt()),
        ]
        .into_iter()
        .chain(scales.into_iter().filter(|(_, scale)| *scale != 1.0))
        .fold(all, |d, (name, x)| Defines(format!("{} -D{name}={x:e}f", d.0)))
    }

    /// With correctly rounded quotients and roots, where the device has an option for them.
    pub fn of_device(self, facts: &Facts) -> Self {
        if facts.correct_divide {
            return self.option("-cl-fp32-correctly-rounded-divide-sqrt").flag("CORRECT_DIVIDE");
        }
        self
    }

    /// A compiler option.
    pub fn option(self, option: &str) -> Self {
        Defines(format!("{} {option}", self.0))
    }

    /// One more, `-DNAME=VALUE`.
    pub fn with(self, name: &str, value: usize) -> Self {
        Defines(format!("{} -D{name}={value}", self.0))
    }

    /// One more without a value.
    pub fn flag(self, name: &str) -> Self {
        Defines(format!("{} -D{name}", self.0))
    }

    /// Those of the layers that see alike.
    pub fn of_view(self, view: LayerView) -> Self {
        self.with("WINDOW", view.window).with("ANGLES_AT", view.angles)
    }

    /// Those of the rows of a cache.
    pub fn of_cache(self, types: KvTypes) -> Self {
        let index = |t: KvType| KvType::ALL.iter().position(|&x| x == t).expect("ALL has all types");
        self.with("K_TYPE", index(types.k))
            .with("V_TYPE", index(types.v))
            .with("K_ROW", types.k.row_bytes(HEAD_DIM))
            .with("V_ROW", types.v.row_bytes(HEAD_DIM))
            .with("KV_BLOCK", KvType::block(HEAD_DIM))
    }

    /// The compiler's options.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
