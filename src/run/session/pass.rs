//! What one pass computes for a sequence: a part of a prompt, a token, a token with its draft. Whoever runs several
//! sequences stages all of them and computes them together; the weights are read once, and each gets the bits that it
//! would get alone.

use super::Session;
use super::devices::At;
use super::evict::Input;
use crate::dims::VOCAB;
use crate::model::device::{CancelToken, Logits, Run, SharedDevice, locked};
use crate::run::draft_model::PassTime;
use files::{Error, Result};
use smallvec::SmallVec;
use std::time::{Duration, Instant};

/// One thing for each sequence of a pass: as many as mostly run together need no allocation.
pub(crate) type Few<T> = SmallVec<[T; 16]>;

/// Tokens that the next pass computes.
#[derive(Default)]
pub(super) struct Staged {
    pub tokens: Vec<u32>,
    /// Where the last prompt ends.
    pub known: usize,
    want: Want,
}

/// Which logits are wanted.
#[derive(Default, PartialEq, Eq)]
enum Want {
    #[default]
    Nothing,
    /// Those of a prompt's last token.
    Last,
    /// Those of the next token, which is alone.
    Next,
    /// Those of every token: the last of the sequence, then the draft.
    Draft,
}

/// What staging a token led to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The next pass computes it.
    Staged,
    /// A draft had computed it, so its logits are there already.
    Computed,
}

impl Session {
    /// Begins a prompt, of which it keeps the longest common prefix: how many tokens those are, never the last.
    pub fn begin_prompt(&mut self, prompt: &[u32]) -> Result<usize> {
        let held = self.reuse(prompt)?;
        self.place_prompt(&prompt[held..])?;
        Ok(held)
    }

    /// Checks a prompt and brings the sequence to the device that computes it.
    pub(super) fn place_prompt(&mut self, tokens: &[u32]) -> Result<()> {
        self.check(tokens)?;
        self.discard_drafts();
        self.look_for_device()?;
        match self.devices.for_prefill(tokens.len()) {
            Some(to) => self.go(to),
            None => Ok(()),
        }
    }

    /// Stages as many of `tokens`, the next of a prompt of which `left` tokens are left, as there is room for: how many.
    /// The logits of the prompt's last token are wanted.
    pub fn stage_prompt(&mut self, tokens: &[u32], left: usize) -> Result<usize> {
        self.look_for_device()?;
        let n = self.make_room(tokens.len(), Input::Prompt(left))?;
        self.staged.tokens.clear();
        self.staged.tokens.extend_from_slice(&tokens[..n]);
        self.staged.known = self.tokens.len() + left;
        self.staged.want = if n == left { Want::Last } else { Want::Nothing };
        Ok(n)
    }

    /// Ends a prompt whose tokens are all computed.
    pub fn end_prompt(&mut self) -> Result<()> {
        self.cut_prompt()?;
        self.check_logits()
    }

    /// Stages the next token and perhaps a draft after it.
    pub fn stage_token(&mut self, token: u32) -> Result<Stage> {
        self.check(&[token])?;
        if self.take_drafted(token) {
            return Ok(Stage::Computed);
        }
        self.look_for_device()?;
        if let Some(to) = self.devices.for_decode(self.tokens.len()) {
            self.go(to)?;
        }
        self.make_room(1, Input::Open)?;
        self.staged.tokens.clear();
        self.staged.want = match self.draft(token) {
            true => Want::Draft,
            false => {
                self.staged.tokens.push(token);
                Want::Next
            }
        };
        Ok(Stage::Staged)
    }

    /// Tokens that are staged for the next pass.
    pub fn staged(&self) -> usize {
        self.staged.tokens.len()
    }

    /// The device that computes the next pass.
    pub fn device(&self) -> SharedDevice {
        self.devices.device()
    }

    /// Whether anything is.
    pub fn is_staged(&self) -> bool {
        self.staged() > 0
    }

