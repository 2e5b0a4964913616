//! Conversations as the text that a chat model was trained on.
//!
//! A template is a Jinja program ([`Jinja`]): the model's own, or else the built-in one of its family, or plain paragraphs. Control tokens and text are kept apart, so that the text of a control token in a message stays text.
//! [`OutputParser`] reads an answer: thoughts, text, and calls of functions.

mod builtin;
mod clock;
mod conversation;
mod jinja;
mod message;
mod output_format;
mod output_parser;
mod template;
mod template_kwargs;
mod template_source;
mod tool_calls;
#[cfg(feature = "grammar")]
mod tool_grammar;

pub use clock::Moment;
pub use conversation::{Before, Conversation, ConversationState};
pub use jinja::Jinja;
pub use message::{Message, Role, ToolCall};
pub use output_format::OutputFormat;
pub use output_parser::{OutputParser, Part};
pub use template::Template;
pub use template_kwargs::{TemplateKwargs, Tools};
pub use template_source::TemplateSource;

use crate::Result;
use crate::tokenizer::{AddSpecial, Tokenizer};

/// A part of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// The text of one control token.
    Control(String),
    /// All text between two control tokens. It must be encoded in one piece to give the ids that the model was
    /// trained on.
    Text(String),
}

/// The end of a rendered conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With the start of an answer, for the model to continue.
    Prompt,
    /// With the last message.
    Message,
    /// In the last message, for the model to go on with its content.
    Continue,
}

/// The input of a template besides the messages.
#[derive(Debug, Clone)]
pub struct Context<'a> {
    /// The tokenizer's begin-of-text token.
    pub bos: Option<&'a str>,
    /// The date and time that the template sees.
    pub now: Moment,
    pub ending: Ending,
    /// Tools, and a caller's own values.
    pub variables: Option<&'a TemplateKwargs>,
}

/// The ids of the parts; only control parts become control tokens.
fn encode_segments(
    tokenizer: &Tokenizer,
    segments: Vec<Segment>,
    stop: &dyn Fn() -> bool,
) -> Result<Vec<u32>> {
    let mut ids = vec![];
    for segment in segments {
        ids.extend(match segment {
            Segment::Control(token) => tokenizer.encode(&token, AddSpecial::No)?,
            Segment::Text(text) => tokenizer.encode_plain_until(&text, stop)?,
        });
    }
    Ok(ids)
}

/// Mark at the end of a message that is to be continued; the text is cut there, as transformers does it; without
/// the blank where a template trims.
const OPEN_END: &str = "\u{fdd0}end of the last message\u{fdd0} ";

/// Cuts the conversation before [`OPEN_END`].
fn up_to_open_end(mut segments: Vec<Segment>) -> Option<Vec<Segment>> {
    let mark = OPEN_END.trim_end();
    let found = segments.iter().enumerate().rev().find_map(|(i, segment)| match segment {
        Segment::Text(text) => Some((i, text.rfind(mark)?)),
        Segment::Control(_) => None,
    });
    let (i, at) = found?;
    segments.truncate(i + 1);
    if let Some(Segment::Text(text)) = segments.last_mut() {
        let trimmed = !text[at..].starts_with(OPEN_END);
        text.truncate(at);
        if trimmed {
            text.truncate(text.trim_end_matches(is_blank).len());
        }
    }
    segments.retain(|segment| !matches!(segment, Segment::Text(text) if text.is_empty()));
    Some(segments)
}

/// The parts as one text.
pub fn join(segments: &[Segment]) -> String {
    segments
        .iter()
        .map(|s| match s {
            Segment::Control(text) | Segment::Text(text) => text.as_str(),
        })
        .collect()
}

/// True if Python counts it as whitespace: four separators more than Rust.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Segments under construction; neighbouring texts are joined.
#[derive(Default)]
struct Segments(Vec<Segment>);

impl Segments {
    fn control(&mut self, token: &str) {
        self.0.push(Segment::Control(token.into()));
    }

    fn text(&mut self, parts: &[&str]) {
        match self.0.last_mut() {
            _ if parts.iter().all(|part| part.is_empty()) => {}
            Some(Segment::Text(text)) => parts.iter().for_each(|p| text.push_str(p)),
            _ => self.0.push(Segment::Text(parts.concat())),
        }
    }
}

#[cfg(test)]
mod tests;
