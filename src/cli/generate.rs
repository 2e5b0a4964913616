//! `generate`: one completion, streamed.

use super::answer::{Report, show};
use super::args::{Format, GenerateArgs};
use super::events;
use super::prompts;
use super::signal;
use super::start::{self, Voice};
use super::terminal::{Progress, end_line, put};
use crate::model::trace::Recorder;
use crate::run::engine::{Engine, Pause};
use crate::run::plan::{self, Plan};
use crate::run::saved::{self, Content, State};
use crate::run::session::{Session, StopReason};
use files::{Error, Result};
use std::io::{IsTerminal, Read};
use std::path::Path;
use std::time::Instant;
use text::tokenizer::AddSpecial;

const DEFAULT_PROMPT: &str = "Hello, world! I am a";

pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    if let Some(file) = &args.prompts.prompts {
        return prompts::run(args, file);
    }
    let mut options = args.resolve()?;
    let settings = plan::settle(args.model.resolve()?)?;
    let prompt = prompt(args)?;
    let began = Instant::now();
    let progress = Progress::new("loading tensor", args.output.quiet);
    let _marker = start::model(&Plan::new(&settings)?, &args.model.cores.mask, Voice::of(args.output.quiet))?;
    let engine = Engine::load_with(settings, &|done, all| progress.show(done, all))?;
    let loading = began.elapsed();
    if args.output.verbose {
        say_engine(&engine);
    }
    signal::connect(&options.cancel);

    let start = Instant::now();
    let mut session = engine.session()?;
    events::watch(&mut session, &args.output);
    if args.output.trace.is_some() {
        session.record(Some(Recorder::default()));
    }
    let state = match &args.session {
        Some(file) => saved::load(file, &mut session, &engine)?,
        None => None,
    };
    let rng = state.as_ref().and_then(|state| state.random(args.sampler.seed, &mut options.sampler));
    let (tokens, pause) = sequence(&engine, &session, paused(args, state)?, prompt.as_deref())?;
    let mut stream = engine.stream(&mut session, &tokens, &options)?.since(start);
    if args.session.is_some() {
        stream = stream.resume(pause.unshown.as_ref());
    }
    if let Some(rng) = rng {
        stream.sampler_mut().set_rng(rng);
    }
    let result = show(&mut stream, args.output.format, |_, _| {});
    let (timing, reason) = (stream.timing(), stream.stop_reason().unwrap_or(StopReason::Interrupt));
    let state = State {
        seed: options.sampler.seed,
        rng: stream.sampler_mut().rng().clone(),
        content: Content::Text(stream.pause()),
    };
    drop(stream);
    result?;

    if let Some(file) = &args.session {
        saved::save(file, &mut session, &engine, state)?;
    }
    if let (Some(file), Some(recorder)) = (&args.output.trace, session.record(None)) {
        recorder.write_chrome(file)?;
    }
    let report = Report { timing, reason, loading, seed: options.sampler.seed };
    match args.output.format {
        Format::Jsonl => put(&report.json(&session))?,
        Format::Text => end_line(),
    }
    if !args.output.quiet {
        report.say(&session);
        if args.sampler.seed.is_none() && options.sampler.temperature != 0.0 {
            eprintln!("seed: {}", options.sampler.seed);
        }
    }
    match reason {
        StopReason::Interrupt => Err(Error::Interrupted),
        _ => Ok(()),
    }
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

/// The ids to go on from, and what was held back of their text. A prompt that begins with the text of the session is
/// that text going on, and is computed as far as the session does not hold it; any other one is appended.
fn sequence(
    engine: &Engine,
    session: &Session,
    pause: Pause,
    prompt: Option<&str>,
) -> Result<(Vec<u32>, Pause)> {
    let held = [session.tokens(), &pause.tokens].concat();
    let tokenizer = engine.tokenizer();
    let tokens = match prompt {
        prompt if held.is_empty() => engine.encode(prompt.unwrap_or(DEFAULT_PROMPT))?,
        None | Some("") => return Ok((held, pause)),
        Some(prompt) => {
            let whole = engine.encode(prompt)?;
            let (text, all) = (tokenizer.decode_with_special(&held), tokenizer.decode_with_special(&whole));
            match all.strip_prefix(&text) {
                _ if whole.starts_with(&held) => whole,
                // The same text in other ids: those that agree need not be computed again.
                Some(_) if !session.has_evicted() => whole,
                Some(rest) => [held, tokenizer.encode(rest, AddSpecial::No)?].concat(),
                None => [held, tokenizer.encode(prompt, AddSpecial::No)?].concat(),
            }
        }
    };
    match tokens.is_empty() {
        true => Err(Error::Usage(
            "the prompt is empty and this model adds no first token; give a --prompt".into(),
        )),
        false => Ok((tokens, Pause::default())),
    }
}

/// The prompt, if there is one: from the flag, a file, or piped stdin.
fn prompt(args: &GenerateArgs) -> Result<Option<String>> {
    if let Some(prompt) = &args.prompt {
        return Ok(Some(prompt.clone()));
    }
    match &args.prompt_file {
        Some(file) => text_of("--prompt-file", file).map(Some),
        None if std::io::stdin().is_terminal() => Ok(None),
        None => from_stdin().map(|p| (!p.is_empty()).then_some(p)),
    }
}

fn from_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    let mut stdin = std::io::stdin().lock().take(PROMPT_LIMIT + 1);
    stdin.read_to_end(&mut bytes).map_err(|e| Error::Usage(format!("prompt from stdin: {e}")))?;
    text("stdin", bytes)
}

/// The text of the file that a flag names; `-` is stdin.
pub(super) fn text_of(flag: &str, file: &Path) -> Result<String> {
    if file.as_os_str() == "-" {
        return from_stdin();
    }
    let name = file.display().to_string();
    let bad = |e: String| Error::Usage(format!("{flag} {name}: {e}"));
    let meta = std::fs::metadata(file).map_err(|e| bad(e.to_string()))?;
    if meta.is_dir() || meta.len() > PROMPT_LIMIT {
        return Err(bad("is a directory or longer than 64 MiB; give a text file".into()));
    }
    text(&name, std::fs::read(file).map_err(|e| bad(e.to_string()))?)
}

const PROMPT_LIMIT: u64 = 64 << 20;

/// UTF-8 without the newline that ends a text file.
fn text(name: &str, bytes: Vec<u8>) -> Result<String> {
    if bytes.len() as u64 > PROMPT_LIMIT {
        return Err(Error::Usage(format!("prompt from {name}: longer than 64 MiB")));
    }
    let mut text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::Usage(format!("prompt from {name}: byte {at} is not UTF-8; convert the file"))
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// What runs, on stderr.
fn say_engine(engine: &Engine) {
    let o = engine.options();
    eprintln!(
        "model {} from {}, weights {}, KV {} x {} slots, {} threads",
        crate::dims::MODEL,
        o.model.display(),
        o.weight_type,
        o.kv_types,
        o.max_seq_len,
        o.threads
    );
}
