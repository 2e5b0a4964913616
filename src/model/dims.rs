//! The baked model: every dimension and every switch as a constant, written by `build.rs` from `config.json`.

#[allow(unused_imports, reason = "not every model has all")]
use files::config::{
    Arch, AttentionGate, DeltaNetSizes, Experts, LayerKind, LongRope, MambaNorm, MambaSizes, Mlp,
    ModelConfig, Norm, QkNorm, QueryGrowth, Rope, RopeScaling, Router, Scales,
};

include!(concat!(env!("OUT_DIR"), "/dims.rs"));

/// Width of all query heads together.
pub const Q_DIM: usize = HEADS * HEAD_DIM;
/// Width of all key (or value) heads together.
pub const KV_DIM: usize = KV_HEADS * HEAD_DIM;
/// Width of the keys (or values) that a full-attention layer projects.
pub const GLOBAL_KV_DIM: usize = GLOBAL_KV_HEADS * HEAD_DIM;
/// Width of all query heads of a sliding-window layer together.
pub const LOCAL_Q_DIM: usize = HEADS * LOCAL_HEAD_DIM;
/// Width of all key (or value) heads of a sliding-window layer together.
pub const LOCAL_KV_DIM: usize = KV_HEADS * LOCAL_HEAD_DIM;
/// True if sliding-window layers have narrower heads than the others. In the cache, zeros follow their elements.
pub const HAS_LOCAL_HEADS: bool = LOCAL_HEAD_DIM != HEAD_DIM;
/// Query heads that share one key/value head.
pub const GROUP: usize = HEADS / KV_HEADS;
/// True if positions are learned embeddings, added to the token's, instead of RoPE.
pub const LEARNED_POSITIONS: bool = ROPE_DIM == 0;
/// True if the feed-forward layer has a gate besides `up`.
pub const HAS_GATE: bool = !matches!(MLP, Mlp::Gelu | Mlp::SquaredRelu);
/// True if the feed-forward layer has biases.
pub const MLP_BIAS: bool = matches!(MLP, Mlp::Gelu);
/// True if experts and their router have biases.
pub const EXPERT_BIAS: bool = matches!(MLP, Mlp::ClampedSwiGlu);
/// True if norms have biases; they are stored after the weights.
pub const NORM_BIAS: bool = matches!(NORM, Norm::Layer);
/// Number of layers of a kind before layer `layer`.
const fn count_before(layer: usize, kind: LayerKind) -> usize {
    let (mut i, mut count) = (0, 0);
    while i < layer {
        count += (LAYER_KINDS[i] as usize == kind as usize) as usize;
        i += 1;
    }
    count
}

/// True if not all layers rotate by the same angles.
pub const HAS_TWO_ANGLE_SETS: bool = count_before(LAYERS, LayerKind::NoRope) > 0
    || LOCAL_ROPE_DIFFERS && count_before(LAYERS, LayerKind::SlidingWindow) > 0;
/// Number of elements of a head that RoPE rotates in sliding-window layers.
pub const LOCAL_ROPE_DIM: usize = ROPE.local_dim;
/// Cosine and sine pairs of a position: for full-attention layers and, where they differ, for the others; then, if
/// queries grow, their factor in place of a cosine.
pub const ANGLES: usize =
    ROPE_DIM / 2 + if HAS_TWO_ANGLE_SETS { LOCAL_ROPE_DIM / 2 } else { 0 } + QUERY_GROWTH.is_some() as usize;

/// Columns of the gate of attention's output.
pub const GATE_DIM: usize = match ATTENTION_GATE {
    AttentionGate::None => 0,
    AttentionGate::PerHead => HEADS,
    AttentionGate::PerElement => Q_DIM,
};

/// Width of the widest feed-forward, experts left out.
pub const MAX_FFN_DIM: usize = larger_of(larger_of(FFN_DIM, SHARED_FFN_DIM), EXPERTS.shared_dim);

const fn larger_of(a: usize, b: usize) -> usize {
    if a > b { a } else { b }
}

