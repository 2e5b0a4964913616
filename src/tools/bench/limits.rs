//! The limits of this machine: its memory read bandwidth, which limits decode, because decode reads every weight once
//! per token; and its integer arithmetic, which limits prefill.
//!
//! The best way to read is found once, after the warm-up. The bandwidth is then measured right before and after each
//! repetition that decodes, because it may change from second to second. Integer arithmetic is measured last.

use crate::opencl::{Device, read_bandwidth};
use crate::run::system::Memory;
use files::Result;
use files::mapped::AlignedBytes;
use numeric::pool;
use numeric::simd::Isa;
use numeric::simd::int8_peak::multiply_accumulates;
use numeric::simd::read_bandwidth::{self as reading, ReadMethod};
use serde::Serialize;
use std::hint::black_box;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Buffer size in bytes: far larger than any cache, and reading it takes some milliseconds.
const BUFFER_BYTES: usize = 512 << 20;
/// Minimum buffer size: a smaller one could fit in a large last-level cache.
const MIN_BUFFER_BYTES: usize = 64 << 20;
/// Bytes that a thread takes at a time, so that fast cores read more than slow ones, as in decode. Not a power of two,
/// so that the addresses of two streams do not collide in a cache.
const PIECE_BYTES: usize = 5 << 20;
/// Total time to try the ways of reading, over all thread counts.
const READ_TIME: Duration = Duration::from_millis(1000);
/// Minimum tries of each way of reading.
const MIN_TRIES: usize = 3;
/// Passes through the buffer; a rate is their median.
const PASSES: usize = 3;
/// Total time to multiply, over all thread counts.
const MULTIPLY_TIME: Duration = Duration::from_millis(300);
/// Rounds per piece, which take about 20 microseconds, and pieces per thread.
const ROUNDS: u64 = 4096;
const PIECES: usize = 256;

/// The limits for each number of threads.
#[derive(Debug, Default, Serialize)]
pub struct MachineLimits {
    /// Empty if memory is too short for a meaningful measurement.
    pub read_bandwidth: Vec<ReadBandwidth>,
    /// Empty without an instruction that multiplies and adds integers.
    pub integer_peak: Vec<IntegerPeak>,
}

/// Read bandwidth in 1e9 bytes per second: the median of all rates of the run.
#[derive(Debug, PartialEq, Serialize)]
pub struct ReadBandwidth {
    pub threads: usize,
    pub gb_per_s: f64,
    /// Instruction set, streams and prefetches.
    pub way: String,
}

/// Integer multiplications and additions, in 1e9 per second.
#[derive(Debug, PartialEq, Serialize)]
pub struct IntegerPeak {
    pub threads: usize,
    pub gops: f64,
}

impl MachineLimits {
    pub fn read_gb_per_s(&self, threads: usize) -> Option<f64> {
        self.read_bandwidth.iter().find(|r| r.threads == threads).map(|r| r.gb_per_s)
    }

    pub fn peak_gops(&self, threads: usize) -> Option<f64> {
        self.integer_peak.iter().find(|p| p.threads == threads).map(|p| p.gops)
    }
}

/// Measures the read bandwidth on demand.
pub struct BandwidthReader {
    buffer: AlignedBytes,
    best: Vec<BestWay>,
}

/// The best way to read with some number of threads.
struct BestWay {
    threads: usize,
    way: ReadMethod,
    /// Bytes per second: first from the choice of the way, then from each [`BandwidthReader::measure_rate`].
    rates: Vec<f64>,
}

impl BandwidthReader {
    /// Finds the best way for each number of threads; `None` if memory is short. `mapped` bytes of weights must stay in
    /// memory beside the buffer, although the system counts them as usable.
    pub fn new(threads: &[usize], mapped: usize) -> Option<Self> {
        let buffer = fill_buffer(threads.iter().copied().max().unwrap_or(1), mapped)?;
        Some(Self::with_buffer(buffer, threads, READ_TIME))
    }

