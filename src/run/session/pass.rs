//! One pass over several sequences: their staged tokens are computed together, so that the weights are read once. Each
//! sequence gets the same bits as alone.

use super::Session;
use crate::model::device::{CancelToken, Run, SharedDevice, lock_device};
use crate::run::draft_model::PassTime;
use files::{Error, Result};
use smallvec::SmallVec;
use std::time::{Duration, Instant};

/// A list with one item per sequence of a pass; up to 16 need no allocation.
pub(crate) type SmallList<T> = SmallVec<[T; 16]>;

/// Tokens staged for the next pass.
#[derive(Default)]
pub(super) struct PendingPass {
    pub tokens: Vec<u32>,
    /// Length of the sequence up to the end of the last prompt.
    pub known: usize,
    pub logits: LogitsWanted,
    /// The recurrent state is saved after the pass.
    pub saves_state: bool,
}

/// Logits wanted from a pass.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum LogitsWanted {
    #[default]
    Nothing,
    /// Logits of a prompt's last token.
    Last,
    /// Logits of a single next token.
    Next,
    /// Logits of the sequence's last token and of every drafted token after it.
    Draft,
}

/// Outcome of staging a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The next pass computes the token.
    Staged,
    /// A draft has already computed the token and its logits.
    Computed,
}

/// Computes the staged tokens of some sequences, in as few passes as their devices allow.
///
/// # Errors
///
/// `Interrupted` soon after `cancel` is cancelled; tokens not computed are no longer staged. Errors of a device that
/// has no fallback.
pub fn forward(sessions: &mut [&mut Session], cancel: Option<&CancelToken>) -> Result<()> {
    let (staged, began) = (PassTiming::new(sessions), Instant::now());
    if let [session] = sessions {
        session.forward_alone(cancel)?;
    } else {
        forward_together(sessions, cancel)?;
    }
    staged.record_times(sessions, began.elapsed());
    Ok(())
}

fn forward_together(sessions: &mut [&mut Session], cancel: Option<&CancelToken>) -> Result<()> {
    let mut left: Sessions<'_> = sessions.iter_mut().map(|s| &mut **s).filter(|s| s.is_staged()).collect();
    while !left.is_empty() {
        let device = left[0].device();
        let (mut together, others) = split_by_pass(left, &device);
        left = others;
        let mut runs: SmallList<Run<'_>> = together.iter_mut().map(|s| s.run()).collect();
        let computed = lock_device(&device).forward(&mut runs, cancel);
        drop(runs);
        match computed {
            Ok(()) => together.iter_mut().for_each(|s| s.commit_staged()),
            Err(Error::Device(_) | Error::Memory(_)) => {
                // The device is lost for all of them: each one falls back by itself.
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

type Sessions<'a> = SmallList<&'a mut Session>;

/// Splits the sequences into those that fit into one pass of `device`, and the others.
fn split_by_pass<'a>(sessions: Sessions<'a>, device: &SharedDevice) -> (Sessions<'a>, Sessions<'a>) {
    let mut room = lock_device(device).max_tokens();
    sessions.into_iter().partition(|s| {
        let n = s.staged_tokens();
        let fits = s.device_cache.is_on(device) && n <= room;
        room -= if fits { n } else { 0 };
        fits
    })
}

/// Records the time of a pass for draft lengths and for the schedule of two devices.
struct PassTiming {
    /// True if the pass is a single token of one sequence.
    is_token_alone: bool,
    /// Drafted tokens of each sequence; `None` if it computes no next token.
    drafted: Vec<Option<usize>>,
    /// Number of parts of prompts in the pass.
    prompts: usize,
}

impl PassTiming {
    fn new(sessions: &[&mut Session]) -> Self {
        let is_token_alone =
            matches!(sessions, [s] if s.is_staged() && s.pending.logits == LogitsWanted::Next);
        // Without a draft model nothing is allocated.
        if sessions.iter().all(|s| s.drafter.as_ref().is_none_or(|d| !d.has_model())) {
            return Self { is_token_alone, drafted: Vec::new(), prompts: 0 };
        }
        let drafted = |s: &&mut Session| match s.pending.logits {
            _ if !s.is_staged() => None,
            LogitsWanted::Draft => Some(s.staged_tokens() - 1),
            LogitsWanted::Next => Some(0),
            LogitsWanted::Nothing | LogitsWanted::Last => None,
        };
        let drafted: Vec<_> = sessions.iter().map(drafted).collect();
        let staged = sessions.iter().filter(|s| s.is_staged()).count();
        Self { is_token_alone, prompts: staged - drafted.iter().flatten().count(), drafted }
    }

    /// Records the duration of the pass.
    fn record_times(self, sessions: &mut [&mut Session], time: Duration) {
        if let [Session { device_cache: here, placement: Some(placement), .. }] = sessions
            && self.is_token_alone
        {
            placement.record_time(here.filled_slots(), time);
        }
        let next = self.drafted.iter().flatten().count();
        let all: usize = self.drafted.iter().flatten().sum();
        // A prompt in the same pass takes longer than the tokens do.
        let counts = next > 0 && self.prompts == 0;
        let share = time / next.max(1) as u32;
        for (session, drafted) in sessions.iter_mut().zip(&self.drafted) {
            let Some(drafter) = &mut session.drafter else { continue };
            // All wait while one asks for a draft, but only that one is charged: otherwise drafts never seem to pay.
            let each = share + drafter.take_request_time();
            if let Some(n) = drafted.filter(|_| counts) {
                drafter.record_time(all - n, PassTime { each, texts: next });
            }
        }
    }
}
