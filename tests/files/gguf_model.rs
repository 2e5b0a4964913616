//! Tests that a GGUF header gives the same model as the checkpoint's `config.json`, and the same tensors under other
//! names and, in Llama, with the rows of q and k in another order; a model that would be computed wrongly is refused.

use crate::support::gguf::writer::{ARRAY, BOOL, F32, Parts, STRING, U8, U32, array, info, pair, text};
use crate::support::paths;
use files::config::{Arch, ConfigError, ModelConfig, QkNorm, RopeScaling};
use files::source::Safetensors;
use files::source::gguf::header::GgufHeader;
use files::source::gguf::names::{ROPE_FREQS, RowOrder, to_gguf_name, to_hf_name};
use files::source::gguf::{Gguf, model};
use std::fs;

fn gguf(file: &str) -> Gguf {
    Gguf::open(&paths::root().join("tests/fixtures/gguf").join(file)).unwrap()
}

fn config_json(model: &str) -> ModelConfig {
    let path = paths::root().join("tests/fixtures/models").join(model).join("config.json");
    ModelConfig::parse(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn headers_say_what_config_json_says() {
    let qwen = config_json("m4-qwen2-bf16");
    for file in ["m4-qwen2-bf16.Q4_1.gguf", "m4-qwen2-bf16.Q8_0.gguf"] {
        assert_eq!(qwen.find_difference(&gguf(file).read_config().unwrap()), None);
    }
    let llama = config_json("m1-llama32-bf16");
    let mut found = gguf("m1-llama32-bf16.Q4_0.gguf").read_config().unwrap();
    // No published model's scaling, so it stays a table; but one that says the same.
    assert!(matches!(found.rope.scaling, RopeScaling::Divisors(d) if d.len() == llama.head_dim / 2));
    let mut scaled = 0;
    for i in 0..llama.head_dim / 2 {
        let frequency = llama.rope.theta.powf(-2.0 * i as f64 / llama.head_dim as f64);
        let multiplier = |m: &ModelConfig| m.rope.scaling.frequency_multiplier(i, frequency);
        assert!((multiplier(&found) / multiplier(&llama) - 1.0).abs() < 1e-6, "pair {i}");
        scaled += usize::from(multiplier(&llama) != 1.0);
    }
    assert!(scaled > 0);
    found.rope.scaling = llama.rope.scaling;
    assert_eq!(llama.find_difference(&found), None);

    let wide = gguf("m1k-llama32-h256.Q4_K_M-mix.gguf").read_config().unwrap();
    assert_eq!((wide.arch, wide.layers, wide.dim, wide.tie_embeddings), (Arch::Llama, 2, 256, true));
    let part = gguf("m4-qwen2-bf16.F16.part.gguf").read_config().unwrap_err().to_string();
    assert!(part.contains("F16.part.gguf") && part.contains("token_embd.weight` is missing"), "{part}");
}

#[test]
fn every_family_has_the_same_config_in_both_kinds_of_files() {
    for file in [
        "m8-gpt2-bare-f32.F16",
        "m9-gemma3-270m-bf16.Q8_0",
        "m11-smollm3-bf16.Q8_0",
        "m12-phi4mini-short-bf16.Q8_0",
        "m14-granite-bf16.Q8_0",
        "m16-llama-linear-bf16.Q8_0",
        "m18-qwen3-yarn-bf16.Q8_0",
        "m19-lfm2-bf16.Q8_0",
        "m19b-lfm2-bf16.Q8_0",
        "m20-qwen35-bf16.F16",
        "m20n-qwen35-nested.Q8_0",
        "m22-gemma4-e2b-bf16.Q8_0",
        "m22b-gemma4-moe-bf16.Q8_0",
        "m26-ministral3-bf16.Q8_0",
        "m27-mistral-bf16.Q8_0",
        "m29-hunyuan-bf16.Q8_0",
        "m31-olmo3-bf16.Q8_0",
        "m32-ernie45-bf16.Q8_0",
        "m33-exaone4-bf16.Q8_0",
    ] {
        let json = config_json(file.split('.').next().unwrap());
        let found = gguf(&format!("{file}.gguf")).read_config().unwrap();
        assert_eq!(json.find_difference(&found), None, "{file}");
        // A packed file of a GGUF file holds what is written here.
        assert_eq!(json.find_difference(&ModelConfig::parse(&found.to_json()).unwrap()), None, "{file}");
    }
}

/// Root of the mean square of the difference, relative to that of the values.
fn error(values: &[f32], others: &[f32]) -> f64 {
    assert_eq!(values.len(), others.len());
    let squares =
        |of: &dyn Fn(usize) -> f32| (0..values.len()).map(|i| f64::from(of(i)).powi(2)).sum::<f64>();
    (squares(&|i| values[i] - others[i]) / squares(&|i| values[i])).sqrt()
}

/// Holds every tensor of a checkpoint against a GGUF file of the same weights.
fn compare(model: &str, file: &str, most: f64) {
    let checkpoint = Safetensors::open(&paths::root().join("tests/fixtures/models").join(model)).unwrap();
    let (gguf, config) = (gguf(file), config_json(model));
    let mut names: Vec<String> = gguf.tensors().map(|t| t.name.clone()).filter(|n| n != ROPE_FREQS).collect();
    let mut moved = 0;
    for tensor in checkpoint.tensors() {
        let name = to_gguf_name(config.arch, &tensor.name).unwrap();
        assert_eq!(to_hf_name(config.arch, &name).as_deref(), Some(tensor.name.as_str()));
        names.retain(|other| *other != name);
        let found = gguf.get_required(&name).unwrap();
        assert_eq!(found.shape, tensor.shape, "{name}");
        let (rows, cols) = match found.shape[..] {
            [rows, cols] => (rows, cols),
            _ => (found.shape[0], 1),
        };
        let order = RowOrder::for_tensor(config.arch, &tensor.name, config.head_dim);
        let (stored, values) = (found.to_f32(), tensor.dtype.to_f32(tensor.data.bytes()));
        let row = |row: usize| stored[order.file_row(row) * cols..][..cols].to_vec();
        let ordered: Vec<f32> = (0..rows).flat_map(row).collect();
        assert!(error(&values, &ordered) < most, "{name}: {}", error(&values, &ordered));
        moved += usize::from(error(&values, &stored) > 1.0);
    }
    assert!(names.is_empty(), "in no checkpoint: {names:?}");
    let interleaved = matches!(config.arch, Arch::Llama | Arch::Mistral);
    let expected = if interleaved { 2 * config.layers } else { 0 };
    assert_eq!(moved, expected, "tensors whose rows are in another order");
}

#[test]
fn tensors_are_those_of_the_checkpoint() {
    compare("m1-llama32-bf16", "m1-llama32-bf16.Q4_0.gguf", 0.15);
    compare("m4-qwen2-bf16", "m4-qwen2-bf16.Q8_0.gguf", 0.01);
    compare("m4-qwen2-bf16", "m4-qwen2-bf16.Q5_0.gguf", 0.08);
    compare("m27-mistral-bf16", "m27-mistral-bf16.Q8_0.gguf", 0.01);
    compare("m29-hunyuan-bf16", "m29-hunyuan-bf16.Q8_0.gguf", 0.01);
    compare("m31-olmo3-bf16", "m31-olmo3-bf16.Q8_0.gguf", 0.01);
    compare("m32-ernie45-bf16", "m32-ernie45-bf16.Q8_0.gguf", 0.01);
}

const EPSILON: &str = "llama.attention.layer_norm_rms_epsilon";

/// A header: keys, and tensors of F32 by their dimensions.
#[derive(Clone)]
pub struct Made {
    arch: &'static str,
    keys: Vec<(String, u32, Vec<u8>)>,
    tensors: Vec<(String, Vec<u64>)>,
}

impl Made {
    pub fn new(arch: &'static str) -> Self {
        let made = Self { arch, keys: Vec::new(), tensors: Vec::new() };
        made.number("block_count", 2)
            .number("embedding_length", 64)
            .number("feed_forward_length", 96)
            .number("attention.head_count", 4)
            .with("attention.layer_norm_rms_epsilon", F32, 1e-6f32.to_le_bytes())
            .tensor("token_embd.weight", &[64, 10])
    }

    pub fn with(mut self, key: &str, kind: u32, value: impl AsRef<[u8]>) -> Self {
        self = self.without(key);
        self.keys.push((key.into(), kind, value.as_ref().to_vec()));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(other, ..)| other != key);
        self
    }

    pub fn number(self, key: &str, value: u32) -> Self {
        self.with(key, U32, value.to_le_bytes())
    }

    pub fn tensor(mut self, name: &str, dims: &[u64]) -> Self {
        self.tensors.retain(|(other, _)| other != name);
        self.tensors.push((name.into(), dims.to_vec()));
        self
    }

    /// Reads the configuration from a GGUF file with these keys, tensors and divisors.
    pub fn read(&self, divisors: &[f32]) -> Result<ModelConfig, ConfigError> {
        let mut parts = Parts::default().pair(pair("general.architecture", STRING, text(self.arch)));
        for (key, kind, value) in &self.keys {
            let key = if key.starts_with("split.") { key.clone() } else { format!("{}.{key}", self.arch) };
            parts = parts.pair(pair(&key, *kind, value));
        }
        let mut offset = 0;
        for (name, dims) in &self.tensors {
            parts = parts.info(info(name, dims, 0, offset));
            offset += (4 * dims.iter().product::<u64>()).next_multiple_of(32);
        }
        let mut bytes = parts.data(offset as usize).bytes();
        let header = GgufHeader::parse(&bytes).unwrap();
        if let Some(entry) = header.tensors.get(ROPE_FREQS) {
            let divisors: Vec<u8> = divisors.iter().flat_map(|x| x.to_le_bytes()).collect();
            bytes[entry.range.clone()].copy_from_slice(&divisors);
        }
        model::read_config(&header, &bytes)
    }
}

#[test]
fn absent_keys_have_their_defaults_and_tensors_set_the_switches() {
    let m = Made::new("llama").read(&[]).unwrap();
    assert_eq!((m.arch, m.layers, m.dim, m.ffn_dim, m.vocab), (Arch::Llama, 2, 64, 96, 10));
    assert_eq!((m.heads, m.kv_heads, m.head_dim, m.tie_embeddings), (4, 4, 16, true));
    assert_eq!((m.norm_eps, m.rope.theta, m.rope.scaling), (1e-6, 10_000.0, RopeScaling::Unscaled));
    assert_eq!((m.qkv_bias, m.o_bias, m.qk_norm), (false, false, QkNorm::None));

    let biased = Made::new("llama")
        .number("attention.head_count_kv", 2)
        .number("attention.key_length", 20)
        .number("attention.value_length", 20)
        .number("rope.dimension_count", 20)
        .with("rope.scaling.type", STRING, text("none"))
        .number("expert_count", 0)
        .tensor("output.weight", &[64, 10])
        .tensor("blk.0.attn_q.bias", &[80])
        .tensor("blk.0.attn_output.bias", &[64]);
    let m = biased.read(&[]).unwrap();
    assert_eq!((m.kv_heads, m.head_dim, m.tie_embeddings), (2, 20, false));
    assert_eq!((m.qkv_bias, m.o_bias, m.qk_norm), (true, true, QkNorm::None));

    let qwen3 = Made::new("qwen3").tensor("blk.0.attn_q_norm.weight", &[16]).read(&[]).unwrap();
    assert_eq!((qwen3.arch, qwen3.qkv_bias, qwen3.head_dim), (Arch::Qwen3, false, 16));
    assert_eq!(qwen3.qk_norm, QkNorm::PerHead);
    assert!(Made::new("qwen2").read(&[]).unwrap().qkv_bias);

    // One number for every layer, all the same.
    let each = array(U32, 2, [2u32, 2].map(u32::to_le_bytes).concat());
    assert_eq!(
        Made::new("llama").with("attention.head_count_kv", ARRAY, each).read(&[]).unwrap().kv_heads,
        2
    );
}

#[test]
fn divisors_of_the_frequencies_become_the_scaling_they_came_from() {
    let llama3 = |factor| RopeScaling::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position: 8192,
    };
    let made = Made::new("llama")
        .number("attention.key_length", 64)
        .with("rope.freq_base", F32, 5e5f32.to_le_bytes())
        .tensor(ROPE_FREQS, &[32]);
    let divisors = |scaling: RopeScaling| -> Vec<f32> {
        let frequency = |i: usize| 5e5f64.powf(-2.0 * i as f64 / 64.0);
        (0..32).map(|i| (1.0 / scaling.frequency_multiplier(i, frequency(i))) as f32).collect()
    };
    for scaling in [RopeScaling::Unscaled, llama3(8.0), llama3(32.0)] {
        assert_eq!(made.read(&divisors(scaling)).unwrap().rope.scaling, scaling);
    }
    let other = divisors(llama3(16.0));
    let found = made.read(&other).unwrap().rope.scaling;
    assert!(matches!(found, RopeScaling::Divisors(d) if d == other), "{found:?}");
    let mut changed = divisors(llama3(32.0));
    changed[17] *= 1.001;
    assert!(matches!(made.read(&changed).unwrap().rope.scaling, RopeScaling::Divisors(_)));

    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let mut divisors = divisors(RopeScaling::Unscaled);
        divisors[31] = bad;
        let e = made.read(&divisors).unwrap_err().to_string();
        assert!(e.contains("rope_freqs.weight") && e.contains(&format!("{bad:?}")), "{e}");
    }
    let short = made.tensor(ROPE_FREQS, &[31]).read(&[1.0; 31]).unwrap_err();
    assert!(short.value.contains("[31]") && short.supported.contains("32 positive"), "{short}");
}

