//! Weights on a grid of Q4_0, as quantisation-aware training leaves them in a checkpoint of 16-bit floats: each block
//! of 32 is `d * q`, rounded to the element type.
//!
//! The scale of Q4_0, a block's largest magnitude over 7, misses the grid where that magnitude is not seven steps: in
//! blocks of llama.cpp's quantiser it is eight. So if all blocks of a tensor are on a grid, their own is taken. Any
//! other tensor, most of whose blocks are on none, is quantised as usual.

use super::convert::WINDOW;
use super::spec::TensorSpec;
use super::stored_tensor::StoredTensor;
use files::blocks::{BLOCK, BlockQ4, Dtype};
use half::{bf16, f16};
use numeric::pool;
use std::array::from_fn;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// True if all blocks of a tensor of elements are on a grid.
pub fn is_on_grid(stored: &StoredTensor, spec: &TensorSpec, threads: usize) -> bool {
    let Some(dtype) = stored.element_type() else { return false };
    let has_failed = AtomicBool::new(false);
    let window = (WINDOW / stored.row_bytes.max(1)).max(1);
    for first in (0..spec.rows).step_by(window) {
        let (next, end) = (AtomicUsize::new(first), spec.rows.min(first + window));
        pool::run_on_threads(threads, || {
            while !has_failed.load(Ordering::Relaxed) {
                let row = next.fetch_add(1, Ordering::Relaxed);
                if row >= end {
                    return;
                }
                if !find_blocks(dtype, &stored.row_bytes_at(row)).all(|block| block.is_some()) {
                    has_failed.store(true, Ordering::Relaxed);
                }
            }
        });
        stored.release_rows(first..end);
        if has_failed.load(Ordering::Relaxed) {
            return false;
        }
    }
    true
}

/// The blocks of a row; `None` for those that are on no grid.
pub fn find_blocks(dtype: Dtype, row: &[u8]) -> impl Iterator<Item = Option<BlockQ4>> {
    row.chunks_exact(BLOCK * dtype.byte_size())
        .map(move |stored| find_block(dtype, &dtype.widen_array(stored)))
}

/// Finds a block whose values, rounded to `dtype`, are these.
fn find_block(dtype: Dtype, values: &[f32; BLOCK]) -> Option<BlockQ4> {
    let round = |x: f32| match dtype {
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::BF16 => bf16::from_f32(x).to_f32(),
        _ => x,
    };
    let max = values.iter().fold(0f32, |max, x| if x.abs() > max.abs() { *x } else { max });
    // The usual scale first. Eight steps are negative ones.
    [7.0, -8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0].into_iter().find_map(|steps: f32| {
        let largest = if steps < 0.0 { max } else { max.abs() };
        let nearest = f16::from_f32(largest / steps).to_bits();
        // An element is rounded by up to four steps of an f16's last bit.
        [0, 1, -1, 2, -2, 3, -3, 4, -4].into_iter().find_map(|off: i16| {
            let d = f16::from_bits(nearest.wrapping_add_signed(off));
            let wide = d.to_f32();
            let q = values.map(|x| if wide == 0.0 { 0.0 } else { (x / wide).round() });
            let is_it = |(q, x): (&f32, &f32)| (-8.0..=7.0).contains(q) && round(q * wide) == *x;
            let nibble = |i: usize| (q[i] + 8.0) as u8;
            let qs = from_fn(|z| nibble(z) | nibble(z + BLOCK / 2) << 4);
            q.iter().zip(values).all(is_it).then_some(BlockQ4 { d, qs })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block of scale `d` whose largest magnitude is this number of steps.
    fn grid(d: f32, largest: i32) -> [f32; BLOCK] {
        let step =
            |i: i32| (i * 7 + 3) % (largest.abs() + 1) * if i % 3 == 0 && largest != 7 { -1 } else { 1 };
        from_fn(|i| {
            d * if i == 9 { largest } else { step(i as i32).clamp(-largest.abs() + 1, largest.abs() - 1) }
                as f32
        })
    }

    #[test]
    fn blocks_on_a_grid_are_found_and_others_are_not() {
        for largest in [-8, 7, -7, 6, -5, 4, 3, -2, 1] {
            for d in [0.0123, 1.7e-4, 0.5, 33.0] {
                let d = f16::from_f32(d).to_f32();
                for dtype in [Dtype::BF16, Dtype::F16, Dtype::F32] {
                    let values = grid(d, largest).map(|x| match dtype {
                        Dtype::F16 => f16::from_f32(x).to_f32(),
                        Dtype::BF16 => bf16::from_f32(x).to_f32(),
                        _ => x,
                    });
                    let block =
                        find_block(dtype, &values).unwrap_or_else(|| panic!("{largest} {d} {dtype:?}"));
                    let is_near = |found: [f32; BLOCK], part: f32| {
                        found.iter().zip(&values).all(|(a, b)| (a - b).abs() <= b.abs() * part)
                    };
                    assert!(is_near(block.decode(), 1.0 / 256.0), "{largest} {d} {dtype:?}");
                    // The usual scale fits only a largest magnitude of seven steps, or no other value.
                    let usual = BlockQ4::quantise(&values).decode();
                    assert_eq!(
                        is_near(usual, 0.01),
                        [1, 7].contains(&largest.abs()),
                        "{largest} {d} {dtype:?}"
                    );
                }
            }
        }
        assert_eq!(find_block(Dtype::BF16, &[0.0; BLOCK]).map(|block| block.decode()), Some([0.0; BLOCK]));
        let uneven = from_fn(|i| bf16::from_f32((i as f32 * 0.7).sin()).to_f32());
        assert_eq!(find_block(Dtype::BF16, &uneven), None);
        assert_eq!(find_block(Dtype::BF16, &[f32::NAN; BLOCK]), None);
        assert_eq!(find_block(Dtype::BF16, &[f32::INFINITY; BLOCK]), None);
    }
}
