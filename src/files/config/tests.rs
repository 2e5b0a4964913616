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
    assert_eq!((m.rms_eps, m.rope_theta, m.rope_scaling), (1e-6, 10_000.0, RopeScaling::Plain));
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
    assert!(matches!(old.unwrap().rope_scaling, RopeScaling::Llama3 { .. }));
}

#[test]
fn a_table_of_divisors_equals_the_formula_it_comes_from() {
    let llama3 = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 64,
    };
    let formula = ModelConfig { rope_scaling: llama3, ..parse("").unwrap() };
    let frequency = |i: usize| formula.rope_theta.powf(-2.0 * i as f64 / formula.head_dim as f64);
    let mut divisors: Vec<f32> =
        (0..formula.head_dim / 2).map(|i| (1.0 / llama3.multiplier(i, frequency(i))) as f32).collect();
    let table = |divisors: &[f32]| ModelConfig {
        rope_scaling: RopeScaling::divisors(divisors.to_vec()),
        ..formula.clone()
    };
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
        ModelConfig { qkv_bias: true, qk_norm: true, tied: true, rms_eps: 1e-5f32.into(), ..plain.clone() };
    let divisors = RopeScaling::Divisors(&[1.0, 1.1, 1.0, 2.5, 1.0, 1.0, 32.0, 32.0]);
    for rope_scaling in [RopeScaling::Plain, llama3, divisors] {
        for model in [&plain, &odd] {
            let model = ModelConfig { rope_scaling, ..model.clone() };
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
        (r#", "rope_scaling": {"type": "linear", "factor": 2.0}"#, "rope_scaling", "linear"),
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
