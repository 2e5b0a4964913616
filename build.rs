//! Compiles the dimensions of one model into the program: reads `config.json` or the GGUF header of `ANTIGRAVITY_MODEL`
//! (a name under `models/`, a directory, a GGUF file, or a model in the Hugging Face cache) and writes
//! `OUT_DIR/dims.rs`. Build script of the member `src/model`.
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]

use std::path::{Path, PathBuf};
use std::{env, fs, io, process};

use files::bundle;
use files::config::{
    DeltaNetSizes, Experts, LongRope, MambaSizes, ModelConfig, QueryGrowth, Rope, RopeScaling, Scales,
};
use files::hf_cache;
use files::source::gguf::{Gguf, find_only_gguf};

fn main() {
    for variable in ["ANTIGRAVITY_MODEL", "ANTIGRAVITY_SHIPPED"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    println!("cargo:rerun-if-changed=../../build.rs");
    let name = env::var("ANTIGRAVITY_MODEL").unwrap_or_else(|_| "story".into());
    let member = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let root = member.ancestors().nth(2).expect("src/model").to_path_buf();
    let unusable = |e: &dyn std::fmt::Display| -> ! { fail_build(&format!("ANTIGRAVITY_MODEL={name}: {e}")) };
    let place = find_model(&root, &name).unwrap_or_else(|e| unusable(&e));
    let gguf = place.is_file();
    let file = if gguf { place.clone() } else { place.join("config.json") };
    println!("cargo:rerun-if-changed={}", file.display());
    let model = if gguf {
        Gguf::open(&file).and_then(|gguf| gguf.read_config()).unwrap_or_else(|e| unusable(&e))
    } else {
        let text = fs::read_to_string(&file).unwrap_or_else(|e| fail_missing_config(&root, &name, &file, &e));
        let model = ModelConfig::parse(&text).map_err(|e| files::Error::model(&file, e));
        model.unwrap_or_else(|e| unusable(&e))
    };
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let dims = out.join("dims.rs");
    fs::write(&dims, dims_source(&name, &place, &model))
        .unwrap_or_else(|e| fail_build(&format!("cannot write {}: {e}", dims.display())));
}

/// Ends the build because `config.json` cannot be read, and lists the models that can be used instead.
fn fail_missing_config(root: &Path, name: &str, file: &Path, e: &io::Error) -> ! {
    let mut names: Vec<String> = fs::read_dir(root.join("models"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    fail_build(&format!(
        "ANTIGRAVITY_MODEL={name}: cannot read {}: {e}; use a directory with a config.json, a GGUF file or one of: {}",
        file.display(),
        names.join(", ")
    ))
}

/// Ends the build with a one-line error.
fn fail_build(message: &str) -> ! {
    println!("cargo::error={message}");
    process::exit(0)
}

/// Finds the model: a name under `models/`, else a path relative to the project, else `org/name` in the Hugging Face
/// cache. A directory without `config.json` means its only GGUF file.
fn find_model(root: &Path, name: &str) -> files::Result<PathBuf> {
    let given = hf_cache::resolve_snapshot(&root.join(hf_cache::resolve_model(Path::new(name))?));
    for dir in [&root.join("models").join(name), &given] {
        if dir.join("config.json").is_file() {
            return Ok(dir.clone());
        }
        let gguf = dir.is_dir() && !dir.join("config.json").exists();
        if let Some(only) = if gguf { find_only_gguf(dir)? } else { None } {
            return Ok(only);
        }
    }
    Ok(given)
}

/// The absolute path with links in the folder resolved. A file keeps its name, because in the Hugging Face cache it is
/// a link to a file with another name.
fn absolute_path(place: &Path) -> PathBuf {
    let folder = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.into());
    match (place.is_file(), place.parent(), place.file_name()) {
        (true, Some(parent), Some(name)) => folder(parent).join(name),
        _ => folder(place),
    }
}

/// The compiler, such as `rustc 1.95.0`.
fn compiler_version() -> String {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let out =
        process::Command::new(rustc).arg("--version").output().map(|out| out.stdout).unwrap_or_default();
    String::from_utf8_lossy(&out).split_whitespace().take(2).collect::<Vec<_>>().join(" ")
}

/// The text of `dims.rs`.
fn dims_source(name: &str, dir: &Path, m: &ModelConfig) -> String {
    let short = Path::new(name).file_name().map_or_else(|| name.into(), |n| n.to_string_lossy());
    // Folders in the Hugging Face cache are called `models--org--name`; `:word` after a name selects a file.
    let short = short.split(':').next().unwrap_or_default();
    let short = short.strip_prefix("models--").and_then(|n| n.split("--").last()).unwrap_or(short);
    // A program that leaves this machine names its commit, and no folder of this machine.
    let shipped = env::var("ANTIGRAVITY_SHIPPED").ok();
    let dir = match shipped {
        Some(_) => PathBuf::new(),
        None => absolute_path(dir),
    };
    let mut all = Constants::default();
    all.put(
        "Name of the model at build time: `ANTIGRAVITY_MODEL` without the path.",
        format!("MODEL: &str = {short:?}"),
    );
    all.put(
        "The model's directory, or GGUF file, on the build machine; empty in a program of `cargo xtask build` or `deploy`.",
        format!("MODEL_DIR: &str = {:?}", dir.to_string_lossy()),
    );
    all.put("Name and version of the compiler.", format!("COMPILER: &str = {:?}", compiler_version()));
    all.put(
        "Commit that `cargo xtask build` or `deploy` compiled, or empty.",
        format!("COMMIT: &str = {:?}", shipped.unwrap_or_default()),
    );
    all.put(
        "Mark and config in the program's file, from which other builds see the model it is built for.",
        format!("BUILT_FOR: &str = {:?}", format!("{}{}\n", bundle::program_marker(), m.to_json())),
    );
    all.put("Model family.", format!("ARCH: Arch = Arch::{:?}", m.arch));
    all.put("Transformer blocks.", format!("LAYERS: usize = {}", m.layers));
    all.put("Width of the residual stream (`hidden_size`).", format!("DIM: usize = {}", m.dim));
    all.put("Query heads.", format!("HEADS: usize = {}", m.heads));
    all.put(
        "Key/value heads; of sliding-window layers if layers differ. The cache has this number in all layers.",
        format!("KV_HEADS: usize = {}", m.kv_heads),
    );
    all.put(
        "Width of one head; of the widest if layers differ. The cache has this width in all layers.",
        format!("HEAD_DIM: usize = {}", m.head_dim),
    );
    all.put(
        "Width of one head in sliding-window layers.",
        format!("LOCAL_HEAD_DIM: usize = {}", m.local_head_dim),
    );
    all.put(
        "Width of the feed-forward layer (`intermediate_size`).",
        format!("FFN_DIM: usize = {}", m.ffn_dim),
    );
    all.put("Vocabulary size, padding rows included.", format!("VOCAB: usize = {}", m.vocab));
    all.put(
        "Longest context the model was trained for.",
        format!("MAX_POSITION: usize = {}", m.max_position),
    );
    all.put("Biases on q, k and v.", format!("QKV_BIAS: bool = {}", m.qkv_bias));
    all.put("Bias on the attention output.", format!("O_BIAS: bool = {}", m.o_bias));
    all.put("RMS norm of queries and keys.", format!("QK_NORM: QkNorm = QkNorm::{:?}", m.qk_norm));
    all.put("The output head shares the embedding matrix.", format!("TIED: bool = {}", m.tie_embeddings));
    all.put("Epsilon of every norm.", format!("NORM_EPS: f64 = {:?}", m.norm_eps));
    add_switches(&mut all, m);
    all.0
}

/// Source text of constants.
#[derive(Default)]
struct Constants(String);

impl Constants {
    /// Adds a constant with its doc comment.
    fn put(&mut self, doc: &str, item: String) {
        self.0 += &format!("/// {doc}\npub const {item};\n");
    }
}

/// Adds the architecture switches, in which model families differ.
fn add_switches(all: &mut Constants, m: &ModelConfig) {
    let Scales { embedding, attention, residual, logits, .. } = m.scales;
    let kinds: Vec<String> = m.layer_kinds.iter().map(|kind| format!("LayerKind::{kind:?}")).collect();
    all.put("Kind of every norm of the residual.", format!("NORM: Norm = Norm::{:?}", m.norm));
    all.put("Norms on the inputs of mixer and feed-forward.", format!("PRE_NORMS: bool = {}", m.pre_norms));
    all.put(
        "Norms on the outputs of mixer and feed-forward, before they are added to the residual.",
        format!("POST_NORMS: bool = {}", m.post_norms),
    );
    all.put(
        "Gate of attention's output.",
        format!("ATTENTION_GATE: AttentionGate = AttentionGate::{:?}", m.attention_gate),
    );
    all.put(
        "Each head has a logit that takes part in the softmax, and whose share is dropped.",
        format!("ATTENTION_SINKS: bool = {}", m.attention_sinks),
    );
    all.put("The feed-forward layer.", format!("MLP: Mlp = Mlp::{:?}", m.mlp));
    all.put("Mixer of each layer.", format!("LAYER_KINDS: [LayerKind; LAYERS] = [{}]", kinds.join(", ")));
    all.put(
        "Slots that a sliding-window layer sees; 0 if there is no such layer.",
        format!("WINDOW: usize = {}", m.sliding_window),
    );
    let growth = m.query_growth.map_or("None".into(), |QueryGrowth { beta, original_context }| {
        format!("Some(QueryGrowth {{ beta: {beta:?}, original_context: {original_context} }})")
    });
    all.put(
        "Growth of queries with their position.",
        format!("QUERY_GROWTH: Option<QueryGrowth> = {growth}"),
    );
    all.put(
        "Taps of causal convolutions; 0 if no layer has one.",
        format!("CONV_TAPS: usize = {}", m.conv_taps),
    );
    let DeltaNetSizes { key_heads, value_heads, key_dim, value_dim } = m.delta_net;
    all.put(
        "Sizes of gated delta nets; zeros if no layer is one.",
        format!(
            "DELTA_NET: DeltaNetSizes = DeltaNetSizes {{ key_heads: {key_heads}, value_heads: {value_heads}, \
             key_dim: {key_dim}, value_dim: {value_dim} }}"
        ),
    );
    add_mamba(all, m);
    add_experts(all, m);
    all.put("Factor of embedding rows.", format!("EMBEDDING_SCALE: f64 = {embedding:?}"));
    all.put("Factor of queries.", format!("ATTENTION_SCALE: f64 = {attention:?}"));
    all.put(
        "Factor of the outputs that are added to the residual.",
        format!("RESIDUAL_SCALE: f64 = {residual:?}"),
    );
    all.put("Factor of logits.", format!("LOGIT_SCALE: f64 = {logits:?}"));
    add_sharing(all, m);
    add_rope(all, &m.rope);
}

/// Adds the constants for Mamba2, and the factors of models in which it is beside attention.
fn add_mamba(all: &mut Constants, m: &ModelConfig) {
    let MambaSizes { heads, head_dim, state, groups, conv_bias, norm } = m.mamba;
    all.put(
        "Sizes of Mamba2; zeros if no layer has it.",
        format!(
            "MAMBA: MambaSizes = MambaSizes {{ heads: {heads}, head_dim: {head_dim}, state: {state}, \
             groups: {groups}, conv_bias: {conv_bias}, norm: MambaNorm::{norm:?} }}"
        ),
    );
    let Scales { attention_out, mlp, ssm_in, ssm_out, .. } = m.scales;
    all.put("Factor of attention's output.", format!("ATTENTION_OUT_SCALE: f64 = {attention_out:?}"));
    all.put("Factors of the feed-forward's gate and output.", format!("MLP_SCALES: [f64; 2] = {mlp:?}"));
    all.put(
        "Factors of what Mamba2 reads: its gate, `x`, `B`, `C` and the time steps.",
        format!("SSM_IN_SCALES: [f64; 5] = {ssm_in:?}"),
    );
    all.put("Factor of Mamba2's output.", format!("SSM_OUT_SCALE: f64 = {ssm_out:?}"));
}

/// Adds the constants for mixtures of experts.
fn add_experts(all: &mut Constants, m: &ModelConfig) {
    let Experts { count, used, dim, shared_dim, own_norms, router, renormalised, scale, limit } = m.experts;
    all.put(
        "Mixtures of experts; zeros if no layer has one.",
        format!(
            "EXPERTS: Experts = Experts {{ count: {count}, used: {used}, dim: {dim}, shared_dim: {shared_dim}, \
             own_norms: {own_norms}, router: Router::{router:?}, renormalised: {renormalised}, scale: {scale:?}, limit: {limit:?} }}"
        ),
    );
    all.put(
        "True for layers with experts in place of one feed-forward.",
        format!("EXPERT_LAYERS: [bool; LAYERS] = {:?}", m.expert_layers),
    );
}

/// Adds the constants for layers that share a cache or have embeddings of their own, and what goes with them.
fn add_sharing(all: &mut Constants, m: &ModelConfig) {
    all.put(
        "Key/value heads of full-attention layers, a divisor of [`KV_HEADS`].",
        format!("GLOBAL_KV_HEADS: usize = {}", m.global_kv_heads),
    );
    all.put(
        "The values of full-attention layers are their projected keys.",
        format!("VALUES_ARE_KEYS: bool = {}", m.values_are_keys),
    );
    all.put(
        "The last layers, this many, read keys and values of an earlier layer.",
        format!("SHARED_KV_LAYERS: usize = {}", m.shared_kv_layers),
    );
    all.put(
        "Width of the feed-forward of those layers.",
        format!("SHARED_FFN_DIM: usize = {}", m.shared_ffn_dim),
    );
    all.put(
        "Width of the embedding that each layer has of a token; 0 without.",
        format!("PER_LAYER_DIM: usize = {}", m.per_layer_dim),
    );
    all.put("RMS norm of values, without weights.", format!("VALUE_NORM: bool = {}", m.value_norm));
    all.put(
        "Each layer multiplies the residual with a factor of its own.",
        format!("LAYER_SCALARS: bool = {}", m.layer_scalars),
    );
    all.put(
        "Logits are `cap * tanh(logits / cap)`; 0 without.",
        format!("LOGIT_SOFTCAP: f64 = {:?}", m.logit_softcap),
    );
}

/// Adds the constants for RoPE.
fn add_rope(all: &mut Constants, rope: &Rope) {
    let scaled = |scaling| match scaling {
        RopeScaling::Unscaled => "RopeScaling::Unscaled".to_string(),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
            format!(
                "RopeScaling::Llama3 {{ factor: {factor:?}, low_freq_factor: {low_freq_factor:?}, \
                 high_freq_factor: {high_freq_factor:?}, original_max_position: {original_max_position} }}"
            )
        }
        RopeScaling::Divisors(divisors) => format!("RopeScaling::Divisors(&{divisors:?})"),
    };
    let long = rope.long.map_or("None".into(), |LongRope { divisors, original_context }| {
        format!("Some(LongRope {{ divisors: &{divisors:?}, original_context: {original_context} }})")
    });
    let Rope { dim, theta, attention_factor, local_dim, local_theta, local_attention_factor, .. } = *rope;
    let (scaling, local_scaling) = (scaled(rope.scaling), scaled(rope.local_scaling));
    all.put(
        "Number of first elements of a head that RoPE rotates; 0 if positions are learned.",
        format!("ROPE_DIM: usize = {dim}"),
    );
    all.put(
        "RoPE parameters of the config.",
        format!(
            "ROPE: Rope = Rope {{ dim: {dim}, theta: {theta:?}, scaling: {scaling}, long: {long}, \
             attention_factor: {attention_factor:?}, local_dim: {local_dim}, local_theta: {local_theta:?}, \
             local_scaling: {local_scaling}, local_attention_factor: {local_attention_factor:?} }}"
        ),
    );
    let same = Rope { long: None, ..*rope };
    all.put(
        "Sliding-window layers rotate by other angles than full-attention layers.",
        format!("LOCAL_ROPE_DIFFERS: bool = {}", rope.for_sliding_window() != same),
    );
}
