//! The integer kernel in plain Rust: what the others are held against.

use super::Q4Group;
use crate::quant::act::ActBlock;
use crate::quant::packed::{GROUP_ROWS, QUANT_BYTES, SCALE_BYTES};
use half::f16;

/// Q4_0 rows times activations: sixteen rows, any number of tokens; see [`super::q4_groups`].
pub fn q4(w: Q4Group<'_>, acts: &[ActBlock], out: &mut [[f32; GROUP_ROWS]]) {
    for (out, acts) in out.iter_mut().zip(acts.chunks(w.blocks)) {
        *out = [0.0; GROUP_ROWS];
        for (b, act) in acts.iter().enumerate() {
            let quants = &w.quants[b * QUANT_BYTES..][..QUANT_BYTES];
            let scales = &w.scales[b * SCALE_BYTES..][..SCALE_BYTES];
            for (row, acc) in out.iter_mut().enumerate() {
                let mut isum = act.offset;
                for v in 0..4 {
                    for k in 0..4 {
                        let byte = quants[v * 64 + row * 4 + k] as i32;
                        isum += (byte & 15) * act.q[4 * v + k] as i32;
                        isum += (byte >> 4) * act.q[16 + 4 * v + k] as i32;
                    }
                }
                let d = f16::from_le_bytes([scales[row * 2], scales[row * 2 + 1]]).to_f32();
                *acc = (isum as f32).mul_add(d * act.d, *acc);
            }
        }
    }
}
