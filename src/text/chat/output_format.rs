//! The markers in a model's answers: around thinking, and around tool calls.

use super::call_literal::GEMMA_QUOTE;
use super::call_syntax::CallSyntax::{self, Json};
use super::call_syntax::Tags;
use super::{Segment, Template, builtin};
use crate::tokenizer::Tokenizer;

/// The texts that begin and end a part of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Markers {
    pub open: &'static str,
    /// `None` if only the end of the answer ends the part.
    pub close: Option<&'static str>,
    /// The form of tool calls between them.
    pub syntax: CallSyntax,
    /// Control tokens that are parts of the markers or within them.
    pub controls: &'static [&'static str],
}

impl Markers {
    const fn new(open: &'static str, close: Option<&'static str>, syntax: CallSyntax) -> Self {
        Self { open, close, syntax, controls: &[] }
    }

    const fn with_controls(self, controls: &'static [&'static str]) -> Self {
        Self { controls, ..self }
    }
}

const THINKING: Markers = Markers::new("<think>", Some("</think>"), Json);
/// Markers of Qwen and many others, around one JSON object each.
const QWEN: Markers = Markers::new("<tool_call>", Some("</tool_call>"), Json);
/// Markers of Phi 4 mini, around a JSON list.
const PHI: Markers = Markers::new("<|tool_call|>", Some("<|/tool_call|>"), Json);
/// Marker of Granite, before a JSON list up to the end.
const GRANITE: Markers = Markers::new("<|tool_call|>", None, Json);
/// Marker of Llama 3, before one JSON object, or several with semicolons between them. The objects may also begin the
/// answer without a marker.
pub(super) const LLAMA: Markers = Markers::new("<|python_tag|>", None, Json);
/// Markers of LFM 2.
const LFM: Markers = Markers::new("<|tool_call_start|>", Some("<|tool_call_end|>"), CallSyntax::Python);
/// Marker of gpt-oss, before the name of a function in the header of a message.
const GPT_OSS: Markers = Markers::new("to=functions.", None, CallSyntax::Named(MESSAGE));

/// Markers of calls that a template spells out, with the texts by which it is known; the first row that fits.
const BY_TEMPLATE: [(&[&str], Markers); 7] = [
    (&["<function=", "<parameter="], Markers { syntax: CallSyntax::Tagged(QWEN_TAGS), ..QWEN }),
    (
        &["<function name=", "<param name="],
        Markers::new("<function name=\"", Some("</function>"), CallSyntax::Tagged(MINICPM_TAGS)),
    ),
    (
        &["<|tool_call>call:"],
        Markers::new("<|tool_call>", Some("<tool_call|>"), CallSyntax::Braces).with_controls(&[GEMMA_QUOTE]),
    ),
    (
        &["[TOOL_CALLS]", "[ARGS]"],
        Markers::new("[TOOL_CALLS]", None, CallSyntax::Named("[ARGS]"))
            .with_controls(&["[ARGS]", "[CALL_ID]"]),
    ),
    // Mistral's older models write a JSON list.
    (&["[TOOL_CALLS]"], Markers::new("[TOOL_CALLS]", None, Json)),
    (&[CHANNEL], GPT_OSS.with_controls(CHANNELS)),
    (&[QWEN.open], QWEN),
];

/// Markers of thinking other than [`THINKING`], with the text by which a template is known.
const THINKING_BY_TEMPLATE: [(&str, Markers); 3] = [
    ("[THINK]", Markers::new("[THINK]", Some("[/THINK]"), Json)),
    (
        "<|channel>",
        Markers::new("<|channel>thought", Some("<channel|>"), Json).with_controls(&["<|channel>"]),
    ),
    (
        CHANNEL,
        Markers::new("<|channel|>analysis<|message|>", Some(MESSAGE_END), Json).with_controls(CHANNELS),
    ),
];

const QWEN_TAGS: Tags = Tags {
    newline: "\n",
    function: ("<function=", ">"),
    function_end: "</function>\n",
    parameter: ("<parameter=", ">"),
    end: "</parameter>",
    quotes: ("<parameter=", "</parameter>"),
};

const MINICPM_TAGS: Tags = Tags {
    newline: "",
    function: ("", "\">"),
    function_end: "",
    parameter: ("<param name=\"", "\">"),
    end: "</param>",
    quotes: ("<![CDATA[", "]]>"),
};

const CHANNEL: &str = "<|channel|>";
/// The text before the content of a message of gpt-oss.
pub(super) const MESSAGE: &str = "<|message|>";
/// The text after a message that another one follows.
pub(super) const MESSAGE_END: &str = "<|end|>";
const CHANNELS: &[&str] = &[CHANNEL, MESSAGE, MESSAGE_END, "<|start|>", "<|constrain|>"];
/// The header of the message that thinking is followed by.
const FINAL: &str = "<|start|>assistant<|channel|>final<|message|>";
/// The parts of headers of messages, which are no text.
const HEADERS: &[&str] = &[
    "<|start|>assistant",
    "<|channel|>analysis",
    "<|channel|>commentary",
    "<|channel|>final",
    "<|constrain|>json",
    MESSAGE,
    MESSAGE_END,
];

/// The markers in a model's answers. By default there are none: all of an answer is text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OutputFormat {
    pub(super) thinking: Option<Markers>,
    pub(super) calls: Option<Markers>,
    /// Texts between the parts of an answer that is a sequence of messages, each with a header.
    pub(super) headers: &'static [&'static str],
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
        let by_template = BY_TEMPLATE.into_iter().find(|(texts, _)| texts.iter().all(|text| has(text)));
        let calls = if let Some((_, markers)) = by_template {
            Some(markers)
        } else if has(PHI.open) || known(PHI.open) {
            Some(if known("<|/tool_call|>") { PHI } else { GRANITE })
        } else if has(LLAMA.open) || (has("\"parameters\"") && has("<|eot_id|>")) {
            Some(LLAMA)
        } else {
            // LFM's template leaves calls to the system message.
            Some(LFM).filter(|lfm| has(lfm.open) || known(lfm.open))
        };
        let other = THINKING_BY_TEMPLATE.into_iter().find(|(text, _)| has(text));
        let usual = || Some(THINKING).filter(|t| has(t.open) || has("</think>") || known("</think>"));
        Self {
            thinking: other.map(|(_, markers)| markers).or_else(usual),
            calls: calls.filter(|_| jinja.is_some() || *template == Template::BuiltIn(&builtin::PHI4)),
            headers: if has(CHANNEL) { HEADERS } else { &[] },
            reads_reasoning: has("reasoning_content") || has("message.thinking"),
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
        let close = self.thinking?.close?;
        Some(if self.headers.is_empty() { format!("\n{close}\n\n") } else { [close, FINAL].concat() })
    }

    /// Markers that are control tokens, whose text [`OutputParser`](super::OutputParser) needs to see.
    pub fn marker_token_ids(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let mut ids = Vec::new();
        for markers in self.thinking.into_iter().chain(self.calls) {
            let texts = [Some(markers.open), markers.close]
                .into_iter()
                .flatten()
                .chain(markers.controls.iter().copied());
            for id in texts.filter_map(|text| tokenizer.token_to_id(text)) {
                if tokenizer.is_special(id) && !ids.contains(&id) {
                    ids.push(id);
                }
            }
        }
        ids
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
