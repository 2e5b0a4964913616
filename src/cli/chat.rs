//! `chat`: a conversation with the model's chat template, one input line per turn.

mod commands;
mod context;
mod input;
mod message;
mod output;
mod session_file;

use super::args::{
    CONVERSATION_CONTEXT_HELP, CompletionArgs, EscapeArgs, FlagWarnings, Format, ModelArgs, TemplateArgs,
    format_settings,
};
use super::flags::name_flags;
use super::generation_report::{self, GenerationReport};
use super::load::{self, LoadedEngine};
use super::signal;
use super::terminal::{Style, Verbosity, style_text, write_stdout};
use crate::run::engine::{Engine, template_source};
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::plan::OpenedModel;
use crate::run::session::{Session, StopReason};
use ::files::error::{MAX_LINE_BYTES, one_line};
use ::files::{Error, Result, print_stderr};
use clap::Args;
use context::{ContextWarning, say_context_full};
use input::{ChatInput, UserInput};
use output::GeneratedAnswer;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use text::chat::{Conversation, ConversationState, Message, OutputFormat, Role, Template};
use text::sampler::{Rng, SamplerOptions};

/// A conversation.
#[derive(Args, Clone)]
#[command(mut_arg("num_tokens", |arg| arg.default_value("-1")))]
#[command(mut_arg("max_seq_len", |arg| arg.help(CONVERSATION_CONTEXT_HELP)))]
pub struct ChatArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    /// Message to answer before the program ends, as with --single-turn; quotes are not needed
    #[arg(value_name = "MESSAGE", conflicts_with = "prompt", help_heading = "Prompt")]
    message: Vec<String>,
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
    let args = &args.with_message()?;
    let output = &args.completion.output;
    output.check_trace()?;
    let mut options = args.completion.resolve_options(output.format)?;
    text::tokenizer::StopStrings::new(&options.stop)?;
    let variables = args.template.parse_variables()?;
    let settings = args.model.resolve_for_one_text()?;
    let opened = open_model(args, &settings)?;
    let template = args.template.chosen.load_template(&template_source(&opened.model))?;
    signal::watch_signals()?;
    let input = ChatInput::new();
    #[cfg(feature = "line-editor")]
    let typing = input.hold_typing();
    let LoadedEngine { engine, load_time: took, .. } =
        &load::load_engine(opened, output.verbosity(), &args.warnings)?;
    let template = template.for_tokenizer(engine.tokenizer())?;
    let recommended = engine.recommended_sampling()?;
    options.sampler = args.completion.sampler.with_recommended(options.sampler, &recommended)?;
    if !options.ignore_eos {
        options.stop_tokens = template.stop_tokens(engine.tokenizer());
    }
    if template == Template::PLAIN && output.verbosity() != Verbosity::Quiet {
        warn_no_template();
    }
    if output.verbosity() == Verbosity::Verbose {
        print_stderr!("sampling: {}", format_settings(&options));
    }
    let system = args.system.as_deref().map(|text| args.escape.unescape_text(text));
    let conversation = Conversation::new(template, system).with_format(variables, OutputFormat::default());
    check_tools(&conversation, engine)?;
    signal::connect_cancel(&options.cancel);
    let mut chat = Chat {
        args,
        engine,
        rng: Rng::new(options.sampler.seed),
        options,
        recommended,
        current_flags: args.completion.clone(),
        session: generation_report::open_session(engine, output)?,
        conversation,
        input,
        load_time: *took,
        rng_history: Vec::new(),
        tool_results: Vec::new(),
        unanswered: None,
        last_report: None,
        context_warning: ContextWarning::Due,
    };
    #[cfg(feature = "line-editor")]
    drop(typing);
    chat.prepare_turns()?;
    let result = chat.run_turns();
    generation_report::write_trace(&mut chat.session, output, None)?;
    load::continue_compiling(engine, &settings, args.model.given_path());
    result
}

/// Opens the model, with a context that fits.
fn open_model(args: &ChatArgs, settings: &EngineOptions) -> Result<OpenedModel> {
    let mut opened = OpenedModel::new(&args.model.with_conversation_context(settings.clone()))?;
    args.model.fit_default_context(&mut opened.plan);
    opened.plan.check()?;
    Ok(opened)
}

