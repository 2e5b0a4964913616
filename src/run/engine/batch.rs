//! Several prompts at once: on the CPU their tokens are decoded together, so that weights are read once a step.

use super::Engine;
use super::stream::{End, Writer};
use crate::dims::VOCAB;
use crate::model::backend::Logits;
use crate::model::cpu::CpuBatch;
use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions, GenerateOptions};
use crate::run::session::{Session, StopReason, check_logits};
use files::{Error, Result};
use std::collections::VecDeque;
use text::sampler::TokenLogprobs;

/// One prompt of a batch.
#[derive(Debug, Clone)]
pub struct BatchItem {
    /// The prompt.
    pub prompt: String,
    /// What to generate.
    pub options: GenerateOptions,
}

/// What became of one prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchAnswer {
    /// Which one: its place among the items, from 0.
    pub index: usize,
    /// What was generated.
    pub text: String,
    /// Tokens of it, a final end-of-sequence token included.
    pub tokens: usize,
    /// What the model held of each of them, where [`GenerateOptions::logprobs`] asks for it.
    pub logprobs: Vec<TokenLogprobs>,
    /// Why it ended.
    pub stop: StopReason,
}

impl BatchAnswer {
    /// Nothing yet.
    fn new(index: usize) -> Self {
        Self { index, text: String::new(), tokens: 0, logprobs: Vec::new(), stop: StopReason::Length }
    }
}

impl EngineOptions {
    /// How many sequences [`Engine::generate_batch`] decodes at once with these options, [`EngineOptions::batch`] or
    /// one: there the CPU alone runs the model and nothing is evicted.
    pub fn sequences(&self) -> usize {
        match (self.backend, self.eviction.policy) {
            (BackendKind::Cpu, Policy::None) => self.batch.max(1),
            _ => 1,
        }
    }
}

