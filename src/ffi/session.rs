//! Functions about sessions: texts and conversations, saving, loading and rewinding.

use super::border::{check_out, read_text, run_guarded, write_array, write_out};
use super::engine::{ENGINES, EngineHandle, LoadedModel};
use super::handles::HandleTable;
use super::options::{parse_answer_options, parse_object, parse_text_options, take_template_kwargs};
use crate::run::generate::stream::{ResumePoint, TokenStream};
use crate::run::options::GenerateOptions;
use crate::run::saved::{self, SavedContent, SavedState};
use crate::run::session::{CancelToken, Session, StopReason};
use files::{Error, Result};
use std::ffi::{c_char, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use text::chat::{
    AnswerPart, Message, OutputFormat, OutputParser, PromptEnding, RenderContext, Role, TemplateKwargs,
    UtcTime,
};
use text::sampler::Rng;

/// A piece of text.
pub const ANTIGRAVITY_PIECE_TEXT: i32 = 0;
/// A piece of a reasoning model's thoughts.
pub const ANTIGRAVITY_PIECE_THOUGHT: i32 = 1;
/// A whole tool call: a JSON object with `id`, `name` and `arguments`, the text of a JSON object.
pub const ANTIGRAVITY_PIECE_TOOL_CALL: i32 = 2;

/// The model ended the text.
pub const ANTIGRAVITY_STOP_EOS: u32 = 0;
/// A stop string came.
pub const ANTIGRAVITY_STOP_STRING: u32 = 1;
/// The text has the maximum number of tokens.
pub const ANTIGRAVITY_STOP_LENGTH: u32 = 2;
/// The context is full.
pub const ANTIGRAVITY_STOP_CONTEXT: u32 = 3;
/// The text was cancelled.
pub const ANTIGRAVITY_STOP_CANCELLED: u32 = 4;

/// One sequence of tokens and its cache.
#[repr(C)]
pub struct SessionHandle {
    _opaque: [u8; 0],
}

/// Receives the pieces of a text on the thread of the call: UTF-8, whole characters, without a byte 0 at the end. A
/// result other than 0 cancels the text. It must not throw, and must not use the session except for antigravity_cancel.
pub type PieceCallback = Option<
    unsafe extern "C" fn(kind: i32, piece: *const c_char, length: usize, user_data: *mut c_void) -> i32,
>;

/// End and numbers of a text.
#[derive(Default)]
#[repr(C)]
pub struct TextResult {
    /// One of ANTIGRAVITY_STOP_…
    pub stop_reason: u32,
    /// Zero.
    pub reserved: u32,
    /// Number of prompt tokens that had to be computed.
    pub prompt_tokens: u64,
    /// Number of generated tokens.
    pub tokens: u64,
    /// Microseconds to the first token.
    pub first_token_us: u64,
    /// Microseconds from the first to the last token.
    pub decoding_us: u64,
    /// Seed of the random numbers, which gives the same text again.
    pub seed: u64,
}

/// A session behind a handle.
struct SessionEntry {
    model: Arc<LoadedModel>,
    cancel: CancelToken,
    state: Mutex<SessionState>,
}

struct SessionState {
    session: Session,
    /// Point at which the last text stopped.
    resume: ResumePoint,
    seed: u64,
    rng: Rng,
}

static SESSIONS: HandleTable<SessionEntry> = HandleTable::new("session");

/// Makes an empty session. Several sessions of a model can be used at the same time, each by one thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_session_new(
    engine: *mut EngineHandle,
    session: *mut *mut SessionHandle,
) -> i32 {
    run_guarded(|| {
        check_out("session", session)?;
        let model = ENGINES.find_entry(engine.addr())?;
        let state = SessionState {
            session: model.engine.session()?,
            resume: ResumePoint::default(),
            seed: 0,
            rng: Rng::new(0),
        };
        let handle =
            SESSIONS.insert(SessionEntry { model, cancel: CancelToken::default(), state: Mutex::new(state) });
        // SAFETY: the rule of pointers, which the header tells callers.
        unsafe { write_out("session", session, std::ptr::without_provenance_mut(handle)) }
    })
}

/// Frees a session. A call that another thread has under way is cancelled. NULL is fine.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_session_free(session: *mut SessionHandle) -> i32 {
    run_guarded(|| {
        if !session.is_null() {
            SESSIONS.remove(session.addr())?.cancel.cancel();
        }
        Ok(())
    })
}

/// Cancels the text that the session is generating, if any, from any thread. The call that generates it then returns
/// ANTIGRAVITY_OK with the stop reason ANTIGRAVITY_STOP_CANCELLED; the text can be continued.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_cancel(session: *mut SessionHandle) -> i32 {
    run_guarded(|| SESSIONS.find_entry(session.addr()).map(|entry| entry.cancel.cancel()))
}

