//! OpenAI's shapes: chat completions and completions.

use super::answer::{Choice, Reading, Shape, Step, Usage, event};
use super::asked::{Asked, How};
use super::hub::{Served, name, now};
use super::refusal::Refusal;
use super::whole::{Whole, write};
use serde::Serialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;
use text::chat::{Part, ToolCall};
use text::sampler::{Logprob, TokenLogprobs};
use text::tokenizer::Pieces;

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

    /// How far a prompt is read.
    fn reading(&self, kind: &str, (choice, reading): (Value, &Reading), out: &mut String) {
        let mut chunk = self.part(kind, choice);
        chunk["prompt_progress"] = reading.json();
        event(&chunk, out);
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

    /// A whole answer, whose choices are written by a function.
    fn whole(&self, kind: &str, usage: Usage, (out, write): (&mut Whole, impl FnOnce(&mut Whole))) {
        let mut whole = self.object(kind, Value::Null);
        whole["usage"] = usage.json();
        self.time(&mut whole, usage);
        out.object_with(&whole, "choices", |out| {
            out.begin(b'[');
            write(out);
            out.end(b']');
        });
    }

    /// A token's text, which has U+FFFD where it is a part of a character.
    fn text(&self, id: u32) -> String {
        self.served.engine.tokenizer().pieces().text(id).into_owned()
    }
}

/// A token and its log-probability, in a chat.
#[derive(Serialize)]
struct Entry<'a> {
    id: u32,
    token: Cow<'a, str>,
    logprob: f64,
    bytes: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<Vec<Entry<'a>>>,
}

impl<'a> Entry<'a> {
    fn new(pieces: &'a Pieces, of: &Logprob) -> Self {
        let (token, bytes) = (pieces.text(of.id), pieces.bytes(of.id));
        Self { id: of.id, token, logprob: finite(of.logprob), bytes, top_logprobs: None }
    }

    /// With the most probable ones in its place.
    fn with_top(pieces: &'a Pieces, token: &TokenLogprobs) -> Self {
        let top = token.top.iter().map(|of| Self::new(pieces, of)).collect();
        Self { top_logprobs: Some(top), ..Self::new(pieces, &token.chosen) }
    }
}

/// The log-probabilities of a token: `logprobs.content` of a part of a chat.
pub fn logprobs(served: &Served, token: &TokenLogprobs) -> Value {
    json!([Entry::with_top(served.engine.tokenizer().pieces(), token)])
}

/// The same of all tokens of a text.
pub fn write_logprobs(served: &Served, all: Vec<TokenLogprobs>, out: &mut Whole) {
    let pieces = Arc::clone(served.engine.tokenizer().pieces());
    out.list(all.len(), move |i, to| write(&Entry::with_top(&pieces, &all[i]), to));
}

/// JSON has no infinity.
fn finite(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}

/// `POST /v1/chat/completions`.
pub struct Chat {
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
                Part::ToolCallStart { id, name } => {
                    self.calls[choice] += 1;
                    let of = json!({"name": name, "arguments": ""});
                    let index = self.calls[choice] - 1;
                    json!({"tool_calls": [{"index": index, "id": id, "type": "function", "function": of}]})
                }
                Part::ToolCallDelta(more) => {
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
                of["logprobs"] = json!({"content": logprobs(&self.head.served, token)});
            }
            self.head.chunk(CHUNK, of, out);
        }
    }

    fn reading(&mut self, index: usize, reading: &Reading, out: &mut String) {
        let of = json!({"index": index, "delta": {}, "finish_reason": null});
        self.head.reading(CHUNK, (of, reading), out);
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

    fn whole(&mut self, choices: &mut [Choice], usage: Usage, out: &mut Whole) {
        let one = |(index, choice): (usize, &mut Choice), out: &mut Whole| {
            let no_text = choice.text.is_empty() && !choice.calls.is_empty();
            out.begin(b'{');
            out.field("index", &index);
            out.key("message");
            out.begin(b'{');
            out.field("role", "assistant");
            out.field("content", &(!no_text).then_some(&choice.text));
            if !choice.thoughts.is_empty() {
                out.field("reasoning_content", &choice.thoughts);
            }
            if !choice.calls.is_empty() {
                out.field("tool_calls", &choice.calls.iter().map(call_json).collect::<Vec<_>>());
            }
            out.end(b'}');
            out.key("logprobs");
            match std::mem::take(&mut choice.logprobs) {
                none if none.is_empty() => out.value(&Value::Null),
                all => {
                    out.begin(b'{');
                    out.key("content");
                    write_logprobs(&self.head.served, all, out);
                    out.end(b'}');
                }
            }
            out.field("finish_reason", choice.reason());
            out.end(b'}');
        };
        let all = |out: &mut Whole| choices.iter_mut().enumerate().for_each(|choice| one(choice, out));
        self.head.whole("chat.completion", usage, (out, all));
    }
}

/// A prompt that an answer repeats.
pub struct Echo {
    pub text: String,
    /// Its first token, which nothing says how probable it is.
    pub first: Option<u32>,
}

/// `POST /v1/completions`.
pub struct Completion {
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

/// Tokens of a completion.
#[derive(Default)]
struct Rows {
    /// One without a log-probability, where it comes first.
    first: Option<u32>,
    /// Characters before the others.
    offset: usize,
    all: Vec<TokenLogprobs>,
}

impl Completion {
    pub fn new(served: &Arc<Served>, asked: &Asked, (prompts, echoes): (usize, Vec<Echo>)) -> Self {
        let texts = (0..prompts * asked.n).map(|_| Progress::default()).collect();
        let (head, measures) = (Head::new("cmpl-", served, asked), asked.measures.is_some());
        Self { head, texts, echoes, n: asked.n, measures }
    }

