//! Logits of a pass: which ones are requested, their computation, and where they go.

use super::pass::Pass;
use crate::dims::{LAYERS, VOCAB};
use crate::model::device::{Logits, Run};
use numeric::pool::run_both;
use opencl_runtime::buffer::bytes_of_mut;
use opencl_runtime::failure::Result;
use std::ops::Range;

/// Number of a run's tokens, the last ones, with requested logits.
pub fn output_rows(run: &Run<'_>) -> usize {
    match run.logits {
        Logits::None => 0,
        Logits::Last(_) => 1,
        Logits::All(_) => run.tokens.len(),
    }
}

/// Indices of the tokens in a pass with requested logits, ascending.
pub fn output_tokens<'a>(runs: &'a [Run<'_>]) -> impl Iterator<Item = usize> + 'a {
    let mut end = 0;
    runs.iter().flat_map(move |run| {
        end += run.tokens.len();
        end - output_rows(run)..end
    })
}

/// Destinations of the logits in `rows`, each with its first row. `end` is the number of requested rows before `runs`.
pub fn outputs_of<'a>(
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

/// Bytes that an additional thread must copy to be worth starting.
const SPREAD: usize = 1 << 21;

/// Bytes of all requested rows.
fn requested_bytes(runs: &[Run<'_>]) -> usize {
    4 * VOCAB * runs.iter().map(output_rows).sum::<usize>()
}

/// Copies logits of `rows` to their destinations. `end` is the number of requested rows before `runs`. The logits of
/// sixteen sequences are eight megabytes; copying them takes one thread as long as some GPUs need to compute them.
pub fn scatter_logits(found: &[u8], (rows, end): (Range<usize>, usize), runs: &mut [Run<'_>]) {
    if runs.len() > 1 && requested_bytes(runs) >= 2 * SPREAD {
        let (some, others) = runs.split_at_mut(runs.len() / 2);
        let middle = end + some.iter().map(output_rows).sum::<usize>();
        let rows = || rows.clone();
        return run_both(
            || scatter_logits(found, (rows(), middle), others),
            || scatter_logits(found, (rows(), end), some),
        );
    }
    for (first, out) in outputs_of(&rows, end, runs) {
        let (at, out) = (4 * (first - rows.start) * VOCAB, bytes_of_mut(out));
        out.copy_from_slice(&found[at..at + out.len()]);
    }
}

impl Pass<'_> {
    /// Computes the requested logits.
    pub(super) fn head(&mut self, runs: &mut [Run<'_>]) -> Result<()> {
        match output_tokens(runs).count() {
            // The host does not wait here, so the device must be told to start.
            0 => return self.device().flush(),
            1 => {
                self.launches.head.launch_one(&self.model.device)?; // fused: norm, head
                self.read_logits(0..1, runs)?;
            }
            count => {
                for first in (0..count).step_by(self.scratch.logit_rows) {
                    let rows = first..count.min(first + self.scratch.logit_rows);
                    match self.kept_tokens {
                        Some(_) => self.final_norm(rows.clone())?,
                        None => self.final_norm(output_tokens(runs).skip(first).take(rows.len()))?,
                    }
                    self.launches.heads.launch_many(&self.model.device, rows.len())?;
                    self.read_logits(rows, runs)?;
                }
            }
        }
        self.end_step("head", LAYERS)
    }

    /// Final norm of some tokens; adjacent ones share a launch.
    fn final_norm(&mut self, tokens: impl Iterator<Item = usize>) -> Result<()> {
        let norm = self.launches.norm.as_mut().expect("invariant: there is a norm for many tokens");
        let (mut tokens, mut to) = (tokens.peekable(), 0);
        while let Some(first) = tokens.next() {
            let mut n = 1;
            while tokens.next_if_eq(&(first + n)).is_some() {
                n += 1;
            }
            norm.set_ints(&[first as i32, to as i32])?.run(&self.model.device, [n, 1])?;
            to += n;
        }
        Ok(())
    }

    /// Waits for the logits of the last launch, which are the given rows of all requested ones, and copies them to the
    /// runs.
    fn read_logits(&mut self, rows: Range<usize>, runs: &mut [Run<'_>]) -> Result<()> {
        let logits = &self.scratch.logits;
        match &mut self.readback {
            Some(readback) => {
                // A read costs as much as half a megabyte.
                scatter_logits(readback.fetch_range(logits, 0..4 * rows.len() * VOCAB)?, (rows, 0), runs);
                Ok(())
            }
            None => outputs_of(&rows, 0, runs).try_for_each(|(first, out)| {
                logits.read(4 * (first - rows.start) * VOCAB, bytes_of_mut(out))
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::device::{Extent, HostRows, KvCache, KvRows};
    use files::Result;

    /// A cache that is never used.
    struct Absent;

    #[rustfmt::skip]
    impl KvCache for Absent {
        fn extent(&self) -> Extent { unreachable!() }
        fn set_len(&mut self, _: usize) { unreachable!() }
        fn read_state(&mut self, _: &mut [f32]) -> Result<()> { unreachable!() }
        fn write_state(&mut self, _: &[f32]) -> Result<()> { unreachable!() }
        fn restore_first_state(&mut self) -> Result<()> { unreachable!() }
        fn resize(&mut self, _: usize) -> Result<()> { unreachable!() }
        fn reserve_window_rows(&mut self) -> Result<()> { unreachable!() }
        fn retain_slots(&mut self, _: usize, _: usize, _: &[u32]) -> Result<()> { unreachable!() }
        fn read_rows(&mut self, _: usize, _: Range<usize>, _: &mut KvRows) -> Result<()> { unreachable!() }
        fn write_rows(&mut self, _: usize, _: Range<usize>, _: &KvRows) -> Result<()> { unreachable!() }
        fn read_mass(&mut self, _: usize, _: &mut [f32]) -> Result<()> { unreachable!() }
        fn write_mass(&mut self, _: usize, _: &[f32]) -> Result<()> { unreachable!() }
        fn host_rows(&mut self) -> Result<&mut dyn HostRows> { unreachable!() }
    }

    /// Three kinds of runs, few tokens and enough for several threads, in one piece and in several.
    #[test]
    fn logits_arrive_in_the_rows_of_their_tokens() {
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
                scatter_logits(&found, (rows, 0), &mut runs);
            }
            drop(runs);
            assert!(out.concat().into_iter().eq((0..all).flat_map(row)), "{many}");
        }
    }
}
