//! Grammars that a text must follow: a JSON schema or GBNF, run by the crate `llguidance`.
//!
//! Before any other stage, tokens that the grammar does not allow next get a logit of negative infinity. The tokens
//! that end a text are allowed only where the grammar may end; where it must end, they alone are.

mod gbnf;

use crate::tokenizer::Pieces;
use crate::{Error, Result};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::json;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A grammar that has been checked.
#[derive(Clone)]
pub struct Grammar {
    /// Where it came from, for messages.
    place: Arc<str>,
    form: Form,
    /// Control tokens that have a text for it.
    shown: Arc<[u32]>,
    /// Compiled for these tokens, at its start.
    ready: Arc<Mutex<Option<Ready>>>,
}

/// A grammar compiled for a vocabulary.
struct Ready {
    pieces: Arc<Pieces>,
    /// The token that the matcher uses as the end.
    end: u32,
    start: Matcher,
}

#[derive(Debug, Clone, PartialEq)]
enum Form {
    Schema(Arc<serde_json::Value>),
    /// In `llguidance`'s own syntax.
    Lark(Arc<str>),
}

impl PartialEq for Grammar {
    fn eq(&self, other: &Self) -> bool {
        self.form == other.form
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Grammar").field(&self.form).finish()
    }
}

impl Grammar {
    /// JSON that fits a schema; `place` names the schema in messages. The only blanks are single ones after colons and
    /// commas, so that a text cannot go on with blanks for ever, unless the schema has its own `x-guidance`.
    ///
    /// # Errors
    ///
    /// `Usage`: with line and column if it is not JSON, with the keyword if it is not a schema or not supported.
    pub fn json_schema(place: &str, text: &str) -> Result<Self> {
        let mut schema: serde_json::Value =
            serde_json::from_str(text).map_err(|e| Error::Usage(format!("{place}: is not JSON: {e}")))?;
        Self::without_blanks(&mut schema);
        Self::checked(place, Form::Schema(Arc::new(schema)))
    }

    /// Leaves JSON of a schema no blanks but single ones after colons and commas, unless it has its own `x-guidance`.
    pub(crate) fn without_blanks(schema: &mut serde_json::Value) {
        if let Some(schema) = schema.as_object_mut() {
            schema.entry("x-guidance").or_insert_with(
                || json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
            );
        }
    }

    /// Texts of a grammar in `llguidance`'s own syntax.
    pub(crate) fn lark(place: &str, text: &str) -> Result<Self> {
        Self::checked(place, Form::Lark(text.into()))
    }

    /// The same where these control tokens stand for their text.
    pub(crate) fn showing(self, shown: Vec<u32>) -> Self {
        Self { shown: shown.into(), ..self }
    }

    /// Texts of the rule `root` of a grammar in GBNF, llama.cpp's form of BNF.
    ///
    /// # Errors
    ///
    /// `Usage` with line and column.
    pub fn gbnf(place: &str, text: &str) -> Result<Self> {
        let lark = gbnf::to_lark(text).map_err(|e| Error::Usage(format!("{place}: {e}")))?;
        Self::checked(place, Form::Lark(lark.into()))
    }

    /// Compiles it once for a vocabulary of bytes, so that errors show before a model is loaded.
    fn checked(place: &str, form: Form) -> Result<Self> {
        let grammar = Self { place: place.into(), form, shown: Arc::default(), ready: Arc::default() };
        grammar.matcher(&ApproximateTokEnv::single_byte_env()).map(|_| grammar)
    }

    fn matcher(&self, tokens: &TokEnv) -> Result<Matcher> {
        let grammar = match &self.form {
            Form::Schema(schema) => TopLevelGrammar::from_json_schema(serde_json::Value::clone(schema)),
            Form::Lark(text) => TopLevelGrammar::from_lark(text.to_string()),
        };
        let parser = ParserFactory::new_simple(tokens)
            .and_then(|mut factory| factory.quiet().create_parser(grammar))
            .map_err(|e| Error::Usage(format!("{}: {}", self.place, one_line(&e.to_string()))))?;
        let matcher = Matcher::new(Ok(parser));
        match matcher.get_error() {
            None => Ok(matcher),
            Some(e) => Err(Error::Usage(format!("{}: {}", self.place, one_line(&e)))),
        }
    }

    /// Starts a text of these tokens; `ends` are those that end it.
    ///
    /// # Errors
    ///
    /// `Usage` if there are none: a finished grammar needs one.
    pub(super) fn begin(&self, pieces: &Arc<Pieces>, ends: &[u32], vocab: usize) -> Result<Guide> {
        let Some(&end) = ends.first() else {
            return Err(Error::Usage(format!(
                "{}: a text that follows a grammar needs a token that ends it; leave `GenerateOptions::ignore_eos` out",
                self.place
            )));
        };
        let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
        let start = match ready.take() {
            Some(ready) if Arc::ptr_eq(&ready.pieces, pieces) && ready.end == end => ready.start,
            _ => self.matcher(&tokens(pieces, &self.shown, (end, vocab)))?,
        };
        let matcher = start.deep_clone();
        *ready = Some(Ready { pieces: Arc::clone(pieces), end, start });
        Ok(Guide { matcher, end, ends: ends.into(), failure: None })
    }
}

/// The vocabulary for `llguidance`. Control tokens that are not shown have no text in it, so no grammar can ask for them.
fn tokens(pieces: &Pieces, shown: &[u32], (end, vocab): (u32, usize)) -> TokEnv {
    let hidden = |id: u32| pieces.is_special(id) && !shown.contains(&id);
    let text = |id: u32| if hidden(id) { Vec::new() } else { pieces.bytes(id).to_vec() };
    let words: Vec<_> = (0..vocab as u32).map(text).collect();
    Arc::new(ApproximateTokEnv::new(TokTrie::from(&TokRxInfo::new(vocab as u32, end), &words)))
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A grammar in the middle of a text.
#[derive(Clone)]
pub(super) struct Guide {
    matcher: Matcher,
    /// The token that the matcher uses as the end.
    end: u32,
    ends: Vec<u32>,
    failure: Option<String>,
}

impl fmt::Debug for Guide {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("ends", &self.ends).field("failure", &self.failure).finish()
    }
}

impl Guide {
    /// Rules out the tokens that cannot come next.
    pub fn mask(&mut self, logits: &mut [f32]) {
        let mut allowed = match self.matcher.compute_mask_or_eos() {
            Ok(allowed) => allowed,
            Err(e) => return self.fail(&e.to_string()),
        };
        let end = allowed.is_allowed(self.end);
        self.ends.iter().for_each(|&id| allowed.set(id as usize, end));
        for (id, logit) in (0u32..).zip(logits) {
            if !allowed.is_allowed(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }

    /// Advances by a token.
    pub fn accept(&mut self, token: u32) {
        if !self.ends.contains(&token)
            && let Err(e) = self.matcher.consume_token(token)
        {
            self.fail(&e.to_string());
        }
    }

    fn fail(&mut self, why: &str) {
        let why = one_line(why.lines().next().unwrap_or(""));
        self.failure.get_or_insert(format!("the grammar cannot go on: {why}"));
    }

    /// See [`Sampler::check_grammar`](super::Sampler::check_grammar).
    pub fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), |why| Err(Error::Other(why)))
    }
}
