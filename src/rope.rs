//! Rotary position embedding: frequencies of the baked model, angles of a position.
//!
//! Everything is computed in f64 with the `libm` crate, never the platform's, and rounded once to f32,
//! so tables are the same bits on every machine.

use crate::config::RopeScaling;
use crate::dims::{HEAD_DIM, ROPE_SCALING, ROPE_THETA};
use std::f64::consts::TAU;

/// Radians per position of each pair: `theta^(-2i / head_dim)`, scaled as the model says.
pub fn frequencies() -> [f64; HEAD_DIM / 2] {
    std::array::from_fn(|i| scaled(ROPE_SCALING, libm::pow(ROPE_THETA, -2.0 * i as f64 / HEAD_DIM as f64)))
}

/// Llama 3.1's scaling (`rope_type: "llama3"`): wavelengths up to `original / high` stay, those beyond
/// `original / low` are stretched by `factor`, those between are blended.
fn scaled(scaling: RopeScaling, frequency: f64) -> f64 {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } = scaling
    else {
        return frequency;
    };
    let turns = original_max_position as f64 * frequency / TAU;
    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
    let smooth = smooth.clamp(0.0, 1.0);
    frequency * ((1.0 - smooth) / factor + smooth)
}

/// Cosine and sine of every pair's angle at a position.
pub fn angles(pos: usize, frequencies: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    for ((f, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
        let (s, c) = libm::sincos(pos as f64 * f);
        (*cos, *sin) = (c as f32, s as f32);
    }
}