/// Saves a session to a file, which holds either the old or the new content. `antigravity generate --session` reads it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_session_save(
    session: *mut SessionHandle,
    path: *const c_char,
    path_length: usize,
) -> i32 {
    run_guarded(|| {
        // SAFETY: the rule of pointers, which the header tells callers.
        let path = unsafe { read_path(path, path_length) }?;
        let entry = SESSIONS.find_entry(session.addr())?;
        let state = &mut *entry.lock()?;
        let content = SavedContent::Text(state.resume.clone());
        let saved = SavedState { seed: state.seed, rng: state.rng.clone(), content };
        saved::save_session(path, &mut state.session, &entry.model.engine, saved)
    })
}

/// Replaces the session by the one in a file. Sessions that load the same file share the memory of its keys and values as
/// long as they do not change them, so a long system prompt is computed and saved once, and each session begins by
/// loading it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_session_load(
    session: *mut SessionHandle,
    path: *const c_char,
    path_length: usize,
) -> i32 {
    run_guarded(|| {
        // SAFETY: the rule of pointers, which the header tells callers.
        let path = unsafe { read_path(path, path_length) }?;
        let entry = SESSIONS.find_entry(session.addr())?;
        let state = &mut *entry.lock()?;
        let saved = saved::read_session(path, &mut state.session, &entry.model.engine)?;
        let saved = saved.ok_or_else(|| Error::model(path, "no such file; give one that was saved"))?;
        (state.seed, state.rng) = (saved.seed, saved.rng);
        state.resume = match saved.content {
            SavedContent::Text(resume) => resume,
            SavedContent::Chat(_) => ResumePoint::default(),
        };
        Ok(())
    })
}

/// Cuts a session back to its first tokens; 0 empties it.
#[unsafe(no_mangle)]
pub extern "C" fn antigravity_session_rewind(session: *mut SessionHandle, tokens: usize) -> i32 {
    run_guarded(|| {
        let entry = SESSIONS.find_entry(session.addr())?;
        let state = &mut *entry.lock()?;
        state.session.rewind(tokens)?;
        state.resume = ResumePoint::default();
        Ok(())
    })
}

/// The tokens that a session holds. `count` receives their number, even if `buffer` is too small, which is an error.
/// The last token of a text that can be continued is computed, and counted, when it is continued.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_session_tokens(
    session: *mut SessionHandle,
    buffer: *mut u32,
    capacity: usize,
    count: *mut usize,
) -> i32 {
    run_guarded(|| {
        let entry = SESSIONS.find_entry(session.addr())?;
        let state = entry.lock()?;
        // SAFETY: the rule of pointers, which the header tells callers.
        unsafe { write_array(state.session.tokens(), (buffer, capacity), count) }
    })
}

/// Completes a prompt. It is the whole text: what the session holds of it already is not computed again. NULL continues
/// the session's text where the last call stopped. The options are a JSON object with the flags of `antigravity
/// generate` about length and sampling, such as {"num_tokens": 100, "temperature": 0, "stop": ["\n"]}; NULL takes the
/// defaults. `callback` and `result` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_generate(
    session: *mut SessionHandle,
    prompt: *const c_char,
    prompt_length: usize,
    options: *const c_char,
    options_length: usize,
    callback: PieceCallback,
    user_data: *mut c_void,
    result: *mut TextResult,
) -> i32 {
    run_guarded(|| {
        // SAFETY: the rule of pointers, which the header tells callers.
        let (prompt, options) = unsafe {
            (read_text("prompt", prompt, prompt_length)?, read_text("options", options, options_length)?)
        };
        let entry = SESSIONS.find_entry(session.addr())?;
        let state = &mut *entry.lock()?;
        let flags = parse_text_options(parse_object(options.unwrap_or_default())?)?;
        let mut options = flags.resolve_options(crate::cli::args::Format::Text)?;
        let mut rng = Rng::new(options.sampler.seed);
        let (tokens, resume) = match prompt {
            Some(text) => {
                (entry.model.engine.encode_cancellable(text, options.specials, &entry.begin())?, None)
            }
            None => {
                let (seed, saved) = (flags.sampler.parse_seed(), state.rng.clone());
                (rng, options.sampler.seed) = match seed {
                    Some(seed) if seed != state.seed => (rng, seed),
                    _ => (saved, state.seed),
                };
                let resume = state.resume.clone();
                entry.begin();
                ([state.session.tokens(), &resume.tokens].concat(), Some(resume))
            }
        };
        let job = TextJob { tokens, resume, options, rng, parser: None };
        // SAFETY: the header says what the callback must and must not do.
        let told = |kind: i32, text: &str| unsafe { call_back(callback, user_data, kind, text) };
        let ended = entry.generate_text(state, job, told)?;
        // SAFETY: as above.
        unsafe { write_result(result, ended) }
    })
}

