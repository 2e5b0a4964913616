//! Names and shapes of a model's tensors, from its `config.json`.

use files::config::{
    Arch, AttentionGate, DeltaNetSizes, Experts, LayerKind, MambaNorm, MambaSizes, ModelConfig, QkNorm,
    Router,
};

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
    let (dim, family) = (model.dim, model.arch.family());
    let mut list = Vec::new();
    let mut put = |name: String, shape: &[usize], fill| {
        let name = family.tensor_names.iter().fold(name, |name, (from, to)| name.replace(from, to));
        list.push(Tensor { name, shape: shape.into(), fill });
    };
    put("model.embed_tokens.weight".into(), &[model.vocab, dim], Fill::Weights);
    let width = model.per_layer_dim;
    if width > 0 {
        let all = model.layers * width;
        put("model.embed_tokens_per_layer.weight".into(), &[model.vocab, all], Fill::Weights);
        put("model.per_layer_model_projection.weight".into(), &[all, dim], Fill::Weights);
        put("model.per_layer_projection_norm.weight".into(), &[width], Fill::Norm);
    }
    for (layer, kind) in model.layer_kinds.iter().enumerate() {
        put_layer(&mut put, model, (layer, *kind));
    }
    put("model.norm.weight".into(), &[dim], Fill::Norm);
    if !model.tie_embeddings {
        put("lm_head.weight".into(), &[model.vocab, dim], Fill::Weights);
    }
    list
}

/// Adds a tensor of this name, shape and distribution.
type PutTensor<'a> = &'a mut dyn FnMut(String, &[usize], Fill);

/// True for a layer that reads keys and values of another.
fn shares_kv(model: &ModelConfig, layer: usize) -> bool {
    layer >= model.layers - model.shared_kv_layers
}

/// Adds the tensors of a layer.
fn put_layer(put: PutTensor<'_>, model: &ModelConfig, (layer, kind): (usize, LayerKind)) {
    let at = |part: &str| format!("model.layers.{layer}.{part}");
    let shares_kv = shares_kv(model, layer);
    let (dim, width) = (model.dim, model.per_layer_dim);
    let ffn = if shares_kv { model.shared_ffn_dim } else { model.ffn_dim };
    let ffn_parts: &[_] = match model.arch {
        Arch::Phi3 => &[("mlp.gate_up_proj", 2 * ffn, dim, false), ("mlp.down_proj", dim, ffn, false)],
        Arch::GraniteMoeHybrid => {
            &[("shared_mlp.input_linear", 2 * ffn, dim, false), ("shared_mlp.output_linear", dim, ffn, false)]
        }
        Arch::NemotronH if kind != LayerKind::FeedForward => &[],
        Arch::NemotronH => &[("mlp.up_proj", ffn, dim, false), ("mlp.down_proj", dim, ffn, false)],
        _ => &[
            ("mlp.gate_proj", ffn, dim, false),
            ("mlp.up_proj", ffn, dim, false),
            ("mlp.down_proj", dim, ffn, false),
        ],
    };
    let is_own = |part: &&(&str, usize, usize, bool)| match part.0 {
        "self_attn.k_proj" => !shares_kv,
        "self_attn.v_proj" => !shares_kv && (!model.values_are_keys || kind == LayerKind::SlidingWindow),
        _ => true,
    };
    let mixer = mixer_matrices(model, kind);
    let ffn_parts = if model.expert_layers[layer] { &[] } else { ffn_parts };
    for (part, rows, columns, has_bias) in mixer.iter().filter(is_own).chain(ffn_parts) {
        put(at(&format!("{part}.weight")), &[*rows, *columns], Fill::Weights);
        if *has_bias {
            put(at(&format!("{part}.bias")), &[*rows], Fill::Weights);
        }
    }
    if model.expert_layers[layer] {
        put_experts(put, model, &at);
    }
    put_mixer_vectors(put, model, (layer, kind));
    // A layer of Nemotron-H has one norm.
    let norms = norm_names(model);
    for norm in if model.arch == Arch::NemotronH { &norms[..1] } else { norms } {
        put(at(&format!("{norm}.weight")), &[dim], Fill::Norm);
    }
    if width > 0 {
        put(at("per_layer_input_gate.weight"), &[width, dim], Fill::Weights);
        put(at("per_layer_projection.weight"), &[dim, width], Fill::Weights);
        put(at("post_per_layer_input_norm.weight"), &[dim], Fill::Norm);
    }
    if model.layer_scalars {
        put(at("layer_scalar"), &[1], Fill::Norm);
    }
}