    fn with_buffer(buffer: AlignedBytes, threads: &[usize], time: Duration) -> Self {
        let part = time / threads.len().max(1) as u32;
        let best = threads.iter().map(|&threads| find_fastest(buffer.as_slice(), threads, part)).collect();
        Self { buffer, best }
    }

    /// Measures bytes per second now; `threads` is one of the numbers given to [`BandwidthReader::new`].
    pub fn measure_rate(&mut self, threads: usize) -> f64 {
        let best = self.best.iter_mut().find(|b| b.threads == threads);
        let best = best.expect("invariant: made for every number of threads");
        let rates: [f64; PASSES] =
            std::array::from_fn(|_| measure_pass(self.buffer.as_slice(), threads, best.way));
        let rate = median(&rates);
        best.rates.push(rate);
        rate
    }

    /// The median of all rates so far.
    fn median_bandwidth(&self, threads: usize) -> Option<ReadBandwidth> {
        let best = self.best.iter().find(|b| b.threads == threads)?;
        let gb_per_s = median(&best.rates) / 1e9;
        Some(ReadBandwidth { threads, gb_per_s, way: best.way.to_string() })
    }

    /// Bytes of the buffer, all of them resident.
    pub fn buffer_bytes(&self) -> u64 {
        self.buffer.as_slice().len() as u64
    }
}

/// The limits of the CPU: the bandwidth that `reader` measured, and the integer peak, measured here if `isa` has
/// integer instructions.
pub fn measure_cpu(threads: &[usize], reader: Option<&BandwidthReader>, isa: Option<Isa>) -> MachineLimits {
    let part = MULTIPLY_TIME / threads.len().max(1) as u32;
    let read = |&threads: &usize| reader.and_then(|r| r.median_bandwidth(threads));
    let peak =
        |&threads: &usize| Some(IntegerPeak { threads, gops: measure_ops(isa?, threads, part)? / 1e9 });
    MachineLimits {
        read_bandwidth: threads.iter().filter_map(read).collect(),
        integer_peak: threads.iter().filter_map(peak).collect(),
    }
}

/// The limits of an OpenCL device, which do not depend on the host's threads.
pub fn measure_device(device: &Device, threads: &[usize]) -> Result<MachineLimits> {
    let gb_per_s = read_bandwidth::measure_bandwidth(device)? / 1e9;
    let read = |&threads: &usize| ReadBandwidth { threads, gb_per_s, way: "on the device".into() };
    Ok(MachineLimits { read_bandwidth: threads.iter().map(read).collect(), integer_peak: Vec::new() })
}

/// The median of at least one value.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    (sorted[(n - 1) / 2] + sorted[n / 2]) / 2.0
}

/// A buffer in huge pages, as weights are. It is filled, because unwritten pages all map to one page of zeros, which
/// stays in the cache.
fn fill_buffer(threads: usize, mapped: usize) -> Option<AlignedBytes> {
    let usable =
        Memory::current().usable_bytes().map_or(usize::MAX, |m| usize::try_from(m).unwrap_or(usize::MAX));
    let len = BUFFER_BYTES.min(usable.saturating_sub(mapped) / 4);
    let mut buffer = (len >= MIN_BUFFER_BYTES).then(|| AlignedBytes::zeroed(len).ok())??;
    let parts: Vec<_> = buffer.as_mut_slice().chunks_mut(len.div_ceil(threads)).map(Mutex::new).collect();
    run_pieces(threads, parts.len(), |i| {
        parts[i].lock().expect("invariant: locked once").fill(i as u8 + 1);
    });
    drop(parts);
    Some(buffer)
}

