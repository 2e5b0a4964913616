//! `generate`: streams one completion.

use super::args::{Format, GenerateArgs};
use super::generation_report::{self, GenerationReport, print_stream};
use super::load::{self, LoadedEngine};
use super::prompts;
use super::signal;
use super::terminal::{Style, Verbosity, end_line, shown_prompt, style_text, write_stdout};
#[cfg(feature = "chat")]
use super::word_wrap::WordWrap;
use crate::run::engine::Engine;
use crate::run::generate::stream::{ResumePoint, TokenStream};
use crate::run::options::GenerateOptions;
use crate::run::plan::OpenedModel;
use crate::run::saved::{self, SavedContent, SavedState};
use crate::run::session::{CancelToken, Session, StopReason};
use files::stderr::write_stderr;
use files::{Error, Result, print_stderr};
use std::path::Path;
use std::time::{Duration, Instant};
use text::tokenizer::{AddSpecial, SpecialText};

const DEFAULT_PROMPT: &str = "Hello, world! I am a";

pub fn run(args: &GenerateArgs) -> Result<()> {
    if let Some(file) = &args.prompts.prompts {
        return prompts::run(file, args);
    }
    if args.session.is_some() {
        let why = "cannot be used with --session, because a grammar must cover the text from its start";
        args.completion.sampler.grammar.fail_if_given(why)?;
    }
    let output = &args.completion.output;
    output.check_trace()?;
    let options = args.resolve_options(output.format)?;
    let settings = args.model.resolve_for_one_text()?;
    let mut warnings = args.warnings.clone();
    if args.prompts.batch.is_some() && output.verbosity() != Verbosity::Quiet {
        warnings.add_warning("--batch", "no effect without --prompts");
    }
    let prompt = args.prompt.read_prompt()?;
    let mut opened = OpenedModel::new(&settings)?;
    // With a session, a part of the prompt may be computed already.
    if let (Some(prompt), None) = (&prompt, &args.session) {
        Engine::check_prompt(&mut opened, prompt, options.specials)?;
    }
    let LoadedEngine { engine, load_time: took, .. } =
        &load::load_engine(opened, output.verbosity(), &warnings)?;
    if output.verbosity() == Verbosity::Verbose {
        print_engine(engine);
    }
    signal::connect_cancel(&options.cancel);
    let result = complete_prompt(args, engine, prompt.as_deref(), options, *took);
    load::continue_compiling(engine, &settings, args.model.given_path());
    result
}

/// Completes the prompt, or continues the saved text.
fn complete_prompt(
    args: &GenerateArgs,
    engine: &Engine,
    prompt: Option<&str>,
    mut options: GenerateOptions,
    loading: Duration,
) -> Result<()> {
    let (sampler, output) = (&args.completion.sampler, &args.completion.output);
    let start = Instant::now();
    if args.session.is_some() {
        signal::expect_save();
    }
    let mut session = generation_report::open_session(engine, output)?;
    let state = match &args.session {
        Some(file) => saved::load_session(file, &mut session, engine)?,
        None => None,
    };
    let rng = state.as_ref().and_then(|state| state.resume_rng(sampler.parse_seed(), &mut options.sampler));
    let text =
        prompt.map(|prompt| PromptText { text: prompt, specials: options.specials, cancel: &options.cancel });
    let (tokens, pause) = build_sequence(engine, &session, resume_point(args, state)?, text)?;
    let prompt =
        prompt.or((session.tokens().is_empty() && pause.tokens.is_empty()).then_some(DEFAULT_PROMPT));
    let mut render = text_renderer();
    if output.format == Format::Text {
        show_prompt(prompt, output.verbosity(), &mut render);
    }
    let mut stream = engine.stream(&mut session, &tokens, &options)?.timed_from(start);
    if args.session.is_some() {
        stream = stream.resume_from(pause.unshown.as_ref());
    }
    if let Some(rng) = rng {
        stream.sampler_mut().set_rng(rng);
    }
    let shown = stream_text(&mut stream, output.format, &mut render);
    let report = GenerationReport::new(&stream, loading, options.sampler.seed);
    let state = SavedState {
        seed: options.sampler.seed,
        rng: stream.sampler_mut().rng().clone(),
        content: SavedContent::Text(stream.resume_point()),
    };
    drop(stream);

    // A text whose rows are lost with a device is saved as tokens.
    if let (Some(file), Ok(_) | Err(Error::Device(_))) = (&args.session, &shown) {
        saved::save_session(file, &mut session, engine, state)?;
        signal::mark_saved()?;
    }
    if let Some(lost) = shown? {
        return Err(lost);
    }
    generation_report::write_trace(&mut session, output, Some(report.reason))?;
    if output.format == Format::Jsonl {
        write_stdout(&report.stats_line(&session))?;
    }
    if output.verbosity() != Verbosity::Quiet {
        report.print_stats(&session);
        sampler.print_random_seed(&options.sampler);
    }
    if report.reason == StopReason::Interrupt { Err(Error::Interrupted) } else { Ok(()) }
}

