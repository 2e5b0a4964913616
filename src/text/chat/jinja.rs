//! A model's own chat template: a Jinja program, run with limits.
//!
//! A template may do anything with the contents of messages, except turn them into control tokens. Only control tokens
//! that the template itself spells out become control tokens ([`source`] marks them before the template is compiled).
//! The text of one in a message stays text, even if the template trims it, cuts it or changes its case. So does one
//! that forms where a message and the template's text meet. A template that builds control tokens from parts is
//! refused when it is loaded.

mod environment;
mod interpreter;
mod json;
mod limits;
mod python;
mod repr;
mod source;
#[cfg(test)]
mod tests;
mod value;

use super::builtin::BuiltIn;
use super::{Message, PromptEnding, RenderContext, Role, Segment, TemplateKwargs, Tools};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use files::catch_panic::{self, PanicContext};
use files::error::escape;
use minijinja::{ErrorKind, Value};
use source::Marks;
use std::error::Error as _;

/// Maximum bytes of a source; most have up to 30 KB, some with many tools and languages several hundred.
pub(super) const MAX_SOURCE: u64 = 1 << 20;
/// Fuel of a rendering: a unit is a step of the interpreter or 64 bytes that it makes, so all of it makes 32 MiB of
/// text.
const FUEL: u64 = (32 << 20) / 64;
/// Additional fuel for every message. Real templates take up to 150 steps a message.
const FUEL_PER_MESSAGE: u64 = 1_000;
/// The first private-use character. A block of them that no message uses stands for the control tokens.
const PRIVATE: u32 = 0xF0000;
/// Number of characters in a block.
const BLOCK: u32 = 0x1000;
/// Number of blocks.
const BLOCKS: usize = 32;

const REMEDY: &str = "use the template published with the model";

/// A chat template in Jinja.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Jinja {
    /// The file and field it comes from, for messages.
    origin: String,
    source: String,
    /// Names and texts of special tokens such as `eos_token`.
    variables: Vec<(String, String)>,
    /// The control tokens that the template may write; empty before [`Jinja::for_tokenizer`].
    controls: Vec<String>,
    /// The control token that ends an answer.
    end: Option<String>,
    /// Another template, for conversations with tools.
    with_tools: Option<Box<Jinja>>,
}

/// The message given to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct TemplateException(String);

impl Jinja {
    /// A template from `place`, a file and field; `variables` are the names and texts of special tokens that it may
    /// use, except `bos_token`.
    ///
    /// # Errors
    /// [`Error::Model`] for a source that is too long or has a syntax error.
    pub fn new(
        place: impl Into<String>,
        source: impl Into<String>,
        variables: Vec<(String, String)>,
    ) -> Result<Self> {
        // Jinja reads its sources with these line ends.
        let source: String = source.into();
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let place = place.into();
        let (controls, end) = (Vec::new(), None);
        let template = Self { origin: place, source, variables, controls, end, with_tools: None };
        if template.source.len() as u64 > MAX_SOURCE {
            return Err(template.unusable_error(&format!("has more than {MAX_SOURCE} bytes")));
        }
        let text = template.prepare_source(&[])?;
        template.run_contained(move || interpreter::check_syntax(&text))?;
        Ok(template)
    }

    /// A built-in template, which may write these control tokens and the begin-of-text token.
    pub(super) fn built_in(template: &BuiltIn, bos: Option<&str>) -> Self {
        let controls = template.controls.iter().copied().chain(bos).map(str::to_owned).collect();
        Self {
            origin: template.name.into(),
            source: template.source.into(),
            variables: Vec::new(),
            controls,
            end: template.end.map(str::to_owned),
            with_tools: None,
        }
    }

    /// This template, and another one for conversations with tools.
    pub(super) fn and_with_tools(self, with_tools: Option<Self>) -> Self {
        Self { with_tools: with_tools.map(Box::new), ..self }
    }

    /// True if the text of the template, or of the one for conversations with tools, contains `part`.
    pub fn has_text(&self, part: &str) -> bool {
        self.source.contains(part) || self.with_tools.as_ref().is_some_and(|other| other.has_text(part))
    }

    /// The text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The file and field it comes from; its errors begin with them.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The token that ends an answer, once the tokenizer is known.
    pub fn end_token(&self) -> Option<&str> {
        self.end.as_deref()
    }

