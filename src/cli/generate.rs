//! `generate`: one completion, streamed.

use super::answer::{self, Report, show};
use super::args::{CompletionArgs, Format, ModelArgs, PromptArgs, PromptsArgs};
use super::prompts;
use super::signal;
use super::start::{self, Loaded};
use super::terminal::{Verbosity, end_line, put};
use crate::run::engine::{Engine, Pause};
use crate::run::options::GenerateOptions;
use crate::run::plan::Opened;
use crate::run::saved::{self, Content, State};
use crate::run::session::{Session, StopReason};
use clap::Args;
use files::{Error, Result, say};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use text::tokenizer::{AddSpecial, Tokenizer};

const DEFAULT_PROMPT: &str = "Hello, world! I am a";

/// A completion.
#[derive(Args, Clone)]
pub(super) struct GenerateArgs {
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    prompts: PromptsArgs,
    /// Continue the text in this file, if it exists, and save it there at the end. A prompt that begins with the saved
    /// text continues it; any other prompt is appended. Random numbers continue too, unless --seed changes
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    #[command(flatten)]
    completion: CompletionArgs,
    #[command(flatten)]
    model: ModelArgs,
}

pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    if let Some(file) = &args.prompts.prompts {
        return prompts::run(file, args.prompts.batch, &args.completion, &args.model);
    }
    if args.session.is_some() {
        let why = "--session: a grammar begins with its text; leave one of them out";
        args.completion.sampler.grammar.refuse(why)?;
    }
    let output = &args.completion.output;
    output.check_trace()?;
    let options = args.completion.resolve(output.format)?;
    let settings = args.model.resolve()?;
    let prompt = args.prompt.read()?;
    let opened = Opened::new(&settings)?;
    let Loaded { engine, took, .. } = &start::load(opened, &args.model.cores.mask, output.verbosity())?;
    if output.verbosity() == Verbosity::Verbose {
        say_engine(engine);
    }
    signal::connect(&options.cancel);
    complete(args, engine, prompt.as_deref(), options, *took)
}

/// Completes the prompt, or goes on with the saved text.
fn complete(
    args: &GenerateArgs,
    engine: &Engine,
    prompt: Option<&str>,
    mut options: GenerateOptions,
    loading: Duration,
) -> Result<()> {
    let (sampler, output) = (&args.completion.sampler, &args.completion.output);
    let start = Instant::now();
    if args.session.is_some() {
        signal::will_save();
    }
    let mut session = answer::session(engine, output)?;
    let state = match &args.session {
        Some(file) => saved::load(file, &mut session, engine)?,
        None => None,
    };
    let rng = state.as_ref().and_then(|state| state.random(sampler.seed, &mut options.sampler));
    let encode = |text: &str| engine.encode_until(text, &options.cancel);
    let (tokens, pause) = sequence(engine.tokenizer(), &session, paused(args, state)?, prompt, &encode)?;
    let mut stream = engine.stream(&mut session, &tokens, &options)?.since(start);
    if args.session.is_some() {
        stream = stream.resume(pause.unshown.as_ref());
    }
    if let Some(rng) = rng {
        stream.sampler_mut().set_rng(rng);
    }
    let shown = show(&mut stream, output.format, |_, _| {});
    let report = Report::new(&stream, loading, options.sampler.seed);
    let state = State {
        seed: options.sampler.seed,
        rng: stream.sampler_mut().rng().clone(),
        content: Content::Text(stream.pause()),
    };
    drop(stream);
    let lost = shown?;

    if let Some(file) = &args.session {
        saved::save(file, &mut session, engine, state)?;
        signal::saved()?;
    }
    if let Some(lost) = lost {
        return Err(lost);
    }
    answer::write_trace(&mut session, output, Some(report.reason))?;
    match output.format {
        Format::Jsonl => put(&report.json(&session))?,
        Format::Text => end_line(),
    }
    if output.verbosity() != Verbosity::Quiet {
        report.say(&session);
        sampler.say_drawn_seed(&options.sampler);
    }
    if report.reason == StopReason::Interrupt { Err(Error::Interrupted) } else { Ok(()) }
}

/// Where the text of a session was cut.
fn paused(args: &GenerateArgs, state: Option<State>) -> Result<Pause> {
    let file = args.session.as_deref().unwrap_or(Path::new(""));
    match state.map(|state| state.content) {
        None => Ok(Pause::default()),
        Some(Content::Text(pause)) => Ok(pause),
        Some(Content::Chat(_)) => Err(Error::Usage(format!(
            "--session {}: holds a conversation; go on with it in chat, or give another file",
            file.display()
        ))),
    }
}

/// The ids to go on from, and the end of their text that was not shown yet. A prompt that begins with the session's
/// text continues it, and only its new part is computed; any other prompt is appended.
fn sequence(
    tokenizer: &Tokenizer,
    session: &Session,
    pause: Pause,
    prompt: Option<&str>,
    encode: &dyn Fn(&str) -> Result<Vec<u32>>,
) -> Result<(Vec<u32>, Pause)> {
    let held = [session.tokens(), &pause.tokens].concat();
    let tokens = match prompt {
        prompt if held.is_empty() => encode(prompt.unwrap_or(DEFAULT_PROMPT))?,
        None | Some("") => return Ok((held, pause)),
        Some(prompt) => {
            let whole = encode(prompt)?;
            let (text, all) = (tokenizer.decode_with_special(&held), tokenizer.decode_with_special(&whole));
            match all.strip_prefix(&text) {
                _ if whole.starts_with(&held) => whole,
                // The same text in other ids: those that agree are not computed again.
                Some(_) if !session.has_evicted() => whole,
                Some(rest) => [held, tokenizer.encode(rest, AddSpecial::No)?].concat(),
                None => [held, tokenizer.encode(prompt, AddSpecial::No)?].concat(),
            }
        }
    };
    if tokens.is_empty() {
        return Err(Error::Usage(
            "the prompt is empty and this model adds no first token; give a --prompt".into(),
        ));
    }
    Ok((tokens, Pause::default()))
}

/// What runs, on stderr.
fn say_engine(engine: &Engine) {
    let o = engine.options();
    say!(
        "model {} from {}, weights {}, KV {} x {} slots, {} threads",
        crate::dims::MODEL,
        o.model.display(),
        o.weight_type,
        o.kv_types,
        o.max_seq_len,
        o.threads
    );
}