/// Answers a conversation: a JSON array of messages like {"role": "user", "content": "Hi"}, from first to last. Roles
/// are system, user, assistant and tool; an assistant's message may have `tool_calls` with `id`, `name` and
/// `arguments`, and a tool's message has `tool_call_id`. What the session holds of the conversation is not computed
/// again. Options are those of antigravity_generate, and `tools` and `chat_template_kwargs` as in the API of OpenAI;
/// the defaults of sampling are the model's own, and an answer is not cut off. `callback` and `result` may be NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn antigravity_chat(
    session: *mut SessionHandle,
    messages: *const c_char,
    messages_length: usize,
    options: *const c_char,
    options_length: usize,
    callback: PieceCallback,
    user_data: *mut c_void,
    result: *mut TextResult,
) -> i32 {
    run_guarded(|| {
        // SAFETY: the rule of pointers, which the header tells callers.
        let (messages, options) = unsafe {
            (
                read_text("messages", messages, messages_length)?,
                read_text("options", options, options_length)?,
            )
        };
        let entry = SESSIONS.find_entry(session.addr())?;
        let state = &mut *entry.lock()?;
        entry.begin();
        let job = entry.prepare_answer(messages.unwrap_or_default(), options.unwrap_or_default())?;
        // SAFETY: the header says what the callback must and must not do.
        let told = |kind: i32, text: &str| unsafe { call_back(callback, user_data, kind, text) };
        let ended = entry.generate_text(state, job, told)?;
        // SAFETY: as above.
        unsafe { write_result(result, ended) }
    })
}

/// A text to generate.
struct TextJob {
    tokens: Vec<u32>,
    /// Point at which an interrupted text stopped; `None` for a new one.
    resume: Option<ResumePoint>,
    options: GenerateOptions,
    rng: Rng,
    /// Parser of an answer.
    parser: Option<OutputParser>,
}

impl SessionEntry {
    /// The session's state, for one call.
    fn lock(&self) -> Result<MutexGuard<'_, SessionState>> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::WouldBlock) => {
                Err(Error::Usage("`session` is used by another call; wait until that returns".into()))
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(Error::Usage("`session` had an internal error; free it and make another".into()))
            }
        }
    }

    /// Forgets an earlier cancellation. Returns the token that cancels the call which begins.
    fn begin(&self) -> CancelToken {
        self.cancel.reset();
        self.cancel.clone()
    }

    /// Parses and encodes a conversation.
    fn prepare_answer(&self, messages: &str, options: &str) -> Result<TextJob> {
        let engine = &self.model.engine;
        let (tokenizer, template) = (engine.tokenizer(), engine.template()?);
        let messages: Vec<Message> = serde_json::from_str(messages)
            .map_err(|e| Error::Usage(format!("`messages` is not a JSON array of messages: {e}")))?;
        if messages.is_empty() {
            return Err(Error::Usage("`messages` is empty; give at least one message".into()));
        }
        let mut fields = parse_object(options)?;
        let kwargs = take_template_kwargs(&mut fields)?.with_defaults(&self.model.template_kwargs);
        let flags = parse_answer_options(fields)?;
        let mut options = flags.resolve_options(crate::cli::args::Format::Text)?;
        options.sampler = flags.sampler.with_recommended(options.sampler, &engine.recommended_sampling()?)?;
        if !options.ignore_eos {
            options.stop_tokens = template.stop_tokens(tokenizer);
        }
        let tokens = engine.encode_chat_with(&messages, &kwargs)?;
        let has_tools = self.check_tools(&messages, &kwargs)?;
        let has_grammar = options.sampler.grammar.is_some();
        let format = if has_grammar {
            OutputFormat::default()
        } else {
            OutputFormat::for_template(template, tokenizer)
        };
        let format = if has_tools { format } else { format.without_tools() };
        options.shown_tokens = format.marker_token_ids(tokenizer);
        let parser =
            OutputParser::for_prompt(format, tokenizer, &tokens, &messages).with_tools(kwargs.tools.as_ref());
        let rng = Rng::new(options.sampler.seed);
        Ok(TextJob { tokens, resume: None, options, rng, parser: Some(parser) })
    }

    /// True if there are tools; fails if the template does not show them to the model.
    fn check_tools(&self, messages: &[Message], kwargs: &TemplateKwargs) -> Result<bool> {
        if kwargs.tools.is_none() {
            return Ok(false);
        }
        let (bos, now) = (self.model.engine.tokenizer().bos_token(), UtcTime::now());
        let context = RenderContext { bos, now, ending: PromptEnding::Prompt, variables: Some(kwargs) };
        let system = messages.iter().find(|m| m.role == Role::System).map(|m| m.content.as_str());
        if self.model.engine.template()?.takes_tools(&context, system)? {
            return Ok(true);
        }
        Err(Error::Usage(
            "option `tools`: this model's chat template does not support tools; remove it".into(),
        ))
    }

    /// Generates a text and gives each piece to `tell`, which returns true to cancel it.
    fn generate_text(
        &self,
        state: &mut SessionState,
        job: TextJob,
        tell: impl Fn(i32, &str) -> bool,
    ) -> Result<TextResult> {
        let TextJob { tokens, resume, mut options, rng, mut parser } = job;
        if tokens.is_empty() {
            let why = "there is no text to continue, and this model adds no first token; give a `prompt`";
            return Err(Error::Usage(why.into()));
        }
        let seed = options.sampler.seed;
        options.cancel = self.cancel.clone();
        let mut stream = self.model.engine.stream(&mut state.session, &tokens, &options)?;
        if let Some(resume) = resume {
            stream = stream.resume_from(resume.unshown.as_ref());
        }
        stream.sampler_mut().set_rng(rng);
        loop {
            let piece = stream.next().transpose()?;
            let parts = match (&piece, &mut parser) {
                (Some(piece), Some(parser)) => parser.push(piece),
                (None, Some(parser)) => parser.finish(),
                (Some(piece), None) => vec![AnswerPart::Text(piece.clone())],
                (None, None) => Vec::new(),
            };
            if parts
                .iter()
                .filter_map(describe_part)
                .any(|(kind, text)| !text.is_empty() && tell(kind, &text))
            {
                stream.cancel();
            }
            if piece.is_none() {
                break;
            }
        }
        (state.seed, state.rng) = (seed, stream.sampler_mut().rng().clone());
        state.resume = stream.resume_point();
        Ok(describe_end(&stream, seed))
    }
}

