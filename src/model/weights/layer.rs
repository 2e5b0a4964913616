//! The weights of a layer, and the loaded tensors that they are.

use super::spec::{
    ATTENTION_GATE_NAME, ATTN_POST_NORM, CHOICE_BIAS, DELTA_BIAS, DELTA_CONV, DELTA_DECAY, DELTA_NORM,
    EXPERT_SCALE, EXPERTS_NORM, EXPERTS_POST_NORM, FFN_NORM, FFN_POST_NORM, LAYER_SCALAR, MAMBA_BIAS,
    MAMBA_CONV, MAMBA_CONV_BIAS, MAMBA_DECAY, MAMBA_NORM, MAMBA_SKIP, PER_LAYER_GATE, PER_LAYER_OUT,
    PER_LAYER_POST_NORM, ROUTER, ROUTER_BIAS, ROUTER_SCALE, SHARED_EXPERT_GATE, SHARED_POST_NORM, SHORT_CONV,
    SINKS,
};
use super::storage::LoadedModel;
use super::{ActivationForms, ExpertUses, Matrix, take_matrix, take_norm, take_vector};
use crate::dims::*;
use files::Result;
use files::blocks::BlockType;
use files::blocks::gguf::decode_values;
use files::config::LayerKind;
use files::mapped::MappedSlice;

/// One transformer block. Biases and norms that the model lacks are empty. A norm is its weights followed by its
/// biases.
#[allow(missing_docs, reason = "the fields have the names of the steps")]
pub struct Layer {
    pub attn_norm: Vec<f32>,
    pub mixer: Mixer,
    /// Mamba2, in place of another mixer or beside it.
    pub mamba: Option<Mamba>,
    pub attn_post_norm: Vec<f32>,
    pub ffn_norm: Vec<f32>,
    pub ffn: Ffn,
    pub ffn_post_norm: Vec<f32>,
    /// Embedding of the token for this layer, if the model has such.
    pub per_layer: Option<PerLayerInput>,
    /// Factor of the residual behind the layer.
    pub scalar: f32,
}

/// The first half of a layer, which mixes a token's values with those of earlier tokens.
#[allow(clippy::large_enum_variant, reason = "a layer has one")]
pub enum Mixer {
    /// Attention over keys and values.
    Attention(Attention<Q_DIM, GLOBAL_KV_DIM>),
    /// Attention with the narrower, or more, heads of sliding-window layers, if they have such.
    LocalAttention(Attention<LOCAL_Q_DIM, LOCAL_KV_DIM>),
    /// A gated short convolution.
    ShortConv(ShortConv),
    /// A gated delta net.
    DeltaNet(DeltaNet),
    /// None, or only Mamba2: see [`Layer::mamba`].
    None,
}

/// The second half of a layer.
#[allow(clippy::large_enum_variant, reason = "a layer has one")]
pub enum Ffn {
    /// Of the usual width.
    Usual(FeedForward<FFN_DIM>),
    /// Of layers that share keys and values, if theirs is wider.
    Wide(FeedForward<SHARED_FFN_DIM>),
    /// A mixture of experts.
    Experts(MixtureOfExperts),
    /// None: the layer is only a mixer.
    None,
}

/// Weights of a mixture of experts. A matrix has the rows of all experts, one expert after another.
pub struct MixtureOfExperts {
    /// Scores of the experts.
    pub router: Matrix<{ EXPERTS.count }, DIM>,
    /// Bias of the scores: `[EXPERTS.count]`, empty without.
    pub router_bias: Vec<f32>,
    /// Bias by which experts are chosen, but not weighed: `[EXPERTS.count]`, empty without.
    pub choice_bias: Vec<f32>,
    /// Gates of the experts.
    pub gate: Matrix<EXPERT_ROWS, DIM>,
    /// Biases of the gates, ups and downs: one for each row, empty without.
    pub gate_bias: Vec<f32>,
    /// Ups of the experts.
    pub up: Matrix<EXPERT_ROWS, DIM>,
    #[allow(missing_docs, reason = "see `gate_bias`")]
    pub up_bias: Vec<f32>,
    /// Downs of the experts.
    pub down: Matrix<EXPERT_DOWN_ROWS, { EXPERTS.dim }>,
    #[allow(missing_docs, reason = "see `gate_bias`")]
    pub down_bias: Vec<f32>,
    /// The feed-forward of all tokens, and the matrix of its gate, if the model has them.
    pub shared: Option<(FeedForward<{ EXPERTS.shared_dim }>, Option<Matrix<1, DIM>>)>,
    /// The feed-forward of all tokens in a model whose experts have norms of their own.
    pub branches: Option<FfnBranches>,
    /// Number of tokens that chose each expert.
    pub uses: ExpertUses,
}

