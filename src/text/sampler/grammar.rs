//! Grammars that a text must follow: a JSON schema or GBNF, run by the crate `llguidance`.
//!
//! Before any other stage, tokens that the grammar does not allow next get a logit of negative infinity. The tokens
//! that end a text are allowed only where the grammar may end; where it must end, they alone are.

mod gbnf;
mod limits;
mod schema;
#[cfg(test)]
mod tests;
mod vocabulary;

use crate::tokenizer::Pieces;
use crate::{Error, Result};
use limits::{MAX_BYTES, MAX_PATTERN, compile_contained, one_line};
use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use serde_json::json;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use vocabulary::GrammarVocabulary;

/// A grammar. It is compiled for the tokens of a model where a text of it begins, or by [`Grammar::checked`] for bytes.
#[derive(Clone)]
pub struct Grammar {
    /// Its origin, for messages.
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
    /// A schema, or several that a grammar in `llguidance`'s own syntax holds.
    Schema(Arc<[serde_json::Value]>, Option<Arc<str>>),
    /// In that syntax, of rules that were looked at.
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
    /// `Usage` with line and column if it is not JSON.
    pub fn json_schema(place: &str, text: &str) -> Result<Self> {
        let wrong = |why: String| Error::Usage(format!("{place}: {why}"));
        check_length(text).map_err(wrong)?;
        let mut schema: serde_json::Value =
            serde_json::from_str(text).map_err(|e| wrong(format!("is not JSON: {e}")))?;
        if !schema.is_object() && !schema.is_boolean() {
            return Err(wrong("is no JSON schema; use an object".into()));
        }
        Self::without_blanks(&mut schema);
        Ok(Self::of(place, Form::Schema(vec![schema].into(), None)))
    }

    /// Leaves JSON of a schema no blanks but single ones after colons and commas, unless it has its own `x-guidance`; and
    /// brings its bounds to ones that can be compiled.
    pub(crate) fn without_blanks(schema: &mut serde_json::Value) {
        schema::bound_numbers(schema);
        if let Some(schema) = schema.as_object_mut() {
            schema.entry("x-guidance").or_insert_with(
                || json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "}),
            );
        }
    }

    /// Texts of a grammar in `llguidance`'s own syntax, which holds these schemas.
    pub(crate) fn lark(place: &str, text: &str, schemas: Vec<serde_json::Value>) -> Self {
        Self::of(place, Form::Schema(schemas.into(), Some(text.into())))
    }

    /// The grammar where these control tokens stand for their text.
    pub(crate) fn showing(self, shown: Vec<u32>) -> Self {
        Self { shown: shown.into(), ..self }
    }

    /// Texts of the rule `root` of a grammar in GBNF, llama.cpp's form of BNF.
    ///
    /// # Errors
    ///
    /// `Usage` with line and column.
    pub fn gbnf(place: &str, text: &str) -> Result<Self> {
        let lark = check_length(text).and_then(|()| gbnf::to_lark(text));
        let lark = lark.map_err(|e| Error::Usage(format!("{place}: {e}")))?;
        Ok(Self::of(place, Form::Lark(lark.into())))
    }

    /// Texts that a regular expression matches as a whole.
    ///
    /// # Errors
    ///
    /// `Usage` if it is none.
    pub fn regex(place: &str, text: &str) -> Result<Self> {
        let wrong = |why: String| Error::Usage(format!("{place}: {why}"));
        if text.len() > MAX_PATTERN {
            return Err(wrong(format!(
                "has more than {MAX_PATTERN} bytes; use a shorter regular expression"
            )));
        }
        let mut parser = regex_syntax::ast::parse::ParserBuilder::new().nest_limit(MAX_GROUPS).build();
        parser.parse(text).map_err(|e| wrong(format!("is no regular expression: {}", e.kind())))?;
        // All of a text is matched anyway. Digits and letters are those of ASCII, as in a schema.
        let text = text.strip_prefix('^').unwrap_or(text);
        let end =
            text.strip_suffix('$').filter(|rest| (rest.len() - rest.trim_end_matches('\\').len()) % 2 == 0);
        let lark = format!("start: /{}/\n", regex_to_lark(end.unwrap_or(text), "dw"));
        Ok(Self::of(place, Form::Lark(lark.into())))
    }

