//! Compiler options of the kernels: the model's dimensions, under their Rust names.

use crate::dims::*;
use files::config::{DeltaNetSizes, Experts, Mlp, QkNorm, Router};
use numeric::kv::{KvType, KvTypes};
use opencl_runtime::device_info::DeviceInfo;

/// Rows of q in the fused qkv matrix, padded to whole groups of sixteen.
pub const Q_PAD: usize = Q_DIM.next_multiple_of(16);
/// Rows of k, and of v, padded likewise.
pub const KV_PAD: usize = KV_DIM.next_multiple_of(16);
/// First row of the gate of attention's output.
pub const GATE_AT: usize = Q_PAD + 2 * KV_PAD;
/// Rows of the fused matrix: q, k, v, then the gate of attention's output.
pub const QKV: usize = GATE_AT + GATE_DIM.next_multiple_of(16);
/// Rows of the fused matrix of layers without local heads, whose values may be their keys.
pub const GLOBAL_QKV: usize = if VALUES_ARE_KEYS { Q_PAD + GLOBAL_KV_DIM.next_multiple_of(16) } else { QKV };
/// Rows of q, and of k or v, in the fused matrix of layers with local heads; narrower ones are whole groups of sixteen.
const LOCAL_Q_PAD: usize = LOCAL_Q_DIM.next_multiple_of(16);
const LOCAL_KV_PAD: usize = LOCAL_KV_DIM.next_multiple_of(16);
/// Rows of that matrix.
pub const LOCAL_QKV: usize = LOCAL_Q_PAD + 2 * LOCAL_KV_PAD;
const _: () = assert!(!HAS_LOCAL_HEADS || LOCAL_HEAD_DIM.is_multiple_of(16) && !QKV_BIAS);
/// Columns of gate, and of up, in the fused result of both; in that of layers with a narrower feed-forward, zeros follow.
pub const FFN_PAD: usize = MAX_FFN_DIM.next_multiple_of(16);

/// Column of the shared expert's gate behind the scores of the experts.
pub const SHARED_GATE_AT: usize = EXPERTS.count.next_multiple_of(16);
/// Columns of the router's scores.
pub const SCORES: usize = SHARED_GATE_AT + HAS_SHARED_EXPERT as usize;
const _: () = assert!(!HAS_EXPERTS || !HAS_PER_LAYER, "their steps have the same places in a layer");
const _: () = assert!(!ATTENTION_SINKS || !SHARES_KV, "a layer's sinks are stored with its calibration");

pub use crate::model::device::ATTN_BLOCK;

/// Slots visible to attention in a layer, and the RoPE angles of the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerView {
    /// Number of slots; 0 for all.
    window: usize,
    /// Index of the layer's first angle.
    angles: usize,
    /// Its heads are narrower than those of the cache.
    local_heads: bool,
    /// It reads keys and values of another layer.
    shares_kv: bool,
    /// Its values are its projected keys.
    values_are_keys: bool,
}

impl LayerView {
    /// View of a layer.
    pub fn of(layer: usize) -> Self {
        Self {
            window: attention_window(layer).unwrap_or(0),
            angles: first_angle(layer),
            local_heads: has_local_heads(layer),
            shares_kv: !has_cache(layer),
            values_are_keys: values_are_keys(layer),
        }
    }
}

/// `-D` options, in the order added.
#[derive(Debug, Clone)]
pub struct Defines(String);

