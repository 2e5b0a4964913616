//! The baked model: every dimension as a constant, written by `build.rs` from `config.json`.

use files::config::{Arch, ModelConfig, RopeScaling};

include!(concat!(env!("OUT_DIR"), "/dims.rs"));

/// Width of all query heads together.
pub const Q_DIM: usize = HEADS * HEAD_DIM;
/// Width of all key (or value) heads together.
pub const KV_DIM: usize = KV_HEADS * HEAD_DIM;
/// Query heads that share one key/value head.
pub const GROUP: usize = HEADS / KV_HEADS;

const _: () = assert!(HEADS == KV_HEADS * GROUP, "query heads come in whole groups");
const _: () = assert!(HEAD_DIM.is_multiple_of(2), "RoPE rotates pairs");
const _: () = assert!(LAYERS > 0 && DIM > 0 && FFN_DIM > 0 && VOCAB > 0);
const _: () = assert!(MODEL_DIR.len() + MODEL.len() > 0);

/// The baked dimensions as a value, to compare with a config found at run time.
pub fn baked() -> ModelConfig {
    ModelConfig {
        arch: ARCH,
        layers: LAYERS,
        dim: DIM,
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        ffn_dim: FFN_DIM,
        vocab: VOCAB,
        max_position: MAX_POSITION,
        qkv_bias: QKV_BIAS,
        o_bias: O_BIAS,
        qk_norm: QK_NORM,
        tied: TIED,
        rms_eps: RMS_EPS,
        rope_theta: ROPE_THETA,
        rope_scaling: ROPE_SCALING,
    }
}