/// A feed-forward beside the experts, and the norms and factors that are theirs alone.
pub struct FfnBranches {
    /// The feed-forward, whose input has the layer's usual norm.
    pub shared: FeedForward<{ EXPERTS.shared_dim }>,
    /// Norm of its output.
    pub shared_post_norm: Vec<f32>,
    /// Norm of the router's input.
    pub router_norm: Vec<f32>,
    /// Factor of each expert's weight: `[EXPERTS.count]`
    pub expert_scale: Vec<f32>,
    /// Norm of the experts' input.
    pub experts_norm: Vec<f32>,
    /// Norm of the weighted sum of their outputs.
    pub experts_post_norm: Vec<f32>,
}

/// Weights of a feed-forward of `W` columns.
#[allow(missing_docs, reason = "the fields have the names of the steps")]
pub struct FeedForward<const W: usize> {
    /// `None` if it has no gate.
    pub gate: Option<Matrix<W, DIM>>,
    pub up: Matrix<W, DIM>,
    pub up_bias: Vec<f32>,
    pub down: Matrix<DIM, W>,
    pub down_bias: Vec<f32>,
}

/// Weights by which the embedding that a layer has of a token joins the residual.
pub struct PerLayerInput {
    /// Gate of the embedding: a projection of the residual.
    pub gate: Matrix<PER_LAYER_DIM, DIM>,
    /// Projection to the residual.
    pub out: Matrix<DIM, PER_LAYER_DIM>,
    /// Norm of its result.
    pub norm: Vec<f32>,
}

/// The embeddings that all layers have of a token.
pub struct PerLayerEmbeddings {
    pub(super) table: (BlockType, MappedSlice),
    /// Projection of the token's usual embedding.
    pub projection: Matrix<PER_LAYER_ROW, DIM>,
    /// Norm of its result, of each layer: `[PER_LAYER_DIM]`
    pub norm: Vec<f32>,
}

impl PerLayerEmbeddings {
    /// Decodes the row of a token, exactly, into `x` of [`PER_LAYER_ROW`] values.
    pub fn decode_row(&self, token: usize, x: &mut [f32]) {
        let (block, data) = &self.table;
        let len = block.row_bytes(PER_LAYER_ROW);
        decode_values(*block, &data.bytes()[token * len..][..len], x);
    }
}

/// Weights of attention with queries of `Q` and keys of `KV` columns.
#[allow(missing_docs, reason = "the fields have the names of the steps")]
pub struct Attention<const Q: usize, const KV: usize> {
    pub wq: Matrix<Q, DIM>,
    /// `None`, like `wv`, if the layer reads keys and values of another.
    pub wk: Option<Matrix<KV, DIM>>,
    /// `None` also if the values are the projected keys.
    pub wv: Option<Matrix<KV, DIM>>,
    pub q_bias: Vec<f32>,
    pub k_bias: Vec<f32>,
    pub v_bias: Vec<f32>,
    pub q_norm: Vec<f32>,
    pub k_norm: Vec<f32>,
    /// Gate of the output, if the model has one.
    pub gate: Option<Matrix<GATE_DIM, DIM>>,
    /// Logits that take part in the softmax of each head, and whose share is dropped: `[HEADS]`, empty without.
    pub sinks: Vec<f32>,
    pub wo: Matrix<DIM, Q>,
    pub o_bias: Vec<f32>,
}

/// Weights of a gated short convolution.
pub struct ShortConv {
    /// Two gates and the convolution's input, `[b | c | x]`.
    pub w_in: Matrix<{ 3 * DIM }, DIM>,
    /// `[CONV_TAPS][DIM]`, oldest first.
    pub taps: Vec<f32>,
    pub w_out: Matrix<DIM, DIM>,
}

