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
    assert_eq!((m.kv_heads, m.head_dim, m.tied), (4, 16, false));
    assert_eq!((m.norm_eps, m.rope.theta, m.rope.scaling), (1e-6, 10_000.0, RopeScaling::Plain));
    assert!(!m.qkv_bias && !m.o_bias && !m.qk_norm);
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
    let frequency = |i: usize| formula.rope.frequency(i);
    let mut divisors: Vec<f32> =
        (0..formula.head_dim / 2).map(|i| (1.0 / llama3.multiplier(i, frequency(i))) as f32).collect();
    let table = |divisors: &[f32]| scaled(&formula, RopeScaling::divisors(divisors.to_vec()));
    assert_eq!(formula.difference(&table(&divisors)), None);
    assert_eq!(table(&divisors).difference(&formula), None);
    divisors[5] *= 1.00002;
    for (one, other) in [(&formula, &table(&divisors)), (&table(&divisors), &formula)] {
        assert_eq!(one.difference(other).map(|d| d.0), Some("rope_scaling"));
    }
}

#[test]
fn what_is_written_is_read_again() {
    let plain = parse("").unwrap();
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192,
    };
    let odd =
        ModelConfig { qkv_bias: true, qk_norm: true, tied: true, norm_eps: 1e-5f32.into(), ..plain.clone() };
    let divisors = RopeScaling::Divisors(&[1.0, 1.1, 1.0, 2.5, 1.0, 1.0, 32.0, 32.0]);
    for scaling in [RopeScaling::Plain, llama3, divisors] {
        for model in [&plain, &odd] {
            let model = ModelConfig { rope: Rope { scaling, ..model.rope }, ..model.clone() };
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
fn families_differ_by_switches() {
    use LayerKind::{Global, Local, NoRope};
    let gemma = published(
        r#"{"model_type": "gemma3", "vision_config": {}, "text_config": {"model_type": "gemma3_text",
        "hidden_size": 2560, "num_hidden_layers": 7, "intermediate_size": 10240, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}}"#,
    );
    assert_eq!((gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.vocab), (8, 4, 256, 262_208));
    assert_eq!(gemma.layer_kinds, [Local, Local, Local, Local, Local, Global, Local]);
    assert_eq!((gemma.rope.theta, gemma.rope.local_theta, gemma.window), (1e6, 1e4, 1024));
    assert!(gemma.tied && gemma.post_norms && gemma.qk_norm && gemma.mlp == Mlp::GeGlu);
    let smollm3 = published(
        r#"{"model_type": "smollm3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5,
        "intermediate_size": 96, "vocab_size": 100}"#,
    );
    assert_eq!(smollm3.layer_kinds, [Global, Global, Global, NoRope, Global]);
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
