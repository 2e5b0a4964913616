//! The baked model's tensors: names, shapes and roles.

use crate::dims::*;
use files::blocks::BLOCK;

/// What a tensor is used for. This decides how it is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Looked up by row; stays as in the checkpoint.
    Embedding,
    /// Multiplied with activations; may be quantised.
    Matrix,
    /// A norm's weight or a bias; widened to f32.
    Vector,
}

/// One tensor of the model.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Name in the engine and in packed files.
    pub name: String,
    /// Name in the checkpoint. (A tied head reads the embedding.)
    pub stored_as: String,
    /// 1 for a vector.
    pub rows: usize,
    pub cols: usize,
    pub role: Role,
}

impl Spec {
    /// Whether the weight type Q4_0 quantises this tensor.
    pub fn quantises(&self) -> bool {
        self.role == Role::Matrix && self.cols.is_multiple_of(BLOCK)
    }

    /// Whether it has a row for each token.
    pub fn is_vocabulary(&self) -> bool {
        self.role == Role::Embedding || self.name == HEAD
    }
}

/// Every tensor of the baked model, in the order of a forward pass.
pub fn table() -> Vec<Spec> {
    let mut specs = Vec::new();
    let mut put = |name: String, rows: usize, cols: usize, role: Role| {
        let stored_as = if name == HEAD && TIED { EMBED.to_string() } else { name.clone() };
        specs.push(Spec { name, stored_as, rows, cols, role });
    };
    put(EMBED.into(), VOCAB, DIM, Role::Embedding);
    for l in 0..LAYERS {
        let at = |s: &str| format!("model.layers.{l}.{s}");
        put(at("input_layernorm.weight"), 1, DIM, Role::Vector);
        for (part, rows) in [("q", Q_DIM), ("k", KV_DIM), ("v", KV_DIM)] {
            put(at(&format!("self_attn.{part}_proj.weight")), rows, DIM, Role::Matrix);
            if QKV_BIAS {
                put(at(&format!("self_attn.{part}_proj.bias")), 1, rows, Role::Vector);
            }
        }
        if QK_NORM {
            put(at("self_attn.q_norm.weight"), 1, HEAD_DIM, Role::Vector);
            put(at("self_attn.k_norm.weight"), 1, HEAD_DIM, Role::Vector);
        }
        put(at("self_attn.o_proj.weight"), DIM, Q_DIM, Role::Matrix);
        if O_BIAS {
            put(at("self_attn.o_proj.bias"), 1, DIM, Role::Vector);
        }
        put(at("post_attention_layernorm.weight"), 1, DIM, Role::Vector);
        put(at("mlp.gate_proj.weight"), FFN_DIM, DIM, Role::Matrix);
        put(at("mlp.up_proj.weight"), FFN_DIM, DIM, Role::Matrix);
        put(at("mlp.down_proj.weight"), DIM, FFN_DIM, Role::Matrix);
    }
    put("model.norm.weight".into(), 1, DIM, Role::Vector);
    put(HEAD.into(), VOCAB, DIM, Role::Matrix);
    specs
}

pub(super) const EMBED: &str = "model.embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";
