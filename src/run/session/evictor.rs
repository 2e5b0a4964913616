//! The evictor of a sequence: when slots go, how many stay, and which tokens' attention is observed for that.

use super::event::Why;
use crate::dims::{BEFORE, GLOBAL_LAYERS, KV_HEADS, MAX_POSITION};
use crate::run::eviction::{Budget, Chooser, Eviction, Policy, SNAP_WINDOW, slack};
use crate::run::system;
use files::{Error, Result};

/// Decoded tokens between two looks at the system's memory, which take some ten microseconds each.
const MEMORY_EVERY: usize = 32;
/// Slots that stay when memory is low, at least, besides the protected prefix.
const LEAST: usize = 64;

/// Positions that a kept token may lie back: seven eighths of the longest context that the model was trained for, as
/// few training texts are that long. Without this limit the story model (2,048) wrote words in any order from 2,400
/// tokens on under SnapKV and H2O, because positions count on.
const REACH: usize = MAX_POSITION / 8 * 7;

/// Tells whether the system is short of memory, when its available bytes are below a threshold.
pub(super) type MemoryProbe = fn(threshold: u64) -> bool;

/// The eviction of one sequence.
pub(super) struct Evictor {
    settings: Eviction,
    capacity: usize,
    /// The slots that stay now: the window, or fewer while memory is low.
    keep: usize,
    pub probe: MemoryProbe,
    /// Tokens until memory is looked at again.
    countdown: usize,
    /// The number of filled slots at which slots are evicted for want of memory, once that is known.
    due: Option<usize>,
    /// The first token whose attention counts for the next choice.
    since: Option<usize>,
    chooser: Chooser,
    /// First tokens that the caller knows to matter, protected where the settings don't say how many are.
    opening: usize,
    /// The slots of a head that stay.
    pub slots: Vec<u32>,
    /// Where each head chooses for itself: the positions of the slots that the last eviction left,
    /// `[layer * KV_HEADS + kv_head][slot]`, ascending, of the layers that see all. The slots after them are the latest tokens.
    positions: Vec<Vec<u32>>,
    /// The mass of a layer.
    pub mass: Vec<f32>,
}

impl Evictor {
    /// For a cache of `capacity` slots.
    pub fn new(settings: Eviction, capacity: usize) -> Result<Self> {
        settings.check()?;
        let mut evictor = Self {
            settings,
            capacity,
            keep: settings.window,
            probe: system::memory_is_low,
            countdown: 0,
            due: None,
            since: None,
            chooser: Chooser::default(),
            opening: 0,
            slots: Vec::with_capacity(capacity),
            positions: vec![Vec::new(); GLOBAL_LAYERS * KV_HEADS],
            mass: Vec::new(),
        };
        evictor.resize(capacity)?;
        Ok(evictor)
    }

    /// Another number of slots.
    pub fn resize(&mut self, capacity: usize) -> Result<()> {
        self.capacity = capacity;
        let prefix = self.settings.prefix.unwrap_or(0);
        if self.target() < prefix + 2 {
            return Err(Error::Usage(format!(
                "`EngineOptions::max_seq_len` {capacity}: too few slots for `Eviction::prefix` {prefix} with \
                 `Eviction::policy` {}; raise it",
                self.settings.policy.name()
            )));
        }
        Ok(())
    }

    /// The first `tokens` tokens are the sequence's opening.
    pub fn protect(&mut self, tokens: usize) {
        self.opening = tokens;
    }

    /// First tokens that stay when `keep` slots do.
    fn prefix(&self, keep: usize) -> usize {
        let least = self.settings.prefix_of(keep);
        if self.settings.prefix.is_some() { least } else { least.max(self.opening.min(keep / 2)) }
    }

    /// Number of filled slots at which some are evicted before the next token.
    pub fn limit(&self) -> usize {
        self.capacity.min(self.settings.limit())
    }

    /// Slots that stay.
    pub fn target(&self) -> usize {
        self.keep.min(self.capacity - slack(self.capacity))
    }

    /// Positions that a token may lie back at an eviction. Tokens that come before the next one look back as well.
    fn reach(&self) -> usize {
        REACH.saturating_sub(self.limit() - self.target())
    }

    /// True if the policy looks at attention.
    pub fn observes(&self) -> bool {
        matches!(self.settings.policy, Policy::SnapKv | Policy::H2o)
    }

    /// Chooses the slots of a head that stay, of `len` that are filled after `tokens` tokens, into
    /// [`Evictor::slots`]. `at` is the layer and the KV head.
    pub fn choose(&mut self, at: (usize, usize), tokens: usize, len: usize, budget: Budget) {
        let head = BEFORE[at.0][0] * KV_HEADS + at.1;
        let mass = &self.mass[at.1 * len..][..len];
        if !self.observes() {
            return self.chooser.choose(self.settings.policy, mass, budget, &mut self.slots);
        }
        let reach = self.reach();
        let positions = &mut self.positions[head];
        positions.extend((tokens + positions.len() - len..tokens).map(|p| p as u32));
        let stale = positions.partition_point(|&p| tokens.saturating_sub(p as usize) > reach);
        // Without any mass, as after a text that was begun without a policy, the latest are the best guess.
        let policy = if self.since.is_some() { self.settings.policy } else { Policy::Sliding };
        self.chooser.choose(policy, mass, Budget { stale, ..budget }, &mut self.slots);
        for (to, &from) in self.slots.iter().enumerate() {
            positions[to] = positions[from as usize];
        }
        positions.truncate(self.slots.len());
    }

