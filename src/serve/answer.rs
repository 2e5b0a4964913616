//! The texts of one request as they come: read into thoughts, text and calls, and put into the shape of an API.

use super::asked::{Asked, How};
use super::budget::Share;
use super::hub::Served;
use super::refusal::Refusal;
use super::whole::{FRAME, Turn, Whole};
use super::workers::Length;
use crate::dims::VOCAB;
use crate::run::generate::scheduler::{Ending, Event, Job};
use crate::run::options::{GenerateOptions, Progress};
use crate::run::plan::BACKLOG;
use crate::run::session::{CancelToken, Drafts, StopReason};
use serde_json::{Value, json};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use text::chat::{Part, Reader, ToolCall};
use text::sampler::{Logprob, Logprobs, TokenLogprobs};
use text::tokenizer::StopStrings;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Events of a stream that are usually unread, at most. The plan knows of as many as may be.
const UNREAD: usize = 256;
/// Memory of a text, whatever it says.
const OF_TEXT: usize = 2 << 10;
/// Bytes of a token's text, more or less.
const OF_TOKEN: usize = 8;
/// What an answer takes more at once, where it turns out longer.
const MORE: u64 = 64 << 10;

/// What a token has brought, with those before it that brought nothing.
pub struct Step {
    pub parts: Vec<Part>,
    pub tokens: Vec<u32>,
    pub logprobs: Option<TokenLogprobs>,
}

/// One text of a request.
#[derive(Default)]
pub struct Choice {
    pub text: String,
    pub thoughts: String,
    pub calls: Vec<ToolCall>,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    /// How it has ended, once it has.
    pub ending: Option<Ending>,
}

