//! OpenAI's shapes: chat completions and completions.

use super::answer::{Choice, Shape, Step, Usage, event};
use super::asked::{Asked, How};
use super::hub::{Served, name, now};
use super::refusal::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;
use text::chat::{Part, ToolCall};
use text::sampler::{Logprob, TokenLogprobs};

/// What all parts of an answer say.
struct Head {
    id: String,
    created: u64,
    how: How,
    /// Whether it says how long things took.
    timed: bool,
    served: Arc<Served>,
}

impl Head {
    fn new(kind: &str, served: &Arc<Served>, asked: &Asked) -> Self {
        let (how, timed) = (asked.how, asked.timed);
        Self { id: name(kind), created: now(), how, timed, served: Arc::clone(served) }
    }

    fn object(&self, kind: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.served.name,
            "system_fingerprint": self.served.fingerprint, "choices": choices,
        })
    }

    fn part(&self, kind: &str, choice: Value) -> Value {
        let mut part = self.object(kind, json!([choice]));
        if self.how == How::StreamWithUsage {
            part["usage"] = Value::Null;
        }
        part
    }

    /// A part of a stream.
    fn chunk(&self, kind: &str, choice: Value, out: &mut String) {
        event(&self.part(kind, choice), out);
    }

    /// The last part of a text.
    fn last(&self, kind: &str, (choice, of): (Value, &Choice), out: &mut String) {
        let mut chunk = self.part(kind, choice);
        self.time(&mut chunk, of.usage());
        event(&chunk, out);
    }

    /// Says how long it took, where that is asked for.
    fn time(&self, of: &mut Value, usage: Usage) {
        if self.timed {
            of["timings"] = usage.timings();
        }
    }

    fn over(&self, kind: &str, usage: Usage, out: &mut String) {
        if self.how == How::StreamWithUsage {
            let mut chunk = self.object(kind, json!([]));
            chunk["usage"] = usage.json();
            self.time(&mut chunk, usage);
            event(&chunk, out);
        }
        *out += "data: [DONE]\n\n";
    }

    fn whole(&self, kind: &str, choices: Vec<Value>, usage: Usage) -> Value {
        let mut whole = self.object(kind, choices.into());
        whole["usage"] = usage.json();
        self.time(&mut whole, usage);
        whole
    }

    /// A token's text, which has U+FFFD where it is a part of a character.
    fn text(&self, id: u32) -> String {
        self.served.engine.tokenizer().pieces().text(id).into_owned()
    }
}

/// The log-probabilities of some tokens: `logprobs.content` of a chat.
pub(super) fn logprobs<'a>(served: &Served, all: impl IntoIterator<Item = &'a TokenLogprobs>) -> Value {
    let pieces = served.engine.tokenizer().pieces();
    let entry = |of: &Logprob| {
        let (text, bytes) = (pieces.text(of.id), pieces.bytes(of.id));
        json!({"id": of.id, "token": text, "logprob": finite(of.logprob), "bytes": bytes})
    };
    let of = |token: &TokenLogprobs| {
        let mut all = entry(&token.chosen);
        all["top_logprobs"] = token.top.iter().map(entry).collect();
        all
    };
    all.into_iter().map(of).collect()
}

/// JSON has no infinity.
fn finite(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}

/// `POST /v1/chat/completions`.
pub(super) struct Chat {
    head: Head,
    /// Calls of each text so far.
    calls: Vec<usize>,
}

const CHUNK: &str = "chat.completion.chunk";

impl Chat {
    pub fn new(served: &Arc<Served>, asked: &Asked) -> Self {
        Self { head: Head::new("chatcmpl-", served, asked), calls: vec![0; asked.n] }
    }

    fn delta(&self, index: usize, delta: Value, out: &mut String) {
        self.head.chunk(CHUNK, json!({"index": index, "delta": delta, "finish_reason": null}), out);
    }
}

fn call_json(call: &ToolCall) -> Value {
    json!({
        "id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments},
    })
}

impl Shape for Chat {
    fn begin(&mut self, out: &mut String) {
        for index in 0..self.calls.len() {
            self.delta(index, json!({"role": "assistant", "content": null}), out);
        }
    }

    fn step(&mut self, choice: usize, step: &Step, out: &mut String) {
        let mut deltas = Vec::new();
        for part in &step.parts {
            deltas.push(match part {
                Part::Text(text) => json!({"content": text}),
                Part::Thinking(thought) => json!({"reasoning_content": thought}),
                Part::Begun { id, name } => {
                    self.calls[choice] += 1;
                    let of = json!({"name": name, "arguments": ""});
                    let index = self.calls[choice] - 1;
                    json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": of}]})
                }
                Part::Arguments(more) => {
                    let index = self.calls[choice].saturating_sub(1);
                    json!({"tool_calls": [{"index": index, "function": {"arguments": more}}]})
                }
                Part::Call(_) | Part::Cut { .. } => continue,
            });
        }
        if deltas.is_empty() {
            deltas.push(json!({"content": ""}));
        }
        let mut unsaid = step.logprobs.as_ref();
        for delta in deltas {
            let mut of = json!({"index": choice, "delta": delta, "finish_reason": null});
            if let Some(token) = unsaid.take() {
                of["logprobs"] = json!({"content": logprobs(&self.head.served, [token])});
            }
            self.head.chunk(CHUNK, of, out);
        }
    }

