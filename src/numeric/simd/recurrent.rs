//! Steps of layers that remember: causal convolutions, gated delta nets and Mamba2. A state is updated token by token, so
//! its bits do not depend on where a prompt was cut.

#![allow(clippy::missing_safety_doc, reason = "the contract is that of Lanes")]

use super::lanes::Lanes;
use super::ops::{exp_lanes, load, sixteens, store};
use super::{Isa, dispatch};

/// Columns of the state of a delta net, or of Mamba2, that lie together.
pub const STATE_COLUMNS: usize = 16;

/// `x[i] = 1 / (1 + e^(-x[i]))`.
pub fn apply_sigmoid(isa: Isa, x: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &mut [f32]) {
        sixteens!(x.len(), |i, part| {
            let e = exp_lanes(L::splat(0.0).sub(load(x, i, part)));
            store(L::splat(1.0).div(L::splat(1.0).add(e)), x, i, part);
        });
    }
    dispatch!(isa, body::<L>(x: &mut [f32]))
}

/// `x[i] = ln(1 + e^(x[i]))`, as `max(x, 0) + ln(1 + t)` with `t = e^(-|x|)`.
///
/// `ln(1 + t) = 2 atanh(s)` with `s = t / (2 + t)`, at most 1/3: its series up to `s^15`, whose rest is below 1e-9.
pub fn apply_softplus(isa: Isa, x: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(x: &mut [f32]) {
        sixteens!(x.len(), |i, part| {
            let x_lanes: L = load(x, i, part);
            let t = exp_lanes(L::splat(0.0).sub(x_lanes.abs()));
            let s = t.div(L::splat(2.0).add(t));
            let square = s.mul(s);
            let mut p = L::splat(1.0 / 15.0);
            for c in [1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 0.2, 1.0 / 3.0, 1.0] {
                p = p.fma(square, L::splat(c));
            }
            let log = s.add(s).mul(p);
            store(x_lanes.max(L::splat(0.0)).add(log), x, i, part);
        });
    }
    dispatch!(isa, body::<L>(x: &mut [f32]))
}

/// A token of a causal convolution: `out[c] = bias[c] + sum over j of inputs[j][c] * taps[j][c]`, `j` ascending by fma.
/// `bias` may be empty.
///
/// # Panics
///
/// The numbers of inputs and taps differ, or a slice is shorter than `out`.
pub fn convolve_token(isa: Isa, inputs: &[&[f32]], taps: &[&[f32]], bias: &[f32], out: &mut [f32]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(inputs: &[&[f32]], taps: &[&[f32]], bias: &[f32], out: &mut [f32]) {
        sixteens!(out.len(), |i, part| {
            let mut sum = if bias.is_empty() { L::splat(0.0) } else { load(bias, i, part) };
            for (input, taps) in inputs.iter().zip(taps) {
                sum = load::<L>(input, i, part).fma(load(taps, i, part), sum);
            }
            store(sum, out, i, part);
        });
    }
    assert!(inputs.len() == taps.len());
    assert!(inputs.iter().chain(taps).all(|row| row.len() >= out.len()));
    assert!(bias.is_empty() || bias.len() >= out.len());
    dispatch!(isa, body::<L>(inputs: &[&[f32]], taps: &[&[f32]], bias: &[f32], out: &mut [f32]))
}

/// One token's part of a delta net's update, for sixteen columns of one head.
#[derive(Clone, Copy)]
pub struct DeltaUpdate<'a> {
    /// Query and key of the head, `[key_dim]` each; `key_dim` is a multiple of 16.
    pub query: &'a [f32],
    pub key: &'a [f32],
    /// The columns' values.
    pub value: &'a [f32; STATE_COLUMNS],
    /// Factor of the state, then strength of the update.
    pub decay: f32,
    pub beta: f32,
}

