//! RoPE: its base, the rotated part of a head, and the scaling of frequencies for long contexts.

use super::QueryGrowth;
use super::arch::Arch;
use super::fields::{ConfigError, Fields, positive_float};
use crate::error::escape;
use serde_json::{Map, Value};
use std::f64::consts::TAU;

/// The scaling of RoPE frequencies for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    Unscaled,
    /// Llama 3.1's piecewise scaling (`rope_type: "llama3"`).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: usize,
    },
    /// One divisor per pair: from a GGUF file, linear scaling or YaRN.
    Divisors(&'static [f32]),
}

impl RopeScaling {
    /// Factor of the `frequency` (radians per position) of pair `i`.
    ///
    /// Llama 3.1: wavelengths up to `original / high` stay, those beyond `original / low` are stretched by `factor`,
    /// those between are interpolated.
    pub fn frequency_multiplier(self, i: usize, frequency: f64) -> f64 {
        match self {
            RopeScaling::Unscaled => 1.0,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let turns = original_max_position as f64 * frequency / TAU;
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let smooth = smooth.clamp(0.0, 1.0);
                (1.0 - smooth) / factor + smooth
            }
            RopeScaling::Divisors(divisors) => 1.0 / f64::from(divisors[i]),
        }
    }

    /// Scaling by these divisors. They are leaked: a few hundred bytes for each file that has them.
    pub fn from_divisors(divisors: Vec<f32>) -> Self {
        RopeScaling::Divisors(divisors.leak())
    }
}

/// Other divisors for long sequences (LongRoPE).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LongRope {
    /// One per pair.
    pub divisors: &'static [f32],
    /// Sequences longer than this, in tokens, use these divisors.
    pub original_context: usize,
}

/// RoPE of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Number of leading elements of a head that are rotated, in pairs of `i` and `i + dim / 2`; 0 if position
    /// embeddings are learned.
    pub dim: usize,
    pub theta: f64,
    pub scaling: RopeScaling,
    pub long: Option<LongRope>,
    /// Factor of cosines and sines.
    pub attention_factor: f64,
    /// `dim` of sliding-window layers.
    pub local_dim: usize,
    /// `theta` of sliding-window layers.
    pub local_theta: f64,
    /// `scaling` of sliding-window layers.
    pub local_scaling: RopeScaling,
    /// `attention_factor` of sliding-window layers.
    pub local_attention_factor: f64,
}

impl Rope {
    /// RoPE of sliding-window layers.
    pub fn for_sliding_window(&self) -> Self {
        Self {
            dim: self.local_dim,
            theta: self.local_theta,
            scaling: self.local_scaling,
            long: None,
            attention_factor: self.local_attention_factor,
            ..*self
        }
    }

    /// With the same RoPE in sliding-window layers, unless theirs is another in this family.
    pub fn shared_by_layers_of(self, arch: Arch) -> Self {
        if arch.has_local_rope() {
            return self;
        }
        Self {
            local_theta: self.theta,
            local_scaling: self.scaling,
            local_attention_factor: self.attention_factor,
            ..self
        }
    }

    /// The unscaled frequency of pair `i`, in radians per position.
    pub fn base_frequency(&self, i: usize) -> f64 {
        self.theta.powf(-2.0 * i as f64 / self.dim as f64)
    }

    /// Returns true if both scale every pair alike, within the accuracy of a GGUF file's f32 divisors.
    pub fn scales_like(&self, other: &Self) -> bool {
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-5;
        let multiplier = |rope: &Self, i| rope.scaling.frequency_multiplier(i, self.base_frequency(i));
        let table = |scaling| matches!(scaling, RopeScaling::Divisors(_));
        let same_scaling = self.scaling == other.scaling
            || self.dim == other.dim
                && (table(self.scaling) || table(other.scaling))
                && (0..self.dim / 2).all(|i| near(multiplier(self, i), multiplier(other, i)));
        let same_long = match (self.long, other.long) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                a.original_context == b.original_context
                    && a.divisors.len() == b.divisors.len()
                    && a.divisors.iter().zip(b.divisors).all(|(a, b)| near(f64::from(*a), f64::from(*b)))
            }
            _ => false,
        };
        same_scaling && same_long && near(self.attention_factor, other.attention_factor)
    }
}

/// A JSON object with RoPE parameters, and its name for messages.
struct RopeObject {
    name: String,
    fields: Map<String, Value>,
}

