//! A draft model: another antigravity program, specialised for a smaller model with the same tokenizer, that guesses the
//! next tokens of a text, which the large model then computes in one pass (speculative decoding, arXiv 2211.17192). Both
//! choose with the same sampler settings and the same random numbers, so that a text that is drawn is guessed too; what is
//! chosen is the large model's choice alone. The program is not believed: whatever it says or does costs time only,
//! and that not for long.

mod child;
mod economy;
pub mod protocol;

pub use child::Setting;

use crate::dims::VOCAB;
use child::Child;
use economy::Economy;
pub use economy::PassTime;
use files::error::unquoted;
use files::{Error, Result};
use protocol::{Answer, Hello, Request, VERSION};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use text::sampler::{Rng, SamplerOptions};

/// How long is waited for a program that loads its model, in all: usually it was ready first.
const START: Duration = Duration::from_secs(2);
/// How long is waited for one answer at most. One that comes later is no draft any more.
const PATIENCE: Duration = Duration::from_millis(500);
/// A program that is silent for so long is ended.
const HUNG: Duration = Duration::from_secs(20);
/// The least probability, in the smaller model's eyes, of a draft that is worth being computed. On six stories, 0.4 gave
/// 3.3 to 3.9 tokens a pass and 70 to 77 % of the drafted tokens were chosen, 0.6 gave 3.0 to 3.4 and 78 to 89 %. Looking at
/// each token by itself, 0.6 gave 3.1 to 3.6 and 76 to 86 %.
const LEAST: f32 = 0.6;
/// Most of its threads: a small model has little work for more.
const THREADS: usize = 2;

/// Another antigravity program that drafts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DraftProgram {
    /// Its file, or its name where the system looks for programs.
    pub program: PathBuf,
    /// When it does.
    pub when: DraftWhen,
}

/// When a draft model drafts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DraftWhen {
    /// As many tokens as make the text come fastest by the times and guesses so far, and none while it is faster without.
    #[default]
    Pays,
    /// As many as there may be in every draft.
    Always,
}

/// The program while it runs, which the sequences of an engine share.
#[derive(Clone)]
pub struct DraftModel(Arc<Mutex<Client>>);

/// What a sequence asks for.
pub struct Question<'a> {
    /// Which sequence it is: see [`DraftModel::owner`].
    pub owner: u64,
    /// The text so far.
    pub tokens: &'a [u32],
    /// Most tokens to guess.
    pub length: usize,
    /// How the text's tokens are chosen.
    pub sampler: &'a Arc<SamplerOptions>,
    /// The random numbers of the next tokens, where they are known.
    pub random: Option<&'a Rng>,
}

/// Where a line for the user goes.
type Say = Box<dyn Fn(&str) + Send>;

struct Client {
    /// The program in messages.
    name: String,
    when: DraftWhen,
    say: Say,
    /// `None` once it is of no use.
    child: Option<Child>,
    /// What the ids mean here.
    tokenizer: u32,
    state: State,
    /// What the program holds of each text.
    held: Vec<Held>,
    /// Numbers that were given out: of sequences, of requests.
    owners: u64,
    requests: u64,
    economy: Economy,
}

/// What the program is doing.
#[derive(Clone, Copy)]
enum State {
    /// It loads its model; so much of [`START`] is left.
    Loading(Duration),
    Idle,
    /// It has been asked at this time.
    Asked(Instant),
}

/// A text that the program holds.
#[derive(Default)]
struct Held {
    owner: u64,
    tokens: Vec<u32>,
    sampler: Option<Arc<SamplerOptions>>,
    /// The request that it was last needed for.
    last: u64,
}

impl DraftModel {
    /// Starts a program. `tokenizer` is the [digest](text::tokenizer::Pieces::digest) that its own must have; what becomes of
    /// the program later is told to `say`, in a line.
    ///
    /// # Errors
    ///
    /// `Usage` for a program that cannot be started.
    pub fn start(
        draft: &DraftProgram,
        tokenizer: u32,
        setting: Setting,
        say: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        let name = format!("`EngineOptions::draft_model` {}", unquoted(&draft.program.to_string_lossy()));
        let setting = Setting { threads: setting.threads.clamp(1, THREADS), ..setting };
        let child = Child::start(&draft.program, setting).map_err(|e| {
            Error::Usage(format!("{name}: cannot be started: {e}; give another antigravity program"))
        })?;
        let mut held = Vec::new();
        held.resize_with(setting.sequences, Held::default);
        Ok(Self(Arc::new(Mutex::new(Client {
            name,
            when: draft.when,
            say: Box::new(say),
            child: Some(child),
            tokenizer,
            state: State::Loading(START),
            held,
            owners: 0,
            requests: 0,
            economy: Economy::new(),
        }))))
    }

    fn lock(&self) -> MutexGuard<'_, Client> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for a sequence.
    pub fn owner(&self) -> u64 {
        let mut client = self.lock();
        client.owners += 1;
        client.owners
    }

    /// The number of the program's process, while it is of use.
    pub fn process(&self) -> Option<u32> {
        self.lock().child.as_ref().map(Child::id)
    }

    /// How many tokens to ask for now, at most `most`; 0 is not to ask.
    pub fn length(&self, most: usize) -> usize {
        let client = &mut *self.lock();
        let ready = client.is_ready();
        match (client.unless_failed(ready), client.when) {
            (None | Some(false), _) => 0,
            (_, DraftWhen::Always) => most.min(protocol::MOST),
            (_, DraftWhen::Pays) => client.economy.length(most.min(protocol::MOST)),
        }
    }

