//! Output of one request: tokens from the scheduler, parsed into thoughts, text and tool calls, and written in the
//! format of an API.

use super::dialect::{Choice, Dialect, PromptProgress, TokenOutput, Usage};
use super::error::{ApiError, ApiResult};
use super::json_writer::{FRAME, JsonWriter};
use super::memory::MemoryShare;
use super::params::{RequestParams, ResponseMode};
use crate::run::generate::scheduler::{Job, JobEvent};
use crate::run::options::{GenerateOptions, Progress};
use crate::run::plan::BACKLOG;
use crate::run::session::CancelToken;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use text::chat::{AnswerPart, OutputParser};
use text::sampler::{Logprob, TokenLogprobs};
use text::tokenizer::StopStrings;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{Receiver, Sender, channel};

/// Unread events of a stream that its memory share counts at first; the limit is [`BACKLOG`], which the plan counts.
const EXPECTED_UNREAD: usize = 256;
/// Fixed size of a text, in bytes.
const TEXT_BYTES: usize = 2 << 10;
/// Approximate size of a token's text, in bytes.
const TOKEN_BYTES: usize = 8;
/// Minimum growth of a response's memory share, in bytes.
const MIN_GROWTH: u64 = 64 << 10;
/// Interval between two progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Cancels the work for a client that has disconnected.
pub struct CancelOnDrop(pub CancelToken);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Token ids of a prompt, and the parser of its answers.
pub type ParsedPrompt = (Arc<[u32]>, OutputParser);

/// A text being generated.
struct RunningText {
    parser: OutputParser,
    choice: Choice,
    progress: Option<PromptProgress>,
    /// Token ids that a stream has not sent yet.
    unsent_tokens: Vec<u32>,
}

/// Output of one request.
pub struct RequestOutput {
    pub mode: ResponseMode,
    events: Receiver<(usize, JobEvent)>,
    texts: Vec<RunningText>,
    /// Texts per prompt.
    n: usize,
    /// Omits everything after the first tool call of a text.
    single_tool_call: bool,
    dialect: Box<dyn Dialect>,
    started: bool,
    ended: bool,
    share: MemoryShare,
    /// Memory in use, in bytes.
    bytes: u64,
    _cancel: CancelOnDrop,
}

/// Size of a token's log-probabilities, in bytes.
fn logprobs_bytes(top: usize) -> usize {
    size_of::<TokenLogprobs>() + (1 + top) * size_of::<Logprob>()
}

/// Estimates the memory of a response in bytes: all of its text up to the end of the context, and the unread events of
/// a stream. A response that turns out larger takes more later.
fn estimate_bytes(prompts: &[ParsedPrompt], params: &RequestParams) -> u64 {
    let RequestParams { model, options, .. } = params;
    let [logprobs, prompt_logprobs] =
        [options.logprobs, options.prompt_logprobs].map(|top| top.map_or(0, logprobs_bytes));
    let text_bytes = |prompt: &[u32]| {
        let room = model.engine.options().max_seq_len.saturating_sub(prompt.len()) + 1;
        let tokens = options.max_tokens.map_or(room, |max| max.min(room));
        let held = match params.mode {
            ResponseMode::Whole => tokens * (logprobs + size_of::<u32>()),
            _ => {
                tokens.min(EXPECTED_UNREAD) * size_of::<(usize, JobEvent)>() + tokens.min(BACKLOG) * logprobs
            }
        };
        TEXT_BYTES + tokens * TOKEN_BYTES + held
    };
    let prompt_bytes = |(prompt, _): &ParsedPrompt| {
        size_of_val(&prompt[..]) + params.n * (text_bytes(prompt) + prompt.len() * prompt_logprobs)
    };
    prompts.iter().map(prompt_bytes).fold(0, usize::saturating_add) as u64
}

