//! What a sequence is besides its rows, to be saved and restored.

use super::Session;
use super::evict::Evictor;
use crate::dims::{HEAD_DIM, KV_HEADS, LAYERS, VOCAB};
use crate::model::device::KvRows;
use files::{Error, Result};
use serde::{Deserialize, Serialize};

/// An eviction in the history of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cut {
    /// Tokens there were.
    pub tokens: usize,
    /// Slots that stayed.
    pub kept: usize,
}

/// Tokens and layout of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sequence {
    /// Every token, evicted ones included; their number is the next RoPE position.
    pub tokens: Vec<u32>,
    /// Slots in use.
    pub slots: usize,
    /// Evictions, in order.
    pub cuts: Vec<Cut>,
    /// So many first tokens lie in the first slots; without evictions all do, whatever this says.
    pub prefix: usize,
    /// From this token on, all lie in the last slots, in order, in every head.
    pub dense: usize,
    /// The first token whose attention the saved mass counts; without one there is no mass.
    pub since: Option<usize>,
    /// Where heads chose for themselves, the positions of the slots that the last eviction left, ascending:
    /// `[layer * KV_HEADS + kv_head][slot]`.
    #[serde(default)]
    pub positions: Vec<Vec<u32>>,
}

impl Sequence {
    /// Whether its parts agree with each other and with this binary's model.
    pub fn is_sound(&self) -> bool {
        let tokens = self.tokens.len();
        let cuts = self.cuts.iter().all(|c| c.tokens <= tokens && (1..=c.tokens).contains(&c.kept));
        cuts && self.cuts.is_sorted_by_key(|c| c.tokens)
            && self.slots <= tokens
            && self.dense <= tokens
            && tokens - self.dense <= self.slots
            && match self.cuts.is_empty() {
                true => self.slots == tokens && self.dense == 0,
                false => self.prefix <= self.slots,
            }
            && self.positions_are_sound()
            && self.tokens.iter().all(|&t| (t as usize) < VOCAB)
    }

    /// Whether every head has as many positions as any, in order.
    fn positions_are_sound(&self) -> bool {
        let (heads, slots) = (self.positions.len(), self.positions.first().map_or(0, Vec::len));
        let sound = |head: &Vec<u32>| {
            head.len() == slots
                && head.is_sorted_by(|a, b| a < b)
                && head.last().is_none_or(|&p| (p as usize) < self.tokens.len())
        };
        [0, LAYERS * KV_HEADS].contains(&heads) && slots <= self.slots && self.positions.iter().all(sound)
    }

    /// Whether evicted slots are those between the first ones and the latest, in every head.
    pub fn has_plain_positions(&self) -> bool {
        self.slots == self.prefix + self.tokens.len() - self.dense
    }

    /// Whether it can be a sequence of this binary's model with at most `capacity` slots.
    fn check(&self, capacity: usize) -> Result<()> {
        match (self.is_sound(), self.slots <= capacity) {
            (true, true) => Ok(()),
            (false, _) => Err(Error::Model("the saved sequence contradicts itself".into())),
            (_, false) => Err(Error::Usage(format!(
                "the saved sequence fills {} slots but the context has {capacity}; raise `EngineOptions::max_seq_len`",
                self.slots
            ))),
        }
    }
}

impl Session {
    /// Tokens and layout, which with the rows and the mass of all layers are the whole sequence.
    pub fn sequence(&self) -> Sequence {
        Sequence {
            tokens: self.tokens.clone(),
            slots: self.slots(),
            cuts: self.cuts.clone(),
            prefix: self.prefix,
            dense: self.dense,
            since: self.since(),
            positions: self.evictor.as_ref().map_or(Vec::new(), |e| e.positions().to_vec()),
        }
    }

    /// Whether it knows the positions of slots that each head chose for itself.
    pub fn tracks_positions(&self) -> bool {
        self.observes()
    }

    /// The position of each slot, ascending: `[layer * KV_HEADS + kv_head][slot]`.
    ///
    /// # Errors
    ///
    /// `Usage` where they are not known any more.
    pub fn positions(&self) -> Result<Vec<Vec<u32>>> {
        let (sequence, heads) = (self.sequence(), LAYERS * KV_HEADS);
        let (all, slots) = (sequence.tokens.len(), sequence.slots);
        let latest = |n: usize| (all - n) as u32..all as u32;
        if sequence.cuts.is_empty() {
            return Ok(vec![latest(slots).collect(); heads]);
        }
        if sequence.positions.len() == heads {
            let whole = |kept: Vec<u32>| {
                let rest = latest(slots - kept.len());
                kept.into_iter().chain(rest).collect()
            };
            return Ok(sequence.positions.into_iter().map(whole).collect());
        }
        match sequence.has_plain_positions() {
            true => Ok(vec![(0..sequence.prefix as u32).chain(latest(slots - sequence.prefix)).collect(); heads]),
            false => Err(Error::Usage(
                "positions of evicted slots are not known: the number of protected tokens has grown; set it before".into(),
            )),
        }
    }

    /// The filled rows of a layer.
    pub fn read_rows(&mut self, layer: usize, rows: &mut KvRows) -> Result<()> {
        let slots = 0..self.slots();
        self.devices.cache().read(layer, slots, rows)
    }

    /// The attention mass of a layer's filled slots, `[kv_head][slot]`; empty where none was observed.
    pub fn read_mass(&mut self, layer: usize, mass: &mut Vec<f32>) -> Result<()> {
        mass.clear();
        if self.since().is_some() { self.devices.read_mass(layer, mass) } else { Ok(()) }
    }

    fn since(&self) -> Option<usize> {
        self.evictor.as_ref().and_then(Evictor::since)
    }

    /// Becomes a saved sequence. `each` fills in the rows and the mass of a layer, which come with the right lengths.
    ///
    /// # Errors
    ///
    /// What `each` returns, after which the session is empty; `Model` for a sequence that cannot be one, `Usage` for
    /// one that is too long for this context.
    pub fn restore(
        &mut self,
        sequence: Sequence,
        mut each: impl FnMut(usize, &mut KvRows, &mut Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        sequence.check(self.devices.extent().slots)?;
        self.clear();
        self.devices.set_len(sequence.slots);
        let filled = self.fill(&sequence, &mut each);
        if filled.is_err() {
            self.clear();
        }
        filled?;
        self.tokens.extend_from_slice(&sequence.tokens);
        if let Some(evictor) = &mut self.evictor {
            evictor.reset(sequence.since);
            let kept = sequence.cuts.last().map_or(0, |c| c.kept.min(sequence.slots));
            evictor.set_positions(sequence.positions, (kept, sequence.slots, sequence.tokens.len()));
        }
        (self.cuts, self.dense, self.prefix) = (sequence.cuts, sequence.dense, sequence.prefix);
        Ok(())
    }

    /// Fills all slots.
    fn fill(
        &mut self,
        sequence: &Sequence,
        each: &mut impl FnMut(usize, &mut KvRows, &mut Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        let slots = sequence.slots;
        let mut rows = KvRows::zeroed(self.devices.extent().types, slots, HEAD_DIM);
        let mut mass = vec![0.0; if sequence.since.is_some() { KV_HEADS * slots } else { 0 }];
        for layer in 0..LAYERS {
            each(layer, &mut rows, &mut mass)?;
            self.devices.cache().write(layer, 0..slots, &rows)?;
            // A policy that does not look at attention has no place for it.
            if self.evictor.as_ref().is_some_and(Evictor::observes) {
                self.devices.write_mass(layer, &mass)?;
            }
        }
        Ok(())
    }
}