impl Choice {
    /// Adds what a step has brought; what only a whole answer tells is left out of a stream.
    fn add(&mut self, step: &Step, how: How) {
        for part in &step.parts {
            match part {
                Part::Text(text) => self.text += text,
                Part::Thinking(thought) => self.thoughts += thought,
                Part::Call(call) | Part::Cut { call, .. } => self.calls.push(call.clone()),
                Part::Begun { .. } | Part::Arguments(_) => {}
            }
        }
        if how == How::Whole {
            self.tokens.extend(&step.tokens);
            self.logprobs.extend(step.logprobs.clone());
        }
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
pub struct Usage {
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

/// How far a prompt is read.
#[derive(Debug, Clone, Copy)]
pub struct Reading {
    /// Tokens that were copied,
    cached: usize,
    /// those that are read, which these are of,
    done: usize,
    /// and all.
    all: usize,
    began: Instant,
    /// When that was said last.
    said: Instant,
}

impl Reading {
    /// Between two times that it is said.
    const PAUSE: Duration = Duration::from_millis(100);

    /// As llama.cpp's server has it.
    pub fn json(&self) -> Value {
        let Self { cached, done, all, began, .. } = self;
        json!({"total": all, "cache": cached, "processed": done, "time_ms": began.elapsed().as_millis() as u64})
    }
}

/// How an API says it.
pub trait Shape: Send {
    /// Log-probabilities of the next tokens of a text's prompt, which come before its first token.
    fn measured(&mut self, _choice: usize, _tokens: Vec<TokenLogprobs>) {}
    /// The first events of a stream.
    fn begin(&mut self, out: &mut String);
    /// What a token of a text has brought.
    fn step(&mut self, choice: usize, step: &Step, out: &mut String);
    /// How far the prompt of a text is read.
    fn reading(&mut self, _choice: usize, _reading: &Reading, _out: &mut String) {}
    /// A text has ended.
    fn ended(&mut self, index: usize, choice: &Choice, out: &mut String);
    /// All have.
    fn over(&mut self, usage: Usage, out: &mut String);
    /// Something went wrong in the middle of a stream.
    fn failed(&mut self, refusal: &Refusal, out: &mut String);
    /// The whole answer at once. Log-probabilities may be taken out of its texts.
    fn whole(&mut self, choices: &mut [Choice], usage: Usage, out: &mut Whole);
}

/// An event of a stream, without a name.
pub fn event(data: &Value, out: &mut String) {
    *out += &format!("data: {data}\n\n");
}

/// An event with a name, which is also the `type` of its data.
pub fn named_event(name: &str, mut data: Value, out: &mut String) {
    data["type"] = name.into();
    *out += &format!("event: {name}\ndata: {data}\n\n");
}

/// Stops what is done for a client that has gone.
pub struct Gone(pub CancelToken);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// The texts of one request.
pub struct Answer {
    events: Receiver<(usize, Event)>,
    readers: Vec<Reader>,
    choices: Vec<Choice>,
    /// How far the prompt of each text is read, where that is told.
    readings: Vec<Option<Reading>>,
    /// Tokens of each text that were not said yet.
    unsaid: Vec<Vec<u32>>,
    /// Texts for each prompt.
    n: usize,
    /// Each has one call at most.
    one_call: bool,
    shape: Box<dyn Shape>,
    how: How,
    begun: bool,
    over: bool,
    turn: Turn,
    /// The memory that it may take, and what of it is taken.
    share: Share,
    taken: u64,
    _gone: Gone,
}

/// The texts of a request that have all ended.
pub struct Complete {
    choices: Vec<Choice>,
    usage: Usage,
    shape: Box<dyn Shape>,
    share: Share,
    /// Bytes of its texts.
    bytes: u64,
}

impl Complete {
    /// How long it takes to be written.
    pub fn length(&self) -> Length {
        Length::of(self.bytes as usize)
    }

    /// The answer, and the memory that it takes.
    pub fn write(mut self) -> (Whole, Share) {
        let mut whole = Whole::default();
        self.shape.whole(&mut self.choices, self.usage, &mut whole);
        (whole, self.share)
    }
}

/// Bytes of a token's log-probabilities.
fn of_logprobs(top: usize) -> usize {
    size_of::<TokenLogprobs>() + (1 + top) * size_of::<Logprob>()
}

/// Bytes that the texts of some prompts may take: what they say, as far as a slot goes, and of a stream what its client
/// has not read. An answer that turns out longer takes more then.
fn memory(served: &Served, prompts: &[(Arc<[u32]>, Reader)], asked: &Asked) -> u64 {
    let options = &asked.options;
    let (of_logprobs, measured) =
        (options.logprobs.map_or(0, of_logprobs), asked.measures.map_or(0, of_logprobs));
    let of_text = |prompt: &[u32]| {
        let room = served.engine.options().max_seq_len.saturating_sub(prompt.len()) + 1;
        let tokens = options.max_tokens.map_or(room, |most| most.min(room));
        let kept = match asked.how {
            How::Whole => tokens * (of_logprobs + size_of::<u32>()),
            _ => tokens.min(UNREAD) * size_of::<(usize, Event)>() + tokens.min(BACKLOG) * of_logprobs,
        };
        OF_TEXT + tokens * OF_TOKEN + kept
    };
    let of_prompt = |(prompt, _): &(Arc<[u32]>, Reader)| {
        size_of_val(&prompt[..]) + asked.n * (of_text(prompt) + prompt.len() * measured)
    };
    prompts.iter().map(of_prompt).fold(0, usize::saturating_add) as u64
}

impl Answer {
    /// Hands the texts of some prompts to the scheduler.
    pub fn begin(
        served: &Served,
        prompts: Vec<(Arc<[u32]>, Reader)>,
        asked: &Asked,
        (shape, mut share): (Box<dyn Shape>, Share),
    ) -> Result<Self, Refusal> {
        share.become_of(memory(served, &prompts, asked))?;
        let unread =
            if asked.how == How::Whole { Semaphore::MAX_PERMITS } else { BACKLOG * prompts.len() * asked.n };
        let (sender, events) = channel(unread);
        let (mut jobs, mut readers) = (Vec::new(), Vec::new());
        let options = Arc::new(asked.options.clone());
        let stops = StopStrings::new(&options.stop).map_err(|e| Refusal::of_input(&e))?;
        for (prompt, reader) in prompts {
            for i in 0..asked.n {
                jobs.push(Job {
                    prompt: Arc::clone(&prompt),
                    options: telling(&options, (jobs.len(), &sender), asked),
                    seed: options.sampler.seed.wrapping_add(i as u64),
                    stops: stops.clone(),
                    reuse: asked.reuse.clone(),
                    measures: asked.measures.and_then(|count| Logprobs::new(count, VOCAB).ok()),
                    tell: teller(jobs.len(), sender.clone(), asked.options.cancel.clone()),
                });
                readers.push(reader.clone());
            }
        }
        let choices = readers.iter().map(|_| Choice::default()).collect();
        let (unsaid, readings) = (vec![Vec::new(); readers.len()], vec![None; readers.len()]);
        let gone = Gone(asked.options.cancel.clone());
        served.scheduler.submit(jobs)?;
        Ok(Self {
            events,
            readers,
            choices,
            readings,
            unsaid,
            n: asked.n,
            one_call: asked.one_call,
            shape,
            how: asked.how,
            begun: false,
            over: false,
            turn: Turn::Own,
            share,
            taken: 0,
            _gone: gone,
        })
    }

    /// Takes an event: the text it belongs to, if that has ended now, and what the event has brought.
    fn take(&mut self, index: usize, event: Event) -> Result<(Step, bool), Refusal> {
        let bytes = match &event {
            Event::Piece(piece) => {
                let logprobs = piece.logprobs.as_ref().filter(|_| self.how == How::Whole);
                piece.text.len() + size_of::<u32>() + logprobs.map_or(0, |of| of_logprobs(of.top.len()))
            }
            Event::Prompt(tokens) => tokens.iter().map(|of| of_logprobs(of.top.len())).sum(),
            _ => 0,
        };
        let (mut parts, token, logprobs, ended) = match event {
            Event::Prompt(tokens) => {
                self.shape.measured(index, tokens);
                (Vec::new(), None, None, None)
            }
            Event::Piece(piece) => (self.readers[index].push(&piece.text), piece.token, piece.logprobs, None),
            Event::Ended(ending) => (self.readers[index].finish(), None, None, Some(ending)),
            Event::Read { .. } => (Vec::new(), None, None, None),
            Event::Failed(e) => return Err(Refusal::of_run(&e)),
        };
        self.hold(bytes)?;
        if self.one_call {
            let mut called = !self.choices[index].calls.is_empty();
            parts.retain(|part| {
                let is_first = !called;
                called |= matches!(part, Part::Call(_));
                is_first
            });
        }
        let step = Step { parts, tokens: Vec::from_iter(token), logprobs };
        self.choices[index].add(&step, self.how);
        self.choices[index].ending = ended;
        Ok((step, ended.is_some()))
    }

    /// Takes memory for so many bytes more.
    fn hold(&mut self, bytes: usize) -> Result<(), Refusal> {
        self.taken += bytes as u64;
        match self.taken > self.share.bytes() {
            true => self.share.grow(MORE.max(self.taken - self.share.bytes())),
            false => Ok(()),
        }
    }

    fn all_ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.ending.is_some())
    }

    /// Waits for all of it.
    pub async fn complete(mut self) -> Result<Complete, Refusal> {
        while !self.all_ended() {
            let lost = || Refusal::new(500, "the text has no end");
            let (index, event) = self.events.recv().await.ok_or_else(lost)?;
            self.take(index, event)?;
        }
        let usage = Usage::of(&self.choices, self.n);
        let Self { choices, shape, share, taken: bytes, .. } = self;
        Ok(Complete { choices, usage, shape, share, bytes })
    }

    /// The next part of the stream; `None` at its end.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<String>> {
        let mut out = String::new();
        if self.turn.is_others(context) {
            return Poll::Pending;
        }
        if !std::mem::replace(&mut self.begun, true) {
            self.shape.begin(&mut out);
        }
        while !self.over {
            if out.len() >= FRAME {
                self.turn = Turn::Others;
                break;
            }
            match self.events.poll_recv(context) {
                Poll::Ready(Some((index, event))) => self.say(index, event, &mut out),
                Poll::Ready(None) => self
                    .fail(&Refusal::new(500, "the text was given up, as it was read too slowly"), &mut out),
                Poll::Pending if out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready((!out.is_empty()).then_some(out))
    }

    fn say(&mut self, index: usize, event: Event, out: &mut String) {
        if let Event::Read { done, all } = event {
            return self.say_reading(index, (done, all), out);
        }
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

    fn say_reading(&mut self, index: usize, (done, all): (usize, usize), out: &mut String) {
        let now = Instant::now();
        let fresh = Reading { cached: done, done, all, began: now, said: now };
        let known = self.readings[index].replace(fresh);
        let reading = known.map_or(fresh, |before| Reading { done, ..before });
        let is_due = known.is_none() || done == all || now - reading.said >= Reading::PAUSE;
        if is_due {
            self.shape.reading(index, &reading, out);
        }
        self.readings[index] = Some(if is_due { Reading { said: now, ..reading } } else { reading });
    }

    fn fail(&mut self, refusal: &Refusal, out: &mut String) {
        self.over = true;
        self.shape.failed(refusal, out);
    }
}

/// The options of a text, which tell how far its prompt is read where the request asks for that.
fn telling(
    options: &Arc<GenerateOptions>,
    (index, to): (usize, &Sender<(usize, Event)>),
    asked: &Asked,
) -> Arc<GenerateOptions> {
    if !asked.progress || asked.how == How::Whole {
        return Arc::clone(options);
    }
    let to = to.clone();
    // One that is lost matters to nobody.
    let tell = move |done, all| drop(to.try_send((index, Event::Read { done, all })));
    Arc::new(GenerateOptions { progress: Progress::new(tell), ..GenerateOptions::clone(options) })
}

/// Tells what comes of a text. Where as much is unread as may be, the texts of the request are given up.
fn teller(index: usize, to: Sender<(usize, Event)>, cancel: CancelToken) -> Box<dyn FnMut(Event) + Send> {
    let mut to = Some(to);
    Box::new(move |event| {
        // After what is lost nothing may come, and a client that has gone hears nothing anyway.
        if to.as_ref().is_some_and(|to| to.try_send((index, event)).is_err()) {
            to = None;
            cancel.cancel();
        }
    })
}
