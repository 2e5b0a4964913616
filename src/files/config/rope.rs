//! RoPE: the base, how much of a head is rotated, and how frequencies are scaled for long contexts.

use super::families::Arch;
use super::fields::{ConfigError, Fields};
use crate::error::unquoted;
use serde_json::{Map, Value};
use std::f64::consts::TAU;

/// How RoPE frequencies are scaled for long contexts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    Plain,
    /// Llama 3.1's piecewise scaling (`rope_type: "llama3"`).
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_position: usize,
    },
    /// Each pair's frequency is divided by a number of its own: as in GGUF files, by one factor, as YaRN blends them.
    Divisors(&'static [f32]),
}

impl RopeScaling {
    /// What the `frequency` (radians per position) of pair `i` is multiplied by.
    ///
    /// Llama 3.1: wavelengths up to `original / high` stay, those beyond `original / low` are stretched by `factor`,
    /// those between are blended.
    pub fn multiplier(self, i: usize, frequency: f64) -> f64 {
        match self {
            RopeScaling::Plain => 1.0,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let turns = original_max_position as f64 * frequency / TAU;
                let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let smooth = smooth.clamp(0.0, 1.0);
                (1.0 - smooth) / factor + smooth
            }
            RopeScaling::Divisors(divisors) => 1.0 / f64::from(divisors[i]),
        }
    }

    /// The divisors, leaked: a few hundred bytes for each file that has them.
    pub fn divisors(divisors: Vec<f32>) -> Self {
        RopeScaling::Divisors(divisors.leak())
    }
}

/// Other divisors for long sequences (LongRoPE).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LongRope {
    /// For each pair.
    pub divisors: &'static [f32],
    /// Sequences longer than this have them.
    pub beyond: usize,
}

/// RoPE of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Elements of a head that are rotated, the first ones: pairs of `i` and `i + dim / 2`. None where positions are
    /// learned.
    pub dim: usize,
    pub theta: f64,
    pub scaling: RopeScaling,
    pub long: Option<LongRope>,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f64,
    /// The base in local layers.
    pub local_theta: f64,
    /// How their frequencies are scaled.
    pub local_scaling: RopeScaling,
    /// What their cosines and sines are multiplied by.
    pub local_attention_factor: f64,
}

impl Rope {
    /// RoPE of local layers.
    pub fn local(&self) -> Self {
        Self {
            theta: self.local_theta,
            scaling: self.local_scaling,
            long: None,
            attention_factor: self.local_attention_factor,
            ..*self
        }
    }

    /// The unscaled frequency of pair `i`, in radians per position.
    pub fn frequency(&self, i: usize) -> f64 {
        self.theta.powf(-2.0 * i as f64 / self.dim as f64)
    }

    /// Whether all pairs are scaled alike, to the accuracy of a GGUF file's f32 divisors.
    pub fn scales_like(&self, other: &Self) -> bool {
        let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-5;
        let multiplier = |rope: &Self, i| rope.scaling.multiplier(i, self.frequency(i));
        let table = |scaling| matches!(scaling, RopeScaling::Divisors(_));
        let same_scaling = self.scaling == other.scaling
            || self.dim == other.dim
                && (table(self.scaling) || table(other.scaling))
                && (0..self.dim / 2).all(|i| near(multiplier(self, i), multiplier(other, i)));
        let same_long = match (self.long, other.long) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                a.beyond == b.beyond
                    && a.divisors.len() == b.divisors.len()
                    && a.divisors.iter().zip(b.divisors).all(|(a, b)| near(f64::from(*a), f64::from(*b)))
            }
            _ => false,
        };
        same_scaling && same_long && near(self.attention_factor, other.attention_factor)
    }
}

/// One object that describes RoPE, and its name for messages.
struct Part {
    name: String,
    fields: Map<String, Value>,
}

/// RoPE from `rope_parameters` (newer files) or from `rope_theta` and `rope_scaling`.
pub(super) fn parse(f: &Fields<'_>, arch: Arch, head_dim: usize) -> Result<Rope, ConfigError> {
    let (full, local) = parts(f, arch)?;
    let theta = |part: &Part, field: &str, default: f64| {
        let inner = Fields(&part.fields);
        let own = inner.present("rope_theta").is_some();
        if own { inner.float("rope_theta", None) } else { f.float(field, Some(default)) }
    };
    let default = match arch {
        Arch::Gemma3 => 1e6,
        Arch::SmolLm3 => 2e6,
        _ => 10_000.0,
    };
    let mut rope = Rope {
        dim: rotated(f, &Fields(&full.fields), arch, head_dim)?,
        theta: theta(&full, "rope_theta", default)?,
        scaling: RopeScaling::Plain,
        long: None,
        attention_factor: 1.0,
        local_theta: theta(&local, "rope_local_base_freq", 10_000.0)?,
        local_scaling: RopeScaling::Plain,
        local_attention_factor: 1.0,
    };
    let mut of_local = rope.local();
    scale(f, &full, &mut rope)?;
    scale(f, &local, &mut of_local)?;
    if of_local.long.is_some() {
        return Err(ConfigError::new(local.name, "of type \"longrope\"", "one scaling for all lengths"));
    }
    rope.local_scaling = of_local.scaling;
    rope.local_attention_factor = of_local.attention_factor;
    Ok(rope)
}