/// Warns that a model without a chat template is unlikely to answer.
fn warn_no_template() {
    print_stderr!(
        "{} has no chat template, so it is probably a base model, which continues text instead of answering: use \
         generate, an instruct model, or --chat-template",
        crate::dims::MODEL
    );
}

/// Fails if `--tools` is given and the chat template does not show tools to the model.
fn check_tools(conversation: &Conversation, engine: &Engine) -> Result<()> {
    let context = conversation.render_context(engine.tokenizer());
    let takes = || conversation.template().takes_tools(&context, conversation.system_message());
    if conversation.template_kwargs().tools.is_some() && !takes()? {
        return Err(Error::Usage(
            "--tools: this model's chat template does not support tools; --chat-template selects another"
                .into(),
        ));
    }
    Ok(())
}

/// The action after a line of input.
#[allow(clippy::large_enum_variant, reason = "there is one at a time")]
enum NextAction {
    Leave,
    Read,
    Ask(Question),
}

/// Messages that get one answer.
struct Question {
    messages: Vec<Message>,
    /// The random state before the question, restored if it is withdrawn.
    rng: Rng,
    /// For a retry: the conversation with the previous answer.
    previous_state: Option<ConversationState>,
}

/// A running conversation.
struct Chat<'a> {
    args: &'a ChatArgs,
    engine: &'a Engine,
    options: GenerateOptions,
    /// Sampling options that the model recommends, used where no flag is given.
    recommended: SamplerOptions,
    /// The flags behind `options`, with the changes of `/set`.
    current_flags: CompletionArgs,
    session: Session,
    conversation: Conversation,
    input: ChatInput,
    load_time: Duration,
    /// Random state, carried from answer to answer.
    rng: Rng,
    /// [`Question::rng`] of the answered questions of this process.
    rng_history: Vec<Rng>,
    /// Results so far of the functions that the last answer called.
    tool_results: Vec<Message>,
    /// A question without an answer, for `/retry`.
    unanswered: Option<Question>,
    last_report: Option<GenerationReport>,
    context_warning: ContextWarning,
}

