//! One pass of several sequences: what each has staged is computed together, so that the weights are read once, and each
//! gets the bits that it would get alone.

use super::Session;
use crate::model::device::{CancelToken, Run, SharedDevice, locked};
use crate::run::draft_model::PassTime;
use files::{Error, Result};
use smallvec::SmallVec;
use std::time::{Duration, Instant};

/// One thing for each sequence of a pass: as many as mostly run together need no allocation.
pub(crate) type Few<T> = SmallVec<[T; 16]>;

/// Tokens that the next pass computes.
#[derive(Default)]
pub(super) struct PendingPass {
    pub tokens: Vec<u32>,
    /// The end of the last prompt.
    pub known: usize,
    pub logits: LogitsWanted,
}

/// Logits that a pass gives.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogitsWanted {
    #[default]
    Nothing,
    /// Those of a prompt's last token.
    Last,
    /// Those of the next token, which is alone.
    Next,
    /// Those of every token: the last of the sequence, then the draft.
    Draft,
}

/// The outcome of staging a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The next pass computes it.
    Staged,
    /// A draft had computed it, so its logits are there already.
    Computed,
}

/// Computes what is staged of some sequences, those of one device in as few passes as it allows.
///
/// # Errors
///
/// `Interrupted` soon after `cancel` is cancelled: what is not computed is not staged any more. What the device of a
/// sequence returns where there is no other to go on on.
pub fn forward(sessions: &mut [&mut Session], cancel: Option<&CancelToken>) -> Result<()> {
    let (staged, began) = (PassTiming::new(sessions), Instant::now());
    if let [session] = sessions {
        session.forward_alone(cancel)?;
    } else {
        forward_together(sessions, cancel)?;
    }
    staged.record(sessions, began.elapsed());
    Ok(())
}

fn forward_together(sessions: &mut [&mut Session], cancel: Option<&CancelToken>) -> Result<()> {
    let mut left: Sessions<'_> = sessions.iter_mut().map(|s| &mut **s).filter(|s| s.is_staged()).collect();
    while !left.is_empty() {
        let device = left[0].device();
        let (mut together, others) = one_pass(left, &device);
        left = others;
        let mut runs: Few<Run<'_>> = together.iter_mut().map(|s| s.run()).collect();
        let computed = locked(&device).forward(&mut runs, cancel);
        drop(runs);
        match computed {
            Ok(()) => together.iter_mut().for_each(|s| s.commit()),
            Err(Error::Device(_) | Error::Memory(_)) => {
                // The device is lost for all of them; each finds out, and goes on elsewhere.
                together.iter_mut().try_for_each(|s| s.forward_alone(cancel))?;
            }
            Err(e) => {
                together.iter_mut().chain(&mut left).for_each(|s| s.pending.tokens.clear());
                return Err(e);
            }
        }
    }
    Ok(())
}

type Sessions<'a> = Few<&'a mut Session>;

/// Those on `device` that fit into one of its passes, and the others.
fn one_pass<'a>(sessions: Sessions<'a>, device: &SharedDevice) -> (Sessions<'a>, Sessions<'a>) {
    let mut room = locked(device).max_tokens();
    sessions.into_iter().partition(|s| {
        let n = s.staged();
        let fits = s.here.is_on(device) && n <= room;
        room -= if fits { n } else { 0 };
        fits
    })
}

/// Staged tokens of some sequences, for the parts that learn from the times of passes: drafts, and schedules of two devices.
struct PassTiming {
    /// True for one token of one sequence.
    is_token_alone: bool,
    /// Drafted tokens of each; `None` for what is no next token.
    drafted: Vec<Option<usize>>,
    /// Parts of prompts beside them.
    prompts: usize,
}

impl PassTiming {
    fn new(sessions: &[&mut Session]) -> Self {
        let is_token_alone =
            matches!(sessions, [s] if s.is_staged() && s.pending.logits == LogitsWanted::Next);
        // No draft learns, and nothing is allocated.
        if sessions.iter().all(|s| s.drafter.as_ref().is_none_or(|d| !d.has_model())) {
            return Self { is_token_alone, drafted: Vec::new(), prompts: 0 };
        }
        let drafted = |s: &&mut Session| match s.pending.logits {
            _ if !s.is_staged() => None,
            LogitsWanted::Draft => Some(s.staged() - 1),
            LogitsWanted::Next => Some(0),
            LogitsWanted::Nothing | LogitsWanted::Last => None,
        };
        let drafted: Vec<_> = sessions.iter().map(drafted).collect();
        let staged = sessions.iter().filter(|s| s.is_staged()).count();
        Self { is_token_alone, prompts: staged - drafted.iter().flatten().count(), drafted }
    }

    /// Records the time that they took together.
    fn record(self, sessions: &mut [&mut Session], time: Duration) {
        if let [Session { here, placement: Some(placement), .. }] = sessions
            && self.is_token_alone
        {
            placement.record_time(here.filled(), time);
        }
        let next = self.drafted.iter().flatten().count();
        let all: usize = self.drafted.iter().flatten().sum();
        // A prompt beside them takes longer than they do.
        let counts = next > 0 && self.prompts == 0;
        let share = time / next.max(1) as u32;
        for (session, drafted) in sessions.iter_mut().zip(&self.drafted) {
            let Some(drafter) = &mut session.drafter else { continue };
            // All wait while one is drafted for. That is its cost alone: else none would seem to be faster without.
            let each = share + drafter.take_asked();
            if let Some(n) = drafted.filter(|_| counts) {
                drafter.record_time(all - n, PassTime { each, texts: next });
            }
        }
    }
}
