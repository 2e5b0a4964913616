//! Grammars that the output must follow: a JSON schema, GBNF, a regular expression or a choice, run by the crate
//! `llguidance`.
//!
//! Before any other stage, tokens that the grammar does not allow next get a logit of negative infinity. End-of-text
//! tokens are allowed only where the grammar may end; where it must end, nothing else is allowed.

mod gbnf;
mod limits;
mod schema;
#[cfg(test)]
mod tests;
mod vocabulary;

use crate::tokenizer::TokenBytes;
use crate::{Error, Result};
use limits::{MAX_BYTES, MAX_PATTERN, compile_contained, one_line};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use serde_json::json;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use vocabulary::GrammarVocabulary;

/// A grammar. It is compiled for the tokens of a model when generation begins, or for bytes by
/// [`Grammar::compile_for_bytes`].
#[derive(Clone)]
pub struct Grammar {
    /// The flag or field it comes from, for messages.
    origin: Arc<str>,
    source: GrammarSource,
    /// Control tokens that the grammar sees as their text.
    shown: Arc<[u32]>,
    /// The grammar compiled for the last vocabulary, at its start state.
    compiled: Arc<Mutex<Option<CompiledGrammar>>>,
}

/// A grammar compiled for a vocabulary.
struct CompiledGrammar {
    pieces: Arc<TokenBytes>,
    /// The end-of-text token of the matcher.
    end: u32,
    start: Matcher,
}

#[derive(Debug, Clone, PartialEq)]
enum GrammarSource {
    /// A JSON schema; or a grammar in `llguidance`'s own syntax with the schemas that it contains.
    Schema(Arc<[serde_json::Value]>, Option<Arc<str>>),
    /// A grammar in `llguidance`'s own syntax whose rules were checked when they were translated.
    Lark(Arc<str>),
}

impl PartialEq for Grammar {
    fn eq(&self, other: &Self) -> bool {
        self.source == other.source
    }
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Grammar").field(&self.source).finish()
    }
}

impl Grammar {
    /// A grammar of the JSON that fits a schema; `place` names the schema in messages. Whitespace is a single space
    /// after colons and commas, so that the output cannot continue with whitespace forever, unless the schema has its own
    /// `x-guidance`.
    ///
    /// # Errors
    ///
    /// `Usage` with line and column if it is not JSON.
    pub fn from_json_schema(place: &str, text: &str) -> Result<Self> {
        let wrong = |why: String| Error::Usage(format!("{place}: {why}"));
        Self::check_length(place, text)?;
        let mut schema: serde_json::Value =
            serde_json::from_str(text).map_err(|e| wrong(format!("is not JSON: {e}")))?;
        if !schema.is_object() && !schema.is_boolean() {
            return Err(wrong("is not a JSON schema; use an object".into()));
        }
        Self::restrict_whitespace(&mut schema);
        Ok(Self::with_source(place, GrammarSource::Schema(vec![schema].into(), None)))
    }

    /// Allows no whitespace in the JSON of a schema except single spaces after colons and commas, unless the schema
    /// has its own `x-guidance`; and limits its numeric bounds to ones that can be compiled.
    pub(crate) fn restrict_whitespace(schema: &mut serde_json::Value) {
        schema::clamp_bounds(schema);
        if let Some(schema) = schema.as_object_mut() {
            schema.entry("x-guidance").or_insert_with(
                || json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
            );
        }
    }

    /// Refuses a text that is too long to be compiled.
    pub(crate) fn check_length(place: &str, text: &str) -> Result<()> {
        if text.len() > MAX_BYTES {
            let most = MAX_BYTES >> 20;
            return Err(Error::Usage(format!("{place}: exceeds {most} MiB; use a smaller grammar")));
        }
        Ok(())
    }

    /// A grammar in `llguidance`'s own syntax, which contains these schemas.
    pub(crate) fn from_lark(place: &str, text: &str, schemas: Vec<serde_json::Value>) -> Self {
        Self::with_source(place, GrammarSource::Schema(schemas.into(), Some(text.into())))
    }

