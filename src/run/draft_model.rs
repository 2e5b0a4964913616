//! A draft model: another antigravity program, built for a smaller model with the same tokenizer, that predicts the
//! next tokens of a text, which the large model then verifies in one pass (speculative decoding, arXiv 2211.17192).
//! Both sample with the same settings and the same random numbers, so that random sampling is predicted too; the tokens
//! are always the large model's choice. The program is not trusted: whatever it says or does can cost only time, and
//! not for long.

pub mod assistant;
mod child;
mod draft_length;
mod in_process;
pub mod mtp;
pub mod protocol;

pub use child::DraftSettings;

use crate::dims::VOCAB;
use child::DraftProcess;
pub use draft_length::{DraftWhen, PassTime, SharedLengthPolicy};
use files::error::escape;
use files::{Error, Result};
use protocol::{DraftAnswer, DraftRequest, Handshake, VERSION};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use text::sampler::{Rng, SamplerOptions};

/// Total time to wait for a program that loads its model; usually it is ready earlier.
const START: Duration = Duration::from_secs(2);
/// Maximum time to wait for one answer. A later one is useless.
const PATIENCE: Duration = Duration::from_millis(500);
/// Time after which a silent program is killed.
const HUNG: Duration = Duration::from_secs(20);
/// Minimum probability of a draft, by the smaller model's estimate, that is worth verifying. On six stories, 0.4 gave
/// 3.3 to 3.9 tokens a pass with 70 to 77 % of drafted tokens accepted; 0.6 gave 3.0 to 3.4 and 78 to 89 %. Applied to
/// each token separately, 0.6 gave 3.1 to 3.6 and 76 to 86 %.
const LEAST: f32 = 0.6;
/// Maximum number of its threads: a small model has little work for more.
const THREADS: usize = 2;

/// The running program, which the sequences of an engine share.
#[derive(Clone)]
pub struct DraftModel(Arc<Mutex<DraftState>>);

/// A sequence's request for a draft.
pub struct DraftQuery<'a> {
    /// Id of the sequence: see [`DraftModel::new_sequence_id`].
    pub owner: u64,
    /// The text so far.
    pub tokens: &'a [u32],
    /// Maximum number of tokens to draft.
    pub length: usize,
    /// Sampler settings of the text.
    pub sampler: &'a Arc<SamplerOptions>,
    /// Random state of the next tokens, if known.
    pub random: Option<&'a Rng>,
}

/// Function that receives a line for the user.
type LineSink = Box<dyn Fn(&str) + Send>;

struct DraftState {
    /// Name of the program in messages.
    name: String,
    say: LineSink,
    /// `None` once it has failed.
    child: Option<DraftProcess>,
    /// Digest of this program's tokenizer.
    tokenizer: u32,
    state: ProgramState,
    /// State of each of the program's texts.
    held: Vec<CachedText>,
    /// Last ids given to sequences and to requests.
    owners: u64,
    requests: u64,
    length_policy: SharedLengthPolicy,
}

/// State of the program.
#[derive(Clone, Copy)]
enum ProgramState {
    /// Loading its model, with this much of [`START`] left.
    Loading(Duration),
    Idle,
    /// Asked at this time, and not answered yet.
    Asked(Instant),
}

/// One of the program's texts.
#[derive(Default)]
struct CachedText {
    owner: u64,
    tokens: Vec<u32>,
    sampler: Option<Arc<SamplerOptions>>,
    /// Id of the last request that used it.
    last: u64,
}

impl DraftModel {
    /// Starts a program. `tokenizer` is the required [digest](text::tokenizer::TokenBytes::compute_checksum) of its
    /// tokenizer. `say` receives a line if the program fails later.
    ///
    /// # Errors
    ///
    /// `Usage` for a program that cannot be started.
    pub fn start(
        program: &Path,
        when: DraftWhen,
        tokenizer: u32,
        setting: DraftSettings,
        say: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        let name = format!("`EngineOptions::draft_model` {}", escape(&program.to_string_lossy()));
        let setting = DraftSettings { threads: setting.threads.clamp(1, THREADS), ..setting };
        let child = DraftProcess::spawn(program, setting).map_err(|e| {
            let remedy = "give another antigravity program, or the folder of Gemma 4's assistant";
            Error::Usage(format!("{name}: cannot be started: {e}; {remedy}"))
        })?;
        let mut held = Vec::new();
        held.resize_with(setting.sequences, CachedText::default);
        Ok(Self(Arc::new(Mutex::new(DraftState {
            name,
            say: Box::new(say),
            child: Some(child),
            tokenizer,
            state: ProgramState::Loading(START),
            held,
            owners: 0,
            requests: 0,
            length_policy: SharedLengthPolicy::new(when),
        }))))
    }

    fn lock(&self) -> MutexGuard<'_, DraftState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a new id for a sequence.
    pub fn new_sequence_id(&self) -> u64 {
        let mut client = self.lock();
        client.owners += 1;
        client.owners
    }

    /// Process id of the program, while it is in use.
    pub fn process_id(&self) -> Option<u32> {
        self.lock().child.as_ref().map(DraftProcess::id)
    }

    /// Number of tokens to ask for now, at most `most`; 0 means not to ask.
    pub fn draft_length(&self, most: usize) -> usize {
        let client = &mut *self.lock();
        let ready = client.is_ready();
        match client.unless_failed(ready) {
            None | Some(false) => 0,
            Some(true) => client.length_policy.lock().next_length(most.min(protocol::MAX_DRAFT)),
        }
    }

    /// Asks the program and appends its draft, if the answer comes in time.
    pub fn request_draft(&self, question: &DraftQuery<'_>, into: &mut Vec<u32>) {
        let client = &mut *self.lock();
        let answered = client.send_request(question);
        into.extend(client.unless_failed(answered).unwrap_or_default());
    }

