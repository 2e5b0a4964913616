//! The mixer of each layer, by the family and the config's fields.

use super::MAX_LAYERS;
use super::arch::Arch;
use super::fields::{ConfigError, Fields};
use serde_json::Value;

/// The mixer of a layer. For attention: which slots it sees, and its position encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// Full attention.
    FullAttention,
    /// Sliding-window attention, with its own RoPE base and scaling.
    SlidingWindow,
    /// Full attention without RoPE.
    NoRope,
    /// A short causal convolution.
    ShortConv,
    /// A gated delta net.
    DeltaNet,
    /// Mamba2.
    Mamba,
    /// Full attention and Mamba2 side by side.
    AttentionMamba,
    /// None: the layer is only a feed-forward.
    FeedForward,
}

impl LayerKind {
    const ALL: [(LayerKind, &str); 8] = [
        (LayerKind::FullAttention, "global"),
        (LayerKind::SlidingWindow, "local"),
        (LayerKind::NoRope, "no_rope"),
        (LayerKind::ShortConv, "conv"),
        (LayerKind::DeltaNet, "delta_net"),
        (LayerKind::Mamba, "mamba"),
        (LayerKind::AttentionMamba, "attention_mamba"),
        (LayerKind::FeedForward, "feed_forward"),
    ];

    /// True for a layer with keys and values.
    pub const fn is_attention(self) -> bool {
        use LayerKind::{AttentionMamba, FullAttention, NoRope, SlidingWindow};
        matches!(self, FullAttention | SlidingWindow | NoRope | AttentionMamba)
    }

    /// True for a layer with a recurrent state.
    pub const fn is_recurrent(self) -> bool {
        matches!(self, LayerKind::ShortConv | LayerKind::DeltaNet) || self.has_mamba()
    }

    /// True for a layer with Mamba2.
    pub const fn has_mamba(self) -> bool {
        matches!(self, LayerKind::Mamba | LayerKind::AttentionMamba)
    }

    /// The name of its mixer in `layer_types`.
    pub(super) fn hf_name(self) -> &'static str {
        match self {
            LayerKind::FullAttention | LayerKind::NoRope | LayerKind::AttentionMamba => FULL.0,
            LayerKind::SlidingWindow => SLIDING.0,
            LayerKind::ShortConv => CONV.0,
            LayerKind::DeltaNet => LINEAR.0,
            LayerKind::Mamba => "mamba",
            LayerKind::FeedForward => "mlp",
        }
    }

    pub(super) fn name(self) -> &'static str {
        Self::ALL.into_iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }

    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(_, known)| *known == name).map(|(kind, _)| kind)
    }
}

/// Reads the kind of each of `layers` layers.
pub(super) fn read_layer_kinds(
    f: &Fields<'_>,
    arch: Arch,
    layers: usize,
) -> Result<Vec<LayerKind>, ConfigError> {
    use LayerKind::{DeltaNet, FullAttention, ShortConv, SlidingWindow};
    let windowed = f.get("sliding_window").is_some();
    match arch {
        Arch::Gemma3 => {
            let n = every_full_layer(f, &["sliding_window_pattern", "_sliding_window_pattern"], 6)?;
            named_kinds(f, layers, &[FULL, SLIDING], every_nth(n, layers, FullAttention, SlidingWindow))
        }
        Arch::Gemma4 => {
            named_kinds(f, layers, &[FULL, SLIDING], every_nth(6, layers, FullAttention, SlidingWindow))
        }
        Arch::Olmo3 => {
            named_kinds(f, layers, &[FULL, SLIDING], every_nth(4, layers, FullAttention, SlidingWindow))
        }
        Arch::GptOss => {
            named_kinds(f, layers, &[FULL, SLIDING], every_nth(2, layers, FullAttention, SlidingWindow))
        }
        Arch::Exaone4 if windowed => exaone4_layer_kinds(f, layers),
        Arch::Qwen35 | Arch::Qwen35Moe => {
            let n = every_full_layer(f, &["full_attention_interval"], 4)?;
            named_kinds(f, layers, &[FULL, LINEAR], every_nth(n, layers, FullAttention, DeltaNet))
        }
        Arch::Lfm2 | Arch::Lfm2Moe if f.get("layer_types").is_none() => lfm2_layer_kinds(f, layers),
        Arch::Lfm2 | Arch::Lfm2Moe | Arch::Lfm3 => {
            let known: &[_] = if arch == Arch::Lfm3 { &[FULL, CONV, SLIDING] } else { &[FULL, CONV] };
            named_kinds(f, layers, known, vec![ShortConv; layers])
        }
        Arch::GraniteMoeHybrid => granite_layer_kinds(f, layers),
        Arch::FalconH1 => Ok(vec![LayerKind::AttentionMamba; layers]),
        Arch::NemotronH => nemotron_layer_kinds(f, layers),
        Arch::Mistral | Arch::Ministral3 if windowed => Ok(vec![SlidingWindow; layers]),
        _ => {
            let kinds = named_kinds(f, layers, &[FULL], vec![FullAttention; layers])?;
            if arch == Arch::SmolLm3 { smollm3_layer_kinds(f, layers) } else { Ok(kinds) }
        }
    }
}