/// Shows the prompt before the text, dimmed, if both go to a terminal.
fn show_prompt(prompt: Option<&str>, verbosity: Verbosity, render: &mut dyn FnMut(&str) -> String) {
    if let Some(shown) = prompt.and_then(|prompt| shown_prompt(prompt, verbosity)) {
        write_stderr(format_args!("{}", style_text(Style::Dim, &render(&shown))));
    }
}

/// A function that wraps the pieces of a text, if stdout is a terminal.
fn text_renderer() -> impl FnMut(&str) -> String {
    #[cfg(feature = "chat")]
    let mut wrap = WordWrap::for_stdout();
    #[cfg(feature = "chat")]
    return move |piece: &str| wrap.wrap_piece(piece);
    #[cfg(not(feature = "chat"))]
    str::to_owned
}

/// Streams the text, as it is rendered, and a final newline to stdout, even on error. Returns the write error, if any.
fn stream_text(
    stream: &mut TokenStream<'_>,
    format: Format,
    render: &mut dyn FnMut(&str) -> String,
) -> Result<Option<Error>> {
    let mut empty = true;
    let shown = print_stream(stream, format, |piece| {
        empty &= piece.is_empty();
        render(piece)
    });
    match (format, &shown) {
        (Format::Jsonl, _) | (_, Ok(Some(_))) => shown,
        _ if empty => {
            end_line();
            shown
        }
        _ => match write_stdout("\n") {
            Err(lost) => shown.map(|_| Some(lost)),
            Ok(()) => shown,
        },
    }
}

/// The point at which the saved text ended.
fn resume_point(args: &GenerateArgs, state: Option<SavedState>) -> Result<ResumePoint> {
    let file = args.session.as_deref().unwrap_or(Path::new(""));
    match state.map(|state| state.content) {
        None => Ok(ResumePoint::default()),
        Some(SavedContent::Text(pause)) => Ok(pause),
        Some(SavedContent::Chat(_)) => Err(Error::Usage(format!(
            "--session {}: holds a conversation; continue it with chat, or use another file",
            file.display()
        ))),
    }
}

/// A prompt to encode.
#[derive(Clone, Copy)]
struct PromptText<'a> {
    text: &'a str,
    specials: SpecialText,
    cancel: &'a CancelToken,
}

impl PromptText<'_> {
    /// Encodes the prompt as the start of a text. Fails if it cannot fit.
    fn encode_start(self, engine: &Engine) -> Result<Vec<u32>> {
        engine.encode_cancellable(self.text, self.specials, self.cancel)
    }

    /// Encodes the prompt as the continuation of a text.
    fn encode_continuation(self, engine: &Engine) -> Result<Vec<u32>> {
        let stop = || self.cancel.is_cancelled();
        engine.tokenizer().encode_until(self.text, self.specials, AddSpecial::No, &stop)
    }
}

/// The token ids to continue, and where the saved text ended if there is no new prompt. A prompt that starts with the
/// session's text extends it, and only the new part is computed; any other prompt is appended.
fn build_sequence(
    engine: &Engine,
    session: &Session,
    pause: ResumePoint,
    prompt: Option<PromptText<'_>>,
) -> Result<(Vec<u32>, ResumePoint)> {
    let (tokenizer, held) = (engine.tokenizer(), [session.tokens(), &pause.tokens].concat());
    let tokens = match prompt {
        None if held.is_empty() => engine.encode(DEFAULT_PROMPT)?,
        Some(prompt) if held.is_empty() => prompt.encode_start(engine)?,
        None | Some(PromptText { text: "", .. }) => return Ok((held, pause)),
        Some(prompt) => {
            let whole = prompt.encode_start(engine)?;
            let (text, all) = (tokenizer.decode_with_special(&held), tokenizer.decode_with_special(&whole));
            match all.strip_prefix(&text) {
                _ if whole.starts_with(&held) => whole,
                // The same text in other ids: the common first ids are not computed again.
                Some(_) if !session.has_evicted() => whole,
                Some(text) => [held, PromptText { text, ..prompt }.encode_continuation(engine)?].concat(),
                None => [held, prompt.encode_continuation(engine)?].concat(),
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
fn print_engine(engine: &Engine) {
    let o = engine.options();
    print_stderr!(
        "model {} from {}, weights {}, KV cache {} x {} tokens, {} threads",
        crate::dims::MODEL,
        o.model.display(),
        o.weight_type,
        o.kv_types,
        o.max_seq_len,
        o.threads
    );
}