    /// Policy for the length of its drafts.
    pub fn length_policy(&self) -> SharedLengthPolicy {
        self.lock().length_policy.clone()
    }
}

impl DraftState {
    /// Unwraps a result; on an error, reports it and ends the program.
    fn unless_failed<T>(&mut self, found: Result<T>) -> Option<T> {
        let say = |e: &Error| (self.say)(&format!("{}: {e}; continuing without it", self.name));
        let found = found.inspect_err(say).ok();
        if found.is_none() {
            self.child = None;
        }
        found
    }

    /// Asks a program that [is ready](DraftState::is_ready).
    fn send_request(&mut self, question: &DraftQuery<'_>) -> Result<Vec<u32>> {
        let Some(child) = &self.child else { return Ok(Vec::new()) };
        self.requests += 1;
        let request = build_request(&mut self.held, self.requests, question);
        child.send_line(protocol::to_line(&request));
        self.state = ProgramState::Asked(Instant::now());
        let patience = self.length_policy.lock().max_wait(question.length).min(PATIENCE);
        match self.receive_answer(patience)? {
            // Too late: the text continues without it.
            None => Ok(Vec::new()),
            Some(answer) if answer.tokens.len() > question.length => Err(Error::Other(format!(
                "drafts {} tokens where {} were asked for",
                answer.tokens.len(),
                question.length
            ))),
            Some(answer) => Ok(answer.tokens),
        }
    }

    /// True if it can be asked: it has sent its handshake, and no answer is pending.
    fn is_ready(&mut self) -> Result<bool> {
        match self.state {
            _ if self.child.is_none() => Ok(false),
            ProgramState::Idle => Ok(true),
            ProgramState::Asked(_) => Ok(self.receive_answer(Duration::ZERO)?.is_some()),
            ProgramState::Loading(patience) => {
                let (began, Some(child)) = (Instant::now(), &mut self.child) else { return Ok(false) };
                let line = child.receive_line(patience);
                self.state = ProgramState::Loading(patience.saturating_sub(began.elapsed()));
                let why = |e| Error::Other(format!("{e}; try it alone: `PROGRAM draft`"));
                let Some(line) = line.map_err(why)? else { return Ok(false) };
                self.check_handshake(&line)?;
                self.state = ProgramState::Idle;
                Ok(true)
            }
        }
    }

    /// Checks its handshake.
    fn check_handshake(&self, line: &[u8]) -> Result<()> {
        Err(Error::Other(match protocol::parse_message::<Handshake>(line) {
            Err(_) => "sends no valid handshake; give an antigravity program".into(),
            Ok(Handshake { antigravity_draft: version, .. }) if version != VERSION => format!(
                "uses version {version} of the draft protocol, not {VERSION}; build both from the same source"
            ),
            Ok(Handshake { tokenizer, .. }) if tokenizer != self.tokenizer => {
                "has another tokenizer; give a program for a model with the same tokenizer".into()
            }
            Ok(Handshake { sequences, .. }) if sequences != self.held.len() => {
                format!("keeps {sequences} texts, not {}", self.held.len())
            }
            Ok(_) => return Ok(()),
        }))
    }

    /// Receives the answer to the last request, if it comes in time.
    fn receive_answer(&mut self, patience: Duration) -> Result<Option<DraftAnswer>> {
        let (ProgramState::Asked(since), Some(child)) = (self.state, &mut self.child) else {
            return Ok(None);
        };
        let Some(line) = child.receive_line(patience)? else {
            let silent = since.elapsed();
            if silent > HUNG {
                return Err(Error::Other(format!("has been silent for {} s", silent.as_secs())));
            }
            return Ok(None);
        };
        let answer: DraftAnswer =
            protocol::parse_message(&line).map_err(|e| Error::Other(format!("says what is {e}")))?;
        if answer.id != self.requests {
            return Err(Error::Other("answers a request that was not made".into()));
        }
        if let Some(id) = answer.tokens.iter().find(|&&id| id as usize >= VOCAB) {
            return Err(Error::Other(format!("drafts token {id}; the vocabulary ends at {}", VOCAB - 1)));
        }
        self.state = ProgramState::Idle;
        Ok(Some(answer))
    }
}

/// Builds the request with this id. A new text replaces the least recently used one.
fn build_request(held: &mut [CachedText], id: u64, question: &DraftQuery<'_>) -> DraftRequest {
    let known = held.iter().position(|h| h.owner == question.owner);
    let oldest = || (0..held.len()).min_by_key(|&i| held[i].last).unwrap_or(0);
    let sequence = known.unwrap_or_else(oldest);
    let place = &mut held[sequence];
    let common = place.tokens.iter().zip(question.tokens).take_while(|(a, b)| a == b).count();
    let is_known = place.sampler.as_ref().is_some_and(|s| Arc::ptr_eq(s, question.sampler));
    let news = question.tokens[common..].to_vec();
    place.tokens.truncate(common);
    place.tokens.extend_from_slice(&news);
    place.owner = question.owner;
    place.last = id;
    place.sampler = Some(Arc::clone(question.sampler));
    DraftRequest {
        id,
        sequence,
        keep: common,
        tokens: news,
        draft: question.length,
        least: LEAST,
        sampler: (!is_known).then(|| sendable_settings(question.sampler)),
        random: question.random.cloned(),
    }
}

/// Settings without values that JSON cannot represent or that a draft need not know.
fn sendable_settings(sampler: &SamplerOptions) -> SamplerOptions {
    let mut sampler = sampler.clone();
    for (_, bias) in &mut sampler.logit_bias {
        *bias = bias.max(f32::MIN);
    }
    #[cfg(feature = "grammar")]
    {
        sampler.grammar = None;
    }
    sampler
}
