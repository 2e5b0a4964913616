//! The baked model: every dimension and every switch as a constant, written by `build.rs` from `config.json`.

#[allow(unused_imports, reason = "not every model has all")]
use files::config::{Arch, LayerKind, LongRope, Mlp, ModelConfig, Norm, Rope, RopeScaling, Scales};

include!(concat!(env!("OUT_DIR"), "/dims.rs"));

/// Width of all query heads together.
pub const Q_DIM: usize = HEADS * HEAD_DIM;
/// Width of all key (or value) heads together.
pub const KV_DIM: usize = KV_HEADS * HEAD_DIM;
/// Query heads that share one key/value head.
pub const GROUP: usize = HEADS / KV_HEADS;
/// True if positions are learned embeddings, added to the token's, instead of RoPE.
pub const LEARNED_POSITIONS: bool = ROPE_DIM == 0;
/// True if the feed-forward layer has a gate besides `up`.
pub const HAS_GATE: bool = !matches!(MLP, Mlp::Gelu);
/// True if the feed-forward layer has biases.
pub const MLP_BIAS: bool = matches!(MLP, Mlp::Gelu);
/// True if norms have biases; they are stored after the weights.
pub const NORM_BIAS: bool = matches!(NORM, Norm::Layer);
/// True if not all layers rotate by the same angles.
pub const HAS_TWO_ANGLE_SETS: bool = {
    let (mut i, mut two) = (0, false);
    while i < LAYERS {
        two |= !matches!(LAYER_KINDS[i], LayerKind::FullAttention);
        i += 1;
    }
    two
};
/// Cosine and sine pairs of a position: for full-attention layers and, where they differ, for the others.
pub const ANGLES: usize = ROPE_DIM / 2 * (1 + HAS_TWO_ANGLE_SETS as usize);
/// True if biases, q and k norms and a tied head are the only switches in use: Llama, Qwen 2 and 3.
pub const IS_PLAIN_LLAMA: bool = matches!(NORM, Norm::Rms)
    && matches!(MLP, Mlp::SwiGlu)
    && !POST_NORMS
    && !HAS_TWO_ANGLE_SETS
    && ROPE_DIM == HEAD_DIM
    && RESIDUAL_SCALE == 1.0
    && LOGIT_SCALE == 1.0;

const _: () = assert!(HEADS == KV_HEADS * GROUP, "query heads come in whole groups");
const _: () = assert!(HEAD_DIM.is_multiple_of(2), "RoPE rotates pairs");
const _: () = assert!(ROPE_DIM.is_multiple_of(2) && ROPE_DIM <= HEAD_DIM && ROPE.dim == ROPE_DIM);
const _: () = assert!(LAYERS > 0 && DIM > 0 && FFN_DIM > 0 && VOCAB > 0);
const _: () = assert!(MODEL_DIR.len() + MODEL.len() > 0);

/// Number of sliding-window layers.
pub const SLIDING_LAYERS: usize = before(LAYERS)[1];
/// Number of full-attention layers.
pub const FULL_ATTENTION_LAYERS: usize = before(LAYERS)[0];
/// Number of full-attention and sliding-window layers before each layer.
pub const LAYERS_BEFORE: [[usize; 2]; LAYERS] = {
    let (mut i, mut all) = (0, [[0; 2]; LAYERS]);
    while i < LAYERS {
        all[i] = before(i);
        i += 1;
    }
    all
};

const fn before(layer: usize) -> [usize; 2] {
    let (mut i, mut counts) = (0, [0; 2]);
    while i < layer {
        counts[is_sliding(i) as usize] += 1;
        i += 1;
    }
    counts
}

/// True for a sliding-window layer.
pub const fn is_sliding(layer: usize) -> bool {
    matches!(LAYER_KINDS[layer], LayerKind::SlidingWindow)
}

/// Indices of the full-attention layers.
pub fn full_attention_layers() -> impl Iterator<Item = usize> {
    (0..LAYERS).filter(|&layer| !is_sliding(layer))
}

/// Positions that a query of the layer sees, its own included; `None` for full attention.
pub const fn attention_window(layer: usize) -> Option<usize> {
    if is_sliding(layer) { Some(WINDOW) } else { None }
}

/// Index of a layer's first angle among the [`ANGLES`] of a position.
pub const fn first_angle(layer: usize) -> usize {
    match LAYER_KINDS[layer] {
        LayerKind::FullAttention => 0,
        LayerKind::SlidingWindow | LayerKind::NoRope => ROPE_DIM / 2,
    }
}

/// The baked dimensions as a value, to compare with a config found at run time.
pub fn baked_config() -> ModelConfig {
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
        tie_embeddings: TIED,
        norm: NORM,
        post_norms: POST_NORMS,
        mlp: MLP,
        norm_eps: NORM_EPS,
        rope: ROPE,
        layer_kinds: LAYER_KINDS.to_vec(),
        sliding_window: WINDOW,
        scales: Scales {
            embedding: EMBEDDING_SCALE,
            attention: ATTENTION_SCALE,
            residual: RESIDUAL_SCALE,
            logits: LOGIT_SCALE,
        },
    }
}