/// Updates the state `s` of sixteen columns, `[key_dim][16]`, by one token, and writes their output:
/// `s = decay * s; s += key * (beta * (value - s^T key)); out = s^T query`. Sums over rows are those of sixteen lanes.
///
/// # Panics
///
/// The lengths of query, key and state differ.
pub fn delta_step(isa: Isa, state: &mut [f32], update: DeltaUpdate<'_>, out: &mut [f32; STATE_COLUMNS]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(state: &mut [f32], update: DeltaUpdate<'_>, out: &mut [f32; STATE_COLUMNS]) {
        let DeltaUpdate { query, key, value, decay, beta } = update;
        let decay = L::splat(decay);
        let mut sums = [L::splat(0.0); 16];
        for (rows, key) in state.chunks_exact(256).zip(key.chunks_exact(16)) {
            for (i, sum) in sums.iter_mut().enumerate() {
                let decayed = L::load(rows.as_ptr().add(16 * i)).mul(decay);
                *sum = decayed.fma(L::splat(key[i]), *sum);
            }
        }
        let change = L::load(value.as_ptr()).sub(add_lanes(sums)).mul(L::splat(beta));
        change_and_read(state, [key, query], change, decay).store(out.as_mut_ptr());
    }
    assert!(has_rows_of(state, [update.key, update.query]));
    dispatch!(isa, body::<L>(state: &mut [f32], update: DeltaUpdate<'_>, out: &mut [f32; STATE_COLUMNS]))
}

/// One token's part of Mamba2's update, for sixteen columns of one head.
#[derive(Clone, Copy)]
pub struct MambaUpdate<'a> {
    /// Vectors by which the state is written and read, `[rows]` each; `rows` is a multiple of 16.
    pub b: &'a [f32],
    pub c: &'a [f32],
    /// The columns' inputs.
    pub x: &'a [f32; STATE_COLUMNS],
    /// Time step, which is the factor of what is written.
    pub step: f32,
    /// Factor of the state.
    pub decay: f32,
    /// Factor of the inputs that are added to the output.
    pub skip: f32,
}

