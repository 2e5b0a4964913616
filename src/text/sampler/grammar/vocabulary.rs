//! Vocabularies as `llguidance` knows them. One of a real model takes a while to make, so the last ones are kept.

use super::limits::parser_limits;
use crate::tokenizer::Pieces;
use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Vocabularies in the cache: a model's with and without the control tokens of calls.
const MAX_CACHED: usize = 4;

type Result<T> = std::result::Result<T, String>;

/// The key of a vocabulary.
pub(super) struct GrammarVocabulary {
    pub pieces: Arc<Pieces>,
    /// Control tokens that have a text for it. The others have none, so no grammar can ask for them.
    pub shown: Arc<[u32]>,
    /// The token that stands for the end.
    pub end: u32,
    pub vocab: usize,
}

/// A factory and the key that it was made for.
struct CachedFactory {
    pieces: Weak<Pieces>,
    shown: Arc<[u32]>,
    end: u32,
    vocab: usize,
    factory: Arc<ParserFactory>,
}

/// The last ones, for as long as their tokens are there.
static CACHE: Mutex<Vec<CachedFactory>> = Mutex::new(Vec::new());

impl GrammarVocabulary {
    fn matches(&self, kept: &CachedFactory) -> bool {
        std::ptr::eq(kept.pieces.as_ptr(), Arc::as_ptr(&self.pieces))
            && (&kept.shown, kept.end, kept.vocab) == (&self.shown, self.end, self.vocab)
    }

    /// Returns the factory that compiles grammars for it.
    pub fn factory(&self) -> Result<Arc<ParserFactory>> {
        let mut made = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        made.retain(|kept| kept.pieces.strong_count() > 0);
        if let Some(kept) = made.iter().find(|kept| self.matches(kept)) {
            return Ok(Arc::clone(&kept.factory));
        }
        let factory = Arc::new(factory(&self.tokens())?);
        if made.len() == MAX_CACHED {
            made.remove(0);
        }
        let (pieces, shown) = (Arc::downgrade(&self.pieces), Arc::clone(&self.shown));
        made.push(CachedFactory {
            pieces,
            shown,
            end: self.end,
            vocab: self.vocab,
            factory: Arc::clone(&factory),
        });
        Ok(factory)
    }

    fn tokens(&self) -> TokEnv {
        let hidden = |id: u32| self.pieces.is_special(id) && !self.shown.contains(&id);
        let text = |id: u32| if hidden(id) { Vec::new() } else { self.pieces.bytes(id).to_vec() };
        let words: Vec<_> = (0..self.vocab as u32).map(text).collect();
        let info = TokRxInfo::new(self.vocab as u32, self.end);
        Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)))
    }
}

/// A factory that compiles grammars for bytes.
pub(super) fn of_bytes() -> Result<ParserFactory> {
    factory(&ApproximateTokEnv::single_byte_env())
}

fn factory(tokens: &TokEnv) -> Result<ParserFactory> {
    let mut factory = ParserFactory::new_simple(tokens).map_err(|e| e.to_string())?;
    factory.quiet();
    *factory.limits_mut() = parser_limits();
    Ok(factory)
}
