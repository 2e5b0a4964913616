//! `config.json` files: defaults, both spellings, refusals.

use super::*;

const LLAMA: &str = r#"{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,
    "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 100"#;

fn parse(more: &str) -> Result<ModelConfig, ConfigError> {
    ModelConfig::parse(&format!("{LLAMA}{more}}}"))
}

#[test]
fn defaults_are_those_of_transformers() {
    let m = parse("").unwrap();
    assert_eq!(ModelConfig::parse(&format!("\u{feff}{LLAMA}}}")), Ok(m.clone()));
    assert_eq!((m.kv_heads, m.head_dim, m.tie_embeddings), (4, 16, false));
    assert_eq!((m.norm_eps, m.rope.theta, m.rope.scaling), (1e-6, 10_000.0, RopeScaling::Unscaled));
    assert!(!m.qkv_bias && !m.o_bias && m.qk_norm == QkNorm::None);
    let m = parse(r#", "attention_bias": true, "head_dim": 20"#).unwrap();
    assert!(m.qkv_bias && m.o_bias && m.head_dim == 20);
}

#[test]
fn rope_is_read_in_both_spellings() {
    let scaling = r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192"#;
    let old = parse(&format!(r#", "rope_theta": 5e5, "rope_scaling": {{"rope_type": "llama3", {scaling}}}"#));
    let new =
        parse(&format!(r#", "rope_parameters": {{"rope_type": "llama3", "rope_theta": 5e5, {scaling}}}"#));
    assert_eq!(old, new);
    assert!(matches!(old.unwrap().rope.scaling, RopeScaling::Llama3 { .. }));
}

#[test]
fn a_table_of_divisors_equals_the_formula_it_comes_from() {
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 64,
    };
    let scaled = |m: &ModelConfig, scaling| ModelConfig { rope: Rope { scaling, ..m.rope }, ..m.clone() };
    let formula = scaled(&parse("").unwrap(), llama3);
    let frequency = |i: usize| formula.rope.base_frequency(i);
    let mut divisors: Vec<f32> = (0..formula.head_dim / 2)
        .map(|i| (1.0 / llama3.frequency_multiplier(i, frequency(i))) as f32)
        .collect();
    let table = |divisors: &[f32]| scaled(&formula, RopeScaling::from_divisors(divisors.to_vec()));
    assert_eq!(formula.find_difference(&table(&divisors)), None);
    assert_eq!(table(&divisors).find_difference(&formula), None);
    divisors[5] *= 1.00002;
    for (one, other) in [(&formula, &table(&divisors)), (&table(&divisors), &formula)] {
        assert_eq!(one.find_difference(other).map(|d| d.0), Some("rope_scaling"));
    }
}

#[test]
fn a_written_config_is_read_back_unchanged() {
    let plain = parse("").unwrap();
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192,
    };
    let odd = ModelConfig {
        qkv_bias: true,
        qk_norm: QkNorm::PerHead,
        tie_embeddings: true,
        norm_eps: 1e-5f32.into(),
        ..plain.clone()
    };
    let divisors = RopeScaling::Divisors(&[1.0, 1.1, 1.0, 2.5, 1.0, 1.0, 32.0, 32.0]);
    for scaling in [RopeScaling::Unscaled, llama3, divisors] {
        for model in [&plain, &odd] {
            let model =
                ModelConfig { rope: Rope { scaling, local_scaling: scaling, ..model.rope }, ..model.clone() };
            assert_eq!(ModelConfig::parse(&model.to_json()), Ok(model));
        }
    }
}

#[test]
fn errors_name_field_value_and_what_is_supported() {
    for (more, field, value) in [
        (r#", "hidden_act": "gelu""#, "hidden_act", "\"gelu\""),
        (r#", "num_key_value_heads": 3"#, "num_key_value_heads", "3"),
        (r#", "head_dim": 15"#, "head_dim", "15"),
        (r#", "mlp_bias": true"#, "mlp_bias", "true"),
        (r#", "rms_norm_eps": 0"#, "rms_norm_eps", "0"),
        (r#", "rope_scaling": {"type": "dynamic", "factor": 2.0}"#, "rope_scaling", "dynamic"),
        (r#", "layer_types": ["full_attention", "sliding_attention"]"#, "layer_types", "sliding"),
        (r#", "partial_rotary_factor": 0.5"#, "partial_rotary_factor", "0.5"),
        (r#", "num_attention_heads": 99999"#, "num_attention_heads", "99999"),
        (r#", "antigravity": 1"#, "antigravity", "1"),
        (r#", "antigravity": {"o_bias": 1}"#, "o_bias", "1"),
        (r#", "antigravity": {"rope_divisors": [1, 2]}"#, "rope_divisors", "[1,2]"),
    ] {
        let e = parse(more).unwrap_err();
        assert!(e.field == field && e.value.contains(value) && !e.supported.is_empty(), "{e}");
    }
    assert_eq!(ModelConfig::parse("{}").unwrap_err().value, "missing");
}

fn published(text: &str) -> ModelConfig {
    ModelConfig::parse(text).unwrap()
}

#[test]
fn each_family_sets_its_architecture_switches() {
    use LayerKind::{FullAttention, NoRope, SlidingWindow};
    let gemma = published(
        r#"{"model_type": "gemma3", "vision_config": {}, "text_config": {"model_type": "gemma3_text",
        "hidden_size": 2560, "num_hidden_layers": 7, "intermediate_size": 10240, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}"#,
    );
    assert_eq!((gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.vocab), (8, 4, 256, 262_208));
    assert_eq!(
        gemma.layer_kinds,
        [
            SlidingWindow,
            SlidingWindow,
            SlidingWindow,
            SlidingWindow,
            SlidingWindow,
            FullAttention,
            SlidingWindow
        ]
    );
    assert_eq!((gemma.rope.theta, gemma.rope.local_theta, gemma.sliding_window), (1e6, 1e4, 1024));
    assert!(
        gemma.tie_embeddings
            && gemma.post_norms
            && gemma.qk_norm == QkNorm::PerHead
            && gemma.mlp == Mlp::GeGlu
    );
    let smollm3 = published(
        r#"{"model_type": "smollm3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5,
        "intermediate_size": 96, "vocab_size": 100}"#,
    );
    assert_eq!(smollm3.layer_kinds, [FullAttention, FullAttention, FullAttention, NoRope, FullAttention]);
    assert_eq!(smollm3.rope.theta, 2e6);
    let gpt2 = published(
        r#"{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "vocab_size": 50257, "layer_norm_epsilon": 1e-05, "activation_function": "gelu_new"}"#,
    );
    assert_eq!((gpt2.ffn_dim, gpt2.kv_heads, gpt2.rope.dim, gpt2.norm), (3072, 12, 0, Norm::Layer));
    for model in [gemma, smollm3, gpt2] {
        assert_eq!(ModelConfig::parse(&model.to_json()), Ok(model));
    }
}

/// The numbers of Qwen's own example: a context of 32,768 stretched four times.
#[test]
fn yarn_blends_slow_pairs_and_sharpens_attention() {
    let scaling = r#", "head_dim": 128, "rope_theta": 1e6, "rope_scaling":
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}"#;
    let m = parse(scaling).unwrap();
    let RopeScaling::Divisors(divisors) = m.rope.scaling else { panic!("{:?}", m.rope) };
    assert_eq!((divisors.len(), divisors[0], divisors[63]), (64, 1.0, 4.0));
    assert!(divisors.windows(2).all(|pair| pair[0] <= pair[1]));
    assert!((m.rope.attention_factor - 1.138_629_4).abs() < 1e-6);
}

/// The numbers of transformers; with `truncate` the ramp begins and ends at whole pairs.
#[test]
fn yarn_is_rounded_unless_the_config_says_otherwise() {
    let scaling =
        r#""rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32768"#;
    for (more, want) in [
        ("", [1.0, 1.176_471, 1.428_571, 2.5, 3.571_429, 4.0]),
        (r#", "truncate": true"#, [1.0, 1.176_471, 1.428_571, 2.5, 3.571_429, 4.0]),
        (r#", "truncate": false"#, [1.0, 1.167_471, 1.426_865, 2.568_011, 3.775_949, 4.0]),
    ] {
        let m = parse(&format!(r#", "head_dim": 128, "rope_parameters": {{{scaling}{more}}}"#)).unwrap();
        let RopeScaling::Divisors(divisors) = m.rope.scaling else { panic!("{:?}", m.rope) };
        for (pair, want) in [35, 40, 45, 55, 59, 60].into_iter().zip(want) {
            assert!((divisors[pair] - want).abs() < 2e-6, "{more}: {pair} is {}", divisors[pair]);
        }
    }
    let factor = |more: &str| {
        parse(&format!(r#", "head_dim": 128, "rope_scaling": {{{scaling}{more}}}"#))
            .unwrap()
            .rope
            .attention_factor
    };
    let log = 0.1 * 4f64.ln();
    for (more, want) in [
        (r#", "mscale": 1.0, "mscale_all_dim": 0.5"#, (1.0 + log) / (1.0 + 0.5 * log)),
        (r#", "mscale": 1.0, "mscale_all_dim": 0"#, 1.0 + log),
        (r#", "mscale": 0.7"#, 1.0 + log),
        (r#", "mscale": 0.7, "mscale_all_dim": 0.7, "attention_factor": 3.0"#, 3.0),
    ] {
        assert!((factor(more) - want).abs() < 1e-9, "{more}: {}", factor(more));
    }
}

/// A missing half and both spellings at once, as transformers completes them.
#[test]
fn each_kind_of_layer_has_its_own_rope() {
    const GEMMA: &str = r#"{"model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 7, "intermediate_size": 96, "vocab_size": 100, "head_dim": 16"#;
    let gemma = |more: &str| ModelConfig::parse(&format!("{GEMMA}, {more}}}"));
    let linear = |factor: f32| RopeScaling::from_divisors(vec![factor; 8]);
    let plain = RopeScaling::Unscaled;
    for (more, full, local) in [
        (r#""rope_parameters": null"#, (1e6, plain), (1e4, plain)),
        (r#""rope_theta": 2e6, "rope_local_base_freq": 2e4"#, (2e6, plain), (2e4, plain)),
        (
            r#""rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 8.0}}"#,
            (5e5, linear(8.0)),
            (1e4, plain),
        ),
        (
            r#""rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 4.0}, "full_attention": null}"#,
            (1e6, plain),
            (1e4, linear(4.0)),
        ),
        (
            r#""rope_theta": 3e6, "rope_local_base_freq": 3e4, "rope_scaling": {"factor": 2.0, "rope_type": "linear"},
            "rope_parameters": {"full_attention": {"rope_theta": 5e5, "rope_type": "default"}, "sliding_attention": {}}"#,
            (5e5, linear(2.0)),
            (3e4, plain),
        ),
    ] {
        let m = gemma(more).unwrap();
        assert_eq!(
            ((m.rope.theta, m.rope.scaling), (m.rope.local_theta, m.rope.local_scaling)),
            (full, local),
            "{more}"
        );
        assert_eq!(m.find_difference(&ModelConfig::parse(&m.to_json()).unwrap()), None, "{more}");
    }
    let scaled =
        gemma(r#""rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 4.0}}"#).unwrap();
    let plain = gemma(r#""rope_parameters": null"#).unwrap();
    assert_eq!(plain.find_difference(&scaled).unwrap().0, "rope_parameters.sliding_attention");
    for (more, field) in [
        (r#""rope_parameters": {"rope_theta": 5e5}"#, "rope_parameters"),
        (r#""rope_parameters": {"full_attention": 1}"#, "rope_parameters.full_attention"),
        (
            r#""rope_parameters": {"sliding_attention": {"rope_type": "x"}}"#,
            "rope_parameters.sliding_attention",
        ),
        (
            r#""rope_parameters": {"full_attention": {"rope_type": "linear"}}"#,
            "rope_parameters.full_attention.factor",
        ),
        (r#""sliding_window": null"#, "sliding_window"),
    ] {
        assert_eq!(gemma(more).unwrap_err().field, field, "{more}");
    }
    // Elsewhere the old field takes the place of the new one.
    let both = parse(
        r#", "rope_theta": 7e3, "rope_scaling": {"type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}"#,
    );
    let rope = both.unwrap().rope;
    assert_eq!((rope.theta, rope.scaling), (7e3, linear(2.0)));
}

#[test]
fn a_quantised_checkpoint_is_read_by_its_method_or_refused_by_the_field() {
    let quantised = |object: &str| {
        let text = format!(r#"{LLAMA}, "quantization_config": {object}}}"#);
        let nested = format!(r#"{{"text_config": {{"quantization_config": {object}}}}}"#);
        let found = QuantMethod::parse(&text);
        assert_eq!(QuantMethod::parse(&nested), found);
        assert_eq!(ModelConfig::parse(&text).err(), found.clone().err());
        found
    };
    let block = Some([128, 128]);
    for (object, method) in [
        (r#"{"quant_method": "fp8", "weight_block_size": null}"#, QuantMethod::Fp8 { block: None }),
        (r#"{"quant_method": "fp8", "weight_block_size": [128, 128]}"#, QuantMethod::Fp8 { block }),
        (r#"{"quant_method": "gptq", "bits": 8}"#, QuantMethod::Gptq { zero_offset: 1 }),
        (r#"{"quant_method": "gptq", "checkpoint_format": "gptq_v2"}"#, QuantMethod::Gptq { zero_offset: 0 }),
        (r#"{"quant_method": "awq", "bits": 4, "version": "gemm"}"#, QuantMethod::Awq),
        (
            r#"{"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"g":
            {"weights": {"num_bits": 8, "type": "float", "block_structure": [128, 128]}}}}"#,
            QuantMethod::CompressedTensors { block },
        ),
    ] {
        assert_eq!(quantised(object), Ok(Some(method)), "{object}");
    }
    for (object, field, value) in [
        (r#"1"#, "quantization_config", "1"),
        (r#"{}"#, "quantization_config.quant_method", "missing"),
        (r#"{"quant_method": "bitsandbytes"}"#, "quantization_config.quant_method", "bitsandbytes"),
        (r#"{"quant_method": "gptq", "bits": 3}"#, "quantization_config.bits", "3"),
        (
            r#"{"quant_method": "gptq", "checkpoint_format": "marlin"}"#,
            "quantization_config.checkpoint_format",
            "marlin",
        ),
        (r#"{"quant_method": "awq", "version": "gemv"}"#, "quantization_config.version", "gemv"),
        (
            r#"{"quant_method": "fp8", "weight_block_size": [0, 128]}"#,
            "quantization_config.weight_block_size",
            "[0,128]",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "format": "marlin-24"}"#,
            "quantization_config.format",
            "marlin-24",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 2}}}}"#,
            "quantization_config.config_groups.g.weights.num_bits",
            "2",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-bitmask"}}"#,
            "quantization_config.sparsity_config.format",
            "sparse-bitmask",
        ),
        (
            r#"{"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": 1}}}"#,
            "quantization_config.transform_config.config_groups",
            "u",
        ),
    ] {
        let e = quantised(object).unwrap_err();
        assert!(e.field == field && e.value.contains(value) && !e.supported.is_empty(), "{e}");
    }
}

#[test]
fn layers_with_experts_are_found_and_their_sizes_checked() {
    let moe = |kind: &str, more: &str| {
        let all = LLAMA.replace("\"llama\"", kind).replace("hidden_layers\": 2", "hidden_layers\": 4");
        ModelConfig::parse(&format!("{all}, {more}}}"))
    };
    let sparse = r#""num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32"#;
    let qwen = |more: &str| moe("\"qwen3_moe\"", &format!("{sparse}{more}"));
    let m = qwen("").unwrap();
    assert_eq!((m.experts.count, m.experts.used, m.experts.dim, m.experts.renormalised), (8, 2, 32, false));
    assert_eq!((m.expert_layers, m.ffn_dim), (vec![true; 4], 32), "no layer has another feed-forward");
    let m = qwen(r#", "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": true"#).unwrap();
    assert_eq!((&m.expert_layers[..], m.ffn_dim), (&[false, true, false, false][..], 96));
    assert_eq!(m.find_difference(&ModelConfig::parse(&m.to_json()).unwrap()), None);
    let lfm = |more: &str| {
        moe(
            "\"lfm2_moe\"",
            &format!(
                "{sparse}, \"num_dense_layers\": 1, \"num_key_value_heads\": 2, \"full_attn_idxs\": [0]{more}"
            ),
        )
    };
    let m = lfm(r#", "routed_scaling_factor": 2.5"#).unwrap();
    assert_eq!((m.experts.router, m.experts.scale), (Router::BiasedSigmoid, 2.5));
    assert_eq!(m.expert_layers, [false, true, true, true]);
    assert_eq!(m.find_difference(&ModelConfig::parse(&m.to_json()).unwrap()), None);
    assert_eq!(lfm(r#", "use_expert_bias": false"#).unwrap().experts.router, Router::Sigmoid);
    let oss = r#""num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "head_dim": 16,
        "num_key_value_heads": 2, "quantization_config": {"quant_method": "mxfp4"}"#;
    let m = moe("\"gpt_oss\"", oss).unwrap();
    assert_eq!((m.experts.dim, m.experts.limit, m.attention_sinks, m.qkv_bias), (96, 7.0, true, true));
    assert_eq!(m.layer_kinds[..2], [LayerKind::SlidingWindow, LayerKind::FullAttention]);
    assert_eq!(m.find_difference(&ModelConfig::parse(&m.to_json()).unwrap()), None);
    for field in ["enable_moe_block", "attention_k_eq_v"] {
        assert_eq!(qwen(&format!(r#", "{field}": true"#)).unwrap_err().field, field);
    }
    let gemma = |more: &str| {
        let text = r#""head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 4, "num_experts": 8,
            "moe_intermediate_size": 32, "hidden_size_per_layer_input": 0"#;
        moe("\"gemma4_text\"", &format!("{text}{more}"))
    };
    let m = gemma("").unwrap();
    assert_eq!((m.experts, m.global_kv_heads, m.values_are_keys, m.ffn_dim), (Experts::NONE, 4, false, 96));
    const ON: &str = r#", "enable_moe_block": true, "attention_k_eq_v": true"#;
    let m = gemma(&format!(r#"{ON}, "top_k_experts": 2, "num_global_key_value_heads": 1"#)).unwrap();
    assert_eq!((m.experts.count, m.experts.used, m.experts.dim, m.experts.shared_dim), (8, 2, 32, 96));
    assert_eq!((m.experts.own_norms, m.kv_heads, m.global_kv_heads, m.values_are_keys), (true, 4, 1, true));
    assert_eq!(m.find_difference(&ModelConfig::parse(&m.to_json()).unwrap()), None);
    for (more, field) in [
        ("", "top_k_experts"),
        (r#", "top_k_experts": 9"#, "top_k_experts"),
        (r#", "top_k_experts": 2, "num_global_key_value_heads": 3"#, "num_global_key_value_heads"),
        (r#", "top_k_experts": 2, "num_global_key_value_heads": 8"#, "num_global_key_value_heads"),
        (r#", "top_k_experts": 2, "use_double_wide_mlp": true"#, "use_double_wide_mlp"),
    ] {
        assert_eq!(gemma(&format!("{ON}{more}")).unwrap_err().field, field, "{more}");
    }
    for (more, field) in [
        (r#", "num_experts_per_tok": 9"#, "num_experts_per_tok"),
        (r#", "n_group": 8"#, "n_group"),
        (r#", "n_group": 1, "topk_group": 2"#, "topk_group"),
        (r#", "moe_intermediate_size": 40"#, "moe_intermediate_size"),
        (r#", "num_experts": 5000"#, "num_experts"),
        (r#", "mlp_only_layers": [4]"#, "mlp_only_layers"),
        (r#", "hidden_size": 72"#, "hidden_size"),
        (r#", "quantization_config": {"quant_method": "mxfp4"}"#, "quantization_config.quant_method"),
    ] {
        assert_eq!(qwen(more).unwrap_err().field, field, "{more}");
    }
}

#[test]
fn layers_with_mamba_are_found_and_their_sizes_checked() {
    let of = |kind: &str, more: &str| {
        let all = LLAMA.replace("\"llama\"", kind).replace("hidden_layers\": 2", "hidden_layers\": 3");
        ModelConfig::parse(&format!("{all}, {more}}}"))
    };
    let written = |m: &ModelConfig| assert_eq!(ModelConfig::parse(&m.to_json()).as_ref(), Ok(m));
    // Four heads of 32 and a state of 16 rows; the layers' second name is that of newer files.
    let sizes = r#""mamba_n_heads": 4, "mamba_d_state": 16, "layer_types": ["mamba", "attention", "linear_attention"],
        "num_local_experts": 0, "shared_intermediate_size": 48"#;
    let granite = |more: &str| of("\"granitemoehybrid\"", &format!("{sizes}{more}"));
    let m = granite("").unwrap();
    assert_eq!(m.layer_kinds, [LayerKind::Mamba, LayerKind::NoRope, LayerKind::Mamba]);
    assert_eq!((m.mamba.head_dim, m.mamba.groups, m.conv_taps, m.ffn_dim), (32, 1, 4, 48));
    assert_eq!((m.mamba.conv_bias, m.mamba.norm, m.experts.count), (true, MambaNorm::AfterGate, 0));
    written(&m);
    let m =
        granite(r#", "position_embedding_type": "rope", "num_local_experts": 4, "intermediate_size": 32"#);
    let m = m.unwrap();
    assert_eq!((m.layer_kinds[1], m.experts.dim, m.experts.shared_dim), (LayerKind::FullAttention, 32, 48));
    written(&m);
    let (multipliers, mut falcon_sizes) = (
        r#""key_multiplier": 0.5, "attention_in_multiplier": 2.0, "attention_out_multiplier": 3.0,
        "ssm_in_multiplier": 2.0, "ssm_multipliers": [1, 2, 3, 4, 5], "mlp_multipliers": [0.5, 0.25]"#,
        r#""mamba_d_ssm": 64, "mamba_d_head": "auto", "mamba_n_heads": 4, "mamba_d_state": 16"#.to_owned(),
    );
    falcon_sizes += r#", "mamba_n_groups": 2, "num_key_value_heads": 2, "mamba_conv_bias": false"#;
    let falcon = |more: &str| of("\"falcon_h1\"", &format!("{falcon_sizes}, {multipliers}{more}"));
    let m = falcon(r#", "time_step_limit": [0.0, {"__float__": "Infinity"}]"#).unwrap();
    assert_eq!((m.mamba.head_dim, m.mamba.groups, m.mamba.conv_bias), (16, 2, false));
    assert_eq!((m.scales.attention, m.scales.attention_out), (0.5 * 4.0 / 4.0, 6.0));
    assert_eq!((m.scales.ssm_in, m.scales.mlp), ([2.0, 4.0, 6.0, 8.0, 10.0], [0.5, 0.25]));
    assert_eq!((m.mamba.norm, m.layer_kinds[2]), (MambaNorm::None, LayerKind::AttentionMamba));
    written(&m);
    let normed = |more| falcon(&format!(", \"mamba_rms_norm\": true{more}")).unwrap();
    assert_eq!(normed("").mamba.norm, MambaNorm::BeforeGate);
    assert_eq!(normed(", \"mamba_norm_before_gate\": false").mamba.norm, MambaNorm::AfterGate);
    written(&normed(""));
    let nemotron_sizes = r#""mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 4,
        "conv_kernel": 3, "num_key_value_heads": 2, "layer_norm_epsilon": 1e-4"#;
    let nemotron = |more: &str| of("\"nemotron_h\"", &format!("{nemotron_sizes}, {more}"));
    let m = nemotron(r#""hybrid_override_pattern": "M*-""#).unwrap();
    assert_eq!(m.layer_kinds, [LayerKind::Mamba, LayerKind::NoRope, LayerKind::FeedForward]);
    assert_eq!((m.mlp, m.norm_eps, m.conv_taps, m.head_dim), (Mlp::SquaredRelu, 1e-4, 3, 128));
    written(&m);
    let names = r#""layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": null"#;
    assert_eq!(nemotron(names).as_ref(), Ok(&m));
    assert_eq!(nemotron(&format!("{names}, \"time_step_limit\": [0.0, Infinity]")), Ok(m));
    let refused = |found: Result<ModelConfig, ConfigError>, field: &str| {
        let e = found.unwrap_err();
        assert!(e.field == field && !e.supported.is_empty(), "{e}, not {field}");
    };
    for (more, field) in [
        (r#", "mamba_n_heads": 3"#, "mamba_n_heads"),
        (r#", "mamba_n_heads": 0"#, "mamba_n_heads"),
        (r#", "mamba_d_head": 16"#, "mamba_n_heads"),
        (r#", "mamba_d_head": "wide""#, "mamba_d_head"),
        (r#", "mamba_n_heads": 16"#, "mamba_d_head"),
        (r#", "mamba_expand": 100000"#, "mamba_expand"),
        (r#", "mamba_expand": 1024"#, "mamba_d_head"),
        (r#", "mamba_d_state": 24"#, "mamba_d_state"),
        (r#", "mamba_d_state": 1000000"#, "mamba_d_state"),
        (r#", "mamba_n_groups": 3"#, "mamba_n_groups"),
        (r#", "mamba_n_groups": 5"#, "mamba_n_groups"),
        (r#", "mamba_d_conv": 1"#, "mamba_d_conv"),
        (r#", "mamba_d_conv": 65"#, "mamba_d_conv"),
        (r#", "mamba_proj_bias": true"#, "mamba_proj_bias"),
        (r#", "time_step_limit": [0.0, 0.5]"#, "time_step_limit"),
        (r#", "position_embedding_type": "alibi""#, "position_embedding_type"),
        (r#", "layer_types": ["mamba", "mamba", "mamba"]"#, "layer_types"),
        (r#", "layer_types": ["mamba", "attention"]"#, "layer_types"),
        (r#", "num_local_experts": 4, "intermediate_size": 40"#, "intermediate_size"),
    ] {
        refused(granite(more), field);
    }
    refused(falcon(r#", "mlp_multipliers": [1.0]"#), "mlp_multipliers");
    refused(falcon(r#", "ssm_multipliers": [1, 2, 3, 4, 0]"#), "ssm_multipliers");
    refused(falcon(r#", "attention_bias": true"#), "attention_bias");
    refused(falcon(r#", "projectors_bias": true"#), "projectors_bias");
    refused(falcon(r#", "attn_layer_indices": [1]"#), "attn_layer_indices");
    refused(nemotron(r#""hybrid_override_pattern": "M*E""#), "hybrid_override_pattern");
    refused(nemotron(r#""hybrid_override_pattern": "M*""#), "hybrid_override_pattern");
    refused(nemotron(r#""vocab_size": 9"#), "hybrid_override_pattern");
    refused(nemotron(r#""layers_block_type": ["mamba", "attention", "moe"]"#), "layers_block_type");
    refused(nemotron(r#""hybrid_override_pattern": "M*-", "mlp_hidden_act": "silu""#), "mlp_hidden_act");
    refused(nemotron(r#""hybrid_override_pattern": "M*-", "mamba_hidden_act": "relu""#), "mamba_hidden_act");
    refused(nemotron(r#""hybrid_override_pattern": "M*-", "n_groups": 16"#), "n_groups");
}
