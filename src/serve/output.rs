//! Output of one request as it comes: read into thoughts, text and calls, and written in the form of an API.

use super::dialect::{Choice, Dialect, PromptProgress, TokenOutput, Usage};
use super::error::{ApiError, ApiResult};
use super::json_writer::{FRAME, JsonWriter};
use super::memory::MemoryShare;
use super::params::{RequestParams, ResponseMode};
use super::state::ServerModel;
use crate::dims::VOCAB;
use crate::run::generate::scheduler::{Event, Job};
use crate::run::options::{GenerateOptions, Progress};
use crate::run::plan::BACKLOG;
use crate::run::session::CancelToken;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use text::chat::{OutputParser, Part};
use text::sampler::{Logprob, Logprobs, TokenLogprobs};
use text::tokenizer::StopStrings;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Events of a stream that are usually unread, at most. [`BACKLOG`] is how many may be, which the plan counts.
const UNREAD: usize = 256;
/// Bytes of a text, whatever it says.
const TEXT_BYTES: usize = 2 << 10;
/// Bytes of a token's text, more or less.
const TOKEN_BYTES: usize = 8;
/// Bytes that an answer takes more at once, where it turns out longer.
const MORE_BYTES: u64 = 64 << 10;
/// Pause between two reports of how far a prompt is read.
const PROGRESS_PAUSE: Duration = Duration::from_millis(100);

