//! Products in plain Rust.

use super::kernel::Tokens;
use crate::quant::format::Format;
use crate::simd::groups::Groups;
use files::blocks::BLOCK;

/// Multiplies all groups with some tokens. `F` is the format's index in [`Format::ALL`].
pub fn multiply_plainly<const F: usize>(w: Groups<'_>, x: Tokens<'_>, out: &mut [[f32; 16]]) {
    let (format, levels) = const { (Format::ALL[F], Format::ALL[F].code_levels()) };
    let (has_minimum, has_half_scales) = (format.has_minimum(), format.has_half_scales());
    let (quants, scales) = format.group_bytes(w.blocks * BLOCK);
    for (g, out) in out.chunks_exact_mut(x.total).enumerate() {
        let out = &mut out[x.first..][..x.count];
        out.fill([0.0; 16]);
        let (quants, scales) = (&w.quants[g * quants..][..quants], &w.scales[g * scales..][..scales]);
        for (b, quants) in quants.chunks_exact(format.quant_bytes()).enumerate() {
            for row in 0..16 {
                let weights = format.decode_integers(quants, row, levels.as_ref());
                let scales = format.decode_scales(scales, row, b);
                for (t, out) in out.iter_mut().enumerate() {
                    let act = &x.activations[t * w.blocks + b];
                    let [low, high] = sum_products(&weights, &act.q);
                    let sum = if has_half_scales {
                        (high as f32).mul_add(scales.halves[1], low as f32 * scales.halves[0])
                    } else {
                        (low + high) as f32
                    };
                    out[row] = sum.mul_add(scales.d * act.d, out[row]);
                    if !has_minimum {
                        continue;
                    }
                    let [low, high] = sum_products(&[1; BLOCK], &act.q);
                    out[row] = if has_half_scales {
                        let minimum = low as f32 * scales.minimums[0] + high as f32 * scales.minimums[1];
                        minimum.mul_add(scales.minimum * act.d, out[row])
                    } else {
                        scales.minimum.mul_add(act.d * (low + high) as f32, out[row])
                    };
                }
            }
        }
    }
}

/// Sums the products of each half of a block.
#[inline]
fn sum_products(weights: &[i8; BLOCK], q: &[i8; BLOCK]) -> [i32; 2] {
    let sum = |from: usize| (from..from + 16).map(|i| i32::from(weights[i]) * i32::from(q[i])).sum();
    [sum(0), sum(16)]
}
