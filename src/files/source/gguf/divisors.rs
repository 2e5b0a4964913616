//! Tensors with divisors of the RoPE frequencies.

use super::header::GgufHeader;
use crate::blocks::{BlockType, Dtype};
use crate::config::{ConfigError, ModelConfig, RopeScaling};

/// Access to tensors with one divisor per rotated pair.
pub(super) struct DivisorTables<'a> {
    pub header: &'a GgufHeader,
    pub file: &'a [u8],
    pub pairs: usize,
}

impl DivisorTables<'_> {
    /// Reads the divisors of the tensor of this name; `None` if there is none.
    pub fn get(&self, name: &str) -> Result<Option<Vec<f32>>, ConfigError> {
        let Some(entry) = self.header.tensors.get(name) else { return Ok(None) };
        let pairs = self.pairs;
        let err = |value: String| {
            Err(ConfigError::new(name, value, format!("{pairs} positive numbers of type F32")))
        };
        if entry.block != BlockType::F32 || entry.shape != [pairs] {
            return err(format!("of type {} and shape {:?}", entry.block.name(), entry.shape));
        }
        let divisors = Dtype::F32.to_f32(&self.file[entry.range.clone()]);
        match divisors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
            Some(bad) => err(format!("{bad:?}")),
            None => Ok(Some(divisors)),
        }
    }
}

/// Determines the scaling in `rope_freqs.weight`: a published model's formula if it gives these divisors.
pub(super) fn detect_scaling(model: &ModelConfig, divisors: Vec<f32>) -> RopeScaling {
    let is = |scaling: &RopeScaling| {
        let off = |(i, x): (usize, &f32)| {
            f64::from(*x) * scaling.frequency_multiplier(i, model.rope.base_frequency(i)) - 1.0
        };
        divisors.iter().enumerate().map(off).all(|off| off.abs() < 1e-5)
    };
    let known = [RopeScaling::Unscaled, llama3_scaling(8.0), llama3_scaling(32.0)].into_iter().find(is);
    known.unwrap_or_else(|| RopeScaling::from_divisors(divisors))
}

/// The scaling of Llama 3.1 (`factor` 8) and 3.2 (32).
fn llama3_scaling(factor: f64) -> RopeScaling {
    RopeScaling::Llama3 { factor, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position: 8192 }
}
