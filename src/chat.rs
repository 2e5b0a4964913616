//! Conversations as the text that a chat model was trained on.
//!
//! A model's own template is a Jinja program; here it is only recognised as one of the two common
//! forms, with what they vary in. Control tokens and text are kept apart, so that a control token
//! that someone writes in a message stays text.

mod conversation;

pub use conversation::{Conversation, ConversationState};

use crate::tokenizer::files::{read, read_settings};
use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};
use serde_json::Value;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

const MAX_TEMPLATE: u64 = 1 << 20;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    System,
    User,
    Assistant,
}

impl Role {
    /// As templates write it.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub role: Role,
    pub content: String,
}

impl Message {
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into() }
    }
}

/// A part of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// The text of one control token.
    Control(String),
    /// Everything between two control tokens; encoded as a whole, it gives the ids that the model
    /// was trained on.
    Text(String),
}

/// How a rendered conversation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With the head of an answer, for the model to go on.
    Prompt,
    /// With the last message.
    Message,
}

/// What a template needs to know besides the messages.
#[derive(Debug, Clone)]
pub struct Context<'a> {
    /// The tokenizer's begin-of-text token.
    pub bos: Option<&'a str>,
    /// Today, as in `26 Jul 2024`; see [`today`].
    pub date: &'a str,
    pub ending: Ending,
}

/// The form of a model's chat template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Template {
    /// `<|im_start|>role\ncontent<|im_end|>\n` (Qwen and many others).
    ChatMl {
        /// The template begins with the begin-of-text token.
        bos: bool,
        /// System message where the conversation has none.
        default_system: Option<String>,
    },
    /// `<|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>`, contents trimmed.
    Llama3 {
        /// The knowledge cutoff that, with today's date, opens a system message that is always there
        /// (Llama 3.1 and 3.2).
        cutoff: Option<String>,
    },
    /// A base model: paragraphs.
    Plain,
}

impl Template {
    /// Recognises the form of a model's `chat_template`.
    pub fn detect(chat_template: Option<&str>) -> Self {
        let Some(source) = chat_template else { return Template::Plain };
        if source.contains("<|start_header_id|>") {
            let cutoff = between(source, "Cutting Knowledge Date: ", &["\\n", "\n", "\"", "'"]);
            let cutoff = cutoff.filter(|_| source.contains("Today Date: ")).map(str::to_owned);
            Template::Llama3 { cutoff }
        } else if source.contains("<|im_start|>") {
            Template::ChatMl { bos: source.contains("bos_token"), default_system: default_system(source) }
        } else {
            Template::Plain
        }
    }

    /// Detects the template of the model in `dir`: `chat_template.jinja`, or `chat_template` in
    /// `tokenizer_config.json`, as one text or as a list of named ones.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("chat_template.jinja");
        if let Some(bytes) = read(&path, MAX_TEMPLATE)? {
            let text = String::from_utf8(bytes)
                .map_err(|_| Error::model(&path, "is not UTF-8; use the file published with the model"))?;
            return Ok(Self::detect(Some(&text)));
        }
        let path = dir.join("tokenizer_config.json");
        let field = read_settings(&path)?.and_then(|mut map| map.remove("chat_template"));
        let named = |list: &[Value], name: &str| {
            let entry = list.iter().find(|t| t.get("name").and_then(Value::as_str) == Some(name))?;
            entry.get("template").and_then(Value::as_str).map(str::to_owned)
        };
        match field {
            None | Some(Value::Null) => Ok(Template::Plain),
            Some(Value::String(text)) => Ok(Self::detect(Some(&text))),
            Some(Value::Array(list)) => Ok(Self::detect(named(&list, "default").as_deref())),
            Some(_) => Err(Error::model(
                &path,
                "field `chat_template` is neither a text nor a list of {name, template}; use the file \
                 published with the model",
            )),
        }
    }

    /// The conversation in parts.
    pub fn render(&self, messages: &[Message], context: &Context<'_>) -> Vec<Segment> {
        let mut out = Segments::default();
        match self {
            Template::ChatMl { bos, default_system } => {
                if let Some(token) = context.bos.filter(|_| *bos) {
                    out.control(token);
                }
                let mut turn = |role: &str, content: &str| {
                    out.control("<|im_start|>");
                    out.text(&[role, "\n", content]);
                    out.control("<|im_end|>");
                    out.text(&["\n"]);
                };
                if let Some(system) = default_system.as_ref().filter(|_| !starts_with_system(messages)) {
                    turn("system", system);
                }
                messages.iter().for_each(|m| turn(m.role.name(), &m.content));
                if context.ending == Ending::Prompt {
                    out.control("<|im_start|>");
                    out.text(&["assistant\n"]);
                }
            }
            Template::Llama3 { cutoff } => {
                context.bos.into_iter().for_each(|token| out.control(token));
                llama3(&mut out, messages, cutoff.as_deref(), context);
            }
            Template::Plain => {
                context.bos.into_iter().for_each(|token| out.control(token));
                messages.iter().for_each(|m| out.text(&[&m.content, "\n"]));
            }
        }
        out.0
    }

    /// The conversation as ids. The template has the begin-of-text token where it wants it.
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        date: &str,
        ending: Ending,
    ) -> Result<Vec<u32>> {
        let context = Context { bos: tokenizer.bos_token(), date, ending };
        encode_segments(tokenizer, self.render(messages, &context))
    }

    /// The tokens that end an answer, as far as the tokenizer has them.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let names: &[&str] = match self {
            Template::ChatMl { .. } => &["<|im_end|>"],
            Template::Llama3 { .. } => &["<|eot_id|>", "<|eom_id|>"],
            Template::Plain => &[],
        };
        names.iter().filter_map(|name| tokenizer.token_to_id(name)).collect()
    }
}