impl Chat<'_> {
    fn is_quiet(&self) -> bool {
        self.args.completion.output.verbosity() == Verbosity::Quiet
    }

    /// Warns of flags of the template that have no effect.
    fn warn_unused_flags(&self) {
        let (template, form) = (self.conversation.template(), self.conversation.output_format());
        if !self.is_quiet() {
            self.args
                .template
                .warn_unused_flags(template, form)
                .iter()
                .for_each(|line| print_stderr!("{line}"));
        }
    }

    /// Chooses the output format, warns about flags without effect, and resumes the session of `--session`.
    fn prepare_turns(&mut self) -> Result<()> {
        self.update_output_format();
        self.warn_unused_flags();
        self.args.session.as_ref().map_or(Ok(()), |file| self.resume_session(file))
    }

    /// Runs all turns.
    fn run_turns(&mut self) -> Result<()> {
        let interactive = self.input.is_interactive();
        if interactive && !self.args.single_turn && !self.is_quiet() {
            print_stderr!("{}", self.describe_setup());
            print_stderr!("{}", style_text(Style::Dim, "/help lists commands, Ctrl-D quits"));
        }
        let mut first = self.args.prompt.as_deref().map(|text| self.args.escape.unescape_text(text));
        loop {
            let next = match first.take() {
                Some(text) => NextAction::Ask(self.make_question(text)),
                None => self.next_action()?,
            };
            // Interrupted between two answers: no turn may begin.
            if !interactive && self.options.cancel.is_cancelled() {
                return Err(Error::Interrupted);
            }
            let question = match next {
                NextAction::Leave => return Ok(()),
                NextAction::Read => continue,
                NextAction::Ask(question) => question,
            };
            let reason = self.run_turn(question)?;
            signal::mark_saved()?;
            if reason == Some(StopReason::Interrupt) && (!interactive || self.args.single_turn) {
                return Err(Error::Interrupted);
            }
            if self.args.single_turn {
                return Ok(());
            }
            if reason == Some(StopReason::Interrupt) {
                self.input.drop_typed_lines();
            }
        }
    }

    /// A message, preceded by any function results.
    fn make_question(&mut self, text: String) -> Question {
        self.tool_results.push(Message::new(Role::User, text));
        self.question_from_results()
    }

    /// The function results so far, as a question.
    fn question_from_results(&mut self) -> Question {
        let messages = std::mem::take(&mut self.tool_results);
        Question { messages, rng: self.rng.clone(), previous_state: None }
    }

    /// Sets the output format of answers, which depends on template, tools and grammar.
    fn update_output_format(&mut self) {
        let (form, shown) = self.choose_output_format();
        self.conversation.set_output_format(form);
        self.options.shown_tokens = shown;
    }

    /// The output format of answers, and the control tokens that belong to their text. With a grammar, answers are
    /// plain text.
    fn choose_output_format(&self) -> (OutputFormat, Vec<u32>) {
        let (grammar, tokenizer) = (&self.args.completion.sampler.grammar, self.engine.tokenizer());
        if grammar.json_schema.is_some() || grammar.grammar.is_some() {
            return (OutputFormat::default(), Vec::new());
        }
        let form = OutputFormat::for_template(self.conversation.template(), tokenizer);
        let tools = self.conversation.template_kwargs().tools.is_some();
        let form = if tools { form } else { form.without_tools() };
        (form, form.marker_token_ids(tokenizer))
    }

    /// Reads the next message; runs it if it is a command.
    fn next_action(&mut self) -> Result<NextAction> {
        let again = self.options.cancel.is_cancelled();
        let input = self.input.read_message(&self.options.cancel)?;
        if self.input.is_interactive() && !matches!(input, UserInput::Interrupt) {
            self.options.cancel.reset();
        }
        let line = match input {
            UserInput::Line(line) => line,
            UserInput::Quoted(text) if text.trim().is_empty() => return Ok(NextAction::Read),
            UserInput::Quoted(text) => return Ok(NextAction::Ask(self.make_question(text))),
            UserInput::EndOfInput => return Ok(NextAction::Leave),
            UserInput::Dropped => return Ok(NextAction::Read),
            UserInput::Interrupt if again => return Err(Error::Interrupted),
            UserInput::Interrupt => {
                self.options.cancel.cancel();
                print_stderr!("Press Ctrl-C again to quit; /exit and Ctrl-D quit too.");
                return Ok(NextAction::Read);
            }
        };
        match line.trim_end() {
            "" => Ok(NextAction::Read),
            command if command.starts_with('/') => self.run_command(command),
            _ => Ok(NextAction::Ask(self.make_question(line))),
        }
    }

    /// Answers one question. Returns `None` if it does not fit or cannot be asked, and the conversation continues.
    fn run_turn(&mut self, question: Question) -> Result<Option<StopReason>> {
        let start = Instant::now();
        self.options.cancel.reset();
        if self.args.session.is_some() {
            signal::expect_save();
        }
        self.unanswered = None;
        self.forget_oldest();
        let (goes_on, have) = (self.can_continue(), self.session.extent().slots);
        let can_refuse = !self.has_eviction() && !self.args.single_turn;
        let tokenizer = self.engine.tokenizer();
        let least = question.messages.iter().map(|m| tokenizer.min_tokens(&m.content)).sum();
        if least > have && can_refuse {
            self.refuse_question(question, least, have)?;
            return Ok(None);
        }
        let stop = || self.options.cancel.is_cancelled();
        match self.conversation.add_messages_until(tokenizer, &question.messages, &stop) {
            Ok(()) => {}
            Err(Error::Interrupted) => return self.withdraw_interrupted(question),
            Err(e) if goes_on => return self.report_unanswered(&e, question),
            Err(e) => return Err(e),
        }
        self.protect_system_prompt();
        let need = self.needed_slots();
        if need > have && can_refuse {
            self.conversation.pop_question();
            self.refuse_question(question, need, have)?;
            return Ok(None);
        }
        let GeneratedAnswer { report, ids, write_error: lost } = match self.generate_answer(start) {
            // Too long even with eviction.
            Err(e @ Error::Usage(_)) if goes_on => {
                self.conversation.pop_question();
                return self.report_unanswered(&e, question);
            }
            answered => answered?,
        };
        let then = if ids.is_empty() && report.reason == StopReason::Interrupt {
            self.conversation.pop_question();
            self.withdraw_question(question)
        } else {
            self.conversation.add_answer(self.engine.tokenizer(), &ids);
            self.rng_history.push(question.rng);
            "Your next message continues from here."
        };
        self.save_session()?;
        if let Some(lost) = lost {
            return Err(lost);
        }
        self.end_turn(&report, then)?;
        self.warn_of_context();
        self.last_report = Some(report);
        Ok(Some(report.reason))
    }

    /// True if the conversation continues after a question that cannot be asked: a user can type another, or there is a
    /// conversation worth saving.
    fn can_continue(&self) -> bool {
        !self.args.single_turn && (self.input.is_interactive() || self.conversation.count_questions() > 0)
    }

    /// Reports why a question got no answer, and restores the conversation before it.
    fn report_unanswered(&mut self, why: &Error, question: Question) -> Result<Option<StopReason>> {
        let why = one_line(&name_flags(&why.to_string()), MAX_LINE_BYTES - 100);
        if !self.input.is_interactive() {
            self.print_unanswered(json!({"t": "unanswered", "why": why}))?;
        }
        print_stderr!("{why}. {} /save FILE and /reset still work.", self.withdraw_question(question));
        Ok(None)
    }

    /// Withdraws a question after Ctrl-C during its tokenization.
    fn withdraw_interrupted(&mut self, question: Question) -> Result<Option<StopReason>> {
        let then = self.withdraw_question(question);
        self.print_unanswered(json!({"t": "unanswered", "why": "interrupted"}))?;
        if !self.args.single_turn && !self.is_quiet() {
            self.say_interrupt(then);
        }
        Ok(Some(StopReason::Interrupt))
    }

    /// Prints how the conversation continues after an interrupt.
    fn say_interrupt(&self, then: &str) {
        if self.input.is_interactive() {
            print_stderr!("Stopped. {then} Press Ctrl-C again to quit.");
        }
    }

    /// Withdraws a question that needs more context than there is, and reports it.
    fn refuse_question(&mut self, question: Question, need: usize, have: usize) -> Result<()> {
        self.withdraw_question(question);
        self.print_unanswered(json!({"t": "unanswered", "needed": need, "slots": have}))?;
        say_context_full(need, have, "; /retry then sends the message");
        Ok(())
    }

    /// Ends the output of a question that got no answer.
    fn print_unanswered(&self, line: Value) -> Result<()> {
        match self.args.completion.output.format {
            Format::Text => write_stdout("\n"),
            Format::Jsonl => write_stdout(&format!("{line}\n")),
        }
    }

    /// Restores the state before a question that got no answer and is no longer in the conversation. Returns a sentence
    /// that describes it.
    fn withdraw_question(&mut self, question: Question) -> &'static str {
        match question.previous_state {
            Some(answered) => {
                self.conversation.restore_state(answered);
                self.rng_history.push(question.rng);
                "The previous answer stays."
            }
            None => {
                self.unanswered = Some(question);
                "The message was withdrawn; /retry sends it again."
            }
        }
    }

    /// Prints the end of a turn; `then` is a sentence about how the conversation continues after an interrupt.
    fn end_turn(&self, report: &GenerationReport, then: &str) -> Result<()> {
        let output = &self.args.completion.output;
        match output.format {
            Format::Text => write_stdout("\n")?,
            Format::Jsonl => write_stdout(&report.stats_line(&self.session))?,
        }
        if output.verbosity() == Verbosity::Verbose || (self.args.single_turn && !self.is_quiet()) {
            report.print_stats(&self.session);
            self.args.completion.sampler.print_random_seed(&self.options.sampler);
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
            _ if !self.conversation.last_tool_calls().is_empty() => {
                self.print_note("answer a call with /tool NAME TEXT")
            }
            _ => {}
        }
        Ok(())
    }
}
