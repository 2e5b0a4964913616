//! The evictor of a sequence: decides when slots are evicted, how many stay, and which tokens' attention is observed.

use super::event::EvictionReason;
use crate::dims::{FULL_ATTENTION_LAYERS, KV_HEADS, LAYERS_BEFORE, MAX_POSITION};
use crate::run::eviction::{Budget, Eviction, Policy, SNAP_WINDOW, SlotSelector, slots_to_free};
use crate::run::system;
use files::{Error, Result};

/// Tokens between two checks of the system's memory, each of which takes about ten microseconds.
const MEMORY_EVERY: usize = 32;
/// Minimum number of slots that stay when memory is low, besides the protected prefix.
const MIN_SLOTS: usize = 64;

/// Maximum distance of a kept token in positions: seven eighths of the model's trained context, because few training
/// texts are that long. Without this limit the story model (2,048) wrote words in random order from 2,400 tokens on
/// under SnapKV and H2O, because positions keep counting.
const MAX_DISTANCE: usize = MAX_POSITION / 8 * 7;

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
    memory_limit: Option<usize>,
    /// First token whose attention counts for the next eviction.
    since: Option<usize>,
    chooser: SlotSelector,
    /// Leading tokens that the caller wants protected, unless the settings give a number.
    opening: usize,
    /// Slots of a head that stay, chosen by [`Evictor::choose_slots`].
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
        settings.validate()?;
        if FULL_ATTENTION_LAYERS == 0 {
            let why = "has nothing to evict: all attention of this model has a window; use none";
            return Err(Error::Usage(format!("`Eviction::policy` {}: {why}", settings.policy.name())));
        }
        let mut evictor = Self {
            settings,
            capacity,
            keep: settings.window,
            probe: system::memory_is_low,
            countdown: 0,
            memory_limit: None,
            since: None,
            chooser: SlotSelector::default(),
            opening: 0,
            slots: Vec::with_capacity(capacity),
            positions: vec![Vec::new(); FULL_ATTENTION_LAYERS * KV_HEADS],
            mass: Vec::new(),
        };
        evictor.resize(capacity)?;
        Ok(evictor)
    }

    /// Changes the number of slots.
    pub fn resize(&mut self, capacity: usize) -> Result<()> {
        self.capacity = capacity;
        let prefix = self.settings.prefix.unwrap_or(0);
        if self.slots_to_keep() < prefix + 2 {
            return Err(Error::Usage(format!(
                "`EngineOptions::max_seq_len` {capacity}: too few slots for `Eviction::prefix` {prefix} with \
                 `Eviction::policy` {}; raise it",
                self.settings.policy.name()
            )));
        }
        Ok(())
    }

    /// Protects the first `tokens` tokens.
    pub fn protect_prefix(&mut self, tokens: usize) {
        self.opening = tokens;
    }

    /// Number of protected leading tokens when `keep` slots stay.
    fn prefix_len(&self, keep: usize) -> usize {
        let least = self.settings.prefix_len(keep);
        if self.settings.prefix.is_some() { least } else { least.max(self.opening.min(keep / 2)) }
    }

    /// Number of filled slots at which slots are evicted before the next token.
    pub fn eviction_limit(&self) -> usize {
        self.capacity.min(self.settings.eviction_limit())
    }

    /// Number of slots that stay.
    pub fn slots_to_keep(&self) -> usize {
        self.keep.min(self.capacity - slots_to_free(self.capacity))
    }

    /// Maximum distance of a token at an eviction, so that it is within [`MAX_DISTANCE`] until the next one.
    fn max_distance(&self) -> usize {
        MAX_DISTANCE.saturating_sub(self.eviction_limit() - self.slots_to_keep())
    }

    /// True if the policy looks at attention.
    pub fn observes_attention(&self) -> bool {
        self.settings.policy.observes_attention()
    }

    /// Chooses which of the `len` filled slots of a head stay after `tokens` tokens, into [`Evictor::slots`]. `at` is
    /// the layer and the KV head.
    pub fn choose_slots(&mut self, at: (usize, usize), tokens: usize, len: usize, budget: Budget) {
        let head = LAYERS_BEFORE[at.0][0] * KV_HEADS + at.1;
        let mass = &self.mass[at.1 * len..][..len];
        if !self.observes_attention() {
            return self.chooser.choose_slots(self.settings.policy, mass, budget, &mut self.slots);
        }
        let reach = self.max_distance();
        let positions = &mut self.positions[head];
        positions.extend((tokens + positions.len() - len..tokens).map(|p| p as u32));
        let stale = positions.partition_point(|&p| tokens.saturating_sub(p as usize) > reach);
        // Without mass, as after a text that began without a policy, the latest slots are the best guess.
        let policy = if self.since.is_some() { self.settings.policy } else { Policy::Sliding };
        self.chooser.choose_slots(policy, mass, Budget { stale, ..budget }, &mut self.slots);
        for (to, &from) in self.slots.iter().enumerate() {
            positions[to] = positions[from as usize];
        }
        positions.truncate(self.slots.len());
    }

    /// Positions of the slots that the last eviction left, by layer and KV head; empty if all heads keep the same.
    pub fn positions(&self) -> &[Vec<u32>] {
        if self.observes_attention() { &self.positions } else { &[] }
    }

    /// Forgets the positions of all but the first `len` slots.
    pub fn truncate_positions(&mut self, len: usize) {
        self.positions.iter_mut().for_each(|p| p.truncate(len));
    }

    /// Sets the positions of a saved sequence of `slots` slots and `tokens` tokens. If it has none, the `kept` slots
    /// that its last eviction left get the latest positions possible.
    pub fn set_positions(&mut self, saved: Vec<Vec<u32>>, (kept, slots, tokens): (usize, usize, usize)) {
        self.positions = saved;
        let heads = FULL_ATTENTION_LAYERS * KV_HEADS;
        if self.positions.len() != heads {
            let latest = (tokens - slots..tokens - slots + kept).map(|p| p as u32);
            self.positions = vec![latest.collect(); heads];
        }
    }

    /// Budget of an eviction down to `keep` slots after `tokens` tokens. Leading tokens are not protected by default
    /// beyond the distance that the model was trained for: over 6,000 tokens of the story model (2,048) they raised
    /// perplexity from 1.74 to 2.81 under sliding.
    pub fn budget(&self, keep: usize, tokens: usize) -> Budget {
        let far = self.settings.prefix.is_none() && tokens > self.max_distance();
        let prefix = if far { 0 } else { self.prefix_len(keep) };
        Budget::for_eviction(&Eviction { prefix: Some(prefix), ..self.settings }, keep)
    }

    /// Reason to evict before tokens are added to `len` filled slots, if any. A prompt may first fill the whole cache.
    pub fn eviction_reason(&self, len: usize, input: AppendKind) -> Option<EvictionReason> {
        match (self.memory_limit, input) {
            _ if len >= self.capacity => Some(EvictionReason::Full),
            (_, AppendKind::Open) if len >= self.eviction_limit() => Some(EvictionReason::Window),
            (Some(due), _) if len >= due => Some(EvictionReason::Memory),
            _ => None,
        }
    }

    /// Checks the system's memory every few calls, before `tokens` tokens are added to `len` filled slots.
    pub fn watch_memory(&mut self, len: usize, tokens: usize) {
        if self.settings.memory_threshold == 0 || self.memory_limit.is_some() {
            return;
        }
        self.countdown = self.countdown.saturating_sub(tokens);
        if self.countdown > 0 {
            return;
        }
        self.countdown = MEMORY_EVERY;
        let least = self.prefix_len(self.settings.window) + MIN_SLOTS;
        if !(self.probe)(self.settings.memory_threshold) {
            self.keep = self.settings.window;
        } else if len > 2 * least {
            self.keep = (len / 2).min(self.settings.window);
            // SnapKV needs some more queries to score slots.
            let wait = if self.settings.policy == Policy::SnapKv { SNAP_WINDOW } else { 0 };
            self.memory_limit = Some(len + wait);
        }
    }

    /// First token whose attention counts for the next eviction, if any.
    pub fn observed_since(&self) -> Option<usize> {
        self.since
    }

    /// Counts attention from this token on.
    pub fn observe_since(&mut self, token: usize) {
        self.since = Some(token);
    }

    /// Resets the state for a replaced sequence, whose mass counts tokens from `since` on.
    pub fn reset(&mut self, since: Option<usize>) {
        self.truncate_positions(0);
        (self.memory_limit, self.since) = (None, since.filter(|_| self.observes_attention()));
    }

    /// Ends an eviction.
    pub fn end_eviction(&mut self) {
        // H2O's mass keeps accumulating.
        (self.memory_limit, self.since) = (None, self.since.filter(|_| self.settings.policy == Policy::H2o));
    }

    /// Number of the next `now` tokens, from token `at` on, to observe when the next eviction is `ahead` tokens away.
    pub fn plan_observation(&mut self, at: usize, now: usize, ahead: usize) -> ObservedTokens {
        let tokens = match self.settings.policy {
            Policy::None | Policy::Sliding => 0,
            Policy::H2o => now,
            Policy::SnapKv => (now + SNAP_WINDOW).saturating_sub(ahead).min(now),
        };
        match self.since {
            None if tokens > 0 => {
                self.since = Some(at + now - tokens);
                ObservedTokens::Afresh(tokens)
            }
            _ => ObservedTokens::Last(tokens),
        }
    }

    /// Number of tokens that can be added to `len` filled slots before the next eviction.
    pub fn tokens_until_eviction(&self, len: usize, input: AppendKind) -> usize {
        let until = |limit: usize| limit.saturating_sub(len);
        match (self.memory_limit, input) {
            (Some(due), _) => until(due).max(1).min(until(self.capacity)),
            (None, AppendKind::Prompt(left)) if len + left > self.eviction_limit() => {
                left.min(until(self.capacity))
            }
            _ => until(self.eviction_limit()),
        }
    }
}

/// Kind of tokens being appended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AppendKind {
    /// A prompt with this many tokens left; slots are evicted at its end.
    Prompt(usize),
    /// Generated tokens, whose number is unknown.
    Open,
}

/// Tokens of the next pass whose attention is observed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ObservedTokens {
    /// This many tokens at the end of the pass, added to the mass so far.
    Last(usize),
    /// This many tokens at the end of the pass, after the mass is cleared.
    Afresh(usize),
}