/// True if layers have experts.
pub const HAS_EXPERTS: bool = EXPERTS.count != 0;
/// True if every token goes through a feed-forward beside its experts, with their input.
pub const HAS_SHARED_EXPERT: bool = EXPERTS.shared_dim != 0 && !EXPERTS.own_norms;
/// True if its output has a gate.
pub const HAS_SHARED_EXPERT_GATE: bool = HAS_SHARED_EXPERT && !matches!(ARCH, Arch::GraniteMoeHybrid);
/// True if a feed-forward beside the experts and they themselves have norms of their own.
pub const HAS_BRANCHES: bool = EXPERTS.own_norms;
/// True if every token goes through a feed-forward beside its experts.
pub const HAS_FFN_BESIDE: bool = HAS_SHARED_EXPERT || HAS_BRANCHES;
/// Rows of the matrix of all experts' gates, or ups: `[expert][EXPERTS.dim]`.
pub const EXPERT_ROWS: usize = EXPERTS.count * EXPERTS.dim;
/// Rows of the matrix of all experts' downs: `[expert][DIM]`.
pub const EXPERT_DOWN_ROWS: usize = EXPERTS.count * DIM;
/// True if each layer has an embedding of a token.
pub const HAS_PER_LAYER: bool = PER_LAYER_DIM != 0;
/// True if layers share keys and values of earlier ones.
pub const SHARES_KV: bool = SHARED_KV_LAYERS != 0;
/// Width of the embeddings that all layers have of a token.
pub const PER_LAYER_ROW: usize = LAYERS * PER_LAYER_DIM;

/// True if attention's output has a gate.
pub const HAS_ATTENTION_GATE: bool = !matches!(ATTENTION_GATE, AttentionGate::None);
/// True if a checkpoint may hold a block that predicts the token after the next one (multi-token prediction).
pub const HAS_MTP: bool = matches!(ARCH, Arch::Qwen35);
/// The last layer with full attention, whose shapes and angles are those of that block; the last layer if there is none.
pub const MTP_LAYER: usize = {
    let mut layer = LAYERS - 1;
    while layer > 0 && !matches!(LAYER_KINDS[layer], LayerKind::FullAttention) {
        layer -= 1;
    }
    if matches!(LAYER_KINDS[layer], LayerKind::FullAttention) { layer } else { LAYERS - 1 }
};

/// True if sequences have a recurrent state.
pub const HAS_STATE: bool = RECURRENT_LAYERS != 0;
/// Number of layers with a recurrent state.
pub const RECURRENT_LAYERS: usize = count_recurrent(LAYERS);

/// Number of layers with a recurrent state before layer `layer`.
const fn count_recurrent(layer: usize) -> usize {
    let (mut i, mut count) = (0, 0);
    while i < layer {
        count += is_recurrent(i) as usize;
        i += 1;
    }
    count
}

/// True if layers are gated delta nets.
pub const HAS_DELTA_NET: bool = count_before(LAYERS, LayerKind::DeltaNet) > 0;
/// Value heads of a delta net that share a key head.
pub const HEADS_PER_KEY: usize = if HAS_DELTA_NET { DELTA_NET.value_heads / DELTA_NET.key_heads } else { 1 };
/// Width of all keys of a delta net, which are those of its queries too.
pub const DELTA_KEY_DIM: usize = DELTA_NET.key_heads * DELTA_NET.key_dim;
/// Width of all values of a delta net.
pub const DELTA_VALUE_DIM: usize = DELTA_NET.value_heads * DELTA_NET.value_dim;
/// True if layers have Mamba2.
pub const HAS_MAMBA: bool = MAMBA.heads != 0;
/// Width of all heads of Mamba2.
pub const MAMBA_DIM: usize = MAMBA.heads * MAMBA.head_dim;
/// Width of `B`, and of `C`, of all groups of its heads.
pub const MAMBA_GROUPS_DIM: usize = MAMBA.groups * MAMBA.state;
/// Rows of its input projection: gate, `x`, `B`, `C` and time steps.
pub const MAMBA_ROWS: usize = MAMBA_DIM + CONV_CHANNELS + MAMBA.heads;
/// Channels of a causal convolution: the model's width, or queries, keys and values of a delta net, or `x`, `B` and `C`.
pub const CONV_CHANNELS: usize = match (CONV_TAPS, HAS_DELTA_NET) {
    (0, _) => 0,
    _ if HAS_MAMBA => MAMBA_DIM + 2 * MAMBA_GROUPS_DIM,
    (_, false) => DIM,
    (_, true) => 2 * DELTA_KEY_DIM + DELTA_VALUE_DIM,
};
/// Column of its first channel in [`MIX`].
pub const CONV_AT: usize = MAMBA_DIM;
/// Floats of a convolution's state: its last inputs, `[CONV_TAPS - 1][CONV_CHANNELS]`, oldest first.
pub const CONV_STATE: usize = CONV_TAPS.saturating_sub(1) * CONV_CHANNELS;
/// Columns of the matrices of all heads in the state of a delta net, or of Mamba2.
pub const STATE_WIDTH: usize = DELTA_VALUE_DIM + MAMBA_DIM;
/// Rows of each.
pub const STATE_ROWS: usize = DELTA_NET.key_dim + MAMBA.state;
/// Floats of the state of one recurrent layer: the convolution's, then those matrices,
/// `[STATE_WIDTH / 16][STATE_ROWS][16]`.
pub const LAYER_STATE: usize = CONV_STATE + STATE_WIDTH * STATE_ROWS;
/// Floats of the recurrent state of a sequence: `[recurrent layer][LAYER_STATE]`.
pub const STATE: usize = RECURRENT_LAYERS * LAYER_STATE;
/// Bytes of it.
pub const STATE_BYTES: usize = 4 * STATE;

