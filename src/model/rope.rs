//! Rotary position embedding: frequencies of the baked model, angles of a position.
//!
//! Everything is computed in f64 with the `libm` crate, never the platform's, and rounded once to f32,
//! so tables are the same bits on every machine.

use crate::dims::{HEAD_DIM, ROPE_SCALING, ROPE_THETA};

/// Radians per position of each pair: `theta^(-2i / head_dim)`, scaled as the model says.
pub fn frequencies() -> [f64; HEAD_DIM / 2] {
    std::array::from_fn(|i| {
        let frequency = libm::pow(ROPE_THETA, -2.0 * i as f64 / HEAD_DIM as f64);
        frequency * ROPE_SCALING.multiplier(i, frequency)
    })
}

/// Cosine and sine of every pair's angle at a position.
pub fn angles(pos: usize, frequencies: &[f64], cos: &mut [f32], sin: &mut [f32]) {
    for ((f, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
        let (s, c) = libm::sincos(pos as f64 * f);
        (*cos, *sin) = (c as f32, s as f32);
    }
}
