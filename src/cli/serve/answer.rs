//! The texts of one request as they come: read into thoughts, text and calls, and put into the shape of an API.

use super::asked::Asked;
use super::hub::Served;
use super::refusal::Refusal;
use crate::run::engine::scheduler::{Ending, Event, Job};
use crate::run::options::GenerateOptions;
use crate::run::session::{CancelToken, Drafts, StopReason};
use serde_json::{Value, json};
use std::task::{Context, Poll};
use std::time::Duration;
use text::chat::{Part, Reader, ToolCall};
use text::sampler::TokenLogprobs;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// What a token has brought, with those before it that brought nothing.
pub(super) struct Step {
    pub parts: Vec<Part>,
    pub tokens: Vec<u32>,
    pub logprobs: Option<TokenLogprobs>,
}

/// One text of a request.
#[derive(Default)]
pub(super) struct Choice {
    pub text: String,
    pub thoughts: String,
    pub calls: Vec<ToolCall>,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    /// How it has ended, once it has.
    pub ending: Option<Ending>,
}

impl Choice {
    fn add(&mut self, step: &Step) {
        for part in &step.parts {
            match part {
                Part::Text(text) => self.text += text,
                Part::Thinking(thought) => self.thoughts += thought,
                Part::Call(call) | Part::Cut { call, .. } => self.calls.push(call.clone()),
                Part::Begun { .. } | Part::Arguments(_) => {}
            }
        }
        self.tokens.extend(&step.tokens);
        self.logprobs.extend(step.logprobs.clone());
    }

    /// OpenAI's word for why it has ended.
    pub fn reason(&self) -> &'static str {
        match self.ending.map(|ending| ending.reason) {
            Some(StopReason::Eos | StopReason::Stop) if !self.calls.is_empty() => "tool_calls",
            Some(StopReason::Eos | StopReason::Stop) => "stop",
            _ => "length",
        }
    }

    /// Its tokens and times alone.
    pub fn usage(&self) -> Usage {
        Usage::of(std::slice::from_ref(self), 1)
    }
}

/// Tokens of a request, and how long they took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub prompt: usize,
    pub cached: usize,
    pub tokens: usize,
    /// Texts that have tokens,
    pub texts: usize,
    /// the time to their first tokens,
    pub first: Duration,
    /// and from there to the last ones.
    pub between: Duration,
    pub drafts: Drafts,
}

impl Usage {
    /// Of texts, `n` for each prompt.
    fn of(choices: &[Choice], n: usize) -> Self {
        let mut usage = Self::default();
        for (i, ending) in choices.iter().enumerate().filter_map(|(i, c)| Some((i, c.ending?))) {
            usage.tokens += ending.tokens;
            usage.texts += usize::from(ending.tokens > 0);
            usage.first += ending.first;
            usage.between += ending.between;
            usage.drafts = usage.drafts + ending.drafts;
            if i % n.max(1) == 0 {
                usage.prompt += ending.prompt;
                usage.cached += ending.cached;
            }
        }
        usage
    }

