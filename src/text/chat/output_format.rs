//! The markers of a model's answers: around its thoughts, and around the functions that it calls.

use super::{Segment, Template, builtin};
use crate::tokenizer::Tokenizer;

/// The texts that begin and end a part of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Markers {
    pub open: &'static str,
    /// `None`: only the end of the answer.
    pub close: Option<&'static str>,
}

const THOUGHTS: Markers = Markers { open: "<think>", close: Some("</think>") };
/// Qwen and many others: one JSON object in each.
const QWEN: Markers = Markers { open: "<tool_call>", close: Some("</tool_call>") };
/// Phi 4 mini: a JSON list.
const PHI: Markers = Markers { open: "<|tool_call|>", close: Some("<|/tool_call|>") };
/// Granite: a JSON list up to the end.
const GRANITE: Markers = Markers { open: "<|tool_call|>", close: None };
/// Llama 3: an object, or several with semicolons between them. They may also begin the answer without a marker.
pub(super) const LLAMA: Markers = Markers { open: "<|python_tag|>", close: None };

/// The markers of a model's answers. By default there are none: all of an answer is text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutputFormat {
    pub(super) thinking: Option<Markers>,
    pub(super) calls: Option<Markers>,
    /// Set if the template reads `reasoning_content`, and `tool_calls`, of earlier answers. Where it does not, they stay
    /// in `content`.
    pub(super) reads_reasoning: bool,
    pub(super) reads_calls: bool,
}

impl OutputFormat {
    /// The format of a model with this template and vocabulary. With [`OutputFormat::without_tools`] for a conversation
    /// without tools.
    pub fn of(template: &Template, tokenizer: &Tokenizer) -> Self {
        let known = |text: &str| tokenizer.token_to_id(text).is_some();
        if *template == Template::PLAIN {
            return Self::default();
        }
        let jinja = if let Template::Jinja(jinja) = template { Some(jinja) } else { None };
        let has = |text: &str| jinja.is_some_and(|jinja| jinja.mentions(text));
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
            thinking: Some(THOUGHTS).filter(|t| has(t.open) || has("</think>") || known("</think>")),
            calls: calls.filter(|_| jinja.is_some() || *template == Template::BuiltIn(&builtin::PHI4)),
            reads_reasoning: has("reasoning_content"),
            reads_calls: has("tool_calls"),
        }
    }

    /// The format where the model may call nothing: what looks like a call is text.
    pub fn without_tools(self) -> Self {
        Self { calls: None, ..self }
    }

    /// True if answers may have thoughts.
    pub fn thinks(&self) -> bool {
        self.thinking.is_some()
    }

    /// The text that ends the thoughts of an answer whose model does not.
    pub fn end_of_thinking(&self) -> Option<String> {
        self.thinking?.close.map(|close| format!("\n{close}\n\n"))
    }

    /// Control tokens whose text belongs to an answer, as [`OutputParser`](super::OutputParser) looks for it.
    pub fn shown(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let all = self.thinking.into_iter().chain(self.calls).flat_map(|m| [Some(m.open), m.close]);
        let ids = all.flatten().filter_map(|marker| tokenizer.token_to_id(marker));
        ids.filter(|&id| tokenizer.is_special(id)).collect()
    }

    /// The text of an answer's ids, markers included.
    pub fn decode(&self, tokenizer: &Tokenizer, ids: &[u32]) -> String {
        let mut stream = tokenizer.stream().showing(self.shown(tokenizer));
        let mut text = String::new();
        ids.iter().for_each(|&id| stream.push_into(id, &mut text));
        text + &stream.finish()
    }

    /// The text of an answer, in which only markers are control tokens.
    pub(super) fn segments(&self, tokenizer: &Tokenizer, text: &str) -> Vec<Segment> {
        let shown = self.shown(tokenizer);
        let tokens: Vec<_> = shown.iter().map(|&id| tokenizer.pieces().text(id).into_owned()).collect();
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