impl Defines {
    /// Options for the model's dimensions.
    pub fn for_model() -> Self {
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
            ("GATE_AT", GATE_AT),
            ("GATE_DIM", GATE_DIM),
            ("QKV_BIAS", QKV_BIAS as usize),
            ("O_BIAS", O_BIAS as usize),
            (
                "QK_NORM",
                match QK_NORM {
                    // Of all heads together by a kernel of its own.
                    QkNorm::None | QkNorm::Whole => 0,
                    QkNorm::PerHead => 1,
                    QkNorm::AfterRope => 2,
                },
            ),
            ("QUERY_GROWTH", QUERY_GROWTH.is_some() as usize),
            ("ROPE_DIM", ROPE_DIM),
            ("ANGLES", ANGLES),
            ("NORM_BIAS", NORM_BIAS as usize),
            ("PRE_NORMS", PRE_NORMS as usize),
            ("POST_NORMS", POST_NORMS as usize),
            ("GATED", HAS_GATE as usize),
            ("GELU", !matches!(MLP, Mlp::SwiGlu) as usize),
            ("MLP_BIAS", MLP_BIAS as usize),
        ];
        let more = [
            ("PER_LAYER_ROW", PER_LAYER_ROW),
            ("VALUE_NORM", VALUE_NORM as usize),
            ("LAYER_SCALARS", LAYER_SCALARS as usize),
            ("SINKS", ATTENTION_SINKS as usize),
        ];
        let sizes = sizes.into_iter().chain(more.into_iter().filter(|(_, n)| *n > 0));
        // No option may let the compiler change rounding, because results must match the CPU's bits. -w: some drivers
        // print warning counts on stderr.
        let all = sizes.fold(Defines(" -w".into()), |d, (name, n)| d.add_value(name, n));
        let run = 1 << HEAD_DIM.trailing_zeros();
        let scales = [("RESIDUAL_SCALE", RESIDUAL_SCALE as f32), ("LOGIT_SCALE", LOGIT_SCALE as f32)];
        let softcap = Some(("LOGIT_SOFTCAP", LOGIT_SOFTCAP as f32)).filter(|(_, cap)| *cap > 0.0);
        [
            ("NORM_EPS", NORM_EPS as f32),
            // Scale of queries, and of the rotation of heads, as computed on the CPU.
            ("Q_SCALE", ATTENTION_SCALE as f32),
            ("ROTATION", 1.0 / (run as f32).sqrt()),
        ]
        .into_iter()
        .chain(scales.into_iter().filter(|(_, scale)| *scale != 1.0))
        .chain(softcap)
        .fold(all, |d, (name, x)| d.add_float(name, x))
    }

    /// Adds the sizes of recurrent layers.
    pub fn add_recurrent(self) -> Self {
        let DeltaNetSizes { key_heads, value_heads, key_dim, value_dim } = DELTA_NET;
        // As computed on the CPU: see `prepare_heads` in `src/model/cpu/recurrent.rs`.
        let length = 1.0 / (key_dim as f32).sqrt();
        let floats = [
            ("KEY_LENGTH", length),
            ("QUERY_LENGTH", length * length),
            ("LENGTH_EPS", 1e-6 / key_dim as f32),
        ];
        let floats = floats.into_iter().filter(|_| HAS_DELTA_NET);
        let all = [
            ("MIX", MIX),
            ("CONV_TAPS", CONV_TAPS),
            ("CONV_CHANNELS", CONV_CHANNELS),
            ("CONV_STATE", CONV_STATE),
            ("STATE", STATE),
            ("DELTA_NET", HAS_DELTA_NET as usize),
            ("KEY_HEADS", key_heads),
            ("VALUE_HEADS", value_heads),
            ("KEY_WIDTH", key_dim),
            ("VALUE_WIDTH", value_dim),
            ("MIX_GATE_AT", MIX_GATE_AT),
            ("MIX_BETA_AT", MIX_BETA_AT),
            ("MIX_DECAY_AT", MIX_DECAY_AT),
        ];
        let sizes = all.into_iter().fold(self, |d, (name, n)| d.add_value(name, n));
        floats.fold(sizes, |d, (name, x)| d.add_float(name, x))
    }

    /// Requests correctly rounded division and square root, if the device has an option for it.
    pub fn add_device(self, facts: &DeviceInfo) -> Self {
        if facts.has_correct_divide {
            return self.add_option("-cl-fp32-correctly-rounded-divide-sqrt").add_flag("CORRECT_DIVIDE");
        }
        self
    }

    /// Adds a compiler option.
    pub fn add_option(self, option: &str) -> Self {
        Defines(format!("{} {option}", self.0))
    }

    /// Adds `-DNAME=VALUE`.
    pub fn add_value(self, name: &str, value: usize) -> Self {
        Defines(format!("{} -D{name}={value}", self.0))
    }

    /// Adds `-DNAME=VALUE` with a float.
    fn add_float(self, name: &str, value: f32) -> Self {
        Defines(format!("{} -D{name}={value:e}f", self.0))
    }

    /// Adds `-DNAME`.
    pub fn add_flag(self, name: &str) -> Self {
        Defines(format!("{} -D{name}", self.0))
    }

    /// Adds the options of layers with this view.
    pub fn add_view(self, view: LayerView) -> Self {
        let mut d = self.add_value("WINDOW", view.window).add_value("ANGLES_AT", view.angles);
        if view.local_heads {
            d = d.add_local_heads().add_value("ROPE_WIDTH", LOCAL_ROPE_DIM);
        }
        if view.values_are_keys {
            d = d.add_value("PROJECTED_KV_HEADS", GLOBAL_KV_HEADS);
        }
        if view.shares_kv { d.add_flag("SHARES_KV") } else { d }
    }

    /// Adds the options of heads that are narrower than those of the cache.
    pub fn add_local_heads(self) -> Self {
        self.add_value("HEAD_WIDTH", LOCAL_HEAD_DIM)
            .add_value("LOCAL_Q_PAD", LOCAL_Q_PAD)
            .add_value("LOCAL_KV_PAD", LOCAL_KV_PAD)
    }

    /// Adds the sizes and factors of embeddings that each layer has of a token.
    pub fn add_per_layer(self) -> Self {
        self.add_value("PER_LAYER_DIM", PER_LAYER_DIM)
            .add_float("PROJECTION_SCALE", 1.0 / (DIM as f32).sqrt())
            .add_float("TABLE_SCALE", (PER_LAYER_DIM as f32).sqrt())
    }

    /// Adds the sizes and switches of mixtures of experts.
    pub fn add_experts(self) -> Self {
        let Experts { count, used, router, renormalised, scale, limit, .. } = EXPERTS;
        let sizes = [
            ("EXPERTS", count),
            ("USED", used),
            ("SCORES", SCORES),
            ("SHARED_GATE_AT", SHARED_GATE_AT),
            ("SHARED_EXPERT", HAS_SHARED_EXPERT as usize),
            ("BRANCHES", HAS_BRANCHES as usize),
            ("EXPERT_BIAS", EXPERT_BIAS as usize),
            ("SOFTMAX", (router == Router::Softmax) as usize),
            ("CHOICE_BIAS", (router == Router::BiasedSigmoid) as usize),
            ("RENORMALISED", renormalised as usize),
        ];
        let all = sizes.into_iter().fold(self, |d, (name, n)| d.add_value(name, n));
        all.add_float("EXPERT_SCALE", scale as f32).add_float("EXPERT_LIMIT", limit as f32)
    }

    /// Adds the options of the rows of a cache.
    pub fn add_cache(self, types: KvTypes) -> Self {
        let index = |t: KvType| KvType::ALL.iter().position(|&x| x == t).expect("ALL has all types");
        self.add_value("K_TYPE", index(types.k))
            .add_value("V_TYPE", index(types.v))
            .add_value("K_ROW", types.k.row_bytes(HEAD_DIM))
            .add_value("V_ROW", types.v.row_bytes(HEAD_DIM))
            .add_value("KV_BLOCK", KvType::block_len(HEAD_DIM))
    }

    /// The compiler options.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
