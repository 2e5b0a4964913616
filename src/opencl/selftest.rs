//! Self-test of a device's kernels: whole forward passes on pseudo-random tokens (many at once, one by one, few at
//! once, and one of each of several sequences), compared with another device.
//!
//! Both devices add in the same order, so results are bit-identical if the device rounds as IEEE 754 requires. On other
//! devices a single flipped rounding of an activation moves the logits of a small model by up to 3 % (measured on the
//! bundled one), while a wrong kernel changes them completely.

use crate::dims::{DIM, KV_HEADS, LAYERS, LEARNED_POSITIONS, MAX_POSITION, VOCAB, has_mass};
use crate::model::device::{Device, KvCache, KvRows, Logits, Run};
use files::Result;
use std::ops::Range;

/// Largest relative distance of logits explained by rounding.
pub const TOLERANCE: f64 = 0.05;
/// Tokens computed at once: more than a tile of any kernel, if the model has so many positions.
const MANY: usize = if LEARNED_POSITIONS && MAX_POSITION < 70 + AFTER { MAX_POSITION - AFTER } else { 70 };
/// Tokens computed one by one after those.
const ONE: usize = 2;
/// Tokens computed at once after those.
const FEW: usize = 5;
/// Number of other sequences: the maximum that is computed one by one along with another.
pub const OTHERS: usize = 3;
/// Tokens after the first [`MANY`]: those above, and one together with other sequences.
const AFTER: usize = ONE + FEW + 1;
/// Slots of the caches.
pub const SLOTS: usize = MANY + AFTER;
/// Tokens computed at once when mass is compared.
const OBSERVED: usize = 8;

/// Largest relative L2 distance of a row of logits, or of the residual that leaves these layers if they are not the
/// last: 0 for identical bits, infinite if a value is not finite. Both devices compute `layers`.
pub fn max_output_distance(
    found: &mut dyn Device,
    expected: &mut dyn Device,
    layers: &Range<usize>,
) -> Result<f64> {
    let ids: Vec<u32> =
        (1..=SLOTS as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % VOCAB as u32).collect();
    let (a, b) = (collect_outputs(found, &ids, layers)?, collect_outputs(expected, &ids, layers)?);
    let width = if layers.end == LAYERS { VOCAB } else { DIM };
    let rows = a.chunks(width).zip(b.chunks(width));
    Ok(rows.map(|(a, b)| relative_distance(a, b)).fold(0.0, f64::max))
}

/// Residuals of some tokens where they enter a layer that is not the first: those of a token are always the same.
fn enter_residual(tokens: Range<usize>) -> Vec<f32> {
    let floats = (tokens.start * DIM) as u32..(tokens.end * DIM) as u32;
    floats.map(|i| (i.wrapping_mul(2_654_435_761) >> 20) as f32 / 2048.0 - 1.0).collect()
}

/// Outputs of the last of the first [`MANY`] tokens, of each token computed alone, of the last of the few, and of the
/// last token together with the first ones of other sequences: logits, or the residual of all these tokens.
fn collect_outputs(device: &mut dyn Device, ids: &[u32], layers: &Range<usize>) -> Result<Vec<f32>> {
    let mut cache = device.new_cache(SLOTS)?;
    let mut others = (0..OTHERS).map(|_| device.new_cache(SLOTS)).collect::<Result<Vec<_>>>()?;
    let mut out = vec![0.0; (1 + ONE + 2 + OTHERS) * VOCAB];
    let mut rows = out.chunks_exact_mut(VOCAB);
    let (is_last, mut residuals) = (layers.end == LAYERS, Vec::new());
    let mut row = || rows.next().map(Logits::Last).filter(|_| is_last).unwrap_or(Logits::None);
    let step = device.max_tokens();
    let each =
        [(0, MANY)].into_iter().chain((MANY..MANY + ONE).map(|pos| (pos, 1))).chain([(MANY + ONE, FEW)]);
    for (first, n) in each {
        let mut logits = row();
        for (i, chunk) in ids[first..first + n].chunks(step).enumerate() {
            let pos = first + i * step;
            let mut residual = enter_residual(pos..pos + chunk.len());
            let run = Run::new(&mut *cache, chunk, pos, logits.reborrow());
            device.forward(&mut [Run { residual: &mut residual, ..run }], None)?;
            residuals.extend(residual);
        }
    }
    let last = SLOTS - 1;
    let mut residual = enter_residual(0..1 + OTHERS);
    let mut runs = vec![Run::new(&mut *cache, &ids[last..], last, row())];
    for (other, id) in others.iter_mut().zip(ids.chunks(1)) {
        runs.push(Run::new(&mut **other, id, 0, row()));
    }
    runs.iter_mut().zip(residual.chunks_mut(DIM)).for_each(|(run, residual)| run.residual = residual);
    runs.chunks_mut(step.min(1 + OTHERS)).try_for_each(|runs| device.forward(runs, None))?;
    drop(runs);
    residuals.extend(residual);
    Ok(if is_last { out } else { residuals })
}