#[test]
fn what_would_be_computed_wrongly_is_refused() {
    let llama = || Made::new("llama");
    let refused = |made: Made, field: &str, value: &str| {
        let e = made.read(&[]).unwrap_err();
        assert!(e.field == field && e.value.contains(value) && !e.supported.is_empty(), "{field}: {e}");
    };
    refused(Made { arch: "mamba", ..llama() }, "general.architecture", "\"mamba\"");
    for (key, _, _) in llama().keys {
        refused(llama().without(&key), &format!("llama.{key}"), "missing");
        refused(llama().with(&key, STRING, text("x")), &format!("llama.{key}"), "\"x\"");
        refused(llama().number(&key, 0), &format!("llama.{key}"), "0");
    }
    refused(llama().number("block_count", u32::MAX), "llama.block_count", "4294967295");
    refused(llama().number("attention.head_count_kv", 3), "llama.attention.head_count_kv", "3");
    refused(llama().number("attention.head_count", 5), "llama.attention.head_count", "5");
    refused(llama().number("attention.key_length", 15), "llama.attention.key_length", "15");
    refused(llama().number("attention.value_length", 32), "llama.attention.value_length", "32");
    refused(llama().number("rope.dimension_count", 8), "llama.rope.dimension_count", "8");
    refused(llama().number("expert_count", 8), "llama.expert_count", "8");
    refused(llama().number("attention.sliding_window", 4096), "llama.attention.sliding_window", "4096");
    refused(
        llama().with("rope.scaling.type", STRING, text("dynamic")),
        "llama.rope.scaling.type",
        "\"dynamic\"",
    );
    refused(llama().with("rope.scaling.type", STRING, text("yarn")), "llama.rope.scaling.factor", "missing");
    refused(llama().with("rope.scale_linear", F32, 4f32.to_le_bytes()), "llama.rope.scale_linear", "4.0");
    let factor = llama().with("rope.scaling.factor", F32, 4f32.to_le_bytes());
    refused(factor.clone(), "llama.rope.scaling.factor", "4.0");
    assert!(factor.with("rope.scaling.type", STRING, text("none")).read(&[]).is_ok());
    refused(llama().number("split.count", 2), "split.count", "2");
    let nan = f32::NAN.to_le_bytes();
    refused(llama().with("rope.freq_base", F32, nan), "llama.rope.freq_base", "NaN");
    let differing = array(U32, 2, [2u32, 4].map(u32::to_le_bytes).concat());
    let heads = llama().with("attention.head_count_kv", ARRAY, differing);
    refused(heads, "llama.attention.head_count_kv", "an array of 2");
    let none = llama().with("attention.head_count_kv", ARRAY, array(U8, 0, ""));
    refused(none, "llama.attention.head_count_kv", "an array of 0");
    // Values of another type than llama.cpp reads: what they say would be guessed.
    let array_of = |kind, bytes: &[u8]| array(kind, 1, bytes);
    let width = llama().with("embedding_length", ARRAY, array_of(U32, &64u32.to_le_bytes()));
    refused(width, "llama.embedding_length", "an array of 1");
    let bytes = llama().with("attention.head_count_kv", ARRAY, array_of(U8, &[2]));
    refused(bytes, "llama.attention.head_count_kv", "type Uint8");
    refused(llama().number("attention.layer_norm_rms_epsilon", 1), EPSILON, "1");
    refused(llama().number("rope.freq_base", 10_000), "llama.rope.freq_base", "10000");
    refused(llama().number("rope.scaling.factor", 4), "llama.rope.scaling.factor", "4");
    refused(llama().tensor("token_embd.weight", &[64]), "token_embd.weight", "[64]");
    // What no step would read, of a layer that there is or is not.
    for name in [
        "blk.0.ffn_gate_inp.weight",
        "blk.1.ffn_up.bias",
        "blk.0.attn_norm.bias",
        "blk.1.attn_k.bias",
        "blk.1.attn_q_norm.weight",
        "blk.1.attn_output.bias",
        "blk.2.attn_q.weight",
    ] {
        refused(llama().tensor(name, &[64]), "tensors", name);
    }
}