/// Reads RoPE from `rope_parameters` (newer files) or from `rope_theta` and `rope_scaling`.
pub(super) fn read_rope(
    f: &Fields<'_>,
    arch: Arch,
    (head_dim, local_head_dim): (usize, usize),
) -> Result<Rope, ConfigError> {
    let (full, local) = find_objects(f, arch)?;
    let theta = |object: &RopeObject, field: &str, default: f64| {
        let inner = Fields(&object.fields);
        let own = inner.get("rope_theta").is_some();
        if own { inner.read_float("rope_theta", None) } else { f.read_float(field, Some(default)) }
    };
    let dim = rotated_dim(f, &Fields(&full.fields), arch, head_dim)?;
    let mut rope = Rope {
        dim,
        local_dim: if local_head_dim == head_dim { dim } else { local_head_dim },
        theta: theta(&full, "rope_theta", arch.family().rope_theta)?,
        scaling: RopeScaling::Unscaled,
        long: None,
        attention_factor: 1.0,
        local_theta: theta(&local, "rope_local_base_freq", 10_000.0)?,
        local_scaling: RopeScaling::Unscaled,
        local_attention_factor: 1.0,
    };
    let mut local_rope = rope.for_sliding_window();
    apply_scaling(f, &full, &mut rope)?;
    apply_scaling(f, &local, &mut local_rope)?;
    if local_rope.long.is_some() {
        return Err(ConfigError::new(local.name, "of type \"longrope\"", "one scaling for all lengths"));
    }
    if arch == Arch::Olmo3 {
        // Without scaling.
        local_rope.theta = rope.theta;
    }
    rope.local_theta = local_rope.theta;
    rope.local_scaling = local_rope.scaling;
    rope.local_attention_factor = local_rope.attention_factor;
    Ok(rope.shared_by_layers_of(arch))
}

/// Finds the RoPE parameters of full-attention layers and those of sliding-window layers.
///
/// As in transformers, `rope_scaling` replaces `rope_parameters`. In Gemma 3, whose newer files have an object for each
/// kind of layer, it overrides fields of the object for full-attention layers.
fn find_objects(f: &Fields<'_>, arch: Arch) -> Result<(RopeObject, RopeObject), ConfigError> {
    const NEW: &str = "rope_parameters";
    const OLD: &str = "rope_scaling";
    let object = |f: &Fields<'_>, field: &str| match f.get(field) {
        None => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map.clone()),
        Some(_) => f.unsupported(field, "an object or null"),
    };
    let (old, new) = (object(f, OLD)?, object(f, NEW)?);
    let named = |name: &str, fields| RopeObject { name: name.into(), fields };
    let kinds = ["full_attention", "sliding_attention"];
    let nested = kinds.iter().any(|kind| new.contains_key(*kind));
    if arch != Arch::Gemma3 && (!nested || !old.is_empty()) {
        let only = if old.is_empty() { named(NEW, new) } else { named(OLD, old) };
        return Ok((only, named(NEW, Map::new())));
    }
    if !nested && !new.is_empty() {
        return f.unsupported(NEW, "an object with full_attention and sliding_attention");
    }
    let [mut full, local] = kinds.map(|kind| {
        let name = format!("{NEW}.{kind}");
        match object(&Fields(&new), kind) {
            Ok(fields) => Ok(named(&name, fields)),
            Err(e) => Err(ConfigError { field: name, ..e }),
        }
    });
    if let Ok(full) = &mut full
        && !old.is_empty()
    {
        // `rope_scaling` may spell it `type`, and wins.
        full.fields.remove("rope_type");
        full.fields.extend(old);
        full.name = OLD.into();
    }
    Ok((full?, local?))
}

