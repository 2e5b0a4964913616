//! Measures the rows. Rows that share caches use one set of sequences, filled to their depth once and rewound before
//! every run. All rows are warmed up before the first is timed.

use super::limits::BandwidthReader;
use super::rows::BenchRow;
use crate::cli::terminal::{Verbosity, track_progress};
use crate::dims::VOCAB;
use crate::model::trace::Trace;
use crate::run::engine::Engine;
use crate::run::options::EngineOptions;
use crate::run::session::{CancelToken, Session, forward};
use files::{Error, Result};
use std::time::{Duration, Instant};

/// Tokens of a warm-up decode; a warm-up prefill is complete.
const WARM_UP: usize = 8;

/// The sequences of all rows, ready to be measured.
pub struct Bench<'a> {
    groups: Vec<(BenchRow, Vec<Session>)>,
    cancel: &'a CancelToken,
    tokens: BenchTokens,
}

/// The tokens of a text, repeated; pseudo-random tokens if empty.
struct BenchTokens(Vec<u32>);

/// The repetitions of a row, in order.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Samples {
    /// Tokens per second.
    pub speeds: Vec<f64>,
    /// The machine's read bandwidth in bytes per second at each repetition: the mean of right before and after. Empty
    /// for rows that are not compared with it.
    pub reads: Vec<f64>,
}

impl<'a> Bench<'a> {
    /// Creates the sequences of each group of rows and fills them to their depth, with the tokens of `text` if there
    /// are any.
    pub fn new(
        engine: &Engine,
        groups: &[BenchRow],
        options: &[EngineOptions],
        cancel: &'a CancelToken,
        text: Vec<u32>,
    ) -> Result<Self> {
        let tokens = BenchTokens(text);
        let progress = track_progress("filling caches", "", Verbosity::Normal);
        let mut filled = Vec::new();
        for (i, (group, o)) in groups.iter().zip(options).enumerate() {
            progress(i, groups.len());
            let mut sessions = match group.batch {
                1 => vec![engine.session_with(o)?],
                n => engine.sessions_with(o, n)?,
            };
            if group.depth > 0 {
                let filling = tokens.tokens_at(0, group.depth);
                sessions.iter_mut().try_for_each(|session| session.prefill(&filling, cancel))?;
            }
            filled.push((*group, sessions));
        }
        progress(groups.len(), groups.len());
        Ok(Self { groups: filled, cancel, tokens })
    }

    /// Runs every row once, untimed.
    pub fn warm_up(&mut self, rows: &[BenchRow]) -> Result<()> {
        let progress = track_progress("warming up", "rows", Verbosity::Normal);
        for (i, row) in rows.iter().enumerate() {
            progress(i, rows.len());
            self.run_once(&BenchRow { n_gen: row.n_gen.min(WARM_UP), ..*row })?;
        }
        progress(rows.len(), rows.len());
        Ok(())
    }

    /// Times every row; `reader` measures before and after rows that decode one sequence.
    pub fn run(
        &mut self,
        rows: &[BenchRow],
        repetitions: usize,
        mut reader: Option<&mut BandwidthReader>,
    ) -> Result<Vec<Samples>> {
        let progress = track_progress("measuring", "runs", Verbosity::Normal);
        let all = rows.len() * repetitions;
        let mut samples = vec![Samples::default(); rows.len()];
        for round in 0..repetitions {
            for (i, (row, samples)) in rows.iter().zip(&mut samples).enumerate() {
                progress(round * rows.len() + i, all);
                let paired = row.is_decode() && row.batch == 1;
                let mut read = || Some(reader.as_deref_mut().filter(|_| paired)?.measure_rate(row.threads));
                let before = read();
                let time = self.run_once(row)?;
                samples.reads.extend(before.zip(read()).map(|(before, after)| (before + after) / 2.0));
                let tokens = row.tokens_per_sequence() * row.batch;
                samples.speeds.push(tokens as f64 / time.as_secs_f64().max(1e-9));
            }
        }
        progress(all, all);
        Ok(samples)
    }

    /// Times one run of a row; it may be shorter than the row of the caches.
    fn run_once(&mut self, row: &BenchRow) -> Result<Duration> {
        let cancel = self.cancel;
        let tokens = self.tokens.tokens_at(row.depth, row.tokens_per_sequence());
        let sessions = self.rewound_sessions(row)?;
        let start = Instant::now();
        match &mut sessions[..] {
            [session] if !row.is_decode() => session.prefill(&tokens, cancel)?,
            sessions => {
                for &token in &tokens {
                    if cancel.is_cancelled() {
                        return Err(Error::Interrupted);
                    }
                    match &mut *sessions {
                        [session] => session.decode(token)?,
                        sessions => decode_together(sessions, token)?,
                    }
                }
            }
        }
        Ok(start.elapsed())
    }

    /// The row's sequences, at their depth.
    fn rewound_sessions(&mut self, row: &BenchRow) -> Result<&mut Vec<Session>> {
        let group = self.groups.iter_mut().find(|(group, _)| group.shares_caches(row));
        let (group, sessions) = group.expect("invariant: groups are made of the rows");
        sessions.iter_mut().try_for_each(|session| session.rewind(group.depth))?;
        Ok(sessions)
    }

    /// Traces one step of the first row that decodes, else the whole prompt of the first row. Also returns a title.
    pub fn trace_bench_row(&mut self, rows: &[BenchRow]) -> Result<(String, Trace)> {
        let row = rows.iter().find(|row| row.is_decode()).unwrap_or(&rows[0]);
        let what = match (row.is_decode(), row.batch) {
            (false, _) => "",
            (true, 1) => "one token of ",
            (true, _) => "one token of each sequence of ",
        };
        self.rewound_sessions(row)?[0].set_trace(Some(Trace::default()));
        self.run_once(&BenchRow { n_gen: row.n_gen.min(1), ..*row })?;
        let trace = self.rewound_sessions(row)?[0].set_trace(None).expect("invariant: just begun");
        Ok((format!("trace: {what}{}, threads {}, KV {}", row.name(), row.threads, row.kv_types), trace))
    }
}

/// Decodes one more token in each sequence, a different one each.
fn decode_together(sessions: &mut [Session], token: u32) -> Result<()> {
    for (i, session) in sessions.iter_mut().enumerate() {
        session.stage_token((token + i as u32) % VOCAB as u32)?;
    }
    forward(&mut sessions.iter_mut().collect::<Vec<_>>(), None)
}

impl BenchTokens {
    /// The `n` tokens at positions from `from` on, the same in every run.
    fn tokens_at(&self, from: usize, n: usize) -> Vec<u32> {
        let mixed = |at: usize| (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let token = |at| match self.0.len() {
            0 => (mixed(at) % VOCAB as u64) as u32,
            len => self.0[at % len],
        };
        (from..from + n).map(token).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_valid_and_differ() {
        let any = BenchTokens(Vec::new());
        let mut ids = any.tokens_at(0, 512);
        assert!(ids.iter().all(|&t| (t as usize) < VOCAB));
        assert_eq!(ids[100..], any.tokens_at(100, 412));
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() > 256.min(VOCAB / 4), "{}", ids.len());
        assert_eq!(BenchTokens(vec![7, 8, 9]).tokens_at(2, 5), [9, 7, 8, 9, 7]);
    }
}