/// Columns of a recurrent layer's projected inputs for a token: the convolution's channels, then the gates `c` and `x`
/// of a short convolution; or `z`, `b` and `a` of a delta net, whose parts are padded to whole groups of sixteen. Of
/// Mamba2: the rows of its projection, padded, then a decay for each head.
pub const MIX: usize = match (CONV_TAPS, HAS_DELTA_NET) {
    (0, _) => 0,
    _ if HAS_MAMBA => MAMBA_DECAY_AT + MAMBA.heads,
    (_, false) => 3 * DIM,
    (_, true) => MIX_DECAY_AT + DELTA_NET.value_heads.next_multiple_of(16),
};
/// Column of Mamba2's first time step.
pub const MAMBA_STEP_AT: usize = MAMBA_DIM + CONV_CHANNELS;
/// Column of its first decay.
pub const MAMBA_DECAY_AT: usize = MAMBA_ROWS.next_multiple_of(16);
/// Column of a delta net's first gate.
pub const MIX_GATE_AT: usize = CONV_CHANNELS.next_multiple_of(16);
/// Column of the strength of the first head's update.
pub const MIX_BETA_AT: usize = MIX_GATE_AT + DELTA_VALUE_DIM.next_multiple_of(16);
/// Column of the first head's decay.
pub const MIX_DECAY_AT: usize = MIX_BETA_AT + DELTA_NET.value_heads.next_multiple_of(16);
/// Width of a recurrent layer's output before its projection.
pub const MIXED: usize = match (CONV_TAPS, HAS_DELTA_NET) {
    (0, _) => 0,
    _ if HAS_MAMBA => MAMBA_DIM,
    (_, false) => DIM,
    (_, true) => DELTA_VALUE_DIM,
};

const _: () = assert!(!HAS_EXPERTS || EXPERTS.dim.is_multiple_of(16) && DIM.is_multiple_of(16));
const _: () = assert!(!HAS_EXPERTS || !MLP_BIAS);
const _: () = assert!(!HAS_BRANCHES || POST_NORMS && PRE_NORMS, "the sum of both branches is normed");
const _: () =
    assert!(KV_HEADS.is_multiple_of(GLOBAL_KV_HEADS) && (GLOBAL_KV_HEADS == KV_HEADS || VALUES_ARE_KEYS));
const _: () = assert!(!VALUES_ARE_KEYS || GATE_DIM == 0);
const _: () = assert!(HAS_EXPERTS || !EXPERT_BIAS, "only experts have this activation function");
const _: () = assert!(count_before(LAYERS, LayerKind::ShortConv) == 0 || !HAS_DELTA_NET);
const _: () = assert!(!HAS_MAMBA || !HAS_DELTA_NET && count_before(LAYERS, LayerKind::ShortConv) == 0);
const _: () = assert!(!HAS_MAMBA || PRE_NORMS && !POST_NORMS, "its output is added to the residual");
const _: () = assert!(SHARED_KV_LAYERS == 0 || RECURRENT_LAYERS == 0, "layers are counted by their caches");
const _: () = assert!(!LOCAL_ROPE_DIFFERS || count_before(LAYERS, LayerKind::NoRope) == 0 || WINDOW == 0);

const _: () = assert!(!HAS_PER_LAYER && !LAYER_SCALARS || POST_NORMS, "the last norm of a layer scales it");
const _: () = assert!(!HAS_LOCAL_HEADS || matches!(QK_NORM, QkNorm::None | QkNorm::PerHead) && GATE_DIM == 0);

/// True for a layer with a recurrent state, in place of keys and values or beside them.
pub const fn is_recurrent(layer: usize) -> bool {
    LAYER_KINDS[layer].is_recurrent()
}

/// True for a layer with attention.
pub const fn has_attention(layer: usize) -> bool {
    LAYER_KINDS[layer].is_attention()
}

/// True if each layer is a mixer or a feed-forward, not both.
pub const ONE_PART_LAYERS: bool = matches!(ARCH, Arch::NemotronH);

