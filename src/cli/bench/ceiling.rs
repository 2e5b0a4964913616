//! What this machine could give: how fast it reads memory, the ceiling for decode, which reads every weight
//! once a token; and how fast it multiplies integers, the ceiling for prefill.
//!
//! The best way to read is found once, after the warm-up; then reading is measured right before and right
//! after each repetition that decodes, since a machine's bandwidth may change from second to second.
//! Integers come last.

use super::result::Spread;
use crate::opencl::{Device, stream};
use crate::run::system::Memory;
use files::Result;
use files::mapped::AlignedBytes;
use numeric::simd::Isa;
use numeric::simd::peak::multiply_accumulates;
use numeric::simd::stream::{self as reading, Way};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Far more than any cache holds, and enough to last some milliseconds.
const BUFFER: usize = 512 << 20;
/// Below this a large last-level cache would be measured instead.
const LEAST: usize = 64 << 20;
/// What a thread takes at a time. Cores of different speed read as much as they can, as in decode. Not a
/// power of two, so that two streams through it are not at addresses that are alike.
const PIECE: usize = 5 << 20;
/// How long ways of reading are tried, over all numbers of threads.
const READING: Duration = Duration::from_millis(1000);
/// Every way of reading has at least so many tries.
const TRIES: usize = 3;
/// Passes through the buffer that one rate is the median of.
const PASSES: usize = 3;
/// How long multiplying is tried, over all numbers of threads.
const MULTIPLYING: Duration = Duration::from_millis(300);
/// Rounds of a piece, which last some 20 microseconds, and pieces of one thread's share.
const ROUNDS: u64 = 4096;
const PIECES: usize = 256;

/// The ceilings with some number of threads.
pub(super) struct Ceiling {
    pub threads: usize,
    /// Bytes read per second, the median of all rates of the run, and how; `None` when memory is too short for
    /// a measurement that means anything.
    pub read: Option<(f64, String)>,
    /// Multiplications and additions of integers per second; `None` without an instruction for both.
    pub ops: Option<f64>,
}

/// Reads memory as fast as this machine can, whenever asked.
pub(super) struct Reader {
    buffer: AlignedBytes,
    best: Vec<Best>,
}

/// The best way to read with some number of threads.
struct Best {
    threads: usize,
    way: Way,
    /// Bytes per second: when the way was chosen, then whenever asked.
    rates: Vec<f64>,
}

impl Reader {
    /// Finds the best way for each number of threads; `None` when memory is too short. Beside it `mapped` bytes of
    /// weights must stay in memory, which the system counts as usable.
    pub fn new(threads: &[usize], mapped: usize) -> Option<Self> {
        let buffer = buffer(threads.iter().copied().max().unwrap_or(1), mapped)?;
        Some(Self::over(buffer, threads, READING))
    }

    fn over(buffer: AlignedBytes, threads: &[usize], time: Duration) -> Self {
        let part = time / threads.len().max(1) as u32;
        let best = threads.iter().map(|&threads| fastest(buffer.as_slice(), threads, part)).collect();
        Self { buffer, best }
    }

    /// Bytes per second now, with one of the numbers of threads that it was made for.
    pub fn rate(&mut self, threads: usize) -> f64 {
        let best = self.best.iter_mut().find(|b| b.threads == threads);
        let best = best.expect("invariant: made for every number of threads");
        let rates: [f64; PASSES] = std::array::from_fn(|_| pass(self.buffer.as_slice(), threads, best.way));
        let rate = Spread::of(&rates).median;
        best.rates.push(rate);
        rate
    }

    /// Bytes per second, the median of all rates so far, and how they are read.
    fn read(&self, threads: usize) -> Option<(f64, String)> {
        let best = self.best.iter().find(|b| b.threads == threads)?;
        Some((Spread::of(&best.rates).median, best.way.to_string()))
    }

    /// Bytes of its buffer, all of them resident.
    pub fn bytes(&self) -> u64 {
        self.buffer.as_slice().len() as u64
    }
}

/// The ceilings for each number of threads: what `reader` read so far, and products of integers, measured
/// here, if `isa` does them.
pub(super) fn measure(threads: &[usize], reader: Option<&Reader>, isa: Option<Isa>) -> Vec<Ceiling> {
    let part = MULTIPLYING / threads.len().max(1) as u32;
    let measure = |&threads: &usize| Ceiling {
        threads,
        read: reader.and_then(|r| r.read(threads)),
        ops: isa.and_then(|isa| ops(isa, threads, part)),
    };
    threads.iter().map(measure).collect()
}