/// Cancels what is done for a client that has gone.
pub struct CancelOnDrop(pub CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// A text that is being generated.
struct RunningText {
    reader: OutputParser,
    choice: Choice,
    progress: Option<PromptProgress>,
    /// Tokens that a stream has not sent yet.
    unsent_tokens: Vec<u32>,
}

/// Output of one request.
pub struct RequestOutput {
    pub mode: ResponseMode,
    events: Receiver<(usize, Event)>,
    texts: Vec<RunningText>,
    /// Texts for each prompt.
    n: usize,
    /// Calls of a text beyond the first are left out.
    one_call: bool,
    dialect: Box<dyn Dialect>,
    started: bool,
    ended: bool,
    /// Memory that it may take, and bytes that it does.
    share: MemoryShare,
    bytes: u64,
    _cancel: CancelOnDrop,
}

/// Bytes of a token's log-probabilities.
fn logprobs_bytes(top: usize) -> usize {
    size_of::<TokenLogprobs>() + (1 + top) * size_of::<Logprob>()
}

/// Bytes that the texts of some prompts may take: what they say, as far as a slot goes, and of a stream what its client
/// has not read. An answer that turns out longer takes more then.
fn expected_bytes(
    model: &ServerModel,
    prompts: &[(Arc<[u32]>, OutputParser)],
    params: &RequestParams,
) -> u64 {
    let options = &params.options;
    let [of_logprobs, of_prompt_logprobs] =
        [options.logprobs, params.prompt_logprobs].map(|top| top.map_or(0, logprobs_bytes));
    let of_text = |prompt: &[u32]| {
        let room = model.engine.options().max_seq_len.saturating_sub(prompt.len()) + 1;
        let tokens = options.max_tokens.map_or(room, |most| most.min(room));
        let held = match params.mode {
            ResponseMode::Whole => tokens * (of_logprobs + size_of::<u32>()),
            _ => tokens.min(UNREAD) * size_of::<(usize, Event)>() + tokens.min(BACKLOG) * of_logprobs,
        };
        TEXT_BYTES + tokens * TOKEN_BYTES + held
    };
    let of_prompt = |(prompt, _): &(Arc<[u32]>, OutputParser)| {
        size_of_val(&prompt[..]) + params.n * (of_text(prompt) + prompt.len() * of_prompt_logprobs)
    };
    prompts.iter().map(of_prompt).fold(0, usize::saturating_add) as u64
}

impl RequestOutput {
    /// Hands the texts of some prompts to the scheduler.
    pub fn start(
        model: &ServerModel,
        prompts: Vec<(Arc<[u32]>, OutputParser)>,
        params: &RequestParams,
        (dialect, mut share): (Box<dyn Dialect>, MemoryShare),
    ) -> ApiResult<Self> {
        share.resize(expected_bytes(model, &prompts, params))?;
        let unread = match params.mode {
            ResponseMode::Whole => Semaphore::MAX_PERMITS,
            _ => BACKLOG * prompts.len() * params.n,
        };
        let (sender, events) = channel(unread);
        let (mut jobs, mut texts) = (Vec::new(), Vec::new());
        let options = Arc::new(params.options.clone());
        let stops = StopStrings::new(&options.stop).map_err(|e| ApiError::from_request(&e))?;
        for (prompt, reader) in prompts {
            for i in 0..params.n {
                jobs.push(Job {
                    prompt: Arc::clone(&prompt),
                    options: with_progress(&options, (jobs.len(), &sender), params),
                    seed: options.sampler.seed.wrapping_add(i as u64),
                    stops: stops.clone(),
                    reuse: params.reuse.clone(),
                    measures: params.prompt_logprobs.and_then(|count| Logprobs::new(count, VOCAB).ok()),
                    tell: send_events(jobs.len(), sender.clone(), options.cancel.clone()),
                });
                let (reader, choice) = (reader.clone(), Choice::default());
                texts.push(RunningText { reader, choice, progress: None, unsent_tokens: Vec::new() });
            }
        }
        let cancel = CancelOnDrop(options.cancel.clone());
        model.scheduler.submit(jobs)?;
        Ok(Self {
            mode: params.mode,
            events,
            texts,
            n: params.n,
            one_call: params.one_call,
            dialect,
            started: false,
            ended: false,
            share,
            bytes: 0,
            _cancel: cancel,
        })
    }

    /// Takes an event of a text: what it has brought, and whether it is the last one.
    fn take(&mut self, index: usize, event: Event) -> ApiResult<(TokenOutput, bool)> {
        let text = &mut self.texts[index];
        let mut output = TokenOutput { parts: Vec::new(), tokens: Vec::new(), logprobs: None };
        let mut bytes = 0;
        match event {
            Event::Prompt(tokens) => {
                bytes = tokens.iter().map(|of| logprobs_bytes(of.top.len())).sum();
                self.dialect.on_prompt_logprobs(index, tokens);
            }
            Event::Piece(piece) => {
                let logprobs = piece.logprobs.as_ref().filter(|_| self.mode == ResponseMode::Whole);
                let of_logprobs = logprobs.map_or(0, |of| logprobs_bytes(of.top.len()));
                bytes = piece.text.len() + size_of::<u32>() + of_logprobs;
                output.parts = text.reader.push(&piece.text);
                (output.tokens, output.logprobs) = (Vec::from_iter(piece.token), piece.logprobs);
            }
            Event::Ended(ending) => {
                output.parts = text.reader.finish();
                text.choice.ending = Some(ending);
            }
            Event::Read { .. } => {}
            Event::Failed(e) => return Err(ApiError::from_engine(&e)),
        }
        if self.one_call {
            let mut called = !text.choice.calls.is_empty();
            output.parts.retain(|part| {
                let is_first = !called;
                called |= matches!(part, Part::Call(_));
                is_first
            });
        }
        text.choice.add(&output, self.mode);
        let is_last = text.choice.ending.is_some();
        self.take_memory(bytes as u64)?;
        Ok((output, is_last))
    }

    fn take_memory(&mut self, bytes: u64) -> ApiResult<()> {
        self.bytes += bytes;
        match self.bytes.checked_sub(self.share.bytes()) {
            None | Some(0) => Ok(()),
            Some(missing) => self.share.grow(missing.max(MORE_BYTES)),
        }
    }

    fn have_all_ended(&self) -> bool {
        self.texts.iter().all(|text| text.choice.ending.is_some())
    }

    fn count_usage(&self) -> Usage {
        Usage::sum(self.texts.iter().map(|text| &text.choice).enumerate(), self.n)
    }

    /// Waits for the ends of all texts.
    pub async fn finish(&mut self) -> ApiResult<()> {
        while !self.have_all_ended() {
            let lost = || ApiError::new(500, "the text has no end");
            let (index, event) = self.events.recv().await.ok_or_else(lost)?;
            self.take(index, event)?;
        }
        Ok(())
    }

    /// Bytes of its texts.
    pub fn bytes(&self) -> usize {
        self.bytes as usize
    }

    /// The whole answer, and the memory that it takes.
    pub fn into_json(mut self) -> (JsonWriter, MemoryShare) {
        let (usage, mut writer) = (self.count_usage(), JsonWriter::default());
        let mut choices: Vec<_> = self.texts.into_iter().map(|text| text.choice).collect();
        self.dialect.to_json(&mut choices, usage, &mut writer);
        (writer, self.share)
    }

    /// Text of its stream where that has nothing to say for a while.
    pub fn keep_alive(&self) -> &'static str {
        self.dialect.keep_alive()
    }

    /// Takes the next events of the stream; `None` at its end.
    pub fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<String>> {
        let mut out = String::new();
        if !std::mem::replace(&mut self.started, true) {
            self.dialect.on_start(&mut out);
        }
        while !self.ended && out.len() < FRAME {
            match self.events.poll_recv(context) {
                Poll::Ready(Some((index, event))) => self.write(index, event, &mut out),
                Poll::Ready(None) => {
                    let error = ApiError::new(500, "the text was given up, as it was read too slowly");
                    self.write_error(&error, &mut out);
                }
                Poll::Pending if out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready((!out.is_empty()).then_some(out))
    }

    fn write(&mut self, index: usize, event: Event, out: &mut String) {
        if let Event::Read { done, all } = event {
            return self.write_progress(index, (done, all), out);
        }
        let (mut output, is_last) = match self.take(index, event) {
            Ok(taken) => taken,
            Err(error) => return self.write_error(&error, out),
        };
        let text = &mut self.texts[index];
        // Parts of a call were sent before.
        output.parts.retain(|part| !matches!(part, Part::Call(_) | Part::Cut { .. }));
        text.unsent_tokens.append(&mut output.tokens);
        if !output.parts.is_empty() || output.logprobs.is_some() {
            output.tokens = std::mem::take(&mut text.unsent_tokens);
            self.dialect.on_token(index, &output, out);
        }
        if is_last {
            self.dialect.on_choice_end(index, &text.choice, out);
        }
        if self.have_all_ended() {
            self.ended = true;
            self.dialect.on_end(self.count_usage(), out);
        }
    }

    fn write_progress(&mut self, index: usize, (done, total): (usize, usize), out: &mut String) {
        let now = Instant::now();
        let known = &mut self.texts[index].progress;
        let is_due = known.is_none_or(|of| done == total || now - of.reported >= PROGRESS_PAUSE);
        let first = PromptProgress { cached: done, done, total, began: now, reported: now };
        let progress = known.get_or_insert(first);
        progress.done = done;
        if is_due {
            progress.reported = now;
            self.dialect.on_prompt_progress(index, progress, out);
        }
    }

    fn write_error(&mut self, error: &ApiError, out: &mut String) {
        self.ended = true;
        self.dialect.on_error(error, out);
    }
}

/// Options of a text, which report how far its prompt is read where the request asks for that.
fn with_progress(
    options: &Arc<GenerateOptions>,
    (index, to): (usize, &Sender<(usize, Event)>),
    params: &RequestParams,
) -> Arc<GenerateOptions> {
    if !params.progress || params.mode == ResponseMode::Whole {
        return Arc::clone(options);
    }
    let to = to.clone();
    // One that is lost matters to nobody.
    let report = move |done, all| drop(to.try_send((index, Event::Read { done, all })));
    Arc::new(GenerateOptions { progress: Progress::new(report), ..GenerateOptions::clone(options) })
}

/// Sends the events of a text. Where as much is unread as may be, the texts of the request are given up.
fn send_events(
    index: usize,
    to: Sender<(usize, Event)>,
    cancel: CancelToken,
) -> Box<dyn FnMut(Event) + Send> {
    let mut to = Some(to);
    Box::new(move |event| {
        // After what is lost nothing may come, and a client that has gone hears nothing anyway.
        if to.as_ref().is_some_and(|to| to.try_send((index, event)).is_err()) {
            to = None;
            cancel.cancel();
        }
    })
}
