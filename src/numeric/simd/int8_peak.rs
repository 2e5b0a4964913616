//! Measures the peak rate of int8 multiply-accumulates of an instruction set, from registers only, with which `bench`
//! compares prefill.

use super::Isa;
use std::hint::black_box;

/// Number of independent sums: at least an instruction's latency times its rate, on every CPU.
const CHAINS: usize = 12;

/// The work of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeakResult {
    /// Number of multiply-accumulates.
    pub macs: u64,
    /// Sum over all lanes of all chains; lanes wrap.
    pub sum: i64,
}

/// Runs each chain's instruction `rounds` times; `None` if the set has none.
pub fn multiply_accumulates(isa: Isa, rounds: u64) -> Option<PeakResult> {
    // Multiply-accumulates of one step of one chain, and the sum.
    let (macs, sum): (u64, i64) = match isa {
        Isa::Scalar => return None,
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` was found on this CPU.
        Isa::Avx2 => (32, unsafe { avx2(rounds) }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` was found on this CPU.
        Isa::AvxVnni => (32, unsafe { avx_vnni(rounds) }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` was found on this CPU.
        Isa::Avx512 => (64, unsafe { avx512(rounds) }),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `isa` was found on this CPU.
        Isa::Amx => (16 * 16 * 64, unsafe { super::amx::multiply_tiles(rounds, (A, B)) }),
        #[cfg(target_arch = "aarch64")]
        // SAFETY: NEON is part of every aarch64 target.
        Isa::Neon => (8, unsafe { neon(rounds) }),
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `isa` was found on this CPU.
        Isa::NeonDot => (16, unsafe { neon_dot(rounds) }),
        #[cfg(target_arch = "aarch64")]
        // SAFETY: `isa` was found on this CPU.
        Isa::NeonI8mm => (32, unsafe { neon_i8mm(rounds) }),
    };
    Some(PeakResult { macs: rounds * CHAINS as u64 * macs, sum })
}

/// Eight values of each operand, repeated over the register: nibbles and signed bytes.
const A: [i8; 8] = [3, 14, 9, 0, 15, 6, 11, 5];
const B: [i8; 8] = [17, -90, 127, -33, 64, -127, 2, -45];

/// Defines a kernel of `CHAINS` sums of `$vector` with lanes of `$lane`.
///
/// The steps are `asm!` that is not `pure`, so the compiler neither merges nor hoists them. They are unrolled, so that
/// the sums stay in registers.
macro_rules! chains {
    ($name:ident, $features:literal, $vector:ident, $lane:ident, $step:ident, [$($i:literal)*]) => {
        #[target_feature(enable = $features)]
        fn $name(rounds: u64) -> i64 {
            const EIGHTS: usize = size_of::<$vector>() / 8;
            type Eights = [[i8; 8]; EIGHTS];
            const LANES: usize = size_of::<$vector>() / size_of::<$lane>();
            // SAFETY: plain integers of the same size, of which every value is valid.
            let (a, b, zero) = unsafe {
                let a = std::mem::transmute::<Eights, $vector>([A; EIGHTS]);
                let b = std::mem::transmute::<Eights, $vector>([B; EIGHTS]);
                (black_box(a), black_box(b), std::mem::transmute::<Eights, $vector>([[0; 8]; EIGHTS]))
            };
            let mut sums = [zero; CHAINS];
            for _ in 0..rounds {
                // SAFETY: the instructions belong to this function's features and touch registers only.
                unsafe { $($step!(sums[$i], a, b);)* }
            }
            // SAFETY: as above.
            let lanes: [[$lane; LANES]; CHAINS] = unsafe { std::mem::transmute(sums) };
            lanes.as_flattened().iter().map(|&x| i64::from(x)).sum()
        }
    };
}

/// Adds products in pairs to i16; the product kernel widens to i32 only once in eight steps.
#[cfg(target_arch = "x86_64")]
macro_rules! vpmaddubsw {
    ($sum:expr, $a:ident, $b:ident) => {
        std::arch::asm!("vpmaddubsw {t}, {a}, {b}", "vpaddw {sum}, {sum}, {t}",
            sum = inout(ymm_reg) $sum, a = in(ymm_reg) $a, b = in(ymm_reg) $b, t = out(ymm_reg) _,
            options(nomem, nostack, preserves_flags))
    };
}

/// Sixteen sums of four products.
#[cfg(target_arch = "x86_64")]
macro_rules! vpdpbusd {
    ($sum:expr, $a:ident, $b:ident) => {
        std::arch::asm!("vpdpbusd {sum}, {a}, {b}",
            sum = inout(zmm_reg) $sum, a = in(zmm_reg) $a, b = in(zmm_reg) $b,
            options(nomem, nostack, preserves_flags))
    };
}

/// Eight sums of four products, encoded for CPUs without AVX-512.
#[cfg(target_arch = "x86_64")]
macro_rules! vpdpbusd_vex {
    ($sum:expr, $a:ident, $b:ident) => {
        std::arch::asm!("{{vex}} vpdpbusd {sum}, {a}, {b}",
            sum = inout(ymm_reg) $sum, a = in(ymm_reg) $a, b = in(ymm_reg) $b,
            options(nomem, nostack, preserves_flags))
    };
}

/// Adds eight products to i16, as in the kernel without dotprod.
#[cfg(target_arch = "aarch64")]
macro_rules! smlal {
    ($sum:expr, $a:ident, $b:ident) => {
        std::arch::asm!("smlal {sum:v}.8h, {a:v}.8b, {b:v}.8b",
            sum = inout(vreg) $sum, a = in(vreg) $a, b = in(vreg) $b,
            options(nomem, nostack, preserves_flags))
    };
}

/// Four sums of four products.
#[cfg(target_arch = "aarch64")]
macro_rules! sdot {
    ($sum:expr, $a:ident, $b:ident) => {
        std::arch::asm!("sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) $sum, a = in(vreg) $a, b = in(vreg) $b,
            options(nomem, nostack, preserves_flags))
    };
}

/// Four sums of eight products: two rows of eight by two columns.
#[cfg(target_arch = "aarch64")]
macro_rules! smmla {
    ($sum:expr, $a:ident, $b:ident) => {
        std::arch::asm!("smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) $sum, a = in(vreg) $a, b = in(vreg) $b,
            options(nomem, nostack, preserves_flags))
    };
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256i, __m512i};
#[cfg(target_arch = "x86_64")]
chains!(avx2, "avx2", __m256i, i16, vpmaddubsw, [0 1 2 3 4 5 6 7 8 9 10 11]);
#[cfg(target_arch = "x86_64")]
chains!(avx_vnni, "avx2,avxvnni", __m256i, i32, vpdpbusd_vex, [0 1 2 3 4 5 6 7 8 9 10 11]);
#[cfg(target_arch = "x86_64")]
chains!(avx512, "avx512f,avx512vnni", __m512i, i32, vpdpbusd, [0 1 2 3 4 5 6 7 8 9 10 11]);

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::int8x16_t;
#[cfg(target_arch = "aarch64")]
chains!(neon, "neon", int8x16_t, i16, smlal, [0 1 2 3 4 5 6 7 8 9 10 11]);
#[cfg(target_arch = "aarch64")]
chains!(neon_dot, "neon,dotprod", int8x16_t, i32, sdot, [0 1 2 3 4 5 6 7 8 9 10 11]);

#[cfg(target_arch = "aarch64")]
chains!(neon_i8mm, "neon,i8mm", int8x16_t, i32, smmla, [0 1 2 3 4 5 6 7 8 9 10 11]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_products_are_added() {
        let eight: i64 = A.iter().zip(B).map(|(&a, b)| i64::from(a) * i64::from(b)).sum();
        for isa in Isa::available() {
            // Few enough that sums of i16 do not wrap.
            for rounds in [0, 1, 3, 7] {
                let Some(done) = multiply_accumulates(isa, rounds) else {
                    assert_eq!(isa, Isa::Scalar);
                    continue;
                };
                assert_eq!(done.sum, (done.macs / 8) as i64 * eight, "{} {rounds}", isa.name());
                assert!(done.macs >= rounds * CHAINS as u64 * 8 && done.macs.is_multiple_of(8));
            }
        }
    }
}
