//! Rotary position embedding: frequencies of the baked model, angles of a position.
//!
//! Everything is computed in f64 with the `libm` crate, never the platform's, and rounded once to f32,
//! so tables are the same bits on every machine.

use crate::dims::{ANGLES, LOCAL_ROPE_DIFFERS, LOCAL_ROPE_DIM, QUERY_GROWTH, ROPE, ROPE_DIM};
use files::config::{LongRope, QueryGrowth, RopeScaling};

/// Radians per position of each pair.
pub struct Frequencies {
    /// [`ANGLES`] pairs: for full-attention layers, then for the others, if there are any.
    short: Vec<f64>,
    /// Frequencies of sequences longer than the given length, if the model has such.
    long: Option<(Vec<f64>, usize)>,
}

impl Frequencies {
    /// The baked model's frequencies.
    pub fn new() -> Self {
        let long = |LongRope { divisors, original_context: beyond }| {
            (compute_frequencies(RopeScaling::Divisors(divisors)), beyond)
        };
        Self { short: compute_frequencies(ROPE.scaling), long: ROPE.long.map(long) }
    }

    /// Frequencies for a position of a sequence whose first `known` tokens are known. A later position counts as the
    /// sequence's end.
    pub fn for_position(&self, pos: usize, known: usize) -> &[f64] {
        match &self.long {
            Some((long, beyond)) if known.max(pos + 1) > *beyond => long,
            _ => &self.short,
        }
    }
}

impl Default for Frequencies {
    fn default() -> Self {
        Self::new()
    }
}

/// `theta^(-2i / dim)`, scaled as the model says, for each pair of full-attention layers, then of other layers.
fn compute_frequencies(scaling: RopeScaling) -> Vec<f64> {
    let plain = |theta: f64, i: usize, dim: usize| libm::pow(theta, -2.0 * i as f64 / dim as f64);
    let of = |pair: usize| match pair.checked_sub(ROPE_DIM / 2) {
        None => {
            let frequency = plain(ROPE.theta, pair, ROPE_DIM);
            frequency * scaling.frequency_multiplier(pair, frequency)
        }
        Some(i) if LOCAL_ROPE_DIFFERS && i < LOCAL_ROPE_DIM / 2 => {
            let frequency = plain(ROPE.local_theta, i, LOCAL_ROPE_DIM);
            frequency * ROPE.local_scaling.frequency_multiplier(i, frequency)
        }
        Some(_) => 0.0, // not rotated
    };
    (0..ANGLES).map(of).collect()
}

/// Cosine and sine of every pair's angle at a position; the last cosine is the factor of queries, if they grow.
pub fn compute_angles(pos: usize, frequencies: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    for (i, ((f, cos), sin)) in frequencies.iter().zip(&mut *cos).zip(sin).enumerate() {
        let (s, c) = libm::sincos(pos as f64 * f);
        let factor = if i < ROPE_DIM / 2 { ROPE.attention_factor } else { ROPE.local_attention_factor };
        (*cos, *sin) = ((c * factor) as f32, (s * factor) as f32);
    }
    if let (Some(QueryGrowth { beta, original_context }), Some(last)) = (QUERY_GROWTH, cos.last_mut()) {
        *last = (1.0 + beta * libm::log1p((pos / original_context) as f64)) as f32;
    }
}
