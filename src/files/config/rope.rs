//! RoPE: the base, and how frequencies are scaled for long contexts.

use super::fields::{ConfigError, Fields};
use serde_json::{Map, Value};

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
    /// Each pair's frequency is divided by a number of its own, as in GGUF files: `head_dim / 2` numbers.
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
                let turns = original_max_position as f64 * frequency / std::f64::consts::TAU;
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

/// Base and scaling, from `rope_parameters` (newer files) or from `rope_theta` and `rope_scaling`.
pub(super) fn parse(f: &Fields<'_>) -> Result<(f64, RopeScaling), ConfigError> {
    let field = if f.present("rope_parameters").is_some() { "rope_parameters" } else { "rope_scaling" };
    let empty = Map::new();
    let inner = match f.present(field) {
        None => Fields(&empty),
        Some(Value::Object(map)) => Fields(map),
        Some(_) => return f.err(field, "an object or null"),
    };
    for fields in [f, &inner] {
        if fields.present("partial_rotary_factor").is_some_and(|x| x.as_f64() != Some(1.0)) {
            return fields.err("partial_rotary_factor", "1.0");
        }
    }
    let theta = if inner.present("rope_theta").is_some() { &inner } else { f };
    let theta = theta.float("rope_theta", Some(10_000.0))?;
    let kind = inner.present("rope_type").or_else(|| inner.present("type"));
    match kind.map(Value::as_str) {
        None | Some(Some("default")) => Ok((theta, RopeScaling::Plain)),
        Some(Some("llama3")) => {
            let named = |e: ConfigError| ConfigError { field: format!("{field}.{}", e.field), ..e };
            Ok((theta, llama3(&inner).map_err(named)?))
        }
        Some(_) => f.err(field, "rope_type \"default\" or \"llama3\""),
    }
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
