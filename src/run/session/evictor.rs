//! The evictor of a sequence: decides when slots are evicted, how many stay, and which tokens' attention is observed.

use super::event::Why;
use crate::dims::{BEFORE, GLOBAL_LAYERS, KV_HEADS, MAX_POSITION};
use crate::run::eviction::{Budget, Chooser, Eviction, Policy, SNAP_WINDOW, slack};
use crate::run::system;
use files::{Error, Result};

/// Tokens between two checks of the system's memory, each of which takes about ten microseconds.
const MEMORY_EVERY: usize = 32;
/// Minimum number of slots that stay when memory is low, besides the protected prefix.
const LEAST: usize = 64;

/// Maximum distance of a kept token in positions: seven eighths of the model's trained context, because few training
/// texts are that long. Without this limit the story model (2,048) wrote words in random order from 2,400 tokens on
/// under SnapKV and H2O, because positions keep counting.
const REACH: usize = MAX_POSITION / 8 * 7;

/// Function that checks whether the system's available memory, in bytes, is below a threshold.
pub(super) type MemoryProbe = fn(threshold: u64) -> bool;

/// The eviction of one sequence.
pub(super) struct Evictor {
    settings: Eviction,
    capacity: usize,
    /// Slots that stay at an eviction: the window, or fewer while memory is low.
    keep: usize,
    pub probe: MemoryProbe,
    /// Tokens until the next check of memory.
    countdown: usize,
    /// If memory is low: number of filled slots at which to evict.
    due: Option<usize>,
    /// First token whose attention counts for the next eviction.
    since: Option<usize>,
    chooser: Chooser,
    /// Leading tokens that the caller wants protected, unless the settings give a number.
    opening: usize,
    /// Slots of a head that stay, chosen by [`Evictor::choose`].
    pub slots: Vec<u32>,
    /// If heads choose their own slots: positions of the slots that the last eviction left in full-attention layers,
    /// `[layer * KV_HEADS + kv_head][slot]`, ascending. The slots after them are the latest tokens.
    positions: Vec<Vec<u32>>,
    /// Attention mass of a layer: `[kv_head][slot]`.
    pub mass: Vec<f32>,
}

impl Evictor {
    /// An evictor for a cache of `capacity` slots.
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

    /// Changes the number of slots.
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

    /// Protects the first `tokens` tokens.
    pub fn protect(&mut self, tokens: usize) {
        self.opening = tokens;
    }

    /// Number of protected leading tokens when `keep` slots stay.
    fn prefix(&self, keep: usize) -> usize {
        let least = self.settings.prefix_of(keep);
        if self.settings.prefix.is_some() { least } else { least.max(self.opening.min(keep / 2)) }
    }

    /// Number of filled slots at which slots are evicted before the next token.
    pub fn limit(&self) -> usize {
        self.capacity.min(self.settings.limit())
    }

    /// Number of slots that stay.
    pub fn target(&self) -> usize {
        self.keep.min(self.capacity - slack(self.capacity))
    }

    /// Maximum distance of a token at an eviction, so that it is within [`REACH`] until the next one.
    fn reach(&self) -> usize {
        REACH.saturating_sub(self.limit() - self.target())
    }

    /// True if the policy looks at attention.
    pub fn observes(&self) -> bool {
        self.settings.policy.observes_attention()
    }