    /// Positions of the slots that the last eviction left, by layer and KV head; empty where all heads keep the same.
    pub fn positions(&self) -> &[Vec<u32>] {
        if self.observes() { &self.positions } else { &[] }
    }

    /// Only the first `len` slots are left, or those of a restored sequence.
    pub fn truncate(&mut self, len: usize) {
        self.positions.iter_mut().for_each(|p| p.truncate(len));
    }

    /// Takes over the positions of a saved sequence of `slots` slots and `tokens` tokens. Where there are none, the
    /// `kept` slots that its last eviction left have the latest that they can.
    pub fn set_positions(&mut self, saved: Vec<Vec<u32>>, (kept, slots, tokens): (usize, usize, usize)) {
        let latest = || (tokens - slots..tokens - slots + kept).map(|p| p as u32).collect::<Vec<_>>();
        self.positions = match saved.len() == GLOBAL_LAYERS * KV_HEADS {
            true => saved,
            false => (0..GLOBAL_LAYERS * KV_HEADS).map(|_| latest()).collect(),
        };
    }

    /// How an eviction down to `keep` slots divides them after `tokens` tokens. First tokens that nobody asked for go too
    /// where the model was not trained to look that far back: over 6,000 tokens of the story model (2,048) they made a
    /// perplexity of 2.81 out of 1.74 under sliding.
    pub fn budget(&self, keep: usize, tokens: usize) -> Budget {
        let far = self.settings.prefix.is_none() && tokens > self.reach();
        let prefix = if far { 0 } else { self.prefix(keep) };
        Budget::of(&Eviction { prefix: Some(prefix), ..self.settings }, keep)
    }

    /// Why slots must go before more tokens join `len` filled slots. A prompt may fill the whole cache first.
    pub fn why(&self, len: usize, input: Input) -> Option<Why> {
        match (self.due, input) {
            _ if len >= self.capacity => Some(Why::Full),
            (_, Input::Open) if len >= self.limit() => Some(Why::Window),
            (Some(due), _) if len >= due => Some(Why::Memory),
            _ => None,
        }
    }

    /// Looks at the system's memory now and then: `tokens` are about to be appended to `len` filled slots.
    pub fn watch_memory(&mut self, len: usize, tokens: usize) {
        if self.settings.memory_threshold == 0 || self.due.is_some() {
            return;
        }
        self.countdown = self.countdown.saturating_sub(tokens);
        if self.countdown > 0 {
            return;
        }
        self.countdown = MEMORY_EVERY;
        let least = self.prefix(self.settings.window) + LEAST;
        match (self.probe)(self.settings.memory_threshold) {
            true if len > 2 * least => {
                self.keep = (len / 2).min(self.settings.window);
                // SnapKV needs some queries to score slots with.
                let wait = if self.settings.policy == Policy::SnapKv { SNAP_WINDOW } else { 0 };
                self.due = Some(len + wait);
            }
            true => {}
            false => self.keep = self.settings.window,
        }
    }

    /// The first token whose attention counts for the next choice, if any did.
    pub fn since(&self) -> Option<usize> {
        self.since
    }

    /// Attention counts from this token on.
    pub fn observe_since(&mut self, token: usize) {
        self.since = Some(token);
    }

    /// The sequence was replaced by one with the mass of tokens from `since` on.
    pub fn reset(&mut self, since: Option<usize>) {
        self.truncate(0);
        (self.due, self.since) = (None, since.filter(|_| self.observes()));
    }

    /// An eviction is over.
    pub fn done(&mut self) {
        // What H2O accumulated goes on counting.
        (self.due, self.since) = (None, self.since.filter(|_| self.settings.policy == Policy::H2o));
    }

    /// How many of the next `now` tokens, from token `at` on, are to be observed when slots are chosen `ahead` tokens
    /// from here.
    pub fn observe(&mut self, at: usize, now: usize, ahead: usize) -> Observe {
        let tokens = match self.settings.policy {
            Policy::None | Policy::Sliding => 0,
            Policy::H2o => now,
            Policy::SnapKv => (now + SNAP_WINDOW).saturating_sub(ahead).min(now),
        };
        match self.since {
            None if tokens > 0 => {
                self.since = Some(at + now - tokens);
                Observe::Afresh(tokens)
            }
            _ => Observe::Last(tokens),
        }
    }

    /// How many tokens can join `len` filled slots before slots are chosen.
    pub fn ahead(&self, len: usize, input: Input) -> usize {
        let until = |limit: usize| limit.saturating_sub(len);
        match (self.due, input) {
            (Some(due), _) => until(due).max(1).min(until(self.capacity)),
            (None, Input::Prompt(left)) if len + left > self.limit() => left.min(until(self.capacity)),
            _ => until(self.limit()),
        }
    }
}

/// What is being appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    /// A prompt with this many tokens left: slots are chosen at its end.
    Prompt(usize),
    /// Generated tokens, whose number is not known.
    Open,
}

/// Whose attention counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Observe {
    /// The last tokens of the pass, this many, added to the mass so far.
    Last(usize),
    /// The same, after the mass so far is cleared.
    Afresh(usize),
}