/// The ceilings on an OpenCL device, however many threads its host has.
pub(super) fn of_device(device: &Device, threads: &[usize]) -> Result<Vec<Ceiling>> {
    let rate = stream::bandwidth(device)?;
    let ceiling =
        |&threads: &usize| Ceiling { threads, read: Some((rate, "on the device".into())), ops: None };
    Ok(threads.iter().map(ceiling).collect())
}

/// Memory in huge pages, as weights are, with something in it: pages that were never written are all the
/// same page of zeros, and in the cache.
fn buffer(threads: usize, mapped: usize) -> Option<AlignedBytes> {
    let usable = Memory::now().usable().map_or(usize::MAX, |m| usize::try_from(m).unwrap_or(usize::MAX));
    let len = BUFFER.min(usable.saturating_sub(mapped) / 4);
    let mut buffer = (len >= LEAST).then(|| AlignedBytes::zeroed(len).ok())??;
    std::thread::scope(|scope| {
        for (i, part) in buffer.as_mut_slice().chunks_mut(len.div_ceil(threads)).enumerate() {
            scope.spawn(move || part.fill(i as u8 + 1));
        }
    });
    Some(buffer)
}

/// The best way, by the median of its passes, as rows count by theirs.
fn fastest(bytes: &[u8], threads: usize, time: Duration) -> Best {
    let mut ways: Vec<(Way, Vec<f64>)> = Way::all().into_iter().map(|way| (way, Vec::new())).collect();
    let start = Instant::now();
    let mut tries = 0;
    while tries < TRIES || start.elapsed() < time {
        for (way, rates) in &mut ways {
            rates.push(pass(bytes, threads, *way));
        }
        tries += 1;
    }
    let medians = ways.iter().map(|(way, rates)| (*way, Spread::of(rates).median));
    let best = medians.max_by(|a, b| a.1.total_cmp(&b.1));
    let (way, rate) = best.expect("invariant: every CPU has a way to read");
    Best { threads, way, rates: vec![rate] }
}

/// Bytes per second of one pass.
fn pass(bytes: &[u8], threads: usize, way: Way) -> f64 {
    let piece = |i: usize| &bytes[i * PIECE..bytes.len().min((i + 1) * PIECE)];
    let seconds = together(threads, bytes.len().div_ceil(PIECE), |i| {
        black_box(reading::read(way, piece(i)));
    });
    bytes.len() as f64 / seconds
}

/// Operations per second of the best pass; a multiplication and its addition are two.
fn ops(isa: Isa, threads: usize, time: Duration) -> Option<f64> {
    let ops = 2 * multiply_accumulates(isa, ROUNDS)?.macs * (threads * PIECES) as u64;
    let start = Instant::now();
    let mut best = 0.0f64;
    while best == 0.0 || start.elapsed() < time {
        let seconds = together(threads, threads * PIECES, |_| {
            black_box(multiply_accumulates(isa, ROUNDS));
        });
        best = best.max(ops as f64 / seconds);
    }
    Some(best)
}

/// Seconds that so many threads take for all pieces, each taking the next one when it is done.
fn together(threads: usize, pieces: usize, work: impl Fn(usize) + Sync) -> f64 {
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
    std::thread::scope(|scope| {
        (1..threads).for_each(|_| {
            scope.spawn(run);
        });
        run();
    });
    start.elapsed().as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_done_once_by_any_number_of_threads() {
        for threads in [1, 2, 3, 7, 64] {
            let done: Vec<AtomicUsize> = (0..10).map(|_| AtomicUsize::new(0)).collect();
            let seconds = together(threads, done.len(), |i| {
                done[i].fetch_add(1, Ordering::Relaxed);
            });
            assert!(seconds > 0.0 && done.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{threads}");
        }
    }

    #[test]
    fn a_ceiling_is_measured_and_says_how() {
        let buffer = AlignedBytes::zeroed(PIECE + 123).expect("memory");
        let mut reader = Reader::over(buffer, &[1, 2], Duration::ZERO);
        assert_eq!(reader.bytes(), PIECE as u64 + 123);
        let (first, way) = reader.read(2).expect("measured");
        assert!(first > 0.0 && Way::all().iter().any(|w| w.to_string() == way), "{way}");
        let (second, third) = (reader.rate(2), reader.rate(2));
        let median = Spread::of(&[first, second, third]).median;
        assert_eq!(reader.read(2), Some((median, way)));
        let ceilings = measure(&[1, 2, 3], Some(&reader), None);
        assert_eq!(ceilings.iter().map(|c| c.read.is_some()).collect::<Vec<_>>(), [true, true, false]);
        for isa in Isa::available() {
            assert_eq!(ops(isa, 1, Duration::ZERO).is_some_and(|x| x > 0.0), isa != Isa::Scalar);
        }
        assert!(measure(&[], None, None).is_empty());
        assert!(measure(&[1], None, None)[0].read.is_none());
    }
}
