//! Whether a backend's kernels compute what they should: the whole forward pass on seeded tokens, many at once and one
//! by one, held against another backend.
//!
//! Both compute the same sums in the same order, so on a device that rounds as IEEE 754 says the results are the same
//! bits. On others a rounding flip of one activation moves the logits of a small model by up to 3 % (measured on the
//! bundled one), while a wrong kernel moves them by their own size.

use crate::dims::{KV_HEADS, LAYERS, VOCAB};
use crate::model::backend::{Backend, Logits};
use files::Result;

/// Largest relative distance of logits that rounding explains.
pub const TOLERANCE: f64 = 0.05;
/// Tokens computed at once: more than a tile of any kernel.
const MANY: usize = 70;
/// Tokens computed one by one after that.
const ONE: usize = 2;
/// Slots that both backends must have.
pub const SLOTS: usize = MANY + ONE;

/// The largest relative L2 distance of any row of logits; 0 for the same bits, infinite where one is not finite.
/// Both caches are empty before and after.
pub fn distance(found: &mut dyn Backend, expected: &mut dyn Backend) -> Result<f64> {
    let ids: Vec<u32> =
        (1..=SLOTS as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % VOCAB as u32).collect();
    let (a, b) = (logits(found, &ids)?, logits(expected, &ids)?);
    let rows = a.chunks(VOCAB).zip(b.chunks(VOCAB));
    Ok(rows.map(|(a, b)| relative(a, b)).fold(0.0, f64::max))
}

/// Logits of the last of the first [`MANY`] ids, then of each that follows.
fn logits(backend: &mut dyn Backend, ids: &[u32]) -> Result<Vec<f32>> {
    let slots = backend.capacity().min(ids.len());
    let many = slots.saturating_sub(ONE).max(1);
    let mut out = vec![0.0; (1 + slots - many) * VOCAB];
    backend.set_len(0);
    let step = backend.max_tokens();
    for (i, chunk) in ids[..many].chunks(step).enumerate() {
        backend.forward(chunk, i * step, Logits::Last(&mut out[..VOCAB]))?;
    }
    for (i, row) in out.chunks_mut(VOCAB).enumerate().skip(1) {
        let pos = many + i - 1;
        backend.forward(&ids[pos..=pos], pos, Logits::Last(row))?;
    }
    backend.set_len(0);
    Ok(out)
}

/// The same of the attention that slots receive, layer by layer, on backends whose caches are empty before and after.
pub fn mass_distance(found: &mut dyn Backend, expected: &mut dyn Backend) -> Result<f64> {
    let (a, b) = (masses(found)?, masses(expected)?);
    Ok(a.iter().zip(&b).map(|(a, b)| relative(a, b)).fold(0.0, f64::max))
}

/// Mass by layer, after some tokens at once and some one by one.
fn masses(backend: &mut dyn Backend) -> Result<Vec<Vec<f32>>> {
    let ids: Vec<u32> = (1..=8 + ONE as u32).map(|i| i * 97 % VOCAB as u32).collect();
    let many = 8.min(backend.max_tokens()).min(backend.capacity().saturating_sub(ONE).max(1));
    backend.set_len(0);
    backend.observe(usize::MAX)?;
    backend.forward(&ids[..many], 0, Logits::None)?;
    for pos in many..(many + ONE).min(backend.capacity()) {
        backend.forward(&ids[pos..=pos], pos, Logits::None)?;
    }
    let mass = |layer| {
        let mut mass = vec![0.0; KV_HEADS * backend.len()];
        backend.read_mass(layer, &mut mass).map(|()| mass)
    };
    let all = (0..LAYERS).map(mass).collect::<Result<_>>()?;
    backend.observe(0)?;
    backend.set_len(0);
    Ok(all)
}

fn relative(a: &[f32], b: &[f32]) -> f64 {
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
    use super::relative;

    #[test]
    fn distance_of_rows() {
        assert_eq!(relative(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
        assert_eq!(relative(&[0.0, 0.0], &[3.0, 4.0]), 1.0);
        assert_eq!(relative(&[f32::NAN, 0.0], &[3.0, 4.0]), f64::INFINITY);
        assert_eq!(relative(&[1.0], &[0.0]), f64::INFINITY);
    }
}