    /// The grammar with these control tokens seen as their text.
    pub(crate) fn with_shown_tokens(self, shown: Vec<u32>) -> Self {
        Self { shown: shown.into(), ..self }
    }

    /// A grammar in GBNF, llama.cpp's form of BNF, starting at its rule `root`.
    ///
    /// # Errors
    ///
    /// `Usage` with line and column.
    pub fn from_gbnf(place: &str, text: &str) -> Result<Self> {
        Self::check_length(place, text)?;
        let lark = gbnf::to_lark(text).map_err(|e| Error::Usage(format!("{place}: {e}")))?;
        Ok(Self::with_source(place, GrammarSource::Lark(lark.into())))
    }

    /// A grammar of the texts that a regular expression matches as a whole.
    ///
    /// # Errors
    ///
    /// `Usage` if the expression is invalid or too long.
    pub fn from_regex(place: &str, text: &str) -> Result<Self> {
        let wrong = |why: String| Error::Usage(format!("{place}: {why}"));
        if text.len() > MAX_PATTERN {
            return Err(wrong(format!("exceeds {MAX_PATTERN} bytes; use a shorter regular expression")));
        }
        let mut parser = regex_syntax::ast::parse::ParserBuilder::new().nest_limit(MAX_GROUPS).build();
        parser.parse(text).map_err(|e| wrong(format!("is not a valid regular expression: {}", e.kind())))?;
        // The whole text is matched anyway. Digits and letters are ASCII, as in a schema.
        let lark = format!("start: /{}/\n", regex_to_lark(split_anchors(text).1, "dw"));
        Ok(Self::with_source(place, GrammarSource::Lark(lark.into())))
    }

    /// A schema's pattern, which a string contains, as an expression for the whole string in `llguidance`'s own syntax.
    pub(crate) fn pattern_to_lark(pattern: &str) -> String {
        let (begins, inner, ends) = split_anchors(pattern);
        let around = |anchored| if anchored { "" } else { r"(.|\n)*" };
        format!("{}({}){}", around(begins), regex_to_lark(inner, "dw"), around(ends))
    }

    /// A grammar that allows exactly one of these texts.
    ///
    /// # Errors
    ///
    /// `Usage` if there are none, or too many bytes.
    pub fn from_choice(place: &str, texts: &[String]) -> Result<Self> {
        if texts.is_empty() {
            return Err(Error::Usage(format!("{place}: is empty; give at least one text")));
        }
        let all: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
        let lark = format!("start: {}\n", all.join(" | "));
        Self::check_length(place, &lark)?;
        Ok(Self::with_source(place, GrammarSource::Lark(lark.into())))
    }

    fn with_source(place: &str, form: GrammarSource) -> Self {
        Self { origin: place.into(), source: form, shown: Arc::default(), compiled: Arc::default() }
    }

    /// The flag or field it comes from, as messages name it.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Compiles the grammar once for a vocabulary of bytes, so that errors show before a model is loaded.
    ///
    /// # Errors
    ///
    /// `Usage` if a keyword is invalid or not supported, or if compiling takes too long.
    pub fn compile_for_bytes(self) -> Result<Self> {
        let form = self.source.clone();
        compile_contained(&self.origin, move || form.compile_with(&vocabulary::byte_factory()?))?;
        Ok(self)
    }

    /// Starts the grammar for these tokens; `ends` are the end-of-text tokens.
    ///
    /// # Errors
    ///
    /// `Usage` if `ends` is empty: a finished grammar needs one. Those of [`Grammar::compile_for_bytes`] if the grammar
    /// is not yet compiled for these tokens.
    pub(super) fn start_matching(
        &self,
        pieces: &Arc<TokenBytes>,
        ends: &[u32],
        vocab: usize,
    ) -> Result<GrammarState> {
        let Some(&end) = ends.first() else {
            return Err(Error::Usage(format!(
                "{}: a grammar needs an end-of-text token; leave out `GenerateOptions::ignore_eos`",
                self.origin
            )));
        };
        let mut ready = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        let start = match ready.take() {
            Some(ready) if Arc::ptr_eq(&ready.pieces, pieces) && ready.end == end => ready.start,
            _ => {
                let shown = Arc::clone(&self.shown);
                let vocabulary = GrammarVocabulary { pieces: Arc::downgrade(pieces), shown, end, vocab };
                let (pieces, form) = (Arc::clone(pieces), self.source.clone());
                compile_contained(&self.origin, move || {
                    form.compile_with(&*vocabulary.get_factory(&pieces)?)
                })?
            }
        };
        let matcher = start.deep_clone();
        *ready = Some(CompiledGrammar { pieces: Arc::clone(pieces), end, start });
        Ok(GrammarState { matcher, end, ends: ends.into(), failure: None })
    }
}