/// The kind and text of a piece for the caller; `None` for a part of a tool call.
fn describe_part(part: &AnswerPart) -> Option<(i32, String)> {
    match part {
        // An incomplete call cannot be answered, so it is text.
        AnswerPart::Text(text) | AnswerPart::ToolCallCut { written: text, .. } => {
            Some((ANTIGRAVITY_PIECE_TEXT, text.clone()))
        }
        AnswerPart::Thinking(text) => Some((ANTIGRAVITY_PIECE_THOUGHT, text.clone())),
        AnswerPart::ToolCall(call) => {
            Some((ANTIGRAVITY_PIECE_TOOL_CALL, serde_json::to_string(call).unwrap_or_default()))
        }
        AnswerPart::ToolCallStart { .. } | AnswerPart::ToolCallDelta(_) => None,
    }
}

fn describe_end(stream: &TokenStream<'_>, seed: u64) -> TextResult {
    let timing = stream.timing();
    TextResult {
        stop_reason: match stream.stop_reason().unwrap_or_default() {
            StopReason::Eos => ANTIGRAVITY_STOP_EOS,
            StopReason::Stop => ANTIGRAVITY_STOP_STRING,
            StopReason::Length => ANTIGRAVITY_STOP_LENGTH,
            StopReason::Context => ANTIGRAVITY_STOP_CONTEXT,
            StopReason::Interrupt => ANTIGRAVITY_STOP_CANCELLED,
        },
        reserved: 0,
        prompt_tokens: timing.prompt_tokens as u64,
        tokens: timing.tokens as u64,
        first_token_us: timing.ttft.as_micros() as u64,
        decoding_us: timing.decoding.as_micros() as u64,
        seed,
    }
}

/// Gives a piece to the caller. Returns true if the caller cancels the text.
///
/// # Safety
///
/// The callback is NULL or takes these arguments.
unsafe fn call_back(callback: PieceCallback, user_data: *mut c_void, kind: i32, text: &str) -> bool {
    // SAFETY: passed on to the caller; the piece lives during the call.
    callback.is_some_and(|call| unsafe { call(kind, text.as_ptr().cast(), text.len(), user_data) } != 0)
}

/// Writes the end of a text, unless `result` is NULL.
///
/// # Safety
///
/// The rule of pointers.
unsafe fn write_result(result: *mut TextResult, value: TextResult) -> Result<()> {
    // SAFETY: passed on to the caller.
    if result.is_null() { Ok(()) } else { unsafe { write_out("result", result, value) } }
}

/// The path of a file.
///
/// # Safety
///
/// The rule of pointers.
unsafe fn read_path<'a>(path: *const c_char, length: usize) -> Result<&'a Path> {
    // SAFETY: passed on to the caller.
    match unsafe { read_text("path", path, length) }? {
        Some(text) if !text.is_empty() && !text.contains('\0') => Ok(Path::new(text)),
        _ => Err(Error::Usage("`path` is empty or has a byte 0; give the path of a file".into())),
    }
}