/// The one rule for keys: read, without effect, or refused by name.
#[test]
fn a_key_that_nothing_reads_must_change_nothing() {
    let float = |x: f32| (F32, x.to_le_bytes().to_vec());
    let integer = |n: u32| (U32, n.to_le_bytes().to_vec());
    let truth = |b: u8| (BOOL, vec![b]);
    let quarter = 0.25; // 1 / sqrt(16)
    for (arch, key, (kind, value), change) in [
        ("llama", "vocab_size", integer(7), false),
        ("llama", "expert_used_count", integer(2), false),
        ("llama", "attention.layer_norm_epsilon", float(0.0), false),
        ("llama", "attention.scale", float(0.0), false),
        ("llama", "attention.scale", float(quarter), false),
        ("qwen2", "attention.scale", float(0.5), true),
        ("qwen3", "logit_scale", float(1.0), false),
        ("qwen3", "logit_scale", float(0.5), true),
        ("llama", "residual_scale", float(0.22), true),
        ("gemma3", "embedding_scale", float(8.0), false),
        ("gemma3", "embedding_scale", float(1.0), true),
        ("llama", "embedding_scale", float(12.0), true),
        ("llama", "attn_logit_softcapping", float(50.0), true),
        ("llama", "attention.temperature_scale", float(0.1), true),
        ("llama", "attention.causal", truth(1), false),
        ("llama", "attention.causal", truth(0), true),
        ("llama", "rope.scaling.finetuned", truth(0), false),
        ("granite", "rope.scaling.finetuned", truth(0), true),
        ("llama", "rope.scaling.attn_factor", float(1.0), false),
        ("llama", "rope.scaling.attn_factor", float(1.2), true),
        ("llama", "rope.scaling.yarn_beta_fast", float(32.0), false),
        ("llama", "rope.scaling.yarn_ext_factor", float(-1.0), false),
        ("llama", "rope.scaling.yarn_ext_factor", float(1.0), true),
        ("llama", "rope.dimension_sections", (ARRAY, array(U32, 2, [0; 8])), false),
        ("qwen2", "rope.dimension_sections", (ARRAY, array(U32, 1, [16, 0, 0, 0])), true),
        ("llama", "hidden_activation", (STRING, text("silu")), false),
        ("llama", "a_key_of_tomorrow", integer(0), true),
    ] {
        let found = Made::new(arch).with(key, kind, &value).read(&[]);
        let field = found.map(drop).map_err(|e| e.field);
        assert_eq!(field, if change { Err(format!("{arch}.{key}")) } else { Ok(()) }, "{value:?}");
    }
    let gelu = Made::new("llama").with("hidden_activation", STRING, text("gelu")).read(&[]).unwrap_err();
    assert_eq!(gelu.field, "llama.hidden_activation");
    // Keys of another prefix are nobody's business.
    let mut other = Made::new("llama");
    other.keys.push(("split.note".into(), U32, vec![1, 0, 0, 0]));
    assert!(other.read(&[]).is_ok());
}

