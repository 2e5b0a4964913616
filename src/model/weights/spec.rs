//! The baked model's tensors: names, shapes, roles, and their places in a checkpoint.

use crate::dims::*;
use files::blocks::BLOCK;
use files::config::Arch;

/// Use of a tensor, which decides how it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorRole {
    /// Looked up by row; stays as in the checkpoint.
    Embedding,
    /// Looked up by position; stays as in the checkpoint.
    Positions,
    /// Multiplied with activations; may be quantised.
    Matrix,
    /// A norm's weight or a bias; widened to f32.
    Vector,
}

/// One tensor of the model.
#[derive(Debug, Clone)]
pub struct TensorSpec {
    /// Name in the engine and in packed files.
    pub name: String,
    /// Place in the checkpoint. (A tied head reads the embedding.)
    pub stored: CheckpointPlace,
    /// 1 for a vector.
    pub rows: usize,
    pub cols: usize,
    pub role: TensorRole,
    /// True for the embedding and the output head if they are one tensor.
    pub tied: bool,
}

/// A tensor of a checkpoint, or some rows of it (elements of a vector): some families store several as one.
#[derive(Debug, Clone)]
pub struct CheckpointPlace {
    /// Name in the checkpoint.
    pub name: String,
    /// First row.
    pub first: usize,
    /// Rows of the whole tensor.
    pub of: usize,
}

impl TensorSpec {
    /// True if the weight type Q4_0 quantises this tensor.
    pub fn is_quantised(&self) -> bool {
        self.role == TensorRole::Matrix && self.cols.is_multiple_of(BLOCK)
    }

    /// True if it has a row for each token of the vocabulary.
    pub fn is_vocabulary(&self) -> bool {
        self.role == TensorRole::Embedding || self.name == HEAD
    }

    /// True if 1 must be added to a checkpoint's norm weights.
    pub fn adds_one(&self) -> bool {
        ARCH == Arch::Gemma3 && self.role == TensorRole::Vector && self.name.ends_with("norm.weight")
    }

    /// True if a checkpoint stores the matrix transposed (`Conv1D`).
    pub fn is_transposed(&self) -> bool {
        ARCH == Arch::Gpt2 && self.role == TensorRole::Matrix && self.name != HEAD
    }
}

/// Every tensor of the baked model, in the order of a forward pass.
pub fn model_tensors() -> Vec<TensorSpec> {
    let mut specs = Vec::new();
    let mut put = |name: String, (rows, cols): (usize, usize), role: TensorRole| {
        let stored = checkpoint_place(&name, if role == TensorRole::Vector { cols } else { rows });
        let tied = TIED && (name == EMBED || name == HEAD);
        specs.push(TensorSpec { name, stored, rows, cols, role, tied });
    };
    let norm = |put: &mut dyn FnMut(String, (usize, usize), TensorRole), name: String| {
        put(format!("{name}.weight"), (1, DIM), TensorRole::Vector);
        if NORM_BIAS {
            put(format!("{name}.bias"), (1, DIM), TensorRole::Vector);
        }
    };
    put(EMBED.into(), (VOCAB, DIM), TensorRole::Embedding);
    if LEARNED_POSITIONS {
        put(POSITIONS.into(), (MAX_POSITION, DIM), TensorRole::Positions);
    }
    for l in 0..LAYERS {
        let at = |s: &str| format!("model.layers.{l}.{s}");
        norm(&mut put, at("input_layernorm"));
        for (part, rows) in [("q", Q_DIM), ("k", KV_DIM), ("v", KV_DIM)] {
            put(at(&format!("self_attn.{part}_proj.weight")), (rows, DIM), TensorRole::Matrix);
            if QKV_BIAS {
                put(at(&format!("self_attn.{part}_proj.bias")), (1, rows), TensorRole::Vector);
            }
        }
        if QK_NORM {
            put(at("self_attn.q_norm.weight"), (1, HEAD_DIM), TensorRole::Vector);
            put(at("self_attn.k_norm.weight"), (1, HEAD_DIM), TensorRole::Vector);
        }
        put(at("self_attn.o_proj.weight"), (DIM, Q_DIM), TensorRole::Matrix);
        if O_BIAS {
            put(at("self_attn.o_proj.bias"), (1, DIM), TensorRole::Vector);
        }
        if POST_NORMS {
            norm(&mut put, at(ATTN_POST_NORM));
        }
        norm(&mut put, at(FFN_NORM));
        if HAS_GATE {
            put(at("mlp.gate_proj.weight"), (FFN_DIM, DIM), TensorRole::Matrix);
        }
        put(at("mlp.up_proj.weight"), (FFN_DIM, DIM), TensorRole::Matrix);
        if MLP_BIAS {
            put(at("mlp.up_proj.bias"), (1, FFN_DIM), TensorRole::Vector);
        }
        put(at("mlp.down_proj.weight"), (DIM, FFN_DIM), TensorRole::Matrix);
        if MLP_BIAS {
            put(at("mlp.down_proj.bias"), (1, DIM), TensorRole::Vector);
        }
        if POST_NORMS {
            norm(&mut put, at(FFN_POST_NORM));
        }
    }
    norm(&mut put, "model.norm".into());
    put(HEAD.into(), (VOCAB, DIM), TensorRole::Matrix);
    specs
}