/// True for a layer with a mixer.
pub const fn has_mixer(layer: usize) -> bool {
    !matches!(LAYER_KINDS[layer], LayerKind::FeedForward)
}

/// True for a layer with a feed-forward.
pub const fn has_ffn(layer: usize) -> bool {
    !ONE_PART_LAYERS || !has_mixer(layer)
}

/// Place of the states of some layers in that of their sequence.
pub const fn state_range(layers: &std::ops::Range<usize>) -> std::ops::Range<usize> {
    count_recurrent(layers.start) * LAYER_STATE..count_recurrent(layers.end) * LAYER_STATE
}

/// True if biases, q and k norms and a tied head are the only switches in use: Llama, Qwen 2 and 3.
pub const IS_PLAIN_LLAMA: bool = matches!(NORM, Norm::Rms)
    && matches!(MLP, Mlp::SwiGlu)
    && !POST_NORMS
    && PRE_NORMS
    && matches!(QK_NORM, QkNorm::None | QkNorm::PerHead)
    && GATE_DIM == 0
    && WINDOW == 0
    && RECURRENT_LAYERS == 0
    && QUERY_GROWTH.is_none()
    && !HAS_TWO_ANGLE_SETS
    && ROPE_DIM == HEAD_DIM
    && !HAS_LOCAL_HEADS
    && !VALUES_ARE_KEYS
    && SHARED_KV_LAYERS == 0
    && !HAS_PER_LAYER
    && !HAS_EXPERTS
    && !ATTENTION_SINKS
    && !VALUE_NORM
    && !LAYER_SCALARS
    && LOGIT_SOFTCAP == 0.0
    && RESIDUAL_SCALE == 1.0
    && LOGIT_SCALE == 1.0;

const _: () = assert!(HEADS == KV_HEADS * GROUP, "query heads come in whole groups");
const _: () = assert!(HEAD_DIM.is_multiple_of(2), "RoPE rotates pairs");
const _: () = assert!(ROPE_DIM.is_multiple_of(2) && ROPE_DIM <= HEAD_DIM && ROPE.dim == ROPE_DIM);
const _: () = assert!(LAYERS > 0 && DIM > 0 && FFN_DIM > 0 && VOCAB > 0);
const _: () = assert!(MODEL_DIR.len() + MODEL.len() > 0);

/// Number of sliding-window layers with a cache.
pub const SLIDING_LAYERS: usize = before(LAYERS)[1];
/// Number of full-attention layers with a cache.
pub const FULL_ATTENTION_LAYERS: usize = before(LAYERS)[0];
/// Number of layers with a cache of keys and values.
pub const CACHE_LAYERS: usize = FULL_ATTENTION_LAYERS + SLIDING_LAYERS;
/// Number of full-attention and sliding-window layers with a cache before each layer, and of all.
pub const LAYERS_BEFORE: [[usize; 2]; LAYERS + 1] = {
    let (mut i, mut all) = (0, [[0; 2]; LAYERS + 1]);
    while i <= LAYERS {
        all[i] = before(i);
        i += 1;
    }
    all
};

/// Number of full-attention and sliding-window layers with a cache among some layers.
pub const fn cache_layers(layers: &std::ops::Range<usize>) -> [usize; 2] {
    let [[full, sliding], [first_full, first_sliding]] =
        [LAYERS_BEFORE[layers.end], LAYERS_BEFORE[layers.start]];
    [full - first_full, sliding - first_sliding]
}

const fn before(layer: usize) -> [usize; 2] {
    let layer = if layer < FIRST_SHARING_LAYER { layer } else { FIRST_SHARING_LAYER };
    let full = count_before(layer, LayerKind::FullAttention)
        + count_before(layer, LayerKind::NoRope)
        + count_before(layer, LayerKind::AttentionMamba);
    [full, count_before(layer, LayerKind::SlidingWindow)]
}

/// True for a sliding-window layer.
pub const fn is_sliding(layer: usize) -> bool {
    matches!(LAYER_KINDS[layer], LayerKind::SlidingWindow)
}

/// The first layer that reads keys and values of an earlier one; [`LAYERS`] if none does.
pub const FIRST_SHARING_LAYER: usize = LAYERS - SHARED_KV_LAYERS;
/// The last layer that all tokens of a prompt go through: later ones write nothing that another token reads.
pub const LAST_WRITING_LAYER: usize = {
    let mut layer = FIRST_SHARING_LAYER - 1;
    while layer > 0 && !has_mixer(layer) {
        layer -= 1;
    }
    layer
};

