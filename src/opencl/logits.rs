//! The logits of a pass: which are wanted, and where they go.

use super::threads::both;
use crate::dims::VOCAB;
use crate::model::device::{Logits, Row, Run};
use opencl_runtime::buffer::{Buffer, Lender, Lent, bytes_of_mut};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};
use std::ops::Range;

/// How many of a run's tokens, the last ones, have logits that are wanted.
pub fn rows_of(run: &Run<'_>) -> usize {
    match run.logits {
        Logits::None => 0,
        Logits::Last(_) => 1,
        Logits::All(_) => run.tokens.len(),
    }
}

/// The tokens of a pass whose logits are wanted, in ascending order.
pub fn wanted<'a>(runs: &'a [Run<'_>]) -> impl Iterator<Item = usize> + 'a {
    let mut end = 0;
    runs.iter().flat_map(move |run| {
        end += run.tokens.len();
        end - rows_of(run)..end
    })
}

/// Of runs whose wanted rows begin with `end`: where the rows among `rows` are to go, with the first of each run.
pub fn each_of<'a>(
    rows: &'a Range<usize>,
    mut end: usize,
    runs: &'a mut [Run<'_>],
) -> impl Iterator<Item = (usize, &'a mut [f32])> {
    runs.iter_mut().filter_map(move |run| {
        let (Logits::Last(logits) | Logits::All(logits)) = &mut run.logits else { return None };
        let first = end;
        end += logits.len() / VOCAB;
        let (from, to) = (rows.start.max(first), rows.end.min(end));
        (from < to).then(|| (from, &mut logits[(from - first) * VOCAB..(to - first) * VOCAB]))
    })
}

/// Bytes that a thread more copies in less time than it takes to begin.
const SPREAD: usize = 1 << 21;

/// Bytes of the rows that are wanted.
fn bytes(runs: &[Run<'_>]) -> usize {
    4 * VOCAB * runs.iter().map(rows_of).sum::<usize>()
}

/// Copies `rows` of logits to where they belong, of runs whose wanted rows begin with `end`. Those of sixteen sequences
/// are eight megabytes, which take one thread as long as some GPUs take to compute them.
pub fn spread(found: &[u8], (rows, end): (Range<usize>, usize), runs: &mut [Run<'_>]) {
    if runs.len() > 1 && bytes(runs) >= 2 * SPREAD {
        let (some, others) = runs.split_at_mut(runs.len() / 2);
        let middle = end + some.iter().map(rows_of).sum::<usize>();
        let rows = || rows.clone();
        return both(|| spread(found, (rows(), middle), others), || spread(found, (rows(), end), some));
    }
    for (first, out) in each_of(&rows, end, runs) {
        let (at, out) = (4 * (first - rows.start) * VOCAB, bytes_of_mut(out));
        out.copy_from_slice(&found[at..at + out.len()]);
    }
}

/// Where kernels of a device with memory of its own write logits: in the host's. They arrive while the last ones are
/// computed; to copy them after that took more than half as long as all else of a pass of sixteen sequences.
#[derive(Default)]
pub struct Arriving {
    lender: Lender,
    /// For those that are wanted in other memory than this has lent.
    spare: Vec<Lent>,
}

impl Arriving {
    /// Memory for the logits of a token, unless `now` is that; see [`row`](crate::model::device::Device::row).
    pub fn lend(&mut self, device: &Device, now: &[f32]) -> Option<Row> {
        if self.lender.buffer_of(now).is_some() {
            return None;
        }
        Some(Box::new(self.lender.lend(device, VOCAB).ok()?))
    }

    /// Where the kernel writes those of run `i`, of one token.
    pub fn buffer(&mut self, device: &Device, i: usize, logits: &Logits<'_>) -> Result<Buffer> {
        if let Logits::Last(logits) | Logits::All(logits) = logits
            && let Some(buffer) = self.lender.buffer_of(logits)
        {
            return Ok(buffer);
        }
        while self.spare.len() <= i {
            self.spare.push(self.lender.lend(device, VOCAB)?);
        }
        Ok(self.lender.buffer_of(&self.spare[i]).expect("invariant: just lent, or before"))
    }

    /// Brings them where they are wanted, unless they are there, after the device has finished.
    ///
    /// # Errors
    ///
    /// `Lost` where they say that a group of the kernel waited in vain for another.
    pub fn bring(&self, i: usize, logits: &mut Logits<'_>) -> Result<()> {
        let (Logits::Last(logits) | Logits::All(logits)) = logits else { return Ok(()) };
        if self.lender.buffer_of(logits).is_none() {
            logits.copy_from_slice(&self.spare[i]);
        }
        match logits[0].is_nan() {
            true => Err(Failure::new(Kind::Lost, "groups of a kernel were not all running at once")),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::device::{Cache, Extent, HostRows, KvRows};
    use files::Result;

    /// None, of which nothing is asked.
    struct Absent;

    #[rustfmt::skip]
    impl Cache for Absent {
        fn extent(&self) -> Extent { unreachable!() }
        fn set_len(&mut self, _: usize) { unreachable!() }
        fn resize(&mut self, _: usize) -> Result<()> { unreachable!() }
        fn outlast(&mut self) -> Result<()> { unreachable!() }
        fn keep(&mut self, _: usize, _: usize, _: &[u32]) -> Result<()> { unreachable!() }
        fn read(&mut self, _: usize, _: Range<usize>, _: &mut KvRows) -> Result<()> { unreachable!() }
        fn write(&mut self, _: usize, _: Range<usize>, _: &KvRows) -> Result<()> { unreachable!() }
        fn read_mass(&mut self, _: usize, _: &mut [f32]) -> Result<()> { unreachable!() }
        fn write_mass(&mut self, _: usize, _: &[f32]) -> Result<()> { unreachable!() }
        fn host(&mut self) -> Result<&mut dyn HostRows> { unreachable!() }
    }

    /// Rows of three kinds of runs, few and so many that threads share them, in one piece and in several.
    #[test]
    fn rows_arrive_where_they_belong() {
        for many in [2, 8 * SPREAD / (4 * VOCAB)] {
            let counts = [1, 0, many, 1, many, 1];
            let tokens = vec![0; many];
            let mut caches: Vec<_> = counts.iter().map(|_| Absent).collect();
            let mut out: Vec<Vec<f32>> = counts.iter().map(|n| vec![-1.0; n * VOCAB]).collect();
            let all: usize = counts.iter().sum();
            let row = |i: usize| (0..VOCAB).map(move |j| (i * VOCAB + j) as f32);
            let each = caches.iter_mut().zip(&mut out).zip(counts);
            let mut runs: Vec<_> = each
                .map(|((cache, out), n)| {
                    let logits = match n {
                        0 => Logits::None,
                        1 => Logits::Last(out),
                        _ => Logits::All(out),
                    };
                    Run::new(cache, &tokens[..n.max(1)], 0, logits)
                })
                .collect();
            for rows in [0..all / 3, all / 3..all] {
                let found: Vec<u8> = rows.clone().flat_map(row).flat_map(f32::to_le_bytes).collect();
                spread(&found, (rows, 0), &mut runs);
            }
            drop(runs);
            assert!(out.concat().into_iter().eq((0..all).flat_map(row)), "{many}");
        }
    }
}
