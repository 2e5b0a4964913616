//! `chat`: a conversation in the model's own form, one line a turn.

use super::answer::{Report, show};
use super::args::{Format, ModelArgs, OutputArgs, SamplerArgs, token_limit};
use super::events;
use super::signal;
use super::start::{self, Voice};
use super::terminal::{Progress, prompt_progress, put};
use crate::chat::{Conversation, Template};
use crate::engine::{Engine, GenerateOptions};
use crate::error::{Error, Result};
use crate::kv::eviction::Policy;
use crate::plan::{self, Plan};
use crate::sampler::Rng;
use crate::saved::{self, Content, State};
use crate::session::{Session, StopReason};
use crate::trace::Recorder;
use crate::weights::ModelPath;
use clap::Args;
use std::io::{BufRead, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

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

const HELP: &str = "\
/help   this list
/reset  forget the conversation
/stats  times of the last answer
/exit   leave, as /quit and Ctrl-D do";

/// Longest line read as a message.
const LINE_LIMIT: u64 = 16 << 20;

pub(super) fn run(args: &ChatArgs) -> Result<()> {
    let mut options = GenerateOptions {
        max_tokens: token_limit(args.num_tokens)?,
        sampler: args.sampler.resolve()?,
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        progress: if args.output.quiet { |_, _| {} } else { prompt_progress },
        ..GenerateOptions::default()
    };
    crate::tokenizer::StopStrings::new(&options.stop)?;
    let settings = plan::settle(args.model.resolve()?)?;
    let began = Instant::now();
    let progress = Progress::new("loading tensor", args.output.quiet);
    let template = Template::load(&ModelPath::new(&settings.model)?.dir)?;
    let _marker = start::model(&Plan::new(&settings)?, &args.model.cores.mask, Voice::of(args.output.quiet))?;
    let engine = Engine::load_with(settings, &|done, all| progress.show(done, all))?;
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
    let conversation = Conversation::new(template, args.system.clone());
    let mut chat =
        Chat { args, engine: &engine, options, session, conversation, loading, rng: None, last: None };
    if let Some(file) = &args.session {
        chat.resume(file)?;
    }
    let result = chat.talk();
    if let (Some(file), Some(recorder)) = (&args.output.trace, chat.session.record(None)) {
        recorder.write_chrome(file)?;
    }
    result
}

/// What a line of input asks for.
enum Line {
    End,
    Nothing,
    Message(String),
}

struct Chat<'a> {
    args: &'a ChatArgs,
    engine: &'a Engine,
    options: GenerateOptions,
    session: Session,
    conversation: Conversation,
    loading: Duration,
    /// Goes on from answer to answer.
    rng: Option<Rng>,
    last: Option<Report>,
}