impl RequestOutput {
    /// Submits all texts of a request to the scheduler.
    pub fn submit(
        prompts: Vec<ParsedPrompt>,
        mut params: RequestParams,
        dialect: Box<dyn Dialect>,
    ) -> ApiResult<Self> {
        params.share.resize(estimate_bytes(&prompts, &params) + dialect.held_bytes() as u64)?;
        let unread = match params.mode {
            ResponseMode::Whole => Semaphore::MAX_PERMITS,
            _ => BACKLOG * prompts.len() * params.n,
        };
        let (sender, events) = channel(unread);
        let (mut jobs, mut texts) = (Vec::new(), Vec::new());
        let options = Arc::new(std::mem::take(&mut params.options));
        let stops = StopStrings::new(&options.stop).map_err(|e| ApiError::from_request(&e))?;
        for (prompt, reader) in prompts {
            for i in 0..params.n {
                jobs.push(Job {
                    prompt: Arc::clone(&prompt),
                    options: with_progress(&options, (jobs.len(), &sender), &params),
                    seed: options.sampler.seed.wrapping_add(i as u64),
                    stops: stops.clone(),
                    reuse: params.prefix_cache_scope.clone(),
                    on_event: make_sender(jobs.len(), sender.clone(), options.cancel.clone()),
                });
                let (reader, choice) = (reader.clone(), Choice::default());
                texts.push(RunningText { parser: reader, choice, progress: None, unsent_tokens: Vec::new() });
            }
        }
        let cancel = CancelOnDrop(options.cancel.clone());
        params.model.scheduler.submit(jobs)?;
        Ok(Self {
            mode: params.mode,
            events,
            texts,
            n: params.n,
            single_tool_call: params.single_tool_call,
            dialect,
            started: false,
            ended: false,
            share: params.share,
            bytes: 0,
            _cancel: cancel,
        })
    }

    /// Processes an event of a text; returns its output, and if it was the last event.
    fn take_event(&mut self, index: usize, event: JobEvent) -> ApiResult<(TokenOutput, bool)> {
        let text = &mut self.texts[index];
        let mut output = TokenOutput { parts: Vec::new(), tokens: Vec::new(), logprobs: None };
        let mut bytes = 0;
        match event {
            JobEvent::Prompt(tokens) => {
                bytes = tokens.iter().map(|token| logprobs_bytes(token.top.len())).sum();
                self.dialect.on_prompt_logprobs(index, tokens);
            }
            JobEvent::Piece(piece) => {
                let logprobs = piece.logprobs.as_ref().filter(|_| self.mode == ResponseMode::Whole);
                let logprobs = logprobs.map_or(0, |token| logprobs_bytes(token.top.len()));
                bytes = piece.text.len() + size_of::<u32>() + logprobs;
                output.parts = text.parser.push(&piece.text);
                (output.tokens, output.logprobs) = (Vec::from_iter(piece.token), piece.logprobs);
            }
            JobEvent::Ended(ending) => {
                output.parts = text.parser.finish();
                text.choice.ending = Some(ending);
            }
            JobEvent::PromptProgress { .. } => {}
            JobEvent::Failed(e) => return Err(ApiError::from_engine(&e)),
        }
        if self.single_tool_call {
            let mut called = !text.choice.tool_calls.is_empty();
            output.parts.retain(|part| {
                let is_first = !called;
                called |= matches!(part, AnswerPart::ToolCall(_));
                is_first
            });
        }
        text.choice.push_output(&output, self.mode);
        let is_last = text.choice.ending.is_some();
        self.take_memory(bytes as u64)?;
        Ok((output, is_last))
    }

    fn take_memory(&mut self, bytes: u64) -> ApiResult<()> {
        self.bytes += bytes;
        match self.bytes.checked_sub(self.share.bytes()) {
            None | Some(0) => Ok(()),
            Some(missing) => self.share.grow(missing.max(MIN_GROWTH)),
        }
    }

    fn have_all_ended(&self) -> bool {
        self.texts.iter().all(|text| text.choice.ending.is_some())
    }

