//! Renders conversations in the format that a chat model was trained on, and parses its answers.
//!
//! A template is a Jinja program ([`Jinja`]): the model's own, or the built-in one of its family, or plain paragraphs.
//! Control tokens and text are kept apart, so that the text of a control token in a message stays text.
//! [`OutputParser`] splits an answer into thinking, text and tool calls.

mod builtin;
mod call_literal;
mod call_syntax;
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

pub use clock::UtcTime;
pub use conversation::{Conversation, ConversationState, QuestionUndo};
pub use jinja::Jinja;
pub use message::{Message, Role, ToolCall};
pub use output_format::OutputFormat;
pub use output_parser::{AnswerPart, OutputParser};
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
    /// The text between two control tokens. It must be encoded in one piece to give the ids that the model was trained
    /// on.
    Text(String),
}

/// The end of a rendered conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PromptEnding {
    /// The start of an answer, for the model to continue.
    Prompt,
    /// The end of the last message.
    Message,
    /// The content of the last message, for the model to continue it.
    Continue,
}

/// The input of a template besides the messages.
#[derive(Debug, Clone)]
pub struct RenderContext<'a> {
    /// The tokenizer's begin-of-text token.
    pub bos: Option<&'a str>,
    /// The date and time that the template sees.
    pub now: UtcTime,
    pub ending: PromptEnding,
    /// Tools, and the caller's own variables.
    pub variables: Option<&'a TemplateKwargs>,
}

/// Encodes segments; only [`Segment::Control`] becomes a control token.
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

/// A mark at the end of a message that is to be continued: the rendered text is truncated there, as transformers does.
/// A template that trims messages removes its space.
const OPEN_END: &str = "\u{fdd0}end of the last message\u{fdd0} ";

/// Truncates the conversation before [`OPEN_END`]; `None` if it is not there.
fn truncate_at_mark(mut segments: Vec<Segment>) -> Option<Vec<Segment>> {
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

/// Concatenates segments.
pub fn join_segments(segments: &[Segment]) -> String {
    segments
        .iter()
        .map(|s| match s {
            Segment::Control(text) | Segment::Text(text) => text.as_str(),
        })
        .collect()
}

/// True if Python counts a character as whitespace: four separators more than Rust.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

#[cfg(test)]
mod tests;