    /// One of some texts.
    ///
    /// # Errors
    ///
    /// `Usage` if there are none.
    pub fn choice(place: &str, texts: &[String]) -> Result<Self> {
        if texts.is_empty() {
            return Err(Error::Usage(format!("{place}: is empty; give one text at least")));
        }
        let all: Vec<_> = texts.iter().map(|text| json!(text).to_string()).collect();
        let lark = format!("start: {}\n", all.join(" | "));
        check_length(&lark).map_err(|why| Error::Usage(format!("{place}: {why}")))?;
        Ok(Self::of(place, Form::Lark(lark.into())))
    }

    fn of(place: &str, form: Form) -> Self {
        Self { place: place.into(), form, shown: Arc::default(), ready: Arc::default() }
    }

    /// Its origin, as messages say.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// Compiles it once for a vocabulary of bytes, so that errors show before a model is loaded.
    ///
    /// # Errors
    ///
    /// `Usage`: with the keyword if it is not a schema or not supported, and where it takes too long.
    pub fn checked(self) -> Result<Self> {
        let form = self.form.clone();
        compile_contained(&self.place, move || form.compile(&vocabulary::of_bytes()?))?;
        Ok(self)
    }

    /// Starts a text of these tokens; `ends` are those that end it.
    ///
    /// # Errors
    ///
    /// `Usage` if there are none: a finished grammar needs one. That of [`Grammar::checked`] where it is not compiled
    /// for these tokens already.
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
            _ => {
                let of = GrammarVocabulary {
                    pieces: Arc::clone(pieces),
                    shown: Arc::clone(&self.shown),
                    end,
                    vocab,
                };
                let form = self.form.clone();
                compile_contained(&self.place, move || form.compile(&*of.factory()?))?
            }
        };
        let matcher = start.deep_clone();
        *ready = Some(Ready { pieces: Arc::clone(pieces), end, start });
        Ok(Guide { matcher, end, ends: ends.into(), failure: None })
    }
}

/// Groups in each other in a regular expression.
const MAX_GROUPS: u32 = 128;

fn check_length(text: &str) -> std::result::Result<(), String> {
    if text.len() > MAX_BYTES {
        return Err(format!("is longer than {} MiB; use a smaller grammar", MAX_BYTES >> 20));
    }
    Ok(())
}

impl Form {
    /// Compiles it; runs on a thread of its own.
    fn compile(&self, factory: &ParserFactory) -> std::result::Result<Matcher, String> {
        let grammar = match self {
            Form::Schema(schemas, text) => {
                schemas.iter().try_for_each(schema::check)?;
                match (text, &schemas[..]) {
                    (None, [schema]) => TopLevelGrammar::from_json_schema(schema.clone()),
                    (text, _) => TopLevelGrammar::from_lark(text.as_deref().unwrap_or_default().to_owned()),
                }
            }
            Form::Lark(text) => TopLevelGrammar::from_lark(text.to_string()),
        };
        let mut matcher = Matcher::new(factory.create_parser(grammar));
        // What is too much for the first token is said now; and it takes longer than for others.
        let first = matcher.compute_mask_or_eos();
        match matcher.get_error().or(first.err().map(|e| e.to_string())) {
            None => Ok(matcher),
            Some(why) if why.starts_with("NoExtension") => Err("no text fits it; let it allow one".into()),
            Some(why) => Err(why),
        }
    }
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
    /// Rules out the tokens that cannot come next; whether the text must end here.
    pub fn mask(&mut self, logits: &mut [f32]) -> bool {
        let mut allowed = match self.matcher.compute_mask_or_eos() {
            Ok(allowed) => allowed,
            Err(e) => {
                self.fail(&e.to_string());
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

    /// Advances by a token.
    pub fn accept(&mut self, token: u32) {
        if !self.ends.contains(&token)
            && let Err(e) = self.matcher.consume_token(token)
        {
            self.fail(&e.to_string());
        }
    }

    fn fail(&mut self, why: &str) {
        let why = one_line(why);
        self.failure.get_or_insert(format!("the grammar cannot go on: {why}"));
    }

    /// See [`Sampler::check_grammar`](super::Sampler::check_grammar).
    pub fn check(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), |why| Err(Error::Usage(why)))
    }
}