/// Place in a checkpoint of the engine's tensor `name` with this number of rows.
fn checkpoint_place(name: &str, rows: usize) -> CheckpointPlace {
    if name == HEAD && TIED {
        return checkpoint_place(EMBED, rows);
    }
    let whole = |name: String| CheckpointPlace { name, first: 0, of: rows };
    // Fused tensors: the rows of q, k and v one after another, and of gate and up.
    let qkv = |at: &str, name: &str| {
        let first = [("q_proj", 0), ("k_proj", Q_DIM), ("v_proj", Q_DIM + KV_DIM)];
        let (part, first) = first.into_iter().find(|(part, _)| name.contains(part))?;
        Some(CheckpointPlace {
            name: name.replace(&format!("self_attn.{part}"), at),
            first,
            of: Q_DIM + 2 * KV_DIM,
        })
    };
    match ARCH {
        Arch::Phi3 => {
            let gate_up = |(part, first): (&str, usize)| {
                let fused = name.contains(part).then(|| name.replace(part, "gate_up_proj"))?;
                Some(CheckpointPlace { name: fused, first, of: 2 * FFN_DIM })
            };
            let halves = [("gate_proj", 0), ("up_proj", FFN_DIM)];
            let found = qkv("self_attn.qkv_proj", name).or_else(|| halves.into_iter().find_map(gate_up));
            found.unwrap_or_else(|| whole(name.into()))
        }
        Arch::Gpt2 => {
            let renamed = GPT2.iter().fold(name.to_string(), |name, (from, to)| name.replace(from, to));
            qkv("attn.c_attn", &renamed).unwrap_or_else(|| whole(renamed))
        }
        _ => whole(name.into()),
    }
}

/// Renames from the common tensor names to GPT-2's, applied in order.
const GPT2: [(&str, &str); 10] = [
    ("model.embed_tokens", "wte"),
    ("model.embed_positions", "wpe"),
    ("model.layers.", "h."),
    ("model.norm", "ln_f"),
    ("input_layernorm", "ln_1"),
    ("post_attention_layernorm", "ln_2"),
    ("self_attn.o_proj", "attn.c_proj"),
    ("mlp.up_proj", "mlp.c_fc"),
    ("mlp.down_proj", "mlp.c_proj"),
    ("model.", ""),
];

pub(super) const EMBED: &str = "model.embed_tokens.weight";
pub(super) const POSITIONS: &str = "model.embed_positions.weight";
pub(super) const HEAD: &str = "lm_head.weight";
/// Norm before the feed-forward layer. Models with post-norms use its usual name for the norm after attention.
pub(super) const FFN_NORM: &str =
    if POST_NORMS { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
pub(super) const ATTN_POST_NORM: &str = "post_attention_layernorm";
pub(super) const FFN_POST_NORM: &str = "post_feedforward_layernorm";
