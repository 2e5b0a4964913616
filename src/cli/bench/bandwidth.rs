//! How fast this machine reads memory with some threads: the ceiling for decode, which reads every weight
//! once a token.

use crate::system::Memory;
use crate::weights::region::AlignedBytes;
use std::hint::black_box;
use std::time::Instant;

/// Far more than any cache holds, and enough to last some milliseconds.
const BUFFER: usize = 512 << 20;
/// Below this a large last-level cache would be measured instead.
const LEAST: usize = 64 << 20;
const PASSES: usize = 8;
/// Bytes of one step of the inner loop: sixteen sums of 64 bits, which is eight registers of SSE2 or NEON.
const STEP: usize = 16 * 8;
const PAGE: usize = 4096;

/// Bytes per second for each number of threads, which ascend; empty when memory is too short for a
/// measurement that means anything.
pub(super) fn measure(threads: &[usize]) -> Vec<(usize, f64)> {
    let spare = Memory::now().usable().map_or(BUFFER, |m| usize::try_from(m / 4).unwrap_or(BUFFER));
    let len = BUFFER.min(spare) / STEP * STEP;
    let (Some(&most), true) = (threads.last(), len >= LEAST) else { return Vec::new() };
    let Ok(mut buffer) = AlignedBytes::zeroed(len) else { return Vec::new() };
    // Pages that were never written are all the same page of zeros, and in the cache.
    std::thread::scope(|scope| {
        for (i, part) in parts_mut(buffer.as_mut_slice(), most).enumerate() {
            scope.spawn(move || part.fill(i as u8 + 1));
        }
    });
    let bytes = buffer.as_slice();
    threads.iter().map(|&n| (n, best(bytes, n))).collect()
}

/// Bytes of one thread's part.
fn share(len: usize, threads: usize) -> usize {
    len.div_ceil(threads.max(1)).next_multiple_of(PAGE)
}

fn parts_mut(bytes: &mut [u8], threads: usize) -> std::slice::ChunksMut<'_, u8> {
    let share = share(bytes.len(), threads);
    bytes.chunks_mut(share)
}

/// The best of several passes: others are disturbed by something.
fn best(bytes: &[u8], threads: usize) -> f64 {
    (0..PASSES).map(|_| pass(bytes, threads)).fold(0.0, f64::max)
}

fn pass(bytes: &[u8], threads: usize) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let mut parts = bytes.chunks(share(bytes.len(), threads));
        let own = parts.next().unwrap_or_default();
        for part in parts {
            scope.spawn(move || black_box(sum(part)));
        }
        black_box(sum(own));
    });
    bytes.len() as f64 / start.elapsed().as_secs_f64().max(1e-9)
}

/// Reads everything; the loop becomes wide loads and adds that do not wait for one another.
fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; STEP / 8];
    let (steps, rest) = bytes.as_chunks::<STEP>();
    for step in steps {
        for (sum, word) in sums.iter_mut().zip(step.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*word));
        }
    }
    let rest = rest.iter().map(|&b| u64::from(b)).sum::<u64>();
    sums.into_iter().fold(rest, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        let words: Vec<u64> = (0..1000).map(|i| i * 0x1_0001).collect();
        let mut bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.truncate(bytes.len() / STEP * STEP);
        let all = bytes.len() / 8;
        assert_eq!(sum(&bytes), words[..all].iter().sum::<u64>());
        bytes.extend([1, 2, 3]);
        assert_eq!(sum(&bytes), words[..all].iter().sum::<u64>() + 6);
        assert_eq!(sum(&[]), 0);
    }

    #[test]
    fn parts_cover_the_buffer_for_any_number_of_threads() {
        let mut bytes = vec![0u8; 10 * PAGE + 128];
        for threads in [0, 1, 2, 3, 7, 64] {
            parts_mut(&mut bytes, threads).for_each(|p| p.iter_mut().for_each(|b| *b += 1));
            assert!(bytes.chunks(share(bytes.len(), threads)).count() <= threads.max(1));
            assert!(pass(&bytes, threads) > 0.0);
        }
        assert!(bytes.iter().all(|&b| b == 6));
    }
}