/// Finds the way with the best median rate.
fn find_fastest(bytes: &[u8], threads: usize, time: Duration) -> BestWay {
    let mut ways: Vec<(ReadMethod, Vec<f64>)> =
        ReadMethod::list_methods().into_iter().map(|way| (way, Vec::new())).collect();
    let start = Instant::now();
    let mut tries = 0;
    while tries < MIN_TRIES || start.elapsed() < time {
        for (way, rates) in &mut ways {
            rates.push(measure_pass(bytes, threads, *way));
        }
        tries += 1;
    }
    let medians = ways.iter().map(|(way, rates)| (*way, median(rates)));
    let best = medians.max_by(|a, b| a.1.total_cmp(&b.1));
    let (way, rate) = best.expect("invariant: every CPU has a way to read");
    BestWay { threads, way, rates: vec![rate] }
}

/// Bytes per second of one pass through the buffer.
fn measure_pass(bytes: &[u8], threads: usize, way: ReadMethod) -> f64 {
    let piece = |i: usize| &bytes[i * PIECE_BYTES..bytes.len().min((i + 1) * PIECE_BYTES)];
    let seconds = run_pieces(threads, bytes.len().div_ceil(PIECE_BYTES), |i| {
        black_box(reading::read_bytes(way, piece(i)));
    });
    bytes.len() as f64 / seconds
}

/// Operations per second of the best pass; a multiply-accumulate counts as two.
fn measure_ops(isa: Isa, threads: usize, time: Duration) -> Option<f64> {
    let ops = 2 * multiply_accumulates(isa, ROUNDS)?.macs * (threads * PIECES) as u64;
    let start = Instant::now();
    let mut best = 0.0f64;
    while best == 0.0 || start.elapsed() < time {
        let seconds = run_pieces(threads, threads * PIECES, |_| {
            black_box(multiply_accumulates(isa, ROUNDS));
        });
        best = best.max(ops as f64 / seconds);
    }
    Some(best)
}

/// Seconds that the threads take for all pieces; each thread takes the next piece when it is done.
fn run_pieces(threads: usize, pieces: usize, work: impl Fn(usize) + Sync) -> f64 {
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            match next.fetch_add(1, Ordering::Relaxed) {
                piece if piece < pieces => work(piece),
                _ => break,
            }
        }
    };
    let start = Instant::now();
    pool::run_on_threads(threads, run);
    start.elapsed().as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_between_the_middle_values() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[7.0]), 7.0);
    }

    #[test]
    fn every_piece_is_done_once_by_any_number_of_threads() {
        for threads in [1, 2, 3, 7, 64] {
            let done: Vec<AtomicUsize> = (0..10).map(|_| AtomicUsize::new(0)).collect();
            let seconds = run_pieces(threads, done.len(), |i| {
                done[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seconds > 0.0 && done.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads}");
        }
    }

    #[test]
    fn a_limit_is_measured_and_says_how() {
        let buffer = AlignedBytes::zeroed(PIECE_BYTES + 123).expect("memory");
        let mut reader = BandwidthReader::with_buffer(buffer, &[1, 2], Duration::ZERO);
        assert_eq!(reader.buffer_bytes(), PIECE_BYTES as u64 + 123);
        let first = reader.median_bandwidth(2).expect("measured");
        assert!(
            first.gb_per_s > 0.0 && ReadMethod::list_methods().iter().any(|w| w.to_string() == first.way),
            "{first:?}"
        );
        let (second, third) = (reader.measure_rate(2) / 1e9, reader.measure_rate(2) / 1e9);
        let expected = median(&[first.gb_per_s, second, third]);
        let limits = measure_cpu(&[1, 2, 3], Some(&reader), None);
        assert_eq!([1, 2, 3].map(|n| limits.read_gb_per_s(n).is_some()), [true, true, false]);
        assert!((limits.read_gb_per_s(2).expect("measured") / expected - 1.0).abs() < 1e-9);
        assert!(limits.integer_peak.is_empty());
        for isa in Isa::available() {
            assert_eq!(measure_ops(isa, 1, Duration::ZERO).is_some_and(|x| x > 0.0), isa != Isa::Scalar);
        }
        assert!(measure_cpu(&[1], None, None).read_bandwidth.is_empty());
    }
}
