//! Vocabularies in the form that `llguidance` takes. Building a real model's takes a while, so the last ones are
//! cached.

use super::limits::parser_limits;
use crate::tokenizer::TokenBytes;
use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Maximum number of cached vocabularies: a model's with and without the control tokens of tool calls.
const MAX_CACHED: usize = 4;

type Result<T> = std::result::Result<T, String>;

/// The key of a vocabulary.
pub(super) struct GrammarVocabulary {
    pub pieces: Weak<TokenBytes>,
    /// Control tokens that grammars see as their text. The others have no text, so no grammar can ask for them.
    pub shown: Arc<[u32]>,
    /// The end-of-text token.
    pub end: u32,
    pub vocab: usize,
}

/// The last vocabularies and their factories, each kept while its tokenizer lives.
static CACHE: Mutex<Vec<(GrammarVocabulary, Arc<ParserFactory>)>> = Mutex::new(Vec::new());

impl GrammarVocabulary {
    fn is_same(&self, other: &Self) -> bool {
        self.pieces.ptr_eq(&other.pieces)
            && (&self.shown, self.end, self.vocab) == (&other.shown, other.end, other.vocab)
    }

    /// Returns the factory that compiles grammars for this vocabulary, whose tokens are `pieces`.
    pub fn get_factory(self, pieces: &TokenBytes) -> Result<Arc<ParserFactory>> {
        let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        cache.retain(|(key, _)| key.pieces.strong_count() > 0);
        if let Some((_, factory)) = cache.iter().find(|(key, _)| self.is_same(key)) {
            return Ok(Arc::clone(factory));
        }
        let factory = Arc::new(new_factory(&self.build_token_env(pieces))?);
        if cache.len() == MAX_CACHED {
            cache.remove(0);
        }
        cache.push((self, Arc::clone(&factory)));
        Ok(factory)
    }

    fn build_token_env(&self, pieces: &TokenBytes) -> TokEnv {
        let hidden = |id: u32| pieces.is_special(id) && !self.shown.contains(&id);
        let text = |id: u32| if hidden(id) { Vec::new() } else { pieces.token_bytes(id).to_vec() };
        let words: Vec<_> = (0..self.vocab as u32).map(text).collect();
        let info = TokRxInfo::new(self.vocab as u32, self.end);
        Arc::new(ApproximateTokEnv::new(TokTrie::from(&info, &words)))
    }
}

/// Returns a factory that compiles grammars for a vocabulary of single bytes.
pub(super) fn byte_factory() -> Result<ParserFactory> {
    new_factory(&ApproximateTokEnv::single_byte_env())
}

fn new_factory(tokens: &TokEnv) -> Result<ParserFactory> {
    let mut factory = ParserFactory::new_simple(tokens).map_err(|e| e.to_string())?;
    factory.quiet();
    *factory.limits_mut() = parser_limits();
    Ok(factory)
}