/// Adds the tensors of a mixture of experts: those of Qwen 3.5 and Gemma 4 hold all experts, others one each.
fn put_experts(put: PutTensor<'_>, model: &ModelConfig, at: &dyn Fn(&str) -> String) {
    let (dim, Experts { count, dim: width, shared_dim, own_norms, router, .. }) = (model.dim, model.experts);
    if model.arch == Arch::GraniteMoeHybrid {
        put(at("block_sparse_moe.router.layer.weight"), &[count, dim], Fill::Weights);
        put(at("block_sparse_moe.input_linear.weight"), &[count, 2 * width, dim], Fill::Weights);
        put(at("block_sparse_moe.output_linear.weight"), &[count, dim, width], Fill::Weights);
        put(at("shared_mlp.input_linear.weight"), &[2 * shared_dim, dim], Fill::Weights);
        put(at("shared_mlp.output_linear.weight"), &[dim, shared_dim], Fill::Weights);
        return;
    }
    put(at("mlp.gate.weight"), &[count, dim], Fill::Weights);
    if router == Router::BiasedSigmoid {
        put(at("mlp.expert_bias"), &[count], Fill::Weights);
    }
    if matches!(model.arch, Arch::Qwen35Moe | Arch::Gemma4) {
        put(at("mlp.experts.gate_up_proj"), &[count, 2 * width, dim], Fill::Weights);
        put(at("mlp.experts.down_proj"), &[count, dim, width], Fill::Weights);
    } else {
        for expert in (0..count).map(|expert| format!("mlp.experts.{expert}")) {
            put(at(&format!("{expert}.gate_proj.weight")), &[width, dim], Fill::Weights);
            put(at(&format!("{expert}.up_proj.weight")), &[width, dim], Fill::Weights);
            put(at(&format!("{expert}.down_proj.weight")), &[dim, width], Fill::Weights);
        }
    }
    if own_norms {
        put(at("mlp.router_scale"), &[dim], Fill::Norm);
        put(at("mlp.expert_scale"), &[count], Fill::Norm);
        for norm in
            ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
        {
            put(at(&format!("{norm}.weight")), &[dim], Fill::Norm);
        }
    }
    if shared_dim > 0 && !own_norms {
        put(at("mlp.shared_expert_gate.weight"), &[1, dim], Fill::Weights);
    }
    if shared_dim > 0 {
        put(at("mlp.shared_expert.gate_proj.weight"), &[shared_dim, dim], Fill::Weights);
        put(at("mlp.shared_expert.up_proj.weight"), &[shared_dim, dim], Fill::Weights);
        put(at("mlp.shared_expert.down_proj.weight"), &[dim, shared_dim], Fill::Weights);
    }
}