/// Sets the scaling that an object describes.
fn apply_scaling(f: &Fields<'_>, object: &RopeObject, rope: &mut Rope) -> Result<(), ConfigError> {
    let named = |e: ConfigError| ConfigError { field: format!("{}.{}", object.name, e.field), ..e };
    let inner = Fields(&object.fields);
    let kind = rope_type(&inner);
    match kind.map(Value::as_str) {
        None | Some(Some("default")) => {}
        Some(Some("llama3")) => rope.scaling = read_llama3(&inner).map_err(named)?,
        Some(Some("linear")) => {
            let factor = inner.read_float("factor", None).map_err(named)?;
            rope.scaling = RopeScaling::from_divisors(vec![factor as f32; rope.dim / 2]);
        }
        Some(Some("yarn")) => apply_yarn(f, &inner, rope).map_err(named)?,
        Some(Some("longrope" | "su")) => apply_longrope(f, &inner, rope).map_err(named)?,
        Some(Some("proportional")) => apply_proportional(&inner, rope).map_err(named)?,
        // Of Hunyuan: a fixed base for all lengths.
        Some(Some("dynamic")) if inner.get("alpha").is_some() => {
            let alpha = inner.read_float("alpha", None).map_err(named)?;
            let width = rope.dim as f64;
            rope.theta *= alpha.powf(width / (width - 2.0).max(1.0));
        }
        Some(_) => {
            let value = Value::Object(object.fields.clone()).to_string();
            let supported =
                "rope_type \"default\", \"llama3\", \"linear\", \"yarn\", \"longrope\" or \"proportional\"";
            return Err(ConfigError::new(&object.name, escape(&value), supported));
        }
    }
    Ok(())
}

/// The kind of scaling, by its newer or its older name.
fn rope_type<'a>(inner: &'a Fields<'_>) -> Option<&'a Value> {
    inner.get("rope_type").or_else(|| inner.get("type"))
}

/// Number of elements of a head that are rotated.
fn rotated_dim(
    f: &Fields<'_>,
    inner: &Fields<'_>,
    arch: Arch,
    head_dim: usize,
) -> Result<usize, ConfigError> {
    if arch == Arch::Gpt2 {
        return Ok(0);
    }
    let name = "partial_rotary_factor";
    let fields = if inner.get(name).is_some() { inner } else { f };
    let proportional = rope_type(inner).and_then(Value::as_str) == Some("proportional");
    let default = if arch.is_qwen35() { 0.25 } else { 1.0 };
    let part = if proportional { 1.0 } else { fields.read_float(name, Some(default))? };
    let rotated = (head_dim as f64 * part) as usize;
    if part != 1.0 && arch != Arch::Phi3 && !arch.is_qwen35() {
        return fields.unsupported(name, "1.0");
    }
    if part > 1.0 || rotated == 0 || !rotated.is_multiple_of(2) {
        return fields.unsupported(name, "a fraction of a head that is an even number of elements");
    }
    Ok(rotated)
}

/// Applies a partial rotation whose pairs span the whole head: only the first ones turn.
fn apply_proportional(inner: &Fields<'_>, rope: &mut Rope) -> Result<(), ConfigError> {
    let part = inner.read_float("partial_rotary_factor", Some(1.0))?;
    if part > 1.0 {
        return inner.unsupported("partial_rotary_factor", "a number up to 1");
    }
    let turning = (part * rope.dim as f64 / 2.0) as usize;
    if turning < rope.dim / 2 {
        let divisor = |i| if i < turning { 1.0 } else { NO_ROTATION };
        rope.scaling = RopeScaling::from_divisors((0..rope.dim / 2).map(divisor).collect());
    }
    Ok(())
}

/// Divisor of pairs that don't turn, as in GGUF files.
const NO_ROTATION: f32 = 1e30;

/// Reads the growth of queries with their position.
pub(super) fn read_query_growth(f: &Fields<'_>) -> Result<Option<QueryGrowth>, ConfigError> {
    let mut objects =
        ["rope_scaling", "rope_parameters"].into_iter().filter_map(|name| f.get(name)?.as_object());
    let Some(object) = objects.find(|object| !object.is_empty()) else { return Ok(None) };
    let inner = Fields(object);
    if inner.get("llama_4_scaling_beta").is_none() {
        return Ok(None);
    }
    let beta = inner.read_float("llama_4_scaling_beta", None)?;
    Ok(Some(QueryGrowth { beta, original_context: original_context(f, &inner)? }))
}

fn read_llama3(f: &Fields<'_>) -> Result<RopeScaling, ConfigError> {
    let (low_freq_factor, high_freq_factor) =
        (f.read_float("low_freq_factor", None)?, f.read_float("high_freq_factor", None)?);
    let factor = f.read_float("factor", None)?;
    let original_max_position = f.read_size("original_max_position_embeddings", None, 1 << 30)?;
    if low_freq_factor >= high_freq_factor {
        return f.unsupported("high_freq_factor", "more than low_freq_factor");
    }
    Ok(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position })
}

