//! Parts that the APIs of OpenAI's have in common.

use crate::serve::dialect::{PromptProgress, Usage, write_event};
use crate::serve::json_writer::{JsonWriter, write_json};
use crate::serve::params::{RequestParams, ResponseMode};
use crate::serve::state::{ServerModel, random_id, unix_time};
use files::error::quoted;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;
use text::chat::Role;
use text::sampler::{Logprob, TokenLogprobs};
use text::tokenizer::Pieces;

/// Role of a message.
#[derive(Clone, Copy)]
pub struct MessageRole(pub Role);

impl<'de> Deserialize<'de> for MessageRole {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        match String::deserialize(from)?.as_str() {
            "system" | "developer" => Ok(Self(Role::System)),
            "user" => Ok(Self(Role::User)),
            "assistant" => Ok(Self(Role::Assistant)),
            "tool" | "function" => Ok(Self(Role::Tool)),
            other => {
                let why = "use system, developer, user, assistant or tool";
                Err(serde::de::Error::custom(format!("is {}; {why}", quoted(other))))
            }
        }
    }
}

/// Fields that all parts of an answer have.
pub struct ResponseHead {
    id: String,
    created: u64,
    /// Names of a part of a stream, and of a whole answer.
    objects: [&'static str; 2],
    mode: ResponseMode,
    timings: bool,
    pub model: Arc<ServerModel>,
}

impl ResponseHead {
    pub fn new(
        prefix: &str,
        objects: [&'static str; 2],
        model: &Arc<ServerModel>,
        params: &RequestParams,
    ) -> Self {
        let (id, created, model) = (random_id(prefix), unix_time(), Arc::clone(model));
        Self { id, created, objects, mode: params.mode, timings: params.timings, model }
    }

    /// A part of a stream, or the whole answer.
    fn object(&self, name: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": name, "created": self.created, "model": self.model.name,
            "system_fingerprint": self.model.fingerprint, "choices": choices,
        })
    }

    /// Writes a part of a stream about one text, with fields beside its `choices`.
    pub fn write_chunk(&self, choice: Value, more: Option<(&str, Value)>, out: &mut String) {
        let mut chunk = self.object(self.objects[0], json!([choice]));
        if self.mode == ResponseMode::StreamWithUsage {
            chunk["usage"] = Value::Null;
        }
        if let Some((field, value)) = more {
            chunk[field] = value;
        }
        write_event(&chunk, out);
    }

    pub fn write_progress(&self, choice: Value, progress: &PromptProgress, out: &mut String) {
        self.write_chunk(choice, Some(("prompt_progress", progress.to_json())), out);
    }

    /// The field that tells how long it took, where that is asked for.
    pub fn timings_field(&self, usage: Usage) -> Option<(&'static str, Value)> {
        self.timings.then(|| ("timings", usage.timings_json()))
    }

    /// An answer without texts, or without them yet.
    fn with_usage(&self, (name, choices): (&str, Value), usage: Usage) -> Value {
        let mut object = self.object(name, choices);
        object["usage"] = usage.to_json();
        if let Some((field, timings)) = self.timings_field(usage) {
            object[field] = timings;
        }
        object
    }

    /// Writes the last events of a stream.
    pub fn write_end(&self, usage: Usage, out: &mut String) {
        if self.mode == ResponseMode::StreamWithUsage {
            write_event(self.with_usage((self.objects[0], json!([])), usage), out);
        }
        *out += "data: [DONE]\n\n";
    }

    /// Writes a whole answer, whose choices a function writes.
    pub fn write_whole(
        &self,
        usage: Usage,
        out: &mut JsonWriter,
        write_choices: impl FnOnce(&mut JsonWriter),
    ) {
        let whole = self.with_usage((self.objects[1], Value::Null), usage);
        out.write_object_with(&whole, "choices", |out| out.write_array(write_choices));
    }
}

/// A token and its log-probability, as chats have it.
#[derive(Serialize)]
struct LogprobEntry<'a> {
    id: u32,
    token: Cow<'a, str>,
    logprob: f64,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<LogprobEntry<'a>>>,
}

impl<'a> LogprobEntry<'a> {
    fn new(pieces: &'a Pieces, of: &Logprob) -> Self {
        let (token, bytes) = (pieces.text(of.id), pieces.bytes(of.id));
        Self { id: of.id, token, logprob: finite_logprob(of.logprob), bytes, top_logprobs: None }
    }

    /// With the most probable tokens in its place.
    fn with_top(pieces: &'a Pieces, token: &TokenLogprobs) -> Self {
        let top = token.top.iter().map(|of| Self::new(pieces, of)).collect();
        Self { top_logprobs: Some(top), ..Self::new(pieces, &token.chosen) }
    }
}

/// The log-probabilities of one token, as a list.
pub fn token_logprobs(model: &ServerModel, token: &TokenLogprobs) -> Value {
    json!([LogprobEntry::with_top(model.engine.tokenizer().pieces(), token)])
}

/// Writes the log-probabilities of all tokens of a text, as a list.
pub fn write_logprobs(model: &ServerModel, tokens: Vec<TokenLogprobs>, out: &mut JsonWriter) {
    let pieces = Arc::clone(model.engine.tokenizer().pieces());
    out.write_list(tokens.len(), move |i, to| write_json(&LogprobEntry::with_top(&pieces, &tokens[i]), to));
}

/// A log-probability that JSON can hold: it has no infinity.
pub fn finite_logprob(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}