    /// Fits the template to the control tokens of `tokenizer`.
    ///
    /// # Errors
    /// [`Error::Model`] for a template that builds control tokens from parts or fails.
    pub fn for_tokenizer(mut self, tokenizer: &Tokenizer) -> Result<Self> {
        const TOOLS: &str =
            r#"[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]"#;
        let tools = Tools::parse_json(TOOLS).map(TemplateKwargs::with_tools).map_err(Error::Model)?;
        let other = self.with_tools.take().map(|other| other.fit_without_tools(tokenizer, Some(&tools)));
        Ok(self.fit_without_tools(tokenizer, None)?.and_with_tools(other.transpose()?))
    }

    /// Fits this template without the one for tools; probes it with `variables`.
    fn fit_without_tools(
        mut self,
        tokenizer: &Tokenizer,
        variables: Option<&TemplateKwargs>,
    ) -> Result<Self> {
        let special = tokenizer.special_tokens();
        let bos = tokenizer.bos_token();
        let wanted = |token: &String| {
            let named = self.variables.iter().any(|v| v.1 == *token) || bos == Some(token);
            // A mark in place of a line break would shift the line numbers.
            !token.trim().is_empty()
                && !token.contains('\n')
                && (named || self.source.contains(token.as_str()))
        };
        self.controls = special.iter().filter(|t| wanted(t)).cloned().collect();
        if self.controls.len() > BLOCK as usize {
            return Err(self.unusable_error(&format!("has more than {BLOCK} control tokens")));
        }
        self.probe_conversations(&special, bos, variables)?;
        Ok(self)
    }

    /// Renders small conversations, to find the token that ends an answer and control tokens built from parts.
    fn probe_conversations(
        &mut self,
        special: &[String],
        bos: Option<&str>,
        variables: Option<&TemplateKwargs>,
    ) -> Result<()> {
        const ANSWER: &str = "kestrel";
        let all = [
            Message::new(Role::System, "s"),
            Message::new(Role::User, "q"),
            Message::new(Role::Assistant, ANSWER),
            Message::new(Role::User, "r"),
        ];
        // Not every template takes a system message, or any history.
        for messages in [&all[..], &all[1..], &all[1..3], &all[1..2]] {
            let now = super::UtcTime::from_unix(0);
            let context = RenderContext { bos, now, ending: PromptEnding::Prompt, variables };
            let segments = match self.render_messages(messages, &context) {
                Err(Error::Usage(_)) => continue,
                other => other?,
            };
            let words = |token: &&String| token.chars().any(|c| !c.is_alphanumeric() && !c.is_whitespace());
            for segment in &segments {
                let Segment::Text(text) = segment else { continue };
                if let Some(token) = special.iter().filter(words).find(|t| text.contains(t.as_str())) {
                    let token = escape(token);
                    let what = format!("builds the control token {token} from parts, which is not supported");
                    return Err(self.unusable_error(&what));
                }
            }
            let answer = segments.iter().position(|s| matches!(s, Segment::Text(t) if t.contains(ANSWER)));
            if let Some(Segment::Control(end)) = answer.and_then(|at| segments.get(at + 1)) {
                self.end.get_or_insert_with(|| end.clone());
            }
        }
        Ok(())
    }

    /// Renders the conversation to segments; before [`Jinja::for_tokenizer`], to one text.
    ///
    /// # Errors
    /// [`Error::Usage`] if the template refuses the messages; [`Error::Model`] if it fails or exceeds its limits.
    pub fn render_messages(&self, messages: &[Message], context: &RenderContext<'_>) -> Result<Vec<Segment>> {
        let has_tools = context.variables.is_some_and(|variables| variables.tools.is_some());
        if let Some(other) = self.with_tools.as_ref().filter(|_| has_tools) {
            return other.render_messages(messages, context);
        }
        let given = value::template_variables(messages, context.variables);
        let base = self.free_block(&given)?;
        let marks: Vec<(&str, char)> = (base..)
            .zip(&self.controls)
            .filter_map(|(mark, token)| Some((token.as_str(), char::from_u32(mark)?)))
            .collect();
        let text = self.prepare_source(&marks)?;
        let values = self.add_values(given, context, &Marks::new(marks.iter().copied()));
        let fuel = FUEL + FUEL_PER_MESSAGE * messages.len() as u64;
        let now = context.now;
        let rendered = self.run_contained(move || {
            interpreter::render_template(
                &environment::build_environment(fuel, now),
                &text,
                Value::from_pairs(values),
            )
        })?;
        Ok(self.split_at_marks(&rendered, base))
    }

