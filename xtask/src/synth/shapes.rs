//! Names and shapes of a model's tensors, from its `config.json`.

use files::config::{Arch, ModelConfig, QkNorm};

/// Distribution of a tensor's values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// Mean 0.
    Weights,
    /// Mean 1.
    Norm,
}

/// One tensor of the file.
#[derive(Debug)]
pub struct Tensor {
    pub name: String,
    /// `[rows, columns]` or `[columns]`
    pub shape: Vec<usize>,
    pub fill: Fill,
}

impl Tensor {
    /// Number of values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// All tensors, with their names in transformers.
pub fn tensors(model: &ModelConfig) -> Vec<Tensor> {
    if model.arch == Arch::Gpt2 {
        return gpt2_tensors(model);
    }
    let (dim, ffn) = (model.dim, model.ffn_dim);
    let (q, kv) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let separate = [
        ("self_attn.q_proj", q, dim, model.qkv_bias),
        ("self_attn.k_proj", kv, dim, model.qkv_bias),
        ("self_attn.v_proj", kv, dim, model.qkv_bias),
        ("self_attn.o_proj", dim, q, model.o_bias),
        ("mlp.gate_proj", ffn, dim, false),
        ("mlp.up_proj", ffn, dim, false),
        ("mlp.down_proj", dim, ffn, false),
    ];
    let fused = [
        ("self_attn.qkv_proj", q + 2 * kv, dim, false),
        ("self_attn.o_proj", dim, q, false),
        ("mlp.gate_up_proj", 2 * ffn, dim, false),
        ("mlp.down_proj", dim, ffn, false),
    ];
    let matrices = if model.arch == Arch::Phi3 { &fused[..] } else { &separate };
    let mut list = Vec::new();
    let mut put = |name: String, shape: &[usize], fill| list.push(Tensor { name, shape: shape.into(), fill });
    put("model.embed_tokens.weight".into(), &[model.vocab, dim], Fill::Weights);
    for layer in 0..model.layers {
        let at = |part: &str| format!("model.layers.{layer}.{part}");
        for (part, rows, columns, has_bias) in matrices {
            put(at(&format!("{part}.weight")), &[*rows, *columns], Fill::Weights);
            if *has_bias {
                put(at(&format!("{part}.bias")), &[*rows], Fill::Weights);
            }
        }
        if model.qk_norm != QkNorm::None {
            put(at("self_attn.q_norm.weight"), &[model.head_dim], Fill::Norm);
            put(at("self_attn.k_norm.weight"), &[model.head_dim], Fill::Norm);
        }
        let behind = ["pre_feedforward_layernorm", "post_feedforward_layernorm"];
        let behind = behind.iter().filter(|_| model.post_norms);
        for norm in ["input_layernorm", "post_attention_layernorm"].iter().chain(behind) {
            put(at(&format!("{norm}.weight")), &[dim], Fill::Norm);
        }
    }
    put("model.norm.weight".into(), &[dim], Fill::Norm);
    if !model.tie_embeddings {
        put("lm_head.weight".into(), &[model.vocab, dim], Fill::Weights);
    }
    list
}

/// The tensors of GPT-2, whose names differ and whose matrices are transposed.
fn gpt2_tensors(model: &ModelConfig) -> Vec<Tensor> {
    let (dim, ffn) = (model.dim, model.ffn_dim);
    let mut list = Vec::new();
    let mut put = |name: String, shape: &[usize], fill| list.push(Tensor { name, shape: shape.into(), fill });
    put("wte.weight".into(), &[model.vocab, dim], Fill::Weights);
    put("wpe.weight".into(), &[model.max_position, dim], Fill::Weights);
    for layer in 0..model.layers {
        let at = |part: &str| format!("h.{layer}.{part}");
        for norm in ["ln_1", "ln_2"] {
            put(at(&format!("{norm}.weight")), &[dim], Fill::Norm);
            put(at(&format!("{norm}.bias")), &[dim], Fill::Weights);
        }
        for (part, from, to) in [
            ("attn.c_attn", dim, 3 * dim),
            ("attn.c_proj", dim, dim),
            ("mlp.c_fc", dim, ffn),
            ("mlp.c_proj", ffn, dim),
        ] {
            put(at(&format!("{part}.weight")), &[from, to], Fill::Weights);
            put(at(&format!("{part}.bias")), &[to], Fill::Weights);
        }
    }
    put("ln_f.weight".into(), &[dim], Fill::Norm);
    put("ln_f.bias".into(), &[dim], Fill::Weights);
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build;
    use std::collections::BTreeMap;
    use std::path::Path;

    fn of(dir: &Path) -> Vec<Tensor> {
        let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
        tensors(&ModelConfig::parse(&text).unwrap())
    }

    /// Name and shape of each tensor in a safetensors file.
    fn in_file(file: &Path) -> BTreeMap<String, Vec<usize>> {
        let bytes = std::fs::read(file).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let tensors = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
        let shape = |v: &serde_json::Value| {
            v["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
        };
        tensors.map(|(name, v)| (name.clone(), shape(v))).collect()
    }

    #[test]
    fn names_and_shapes_are_those_of_transformers() {
        for name in [
            "m1-llama32-bf16",
            "m2-llama-untied-f16",
            "m4-qwen2-bf16",
            "m5-qwen2-untied-f16",
            "m7-qwen3-bf16",
            "m8-gpt2-bare-f32",
            "m9-gemma3-270m-bf16",
            "m11-smollm3-bf16",
            "m12-phi4mini-short-bf16",
            "m14-granite-bf16",
            "story",
        ] {
            let dir = build::model_dir(name).unwrap();
            let made: BTreeMap<_, _> = of(&dir).into_iter().map(|t| (t.name, t.shape)).collect();
            let mut found = in_file(&dir.join("model.safetensors"));
            // GPT-2's masks, which no step reads.
            found.retain(|name, _| !name.ends_with(".attn.bias"));
            assert_eq!(made, found, "{name}");
        }
    }

    #[test]
    fn models_have_their_published_sizes() {
        for (name, parameters) in [
            ("llama3.2-1b", 1_235_814_400),
            ("llama3.2-3b", 3_212_749_824),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("smollm2-135m", 134_515_008usize),
            ("qwen3-0.6b", 596_049_920),
            ("qwen3-1.7b", 1_720_574_976),
            ("gemma3-270m", 268_098_176),
            ("gemma3-1b", 999_885_952),
            ("smollm3-3b", 3_075_098_624),
            ("phi-4-mini", 3_836_021_760),
            ("granite-3.3-2b", 2_533_539_840),
            ("gpt2", 124_439_808),
        ] {
            let made: usize = of(&build::model_dir(name).unwrap()).iter().map(Tensor::len).sum();
            assert_eq!(made, parameters, "{name}");
        }
    }
}
