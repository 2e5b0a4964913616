//! What distinguishes the model families, as switches: which norms, positions, activations, scales and kinds of layers
//! a family has, and which names and defaults its `config.json` gives them.

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
    /// All of them.
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

    /// The names of all, for errors.
    pub fn names(name: impl Fn(Arch) -> &'static str) -> String {
        Self::ALL.map(|arch| format!("{:?}", name(arch))).join(", ")
    }

    /// Whether the output head is the embedding where nothing says so.
    pub(super) fn ties(self) -> bool {
        matches!(self, Arch::SmolLm3 | Arch::Gemma3 | Arch::Gpt2)
    }

    /// Its name for a field of Llama's config.
    pub(crate) fn field(self, name: &'static str) -> &'static str {
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

    /// Its name for the epsilon of norms.
    pub(crate) fn epsilon_field(self) -> &'static str {
        self.field("rms_norm_eps")
    }

    /// What that is where nothing says so.
    pub(super) fn epsilon(self) -> f64 {
        if matches!(self, Arch::Phi3 | Arch::Gpt2) { 1e-5 } else { 1e-6 }
    }

    /// The activation functions that its config may name.
    pub(super) fn activations(self) -> &'static [&'static str] {
        match self {
            Arch::Gemma3 => &["gelu_pytorch_tanh"],
            Arch::Gpt2 => &["gelu_new", "gelu_pytorch_tanh"],
            _ => &["silu", "swish"],
        }
    }
}

/// How a layer's input is normed.
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

/// What a layer's attention sees, and how it knows positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Every slot up to its own.
    Global,
    /// The slots of a window that ends with its own; RoPE has another base and scaling.
    Local,
    /// Every slot; queries and keys are not rotated.
    NoRope,
}

impl LayerKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            LayerKind::Global => "global",
            LayerKind::Local => "local",
            LayerKind::NoRope => "no_rope",
        }
    }

    pub(super) fn of(name: &str) -> Option<Self> {
        [LayerKind::Global, LayerKind::Local, LayerKind::NoRope].into_iter().find(|k| k.name() == name)
    }
}

/// The kind of each of `layers` layers.
pub(super) fn layer_kinds(f: &Fields<'_>, arch: Arch, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    if arch == Arch::Gemma3 {
        return of_gemma3(f, layers);
    }
    let full = |layer: &Value| layer.as_str() == Some("full_attention");
    if !f.present("layer_types").is_none_or(|l| l.as_array().is_some_and(|l| l.iter().all(full))) {
        return f.err("layer_types", "\"full_attention\" for every layer");
    }
    if arch == Arch::SmolLm3 { of_smollm3(f, layers) } else { Ok(vec![LayerKind::Global; layers]) }
}

/// By name, or each so many layers one that is global.
fn of_gemma3(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let Some(types) = f.present("layer_types") else {
        let name = if f.present("sliding_window_pattern").is_some() {
            "sliding_window_pattern"
        } else {
            "_sliding_window_pattern"
        };
        let pattern = f.size(name, Some(6), 1 << 16)?;
        let kind =
            |i: usize| if (i + 1).is_multiple_of(pattern) { LayerKind::Global } else { LayerKind::Local };
        return Ok((0..layers).map(kind).collect());
    };
    let kind = |t: &Value| match t.as_str() {
        Some("full_attention") => Some(LayerKind::Global),
        Some("sliding_attention") => Some(LayerKind::Local),
        _ => None,
    };
    let kinds: Option<Vec<_>> = types.as_array().and_then(|types| types.iter().map(kind).collect());
    match kinds.filter(|kinds| kinds.len() == layers) {
        Some(kinds) => Ok(kinds),
        None => f.err("layer_types", "\"full_attention\" or \"sliding_attention\" for every layer"),
    }
}

/// By a list of 1 (RoPE) and 0 (none), or each so many layers one without.
fn of_smollm3(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let Some(list) = f.present("no_rope_layers") else {
        let interval = f.size("no_rope_layer_interval", Some(4), 1 << 16)?;
        let kind =
            |i: usize| if (i + 1).is_multiple_of(interval) { LayerKind::NoRope } else { LayerKind::Global };
        return Ok((0..layers).map(kind).collect());
    };
    let kind = |t: &Value| match t.as_u64() {
        Some(0) => Some(LayerKind::NoRope),
        Some(1) => Some(LayerKind::Global),
        _ => None,
    };
    let kinds: Option<Vec<_>> = list.as_array().and_then(|list| list.iter().map(kind).collect());
    match kinds.filter(|kinds| kinds.len() == layers) {
        Some(kinds) => Ok(kinds),
        None => f.err("no_rope_layers", "0 or 1 for every layer"),
    }
}