impl Chat<'_> {
    /// Goes on with the conversation in `file`, if it exists.
    fn resume(&mut self, file: &Path) -> Result<()> {
        let Some(state) = saved::load(file, &mut self.session, self.engine)? else { return Ok(()) };
        let refuse = |why: &str| Err(Error::Usage(format!("--session {}: {why}", file.display())));
        self.rng = state.random(self.args.sampler.seed, &mut self.options.sampler);
        let Content::Chat(mut saved) = state.content else {
            return refuse(
                "holds a text, not a conversation; go on with it in generate, or give another file",
            );
        };
        let template = self.conversation.template().name();
        if saved.template != template {
            let theirs = saved.template.escape_debug();
            return Err(Error::model(
                file,
                format!(
                    "was saved with a {theirs} chat template, and this model's is {template}; use that one"
                ),
            ));
        }
        let system = self.conversation.system();
        if saved.ids.is_empty() {
            saved.system = system.map(str::to_owned).or(saved.system);
        } else if system.is_some() && system != saved.system.as_deref() {
            return refuse("was saved with another --system; leave --system out, or give another file");
        }
        if std::io::stdin().is_terminal() && !self.args.output.quiet {
            eprintln!("going on after {} tokens; /reset begins anew", saved.ids.len());
        }
        self.conversation.resume(saved);
        Ok(())
    }

    /// Saves the conversation where that was asked for.
    fn save(&mut self) -> Result<()> {
        let Some(file) = &self.args.session else { return Ok(()) };
        let seed = self.options.sampler.seed;
        let rng = self.rng.clone().unwrap_or_else(|| Rng::new(seed));
        let state = State { seed, rng, content: Content::Chat(self.conversation.state()) };
        saved::save(file, &mut self.session, self.engine, state)
    }

    /// All turns.
    fn talk(&mut self) -> Result<()> {
        let interactive = std::io::stdin().is_terminal();
        if interactive && !self.args.single_turn && !self.args.output.quiet {
            eprintln!("/help lists commands, Ctrl-D leaves");
        }
        let mut first = self.args.prompt.clone();
        loop {
            let line = match first.take() {
                Some(message) => Line::Message(message),
                None => self.line(interactive)?,
            };
            let message = match line {
                Line::End => return Ok(()),
                Line::Nothing => continue,
                Line::Message(message) => message,
            };
            let reason = self.turn(&message)?;
            if reason == Some(StopReason::Interrupt) && (!interactive || self.args.single_turn) {
                return Err(Error::Interrupted);
            }
            if self.args.single_turn {
                return Ok(());
            }
        }
    }

    /// The next line of stdin; commands are carried out.
    fn line(&mut self, interactive: bool) -> Result<Line> {
        if interactive {
            eprint!("> ");
        }
        let mut bytes = Vec::new();
        let stdin = std::io::stdin().lock();
        stdin
            .take(LINE_LIMIT + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|e| Error::Usage(format!("message from stdin: {e}")))?;
        if bytes.len() as u64 > LINE_LIMIT {
            return Err(Error::Usage("message from stdin: a line longer than 16 MiB".into()));
        }
        if bytes.is_empty() {
            if interactive {
                eprintln!();
            }
            return Ok(Line::End);
        }
        let text = String::from_utf8(bytes).map_err(|e| {
            let at = e.utf8_error().valid_up_to();
            Error::Usage(format!("message from stdin: byte {at} of the line is not UTF-8; convert the text"))
        })?;
        let text = text.trim_end_matches(['\n', '\r']);
        match text.trim_end() {
            "" => {}
            "/exit" | "/quit" => return Ok(Line::End),
            "/help" => eprintln!("{HELP}"),
            "/reset" => {
                self.conversation.reset();
                self.session.clear();
                self.last = None;
                self.save()?;
            }
            "/stats" => self.say_stats(),
            other if other.starts_with('/') => {
                let word = other.split_whitespace().next().unwrap_or(other);
                eprintln!("{word}: no such command; /help lists them");
            }
            _ => return Ok(Line::Message(text.into())),
        }
        Ok(Line::Nothing)
    }

    fn say_stats(&self) {
        match &self.last {
            Some(report) => report.say(&self.session),
            None => eprintln!("no answer yet"),
        }
        let (used, all) = (self.session.backend().len(), self.session.backend().capacity());
        eprintln!("context: {used} of {all} tokens");
    }

    /// One question and its answer; `None` where the question did not fit.
    fn turn(&mut self, message: &str) -> Result<Option<StopReason>> {
        let start = Instant::now();
        self.options.cancel.reset();
        self.conversation.ask(self.engine.tokenizer(), message)?;
        let (need, have) = (self.conversation.ids().len(), self.session.backend().capacity());
        let evicts = self.engine.options().eviction.policy != Policy::None;
        if need > have && !evicts && !self.args.single_turn {
            self.conversation.forget_question();
            if self.args.output.format == Format::Text {
                put("\n")?;
            }
            self.say_full(&format!("the message needs {need} of {have} tokens"));
            return Ok(None);
        }
        let (report, answer) = self.answer(start)?;
        if answer.is_empty() && report.reason == StopReason::Interrupt {
            self.conversation.forget_question();
        } else {
            self.conversation.answer(&answer);
        }
        self.save()?;
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
        if report.reason == StopReason::Context && !self.args.single_turn {
            self.say_full(&format!("all {have} tokens are used"));
        }
        self.last = Some(report);
        Ok(Some(report.reason))
    }

    fn say_full(&self, what: &str) {
        if !self.args.output.quiet {
            eprintln!("stop: context; {what}; /reset begins anew, --max-seq-len makes room");
        }
    }

    /// Generates; returns the ids that belong to the answer.
    fn answer(&mut self, start: Instant) -> Result<(Report, Vec<u32>)> {
        let engine = self.engine;
        let mut stream =
            engine.stream(&mut self.session, self.conversation.ids(), &self.options)?.since(start);
        if let Some(rng) = self.rng.take() {
            stream.sampler_mut().set_rng(rng);
        }
        let (mut ids, mut shown) = (Vec::new(), 0);
        show(&mut stream, self.args.output.format, |id, piece| {
            ids.extend(id);
            shown += piece.len();
        })?;
        self.rng = Some(stream.sampler_mut().rng().clone());
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