/// What describes full layers, and what describes local ones. As in transformers, `rope_scaling` takes the place of
/// `rope_parameters`; in Gemma 3, whose newer files have an object for each kind of layer, it adds to that of full layers.
fn parts(f: &Fields<'_>, arch: Arch) -> Result<(Part, Part), ConfigError> {
    const NEW: &str = "rope_parameters";
    const OLD: &str = "rope_scaling";
    let object = |f: &Fields<'_>, field: &str| match f.present(field) {
        None => Ok(Map::new()),
        Some(Value::Object(map)) => Ok(map.clone()),
        Some(_) => f.err(field, "an object or null"),
    };
    let (old, new) = (object(f, OLD)?, object(f, NEW)?);
    let part = |name: &str, fields| Part { name: name.into(), fields };
    let kinds = ["full_attention", "sliding_attention"];
    let nested = kinds.iter().any(|kind| new.contains_key(*kind));
    if arch != Arch::Gemma3 && (!nested || !old.is_empty()) {
        let only = if old.is_empty() { part(NEW, new) } else { part(OLD, old) };
        return Ok((only, part(NEW, Map::new())));
    }
    if !nested && !new.is_empty() {
        return f.err(NEW, "an object with full_attention and sliding_attention");
    }
    let [mut full, local] = kinds.map(|kind| {
        let named = |e: ConfigError| ConfigError { field: format!("{NEW}.{kind}"), ..e };
        object(&Fields(&new), kind).map(|fields| part(&format!("{NEW}.{kind}"), fields)).map_err(named)
    });
    if let Ok(full) = &mut full
        && !old.is_empty()
    {
        // Its own spelling of the type counts.
        full.fields.remove("rope_type");
        full.fields.extend(old);
        full.name = OLD.into();
    }
    Ok((full?, local?))
}

/// Scales frequencies as an object says.
fn scale(f: &Fields<'_>, part: &Part, rope: &mut Rope) -> Result<(), ConfigError> {
    let named = |e: ConfigError| ConfigError { field: format!("{}.{}", part.name, e.field), ..e };
    let inner = Fields(&part.fields);
    let kind = inner.present("rope_type").or_else(|| inner.present("type"));
    match kind.map(Value::as_str) {
        None | Some(Some("default")) => {}
        Some(Some("llama3")) => rope.scaling = llama3(&inner).map_err(named)?,
        Some(Some("linear")) => {
            let factor = inner.float("factor", None).map_err(named)?;
            rope.scaling = RopeScaling::divisors(vec![factor as f32; rope.dim / 2]);
        }
        Some(Some("yarn")) => yarn(f, &inner, rope).map_err(named)?,
        Some(Some("longrope" | "su")) => longrope(f, &inner, rope).map_err(named)?,
        Some(_) => {
            let value = Value::Object(part.fields.clone()).to_string();
            let supported = "rope_type \"default\", \"llama3\", \"linear\", \"yarn\" or \"longrope\"";
            return Err(ConfigError::new(&part.name, unquoted(&value), supported));
        }
    }
    Ok(())
}

/// Elements of a head that are rotated.
fn rotated(f: &Fields<'_>, inner: &Fields<'_>, arch: Arch, head_dim: usize) -> Result<usize, ConfigError> {
    if arch == Arch::Gpt2 {
        return Ok(0);
    }
    let name = "partial_rotary_factor";
    let fields = if inner.present(name).is_some() { inner } else { f };
    let part = fields.float(name, Some(1.0))?;
    let rotated = (head_dim as f64 * part) as usize;
    if part != 1.0 && arch != Arch::Phi3 {
        return fields.err(name, "1.0");
    }
    if part > 1.0 || rotated == 0 || !rotated.is_multiple_of(2) {
        return fields.err(name, "a part of a head that is an even number of elements");
    }
    Ok(rotated)
}

