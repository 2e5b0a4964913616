//! `chat`: a conversation in the model's own form, one line a turn.

mod command;
mod files;
mod input;

use super::answer::{Report, show};
use super::args::{Format, ModelArgs, OutputArgs, SamplerArgs, token_limit};
use super::events;
use super::signal;
use super::start::{self, Voice};
use super::terminal::{Progress, prompt_progress, put};
use crate::model::trace::Recorder;
use crate::model::weights::ModelPath;
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use crate::run::options::GenerateOptions;
use crate::run::plan::{self, Plan};
use crate::run::session::{Session, StopReason};
use ::files::{Error, Result};
use clap::Args;
use command::Next;
use input::{Input, Typed};
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use text::chat::{Conversation, ConversationState, Template};
use text::sampler::Rng;

/// A conversation.
#[derive(Args, Clone)]
pub(super) struct ChatArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub sampler: SamplerArgs,
    /// System message, in force for the whole conversation
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// First message; the next ones are lines of stdin
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// End after the first answer; -st for short
    #[arg(long)]
    pub single_turn: bool,
    /// Most tokens of one answer; -1 until its end or the end of the context
    #[arg(
        short,
        long,
        visible_alias = "predict",
        default_value_t = -1,
        value_name = "N",
        allow_negative_numbers = true
    )]
    pub num_tokens: i64,
    /// Text that ends an answer; may be given more than once
    #[arg(short = 'r', long = "stop", value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on past the end of an answer
    #[arg(long)]
    pub ignore_eos: bool,
    #[command(flatten)]
    pub output: OutputArgs,
    /// Go on with the conversation in this file, if it exists, and save it there after every answer
    #[arg(long, value_name = "FILE")]
    pub session: Option<PathBuf>,
}

pub(super) fn run(args: &ChatArgs) -> Result<()> {
    let mut options = GenerateOptions {
        max_tokens: token_limit(args.num_tokens)?,
        sampler: args.sampler.resolve()?,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        logprobs: args.output.logprobs(args.output.is_jsonl())?,
        progress: if args.output.quiet { |_, _| {} } else { prompt_progress },
        ..GenerateOptions::default()
    };
    text::tokenizer::StopStrings::new(&options.stop)?;
    let settings = plan::settle(args.model.resolve()?)?;
    let began = Instant::now();
    let progress = Progress::new("loading tensor", args.output.quiet);
    let template = Template::load(&ModelPath::new(&settings.model)?.weights)?;
    let _marker = start::model(&Plan::new(&settings)?, &args.model.cores.mask, Voice::of(args.output.quiet))?;
    let engine = Engine::load_with(settings, &|done, all| progress.show(done, all))?;
    let template = template.for_tokenizer(engine.tokenizer())?;
    if !args.ignore_eos {
        options.stop_tokens = template.stop_tokens(engine.tokenizer());
    }
    if template == Template::Plain && !args.output.quiet {
        eprintln!(
            "this model has no chat template: messages are plain text, and -n or --stop ends an answer"
        );
    }
    let loading = began.elapsed();
    signal::connect(&options.cancel);
    let mut session = engine.session()?;
    events::watch(&mut session, &args.output);
    if args.output.trace.is_some() {
        session.record(Some(Recorder::default()));
    }
    let mut chat = Chat {
        args,
        engine: &engine,
        random: Rng::new(options.sampler.seed),
        options,
        session,
        conversation: Conversation::new(template, args.system.clone()),
        input: Input::new(),
        loading,
        asked: Vec::new(),
        unanswered: None,
        last: None,
    };
    if let Some(file) = &args.session {
        chat.resume(file)?;
    }
    let result = chat.talk();
    if let (Some(file), Some(recorder)) = (&args.output.trace, chat.session.record(None)) {
        recorder.write_chrome(file)?;
    }
    result
}

/// Something to be answered.
struct Question {
    text: String,
    /// The random numbers before it was asked, for when it is taken back.
    random: Rng,
    /// The conversation with the answer that it has, where it is asked once more.
    answered: Option<ConversationState>,
}

struct Chat<'a> {
    args: &'a ChatArgs,
    engine: &'a Engine,
    options: GenerateOptions,
    session: Session,
    conversation: Conversation,
    input: Input,
    loading: Duration,
    /// Goes on from answer to answer.
    random: Rng,
    /// [`Question::random`] of the last questions: those that this process has asked.
    asked: Vec<Rng>,
    /// What `/retry` asks before anything else.
    unanswered: Option<Question>,
    last: Option<Report>,
}

