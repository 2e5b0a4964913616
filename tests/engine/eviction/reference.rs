//! A Llama or Gemma 3 in f64, without a cache: every token at its own position, over the tokens it is said to see.

use antigravity::dims::{
    ATTENTION_SCALE, DIM, EMBEDDING_SCALE, FFN_DIM, HEAD_DIM, HEADS, KV_HEADS, LAYERS, NORM_EPS, POST_NORMS,
    QK_NORM, ROPE, VOCAB, is_sliding,
};
use files::config::QkNorm;
use std::collections::HashMap;
use std::path::Path;

/// Weights by name, `[rows][cols]`.
pub struct Reference(HashMap<String, Vec<f64>>);

impl Reference {
    /// Reads a bf16 checkpoint.
    pub fn load(file: &Path) -> Self {
        let bytes = std::fs::read(file).expect("the checkpoint");
        let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
        let wide = |data: &[u8]| -> Vec<f64> {
            let halves = data.chunks_exact(2).map(|b| [b[0], b[1]]);
            halves.map(|b| f64::from(half::bf16::from_le_bytes(b).to_f32())).collect()
        };
        Self(tensors.iter().map(|(name, view)| (name.to_string(), wide(view.data()))).collect())
    }

    /// `y = W x`.
    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let rows = self.0[name].chunks_exact(x.len());
        rows.map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (mean + NORM_EPS).sqrt();
        // Gemma's weights are stored less 1.
        let less = if POST_NORMS { 1.0 } else { 0.0 };
        x.iter().zip(&self.0[name]).map(|(x, w)| x * scale * (w + less)).collect()
    }

    /// Each head normed, where the model does that.
    fn heads(&self, name: &str, x: &[f64]) -> Vec<f64> {
        if QK_NORM == QkNorm::None {
            return x.to_vec();
        }
        x.chunks_exact(HEAD_DIM).flat_map(|head| self.norm(name, head)).collect()
    }

    /// Logits of the last token; `visible[t]` are the tokens that token `t` sees.
    pub fn logits(&self, ids: &[u32], visible: &[Vec<usize>]) -> Vec<f64> {
        self.logits_of([visible, visible], ids)
    }

    /// Logits of the last token; `visible` has the tokens that full-attention layers see, then those that sliding-window layers see.
    pub fn logits_of(&self, visible: [&[Vec<usize>]; 2], ids: &[u32]) -> Vec<f64> {
        let embedding = &self.0["model.embed_tokens.weight"];
        let mut x: Vec<Vec<f64>> =
            ids.iter().map(|&id| embedding[id as usize * DIM..][..DIM].to_vec()).collect();
        x.iter_mut().flatten().for_each(|x| *x *= EMBEDDING_SCALE);
        for layer in 0..LAYERS {
            let visible = visible[usize::from(is_sliding(layer))];
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let h: Vec<_> = x.iter().map(|x| self.norm(&name("input_layernorm"), x)).collect();
            let project =
                |part: &str| -> Vec<Vec<f64>> { h.iter().map(|h| self.times(&name(part), h)).collect() };
            let (mut q, mut k) = (project("self_attn.q_proj"), project("self_attn.k_proj"));
            let v = project("self_attn.v_proj");
            for t in 0..ids.len() {
                q[t] = self.heads(&name("self_attn.q_norm"), &q[t]);
                k[t] = self.heads(&name("self_attn.k_norm"), &k[t]);
                rope(&mut q[t], t, layer);
                rope(&mut k[t], t, layer);
            }
            for t in 0..ids.len() {
                let mut att = vec![0.0; HEADS * HEAD_DIM];
                for head in 0..HEADS {
                    let of_kv = head / (HEADS / KV_HEADS) * HEAD_DIM;
                    let query = &q[t][head * HEAD_DIM..][..HEAD_DIM];
                    let scores: Vec<f64> = visible[t]
                        .iter()
                        .map(|&s| {
                            let key = &k[s][of_kv..][..HEAD_DIM];
                            query.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() * ATTENTION_SCALE
                        })
                        .collect();
                    let most = scores.iter().copied().fold(f64::MIN, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    for (w, &s) in weights.iter().zip(&visible[t]) {
                        for d in 0..HEAD_DIM {
                            att[head * HEAD_DIM + d] += w / total * v[s][of_kv + d];
                        }
                    }
                }
                let mut out = self.times(&name("self_attn.o_proj"), &att);
                if POST_NORMS {
                    out = self.norm(&name("post_attention_layernorm"), &out);
                }
                add(&mut x[t], &out);
                let norm = if POST_NORMS { "pre_feedforward_layernorm" } else { "post_attention_layernorm" };
                let h = self.norm(&name(norm), &x[t]);
                let (gate, up) =
                    (self.times(&name("mlp.gate_proj"), &h), self.times(&name("mlp.up_proj"), &h));
                let ffn: Vec<f64> = gate.iter().zip(up).map(|(&g, u)| activated(g) * u).collect();
                assert_eq!(ffn.len(), FFN_DIM);
                let mut out = self.times(&name("mlp.down_proj"), &ffn);
                if POST_NORMS {
                    out = self.norm(&name("post_feedforward_layernorm"), &out);
                }
                add(&mut x[t], &out);
            }
        }
        let last = self.norm("model.norm.weight", x.last().expect("a token"));
        let logits = self.times("model.embed_tokens.weight", &last);
        assert_eq!(logits.len(), VOCAB);
        logits
    }
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// SiLU, or of Gemma GELU by the tanh formula.
fn activated(x: f64) -> f64 {
    match POST_NORMS {
        true => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()),
        false => x / (1.0 + (-x).exp()),
    }
}

/// Rotates pairs `(i, i + head_dim / 2)` of each head by `position * theta^(-2i / head_dim)`.
fn rope(heads: &mut [f64], position: usize, layer: usize) {
    let local = |i: usize| ROPE.local_theta.powf(-2.0 * i as f64 / HEAD_DIM as f64);
    for head in heads.chunks_exact_mut(HEAD_DIM) {
        for i in 0..HEAD_DIM / 2 {
            let frequency = if is_sliding(layer) { local(i) } else { ROPE.base_frequency(i) };
            let angle = position as f64 * frequency;
            let (a, b) = (head[i], head[i + HEAD_DIM / 2]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[i + HEAD_DIM / 2] = b * angle.cos() + a * angle.sin();
        }
    }
}
