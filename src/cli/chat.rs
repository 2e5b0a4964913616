//! `chat`: a conversation with the model's chat template, one input line per turn.

mod commands;
mod files;
mod input;
mod output;

use super::args::{CompletionArgs, EscapeArgs, FlagWarnings, Format, ModelArgs, TemplateArgs, show_settings};
use super::flags::name_flags;
use super::generation_report::{self, Report};
use super::load::{self, LoadedEngine};
use super::signal;
use super::terminal::{Verbosity, put};
use crate::run::engine::{Engine, template_source};
use crate::run::eviction::Policy;
use crate::run::options::GenerateOptions;
use crate::run::plan::Opened;
use crate::run::session::{Session, StopReason};
use ::files::error::{LINE, one_line};
use ::files::{Error, Result, say};
use clap::Args;
use input::{ChatInput, Typed};
use output::GeneratedAnswer;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use text::chat::{Conversation, ConversationState, Message, OutputFormat, Role, Template};
use text::sampler::{Rng, SamplerOptions};

/// A conversation.
#[derive(Args, Clone)]
#[command(mut_arg("num_tokens", |arg| arg.default_value("-1")))]
pub struct ChatArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    /// System prompt of the whole conversation
    #[arg(
        long,
        aliases = ["system-prompt", "sys"],
        value_name = "TEXT",
        allow_hyphen_values = true,
        help_heading = "Prompt"
    )]
    system: Option<String>,
    /// First message; the next ones are lines of stdin. End a line with \ to continue the message, or put it between
    /// """ and """
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, help_heading = "Prompt")]
    prompt: Option<String>,
    #[command(flatten, next_help_heading = "Prompt")]
    escape: EscapeArgs,
    /// Exit after the first answer; -st for short
    #[arg(long, alias = "st", help_heading = "Prompt")]
    single_turn: bool,
    /// Continue the conversation saved in this file, if it exists, and save it there after every answer
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    session: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Template")]
    template: TemplateArgs,
    #[command(flatten, next_help_heading = "Output")]
    completion: CompletionArgs,
    #[command(flatten)]
    model: ModelArgs,
}

pub fn run(args: &ChatArgs) -> Result<()> {
    let output = &args.completion.output;
    output.check_trace()?;
    let mut options = args.completion.resolve(output.format)?;
    text::tokenizer::StopStrings::new(&options.stop)?;
    let variables = args.template.variables()?;
    let opened = Opened::new(&args.model.resolve_for_one()?)?;
    opened.plan.check()?;
    let template = args.template.chosen.template(&template_source(&opened.model))?;
    let LoadedEngine { engine, took, .. } = &load::load(opened, output.verbosity(), &args.warnings)?;
    let template = template.for_tokenizer(engine.tokenizer())?;
    let recommended = engine.recommended_sampling()?;
    options.sampler = args.completion.sampler.recommend(options.sampler, &recommended)?;
    if !options.ignore_eos {
        options.stop_tokens = template.stop_tokens(engine.tokenizer());
    }
    if template == Template::PLAIN && output.verbosity() != Verbosity::Quiet {
        warn_no_template();
    }
    if output.verbosity() == Verbosity::Verbose {
        say!("sampling: {}", show_settings(&options));
    }
    let system = args.system.as_deref().map(|text| args.escape.text(text));
    let conversation = Conversation::new(template, system).with(variables, OutputFormat::default());
    check_tools(&conversation, engine)?;
    signal::connect(&options.cancel);
    let mut chat = Chat {
        args,
        engine,
        random: Rng::new(options.sampler.seed),
        options,
        recommended,
        set: args.completion.clone(),
        session: generation_report::session(engine, output)?,
        conversation,
        input: ChatInput::new(),
        loading: *took,
        asked: Vec::new(),
        results: Vec::new(),
        unanswered: None,
        last: None,
    };
    chat.set_form_of_answers();
    if !chat.is_quiet() {
        let form = chat.conversation.output_format();
        args.template.unused_flags(chat.conversation.template(), form).iter().for_each(|line| say!("{line}"));
    }
    if let Some(file) = &args.session {
        chat.resume(file)?;
    }
    let result = chat.talk();
    generation_report::write_trace(&mut chat.session, output, None)?;
    result
}