impl Chat<'_> {
    /// All turns.
    fn talk(&mut self) -> Result<()> {
        let interactive = self.input.is_interactive();
        if interactive && !self.args.single_turn && !self.args.output.quiet {
            eprintln!("/help lists commands, Ctrl-D leaves");
        }
        let mut first = self.args.prompt.clone();
        loop {
            let next = match first.take() {
                Some(text) => Next::Ask(self.question(text)),
                None => self.next()?,
            };
            // Between two answers: no turn may begin.
            if !interactive && self.options.cancel.is_cancelled() {
                return Err(Error::Interrupted);
            }
            let question = match next {
                Next::Leave => return Ok(()),
                Next::Read => continue,
                Next::Ask(question) => question,
            };
            let reason = self.turn(question)?;
            if reason == Some(StopReason::Interrupt) && (!interactive || self.args.single_turn) {
                return Err(Error::Interrupted);
            }
            if self.args.single_turn {
                return Ok(());
            }
        }
    }

    fn question(&self, text: String) -> Question {
        Question { text, random: self.random.clone(), answered: None }
    }

    /// What the next line asks for; commands are carried out.
    fn next(&mut self) -> Result<Next> {
        let line = match self.input.line()? {
            Typed::Line(line) => line,
            Typed::End => return Ok(Next::Leave),
            Typed::Interrupt if self.options.cancel.is_cancelled() => return Err(Error::Interrupted),
            Typed::Interrupt => {
                self.options.cancel.cancel();
                eprintln!("Ctrl-C again leaves");
                return Ok(Next::Read);
            }
        };
        match line.trim_end() {
            "" => Ok(Next::Read),
            command if command.starts_with('/') => self.obey(command),
            _ => Ok(Next::Ask(self.question(line))),
        }
    }

    /// One question and its answer; `None` where the question did not fit, or is refused at a terminal.
    fn turn(&mut self, question: Question) -> Result<Option<StopReason>> {
        let start = Instant::now();
        self.options.cancel.reset();
        self.unanswered = None;
        match self.conversation.ask(self.engine.tokenizer(), &question.text) {
            Err(e) if self.input.is_interactive() && !self.args.single_turn => {
                eprintln!("{e}; {}", self.take_back(question));
                return Ok(None);
            }
            asked => asked?,
        }
        let (need, have) = (self.needed_slots(), self.session.backend().capacity());
        let evicts = self.engine.options().eviction.policy != Policy::None;
        if need > have && !evicts && !self.args.single_turn {
            self.conversation.forget_question();
            self.take_back(question);
            match self.args.output.format {
                Format::Text => put("\n")?,
                Format::Jsonl => {
                    put(&format!("{}\n", json!({"t": "unanswered", "needed": need, "slots": have})))?
                }
            }
            eprintln!(
                "{}",
                full(&format!("the message needs {need} of {have} slots"), ", then /retry asks it")
            );
            return Ok(None);
        }
        let (report, answer) = self.answer(start)?;
        let then = if answer.is_empty() && report.reason == StopReason::Interrupt {
            self.conversation.forget_question();
            self.take_back(question)
        } else {
            self.conversation.answer(self.engine.tokenizer(), &answer);
            self.asked.push(question.random);
            "the next message goes on from here"
        };
        self.save()?;
        self.end_turn(&report, then)?;
        self.last = Some(report);
        Ok(Some(report.reason))
    }

    /// Makes of a question that has got no answer, and is not in the conversation, what it was before it was asked;
    /// says which.
    fn take_back(&mut self, question: Question) -> &'static str {
        match question.answered {
            Some(answered) => {
                self.conversation.resume(answered);
                self.asked.push(question.random);
                "the answer before it stays"
            }
            None => {
                self.unanswered = Some(question);
                "the message was taken back, /retry asks it"
            }
        }
    }

    /// Says what belongs after an answer; `then`, how the conversation stands after an interrupt.
    fn end_turn(&self, report: &Report, then: &str) -> Result<()> {
        let output = &self.args.output;
        match output.format {
            Format::Text => put("\n")?,
            Format::Jsonl => put(&report.json(&self.session))?,
        }
        if output.verbose || (self.args.single_turn && !output.quiet) {
            report.say(&self.session);
            if self.args.sampler.seed.is_none() && self.options.sampler.temperature != 0.0 {
                eprintln!("seed: {}", self.options.sampler.seed);
            }
        }
        if self.args.single_turn || output.quiet {
            return Ok(());
        }
        match report.reason {
            StopReason::Context => {
                let have = self.session.backend().capacity();
                eprintln!("{}", full(&format!("all {have} slots are used"), ""));
            }
            StopReason::Interrupt if self.input.is_interactive() => {
                eprintln!("stop: interrupt; {then}; Ctrl-C again leaves");
            }
            _ => {}
        }
        Ok(())
    }

    /// How many first tokens the cache and the conversation share.
    fn common(&self) -> usize {
        self.session.tokens().iter().zip(self.conversation.ids()).take_while(|(a, b)| a == b).count()
    }

    /// The slots that the conversation fills with what the cache has of it.
    fn needed_slots(&self) -> usize {
        let (all, held) = (self.conversation.ids().len(), self.session.tokens().len());
        if self.common() == held { self.session.slots() + all - held } else { all }
    }

    /// Generates; returns the ids that belong to the answer.
    fn answer(&mut self, start: Instant) -> Result<(Report, Vec<u32>)> {
        let engine = self.engine;
        let mut stream =
            engine.stream(&mut self.session, self.conversation.ids(), &self.options)?.since(start);
        stream.sampler_mut().set_rng(self.random.clone());
        let (mut ids, mut shown) = (Vec::new(), 0);
        show(&mut stream, self.args.output.format, |id, piece| {
            ids.extend(id);
            shown += piece.len();
        })?;
        self.random = stream.sampler_mut().rng().clone();
        let reason = stream.stop_reason().unwrap_or(StopReason::Interrupt);
        let report = Report {
            timing: stream.timing(),
            reason,
            loading: self.loading,
            seed: self.options.sampler.seed,
        };
        match reason {
            // The next turn brings its own.
            StopReason::Eos => {
                ids.pop();
            }
            // A stop string is not part of the answer.
            StopReason::Stop => {
                while engine.tokenizer().decode(&ids).len() > shown {
                    ids.pop();
                }
            }
            StopReason::Length | StopReason::Context | StopReason::Interrupt => {}
        }
        Ok((report, ids))
    }
}

/// What to do about a full cache.
fn full(what: &str, then: &str) -> String {
    format!(
        "stop: context; {what}; /undo or /reset makes room{then}; /save FILE, then chat --session FILE with an \
         --eviction-policy or a larger --max-seq-len, goes on with all of it"
    )
}