/// Splits off the anchors of a regular expression; tells which there are.
fn split_anchors(text: &str) -> (bool, &str, bool) {
    let rest = text.strip_prefix('^').unwrap_or(text);
    let is_escaped = |rest: &str| (rest.len() - rest.trim_end_matches('\\').len()) % 2 == 1;
    let inner = rest.strip_suffix('$').filter(|rest| !is_escaped(rest));
    (rest.len() < text.len(), inner.unwrap_or(rest), inner.is_some())
}

/// Maximum nesting of groups in a regular expression.
const MAX_GROUPS: u32 = 128;

impl GrammarSource {
    /// Compiles the grammar; runs on its own thread.
    fn compile_with(&self, factory: &ParserFactory) -> std::result::Result<Matcher, String> {
        let grammar = match self {
            GrammarSource::Schema(schemas, text) => {
                schemas.iter().try_for_each(schema::check_schema)?;
                match (text, &schemas[..]) {
                    (None, [schema]) => TopLevelGrammar::from_json_schema(schema.clone()),
                    (text, _) => TopLevelGrammar::from_lark(text.as_deref().unwrap_or_default().to_owned()),
                }
            }
            GrammarSource::Lark(text) => TopLevelGrammar::from_lark(text.to_string()),
        };
        let mut matcher = Matcher::new(factory.create_parser(grammar));
        // The first token takes the longest: a grammar that is too complex fails now.
        let first = matcher.compute_mask_or_eos();
        match matcher.get_error().or(first.err().map(|e| e.to_string())) {
            None => Ok(matcher),
            Some(why) if why.starts_with("NoExtension") => Err("no text matches it; let it allow one".into()),
            Some(why) => Err(why),
        }
    }
}

/// The state of a grammar within the output.
#[derive(Clone)]
pub(super) struct GrammarState {
    matcher: Matcher,
    /// The end-of-text token of the matcher.
    end: u32,
    ends: Vec<u32>,
    failure: Option<String>,
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guide").field("ends", &self.ends).field("failure", &self.failure).finish()
    }
}

impl GrammarState {
    /// Rules out the tokens that cannot come next. Returns true if the output must end here.
    pub fn mask_logits(&mut self, logits: &mut [f32]) -> bool {
        let mut allowed = match self.matcher.compute_mask_or_eos() {
            Ok(allowed) => allowed,
            Err(e) => {
                self.record_failure(&e.to_string());
                return false;
            }
        };
        let end = allowed.is_allowed(self.end);
        let must_end = end && allowed.num_set() == 1;
        self.ends.iter().for_each(|&id| allowed.set(id as usize, end));
        for (id, logit) in (0u32..).zip(logits) {
            if !allowed.is_allowed(id) {
                *logit = f32::NEG_INFINITY;
            }
        }
        must_end
    }

    /// Advances by one token.
    pub fn accept_token(&mut self, token: u32) {
        if !self.ends.contains(&token)
            && let Err(e) = self.matcher.consume_token(token)
        {
            self.record_failure(&e.to_string());
        }
    }

    fn record_failure(&mut self, why: &str) {
        let why = one_line(why);
        self.failure.get_or_insert(format!("the grammar cannot continue: {why}"));
    }

    /// See [`Sampler::check_grammar`](super::Sampler::check_grammar).
    pub fn check_failure(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), |why| Err(Error::Usage(why)))
    }
}