/// The ids of the parts; only control parts become control tokens.
fn encode_segments(tokenizer: &Tokenizer, segments: Vec<Segment>) -> Result<Vec<u32>> {
    let mut ids = vec![];
    for segment in segments {
        ids.extend(match segment {
            Segment::Control(token) => tokenizer.encode(&token, AddSpecial::No)?,
            Segment::Text(text) => tokenizer.encode_plain(&text)?,
        });
    }
    Ok(ids)
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

/// Today in UTC, as Llama's templates write it.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date(seconds / 86_400)
}

/// `days` after 1970-01-01. Howard Hinnant's civil_from_days: years begin in March.
fn date(days: u64) -> String {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let year = era * 400 + year_of_era + u64::from(month >= 10);
    let names = ["Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec", "Jan", "Feb"];
    format!("{day:02} {} {year}", names[month as usize])
}

fn llama3(out: &mut Segments, messages: &[Message], cutoff: Option<&str>, context: &Context<'_>) {
    let head = |out: &mut Segments, role: &str| {
        out.control("<|start_header_id|>");
        out.text(&[role]);
        out.control("<|end_header_id|>");
        out.text(&["\n\n"]);
    };
    let mut rest = messages;
    if let Some(cutoff) = cutoff {
        let mut system = "";
        if let Some((first, after)) = messages.split_first().filter(|_| starts_with_system(messages)) {
            (system, rest) = (trim(&first.content), after);
        }
        head(out, "system");
        out.text(&["Cutting Knowledge Date: ", cutoff, "\nToday Date: ", context.date, "\n\n", system]);
        out.control("<|eot_id|>");
    }
    for message in rest {
        head(out, message.role.name());
        out.text(&[trim(&message.content)]);
        out.control("<|eot_id|>");
    }
    if context.ending == Ending::Prompt {
        head(out, "assistant");
    }
}

fn starts_with_system(messages: &[Message]) -> bool {
    messages.first().is_some_and(|m| m.role == Role::System)
}

/// Jinja's `trim`, which is Python's: four separators more than Rust's.
fn trim(text: &str) -> &str {
    text.trim_matches(|c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
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
            Some(Segment::Text(text)) => parts.iter().for_each(|p| text.push_str(p)),
            _ => self.0.push(Segment::Text(parts.concat())),
        }
    }
}

/// The text of `source` from after `start` to the nearest of `ends`.
fn between<'a>(source: &'a str, start: &str, ends: &[&str]) -> Option<&'a str> {
    let (_, after) = source.split_once(start)?;
    let end = ends.iter().filter_map(|e| after.find(e)).min()?;
    Some(&after[..end])
}

/// The system message that a ChatML template has written out in a string of its own.
fn default_system(source: &str) -> Option<String> {
    let head = "<|im_start|>system";
    source.match_indices(head).find_map(|(at, _)| {
        let quote = source[..at].chars().next_back().filter(|&q| q == '\'' || q == '"')?;
        let literal = string_literal(&source[at..], quote)?;
        let system = literal.strip_prefix(head)?.strip_prefix('\n')?;
        let system = system.trim_end_matches('\n').strip_suffix("<|im_end|>")?;
        (!system.is_empty()).then(|| system.to_owned())
    })
}

/// A Jinja string from after its opening quote.
fn string_literal(source: &str, quote: char) -> Option<String> {
    let mut text = String::new();
    let mut chars = source.chars();
    loop {
        match chars.next()? {
            '\\' => match chars.next()? {
                'n' => text.push('\n'),
                't' => text.push('\t'),
                other => text.push(other),
            },
            c if c == quote => return Some(text),
            c => text.push(c),
        }
    }
}

#[cfg(test)]
mod tests;