    /// What is staged, as a run of a pass.
    fn run(&mut self) -> Run<'_> {
        let tokens = &self.staged.tokens[..];
        let logits = match (&self.staged.want, &mut self.drafter) {
            (Want::Last | Want::Next, _) => Logits::Last(&mut self.logits),
            (Want::Draft, Some(drafter)) => Logits::All(drafter.rows(tokens.len())),
            _ => Logits::None,
        };
        let at = At { pos: self.tokens.len(), known: self.staged.known };
        self.devices.run(tokens, at, logits)
    }

    /// What was staged is computed.
    fn landed(&mut self) {
        match self.staged.want {
            Want::Draft => self.take_draft(),
            _ => self.tokens.extend_from_slice(&self.staged.tokens),
        }
        self.staged.tokens.clear();
    }

    /// Computes what is staged, if anything is, on another device if this one is lost.
    fn forward_alone(&mut self, cancel: Option<&CancelToken>) -> Result<()> {
        if !self.is_staged() {
            return Ok(());
        }
        let mut computed = self.try_alone(cancel);
        if let Err(e @ (Error::Device(_) | Error::Memory(_))) = computed {
            // A device that is lost may write to them still.
            self.logits = Box::new(vec![0.0; VOCAB]);
            self.with_cancel(cancel, |session| session.flee(e))?;
            computed = self.try_alone(cancel);
        }
        match computed {
            Ok(()) => self.landed(),
            Err(_) => self.staged.tokens.clear(),
        }
        computed
    }

    fn try_alone(&mut self, cancel: Option<&CancelToken>) -> Result<()> {
        let device = self.devices.device();
        locked(&device).forward(&mut [self.run()], cancel)
    }
}

/// Computes what is staged of some sequences, those of one device in as few passes as it allows.
///
/// # Errors
///
/// `Interrupted` soon after `cancel` is cancelled: what is not computed is not staged any more. What the device of a
/// sequence returns where there is no other to go on on.
pub fn forward(sessions: &mut [&mut Session], cancel: Option<&CancelToken>) -> Result<()> {
    let (staged, began) = (Counted::of(sessions), Instant::now());
    let is_token_alone =
        matches!(sessions, [session] if session.is_staged() && session.staged.want == Want::Next);
    forward_staged(sessions, cancel)?;
    let time = began.elapsed();
    if let [session] = sessions
        && is_token_alone
    {
        session.devices.took(time);
    }
    staged.took(sessions, time);
    Ok(())
}

/// What is staged of some sequences, for those that learn from the times of passes.
struct Counted {
    /// Drafted tokens of each; `None` for what is no next token.
    drafted: Vec<Option<usize>>,
    /// Parts of prompts beside them.
    prompts: usize,
}

impl Counted {
    fn of(sessions: &[&mut Session]) -> Self {
        // Nobody learns, and nothing is allocated.
        if sessions.iter().all(|s| s.drafter.as_ref().is_none_or(|d| !d.has_model())) {
            return Self { drafted: Vec::new(), prompts: 0 };
        }
        let drafted = |s: &&mut Session| match s.staged.want {
            _ if s.staged.tokens.is_empty() => None,
            Want::Draft => Some(s.staged.tokens.len() - 1),
            Want::Next => Some(0),
            Want::Nothing | Want::Last => None,
        };
        let drafted: Vec<_> = sessions.iter().map(drafted).collect();
        let staged = sessions.iter().filter(|s| s.is_staged()).count();
        Self { prompts: staged - drafted.iter().flatten().count(), drafted }
    }

    /// They took so long together.
    fn took(self, sessions: &mut [&mut Session], time: Duration) {
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
                drafter.took(all - n, PassTime { each, texts: next });
            }
        }
    }
}

fn forward_staged(sessions: &mut [&mut Session], cancel: Option<&CancelToken>) -> Result<()> {
    if let [session] = sessions {
        return session.forward_alone(cancel);
    }
    let mut left: Sessions<'_> = sessions.iter_mut().map(|s| &mut **s).filter(|s| s.is_staged()).collect();
    while !left.is_empty() {
        let device = left[0].devices.device();
        let (mut together, others) = one_pass(left, &device);
        left = others;
        let mut runs: Few<Run<'_>> = together.iter_mut().map(|s| s.run()).collect();
        let computed = locked(&device).forward(&mut runs, cancel);
        drop(runs);
        match computed {
            Ok(()) => together.iter_mut().for_each(|s| s.landed()),
            Err(Error::Device(_) | Error::Memory(_)) => {
                // The device is lost for all of them; each finds out, and goes on elsewhere.
                together.iter_mut().try_for_each(|s| s.forward_alone(cancel))?;
            }
            Err(e) => {
                together.iter_mut().chain(&mut left).for_each(|s| s.staged.tokens.clear());
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
        let n = s.staged.tokens.len();
        let fits = s.devices.runs_on(device) && n <= room;
        room -= if fits { n } else { 0 };
        fits
    })
}
