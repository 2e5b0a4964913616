//! A sequence as it leaves a session and comes back: what it is besides its rows, and the rows layer by layer, so
//! that no second cache is needed on the way.

use super::Session;
use crate::backend::KvRows;
use crate::dims::{HEAD_DIM, LAYERS, VOCAB};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};

/// A sequence without its rows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sequence {
    /// Every token, evicted ones included; the next one's position is their number.
    pub tokens: Vec<u32>,
    /// Filled slots.
    pub slots: usize,
    /// Every eviction, oldest first.
    pub cuts: Vec<Cut>,
    /// What goes with the rows.
    pub observed: Observed,
}

/// One eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cut {
    /// Tokens of the sequence when slots were evicted.
    pub tokens: usize,
    /// Slots that were kept.
    pub kept: usize,
}

/// What is known of the attention that slots received.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Observed {
    /// Nothing.
    #[default]
    Nothing,
    /// Its mass, `[kv_head][slot]` of each layer.
    Mass,
}

impl Sequence {
    /// Whether the tokens exist and, cut by cut, fill as many slots as it says.
    pub fn is_sound(&self) -> bool {
        let (mut tokens, mut slots) = (0, 0);
        for cut in &self.cuts {
            if cut.tokens < tokens || cut.tokens > self.tokens.len() || cut.kept > slots + cut.tokens - tokens
            {
                return false;
            }
            (tokens, slots) = (cut.tokens, cut.kept);
        }
        self.slots == slots + self.tokens.len() - tokens && self.tokens.iter().all(|&t| (t as usize) < VOCAB)
    }
}

impl Session {
    /// The sequence, but for the rows that [`Session::read_rows`] gives.
    pub fn sequence(&self) -> Sequence {
        Sequence {
            tokens: self.tokens.clone(),
            slots: self.backend.len(),
            cuts: Vec::new(),
            observed: Observed::Nothing,
        }
    }

    /// Copies the filled rows of one layer out, in the cache's own element types.
    pub fn read_rows(&mut self, layer: usize, rows: &mut KvRows) -> Result<()> {
        self.backend.read_kv(layer, 0..self.backend.len(), rows)
    }

    /// Copies the mass of one layer out, `[kv_head][slot]`; empty where nothing is observed.
    pub fn read_mass(&mut self, _layer: usize, mass: &mut Vec<f32>) -> Result<()> {
        mass.clear();
        Ok(())
    }

    /// Becomes `sequence`. `fill(layer, rows, mass)` fills the rows and the mass of each layer, which have the length
    /// they need; where it fails, the session is empty.
    pub fn restore(
        &mut self,
        sequence: Sequence,
        mut fill: impl FnMut(usize, &mut KvRows, &mut Vec<f32>) -> Result<()>,
    ) -> Result<()> {
        let (slots, capacity) = (sequence.slots, self.backend.capacity());
        if slots > capacity {
            let more = format!("{slots} slots are filled, and the context has {capacity}");
            return Err(Error::Usage(format!("{more}; raise --max-seq-len to {slots} or more")));
        }
        if !sequence.is_sound() || sequence.observed != Observed::Nothing {
            return Err(Error::Other("tokens and slots of the sequence do not agree".into()));
        }
        self.clear();
        let mut rows = KvRows::zeroed(self.backend.kv_types(), slots, HEAD_DIM);
        let mut mass = Vec::new();
        for layer in 0..LAYERS {
            fill(layer, &mut rows, &mut mass)?;
            self.backend.write_kv(layer, 0..slots, &rows)?;
        }
        self.backend.set_len(slots);
        self.pos = sequence.tokens.len();
        // Into the room that is there already.
        self.tokens.extend_from_slice(&sequence.tokens);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_cuts_and_slots_agree() {
        let cut = |tokens, kept| Cut { tokens, kept };
        let sound = |tokens: usize, cuts: &[Cut], slots: usize| {
            let tokens = vec![1; tokens];
            Sequence { tokens, slots, cuts: cuts.into(), observed: Observed::Mass }.is_sound()
        };
        assert!(sound(0, &[], 0) && sound(7, &[], 7) && !sound(7, &[], 6) && !sound(7, &[], 8));
        assert!(sound(9, &[cut(6, 2)], 5) && sound(6, &[cut(6, 2)], 2) && !sound(9, &[cut(6, 2)], 6));
        assert!(sound(9, &[cut(6, 2), cut(8, 1)], 2) && sound(9, &[cut(6, 2), cut(6, 1)], 4));
        // Kept more than there was, an eviction before the last or after the end, sums beyond all numbers.
        assert!(!sound(9, &[cut(6, 7)], 10) && !sound(9, &[cut(6, 2), cut(8, 5)], 6));
        assert!(!sound(9, &[cut(6, 2), cut(5, 1)], 5) && !sound(9, &[cut(10, 2)], 1));
        assert!(!sound(9, &[cut(usize::MAX, usize::MAX)], 1) && !sound(9, &[cut(3, usize::MAX)], 1));
        let tokens = vec![VOCAB as u32];
        assert!(!Sequence { tokens, slots: 1, ..Sequence::default() }.is_sound());
    }
}
