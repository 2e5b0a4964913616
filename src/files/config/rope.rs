//! RoPE: the base, how much of a head is rotated, and how frequencies are scaled for long contexts.

use super::families::Arch;
use super::fields::{ConfigError, Fields};
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
}

impl Rope {
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

/// RoPE from `rope_parameters` (newer files) or from `rope_theta` and `rope_scaling`.
pub(super) fn parse(f: &Fields<'_>, arch: Arch, head_dim: usize) -> Result<Rope, ConfigError> {
    let field = if f.present("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let named = |e: ConfigError| ConfigError { field: format!("{field}.{}", e.field), ..e };
    let empty = Map::new();
    let mut inner = match f.present(field) {
        None => &empty,
        Some(Value::Object(map)) => map,
        Some(_) => return f.err(field, "an object or null"),
    };
    // Newer files of Gemma 3 have one object for each kind of layer.
    let mut local_theta = f.float("rope_local_base_freq", Some(10_000.0))?;
    if let (Some(Value::Object(global)), Some(Value::Object(local))) =
        (inner.get("full_attention"), inner.get("sliding_attention"))
    {
        local_theta = Fields(local).float("rope_theta", Some(local_theta))?;
        inner = global;
    }
    let inner = Fields(inner);
    let theta = if inner.present("rope_theta").is_some() { &inner } else { f };
    let default = if arch == Arch::Gemma3 { 1e6 } else { 10_000.0 };
    let theta = theta.float("rope_theta", Some(default))?;
    let dim = rotated(f, &inner, arch, head_dim)?;
    let mut rope =
        Rope { dim, theta, scaling: RopeScaling::Plain, long: None, attention_factor: 1.0, local_theta };
    let kind = inner.present("rope_type").or_else(|| inner.present("type"));
    match kind.map(Value::as_str) {
        None | Some(Some("default")) => {}
        Some(Some("llama3")) => rope.scaling = llama3(&inner).map_err(named)?,
        Some(Some("linear")) => {
            let factor = inner.float("factor", None).map_err(named)?;
            rope.scaling = RopeScaling::divisors(vec![factor as f32; dim / 2]);
        }
        Some(Some("yarn")) => yarn(f, &inner, &mut rope).map_err(named)?,
        Some(Some("longrope" | "su")) => longrope(f, &inner, &mut rope).map_err(named)?,
        Some(_) => {
            return f.err(field, "rope_type \"default\", \"llama3\", \"linear\", \"yarn\" or \"longrope\"");
        }
    }
    Ok(rope)
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
    let original = original_context(f, inner)?;
    let (fast, slow) = (inner.float("beta_fast", Some(32.0))?, inner.float("beta_slow", Some(1.0))?);
    for field in ["mscale", "mscale_all_dim"] {
        if inner.present(field).is_some() {
            return inner.err(field, "none; give attention_factor");
        }
    }
    rope.scaling = yarn_divisors(rope, factor, original, [fast, slow]);
    rope.attention_factor = inner.float("attention_factor", Some(yarn_attention(factor)))?;
    Ok(())
}

/// The divisors of YaRN; `betas` are those of fast and of slow pairs.
pub fn yarn_divisors(rope: &Rope, factor: f64, original: usize, betas: [f64; 2]) -> RopeScaling {
    let d = rope.dim as f64;
    // The pair that turns so many times within the original context.
    let pair = |turns: f64| d * (original as f64 / (TAU * turns)).ln() / (2.0 * rope.theta.ln());
    let low = pair(betas[0]).floor().max(0.0);
    let high = pair(betas[1]).ceil().min(d - 1.0);
    let high = if high == low { low + 0.001 } else { high };
    let divisor = |i: usize| {
        let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 / (ramp / factor + 1.0 - ramp)) as f32
    };
    RopeScaling::divisors((0..rope.dim / 2).map(divisor).collect())
}

/// What YaRN multiplies cosines and sines by.
pub fn yarn_attention(factor: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 }
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