/// Reads the tokens in the window of sliding-window layers; 0 if there are none.
pub(super) fn read_window(f: &Fields<'_>, kinds: &[LayerKind]) -> Result<usize, ConfigError> {
    if kinds.iter().all(|kind| !kind.is_attention()) {
        return f.unsupported("layer_types", "at least one layer with attention");
    }
    if !kinds.contains(&LayerKind::SlidingWindow) {
        return Ok(0);
    }
    if f.0.get("sliding_window").is_some_and(Value::is_null) {
        return f.unsupported("sliding_window", "the length of the window, or no such field");
    }
    f.read_size("sliding_window", Some(4096), 1 << 30)
}

/// Names of mixers in `layer_types`.
const FULL: (&str, LayerKind) = ("full_attention", LayerKind::FullAttention);
const SLIDING: (&str, LayerKind) = ("sliding_attention", LayerKind::SlidingWindow);
const LINEAR: (&str, LayerKind) = ("linear_attention", LayerKind::DeltaNet);
const CONV: (&str, LayerKind) = ("conv", LayerKind::ShortConv);

/// Reads `layer_types`, a name for every layer; `default` if there is no such field.
fn named_kinds(
    f: &Fields<'_>,
    layers: usize,
    known: &[(&str, LayerKind)],
    default: Vec<LayerKind>,
) -> Result<Vec<LayerKind>, ConfigError> {
    if f.get("layer_types").is_none() {
        return Ok(default);
    }
    let kind = |t: &Value| known.iter().find(|(name, _)| t.as_str() == Some(name)).map(|(_, kind)| *kind);
    let names: Vec<_> = known.iter().map(|(name, _)| format!("{name:?}")).collect();
    f.read_array("layer_types", layers, kind, &format!("{} for every layer", names.join(" or ")))
}

/// Reads the interval of full-attention layers from the first of `fields` that is there.
fn every_full_layer(f: &Fields<'_>, fields: &[&str], default: usize) -> Result<usize, ConfigError> {
    let field = fields.iter().find(|field| f.get(field).is_some()).unwrap_or(&fields[0]);
    f.read_size(field, Some(default), 1 << 16)
}

/// Full-attention layers of EXAONE 4 have no RoPE if others have a window.
fn exaone4_layer_kinds(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let pattern = match f.get("sliding_window_pattern") {
        Some(Value::String(pattern)) if !pattern.is_empty() => pattern.len(),
        Some(Value::String(_)) => return f.unsupported("sliding_window_pattern", "such as \"LLLG\", or 4"),
        _ => f.read_size("sliding_window_pattern", Some(4), 1 << 16)?,
    };
    let full = ("full_attention", LayerKind::NoRope);
    let default = every_nth(pattern, layers, LayerKind::NoRope, LayerKind::SlidingWindow);
    named_kinds(f, layers, &[full, SLIDING], default)
}

