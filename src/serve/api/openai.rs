//! Common parts of OpenAI's APIs.

use crate::serve::dialect::{PromptProgress, Usage, write_event};
use crate::serve::json_writer::{JsonWriter, write_json};
use crate::serve::params::{RequestParams, ResponseMode};
use crate::serve::state::{ServerModel, random_id, unix_time};
use files::error::quote;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;
use text::chat::Role;
use text::sampler::{Logprob, TokenLogprobs};
use text::tokenizer::TokenBytes;

/// Role of a message in OpenAI's APIs.
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
                Err(serde::de::Error::custom(format!("is {}; {why}", quote(other))))
            }
        }
    }
}

/// Fields common to all parts of a response.
pub struct ResponseHead {
    id: String,
    created: u64,
    /// `object` of a stream's chunk, and of a whole response.
    object_names: [&'static str; 2],
    mode: ResponseMode,
    has_timings: bool,
    pub model: Arc<ServerModel>,
}

impl ResponseHead {
    pub fn new(prefix: &str, objects: [&'static str; 2], params: &RequestParams) -> Self {
        let (id, created, model) = (random_id(prefix), unix_time(), Arc::clone(&params.model));
        Self { id, created, object_names: objects, mode: params.mode, has_timings: params.has_timings, model }
    }

    /// A chunk or a whole response.
    fn response_json(&self, name: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": name, "created": self.created, "model": self.model.name,
            "system_fingerprint": self.model.fingerprint, "choices": choices,
        })
    }

    /// Writes a chunk with one choice, and optionally one more field.
    pub fn write_chunk(&self, choice: Value, more: Option<(&str, Value)>, out: &mut String) {
        let mut chunk = self.response_json(self.object_names[0], json!([choice]));
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

    /// The `timings` field, if requested.
    pub fn timings_field(&self, usage: Usage) -> Option<(&'static str, Value)> {
        self.has_timings.then(|| ("timings", usage.timings_json()))
    }

    /// A chunk or response with `usage`, but no text.
    fn usage_json(&self, (name, choices): (&str, Value), usage: Usage) -> Value {
        let mut object = self.response_json(name, choices);
        object["usage"] = usage.to_json();
        if let Some((field, timings)) = self.timings_field(usage) {
            object[field] = timings;
        }
        object
    }

    /// Writes the last events of a stream.
    pub fn write_end(&self, usage: Usage, out: &mut String) {
        if self.mode == ResponseMode::StreamWithUsage {
            write_event(self.usage_json((self.object_names[0], json!([])), usage), out);
        }
        *out += "data: [DONE]\n\n";
    }

    /// Writes a whole response with the choices that `write_choices` writes.
    pub fn write_whole(
        &self,
        usage: Usage,
        out: &mut JsonWriter,
        write_choices: impl FnOnce(&mut JsonWriter),
    ) {
        let whole = self.usage_json((self.object_names[1], Value::Null), usage);
        out.write_object_with(&whole, "choices", |out| out.write_array(write_choices));
    }
}

/// Log-probability of a token in chat completions.
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
    fn new(pieces: &'a TokenBytes, &Logprob { id, logprob }: &Logprob) -> Self {
        let (token, bytes) = (pieces.token_text(id), pieces.token_bytes(id));
        Self { id, token, logprob: finite_logprob(logprob), bytes, top_logprobs: None }
    }

    /// Entry with the most likely tokens at this position.
    fn with_top(pieces: &'a TokenBytes, token: &TokenLogprobs) -> Self {
        let top = token.top.iter().map(|other| Self::new(pieces, other)).collect();
        Self { top_logprobs: Some(top), ..Self::new(pieces, &token.chosen) }
    }
}

/// Log-probabilities of one token, as an array.
pub fn logprobs_json(model: &ServerModel, token: &TokenLogprobs) -> Value {
    json!([LogprobEntry::with_top(model.engine.tokenizer().pieces(), token)])
}

/// Writes the log-probabilities of a whole text as an array, serialized as it is sent.
pub fn write_logprobs(model: &ServerModel, tokens: Vec<TokenLogprobs>, out: &mut JsonWriter) {
    let pieces = Arc::clone(model.engine.tokenizer().pieces());
    out.write_list(tokens.len(), move |i, to| write_json(&LogprobEntry::with_top(&pieces, &tokens[i]), to));
}

/// Replaces minus infinity, which JSON cannot represent.
pub fn finite_logprob(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}
