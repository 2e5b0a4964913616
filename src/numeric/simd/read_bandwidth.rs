//! Measures the read bandwidth of this CPU, with which `bench` compares decode.
//!
//! The fastest method depends on the machine: one thread of an Intel server read 13 GB/s with 16-byte loads, 17.6 with
//! 64-byte loads and 18 with prefetches. So there are several methods, and the best one counts.

use super::{Isa, prefetch};
use std::fmt;

/// Bytes of one step of a stream: whole cache lines, and at least as many loads as there are sums.
const STEP: usize = 256;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Prefetch distance in bytes.
const AHEAD: usize = 4096;
/// Number of independent sums of each stream.
const SUMS: usize = 4;

/// A method to read memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadMethod {
    isa: Isa,
    /// Number of streams read in turn, one or two.
    streams: usize,
    /// Prefetch distance in bytes; 0 for no prefetch.
    ahead: usize,
}

impl ReadMethod {
    /// Lists all methods of this CPU, without sets that have the same loads as another.
    pub fn list_methods() -> Vec<ReadMethod> {
        let mut ways = Vec::new();
        for isa in Isa::available() {
            #[cfg(target_arch = "x86_64")]
            if matches!(isa, Isa::AvxVnni | Isa::Amx) {
                continue;
            }
            #[cfg(target_arch = "aarch64")]
            if isa != Isa::Scalar {
                continue;
            }
            for (streams, ahead) in [(1, 0), (1, AHEAD), (2, 0), (2, AHEAD)] {
                ways.push(ReadMethod { isa, streams, ahead });
            }
        }
        ways
    }
}

impl fmt::Display for ReadMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let streams = if self.streams == 1 { "one stream" } else { "two streams" };
        let ahead = if self.ahead == 0 { "" } else { ", prefetched" };
        write!(f, "{}, {streams}{ahead}", self.isa.family())
    }
}

/// Reads every byte. Returns the sum of the little-endian 8-byte words, and of single bytes at the end.
pub fn read_bytes(way: ReadMethod, bytes: &[u8]) -> u64 {
    macro_rules! kernel {
        ($name:ident) => {
            match (way.streams, way.ahead) {
                // SAFETY: `way.isa` was found on this CPU.
                (1, 0) => unsafe { $name::<1, 0>(bytes) },
                // SAFETY: the same.
                (1, _) => unsafe { $name::<1, AHEAD>(bytes) },
                // SAFETY: the same.
                (_, 0) => unsafe { $name::<2, 0>(bytes) },
                // SAFETY: the same.
                _ => unsafe { $name::<2, AHEAD>(bytes) },
            }
        };
    }
    match way.isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Scalar => kernel!(sse2),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => kernel!(avx2),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::Amx => kernel!(avx512),
        #[cfg(target_arch = "aarch64")]
        _ => kernel!(neon),
        #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
        Isa::Scalar => sum_words(bytes),
    }
}

/// [`read_bytes`] in plain Rust, for the rest after the steps.
fn sum_words(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let sum = words.iter().fold(0u64, |sum, w| sum.wrapping_add(u64::from_le_bytes(*w)));
    rest.iter().fold(sum, |sum, &b| sum.wrapping_add(u64::from(b)))
}

/// Defines a kernel that reads `STREAMS` equal parts of the bytes, a step of each in turn.
///
/// A macro instead of a trait, so that the loops are in the function that has the features.
macro_rules! reader {
    ($name:ident, $features:literal, $vector:ident, $zero:expr, $load:ident, $add:ident) => {
        #[target_feature(enable = $features)]
        fn $name<const STREAMS: usize, const AHEAD: usize>(bytes: &[u8]) -> u64 {
            const LOADS: usize = STEP / size_of::<$vector>();
            let part = bytes.len() / (STREAMS * STEP) * STEP;
            let mut sums = [[$zero; SUMS]; STREAMS];
            let mut at = 0;
            while at < part {
                for (stream, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: a whole step is in bounds: `at + STEP <= part`, and `STREAMS` parts are inside.
                    let p = unsafe { bytes.as_ptr().add(stream * part + at) };
                    for line in 0..if AHEAD > 0 { STEP / LINE } else { 0 } {
                        prefetch::<1>(p.wrapping_add(AHEAD + line * LINE));
                    }
                    for i in 0..LOADS {
                        // SAFETY: `LOADS` registers are one step; the load needs no alignment.
                        let x = unsafe { $load(p.add(i * size_of::<$vector>()).cast()) };
                        sums[i % SUMS] = $add(sums[i % SUMS], x);
                    }
                }
                at += STEP;
            }
            let mut sum = sum_words(&bytes[STREAMS * part..]);
            for sums in sums {
                // SAFETY: plain integers of the same size, of which every value is valid.
                let sums: [u64; SUMS * size_of::<$vector>() / 8] = unsafe { std::mem::transmute(sums) };
                sum = sums.iter().fold(sum, |sum, &x| sum.wrapping_add(x));
            }
            sum
        }
    };
}

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
#[cfg(target_arch = "x86_64")]
reader!(sse2, "sse2", __m128i, _mm_setzero_si128(), _mm_loadu_si128, _mm_add_epi64);
#[cfg(target_arch = "x86_64")]
reader!(avx2, "avx2", __m256i, _mm256_setzero_si256(), _mm256_loadu_si256, _mm256_add_epi64);
#[cfg(target_arch = "x86_64")]
reader!(avx512, "avx512f", __m512i, _mm512_setzero_si512(), _mm512_loadu_si512, _mm512_add_epi64);

#[cfg(target_arch = "aarch64")]
use std::arch::aarch64::{uint64x2_t, vaddq_u64, vdupq_n_u64, vld1q_u64};
#[cfg(target_arch = "aarch64")]
reader!(neon, "neon", uint64x2_t, vdupq_n_u64(0), vld1q_u64, vaddq_u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read_on_every_set() {
        let bytes: Vec<u8> = (0..5000u32).map(|i| (i * i + 7 * i) as u8).collect();
        for way in ReadMethod::list_methods() {
            for len in [0, 1, 7, 8, 255, 256, 257, 511, 512, 513, 767, 1024, 4095, 4999] {
                for start in [0, 1] {
                    let bytes = &bytes[start..start + len];
                    assert_eq!(read_bytes(way, bytes), sum_words(bytes), "{way}: {len} bytes from {start}");
                }
            }
        }
    }

    #[test]
    fn the_sum_is_that_of_all_bytes_at_their_places() {
        assert_eq!(sum_words(&[]), 0);
        assert_eq!(sum_words(&[1, 0, 0, 0, 0, 0, 0, 2, 5, 6]), 1 + (2 << 56) + 11);
        assert_eq!(sum_words(&[0xff; 16]), u64::MAX.wrapping_mul(2));
    }

    #[test]
    fn every_way_to_read_has_its_own_name() {
        let names: Vec<String> = ReadMethod::list_methods().iter().map(ReadMethod::to_string).collect();
        assert_eq!(names[..2], ["scalar, one stream", "scalar, one stream, prefetched"]);
        assert!(names.iter().enumerate().all(|(i, name)| !names[..i].contains(name)), "{names:?}");
    }
}