/// Reads the indices of the attention layers.
fn lfm2_layer_kinds(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    let mut kinds = vec![LayerKind::ShortConv; layers];
    let found = f.get("full_attn_idxs").and_then(Value::as_array);
    for index in found.map_or(&[][..], |all| all) {
        match index.as_u64().and_then(|i| kinds.get_mut(i as usize)) {
            Some(kind) => *kind = LayerKind::FullAttention,
            None => return f.unsupported("full_attn_idxs", &format!("numbers of layers below {layers}")),
        }
    }
    if found.is_some() {
        Ok(kinds)
    } else {
        f.unsupported("layer_types", "\"full_attention\" or \"conv\" for every layer")
    }
}

/// Reads the kinds of Granite 4: attention has RoPE only where the config says so.
fn granite_layer_kinds(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    const FIELD: &str = "position_embedding_type";
    let attention = match f.get(FIELD).map(Value::as_str) {
        Some(Some("rope")) => LayerKind::FullAttention,
        None | Some(Some("nope")) => LayerKind::NoRope,
        Some(_) => return f.unsupported(FIELD, "\"rope\" or \"nope\""),
    };
    let known = [
        ("mamba", LayerKind::Mamba),
        ("attention", attention),
        (LINEAR.0, LayerKind::Mamba),
        (FULL.0, attention),
    ];
    named_kinds(f, layers, &known, vec![LayerKind::Mamba; layers])
}

/// Field of Nemotron-H with a letter for each layer.
const PATTERN: &str = "hybrid_override_pattern";
/// Field of Nemotron-H with a name for each layer, in place of the pattern.
const BLOCK_TYPES: &str = "layers_block_type";

/// Reads the kinds of Nemotron-H from its pattern, or from a list of names.
fn nemotron_layer_kinds(f: &Fields<'_>, layers: usize) -> Result<Vec<LayerKind>, ConfigError> {
    if f.get(BLOCK_TYPES).is_some() {
        let kind = |name: &Value| match name.as_str()? {
            "mamba" | "linear_attention" => Some(LayerKind::Mamba),
            "attention" | "full_attention" => Some(LayerKind::NoRope),
            "mlp" => Some(LayerKind::FeedForward),
            _ => None,
        };
        let supported = format!("\"mamba\", \"attention\" or \"mlp\" for each of {layers} layers");
        return f.read_array(BLOCK_TYPES, layers, kind, &supported);
    }
    let kind = |letter| match letter {
        'M' => Some(LayerKind::Mamba),
        '*' => Some(LayerKind::NoRope),
        '-' => Some(LayerKind::FeedForward),
        _ => None,
    };
    let found = f.get(PATTERN).and_then(Value::as_str);
    let kinds: Option<Vec<LayerKind>> = found.and_then(|pattern| pattern.chars().map(kind).collect());
    match kinds.filter(|kinds| kinds.len() == layers) {
        Some(kinds) => Ok(kinds),
        None => f.unsupported(PATTERN, &format!("M, * or - for each of {layers} layers")),
    }
}

/// Reads the number of layers. Newer configs of Nemotron-H leave it to the list of them.
pub(super) fn read_layer_count(f: &Fields<'_>, arch: Arch) -> Result<usize, ConfigError> {
    let default = match arch {
        Arch::Gemma3 => Some(26),
        Arch::NemotronH => {
            let names = f.get(BLOCK_TYPES).and_then(Value::as_array).map(Vec::len);
            let letters = f.get(PATTERN).and_then(Value::as_str).map(|pattern| pattern.chars().count());
            names.or(letters).filter(|layers| (1..=MAX_LAYERS).contains(layers))
        }
        _ => None,
    };
    f.read_size(arch.field_name("num_hidden_layers"), default, MAX_LAYERS)
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