/// Adds the vectors of a layer's mixer.
fn put_mixer_vectors(put: PutTensor<'_>, model: &ModelConfig, (layer, kind): (usize, LayerKind)) {
    let at = |part: &str| format!("model.layers.{layer}.{part}");
    let heads = model.delta_net.value_heads;
    match kind {
        LayerKind::ShortConv => put(at("conv.conv.weight"), &[model.dim, 1, model.conv_taps], Fill::Weights),
        LayerKind::DeltaNet => {
            let channels = delta_widths(model).0;
            put(at("linear_attn.conv1d.weight"), &[channels, 1, model.conv_taps], Fill::Weights);
            put(at("linear_attn.dt_bias"), &[heads], Fill::Weights);
            put(at("linear_attn.A_log"), &[heads], Fill::Weights);
            put(at("linear_attn.norm.weight"), &[model.delta_net.value_dim], Fill::Norm);
        }
        LayerKind::FeedForward => {}
        _ if kind.has_mamba() => {
            let MambaSizes { heads, conv_bias, norm, .. } = model.mamba;
            let (inner, channels) = mamba_widths(model);
            put(at("mamba.conv1d.weight"), &[channels, 1, model.conv_taps], Fill::Weights);
            if conv_bias {
                put(at("mamba.conv1d.bias"), &[channels], Fill::Weights);
            }
            for part in ["A_log", "D", "dt_bias"] {
                put(at(&format!("mamba.{part}")), &[heads], Fill::Weights);
            }
            if norm != MambaNorm::None {
                put(at("mamba.norm.weight"), &[inner], Fill::Norm);
            }
        }
        _ => {
            let [q, k] = qk_norm_widths(model, kind);
            let k = if shares_kv(model, layer) { 0 } else { k };
            for (part, width) in [("q_norm", q), ("k_norm", k)].into_iter().filter(|(_, width)| *width > 0) {
                put(at(&format!("self_attn.{part}.weight")), &[width], Fill::Norm);
            }
        }
    }
}

/// Widths of the norms of queries and keys; 0 if there are none.
fn qk_norm_widths(model: &ModelConfig, kind: LayerKind) -> [usize; 2] {
    match model.qk_norm {
        QkNorm::None => [0, 0],
        QkNorm::PerHead | QkNorm::AfterRope => [head_dim(model, kind); 2],
        QkNorm::Whole => [model.heads, model.kv_heads].map(|heads| heads * model.head_dim),
    }
}

/// Width of the heads of a layer.
fn head_dim(model: &ModelConfig, kind: LayerKind) -> usize {
    if kind == LayerKind::SlidingWindow { model.local_head_dim } else { model.head_dim }
}

/// Norms of a layer.
fn norm_names(model: &ModelConfig) -> &'static [&'static str] {
    match (model.pre_norms, model.post_norms) {
        (true, false) => &["input_layernorm", "post_attention_layernorm"],
        (false, _) => &["post_attention_layernorm", "post_feedforward_layernorm"],
        (true, true) => &[
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        ],
    }
}

/// Channels of a delta net's convolution, and width of its values.
fn delta_widths(model: &ModelConfig) -> (usize, usize) {
    let DeltaNetSizes { key_heads, value_heads, key_dim, value_dim } = model.delta_net;
    (2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim)
}

/// Width of Mamba2's heads together, and channels of its convolution.
fn mamba_widths(model: &ModelConfig) -> (usize, usize) {
    let MambaSizes { heads, head_dim, state, groups, .. } = model.mamba;
    (heads * head_dim, heads * head_dim + 2 * groups * state)
}