#[test]
fn scaled_rope_is_followed_or_refused() {
    let float = |made: Made, key: &str, x: f32| made.with(key, F32, x.to_le_bytes());
    let scaled = |kind: &str| {
        let made = Made::new("qwen3").number("rope.scaling.original_context_length", 32768);
        float(made.with("rope.scaling.type", STRING, text(kind)), "rope.scaling.factor", 4.0)
    };
    let log = 0.1 * 4f64.ln();
    for (keys, want) in [
        (&[][..], 1.0 + log),
        (&[("yarn_attn_factor", 0.5)], 0.5),
        (&[("attn_factor", 0.5)], 0.5 * (1.0 + log)),
        (&[("yarn_log_multiplier", 0.5)], (1.0 + log) / (1.0 + 0.5 * log)),
        (&[("yarn_ext_factor", 1.0), ("yarn_log_multiplier", 0.0)], 1.0 + log),
        // As llama.cpp writes what is not set.
        (&[("yarn_ext_factor", -1.0), ("yarn_attn_factor", 1.0)], 1.0 + log),
    ] {
        let made =
            keys.iter().fold(scaled("yarn"), |m, (key, x)| float(m, &format!("rope.scaling.{key}"), *x));
        let found = made.read(&[]).unwrap().rope.attention_factor;
        assert!((found - want).abs() < 1e-7, "{keys:?}: {found}");
    }
    let part = float(scaled("yarn"), "rope.scaling.yarn_ext_factor", 0.5).read(&[]).unwrap_err();
    assert_eq!((part.field.as_str(), part.value.as_str()), ("qwen3.rope.scaling.yarn_ext_factor", "0.5"));
    let phi3 = || {
        let made = Made::new("phi3").number("rope.scaling.original_context_length", 4096);
        made.with("rope.scaling.type", STRING, text("longrope"))
    };
    for made in [scaled("longrope"), phi3(), phi3().tensor("rope_factors_long.weight", &[8])] {
        let e = made.read(&[]).unwrap_err();
        assert!(e.field.ends_with("rope.scaling.type") && e.supported.contains("rope_factors_short"), "{e}");
    }
}