/// Weights of a gated delta net.
pub struct DeltaNet {
    /// Queries, keys and values before the convolution.
    pub qkv: Matrix<CONV_CHANNELS, DIM>,
    /// Gate of the output.
    pub z: Matrix<DELTA_VALUE_DIM, DIM>,
    /// Strength of each head's update.
    pub b: Matrix<{ DELTA_NET.value_heads }, DIM>,
    /// Decay of each head's state.
    pub a: Matrix<{ DELTA_NET.value_heads }, DIM>,
    /// `[CONV_TAPS][CONV_CHANNELS]`, oldest first.
    pub taps: Vec<f32>,
    /// Bias of `a`.
    pub bias: Vec<f32>,
    /// Factor of each head's decay, negative.
    pub decay: Vec<f32>,
    /// Norm of each head's output.
    pub norm: Vec<f32>,
    pub w_out: Matrix<DIM, DELTA_VALUE_DIM>,
    /// Consecutive value heads that share a key head. The order of value heads is the file's: in groups, each with a
    /// key head, or, in GGUF files, the first heads of all groups, then the second ones.
    pub shared_run: usize,
}

/// Weights of Mamba2.
pub struct Mamba {
    /// Gate of the output, `x`, `B`, `C` and time steps.
    pub w_in: Matrix<MAMBA_ROWS, DIM>,
    /// `[CONV_TAPS][CONV_CHANNELS]`, oldest first.
    pub taps: Vec<f32>,
    /// Bias of the convolution; empty without.
    pub conv_bias: Vec<f32>,
    /// Bias of each head's time steps.
    pub bias: Vec<f32>,
    /// Factor of each head's decay, negative.
    pub decay: Vec<f32>,
    /// Factor of each head's `x` that is added to its output.
    pub skip: Vec<f32>,
    /// Norm of the output; empty without.
    pub norm: Vec<f32>,
    pub w_out: Matrix<DIM, MAMBA_DIM>,
}

impl Layer {
    /// Forms of the normed residual that its matrices read.
    pub fn normed_forms(&self) -> ActivationForms {
        let mixer = match &self.mixer {
            Mixer::Attention(w) => w.normed_forms(),
            Mixer::LocalAttention(w) => w.normed_forms(),
            Mixer::ShortConv(w) => w.w_in.activation_forms(),
            Mixer::DeltaNet(w) => {
                let gates = w.z.activation_forms() | w.b.activation_forms() | w.a.activation_forms();
                w.qkv.activation_forms() | gates
            }
            Mixer::None => ActivationForms::default(),
        } | forms_of(self.mamba.as_ref().map(|w| &w.w_in));
        let ffn = match &self.ffn {
            Ffn::Usual(w) => w.normed_forms(),
            Ffn::Wide(w) => w.normed_forms(),
            Ffn::Experts(w) => w.normed_forms(),
            Ffn::None => ActivationForms::default(),
        };
        mixer | ffn | forms_of(self.per_layer.as_ref().map(|w| &w.gate))
    }

    /// Logits of attention that belong to no token: `[HEADS]`, empty without.
    pub fn sink_logits(&self) -> &[f32] {
        match &self.mixer {
            Mixer::Attention(w) => &w.sinks,
            Mixer::LocalAttention(w) => &w.sinks,
            _ => &[],
        }
    }

    /// Norms of queries and of keys; empty without.
    ///
    /// # Panics
    ///
    /// If it has no attention.
    pub fn qk_norms(&self) -> [&[f32]; 2] {
        match &self.mixer {
            Mixer::Attention(w) => [&w.q_norm, &w.k_norm],
            Mixer::LocalAttention(w) => [&w.q_norm, &w.k_norm],
            _ => unreachable!("invariant: the layer has attention"),
        }
    }
}

impl<const Q: usize, const KV: usize> Attention<Q, KV> {
    fn normed_forms(&self) -> ActivationForms {
        let keys = forms_of(self.wk.as_ref()) | forms_of(self.wv.as_ref());
        self.wq.activation_forms() | keys | forms_of(self.gate.as_ref())
    }
}

impl MixtureOfExperts {
    fn normed_forms(&self) -> ActivationForms {
        let shared = self.shared.as_ref().map(|(w, gate)| w.normed_forms() | forms_of(gate.as_ref()));
        let branch = self.branches.as_ref().map(|branches| branches.shared.normed_forms());
        let besides = shared.or(branch).unwrap_or_default();
        self.router.activation_forms() | self.gate_up_forms() | besides
    }

    /// Forms of activations that the experts' gates and ups read.
    pub fn gate_up_forms(&self) -> ActivationForms {
        self.gate.activation_forms() | self.up.activation_forms()
    }
}

impl<const W: usize> FeedForward<W> {
    fn normed_forms(&self) -> ActivationForms {
        self.up.activation_forms() | forms_of(self.gate.as_ref())
    }
}