/// Matrices of a layer's mixer: name, rows, columns, and whether it has a bias.
fn mixer_matrices(model: &ModelConfig, kind: LayerKind) -> Vec<(&'static str, usize, usize, bool)> {
    let (dim, heads) = (model.dim, model.delta_net.value_heads);
    let is_local = kind == LayerKind::SlidingWindow;
    let kv_heads = if is_local { model.kv_heads } else { model.global_kv_heads };
    let (q, kv) = (model.heads * head_dim(model, kind), kv_heads * head_dim(model, kind));
    let (channels, values) = delta_widths(model);
    match kind {
        LayerKind::ShortConv => {
            vec![("conv.in_proj", 3 * dim, dim, false), ("conv.out_proj", dim, dim, false)]
        }
        LayerKind::DeltaNet => vec![
            ("linear_attn.in_proj_qkv", channels, dim, false),
            ("linear_attn.in_proj_z", values, dim, false),
            ("linear_attn.in_proj_b", heads, dim, false),
            ("linear_attn.in_proj_a", heads, dim, false),
            ("linear_attn.out_proj", dim, values, false),
        ],
        LayerKind::FeedForward => Vec::new(),
        LayerKind::Mamba | LayerKind::AttentionMamba => {
            let (inner, of_conv) = mamba_widths(model);
            let mut all = vec![
                ("mamba.in_proj", inner + of_conv + model.mamba.heads, dim, false),
                ("mamba.out_proj", dim, inner, false),
            ];
            if kind == LayerKind::AttentionMamba {
                all.extend(mixer_matrices(model, LayerKind::FullAttention));
            }
            all
        }
        _ if model.arch == Arch::Phi3 => {
            vec![("self_attn.qkv_proj", q + 2 * kv, dim, false), ("self_attn.o_proj", dim, q, false)]
        }
        _ => {
            // Gates per element lie between the heads' queries.
            let gated = if model.attention_gate == AttentionGate::PerElement { 2 } else { 1 };
            let mut all = vec![
                ("self_attn.q_proj", gated * q, dim, model.qkv_bias),
                ("self_attn.k_proj", kv, dim, model.qkv_bias),
                ("self_attn.v_proj", kv, dim, model.qkv_bias),
            ];
            if model.attention_gate == AttentionGate::PerHead {
                all.push(("self_attn.gate_proj", model.heads, dim, false));
            }
            all.push(("self_attn.o_proj", dim, q, model.o_bias));
            all
        }
    }
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
            "m19b-lfm2-bf16",
            "m20-qwen35-bf16",
            "m21-lfm2moe-bf16",
            "m22-gemma4-e2b-bf16",
            "m22b-gemma4-moe-bf16",
            "m23-qwen3moe-bf16",
            "m25-granite4h-bf16",
            "m25b-granite4h-moe-bf16",
            "m28-lfm3-bf16",
            "m29-hunyuan-bf16",
            "m30-qwen35moe-bf16",
            "m31-olmo3-bf16",
            "m34-falconh1-bf16",
            "m35-nemotronh-bf16",
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
            ("llama3.1-8b", 8_030_261_248),
            ("llama3.1-70b", 70_553_706_496),
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
            ("qwen3-30b-a3b", 30_532_122_624),
        ] {
            let made: usize = of(&build::model_dir(name).unwrap()).iter().map(Tensor::len).sum();
            assert_eq!(made, parameters, "{name}");
        }
        // Published roughly.
        for (name, parameters) in [
            ("lfm2-8b-a1b", 8.3e9),
            ("gpt-oss-20b", 20.9e9),
            ("qwen3.5-35b-a3b", 35e9),
            ("gemma4-26b-a4b", 25.2e9),
            ("granite-4.0-1b", 1.6e9),
            ("granite-4.0-h-1b", 1.5e9),
            ("granite-4.0-h-350m", 340e6),
            ("falcon-h1-0.5b", 521e6),
            ("nemotron-h-8b", 8.1e9),
            ("nemotron-nano-9b-v2", 8.89e9),
        ] {
            let made: usize = of(&build::model_dir(name).unwrap()).iter().map(Tensor::len).sum();
            assert!((made as f64 / parameters - 1.0).abs() < 0.03, "{name}: {made}");
        }
        // Published roughly, without the embeddings of each layer.
        for (name, parameters) in [("gemma4-e2b", 2.3e9), ("gemma4-e4b", 4.5e9)] {
            let all = of(&build::model_dir(name).unwrap());
            let table = |t: &&Tensor| !t.name.ends_with("embed_tokens_per_layer.weight");
            let made = all.iter().filter(table).map(Tensor::len).sum::<usize>() as f64;
            assert!((made / parameters - 1.0).abs() < 0.035, "{name}: {made}");
        }
    }
}
