//! The markers in a model's answers: around thinking, and around tool calls.

use super::{Segment, Template, builtin};
use crate::tokenizer::Tokenizer;

/// The texts that begin and end a part of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Markers {
    pub open: &'static str,
    /// `None` if only the end of the answer ends the part.
    pub close: Option<&'static str>,
}

const THINKING: Markers = Markers { open: "<think>", close: Some("</think>") };
/// Markers of Qwen and many others, around one JSON object each.
const QWEN: Markers = Markers { open: "<tool_call>", close: Some("</tool_call>") };
/// Markers of Phi 4 mini, around a JSON list.
const PHI: Markers = Markers { open: "<|tool_call|>", close: Some("<|/tool_call|>") };
/// Marker of Granite, before a JSON list up to the end.
const GRANITE: Markers = Markers { open: "<|tool_call|>", close: None };
/// Marker of Llama 3, before one JSON object, or several with semicolons between them. The objects may also begin the
/// answer without a marker.
pub(super) const LLAMA: Markers = Markers { open: "<|python_tag|>", close: None };

/// The markers in a model's answers. By default there are none: all of an answer is text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutputFormat {
    pub(super) thinking: Option<Markers>,
    pub(super) calls: Option<Markers>,
    /// True if the template reads `reasoning_content` of earlier answers. Otherwise thinking stays in `content`.
    pub(super) reads_reasoning: bool,
    /// True if the template reads `tool_calls` of earlier answers. Otherwise calls stay in `content`.
    pub(super) reads_calls: bool,
}

impl OutputFormat {
    /// The format of a model with this template and tokenizer. For a conversation without tools, see
    /// [`OutputFormat::without_tools`].
    pub fn for_template(template: &Template, tokenizer: &Tokenizer) -> Self {
        let known = |text: &str| tokenizer.token_to_id(text).is_some();
        if *template == Template::PLAIN {
            return Self::default();
        }
        let jinja = if let Template::Jinja(jinja) = template { Some(jinja) } else { None };
        let has = |text: &str| jinja.is_some_and(|jinja| jinja.has_text(text));
        let calls = if has(QWEN.open) {
            Some(QWEN)
        } else if has(PHI.open) || known(PHI.open) {
            Some(if known("<|/tool_call|>") { PHI } else { GRANITE })
        } else if has(LLAMA.open) || (has("\"parameters\"") && has("<|eot_id|>")) {
            Some(LLAMA)
        } else {
            None
        };
        Self {
            thinking: Some(THINKING).filter(|t| has(t.open) || has("</think>") || known("</think>")),
            calls: calls.filter(|_| jinja.is_some() || *template == Template::BuiltIn(&builtin::PHI4)),
            reads_reasoning: has("reasoning_content"),
            reads_calls: has("tool_calls"),
        }
    }

    /// The format without tool calls: text that looks like a call stays text.
    pub fn without_tools(self) -> Self {
        Self { calls: None, ..self }
    }

    /// True if answers may contain thinking.
    pub fn has_thinking(&self) -> bool {
        self.thinking.is_some()
    }

    /// The text that ends the thinking of a model that does not stop by itself.
    pub fn end_of_thinking(&self) -> Option<String> {
        self.thinking?.close.map(|close| format!("\n{close}\n\n"))
    }

    /// Markers that are control tokens, whose text [`OutputParser`](super::OutputParser) needs to see.
    pub fn marker_token_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let all = self.thinking.into_iter().chain(self.calls).flat_map(|m| [Some(m.open), m.close]);
        let ids = all.flatten().filter_map(|marker| tokenizer.token_to_id(marker));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }

    /// Decodes the ids of an answer, markers included.
    pub fn decode_answer(&self, tokenizer: &Tokenizer, ids: &[u32]) -> String {
        tokenizer.decode_stream().with_shown_tokens(self.marker_token_ids(tokenizer)).decode_all(ids)
    }

    /// Splits the text of an answer into segments: only markers are control tokens.
    pub(super) fn split_segments(&self, tokenizer: &Tokenizer, text: &str) -> Vec<Segment> {
        let shown = self.marker_token_ids(tokenizer);
        let tokens: Vec<_> = shown.iter().map(|&id| tokenizer.pieces().token_text(id).into_owned()).collect();
        let (mut parts, mut rest) = (Vec::new(), text);
        while let Some((at, token)) = tokens.iter().filter_map(|t| Some((rest.find(t.as_str())?, t))).min() {
            parts.push(Segment::Text(rest[..at].into()));
            parts.push(Segment::Control(token.clone()));
            rest = &rest[at + token.len()..];
        }
        parts.push(Segment::Text(rest.into()));
        parts.retain(|part| !matches!(part, Segment::Text(text) if text.is_empty()));
        parts
    }
}