/// Warns that a model without a chat template is unlikely to answer.
fn warn_no_template() {
    say!(
        "{} has no chat template, so it is probably a base model, which continues text instead of answering: use \
         generate, an instruct model, or --chat-template",
        crate::dims::MODEL
    );
}

/// Fails if `--tools` is given and the chat template does not show tools to the model.
fn check_tools(conversation: &Conversation, engine: &Engine) -> Result<()> {
    let context = conversation.context(engine.tokenizer());
    let takes = || conversation.template().takes_tools(&context, conversation.system());
    if conversation.variables().tools.is_some() && !takes()? {
        return Err(Error::Usage(
            "--tools: this model's chat template does not support tools; --chat-template selects another"
                .into(),
        ));
    }
    Ok(())
}

/// The action after a line of input.
#[allow(clippy::large_enum_variant, reason = "there is one at a time")]
enum Next {
    Leave,
    Read,
    Ask(Question),
}

/// Messages that get one answer.
struct Question {
    messages: Vec<Message>,
    /// The random state before the question, restored if it is withdrawn.
    random: Rng,
    /// For a retry: the conversation with the previous answer.
    answered: Option<ConversationState>,
}

/// A running conversation.
struct Chat<'a> {
    args: &'a ChatArgs,
    engine: &'a Engine,
    options: GenerateOptions,
    /// Sampling options that the model recommends, used where no flag is given.
    recommended: SamplerOptions,
    /// The flags behind `options`, with the changes of `/set`.
    set: CompletionArgs,
    session: Session,
    conversation: Conversation,
    input: ChatInput,
    loading: Duration,
    /// Random state, carried from answer to answer.
    random: Rng,
    /// [`Question::random`] of the answered questions of this process.
    asked: Vec<Rng>,
    /// Results so far of the functions that the last answer called.
    results: Vec<Message>,
    /// A question without an answer, for `/retry`.
    unanswered: Option<Question>,
    last: Option<Report>,
}

