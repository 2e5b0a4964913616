//! The tensors of a model, from its `config.json`.

use files::config::ModelConfig;

/// What a tensor is filled with.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// Around 0.
    Weights,
    /// Around 1.
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
    /// How many values.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Every tensor, named as transformers names it.
pub fn tensors(model: &ModelConfig) -> Vec<Tensor> {
    let (dim, ffn) = (model.dim, model.ffn_dim);
    let (q, kv) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
    let mut list = Vec::new();
    let mut put = |name: String, shape: &[usize], fill| list.push(Tensor { name, shape: shape.into(), fill });
    put("model.embed_tokens.weight".into(), &[model.vocab, dim], Fill::Weights);
    for layer in 0..model.layers {
        let at = |part: &str| format!("model.layers.{layer}.{part}");
        put(at("input_layernorm.weight"), &[dim], Fill::Norm);
        for (part, rows, columns, has_bias) in [
            ("self_attn.q_proj", q, dim, model.qkv_bias),
            ("self_attn.k_proj", kv, dim, model.qkv_bias),
            ("self_attn.v_proj", kv, dim, model.qkv_bias),
            ("self_attn.o_proj", dim, q, model.o_bias),
            ("mlp.gate_proj", ffn, dim, false),
            ("mlp.up_proj", ffn, dim, false),
            ("mlp.down_proj", dim, ffn, false),
        ] {
            put(at(&format!("{part}.weight")), &[rows, columns], Fill::Weights);
            if has_bias {
                put(at(&format!("{part}.bias")), &[rows], Fill::Weights);
            }
        }
        if model.qk_norm {
            put(at("self_attn.q_norm.weight"), &[model.head_dim], Fill::Norm);
            put(at("self_attn.k_norm.weight"), &[model.head_dim], Fill::Norm);
        }
        put(at("post_attention_layernorm.weight"), &[dim], Fill::Norm);
    }
    put("model.norm.weight".into(), &[dim], Fill::Norm);
    if !model.tied {
        put("lm_head.weight".into(), &[model.vocab, dim], Fill::Weights);
    }
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
            "story",
        ] {
            let dir = build::model_dir(name).unwrap();
            let made: BTreeMap<_, _> = of(&dir).into_iter().map(|t| (t.name, t.shape)).collect();
            assert_eq!(made, in_file(&dir.join("model.safetensors")), "{name}");
        }
    }

    #[test]
    fn published_sizes() {
        for (name, parameters) in [
            ("llama3.2-1b", 1_235_814_400),
            ("llama3.2-3b", 3_212_749_824),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("smollm2-135m", 134_515_008usize),
        ] {
            let made: usize = of(&build::model_dir(name).unwrap()).iter().map(Tensor::len).sum();
            assert_eq!(made, parameters, "{name}");
        }
    }
}