    /// Chooses which of the `len` filled slots of a head stay after `tokens` tokens, into [`Evictor::slots`]. `at` is
    /// the layer and the KV head.
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
        // Without mass, as after a text that began without a policy, the latest slots are the best guess.
        let policy = if self.since.is_some() { self.settings.policy } else { Policy::Sliding };
        self.chooser.choose(policy, mass, Budget { stale, ..budget }, &mut self.slots);
        for (to, &from) in self.slots.iter().enumerate() {
            positions[to] = positions[from as usize];
        }
        positions.truncate(self.slots.len());
    }

    /// Positions of the slots that the last eviction left, by layer and KV head; empty if all heads keep the same.
    pub fn positions(&self) -> &[Vec<u32>] {
        if self.observes() { &self.positions } else { &[] }
    }

    /// Forgets the positions of all but the first `len` slots.
    pub fn truncate(&mut self, len: usize) {
        self.positions.iter_mut().for_each(|p| p.truncate(len));
    }

    /// Sets the positions of a saved sequence of `slots` slots and `tokens` tokens. If it has none, the `kept` slots
    /// that its last eviction left get the latest positions possible.
    pub fn set_positions(&mut self, saved: Vec<Vec<u32>>, (kept, slots, tokens): (usize, usize, usize)) {
        self.positions = saved;
        let heads = GLOBAL_LAYERS * KV_HEADS;
        if self.positions.len() != heads {
            let latest = (tokens - slots..tokens - slots + kept).map(|p| p as u32);
            self.positions = vec![latest.collect(); heads];
        }
    }

    /// Budget of an eviction down to `keep` slots after `tokens` tokens. Leading tokens are not protected by default
    /// beyond the distance that the model was trained for: over 6,000 tokens of the story model (2,048) they raised
    /// perplexity from 1.74 to 2.81 under sliding.
    pub fn budget(&self, keep: usize, tokens: usize) -> Budget {
        let far = self.settings.prefix.is_none() && tokens > self.reach();
        let prefix = if far { 0 } else { self.prefix(keep) };
        Budget::of(&Eviction { prefix: Some(prefix), ..self.settings }, keep)
    }

    /// Reason to evict before tokens are added to `len` filled slots, if any. A prompt may first fill the whole cache.
    pub fn why(&self, len: usize, input: Input) -> Option<Why> {
        match (self.due, input) {
            _ if len >= self.capacity => Some(Why::Full),
            (_, Input::Open) if len >= self.limit() => Some(Why::Window),
            (Some(due), _) if len >= due => Some(Why::Memory),
            _ => None,
        }
    }

    /// Checks the system's memory now and then, before `tokens` tokens are added to `len` filled slots.
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
        if !(self.probe)(self.settings.memory_threshold) {
            self.keep = self.settings.window;
        } else if len > 2 * least {
            self.keep = (len / 2).min(self.settings.window);
            // SnapKV needs some more queries to score slots.
            let wait = if self.settings.policy == Policy::SnapKv { SNAP_WINDOW } else { 0 };
            self.due = Some(len + wait);
        }
    }

    /// First token whose attention counts for the next eviction, if any.
    pub fn since(&self) -> Option<usize> {
        self.since
    }

    /// Counts attention from this token on.
    pub fn observe_since(&mut self, token: usize) {
        self.since = Some(token);
    }

    /// Resets the state for a replaced sequence, whose mass counts tokens from `since` on.
    pub fn reset(&mut self, since: Option<usize>) {
        self.truncate(0);
        (self.due, self.since) = (None, since.filter(|_| self.observes()));
    }

    /// Ends an eviction.
    pub fn done(&mut self) {
        // H2O's mass keeps accumulating.
        (self.due, self.since) = (None, self.since.filter(|_| self.settings.policy == Policy::H2o));
    }

    /// Number of the next `now` tokens, from token `at` on, to observe when the next eviction is `ahead` tokens away.
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

    /// Number of tokens that can be added to `len` filled slots before the next eviction.
    pub fn ahead(&self, len: usize, input: Input) -> usize {
        let until = |limit: usize| limit.saturating_sub(len);
        match (self.due, input) {
            (Some(due), _) => until(due).max(1).min(until(self.capacity)),
            (None, Input::Prompt(left)) if len + left > self.limit() => left.min(until(self.capacity)),
            _ => until(self.limit()),
        }
    }
}

/// Kind of tokens being appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Input {
    /// A prompt with this many tokens left; slots are evicted at its end.
    Prompt(usize),
    /// Generated tokens, whose number is unknown.
    Open,
}

/// Tokens of the next pass whose attention is observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Observe {
    /// This many tokens at the end of the pass, added to the mass so far.
    Last(usize),
    /// This many tokens at the end of the pass, after the mass is cleared.
    Afresh(usize),
}
