//! Model families: the names and defaults of their `config.json`, their norms, feed-forward and kinds of layers.

use super::fields::{ConfigError, Fields};
use serde_json::Value;

/// The model families that this program runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arch {
    Llama,
    Qwen2,
    Qwen3,
    SmolLm3,
    Phi3,
    Granite,
    Gemma3,
    Gpt2,
}

impl Arch {
    pub const ALL: [Arch; 8] = [
        Arch::Llama,
        Arch::Qwen2,
        Arch::Qwen3,
        Arch::SmolLm3,
        Arch::Phi3,
        Arch::Granite,
        Arch::Gemma3,
        Arch::Gpt2,
    ];

    /// The `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::SmolLm3 => "smollm3",
            Arch::Phi3 => "phi3",
            Arch::Granite => "granite",
            Arch::Gemma3 => "gemma3_text",
            Arch::Gpt2 => "gpt2",
        }
    }

    /// The `general.architecture` of a GGUF file.
    pub fn gguf_name(self) -> &'static str {
        if self == Arch::Gemma3 { "gemma3" } else { self.name() }
    }

    /// Lists the names of all families for errors.
    pub fn list_names(name: impl Fn(Arch) -> &'static str) -> String {
        Self::ALL.map(|arch| format!("{:?}", name(arch))).join(", ")
    }

    /// Returns true if the embedding is also the output head by default.
    pub(super) fn ties_embeddings(self) -> bool {
        matches!(self, Arch::SmolLm3 | Arch::Gemma3 | Arch::Gpt2)
    }

    /// Translates a field name of Llama's config to this family's.
    pub(crate) fn field_name(self, name: &'static str) -> &'static str {
        match (self, name) {
            (Arch::Gpt2, "hidden_size") => "n_embd",
            (Arch::Gpt2, "num_attention_heads") => "n_head",
            (Arch::Gpt2, "num_hidden_layers") => "n_layer",
            (Arch::Gpt2, "intermediate_size") => "n_inner",
            (Arch::Gpt2, "max_position_embeddings") => "n_positions",
            (Arch::Gpt2, "rms_norm_eps") => "layer_norm_epsilon",
            _ => name,
        }
    }

    /// Name of the field with the epsilon of norms.
    pub(crate) fn epsilon_field(self) -> &'static str {
        self.field_name("rms_norm_eps")
    }

    /// Default epsilon of norms.
    pub(super) fn default_epsilon(self) -> f64 {
        if matches!(self, Arch::Phi3 | Arch::Gpt2) { 1e-5 } else { 1e-6 }
    }

    /// Activation functions that the config may name.
    pub(super) fn supported_activations(self) -> &'static [&'static str] {
        match self {
            Arch::Gemma3 => &["gelu_pytorch_tanh"],
            Arch::Gpt2 => &["gelu_new", "gelu_pytorch_tanh"],
            _ => &["silu", "swish"],
        }
    }
}

/// The normalisation of a layer's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// By the root mean square.
    Rms,
    /// By mean and variance, with a bias: LayerNorm.
    Layer,
}

/// The feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate) * up)`
    SwiGlu,
    /// `down(gelu(gate) * up)`, GELU by the tanh formula.
    GeGlu,
    /// `down(gelu(up))`, with biases.
    Gelu,
}

/// The attention of a layer: which slots it sees, and its position encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Full attention.
    FullAttention,
    /// Sliding-window attention, with its own RoPE base and scaling.
    SlidingWindow,
    /// Full attention without RoPE.
    NoRope,
}

impl LayerKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            LayerKind::FullAttention => "global",
            LayerKind::SlidingWindow => "local",
            LayerKind::NoRope => "no_rope",
        }
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        [LayerKind::FullAttention, LayerKind::SlidingWindow, LayerKind::NoRope]
            .into_iter()
            .find(|k| k.name() == name)
    }
}

/// Reads the kind of each of `layers` layers.
pub(super) fn layer_kinds(f: &Fields<'_>, arch: Arch, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    if arch == Arch::Gemma3 {
        return gemma3_layer_kinds(f, layers);
    }
    let full = |layer: &Value| layer.as_str() == Some("full_attention");
    if !f.get("layer_types").is_none_or(|l| l.as_array().is_some_and(|l| l.iter().all(full))) {
        return f.unsupported("layer_types", "\"full_attention\" for every layer");
    }
    if arch == Arch::SmolLm3 {
        smollm3_layer_kinds(f, layers)
    } else {
        Ok(vec![LayerKind::FullAttention; layers])
    }
}

/// Reads a name per layer, or the interval of full-attention layers.
fn gemma3_layer_kinds(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    if f.get("layer_types").is_some() {
        let kind = |t: &Value| match t.as_str()? {
            "full_attention" => Some(LayerKind::FullAttention),
            "sliding_attention" => Some(LayerKind::SlidingWindow),
            _ => None,
        };
        let supported = "\"full_attention\" or \"sliding_attention\" for every layer";
        return f.read_array("layer_types", layers, kind, supported);
    }
    let [name, older] = ["sliding_window_pattern", "_sliding_window_pattern"];
    let interval = f.read_size(if f.get(name).is_some() { name } else { older }, Some(6), 1 << 16)?;
    Ok(every_nth(interval, layers, LayerKind::FullAttention, LayerKind::SlidingWindow))
}

/// Reads a list of 1 (RoPE) and 0 (none), or the interval of layers without RoPE.
fn smollm3_layer_kinds(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    if f.get("no_rope_layers").is_some() {
        let kind = |t: &Value| match t.as_u64()? {
            0 => Some(LayerKind::NoRope),
            1 => Some(LayerKind::FullAttention),
            _ => None,
        };
        return f.read_array("no_rope_layers", layers, kind, "0 or 1 for every layer");
    }
    let interval = f.read_size("no_rope_layer_interval", Some(4), 1 << 16)?;
    Ok(every_nth(interval, layers, LayerKind::NoRope, LayerKind::FullAttention))
}

/// Layers of kind `other`, but every `n`-th of kind `nth`.
fn every_nth(n: usize, layers: usize, nth: LayerKind, other: LayerKind) -> Vec<LayerKind> {
    (1..=layers).map(|layer| if layer.is_multiple_of(n) { nth } else { other }).collect()
}
