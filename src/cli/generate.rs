//! `generate`: streams one completion.

use super::args::{Format, GenerateArgs};
use super::generation_report::{self, Report, show};
use super::load::{self, LoadedEngine};
use super::prompts;
use super::signal;
use super::terminal::{Verbosity, end_line, put, show_prompt};
use crate::run::engine::Engine;
use crate::run::generate::stream::{ResumePoint, TokenStream};
use crate::run::options::GenerateOptions;
use crate::run::plan::Opened;
use crate::run::saved::{self, Content, State};
use crate::run::session::{CancelToken, Session, StopReason};
use files::{Error, Result, say};
use std::path::Path;
use std::time::{Duration, Instant};
use text::tokenizer::{AddSpecial, Specials};

const DEFAULT_PROMPT: &str = "Hello, world! I am a";

pub fn run(args: &GenerateArgs) -> Result<()> {
    if let Some(file) = &args.prompts.prompts {
        return prompts::run(file, args);
    }
    if args.session.is_some() {
        let why = "cannot be used with --session, because a grammar must cover the text from its start";
        args.completion.sampler.grammar.refuse(why)?;
    }
    let output = &args.completion.output;
    output.check_trace()?;
    let options = args.options(output.format)?;
    let settings = args.model.resolve_for_one()?;
    let mut warnings = args.warnings.clone();
    if args.prompts.batch.is_some() && output.verbosity() != Verbosity::Quiet {
        warnings.add("--batch", "no effect without --prompts");
    }
    let prompt = args.prompt.read()?;
    let opened = Opened::new(&settings)?;
    let LoadedEngine { engine, took, .. } = &load::load(opened, output.verbosity(), &warnings)?;
    if output.verbosity() == Verbosity::Verbose {
        say_engine(engine);
    }
    signal::connect(&options.cancel);
    complete(args, engine, prompt.as_deref(), options, *took)
}

/// Completes the prompt, or continues the saved text.
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
    let mut session = generation_report::session(engine, output)?;
    let state = match &args.session {
        Some(file) => saved::load(file, &mut session, engine)?,
        None => None,
    };
    let rng = state.as_ref().and_then(|state| state.random(sampler.seed(), &mut options.sampler));
    let text =
        prompt.map(|prompt| PromptText { text: prompt, specials: options.specials, cancel: &options.cancel });
    let (tokens, pause) = sequence(engine, &session, paused(args, state)?, text)?;
    let prompt =
        prompt.or((session.tokens().is_empty() && pause.tokens.is_empty()).then_some(DEFAULT_PROMPT));
    if let (Format::Text, Some(prompt)) = (output.format, prompt) {
        show_prompt(prompt, output.verbosity());
    }
    let mut stream = engine.stream(&mut session, &tokens, &options)?.since(start);
    if args.session.is_some() {
        stream = stream.resume(pause.unshown.as_ref());
    }
    if let Some(rng) = rng {
        stream.sampler_mut().set_rng(rng);
    }
    let shown = stream_text(&mut stream, output.format);
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
    generation_report::write_trace(&mut session, output, Some(report.reason))?;
    if output.format == Format::Jsonl {
        put(&report.json(&session))?;
    }
    if output.verbosity() != Verbosity::Quiet {
        report.say(&session);
        sampler.say_drawn_seed(&options.sampler);
    }
    if report.reason == StopReason::Interrupt { Err(Error::Interrupted) } else { Ok(()) }
}

/// Streams the text and a final newline to stdout, even on error. Returns the write error, if any.
fn stream_text(stream: &mut TokenStream<'_>, format: Format) -> Result<Option<Error>> {
    let mut empty = true;
    let shown = show(stream, format, |piece| empty &= piece.is_empty());
    match (format, &shown) {
        (Format::Jsonl, _) | (_, Ok(Some(_))) => shown,
        _ if empty => {
            end_line();
            shown
        }
        _ => match put("\n") {
            Err(lost) => shown.map(|_| Some(lost)),
            Ok(()) => shown,
        },
    }
}

/// The point at which the saved text ended.
fn paused(args: &GenerateArgs, state: Option<State>) -> Result<ResumePoint> {
    let file = args.session.as_deref().unwrap_or(Path::new(""));
    match state.map(|state| state.content) {
        None => Ok(ResumePoint::default()),
        Some(Content::Text(pause)) => Ok(pause),
        Some(Content::Chat(_)) => Err(Error::Usage(format!(
            "--session {}: holds a conversation; continue it with chat, or use another file",
            file.display()
        ))),
    }
}

/// A prompt to encode.
#[derive(Clone, Copy)]
struct PromptText<'a> {
    text: &'a str,
    specials: Specials,
    cancel: &'a CancelToken,
}

impl PromptText<'_> {
    /// Encodes it as the start of a text. Fails if it cannot fit.
    fn first(self, engine: &Engine) -> Result<Vec<u32>> {
        engine.encode_until(self.text, self.specials, self.cancel)
    }

    /// Encodes it as the continuation of a text.
    fn next(self, engine: &Engine) -> Result<Vec<u32>> {
        let stop = || self.cancel.is_cancelled();
        engine.tokenizer().encode_until(self.text, self.specials, AddSpecial::No, &stop)
    }
}

/// The token ids to continue, and where the saved text ended if there is no new prompt. A prompt that starts with the
/// session's text extends it, and only the new part is computed; any other prompt is appended.
fn sequence(
    engine: &Engine,
    session: &Session,
    pause: ResumePoint,
    prompt: Option<PromptText<'_>>,
) -> Result<(Vec<u32>, ResumePoint)> {
    let (tokenizer, held) = (engine.tokenizer(), [session.tokens(), &pause.tokens].concat());
    let tokens = match prompt {
        None if held.is_empty() => engine.encode(DEFAULT_PROMPT)?,
        Some(prompt) if held.is_empty() => prompt.first(engine)?,
        None | Some(PromptText { text: "", .. }) => return Ok((held, pause)),
        Some(prompt) => {
            let whole = prompt.first(engine)?;
            let (text, all) = (tokenizer.decode_with_special(&held), tokenizer.decode_with_special(&whole));
            match all.strip_prefix(&text) {
                _ if whole.starts_with(&held) => whole,
                // The same text in other ids: the common first ids are not computed again.
                Some(_) if !session.has_evicted() => whole,
                Some(text) => [held, PromptText { text, ..prompt }.next(engine)?].concat(),
                None => [held, prompt.next(engine)?].concat(),
            }
        }
    };
    if tokens.is_empty() {
        return Err(Error::Usage(
            "the prompt is empty and this model adds no first token; use --prompt".into(),
        ));
    }
    Ok((tokens, ResumePoint::default()))
}

/// Prints model, weights, cache and threads on stderr.
fn say_engine(engine: &Engine) {
    let o = engine.options();
    say!(
        "model {} from {}, weights {}, KV cache {} x {} tokens, {} threads",
        crate::dims::MODEL,
        o.model.display(),
        o.weight_type,
        o.kv_types,
        o.max_seq_len,
        o.threads
    );
}