    fn count_usage(&self) -> Usage {
        Usage::sum_choices(self.texts.iter().map(|text| &text.choice).enumerate(), self.n)
    }

    /// Waits until all texts have ended.
    pub async fn wait_for_end(&mut self) -> ApiResult<()> {
        while !self.have_all_ended() {
            let lost = || ApiError::new(500, "generation ended unexpectedly");
            let (index, event) = self.events.recv().await.ok_or_else(lost)?;
            self.take_event(index, event)?;
        }
        Ok(())
    }

    /// Memory in use, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.bytes as usize
    }

    /// The whole response as JSON, with its memory share.
    pub fn into_json(mut self) -> (JsonWriter, MemoryShare) {
        let (usage, mut writer) = (self.count_usage(), JsonWriter::default());
        let mut choices: Vec<_> = self.texts.into_iter().map(|text| text.choice).collect();
        self.dialect.to_json(&mut choices, usage, &mut writer);
        (writer, self.share)
    }

    /// Text that keeps its silent stream alive.
    pub fn keep_alive(&self) -> &'static str {
        self.dialect.keep_alive()
    }

    /// Polls for the next events of the stream; `None` at its end.
    pub fn poll_events(&mut self, context: &mut Context<'_>) -> Poll<Option<String>> {
        let mut out = String::new();
        if !std::mem::replace(&mut self.started, true) {
            self.dialect.on_start(&mut out);
        }
        while !self.ended && out.len() < FRAME {
            match self.events.poll_recv(context) {
                Poll::Ready(Some((index, event))) => self.write_event(index, event, &mut out),
                Poll::Ready(None) => {
                    let error = ApiError::new(
                        500,
                        "generation stopped because the client read the stream too slowly",
                    );
                    self.write_error(&error, &mut out);
                }
                Poll::Pending if out.is_empty() => return Poll::Pending,
                Poll::Pending => break,
            }
        }
        Poll::Ready((!out.is_empty()).then_some(out))
    }

    fn write_event(&mut self, index: usize, event: JobEvent, out: &mut String) {
        if let JobEvent::PromptProgress { done, all } = event {
            return self.write_progress(index, (done, all), out);
        }
        let (mut output, is_last) = match self.take_event(index, event) {
            Ok(taken) => taken,
            Err(error) => return self.write_error(&error, out),
        };
        let text = &mut self.texts[index];
        // A stream has already sent these calls in parts.
        output.parts.retain(|part| !matches!(part, AnswerPart::ToolCall(_) | AnswerPart::ToolCallCut { .. }));
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
        let is_due = known.is_none_or(|known| done == total || now - known.reported >= PROGRESS_INTERVAL);
        let first = PromptProgress { cached: done, processed: done, total, began: now, reported: now };
        let progress = known.get_or_insert(first);
        progress.processed = done;
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

/// Adds progress reports to the options of a text if a stream asks for them.
fn with_progress(
    options: &Arc<GenerateOptions>,
    (index, to): (usize, &Sender<(usize, JobEvent)>),
    params: &RequestParams,
) -> Arc<GenerateOptions> {
    if !params.reports_progress || params.mode == ResponseMode::Whole {
        return Arc::clone(options);
    }
    let to = to.clone();
    // Progress may be lost: the next report repeats it.
    let report = move |done, all| drop(to.try_send((index, JobEvent::PromptProgress { done, all })));
    Arc::new(GenerateOptions { progress: Progress::new(report), ..GenerateOptions::clone(options) })
}

/// Creates the callback that sends the events of a text. If the client reads too slowly, the request is cancelled.
fn make_sender(
    index: usize,
    to: Sender<(usize, JobEvent)>,
    cancel: CancelToken,
) -> Box<dyn FnMut(JobEvent) + Send> {
    let mut to = Some(to);
    Box::new(move |event| {
        // After a lost event no other may follow.
        if to.as_ref().is_some_and(|to| to.try_send((index, event)).is_err()) {
            to = None;
            cancel.cancel();
        }
    })
}