/// The layer whose keys and values a layer reads: its own, or the last earlier one of its kind that has any.
pub const fn kv_layer(layer: usize) -> usize {
    let mut own = layer;
    while own >= FIRST_SHARING_LAYER || LAYER_KINDS[own] as usize != LAYER_KINDS[layer] as usize {
        own -= 1;
    }
    own
}

/// Width of a head of a layer.
pub const fn head_dim(layer: usize) -> usize {
    if is_sliding(layer) { LOCAL_HEAD_DIM } else { HEAD_DIM }
}

/// True for a sliding-window layer whose heads differ from those of other layers, in width or number, or in having
/// values of their own.
pub const fn has_local_heads(layer: usize) -> bool {
    is_sliding(layer) && (HAS_LOCAL_HEADS || VALUES_ARE_KEYS)
}

/// True if a layer's values are its projected keys.
pub const fn values_are_keys(layer: usize) -> bool {
    VALUES_ARE_KEYS && !is_sliding(layer)
}

/// KV heads that a layer projects. If they are fewer than [`KV_HEADS`], the cache has each of them several times, once
/// for every group of query heads that reads it.
pub const fn kv_heads(layer: usize) -> usize {
    if is_sliding(layer) { KV_HEADS } else { GLOBAL_KV_HEADS }
}

/// Width of a layer's feed-forward.
pub const fn ffn_dim(layer: usize) -> usize {
    if layer < FIRST_SHARING_LAYER { FFN_DIM } else { SHARED_FFN_DIM }
}

/// True for a layer with experts.
pub const fn has_experts(layer: usize) -> bool {
    HAS_EXPERTS && EXPERT_LAYERS[layer]
}

/// Number of elements of a layer's heads that RoPE rotates.
pub const fn rope_dim(layer: usize) -> usize {
    if is_sliding(layer) { LOCAL_ROPE_DIM } else { ROPE_DIM }
}

/// Indices of the full-attention layers with a cache.
pub fn full_attention_layers() -> impl Iterator<Item = usize> {
    (0..LAYERS).filter(|&layer| has_mass(layer))
}

/// True for a layer with a cache of keys and values.
pub const fn has_cache(layer: usize) -> bool {
    layer < FIRST_SHARING_LAYER && has_attention(layer)
}

/// True for a full-attention layer with a cache: its slots may be evicted, and have attention mass.
pub const fn has_mass(layer: usize) -> bool {
    has_cache(layer) && !is_sliding(layer)
}

/// Indices of the layers with a cache of keys and values.
pub fn attention_layers() -> impl Iterator<Item = usize> {
    (0..LAYERS).filter(|&layer| has_cache(layer))
}

/// Positions that a query of the layer sees, its own included; `None` for full attention.
pub const fn attention_window(layer: usize) -> Option<usize> {
    if is_sliding(layer) { Some(WINDOW) } else { None }
}

/// Index of a layer's first angle among the [`ANGLES`] of a position.
pub const fn first_angle(layer: usize) -> usize {
    match LAYER_KINDS[layer] {
        LayerKind::SlidingWindow if LOCAL_ROPE_DIFFERS => ROPE_DIM / 2,
        LayerKind::NoRope => ROPE_DIM / 2,
        _ => 0,
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
        global_kv_heads: GLOBAL_KV_HEADS,
        values_are_keys: VALUES_ARE_KEYS,
        head_dim: HEAD_DIM,
        local_head_dim: LOCAL_HEAD_DIM,
        ffn_dim: FFN_DIM,
        vocab: VOCAB,
        max_position: MAX_POSITION,
        qkv_bias: QKV_BIAS,
        o_bias: O_BIAS,
        qk_norm: QK_NORM,
        attention_gate: ATTENTION_GATE,
        attention_sinks: ATTENTION_SINKS,
        tie_embeddings: TIED,
        norm: NORM,
        pre_norms: PRE_NORMS,
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
            attention_out: ATTENTION_OUT_SCALE,
            mlp: MLP_SCALES,
            ssm_in: SSM_IN_SCALES,
            ssm_out: SSM_OUT_SCALE,
        },
        query_growth: QUERY_GROWTH,
        conv_taps: CONV_TAPS,
        delta_net: DELTA_NET,
        mamba: MAMBA,
        shared_kv_layers: SHARED_KV_LAYERS,
        shared_ffn_dim: SHARED_FFN_DIM,
        experts: EXPERTS,
        expert_layers: EXPERT_LAYERS.to_vec(),
        per_layer_dim: PER_LAYER_DIM,
        value_norm: VALUE_NORM,
        layer_scalars: LAYER_SCALARS,
        logit_softcap: LOGIT_SOFTCAP,
    }
}