impl Chat<'_> {
    fn is_quiet(&self) -> bool {
        self.args.completion.output.verbosity() == Verbosity::Quiet
    }

    /// Model, context size and device, as one line.
    fn about(&self) -> String {
        let slots = self.engine.options().max_seq_len;
        format!("{}, {slots} tokens of context, {}", crate::dims::MODEL, self.session.device_name())
    }

    /// Runs all turns.
    fn talk(&mut self) -> Result<()> {
        let interactive = self.input.is_interactive();
        if interactive && !self.args.single_turn && !self.is_quiet() {
            say!("{}; /help lists commands, Ctrl-D quits", self.about());
        }
        let mut first = self.args.prompt.as_deref().map(|text| self.args.escape.text(text));
        loop {
            let next = match first.take() {
                Some(text) => Next::Ask(self.question(text)),
                None => self.next()?,
            };
            // Interrupted between two answers: no turn may begin.
            if !interactive && self.options.cancel.is_cancelled() {
                return Err(Error::Interrupted);
            }
            let question = match next {
                Next::Leave => return Ok(()),
                Next::Read => continue,
                Next::Ask(question) => question,
            };
            let reason = self.turn(question)?;
            signal::saved()?;
            if reason == Some(StopReason::Interrupt) && (!interactive || self.args.single_turn) {
                return Err(Error::Interrupted);
            }
            if self.args.single_turn {
                return Ok(());
            }
        }
    }

    /// A message, preceded by any function results.
    fn question(&mut self, text: String) -> Question {
        self.results.push(Message::new(Role::User, text));
        self.question_of_results()
    }

    /// The function results so far, as a question.
    fn question_of_results(&mut self) -> Question {
        let messages = std::mem::take(&mut self.results);
        Question { messages, random: self.random.clone(), answered: None }
    }

    /// Sets the output format of answers, which depends on template, tools and grammar.
    fn set_form_of_answers(&mut self) {
        let (form, shown) = self.form_of_answers();
        self.conversation.set_output_format(form);
        self.options.shown_tokens = shown;
    }

    /// The output format of answers, and the control tokens that belong to their text. With a grammar, answers are
    /// plain text.
    fn form_of_answers(&self) -> (OutputFormat, Vec<u32>) {
        let (grammar, tokenizer) = (&self.args.completion.sampler.grammar, self.engine.tokenizer());
        if grammar.json_schema.is_some() || grammar.grammar.is_some() {
            return (OutputFormat::default(), Vec::new());
        }
        let form = OutputFormat::of(self.conversation.template(), tokenizer);
        let tools = self.conversation.variables().tools.is_some();
        let form = if tools { form } else { form.without_tools() };
        (form, form.shown(tokenizer))
    }

    /// Reads the next message; runs it if it is a command.
    fn next(&mut self) -> Result<Next> {
        let line = match self.input.read_message()? {
            Typed::Line(line) => line,
            Typed::Quoted(text) if text.trim().is_empty() => return Ok(Next::Read),
            Typed::Quoted(text) => return Ok(Next::Ask(self.question(text))),
            Typed::End => return Ok(Next::Leave),
            Typed::Interrupt if self.options.cancel.is_cancelled() => return Err(Error::Interrupted),
            Typed::Interrupt => {
                self.options.cancel.cancel();
                say!("Press Ctrl-C again to quit.");
                return Ok(Next::Read);
            }
        };
        match line.trim_end() {
            "" => Ok(Next::Read),
            command if command.starts_with('/') => self.run_command(command),
            _ => Ok(Next::Ask(self.question(line))),
        }
    }

    /// Answers one question. Returns `None` if it does not fit or cannot be asked, and the conversation continues.
    fn turn(&mut self, question: Question) -> Result<Option<StopReason>> {
        let start = Instant::now();
        self.options.cancel.reset();
        if self.args.session.is_some() {
            signal::will_save();
        }
        self.unanswered = None;
        self.forget_oldest();
        let (goes_on, have) = (self.goes_on(), self.session.extent().slots);
        let can_refuse = !self.evicts() && !self.args.single_turn;
        let tokenizer = self.engine.tokenizer();
        let least = question.messages.iter().map(|m| tokenizer.least_tokens(&m.content)).sum();
        if least > have && can_refuse {
            self.refuse(question, least, have)?;
            return Ok(None);
        }
        let stop = || self.options.cancel.is_cancelled();
        match self.conversation.put_until(tokenizer, &question.messages, &stop) {
            Ok(()) => {}
            Err(Error::Interrupted) => return self.stop_before(question),
            Err(e) if goes_on => return self.say_unanswered(&e, question),
            Err(e) => return Err(e),
        }
        self.protect();
        let need = self.needed_slots();
        if need > have && can_refuse {
            self.conversation.forget_question();
            self.refuse(question, need, have)?;
            return Ok(None);
        }
        let GeneratedAnswer { report, ids, lost } = match self.answer(start) {
            // Too long even with eviction.
            Err(e @ Error::Usage(_)) if goes_on => {
                self.conversation.forget_question();
                return self.say_unanswered(&e, question);
            }
            answered => answered?,
        };
        let then = if ids.is_empty() && report.reason == StopReason::Interrupt {
            self.conversation.forget_question();
            self.withdraw_question(question)
        } else {
            self.conversation.answer(self.engine.tokenizer(), &ids);
            self.asked.push(question.random);
            "Your next message continues from here."
        };
        self.save()?;
        if let Some(lost) = lost {
            return Err(lost);
        }
        self.end_turn(&report, then)?;
        self.last = Some(report);
        Ok(Some(report.reason))
    }

    /// Keeps the system message from being evicted.
    fn protect(&mut self) {
        if self.evicts() {
            // Rendering errors are reported when the question is asked.
            self.session.protect(self.conversation.opening(self.engine.tokenizer()).unwrap_or(0));
        }
    }

    fn evicts(&self) -> bool {
        self.engine.options().eviction.policy != Policy::None
    }

    /// True if the conversation continues after a question that cannot be asked: a user can type another, or there is a
    /// conversation worth saving.
    fn goes_on(&self) -> bool {
        !self.args.single_turn && (self.input.is_interactive() || self.conversation.questions() > 0)
    }

    /// Forgets the turns that were evicted long ago, so that neither memory nor the time per turn grows with the
    /// conversation. The remaining turns must be computed again, so this happens once in many contexts.
    fn forget_oldest(&mut self) {
        const CONTEXTS: usize = 8;
        let slots = self.session.extent().slots;
        if !self.evicts() || self.conversation.ids().len() <= CONTEXTS * slots {
            return;
        }
        // If this fails, the question fails for the same reason and reports it.
        if self.conversation.forget_oldest(self.engine.tokenizer(), slots / 2).is_ok() {
            let left = self.conversation.questions();
            self.asked.drain(..self.asked.len().saturating_sub(left));
            self.note(&format!("older messages were dropped; the last {left} are kept"));
        }
    }

    /// Reports why a question got no answer, and restores the conversation before it.
    fn say_unanswered(&mut self, why: &Error, question: Question) -> Result<Option<StopReason>> {
        let why = one_line(&name_flags(&why.to_string()), LINE - 100);
        if !self.input.is_interactive() {
            self.put_unanswered(json!({"t": "unanswered", "why": why}))?;
        }
        say!("{why}. {} /save FILE and /reset still work.", self.withdraw_question(question));
        Ok(None)
    }

    /// Withdraws a question after Ctrl-C during its tokenization.
    fn stop_before(&mut self, question: Question) -> Result<Option<StopReason>> {
        let then = self.withdraw_question(question);
        self.put_unanswered(json!({"t": "unanswered", "why": "interrupted"}))?;
        if !self.args.single_turn && !self.is_quiet() {
            self.say_interrupt(then);
        }
        Ok(Some(StopReason::Interrupt))
    }

    /// Prints how the conversation continues after an interrupt.
    fn say_interrupt(&self, then: &str) {
        if self.input.is_interactive() {
            say!("Stopped. {then} Press Ctrl-C again to quit.");
        }
    }

    /// Withdraws a question that needs more context than there is, and reports it.
    fn refuse(&mut self, question: Question, need: usize, have: usize) -> Result<()> {
        self.withdraw_question(question);
        self.put_unanswered(json!({"t": "unanswered", "needed": need, "slots": have}))?;
        say_context_full(need, have, ", then /retry sends the message");
        Ok(())
    }

    /// Ends the output of a question that got no answer.
    fn put_unanswered(&self, line: Value) -> Result<()> {
        match self.args.completion.output.format {
            Format::Text => put("\n"),
            Format::Jsonl => put(&format!("{line}\n")),
        }
    }

    /// Restores the state before a question that got no answer and is no longer in the conversation. Returns a sentence
    /// that describes it.
    fn withdraw_question(&mut self, question: Question) -> &'static str {
        match question.answered {
            Some(answered) => {
                self.conversation.resume(answered);
                self.asked.push(question.random);
                "The previous answer stays."
            }
            None => {
                self.unanswered = Some(question);
                "The message was withdrawn; /retry sends it again."
            }
        }
    }

    /// Prints the end of a turn; `then` is a sentence about how the conversation continues after an interrupt.
    fn end_turn(&self, report: &Report, then: &str) -> Result<()> {
        let output = &self.args.completion.output;
        match output.format {
            Format::Text => put("\n")?,
            Format::Jsonl => put(&report.json(&self.session))?,
        }
        if output.verbosity() == Verbosity::Verbose || (self.args.single_turn && !self.is_quiet()) {
            report.say(&self.session);
            self.args.completion.sampler.say_drawn_seed(&self.options.sampler);
        }
        if self.args.single_turn || self.is_quiet() {
            return Ok(());
        }
        match report.reason {
            StopReason::Context => {
                let have = self.session.extent().slots;
                say_context_full(have, have, "");
            }
            StopReason::Interrupt => self.say_interrupt(then),
            _ if !self.conversation.calls().is_empty() => self.note("answer a call with /tool NAME TEXT"),
            _ => {}
        }
        Ok(())
    }

    /// Number of leading tokens that the cache and the conversation share.
    fn common(&self) -> usize {
        self.session.tokens().iter().zip(self.conversation.ids()).take_while(|(a, b)| a == b).count()
    }

    /// Number of cache slots that the conversation needs.
    fn needed_slots(&self) -> usize {
        let (all, held) = (self.conversation.ids().len(), self.session.tokens().len());
        if self.common() == held { self.session.slots() + all - held } else { all }
    }
}

/// Reports a full context and the remedies; `then` is added after the commands that free room.
fn say_context_full(need: usize, have: usize, then: &str) {
    say!(
        "The context is full ({need} of {have} tokens). /undo or /reset frees room{then}. To keep everything: /save FILE, \
         then start again with --session FILE and a larger -c or an --eviction-policy."
    );
}
