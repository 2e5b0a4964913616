//! APIs: each reads its requests and writes its answers in a file of its own.

pub mod chat;
pub mod completions;
pub mod llama_cpp_completion;
pub mod messages;
pub mod openai;
pub mod responses;
pub mod tokens;

use super::error::ApiError;
use super::json_writer::JsonWriter;
use super::output::{Choice, PromptProgress, TokenOutput, Usage};
use serde_json::Value;
use text::sampler::TokenLogprobs;

/// Writes the answer to one request, in the form of an API: as events of a stream, or at once.
pub trait Dialect: Send {
    /// Takes log-probabilities of the next tokens of a text's prompt, which come before its first token.
    fn on_prompt_logprobs(&mut self, _choice: usize, _tokens: Vec<TokenLogprobs>) {}
    /// Writes the first events of a stream.
    fn on_start(&mut self, _out: &mut String) {}
    fn on_prompt_progress(&mut self, _choice: usize, _progress: &PromptProgress, _out: &mut String) {}
    fn on_token(&mut self, choice: usize, token: &TokenOutput, out: &mut String);
    fn on_choice_end(&mut self, index: usize, choice: &Choice, out: &mut String);
    /// Writes the last events, when all texts have ended.
    fn on_end(&mut self, _usage: Usage, _out: &mut String) {}
    /// Writes what went wrong in the middle of a stream.
    fn on_error(&mut self, error: &ApiError, out: &mut String) {
        write_event(&error.to_openai(), out);
    }
    /// Writes the whole answer. Texts and log-probabilities may be taken out of its choices.
    fn to_json(&mut self, choices: &mut [Choice], usage: Usage, out: &mut JsonWriter);
    /// Text of a stream that has nothing to say for a while.
    fn keep_alive(&self) -> &'static str {
        ": waiting\n\n"
    }
}

/// Writes an event without a name.
fn write_event(data: &Value, out: &mut String) {
    *out += &format!("data: {data}\n\n");
}

/// Writes an event with a name, which is also the `type` of its data.
fn write_named_event(name: &str, mut data: Value, out: &mut String) {
    data["type"] = name.into();
    *out += &format!("event: {name}\ndata: {data}\n\n");
}