    /// As OpenAI's API has it.
    pub fn json(self) -> Value {
        let Self { prompt, cached, tokens, .. } = self;
        json!({
            "prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    /// As llama.cpp's server has it. First tokens come with their prompts, so they take no time of their own.
    pub fn timings(self) -> Value {
        let each = |ms: f64, n: usize| if n > 0 { ms / n as f64 } else { 0.0 };
        let pace = |n: usize, ms: f64| if ms > 0.0 { 1e3 / ms * n as f64 } else { 0.0 };
        let [first, between] = [self.first, self.between].map(|took| took.as_secs_f64() * 1e3);
        let (computed, later) = (self.prompt - self.cached, self.tokens - self.texts);
        let mut timings = json!({
            "cache_n": self.cached, "prompt_n": computed, "prompt_ms": first,
            "prompt_per_token_ms": each(first, computed), "prompt_per_second": pace(computed, first),
            "predicted_n": self.tokens, "predicted_ms": between,
            "predicted_per_token_ms": each(between, later), "predicted_per_second": pace(later, between),
        });
        if self.drafts.drafted > 0 {
            timings["draft_n"] = self.drafts.drafted.into();
            timings["draft_n_accepted"] = self.drafts.accepted.into();
        }
        timings
    }
}

/// How an API says it.
pub(super) trait Shape: Send {
    /// The first events of a stream.
    fn begin(&mut self, out: &mut String);
    /// What a token of a text has brought.
    fn step(&mut self, choice: usize, step: &Step, out: &mut String);
    /// A text has ended.
    fn ended(&mut self, index: usize, choice: &Choice, out: &mut String);
    /// All have.
    fn over(&mut self, usage: Usage, out: &mut String);
    /// Something went wrong in the middle of a stream.
    fn failed(&mut self, refusal: &Refusal, out: &mut String);
    /// The whole answer at once.
    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Value;
}

/// An event of a stream, without a name.
pub(super) fn event(data: &Value, out: &mut String) {
    *out += &format!("data: {data}\n\n");
}

/// An event with a name, which is also the `type` of its data.
pub(super) fn named_event(name: &str, mut data: Value, out: &mut String) {
    data["type"] = name.into();
    *out += &format!("event: {name}\ndata: {data}\n\n");
}

/// Stops the texts of a client that has gone.
struct Gone(CancelToken);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The texts of one request.
pub(super) struct Answer {
    events: UnboundedReceiver<(usize, Event)>,
    readers: Vec<Reader>,
    choices: Vec<Choice>,
    /// Tokens of each text that were not said yet.
    unsaid: Vec<Vec<u32>>,
    /// Texts for each prompt.
    n: usize,
    shape: Box<dyn Shape>,
    begun: bool,
    over: bool,
    _gone: Gone,
}

impl Answer {
    /// Hands the texts of some prompts to the scheduler.
    pub fn begin(
        served: &Served,
        prompts: Vec<(Vec<u32>, Reader)>,
        asked: &Asked,
        shape: Box<dyn Shape>,
    ) -> Result<Self, Refusal> {
        let (sender, events) = unbounded_channel();
        let (mut jobs, mut readers) = (Vec::new(), Vec::new());
        for (prompt, reader) in prompts {
            for i in 0..asked.n {
                let index = jobs.len();
                jobs.push(job(asked, (prompt.clone(), i), (index, sender.clone())));
                readers.push(reader.clone());
            }
        }
        let choices = readers.iter().map(|_| Choice::default()).collect();
        let unsaid = vec![Vec::new(); readers.len()];
        let gone = Gone(asked.options.cancel.clone());
        served.scheduler.submit(jobs)?;
        let (n, begun, over) = (asked.n, false, false);
        Ok(Self { events, readers, choices, unsaid, n, shape, begun, over, _gone: gone })
    }

    /// Takes an event: the text it belongs to, if that has ended now, and what the event has brought.
    fn take(&mut self, index: usize, event: Event) -> Result<(Step, bool), Refusal> {
        let (parts, token, logprobs, ended) = match event {
            Event::Piece(piece) => (self.readers[index].push(&piece.text), piece.token, piece.logprobs, None),
            Event::Ended(ending) => (self.readers[index].finish(), None, None, Some(ending)),
            Event::Failed(e) => return Err(Refusal::of_run(&e)),
        };
        let step = Step { parts, tokens: Vec::from_iter(token), logprobs };
        self.choices[index].add(&step);
        self.choices[index].ending = ended;
        Ok((step, ended.is_some()))
    }

    fn all_ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.ending.is_some())
    }

    /// Waits for all of it.
    pub async fn whole(mut self) -> Result<Value, Refusal> {
        while !self.all_ended() {
            let lost = || Refusal::new(500, "the text has no end");
            let (index, event) = self.events.recv().await.ok_or_else(lost)?;
            self.take(index, event)?;
        }
        let usage = Usage::of(&self.choices, self.n);
        Ok(self.shape.whole(&self.choices, usage))
    }

    /// The next part of the stream; `None` at its end.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<String>> {
        let mut out = String::new();
        if !std::mem::replace(&mut self.begun, true) {
            self.shape.begin(&mut out);
        }
        while !self.over {
            match self.events.poll_recv(context) {
                Poll::Ready(Some((index, event))) => self.say(index, event, &mut out),
                Poll::Ready(None) => self.fail(&Refusal::new(500, "the text has no end"), &mut out),
                Poll::Pending if out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready((!out.is_empty()).then_some(out))
    }

    fn say(&mut self, index: usize, event: Event, out: &mut String) {
        let (mut step, ended) = match self.take(index, event) {
            Ok(taken) => taken,
            Err(refusal) => return self.fail(&refusal, out),
        };
        // Its parts were said.
        step.parts.retain(|part| !matches!(part, Part::Call(_) | Part::Cut { .. }));
        self.unsaid[index].append(&mut step.tokens);
        if !step.parts.is_empty() || step.logprobs.is_some() {
            step.tokens = std::mem::take(&mut self.unsaid[index]);
            self.shape.step(index, &step, out);
        }
        if ended {
            self.shape.ended(index, &self.choices[index], out);
        }
        if self.all_ended() {
            self.over = true;
            self.shape.over(Usage::of(&self.choices, self.n), out);
        }
    }

    fn fail(&mut self, refusal: &Refusal, out: &mut String) {
        self.over = true;
        self.shape.failed(refusal, out);
    }
}

/// The `i`th text of a prompt, which is told as that of an index.
fn job(
    asked: &Asked,
    (prompt, i): (Vec<u32>, usize),
    (index, to): (usize, UnboundedSender<(usize, Event)>),
) -> Job {
    let mut options: GenerateOptions = asked.options.clone();
    options.sampler.seed = options.sampler.seed.wrapping_add(i as u64);
    // A client that has gone hears nothing; its texts end by themselves.
    let tell = Box::new(move |event| drop(to.send((index, event))));
    Job { prompt, options, reuse: asked.reuse, tell }
}