/// Forms of activations that a matrix reads, if there is one.
pub(crate) fn forms_of<const ROWS: usize, const COLS: usize>(
    matrix: Option<&Matrix<ROWS, COLS>>,
) -> ActivationForms {
    matrix.map_or(ActivationForms::default(), Matrix::activation_forms)
}

/// Takes a layer like layer `like`, whose names `at` completes.
pub(super) fn take_layer(model: &LoadedModel, at: &dyn Fn(&str) -> String, like: usize) -> Result<Layer> {
    let pre_norm = |name: &str, is_there| {
        if PRE_NORMS && is_there { take_norm(model, &at(name)) } else { Ok(Vec::new()) }
    };
    Ok(Layer {
        attn_norm: pre_norm("input_layernorm", has_mixer(like))?,
        mixer: match LAYER_KINDS[like] {
            LayerKind::ShortConv => Mixer::ShortConv(ShortConv {
                w_in: take_matrix(model, &at("conv.in_proj.weight"))?,
                taps: take_vector(model, &at(SHORT_CONV))?,
                w_out: take_matrix(model, &at("conv.out_proj.weight"))?,
            }),
            LayerKind::DeltaNet => Mixer::DeltaNet(DeltaNet {
                qkv: take_matrix(model, &at("linear_attn.in_proj_qkv.weight"))?,
                z: take_matrix(model, &at("linear_attn.in_proj_z.weight"))?,
                b: take_matrix(model, &at("linear_attn.in_proj_b.weight"))?,
                a: take_matrix(model, &at("linear_attn.in_proj_a.weight"))?,
                taps: take_vector(model, &at(DELTA_CONV))?,
                bias: take_vector(model, &at(DELTA_BIAS))?,
                decay: take_vector(model, &at(DELTA_DECAY))?,
                norm: take_vector(model, &at(DELTA_NORM))?,
                w_out: take_matrix(model, &at("linear_attn.out_proj.weight"))?,
                shared_run: if model.from_gguf { 1 } else { HEADS_PER_KEY },
            }),
            _ if has_local_heads(like) => Mixer::LocalAttention(take_attention(model, at)?),
            LayerKind::Mamba | LayerKind::FeedForward => Mixer::None,
            _ => Mixer::Attention(take_attention(model, at)?),
        },
        mamba: LAYER_KINDS[like].has_mamba().then(|| take_mamba(model, at)).transpose()?,
        attn_post_norm: if POST_NORMS { take_norm(model, &at(ATTN_POST_NORM))? } else { Vec::new() },
        ffn_norm: pre_norm(FFN_NORM, has_ffn(like))?,
        ffn: match ffn_dim(like) {
            _ if !has_ffn(like) => Ffn::None,
            _ if has_experts(like) => Ffn::Experts(take_experts(model, at)?),
            FFN_DIM => Ffn::Usual(take_feed_forward(model, &|part| at(&format!("mlp.{part}")))?),
            _ => Ffn::Wide(take_feed_forward(model, &|part| at(&format!("mlp.{part}")))?),
        },
        ffn_post_norm: if POST_NORMS { take_norm(model, &at(FFN_POST_NORM))? } else { Vec::new() },
        per_layer: (HAS_PER_LAYER).then(|| take_per_layer(model, at)).transpose()?,
        scalar: if LAYER_SCALARS {
            take_vector(model, &at(LAYER_SCALAR))?.first().copied().unwrap_or(1.0)
        } else {
            1.0
        },
    })
}