    fn ended(&mut self, index: usize, choice: &Choice, out: &mut String) {
        let of = json!({"index": index, "delta": {}, "finish_reason": choice.reason()});
        self.head.last(CHUNK, (of, choice), out);
    }

    fn over(&mut self, usage: Usage, out: &mut String) {
        self.head.over(CHUNK, usage, out);
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        event(&refusal.json(), out);
    }

    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Value {
        let one = |(index, choice): (usize, &Choice)| {
            let no_text = choice.text.is_empty() && !choice.calls.is_empty();
            let content = if no_text { Value::Null } else { choice.text.as_str().into() };
            let mut message = json!({"role": "assistant", "content": content});
            if !choice.thoughts.is_empty() {
                message["reasoning_content"] = choice.thoughts.as_str().into();
            }
            if !choice.calls.is_empty() {
                message["tool_calls"] = choice.calls.iter().map(call_json).collect();
            }
            let probabilities = match choice.logprobs.as_slice() {
                [] => Value::Null,
                all => json!({"content": logprobs(&self.head.served, all)}),
            };
            let reason = choice.reason();
            json!({"index": index, "message": message, "logprobs": probabilities, "finish_reason": reason})
        };
        let choices = choices.iter().enumerate().map(one).collect();
        self.head.whole("chat.completion", choices, usage)
    }
}

/// `POST /v1/completions`.
pub(super) struct Completion {
    head: Head,
    /// Characters of each text so far.
    offsets: Vec<usize>,
}

const TEXT: &str = "text_completion";

impl Completion {
    pub fn new(served: &Arc<Served>, asked: &Asked, choices: usize) -> Self {
        Self { head: Head::new("cmpl-", served, asked), offsets: vec![0; choices] }
    }

    /// The log-probabilities of some tokens, the first of which begins after so many characters.
    fn logprobs<'a>(&self, all: impl IntoIterator<Item = &'a TokenLogprobs>, mut offset: usize) -> Value {
        let mut json = json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []});
        let mut push = |field: &str, value: Value| {
            if let Some(list) = json[field].as_array_mut() {
                list.push(value);
            }
        };
        for token in all {
            let text = self.head.text(token.chosen.id);
            let top = token.top.iter().map(|t| (self.head.text(t.id), finite(t.logprob).into()));
            push("top_logprobs", Value::Object(top.collect()));
            push("token_logprobs", finite(token.chosen.logprob).into());
            push("text_offset", offset.into());
            offset += text.chars().count();
            push("tokens", text.into());
        }
        json
    }
}

/// What of some parts is text; all of it, as completions are read in no form.
pub(super) fn text(parts: &[Part]) -> String {
    let of = |part: &Part| match part {
        Part::Text(text) | Part::Thinking(text) => text.clone(),
        Part::Begun { .. } | Part::Arguments(_) | Part::Call(_) | Part::Cut { .. } => String::new(),
    };
    parts.iter().map(of).collect()
}

impl Shape for Completion {
    fn begin(&mut self, _: &mut String) {}

    fn step(&mut self, choice: usize, step: &Step, out: &mut String) {
        let mut of =
            json!({"index": choice, "text": text(&step.parts), "logprobs": null, "finish_reason": null});
        if let Some(token) = &step.logprobs {
            of["logprobs"] = self.logprobs([token], self.offsets[choice]);
            self.offsets[choice] += self.head.text(token.chosen.id).chars().count();
        }
        self.head.chunk(TEXT, of, out);
    }

    fn ended(&mut self, index: usize, choice: &Choice, out: &mut String) {
        let of = json!({"index": index, "text": "", "logprobs": null, "finish_reason": choice.reason()});
        self.head.last(TEXT, (of, choice), out);
    }

    fn over(&mut self, usage: Usage, out: &mut String) {
        self.head.over(TEXT, usage, out);
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        event(&refusal.json(), out);
    }

    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Value {
        let one = |(index, choice): (usize, &Choice)| {
            let logprobs = match choice.logprobs.as_slice() {
                [] => Value::Null,
                all => self.logprobs(all, 0),
            };
            json!({"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.reason()})
        };
        let choices = choices.iter().enumerate().map(one).collect();
        self.head.whole(TEXT, choices, usage)
    }
}