/// Largest relative L2 distance of the attention mass of any layer.
pub fn max_mass_distance(
    found: &mut dyn Device,
    expected: &mut dyn Device,
    layers: &Range<usize>,
) -> Result<f64> {
    let (a, b) = (collect_masses(found, layers)?, collect_masses(expected, layers)?);
    Ok(a.iter().zip(&b).map(|(a, b)| relative_distance(a, b)).fold(0.0, f64::max))
}

/// Mass by layer, after several tokens at once and several one by one.
fn collect_masses(device: &mut dyn Device, layers: &Range<usize>) -> Result<Vec<Vec<f32>>> {
    let ids: Vec<u32> = (1..=(OBSERVED + ONE) as u32).map(|i| i * 97 % VOCAB as u32).collect();
    let many = OBSERVED.min(device.max_tokens());
    let mut cache = device.new_cache(SLOTS)?;
    let Some(layer) = layers.clone().find(|&layer| has_mass(layer)) else { return Ok(Vec::new()) };
    cache.write_mass(layer, &[])?;
    let mut run = |cache: &mut dyn KvCache, tokens: std::ops::Range<usize>| {
        let (pos, tokens) = (tokens.start, &ids[tokens]);
        let (mut residual, run) =
            (enter_residual(pos..pos + tokens.len()), Run::new(cache, tokens, pos, Logits::None));
        let run = Run { observed_tokens: tokens.len(), residual: &mut residual, ..run };
        device.forward(&mut [run], None)
    };
    run(&mut *cache, 0..many)?;
    (many..many + ONE).try_for_each(|pos| run(&mut *cache, pos..pos + 1))?;
    let mass = |layer| {
        let mut mass = vec![0.0; KV_HEADS * (many + ONE)];
        cache.read_mass(layer, &mut mass).map(|()| mass)
    };
    layers.clone().filter(|&layer| has_mass(layer)).map(mass).collect()
}

/// True if an eviction keeps the right rows.
pub fn compaction_matches(device: &mut dyn Device, layers: &Range<usize>) -> Result<bool> {
    const KEPT: [u32; 3] = [0, 3, 6];
    let mut cache = device.new_cache(SLOTS)?;
    let Some(layer) = layers.clone().find(|&layer| has_mass(layer)) else { return Ok(true) };
    let ids: Vec<u32> = (0..OBSERVED as u32).map(|i| i % VOCAB as u32).collect();
    for (i, tokens) in ids.chunks(device.max_tokens()).enumerate() {
        let pos = i * device.max_tokens();
        let mut residual = enter_residual(pos..pos + tokens.len());
        let run = Run::new(&mut *cache, tokens, pos, Logits::None);
        device.forward(&mut [Run { residual: &mut residual, ..run }], None)?;
    }
    let (mut before, mut after) = (KvRows::default(), KvRows::default());
    cache.read_rows(layer, 0..OBSERVED, &mut before)?;
    (0..KV_HEADS)
        .try_for_each(|head| cache.retain_slots(layer, head, &KEPT.map(|slot| slot + (head % 2) as u32)))?;
    cache.read_rows(layer, 0..KEPT.len(), &mut after)?;
    let stayed = |before: &[u8], after: &[u8]| {
        let row = before.len() / (KV_HEADS * OBSERVED);
        let slots =
            (0..KV_HEADS).flat_map(|head| KEPT.map(|slot| head * OBSERVED + slot as usize + head % 2));
        let mut rows = slots.zip(after.chunks(row));
        rows.all(|(from, after)| before[from * row..(from + 1) * row] == *after)
    };
    Ok(stayed(&before.k, &after.k) && stayed(&before.v, &after.v))
}

fn relative_distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x).powi(2);
    let (mut diff, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        diff += square(a - b);
        norm += square(b);
    }
    let d = if diff == 0.0 { 0.0 } else { (diff / norm).sqrt() };
    if d.is_nan() { f64::INFINITY } else { d }
}

#[cfg(test)]
mod tests {
    use super::relative_distance;

    #[test]
    fn the_error_of_logits_is_relative_and_catches_nan() {
        assert_eq!(relative_distance(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(relative_distance(&[0.0, 0.0], &[3.0, 4.0]), 1.0);
        assert_eq!(relative_distance(&[f32::NAN, 0.0], &[3.0, 4.0]), f64::INFINITY);
        assert_eq!(relative_distance(&[1.0], &[0.0]), f64::INFINITY);
    }
}
