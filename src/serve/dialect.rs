//! Response formats of the APIs, and the data that they are written from.

use super::error::ApiError;
use super::json_writer::JsonWriter;
use super::params::ResponseMode;
use crate::run::generate::scheduler::GenerationStats;
use crate::run::session::{DraftCounts, StopReason};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use text::chat::{AnswerPart, ToolCall};
use text::sampler::TokenLogprobs;

/// Writes one request's response in the format of an API: as events of a stream, or whole.
pub trait Dialect: Send {
    /// Bytes of the request's text that the response repeats.
    fn held_bytes(&self) -> usize {
        0
    }
    /// Takes log-probabilities of prompt tokens, in order, before the choice's first token.
    fn on_prompt_logprobs(&mut self, _choice: usize, _tokens: Vec<TokenLogprobs>) {}
    /// Writes the first events of a stream.
    fn on_start(&mut self, _out: &mut String) {}
    fn on_prompt_progress(&mut self, _choice: usize, _progress: &PromptProgress, _out: &mut String) {}
    fn on_token(&mut self, choice: usize, token: &TokenOutput, out: &mut String);
    fn on_choice_end(&mut self, index: usize, choice: &Choice, out: &mut String);
    /// Writes the last events, once all choices have ended.
    fn on_end(&mut self, _usage: Usage, _out: &mut String) {}
    /// Writes an error in the middle of a stream.
    fn on_error(&mut self, error: &ApiError, out: &mut String) {
        write_event(error.to_openai(), out);
    }
    /// Writes the whole response. May take texts and log-probabilities out of the choices.
    fn to_json(&mut self, choices: &mut [Choice], usage: Usage, out: &mut JsonWriter);
    /// Text that keeps a silent stream alive.
    fn keep_alive(&self) -> &'static str {
        ": waiting\n\n"
    }
}

/// Writes an unnamed event.
pub fn write_event(data: impl std::fmt::Display, out: &mut String) {
    *out += &format!("data: {data}\n\n");
}

/// Writes a named event; the name is also the `type` of its data.
pub fn write_named_event(name: &str, mut data: Value, out: &mut String) {
    data["type"] = name.into();
    *out += &format!("event: {name}\ndata: {data}\n\n");
}

/// Parsed output of a token, together with preceding tokens that completed no text.
pub struct TokenOutput {
    pub parts: Vec<AnswerPart>,
    pub tokens: Vec<u32>,
    pub logprobs: Option<TokenLogprobs>,
}

/// One generated text of a request.
#[derive(Default)]
pub struct Choice {
    pub text: String,
    pub reasoning: String,
    pub tool_calls: Vec<ToolCall>,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    /// Set once the text has ended.
    pub ending: Option<GenerationStats>,
}

impl Choice {
    /// Appends the output of a token. Only whole responses need its tokens and log-probabilities later.
    pub fn push_output(&mut self, token: &TokenOutput, mode: ResponseMode) {
        for part in &token.parts {
            match part {
                AnswerPart::Text(text) => self.text += text,
                AnswerPart::Thinking(thought) => self.reasoning += thought,
                AnswerPart::ToolCall(call) | AnswerPart::ToolCallCut { call, .. } => {
                    self.tool_calls.push(call.clone())
                }
                AnswerPart::ToolCallStart { .. } | AnswerPart::ToolCallDelta(_) => {}
            }
        }
        if mode == ResponseMode::Whole {
            self.tokens.extend(&token.tokens);
            self.logprobs.extend(token.logprobs.clone());
        }
    }

    /// OpenAI's `finish_reason`.
    pub fn finish_reason(&self) -> &'static str {
        match self.ending.map(|ending| ending.reason) {
            Some(StopReason::Eos | StopReason::Stop) if !self.tool_calls.is_empty() => "tool_calls",
            Some(StopReason::Eos | StopReason::Stop) => "stop",
            _ => "length",
        }
    }

    /// The stop string that ended the text.
    pub fn stop_string<'a>(&self, stops: &'a [String]) -> Option<&'a str> {
        let ending = self.ending.filter(|ending| ending.reason == StopReason::Stop)?;
        stops.get(ending.stop_index?).map(String::as_str)
    }

    /// Usage of this text alone.
    pub fn count_usage(&self) -> Usage {
        Usage::sum_choices([(0, self)], 1)
    }
}

/// Token counts and times of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub generated_tokens: usize,
    /// Number of texts with at least one token.
    pub nonempty_texts: usize,
    /// Time to their first tokens, summed.
    pub time_to_first_token: Duration,
    /// Time from their first to their last tokens, summed.
    pub generation_time: Duration,
    pub drafts: DraftCounts,
}

impl Usage {
    /// Sums over indexed texts; each prompt has `n` of them and is counted once.
    pub fn sum_choices<'a>(choices: impl IntoIterator<Item = (usize, &'a Choice)>, n: usize) -> Self {
        let mut usage = Self::default();
        for (i, ending) in choices.into_iter().filter_map(|(i, c)| Some((i, c.ending?))) {
            usage.generated_tokens += ending.tokens;
            usage.nonempty_texts += usize::from(ending.tokens > 0);
            usage.time_to_first_token += ending.time_to_first;
            usage.generation_time += ending.decode_time;
            usage.drafts = usage.drafts + ending.drafts;
            if i % n.max(1) == 0 {
                usage.prompt_tokens += ending.prompt;
                usage.cached_tokens += ending.cached;
            }
        }
        usage
    }

    /// OpenAI's `usage`.
    pub fn to_json(self) -> Value {
        let Self { prompt_tokens: prompt, cached_tokens: cached, generated_tokens: tokens, .. } = self;
        json!({
            "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    /// llama.cpp's `timings`. The first token comes with the prompt, so its time counts as prompt time.
    pub fn timings_json(self) -> Value {
        let each = |ms: f64, n: usize| if n > 0 { ms / n as f64 } else { 0.0 };
        let pace = |n: usize, ms: f64| if ms > 0.0 { 1e3 / ms * n as f64 } else { 0.0 };
        let [first, between] =
            [self.time_to_first_token, self.generation_time].map(|took| took.as_secs_f64() * 1e3);
        let (computed, later) =
            (self.prompt_tokens - self.cached_tokens, self.generated_tokens - self.nonempty_texts);
        let mut timings = json!({
            "cache_n": self.cached_tokens, "prompt_n": computed, "prompt_ms": first,
            "prompt_per_token_ms": each(first, computed), "prompt_per_second": pace(computed, first),
            "predicted_n": self.generated_tokens, "predicted_ms": between,
            "predicted_per_token_ms": each(between, later), "predicted_per_second": pace(later, between),
        });
        if self.drafts.drafted > 0 {
            timings["draft_n"] = self.drafts.drafted.into();
            timings["draft_n_accepted"] = self.drafts.accepted.into();
        }
        timings
    }
}

/// Prefill progress of one prompt, in tokens.
#[derive(Debug, Clone, Copy)]
pub struct PromptProgress {
    /// Copied from the prefix cache.
    pub cached: usize,
    /// Processed so far, cached ones included.
    pub processed: usize,
    pub total: usize,
    pub began: Instant,
    pub reported: Instant,
}

impl PromptProgress {
    /// llama.cpp's `prompt_progress`.
    pub fn to_json(self) -> Value {
        let Self { cached, processed: done, total, began, .. } = self;
        let took = began.elapsed().as_millis() as u64;
        json!({"total": total, "cache": cached, "processed": done, "time_ms": took})
    }
}