/// Applies YaRN (<https://arxiv.org/abs/2309.00071>): pairs that turn more than `beta_fast` times within the original
/// context stay, those that turn less than `beta_slow` times are slowed down by `factor`, those between are
/// interpolated.
fn apply_yarn(f: &Fields<'_>, inner: &Fields<'_>, rope: &mut Rope) -> Result<(), ConfigError> {
    let factor = inner.read_float("factor", None)?;
    let ramp = YarnRamp {
        factor,
        original: original_context(f, inner)?,
        beta_fast: inner.read_float("beta_fast", Some(32.0))?,
        beta_slow: inner.read_float("beta_slow", Some(1.0))?,
        truncate: inner.read_bool("truncate", true)?,
    };
    rope.scaling = ramp.compute_divisors(rope);
    let mscale = |field: &str| {
        let given = inner.get(field).is_some_and(|value| value.as_f64() != Some(0.0));
        if given { inner.read_float(field, None).map(Some) } else { Ok(None) }
    };
    // As in transformers, one of the two alone has no effect.
    let attention = match (mscale("mscale")?, mscale("mscale_all_dim")?) {
        (Some(mscale), Some(all)) => {
            yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all)
        }
        _ => yarn_attention_factor(factor, 1.0),
    };
    rope.attention_factor = inner.read_float("attention_factor", Some(attention))?;
    Ok(())
}

/// YaRN's ramp between unscaled pairs and pairs slowed down by `factor`.
struct YarnRamp {
    factor: f64,
    /// The context that the model was trained for, in tokens.
    original: usize,
    /// Turns within it of the pair at which the ramp begins.
    beta_fast: f64,
    /// Turns within it of the pair at which the ramp ends.
    beta_slow: f64,
    /// Rounds both ends of the ramp to whole pairs.
    truncate: bool,
}

impl YarnRamp {
    fn compute_divisors(&self, rope: &Rope) -> RopeScaling {
        let d = rope.dim as f64;
        // Pair (a fraction) that turns `turns` times within the original context.
        let pair = |turns: f64| d * (self.original as f64 / (TAU * turns)).ln() / (2.0 * rope.theta.ln());
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(d - 1.0));
        let high = if high == low { low + 0.001 } else { high };
        let divisor = |i: usize| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / (ramp / self.factor + 1.0 - ramp)) as f32
        };
        RopeScaling::from_divisors((0..rope.dim / 2).map(divisor).collect())
    }
}

/// YaRN's factor of cosines and sines.
pub fn yarn_attention_factor(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// Applies LongRoPE (<https://arxiv.org/abs/2402.13753>): divisors for short sequences, others for long ones.
fn apply_longrope(f: &Fields<'_>, inner: &Fields<'_>, rope: &mut Rope) -> Result<(), ConfigError> {
    let beyond = original_context(f, inner)?;
    let [short, long] = ["short_factor", "long_factor"].map(|name| read_divisors(inner, name, rope.dim / 2));
    rope.scaling = RopeScaling::from_divisors(short?);
    rope.long = Some(LongRope { divisors: long?.leak(), original_context: beyond });
    let max_position = f.read_size("max_position_embeddings", Some(beyond), 1 << 30)?;
    let factor = inner.read_float("factor", Some(max_position as f64 / beyond as f64))?;
    let attention = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (beyond as f64).ln()).sqrt() };
    rope.attention_factor = inner.read_float("attention_factor", Some(attention))?;
    Ok(())
}

/// The context that the model was trained for before it was extended, in tokens.
fn original_context(f: &Fields<'_>, inner: &Fields<'_>) -> Result<usize, ConfigError> {
    let name = "original_max_position_embeddings";
    let fields = if inner.get(name).is_some() { inner } else { f };
    let default = f.read_size("max_position_embeddings", None, 1 << 30).ok();
    let original = fields.read_size(name, default, 1 << 30)?;
    if original < 2 { fields.unsupported(name, "2 or more") } else { Ok(original) }
}

/// Reads a positive number for each of `pairs` pairs.
pub(super) fn read_divisors(f: &Fields<'_>, name: &str, pairs: usize) -> Result<Vec<f32>, ConfigError> {
    let divisor = |x: &Value| positive_float(x).map(|x| x as f32);
    f.read_array(name, pairs, divisor, "a positive number for each pair of a head")
}