    /// The log-probabilities of a token, which begins after so many characters.
    fn logprobs(&self, token: &TokenLogprobs, offset: usize) -> Value {
        let pieces = self.head.served.engine.tokenizer().pieces();
        json!({
            "tokens": [pieces.text(token.chosen.id)], "token_logprobs": [finite(token.chosen.logprob)],
            "top_logprobs": [Top { pieces, all: &token.top }], "text_offset": [offset],
        })
    }

    /// The log-probabilities of several tokens.
    fn write_logprobs(&self, rows: Rows, out: &mut Whole) {
        let Rows { first, mut offset, all } = rows;
        let (before, all) = (usize::from(first.is_some()), Arc::new(all));
        let len = before + all.len();
        let with = || (Arc::clone(&all), Arc::clone(self.head.served.engine.tokenizer().pieces()));
        let id = move |all: &[TokenLogprobs], i: usize| match first {
            Some(first) if i == 0 => first,
            _ => all[i - before].chosen.id,
        };
        out.begin(b'{');
        out.key("tokens");
        let (all, pieces) = with();
        out.list(len, move |i, to| write(&pieces.text(id(&all, i)), to));
        out.key("token_logprobs");
        let (all, _) = with();
        out.list(len, move |i, to| write(&i.checked_sub(before).map(|i| finite(all[i].chosen.logprob)), to));
        out.key("top_logprobs");
        let (all, pieces) = with();
        let top = move |i: usize, to: &mut Vec<u8>| {
            write(&i.checked_sub(before).map(|i| Top { pieces: &pieces, all: &all[i].top }), to);
        };
        out.list(len, top);
        out.key("text_offset");
        let (all, pieces) = with();
        out.list(len, move |i, to| match i.checked_sub(before) {
            None => write(&0, to),
            Some(i) => {
                write(&offset, to);
                offset += pieces.text(all[i].chosen.id).chars().count();
            }
        });
        out.end(b'}');
    }

    /// The prompt of a text, where it is repeated and was not yet.
    fn echo(&mut self, choice: usize) -> Option<(String, Rows)> {
        let (echo, progress) = (self.echoes.get(choice / self.n)?, &mut self.texts[choice]);
        if std::mem::replace(&mut progress.echoed, true) {
            return None;
        }
        // A token that begins each text is no part of the prompt that was given.
        let first = echo.first.map(|id| self.head.text(id)).filter(|text| echo.text.starts_with(text));
        let (offset, all) =
            (first.map_or(0, |text| text.chars().count()), std::mem::take(&mut progress.measured));
        let characters = |of: &TokenLogprobs| self.head.text(of.chosen.id).chars().count();
        progress.characters = offset + all.iter().map(characters).sum::<usize>();
        Some((echo.text.clone(), Rows { first: echo.first, offset, all }))
    }

    /// Repeats the prompt in a stream, where that is still to be done.
    fn say_echo(&mut self, choice: usize, out: &mut String) {
        let Some((text, rows)) = self.echo(choice) else { return };
        let mut logprobs = Value::Null;
        if self.measures {
            let mut whole = Whole::default();
            self.write_logprobs(rows, &mut whole);
            logprobs = serde_json::from_str(&whole.into_text()).unwrap_or_default();
        }
        let of = json!({"index": choice, "text": text, "logprobs": logprobs, "finish_reason": null});
        self.head.chunk(TEXT, of, out);
    }
}

/// The most probable tokens at a place of a completion, by their texts.
struct Top<'a> {
    pieces: &'a Pieces,
    all: &'a [Logprob],
}

impl Serialize for Top<'_> {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        // Several may have one text, of which the last counts.
        let last = |i: usize, text: &str| !self.all[i + 1..].iter().any(|of| self.pieces.text(of.id) == text);
        let of = self.all.iter().enumerate().map(|(i, of)| (i, self.pieces.text(of.id), finite(of.logprob)));
        to.collect_map(of.filter(|(i, text, _)| last(*i, text)).map(|(_, text, logprob)| (text, logprob)))
    }
}

/// What of some parts is text; all of it, as completions are read in no form.
pub fn text(parts: &[Part]) -> String {
    let of = |part: &Part| match part {
        Part::Text(text) | Part::Thinking(text) => text.clone(),
        Part::ToolCallStart { .. } | Part::ToolCallDelta(_) | Part::Call(_) | Part::Cut { .. } => {
            String::new()
        }
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
            of["logprobs"] = self.logprobs(token, self.texts[choice].characters);
            self.texts[choice].characters += self.head.text(token.chosen.id).chars().count();
        }
        self.head.chunk(TEXT, of, out);
    }

    fn reading(&mut self, index: usize, reading: &Reading, out: &mut String) {
        let of = json!({"index": index, "text": "", "logprobs": null, "finish_reason": null});
        self.head.reading(TEXT, (of, reading), out);
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

    fn whole(&mut self, choices: &mut [Choice], usage: Usage, out: &mut Whole) {
        let echoes: Vec<_> = (0..choices.len()).map(|i| self.echo(i).unwrap_or_default()).collect();
        let all = |out: &mut Whole| {
            for (index, (choice, (prompt, mut rows))) in choices.iter_mut().zip(echoes).enumerate() {
                rows.all.append(&mut choice.logprobs);
                out.begin(b'{');
                out.field("index", &index);
                out.field("text", &(prompt + &choice.text));
                out.key("logprobs");
                match rows.all.is_empty() && !self.measures {
                    true => out.value(&Value::Null),
                    false => self.write_logprobs(rows, out),
                }
                out.field("finish_reason", choice.reason());
                out.end(b'}');
            }
        };
        self.head.whole(TEXT, usage, (out, all));
    }
}