impl Engine {
    /// Completes all prompts, [`EngineOptions::batch`] at once; the answers come in the order in which they are
    /// complete. Each is what its prompt alone gives, bit for bit. A prompt is computed while the others wait; when a
    /// text ends, the next prompt takes its place.
    ///
    /// On other backends than the CPU's, and where slots are evicted, the prompts are completed one after another.
    ///
    /// ```
    /// use antigravity::{BatchItem, Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions { batch: 2, ..EngineOptions::new(antigravity::dims::MODEL_DIR) })?;
    /// let options = |n| GenerateOptions { max_tokens: Some(n), ..Default::default() };
    /// let items = [
    ///     BatchItem { prompt: "Once upon a time".into(), options: options(9) },
    ///     BatchItem { prompt: "Lily".into(), options: options(3) },
    /// ];
    /// let answers = engine.generate_batch(&items)?.collect::<antigravity::Result<Vec<_>>>()?;
    /// // The shorter one is complete first.
    /// assert_eq!(answers.iter().map(|a| (a.index, a.tokens)).collect::<Vec<_>>(), [(1, 3), (0, 9)]);
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Usage` for a prompt that is empty or too long or whose options cannot be followed, with its index, before
    /// anything is computed; `Memory`. What goes wrong with one prompt later comes in place of its answer, with its
    /// index, and the others go on; what goes wrong with the device ends all.
    pub fn generate_batch<'a>(&'a self, items: &'a [BatchItem]) -> Result<Batch<'a>> {
        let mut waiting = VecDeque::with_capacity(items.len());
        for (index, item) in items.iter().enumerate() {
            waiting.push_back((index, self.prompt_of(item).map_err(|e| named(index, e))?));
        }
        let sequences = self.options.sequences().min(items.len());
        let way = match sequences {
            0 | 1 => Way::InTurn(Box::new(self.session()?)),
            n => Way::Together(Box::new(Together {
                batch: self.batch_of(&self.options, n)?,
                seats: (0..n).map(|_| None).collect(),
                rows: Vec::with_capacity(n),
                logits: vec![0.0; n * VOCAB],
            })),
        };
        if let (Way::Together(_), draft @ 1..) = (&way, self.options.draft) {
            (self.options.notice)(&format!("--draft {draft}: off, as prompts are decoded together"));
        }
        Ok(Batch { engine: self, items, waiting, complete: VecDeque::new(), way })
    }

    /// The ids of a prompt that can be completed.
    fn prompt_of(&self, item: &BatchItem) -> Result<Vec<u32>> {
        // Whatever is wrong with the options is said now, not when the turn comes.
        Writer::check(self, &item.options)?;
        let tokens = self.encode(&item.prompt)?;
        let (need, have) = (tokens.len(), self.options.max_seq_len);
        match need {
            0 => Err(Error::Usage("is empty, and this model adds no first token".into())),
            n if n > have && self.options.eviction.policy == Policy::None => Err(Error::Usage(format!(
                "needs {need} positions but the context has {have}; raise --max-seq-len or shorten it"
            ))),
            _ => Ok(tokens),
        }
    }
}

/// The error with the index of its prompt.
fn named(index: usize, e: Error) -> Error {
    let named = |why| format!("prompt {index} (from 0): {why}");
    match e {
        Error::Usage(why) => Error::Usage(named(why)),
        Error::Model(why) => Error::Model(named(why)),
        Error::Other(why) => Error::Other(named(why)),
        e => e,
    }
}

/// Answers that nobody has fetched, and what came in place of one.
type Answers = VecDeque<Result<BatchAnswer>>;

/// The answers to some prompts, as they are complete.
pub struct Batch<'a> {
    engine: &'a Engine,
    items: &'a [BatchItem],
    /// Index and ids of the prompts to come.
    waiting: VecDeque<(usize, Vec<u32>)>,
    complete: Answers,
    way: Way<'a>,
}

enum Way<'a> {
    /// One after another.
    InTurn(Box<Session>),
    Together(Box<Together<'a>>),
}

/// Sequences that are decoded together.
struct Together<'a> {
    batch: CpuBatch,
    /// Who has which sequence.
    seats: Vec<Option<Seat<'a>>>,
    /// The next token of each that goes on: `(sequence, token)`.
    rows: Vec<(usize, u32)>,
    /// `[row][VOCAB]`; a prompt's in the first row.
    logits: Vec<f32>,
}

/// One sequence.
struct Seat<'a> {
    writer: Writer<'a>,
    /// Of the prompt, then those sampled, the last of which may not be computed.
    tokens: Vec<u32>,
    answer: BatchAnswer,
}

impl Seat<'_> {
    /// Samples a token; whether the text goes on. Once a sequence of `capacity` slots has `len` tokens it does not.
    fn sample(&mut self, logits: &[f32], (len, capacity): (usize, usize)) -> Result<bool> {
        check_logits(logits)?;
        if self.writer.is_spent() {
            self.end(End::Flush(StopReason::Length));
            return Ok(false);
        }
        let token = self.writer.sample(logits, &self.tokens)?;
        self.tokens.push(token);
        self.answer.tokens += 1;
        self.answer.logprobs.extend(self.writer.logprobs().cloned());
        let (text, end) = self.writer.push(token, || len == capacity);
        self.answer.text += &text;
        if let Some(end) = end {
            self.end(end);
        }
        Ok(end.is_none())
    }

    fn end(&mut self, end: End) {
        self.answer.stop = match end {
            End::Done(reason) => reason,
            End::Flush(reason) => {
                self.answer.text += &self.writer.finish();
                reason
            }
        };
    }
}

impl<'a> Together<'a> {
    /// Computes a prompt in a free sequence and samples its first token. Where that is all, the answer goes to
    /// `complete`.
    fn begin(
        &mut self,
        sequence: usize,
        mut seat: Seat<'a>,
        capacity: usize,
        complete: &mut Answers,
    ) -> Result<()> {
        self.batch.set_len(sequence, 0);
        self.batch.heed(Some(seat.writer.cancel()));
        let (all, logits) = (seat.tokens.len(), &mut self.logits[..VOCAB]);
        for chunk in seat.tokens.chunks(self.batch.max_tokens()) {
            let done = self.batch.len(sequence);
            seat.writer.progress(done, all);
            let last = done + chunk.len() == all;
            let out = if last { Logits::Last(&mut *logits) } else { Logits::None };
            match self.batch.prefill(sequence, chunk, out) {
                Err(Error::Interrupted) => {
                    seat.end(End::Flush(StopReason::Interrupt));
                    complete.push_back(Ok(seat.answer));
                    return Ok(());
                }
                computed => computed?,
            }
        }
        seat.writer.progress(all, all);
        match seat.sample(logits, (all, capacity)) {
            Ok(true) => self.seats[sequence] = Some(seat),
            Ok(false) => complete.push_back(Ok(seat.answer)),
            Err(e) => complete.push_back(Err(named(seat.answer.index, e))),
        }
        Ok(())
    }

    /// One token of every sequence; answers that are complete go to `complete`.
    fn step(&mut self, complete: &mut Answers, capacity: usize) -> Result<()> {
        let Self { batch, seats, rows, logits } = self;
        rows.clear();
        for (sequence, seat) in seats.iter().enumerate() {
            rows.extend(seat.as_ref().and_then(|s| s.tokens.last()).map(|&token| (sequence, token)));
        }
        // One token of many sequences takes as long as a short prompt.
        batch.heed(seats.iter().flatten().next().map(|s| s.writer.cancel()));
        let logits = &mut logits[..rows.len() * VOCAB];
        match batch.decode(rows, logits) {
            Err(Error::Interrupted) => {
                for seat in seats.iter_mut() {
                    if let Some(mut cut) = seat.take_if(|s| s.writer.cancel().is_cancelled()) {
                        cut.end(End::Flush(StopReason::Interrupt));
                        complete.push_back(Ok(cut.answer));
                    }
                }
                return Ok(());
            }
            computed => computed?,
        }
        for (&(sequence, _), logits) in rows.iter().zip(logits.chunks_exact(VOCAB)) {
            let seat = seats[sequence].as_mut().expect("invariant: rows are of the seats that are taken");
            let ended = match seat.sample(logits, (batch.len(sequence), capacity)) {
                Ok(true) => continue,
                Ok(false) => seats[sequence].take().map(|s| Ok(s.answer)),
                Err(e) => seats[sequence].take().map(|s| Err(named(s.answer.index, e))),
            };
            complete.extend(ended);
        }
        Ok(())
    }
}

impl<'a> Batch<'a> {
    /// The next answer, or what came in its place; outside of it, what ends all.
    fn answer(&mut self) -> Result<Option<Result<BatchAnswer>>> {
        let capacity = self.engine.options.max_seq_len;
        let together = match &mut self.way {
            Way::Together(together) => together,
            Way::InTurn(session) => {
                let Some((index, prompt)) = self.waiting.pop_front() else { return Ok(None) };
                return match in_turn(self.engine, session, (index, &prompt), &self.items[index].options) {
                    Err(e @ (Error::Usage(_) | Error::Model(_) | Error::Other(_))) => {
                        Ok(Some(Err(named(index, e))))
                    }
                    answer => answer.map(|answer| Some(Ok(answer))),
                };
            }
        };
        loop {
            if let Some(answer) = self.complete.pop_front() {
                return Ok(Some(answer));
            }
            let free = together.seats.iter().position(Option::is_none);
            match (free, self.waiting.pop_front()) {
                (Some(sequence), Some((index, tokens))) => {
                    match Writer::new(self.engine, &self.items[index].options) {
                        Ok(writer) => {
                            let seat = Seat { writer, tokens, answer: BatchAnswer::new(index) };
                            together.begin(sequence, seat, capacity, &mut self.complete)?;
                        }
                        Err(e) => self.complete.push_back(Err(named(index, e))),
                    }
                }
                (None, Some(prompt)) => {
                    self.waiting.push_front(prompt);
                    together.step(&mut self.complete, capacity)?;
                }
                (_, None) if together.seats.iter().all(Option::is_none) => return Ok(None),
                (_, None) => together.step(&mut self.complete, capacity)?,
            }
        }
    }
}

/// Completes one prompt in a sequence that others have had.
fn in_turn(
    engine: &Engine,
    session: &mut Session,
    (index, prompt): (usize, &[u32]),
    options: &GenerateOptions,
) -> Result<BatchAnswer> {
    session.clear();
    let mut stream = engine.stream(session, prompt, options)?;
    let mut answer = BatchAnswer::new(index);
    while let Some(piece) = stream.next() {
        answer.text += &piece?;
        answer.logprobs.extend(stream.logprobs().cloned());
    }
    answer.tokens = stream.timing().tokens;
    answer.stop = stream.stop_reason().unwrap_or(StopReason::Interrupt);
    Ok(answer)
}

impl Iterator for Batch<'_> {
    type Item = Result<BatchAnswer>;

    fn next(&mut self) -> Option<Self::Item> {
        self.answer().unwrap_or_else(|e| {
            self.waiting.clear();
            if let Way::Together(together) = &mut self.way {
                together.seats.iter_mut().for_each(|seat| *seat = None);
            }
            Some(Err(e))
        })
    }
}
