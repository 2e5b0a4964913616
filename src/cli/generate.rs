//! `generate`: one completion, streamed.

use super::answer::{Report, show};
use super::args::{Format, GenerateArgs};
use super::events;
use super::signal;
use super::start::{self, Voice};
use super::terminal::{Progress, end_line, put};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::plan::{self, Plan};
use crate::session::StopReason;
use crate::tokenizer::AddSpecial;
use crate::trace::Recorder;
use std::io::{IsTerminal, Read};
use std::time::Instant;

const DEFAULT_PROMPT: &str = "Hello, world! I am a";

pub(super) fn run(args: &GenerateArgs) -> Result<()> {
    let options = args.resolve()?;
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
    let mut restored = None;
    if let Some(file) = &args.session {
        restored = crate::saved::load(file, &mut session, &engine)?;
    }
    let mut tokens = session.tokens().to_vec();
    match prompt {
        prompt if tokens.is_empty() => {
            tokens = engine.encode(prompt.as_deref().unwrap_or(DEFAULT_PROMPT))?;
        }
        Some(more) => tokens.extend(engine.tokenizer().encode(&more, AddSpecial::No)?),
        None => {}
    }
    if tokens.is_empty() {
        return Err(Error::Usage(
            "the prompt is empty and this model adds no first token; give a --prompt".into(),
        ));
    }
    let mut stream = engine.stream(&mut session, &tokens, &options)?.since(start);
    if let Some(rng) = restored {
        stream.sampler_mut().set_rng(rng);
    }
    let mut last = None;
    let result = show(&mut stream, args.output.format, |id, _| last = id.or(last));
    let (timing, reason) = (stream.timing(), stream.stop_reason().unwrap_or(StopReason::Interrupt));
    let rng = stream.sampler_mut().rng().clone();
    drop(stream);
    result?;

    if let Some(file) = &args.session {
        // The last token of a text that may go on was shown but not computed.
        let goes_on = matches!(reason, StopReason::Length | StopReason::Interrupt) && !session.is_full();
        if let (true, Some(token)) = (goes_on, last) {
            session.decode(token)?;
        }
        crate::saved::save(file, &mut session, &engine, &rng)?;
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

/// The prompt, if there is one: from the flag, a file, or piped stdin.
fn prompt(args: &GenerateArgs) -> Result<Option<String>> {
    let from_stdin = || -> Result<String> {
        let mut bytes = Vec::new();
        std::io::stdin()
            .lock()
            .take(PROMPT_LIMIT + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| Error::Usage(format!("prompt from stdin: {e}")))?;
        text("stdin", bytes)
    };
    if let Some(prompt) = &args.prompt {
        return Ok(Some(prompt.clone()));
    }
    match &args.prompt_file {
        Some(file) if file.as_os_str() == "-" => from_stdin().map(Some),
        Some(file) => {
            let name = file.display().to_string();
            let bad = |e: String| Error::Usage(format!("--prompt-file {name}: {e}"));
            let meta = std::fs::metadata(file).map_err(|e| bad(e.to_string()))?;
            if meta.is_dir() || meta.len() > PROMPT_LIMIT {
                return Err(bad("is a directory or longer than 64 MiB; give a text file".into()));
            }
            text(&name, std::fs::read(file).map_err(|e| bad(e.to_string()))?).map(Some)
        }
        None if std::io::stdin().is_terminal() => Ok(None),
        None => from_stdin().map(|p| (!p.is_empty()).then_some(p)),
    }
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