    /// Runs `call` so that deep recursion, a panic or a hang of the interpreter does not end the program.
    fn run_contained<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> std::result::Result<T, minijinja::Error> + Send + 'static,
    ) -> Result<T> {
        let subject = PanicContext {
            place: self.origin.clone(),
            panic_message: "makes the interpreter fail",
            timeout_message: "not rendered",
            remedy: REMEDY,
        };
        let place = self.origin.clone();
        catch_panic::catch_panic_with_timeout(&subject, move || call().map_err(|e| to_error(&place, &e)))
    }

    fn prepare_source(&self, marks: &[(&str, char)]) -> Result<String> {
        source::prepare_source(&self.source, &Marks::new(marks.iter().copied()))
            .map_err(|e| to_error(&self.origin, &e))
    }

    /// Adds the variables that transformers passes to a template to those that are `given`.
    fn add_values(
        &self,
        given: Vec<(String, Value)>,
        context: &RenderContext<'_>,
        marks: &Marks<'_>,
    ) -> Vec<(String, Value)> {
        let mut values: Vec<(String, Value)> = self
            .variables
            .iter()
            .map(|(name, text)| (name.clone(), Value::from(marks.insert_marks(text))))
            .collect();
        let prompt = context.ending == PromptEnding::Prompt;
        values.extend([
            ("bos_token".into(), Value::from(marks.insert_marks(context.bos.unwrap_or("")))),
            ("add_generation_prompt".into(), Value::from(prompt)),
            ("documents".into(), Value::from(())),
        ]);
        values.extend(given);
        values
    }

    /// The first character of a private-use block that is not used in the template or the messages.
    fn free_block(&self, given: &[(String, Value)]) -> Result<u32> {
        let mut used = [false; BLOCKS];
        let mut look = |text: &str| {
            for at in text.chars().filter_map(|c| u32::from(c).checked_sub(PRIVATE)) {
                used[(at / BLOCK) as usize] = true;
            }
        };
        look(&self.source);
        self.variables.iter().for_each(|(_, text)| look(text));
        given.iter().for_each(|(_, value)| value::visit_texts(value, &mut look));
        let block = used.iter().position(|used| !used).ok_or_else(|| {
            Error::Usage("the messages contain characters of every private-use block; remove some".into())
        })?;
        Ok(PRIVATE + block as u32 * BLOCK)
    }

    /// Splits rendered text at its marks, which become control tokens.
    fn split_at_marks(&self, text: &str, base: u32) -> Vec<Segment> {
        let text_segment = |text: &str| (!text.is_empty()).then(|| Segment::Text(text.into()));
        let mut segments = Vec::new();
        let mut from = 0;
        for (at, c) in text.char_indices() {
            let mark = u32::from(c).checked_sub(base).and_then(|i| self.controls.get(i as usize));
            if let Some(token) = mark {
                segments.extend(text_segment(&text[from..at]));
                segments.push(Segment::Control(token.clone()));
                from = at + c.len_utf8();
            }
        }
        segments.extend(text_segment(&text[from..]));
        segments
    }

    fn unusable_error(&self, why: &str) -> Error {
        model_error(&self.origin, None, why)
    }

    /// A checksum of the text, to tell templates apart.
    pub(super) fn compute_checksum(&self) -> u32 {
        let other = self.with_tools.as_ref().map_or("", |other| &other.source);
        crc32fast::hash([self.source.as_str(), other].concat().as_bytes())
    }
}

fn model_error(place: &str, line: Option<usize>, why: &str) -> Error {
    let line = line.map_or(String::new(), |line| format!(", line {line}"));
    Error::Model(format!("{place}{line}: {why}; {REMEDY}"))
}

/// Converts an error of the interpreter; `place` names the template.
fn to_error(place: &str, e: &minijinja::Error) -> Error {
    let mut source = e.source();
    while let Some(cause) = source {
        if let Some(TemplateException(message)) = cause.downcast_ref() {
            return Error::Usage(format!("{place}: refuses these messages: {}", escape(message)));
        }
        source = cause.source();
    }
    let why = match (e.kind(), e.detail()) {
        (ErrorKind::OutOfFuel, _) => "takes too many steps or produces too much text".into(),
        (ErrorKind::InvalidOperation, Some(detail)) => escape(detail),
        (kind, Some(detail)) => escape(&format!("{kind}: {detail}")),
        (kind, None) => kind.to_string(),
    };
    model_error(place, e.line(), &why)
}