fn take_experts(model: &LoadedModel, at: &dyn Fn(&str) -> String) -> Result<MixtureOfExperts> {
    let shared = || {
        let w = take_feed_forward(model, &|part| at(&format!("mlp.shared_expert.{part}")))?;
        let gate = HAS_SHARED_EXPERT_GATE.then(|| take_matrix(model, &at(SHARED_EXPERT_GATE)));
        Ok((w, gate.transpose()?))
    };
    let branches = || {
        let root = (DIM as f32).sqrt();
        Ok(FfnBranches {
            shared: take_feed_forward(model, &|part| at(&format!("mlp.shared_expert.{part}")))?,
            shared_post_norm: take_norm(model, &at(SHARED_POST_NORM))?,
            router_norm: take_vector(model, &at(ROUTER_SCALE))?.iter().map(|x| x / root).collect(),
            expert_scale: take_vector(model, &at(EXPERT_SCALE))?,
            experts_norm: take_norm(model, &at(EXPERTS_NORM))?,
            experts_post_norm: take_norm(model, &at(EXPERTS_POST_NORM))?,
        })
    };
    Ok(MixtureOfExperts {
        router: take_matrix(model, &at(ROUTER))?,
        router_bias: take_vector(model, &at(ROUTER_BIAS))?,
        choice_bias: take_vector(model, &at(CHOICE_BIAS))?,
        gate: take_matrix(model, &at("mlp.experts.gate_proj.weight"))?,
        gate_bias: take_vector(model, &at("mlp.experts.gate_proj.bias"))?,
        up: take_matrix(model, &at("mlp.experts.up_proj.weight"))?,
        up_bias: take_vector(model, &at("mlp.experts.up_proj.bias"))?,
        down: take_matrix(model, &at("mlp.experts.down_proj.weight"))?,
        down_bias: take_vector(model, &at("mlp.experts.down_proj.bias"))?,
        shared: HAS_SHARED_EXPERT.then(shared).transpose()?,
        branches: HAS_BRANCHES.then(branches).transpose()?,
        uses: ExpertUses::new(),
    })
}

fn take_feed_forward<const W: usize>(
    model: &LoadedModel,
    at: &dyn Fn(&str) -> String,
) -> Result<FeedForward<W>> {
    Ok(FeedForward {
        gate: HAS_GATE.then(|| take_matrix(model, &at("gate_proj.weight"))).transpose()?,
        up: take_matrix(model, &at("up_proj.weight"))?,
        up_bias: take_vector(model, &at("up_proj.bias"))?,
        down: take_matrix(model, &at("down_proj.weight"))?,
        down_bias: take_vector(model, &at("down_proj.bias"))?,
    })
}

fn take_mamba(model: &LoadedModel, at: &dyn Fn(&str) -> String) -> Result<Mamba> {
    Ok(Mamba {
        w_in: take_matrix(model, &at("mamba.in_proj.weight"))?,
        taps: take_vector(model, &at(MAMBA_CONV))?,
        conv_bias: take_vector(model, &at(MAMBA_CONV_BIAS))?,
        bias: take_vector(model, &at(MAMBA_BIAS))?,
        decay: take_vector(model, &at(MAMBA_DECAY))?,
        skip: take_vector(model, &at(MAMBA_SKIP))?,
        norm: take_vector(model, &at(MAMBA_NORM))?,
        w_out: take_matrix(model, &at("mamba.out_proj.weight"))?,
    })
}

fn take_per_layer(model: &LoadedModel, at: &dyn Fn(&str) -> String) -> Result<PerLayerInput> {
    Ok(PerLayerInput {
        gate: take_matrix(model, &at(PER_LAYER_GATE))?,
        out: take_matrix(model, &at(PER_LAYER_OUT))?,
        norm: take_norm(model, &at(PER_LAYER_POST_NORM))?,
    })
}

fn take_attention<const Q: usize, const KV: usize>(
    model: &LoadedModel,
    at: &dyn Fn(&str) -> String,
) -> Result<Attention<Q, KV>> {
    let has_keys = model.tensors.contains_key(&at("self_attn.k_proj.weight"));
    let projection = |part: &str| take_matrix(model, &at(&format!("self_attn.{part}_proj.weight")));
    let has_values = model.tensors.contains_key(&at("self_attn.v_proj.weight"));
    Ok(Attention {
        wq: take_matrix(model, &at("self_attn.q_proj.weight"))?,
        wk: has_keys.then(|| projection("k")).transpose()?,
        wv: has_values.then(|| projection("v")).transpose()?,
        q_bias: take_vector(model, &at("self_attn.q_proj.bias"))?,
        k_bias: take_vector(model, &at("self_attn.k_proj.bias"))?,
        v_bias: take_vector(model, &at("self_attn.v_proj.bias"))?,
        q_norm: take_vector(model, &at("self_attn.q_norm.weight"))?,
        k_norm: take_vector(model, &at("self_attn.k_norm.weight"))?,
        gate: HAS_ATTENTION_GATE.then(|| take_matrix(model, &at(ATTENTION_GATE_NAME))).transpose()?,
        sinks: take_vector(model, &at(SINKS))?,
        wo: take_matrix(model, &at("self_attn.o_proj.weight"))?,
        o_bias: take_vector(model, &at("self_attn.o_proj.bias"))?,
    })
}
