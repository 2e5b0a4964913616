//! Checks of tokens before a pass, and of logits after it.

use super::Session;
use crate::dims::{VOCAB, attention_layers};
use crate::model::device::KvRows;
use crate::run::options::long_prompt_error;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use text::sampler::all_finite;

impl Session {
    /// Checks that the tokens are in the vocabulary and have free slots.
    pub(super) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        if tokens.is_empty() {
            return Err(Error::Usage("the prompt is empty; give at least one token".into()));
        }
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= VOCAB) {
            return Err(Error::Usage(format!("token id {id}: the vocabulary ends at {}", VOCAB - 1)));
        }
        if self.evictor.is_none() { self.check_room(tokens.len()) } else { Ok(()) }
    }

    /// Checks that this many slots are free.
    pub(super) fn check_room(&self, tokens: usize) -> Result<()> {
        let (need, have) = (self.slots() + tokens, self.extent().slots);
        if need <= have {
            return Ok(());
        }
        Err(long_prompt_error(&need.to_string(), have))
    }

    /// Checks that the logits are finite. The error, `Model`, names the cause: a key or value too large for the cache's
    /// type, or broken weights.
    pub(crate) fn check_logits(&mut self) -> Result<()> {
        if all_finite(&self.logits) {
            return Ok(());
        }
        match self.find_overflow()? {
            Some(layer) => Err(Error::Model(format!(
                "a key or value of layer {layer} is too large for a cache of type {}; use `EngineOptions::kv_types` f32",
                self.extent().types
            ))),
            None => Err(Error::Model("the model computes NaN or infinity, so its weights are broken".into())),
        }
    }

    /// Finds the layer whose keys or values overflowed in the cache. The first layer with rows that are not finite was
    /// computed from finite numbers; so if it overflowed, it holds infinities and no NaN.
    fn find_overflow(&mut self) -> Result<Option<usize>> {
        let types = self.extent().types;
        let mut rows = KvRows::default();
        for layer in attention_layers().filter(|_| types != KvTypes::same(KvType::F32)) {
            self.read_rows(layer, &mut rows)?;
            if let Some(first) = rows.find_not_finite(types) {
                return Ok(first.is_infinite().then_some(layer));
            }
        }
        Ok(None)
    }
}