/// Updates the state `s` of sixteen columns, `[rows][16]`, by one token, and writes their output:
/// `s = decay * s + b * (step * x); out = s^T c + skip * x`. Sums over rows are those of sixteen lanes.
///
/// # Panics
///
/// The lengths of `b`, `c` and the state differ.
pub fn mamba_step(isa: Isa, state: &mut [f32], update: MambaUpdate<'_>, out: &mut [f32; STATE_COLUMNS]) {
    #[inline(always)]
    unsafe fn body<L: Lanes>(state: &mut [f32], update: MambaUpdate<'_>, out: &mut [f32; STATE_COLUMNS]) {
        let MambaUpdate { b, c, x, step, decay, skip } = update;
        let x = L::load(x.as_ptr());
        let read = change_and_read(state, [b, c], x.mul(L::splat(step)), L::splat(decay));
        x.fma(L::splat(skip), read).store(out.as_mut_ptr());
    }
    assert!(has_rows_of(state, [update.b, update.c]));
    dispatch!(isa, body::<L>(state: &mut [f32], update: MambaUpdate<'_>, out: &mut [f32; STATE_COLUMNS]))
}

/// Updates a state of sixteen columns and reads it: `s = decay * s + key * change`, then `s^T query`.
#[inline(always)]
unsafe fn change_and_read<L: Lanes>(state: &mut [f32], [key, query]: [&[f32]; 2], change: L, decay: L) -> L {
    let mut sums = [L::splat(0.0); 16];
    for ((rows, key), query) in
        state.chunks_exact_mut(256).zip(key.chunks_exact(16)).zip(query.chunks_exact(16))
    {
        for (i, sum) in sums.iter_mut().enumerate() {
            let row = rows.as_mut_ptr().add(16 * i);
            let changed = L::splat(key[i]).fma(change, L::load(row).mul(decay));
            changed.store(row);
            *sum = changed.fma(L::splat(query[i]), *sum);
        }
    }
    add_lanes(sums)
}

/// True if a state of sixteen columns has as many rows as these vectors, in whole groups of sixteen.
fn has_rows_of(state: &[f32], [key, query]: [&[f32]; 2]) -> bool {
    query.len() == key.len() && key.len().is_multiple_of(16) && state.len() == key.len() * STATE_COLUMNS
}

/// Adds rows by the fixed tree 16 -> 8 -> 4 -> 2 -> 1.
#[inline(always)]
unsafe fn add_lanes<L: Lanes>(mut rows: [L; 16]) -> L {
    let mut half = 8;
    while half > 0 {
        for i in 0..half {
            rows[i] = rows[i].add(rows[i + half]);
        }
        half /= 2;
    }
    rows[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mut x = seed;
        let mut next = || {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn sigmoid_and_softplus_match_f64_on_every_instruction_set() {
        let x: Vec<f32> =
            numbers(500, 1).iter().map(|x| x * 40.0).chain([0.0, 88.0, -88.0, 1e4, -1e4]).collect();
        let scalar = |op: fn(Isa, &mut [f32])| {
            let mut y = x.clone();
            op(Isa::Scalar, &mut y);
            for isa in Isa::available() {
                let mut other = x.clone();
                op(isa, &mut other);
                assert_eq!(y, other, "{}", isa.name());
            }
            y
        };
        for (x, y) in x.iter().map(|x| f64::from(*x)).zip(scalar(apply_sigmoid)) {
            assert!((f64::from(y) - 1.0 / (1.0 + (-x).exp())).abs() < 1e-6, "{x}");
        }
        for (x, y) in x.iter().map(|x| f64::from(*x)).zip(scalar(apply_softplus)) {
            let want = if x > 50.0 { x } else { x.exp().ln_1p() };
            assert!((f64::from(y) - want).abs() < 1e-6 * want.max(0.1), "{x}: {y} {want}");
        }
    }

    #[test]
    fn a_delta_step_is_the_formula_on_every_instruction_set() {
        let (key_dim, state) = (48, numbers(48 * 16, 7));
        let (key, query, value) = (numbers(key_dim, 8), numbers(key_dim, 9), numbers(16, 10));
        let value: &[f32; 16] = value.as_slice().try_into().unwrap();
        let update = DeltaUpdate { query: &query, key: &key, value, decay: 0.9, beta: 0.3 };
        let (mut first, mut out) = (state.clone(), [0.0; 16]);
        delta_step(Isa::Scalar, &mut first, update, &mut out);
        for isa in Isa::available() {
            let (mut other, mut found) = (state.clone(), [0.0; 16]);
            delta_step(isa, &mut other, update, &mut found);
            assert_eq!((&first, out), (&other, found), "{}", isa.name());
        }
        for column in 0..16 {
            let old = |i: usize| 0.9 * f64::from(state[16 * i + column]);
            let held: f64 = (0..key_dim).map(|i| old(i) * f64::from(key[i])).sum();
            let change = 0.3 * (f64::from(value[column]) - held);
            let new = |i: usize| old(i) + f64::from(key[i]) * change;
            let want: f64 = (0..key_dim).map(|i| new(i) * f64::from(query[i])).sum();
            assert!((f64::from(out[column]) - want).abs() < 1e-5, "{} {want}", out[column]);
            assert!((f64::from(first[16 * 5 + column]) - new(5)).abs() < 1e-6);
        }
    }

    #[test]
    fn a_step_of_mamba_is_the_formula_on_every_instruction_set() {
        let (rows, state) = (32, numbers(32 * 16, 11));
        let (b, c, x) = (numbers(rows, 12), numbers(rows, 13), numbers(16, 14));
        let x: &[f32; 16] = x.as_slice().try_into().unwrap();
        let update = MambaUpdate { b: &b, c: &c, x, step: 0.4, decay: 0.8, skip: 1.5 };
        let (mut first, mut out) = (state.clone(), [0.0; 16]);
        mamba_step(Isa::Scalar, &mut first, update, &mut out);
        for isa in Isa::available() {
            let (mut other, mut found) = (state.clone(), [0.0; 16]);
            mamba_step(isa, &mut other, update, &mut found);
            assert_eq!((&first, out), (&other, found), "{}", isa.name());
        }
        for column in 0..16 {
            let input = f64::from(x[column]);
            let new = |i: usize| 0.8 * f64::from(state[16 * i + column]) + 0.4 * input * f64::from(b[i]);
            let want = 1.5 * input + (0..rows).map(|i| new(i) * f64::from(c[i])).sum::<f64>();
            assert!((f64::from(out[column]) - want).abs() < 1e-5, "{} {want}", out[column]);
            assert!((f64::from(first[16 * 5 + column]) - new(5)).abs() < 1e-6);
        }
    }

    #[test]
    fn a_convolution_adds_its_taps_from_the_oldest_on() {
        let (inputs, taps) = (numbers(3 * 37, 3), numbers(3 * 37, 4));
        let rows = |x| -> Vec<&[f32]> { <[f32]>::chunks_exact(x, 37).collect() };
        let mut out = vec![0.0; 37];
        for isa in Isa::available() {
            for bias in [&[][..], &inputs[50..87]] {
                convolve_token(isa, &rows(&inputs), &rows(&taps), bias, &mut out);
                for (c, out) in out.iter().enumerate() {
                    let first = bias.get(c).copied().unwrap_or(0.0);
                    let want = (0..3).fold(first, |sum, j| inputs[37 * j + c].mul_add(taps[37 * j + c], sum));
                    assert_eq!(*out, want, "{}", isa.name());
                }
            }
        }
    }
}
