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
                Part::Call(_) => continue,
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

/// A prompt that an answer repeats.
pub(super) struct Echo {
    pub text: String,
    /// Its first token, which nothing says how probable it is.
    pub first: Option<u32>,
}

/// `POST /v1/completions`.
pub(super) struct Completion {
    head: Head,
    /// Of each text.
    texts: Vec<Progress>,
    /// Of each prompt, where they are repeated.
    echoes: Vec<Echo>,
    /// Texts for each prompt.
    n: usize,
    measures: bool,
}

/// How far a text is.
#[derive(Default)]
struct Progress {
    /// Of the prompt's tokens, from the second on.
    measured: Vec<TokenLogprobs>,
    /// Characters so far.
    characters: usize,
    /// The prompt was repeated.
    echoed: bool,
}

const TEXT: &str = "text_completion";

/// `logprobs` of a completion.
struct Columns(Value);

impl Columns {
    fn new() -> Self {
        Self(json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}))
    }

    fn push(&mut self, row: [(&str, Value); 4]) {
        for (column, value) in row {
            if let Some(list) = self.0[column].as_array_mut() {
                list.push(value);
            }
        }
    }
}

impl Completion {
    pub fn new(served: &Arc<Served>, asked: &Asked, (prompts, echoes): (usize, Vec<Echo>)) -> Self {
        let texts = (0..prompts * asked.n).map(|_| Progress::default()).collect();
        let (head, measures) = (Head::new("cmpl-", served, asked), asked.measures.is_some());
        Self { head, texts, echoes, n: asked.n, measures }
    }

    /// Adds some tokens, the first of which begins after so many characters; where the next one begins.
    fn add<'a>(
        &self,
        all: impl IntoIterator<Item = &'a TokenLogprobs>,
        mut offset: usize,
        to: &mut Columns,
    ) -> usize {
        for token in all {
            let text = self.head.text(token.chosen.id);
            let top = token.top.iter().map(|t| (self.head.text(t.id), finite(t.logprob).into()));
            let (top, characters) = (Value::Object(top.collect()), text.chars().count());
            let logprob = finite(token.chosen.logprob).into();
            to.push([
                ("top_logprobs", top),
                ("token_logprobs", logprob),
                ("text_offset", offset.into()),
                ("tokens", text.into()),
            ]);
            offset += characters;
        }
        offset
    }

    /// The prompt of a text, where it is repeated and was not yet.
    fn echo(&mut self, choice: usize) -> Option<(String, Columns)> {
        let echo = self.echoes.get(choice / self.n)?;
        if std::mem::replace(&mut self.texts[choice].echoed, true) {
            return None;
        }
        let (mut columns, mut offset) = (Columns::new(), 0);
        if let Some(first) = echo.first {
            let text = self.head.text(first);
            // A token that begins each text is no part of the prompt that was given.
            offset = if echo.text.starts_with(&text) { text.chars().count() } else { 0 };
            let nothing = Value::Null;
            columns.push([
                ("top_logprobs", nothing.clone()),
                ("token_logprobs", nothing),
                ("text_offset", 0.into()),
                ("tokens", text.into()),
            ]);
        }
        self.texts[choice].characters = self.add(&self.texts[choice].measured, offset, &mut columns);
        Some((echo.text.clone(), columns))
    }

    /// Repeats the prompt in a stream, where that is still to be done.
    fn say_echo(&mut self, choice: usize, out: &mut String) {
        if let Some((text, columns)) = self.echo(choice) {
            let logprobs = if self.measures { columns.0 } else { Value::Null };
            let of = json!({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": null});
            self.head.chunk(TEXT, of, out);
        }
    }
}

/// What of some parts is text; all of it, as completions are read in no form.
pub(super) fn text(parts: &[Part]) -> String {
    let of = |part: &Part| match part {
        Part::Text(text) | Part::Thinking(text) => text.clone(),
        Part::Begun { .. } | Part::Arguments(_) | Part::Call(_) => String::new(),
    };
    parts.iter().map(of).collect()
}

impl Shape for Completion {
    fn measured(&mut self, choice: usize, tokens: Vec<TokenLogprobs>) {
        self.texts[choice].measured.extend(tokens);
    }

    fn begin(&mut self, _: &mut String) {}

    fn step(&mut self, choice: usize, step: &Step, out: &mut String) {
        self.say_echo(choice, out);
        let mut of =
            json!({"index": choice, "text": text(&step.parts), "logprobs": null, "finish_reason": null});
        if let Some(token) = &step.logprobs {
            let mut columns = Columns::new();
            let characters = self.add([token], self.texts[choice].characters, &mut columns);
            self.texts[choice].characters = characters;
            of["logprobs"] = columns.0;
        }
        self.head.chunk(TEXT, of, out);
    }

    fn ended(&mut self, index: usize, choice: &Choice, out: &mut String) {
        self.say_echo(index, out);
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
        let mut all = Vec::new();
        for (index, choice) in choices.iter().enumerate() {
            let (prompt, mut columns) = self.echo(index).unwrap_or((String::new(), Columns::new()));
            self.add(&choice.logprobs, self.texts[index].characters, &mut columns);
            let is_empty = choice.logprobs.is_empty() && !self.measures;
            let logprobs = if is_empty { Value::Null } else { columns.0 };
            let (text, reason) = (prompt + &choice.text, choice.reason());
            all.push(json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}));
        }
        self.head.whole(TEXT, all, usage)
    }
}