    /// Appends the tokens that the program expects, if it says so in time.
    pub fn ask(&self, question: &Question<'_>, into: &mut Vec<u32>) {
        let client = &mut *self.lock();
        let answered = client.ask(question);
        into.extend(client.unless_failed(answered).unwrap_or_default());
    }

    /// A pass without drafts took so long.
    pub fn plain(&self, time: PassTime) {
        self.lock().economy.plain(time);
    }

    /// Of so many tokens that the program gave, so many were chosen; that took so long, asking included, where that is
    /// known.
    pub fn drafted(&self, accepted: usize, drafted: usize, time: Option<PassTime>) {
        self.lock().economy.drafted(accepted, drafted, time);
    }
}

impl Client {
    /// What was found, unless the program is of no use: then it is ended, and that is said.
    fn unless_failed<T>(&mut self, found: Result<T>) -> Option<T> {
        let say = |e: &Error| (self.say)(&format!("{}: {e}; going on without it", self.name));
        let found = found.inspect_err(say).ok();
        if found.is_none() {
            self.child = None;
        }
        found
    }

    /// Asks a program that [is ready](Client::is_ready).
    fn ask(&mut self, question: &Question<'_>) -> Result<Vec<u32>> {
        let Some(child) = &self.child else { return Ok(Vec::new()) };
        self.requests += 1;
        let request = request(&mut self.held, self.requests, question);
        child.send(protocol::line(&request));
        self.state = State::Asked(Instant::now());
        let patience = match self.when {
            DraftWhen::Always => PATIENCE,
            DraftWhen::Pays => self.economy.patience(question.length).min(PATIENCE),
        };
        match self.answer(patience)? {
            // Of a text that has gone on without it.
            None => Ok(Vec::new()),
            Some(answer) if answer.tokens.len() > question.length => Err(Error::Other(format!(
                "drafts {} tokens where {} were asked for",
                answer.tokens.len(),
                question.length
            ))),
            Some(answer) => Ok(answer.tokens),
        }
    }

    /// Whether it can be asked: it has said hello, and nothing is left to be answered.
    fn is_ready(&mut self) -> Result<bool> {
        match self.state {
            _ if self.child.is_none() => Ok(false),
            State::Idle => Ok(true),
            State::Asked(_) => Ok(self.answer(Duration::ZERO)?.is_some()),
            State::Loading(patience) => {
                let (began, Some(child)) = (Instant::now(), &mut self.child) else { return Ok(false) };
                let line = child.receive(patience);
                self.state = State::Loading(patience.saturating_sub(began.elapsed()));
                let why = |e| Error::Other(format!("{e}; try it alone: `PROGRAM draft`"));
                let Some(line) = line.map_err(why)? else { return Ok(false) };
                self.greeted(&line)?;
                self.state = State::Idle;
                Ok(true)
            }
        }
    }

    /// Checks what it says of itself.
    fn greeted(&self, line: &[u8]) -> Result<()> {
        let wrong = |what: String| Err(Error::Other(what));
        let Ok(hello) = protocol::parse::<Hello>(line) else {
            return wrong("does not greet as a draft does; give an antigravity program".into());
        };
        match hello {
            Hello { antigravity_draft: VERSION, tokenizer, .. } if tokenizer != self.tokenizer => {
                wrong("has another tokenizer; give a program for a model with this one's".into())
            }
            Hello { antigravity_draft: VERSION, sequences, .. } if sequences != self.held.len() => {
                wrong(format!("keeps {sequences} texts, not {}", self.held.len()))
            }
            Hello { antigravity_draft: VERSION, .. } => Ok(()),
            Hello { antigravity_draft: version, .. } => wrong(format!(
                "speaks version {version} of drafts, not {VERSION}; build both from one source"
            )),
        }
    }

    /// The answer to the last request, if it comes in time.
    fn answer(&mut self, patience: Duration) -> Result<Option<Answer>> {
        let (State::Asked(since), Some(child)) = (self.state, &mut self.child) else { return Ok(None) };
        let Some(line) = child.receive(patience)? else {
            let silent = since.elapsed();
            return match silent > HUNG {
                true => Err(Error::Other(format!("has been silent for {} s", silent.as_secs()))),
                false => Ok(None),
            };
        };
        let answer: Answer = protocol::parse(&line).map_err(|e| Error::Other(format!("says what is {e}")))?;
        if answer.id != self.requests {
            return Err(Error::Other("answers what nobody asked".into()));
        }
        if let Some(id) = answer.tokens.iter().find(|&&id| id as usize >= VOCAB) {
            return Err(Error::Other(format!("drafts token {id}; the vocabulary ends at {}", VOCAB - 1)));
        }
        self.state = State::Idle;
        Ok(Some(answer))
    }
}

/// The request with this number, whose text takes the place of the one that was not needed for the longest time.
fn request(held: &mut [Held], id: u64, question: &Question<'_>) -> Request {
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
    Request {
        id,
        sequence,
        keep: common,
        tokens: news,
        draft: question.length,
        least: LEAST,
        sampler: (!is_known).then(|| sendable(question.sampler)),
        random: question.random.cloned(),
    }
}

/// Settings without what JSON has no number for, or what a draft need not know.
fn sendable(sampler: &SamplerOptions) -> SamplerOptions {
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