fn llama3(f: &Fields<'_>) -> Result<RopeScaling, ConfigError> {
    let (low_freq_factor, high_freq_factor) =
        (f.float("low_freq_factor", None)?, f.float("high_freq_factor", None)?);
    let factor = f.float("factor", None)?;
    let original_max_position = f.size("original_max_position_embeddings", None, 1 << 30)?;
    if low_freq_factor >= high_freq_factor {
        return f.err("high_freq_factor", "more than low_freq_factor");
    }
    Ok(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position })
}

/// YaRN (<https://arxiv.org/abs/2309.00071>): pairs that turn more than `beta_fast` times within the original context
/// stay, those that turn less than `beta_slow` times are slowed down by `factor`, those between are blended.
fn yarn(f: &Fields<'_>, inner: &Fields<'_>, rope: &mut Rope) -> Result<(), ConfigError> {
    let factor = inner.float("factor", None)?;
    let ramp = YarnRamp {
        factor,
        original: original_context(f, inner)?,
        beta_fast: inner.float("beta_fast", Some(32.0))?,
        beta_slow: inner.float("beta_slow", Some(1.0))?,
        truncate: inner.flag("truncate", true)?,
    };
    rope.scaling = ramp.divisors(rope);
    let mscale = |field: &str| {
        let given = inner.present(field).is_some_and(|value| value.as_f64() != Some(0.0));
        if given { inner.float(field, None).map(Some) } else { Ok(None) }
    };
    // As in transformers, one of the two alone says nothing.
    let attention = match (mscale("mscale")?, mscale("mscale_all_dim")?) {
        (Some(mscale), Some(all)) => yarn_attention(factor, mscale) / yarn_attention(factor, all),
        _ => yarn_attention(factor, 1.0),
    };
    rope.attention_factor = inner.float("attention_factor", Some(attention))?;
    Ok(())
}

/// The pairs between those that YaRN leaves and those that it slows down by `factor`.
struct YarnRamp {
    factor: f64,
    /// The context that the model was trained for.
    original: usize,
    /// Turns within it, of the first pair that is slowed down and of the first that is in full.
    beta_fast: f64,
    beta_slow: f64,
    /// The ramp begins and ends at whole pairs.
    truncate: bool,
}

impl YarnRamp {
    fn divisors(&self, rope: &Rope) -> RopeScaling {
        let d = rope.dim as f64;
        // The pair that turns so many times within the original context.
        let pair = |turns: f64| d * (self.original as f64 / (TAU * turns)).ln() / (2.0 * rope.theta.ln());
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (low.floor(), high.ceil()) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(d - 1.0));
        let high = if high == low { low + 0.001 } else { high };
        let divisor = |i: usize| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (1.0 / (ramp / self.factor + 1.0 - ramp)) as f32
        };
        RopeScaling::divisors((0..rope.dim / 2).map(divisor).collect())
    }
}

/// What YaRN multiplies cosines and sines by.
pub fn yarn_attention(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// LongRoPE (<https://arxiv.org/abs/2402.13753>): divisors for short sequences, others for long ones.
fn longrope(f: &Fields<'_>, inner: &Fields<'_>, rope: &mut Rope) -> Result<(), ConfigError> {
    let beyond = original_context(f, inner)?;
    let [short, long] = ["short_factor", "long_factor"].map(|name| divisors(inner, name, rope.dim / 2));
    rope.scaling = RopeScaling::divisors(short?);
    rope.long = Some(LongRope { divisors: long?.leak(), beyond });
    let most = f.size("max_position_embeddings", Some(beyond), 1 << 30)?;
    let factor = inner.float("factor", Some(most as f64 / beyond as f64))?;
    let attention = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / (beyond as f64).ln()).sqrt() };
    rope.attention_factor = inner.float("attention_factor", Some(attention))?;
    Ok(())
}

/// The context that the model was trained for before it was stretched.
fn original_context(f: &Fields<'_>, inner: &Fields<'_>) -> Result<usize, ConfigError> {
    let name = "original_max_position_embeddings";
    let fields = if inner.present(name).is_some() { inner } else { f };
    let default = f.size("max_position_embeddings", None, 1 << 30).ok();
    let original = fields.size(name, default, 1 << 30)?;
    if original < 2 { fields.err(name, "2 or more") } else { Ok(original) }
}

/// A positive number for each of `pairs` pairs.
pub(super) fn divisors(f: &Fields<'_>, name: &str, pairs: usize) -> Result<Vec<f32>, ConfigError> {
    let usable = |x: &Value| x.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
    let found: Option<Vec<f32>> =
        f.present(name).and_then(Value::as_array).and_then(|a| a.iter().map(usable).collect());
    match found.filter(|d| d.len() == pairs) {
        Some(divisors) => Ok(divisors),
        None => f.err(name, "a positive number for each pair of a head"),
    }
}
