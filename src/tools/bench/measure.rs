//! Runs the rows: one sequence a group, filled to its depth once and rewound before every run. All rows are warmed up
//! before the first is timed.

use super::ceiling::Reader;
use super::rows::{Group, Row, Test};
use super::spread::Timed;
use crate::cli::terminal::{Progress, Verbosity};
use crate::dims::VOCAB;
use crate::model::trace::Trace;
use crate::run::engine::Engine;
use crate::run::options::EngineOptions;
use crate::run::session::{CancelToken, Session, forward};
use files::{Error, Result};
use std::time::{Duration, Instant};

/// Tokens of a warm-up decode; a prefill is warmed up whole.
const WARM_UP: usize = 8;

/// The sequences, ready to measure on.
pub struct Bench<'a> {
    groups: Vec<(Group, Vec<Session>)>,
    cancel: &'a CancelToken,
    tokens: Tokens,
}

/// The tokens of a text, again and again; without one, any mixture.
struct Tokens(Vec<u32>);

impl<'a> Bench<'a> {
    /// Makes a sequence for each group and fills it to its depth. `text` is what is measured with; where it is empty, any
    /// mixture of tokens.
    pub fn new(
        engine: &Engine,
        groups: &[Group],
        options: &[EngineOptions],
        cancel: &'a CancelToken,
        text: Vec<u32>,
    ) -> Result<Self> {
        let tokens = Tokens(text);
        let progress = Progress::new("filling cache", Verbosity::Normal);
        let mut filled = Vec::new();
        for (i, (group, o)) in groups.iter().zip(options).enumerate() {
            progress.show(i, groups.len());
            let mut sessions = match group.batch {
                1 => vec![engine.session_of(o)?],
                n => engine.sessions_of(o, n)?,
            };
            if group.depth > 0 {
                let filling = tokens.take(0, group.depth);
                sessions.iter_mut().try_for_each(|session| session.prefill(&filling, cancel))?;
            }
            filled.push((*group, sessions));
        }
        progress.show(groups.len(), groups.len());
        Ok(Self { groups: filled, cancel, tokens })
    }

    /// Runs every row once, untimed.
    pub fn warm_up(&mut self, rows: &[Row]) -> Result<()> {
        let progress = Progress::new("warm-up", Verbosity::Normal);
        for (i, row) in rows.iter().enumerate() {
            progress.show(i, rows.len());
            let test = match row.test {
                Test::Decode(n) => Test::Decode(n.min(WARM_UP)),
                Test::Together(n, batch) => Test::Together(n.min(WARM_UP), batch),
                prefill => prefill,
            };
            self.once(row, test)?;
        }
        progress.show(rows.len(), rows.len());
        Ok(())
    }

    /// Times every row; `reader` measures before and after those that decode one sequence.
    pub fn run(
        &mut self,
        rows: &[Row],
        repetitions: usize,
        mut reader: Option<&mut Reader>,
    ) -> Result<Vec<Timed>> {
        let progress = Progress::new("run", Verbosity::Normal);
        let all = rows.len() * repetitions;
        let mut timed = vec![Timed::default(); rows.len()];
        for round in 0..repetitions {
            for (i, (row, timed)) in rows.iter().zip(&mut timed).enumerate() {
                progress.show(round * rows.len() + i, all);
                let paired = matches!(row.test, Test::Decode(_));
                let mut read = || Some(reader.as_deref_mut().filter(|_| paired)?.rate(row.threads));
                let before = read();
                let time = self.once(row, row.test)?;
                timed.reads.extend(before.zip(read()).map(|(before, after)| (before + after) / 2.0));
                timed.speeds.push(row.test.tokens() as f64 / time.as_secs_f64().max(1e-9));
            }
        }
        progress.show(all, all);
        Ok(timed)
    }

    /// Times one run of `test` from the state that `row` starts from.
    fn once(&mut self, row: &Row, test: Test) -> Result<Duration> {
        let cancel = self.cancel;
        let tokens = self.tokens.take(row.depth, test.tokens() / row.batch());
        let sessions = self.sessions(row)?;
        let start = Instant::now();
        match (&mut sessions[..], test) {
            ([session], Test::Prefill(_)) => session.prefill(&tokens, cancel)?,
            (sessions, _) => {
                for &token in &tokens {
                    if cancel.is_cancelled() {
                        return Err(Error::Interrupted);
                    }
                    match &mut *sessions {
                        [session] => session.decode(token)?,
                        sessions => step(sessions, token)?,
                    }
                }
            }
        }
        Ok(start.elapsed())
    }

    /// The row's sequences, at their depth.
    fn sessions(&mut self, row: &Row) -> Result<&mut Vec<Session>> {
        let group = self.groups.iter_mut().find(|(g, _)| g.has(row));
        let (group, sessions) = group.expect("invariant: groups are made of the rows");
        sessions.iter_mut().try_for_each(|session| session.rewind(group.depth))?;
        Ok(sessions)
    }

    /// Starts or ends a trace.
    fn set_trace(&mut self, row: &Row, trace: Option<Trace>) -> Result<Option<Trace>> {
        Ok(self.sessions(row)?[0].set_trace(trace))
    }

    /// Traces one step of the first row that decodes, else the whole prompt of the first row; says which.
    pub fn trace(&mut self, rows: &[Row]) -> Result<(String, Trace)> {
        let row = rows.iter().find(|r| !matches!(r.test, Test::Prefill(_))).unwrap_or(&rows[0]);
        let (what, test) = match row.test {
            Test::Decode(_) => ("one token of ", Test::Decode(1)),
            Test::Together(_, batch) => ("one token of each sequence of ", Test::Together(1, batch)),
            prefill => ("", prefill),
        };
        self.set_trace(row, Some(Trace::default()))?;
        self.once(row, test)?;
        let trace = self.set_trace(row, None)?.expect("invariant: just begun");
        Ok((format!("trace: {what}{}, threads {}, KV {}", row.name(), row.threads, row.kv_types), trace))
    }
}

/// One token more in each of some sequences, not the same one.
fn step(sessions: &mut [Session], token: u32) -> Result<()> {
    for (i, session) in sessions.iter_mut().enumerate() {
        session.stage_token((token + i as u32) % VOCAB as u32)?;
    }
    forward(&mut sessions.iter_mut().collect::<Vec<_>>(), None)
}

impl Tokens {
    /// Those of some positions, the same in every run.
    fn take(&self, from: usize, n: usize) -> Vec<u32> {
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
        let any = Tokens(Vec::new());
        let mut ids = any.take(0, 512);
        assert!(ids.iter().all(|&t| (t as usize) < VOCAB));
        assert_eq!(ids[100..], any.take(100, 412));
        ids.sort_unstable();
        ids.dedup();
        assert!(ids.len() > 256.min(VOCAB / 4), "{}", ids.len());
        assert_eq!(Tokens(vec![7, 8, 9]).take(2, 5), [9, 7, 8, 9, 7]);
    }
}
