//! `generate --prompts`: completes many prompts from a file together, one JSON line each.

use super::args::{Format, GenerateArgs, check_range, parse_token_limit, read_trimmed_text};
use super::flags::name_flags_in;
use super::generation_report::{logprobs_json, print_drafts};
use super::load::{self, LoadedEngine};
use super::signal;
use super::terminal::{Verbosity, write_stdout};
use crate::run::engine::Engine;
use crate::run::generate::prompts::{BatchAnswer, BatchItem};
use crate::run::options::GenerateOptions;
use crate::run::plan::OpenedModel;
use crate::run::session::StopReason;
use files::{Error, Result, print_stderr};
use serde::Deserialize;
use serde_json::json;
use std::path::Path;
use std::time::Instant;
use text::sampler::Logprobs;

/// Maximum of `--batch`.
pub const MAX_BATCH: usize = 256;
/// Default of `--batch`.
const DEFAULT_BATCH: usize = 8;

/// A prompt line that is an object. The command line sets the omitted fields.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptLine {
    prompt: String,
    max_tokens: Option<i64>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    typical: Option<f32>,
    repetition_penalty: Option<f32>,
    repetition_window: Option<usize>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<u64>,
    stop: Option<StopField>,
    ignore_eos: Option<bool>,
    logprobs: Option<usize>,
}

/// One stop string, or several.
#[derive(Deserialize)]
#[serde(untagged)]
enum StopField {
    One(String),
    Several(Vec<String>),
}

impl PromptLine {
    fn into_item(self, defaults: &GenerateOptions) -> Result<BatchItem> {
        let mut options = defaults.clone();
        let sampler = &mut options.sampler;
        fn set_if_given<T>(to: &mut T, from: Option<T>) {
            if let Some(from) = from {
                *to = from;
            }
        }
        set_if_given(&mut sampler.temperature, self.temperature);
        set_if_given(&mut sampler.top_p, self.top_p);
        set_if_given(&mut sampler.top_k, self.top_k);
        set_if_given(&mut sampler.min_p, self.min_p);
        set_if_given(&mut sampler.typical_p, self.typical);
        set_if_given(&mut sampler.repetition_penalty, self.repetition_penalty);
        set_if_given(&mut sampler.repetition_window, self.repetition_window);
        set_if_given(&mut sampler.presence_penalty, self.presence_penalty);
        set_if_given(&mut sampler.frequency_penalty, self.frequency_penalty);
        set_if_given(&mut sampler.seed, self.seed);
        set_if_given(&mut options.ignore_eos, self.ignore_eos);
        if let Some(n) = self.logprobs {
            Logprobs::check_count(n)?;
            options.logprobs = Some(n);
        }
        set_if_given(&mut options.max_tokens, self.max_tokens.map(parse_token_limit).transpose()?);
        let stop = self.stop.map(|stop| match stop {
            StopField::One(text) => vec![text],
            StopField::Several(texts) => texts,
        });
        set_if_given(&mut options.stop, stop);
        options.sampler.validate_for(crate::dims::VOCAB)?;
        text::tokenizer::StopStrings::new(&options.stop)?;
        Ok(BatchItem { prompt: self.prompt, options })
    }
}

/// Parses prompts, one on each line that is not blank.
fn parse_items(text: &str, defaults: &GenerateOptions) -> Result<Vec<BatchItem>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    let item = |(i, line): (usize, &str)| {
        let read = match line.trim_start().as_bytes()[0] {
            b'"' => serde_json::from_str(line)
                .map(|prompt| BatchItem { prompt, options: defaults.clone() })
                .map_err(|e| Error::Usage(e.to_string())),
            b'{' => serde_json::from_str::<PromptLine>(line)
                .map_err(|e| Error::Usage(e.to_string()))
                .and_then(|line| line.into_item(defaults)),
            _ => Err(Error::Usage("is neither a JSON string nor a JSON object".into())),
        };
        read.map_err(|e| {
            // serde_json's own line number is always 1 here.
            let e = name_flags_in(e).to_string().replace(" at line 1 column ", ", at column ");
            Error::Usage(format!("line {}: {e}", i + 1))
        })
    };
    lines.map(item).collect()
}

/// Adds the file's name to an error of one prompt.
fn with_file(file: &Path, e: Error) -> Error {
    match e {
        Error::Usage(why) => Error::Usage(format!("--prompts {}: {why}", file.display())),
        e => e,
    }
}

/// Number of prompts that run together: `--batch`, limited to the number of prompts.
#[cfg(feature = "tools")]
pub fn count_sequences(args: &GenerateArgs) -> Result<usize> {
    match (&args.prompts.prompts, args.prompts.batch) {
        (Some(file), _) => Ok(check_batch_size(args)?
            .min(read_items(file, &args.resolve_options(Format::Jsonl)?)?.len().max(1))),
        (None, Some(_)) => check_batch_size(args),
        (None, None) => Ok(1),
    }
}

fn check_batch_size(args: &GenerateArgs) -> Result<usize> {
    check_range("--batch", args.prompts.batch.unwrap_or(DEFAULT_BATCH), MAX_BATCH)
}

fn read_items(file: &Path, defaults: &GenerateOptions) -> Result<Vec<BatchItem>> {
    parse_items(&read_trimmed_text("--prompts", file)?, defaults).map_err(|e| with_file(file, e))
}

/// Completes the prompts in `file`, `--batch` at a time.
pub fn run(file: &Path, args: &GenerateArgs) -> Result<()> {
    let (defaults, output) = (args.resolve_options(Format::Jsonl)?, &args.completion.output);
    let mut settings = args.model.resolve_options()?;
    let limit = check_batch_size(args)?;
    let items = read_items(file, &defaults)?;
    settings.batch = limit.min(items.len().max(1));
    let opened = OpenedModel::new(&settings)?;
    let verbosity = output.verbosity();
    let LoadedEngine { engine, .. } = &load::load_engine(opened, verbosity, &args.warnings)?;
    signal::connect_cancel(&defaults.cancel);
    let start = Instant::now();
    let mut done = BatchTotals::default();
    let mut batch = engine.generate_batch(&items).map_err(|e| with_file(file, e))?;
    for answer in &mut batch {
        match answer {
            Ok(answer) => {
                done.tokens += answer.tokens;
                done.interrupted |= answer.stop == StopReason::Interrupt;
                write_stdout(&answer_line(engine, &items, &answer))?;
            }
            // The last error ends the program with its exit code.
            Err(e) => {
                if let Some(earlier) = done.failed.replace(with_file(file, e)) {
                    print_stderr!("error: {}", name_flags_in(earlier));
                }
            }
        }
    }
    if verbosity != Verbosity::Quiet {
        let (tokens, took) = (done.tokens, start.elapsed().as_secs_f64());
        let speed = tokens as f64 / took.max(1e-9);
        let n = items.len();
        print_stderr!("prompts: {n}, generated: {tokens} tokens in {took:.2} s ({speed:.1} tokens/sec)");
        batch.drafts().into_iter().for_each(print_drafts);
        args.completion.sampler.print_random_seed(&defaults.sampler);
    }
    match done.failed {
        Some(e) => Err(e),
        None if done.interrupted => Err(Error::Interrupted),
        None => Ok(()),
    }
}

/// Totals over all prompts.
#[derive(Default)]
struct BatchTotals {
    tokens: usize,
    interrupted: bool,
    /// The last error.
    failed: Option<Error>,
}

/// An answer as a JSON line.
fn answer_line(engine: &Engine, items: &[BatchItem], a: &BatchAnswer) -> String {
    let mut line = json!({"index": a.index, "text": a.text, "tokens": a.tokens, "stop": a.stop.name()});
    if items[a.index].options.logprobs.is_some() {
        let of = |token| logprobs_json(engine.tokenizer(), token);
        line["logprobs"] = a.logprobs.iter().map(of).collect();
    }
    format!("{line}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<BatchItem>> {
        parse_items(text, &GenerateOptions::default())
    }

    #[test]
    fn lines_are_strings_or_objects_with_defaults() {
        let text = "\"a\\nb\"\n\n  {\"prompt\":\"c\",\"max_tokens\":-1,\"top_k\":3,\"seed\":7,\"stop\":[\"x\",\"y\"]}\r\n";
        let found = read(text).unwrap();
        let defaults = GenerateOptions::default();
        assert_eq!(found.iter().map(|i| i.prompt.as_str()).collect::<Vec<_>>(), ["a\nb", "c"]);
        assert_eq!((found[0].options.max_tokens, found[1].options.max_tokens), (defaults.max_tokens, None));
        assert_eq!((found[1].options.sampler.top_k, found[1].options.sampler.seed), (3, 7));
        assert_eq!(found[1].options.sampler.top_p, defaults.sampler.top_p);
        assert_eq!(found[1].options.stop, ["x", "y"]);
        assert!(read(" \n").unwrap().is_empty());
    }

    #[test]
    fn an_error_in_a_prompt_line_names_its_number() {
        let deep = format!("{{\"prompt\":{}", "[".repeat(100_000));
        for (line, what) in [
            ("word", "neither"),
            ("[\"a\"]", "neither"),
            ("\"open", "EOF"),
            ("\"a\" \"b\"", "trailing"),
            ("\"\\ud800\"", "hex escape"),
            ("{}", "missing field `prompt`"),
            ("{\"prompt\":3}", "invalid type"),
            ("{\"prompt\":\"a\",\"promt\":\"b\"}", "unknown field `promt`"),
            ("{\"prompt\":\"a\",\"prompt\":\"b\"}", "duplicate field"),
            ("{\"prompt\":\"a\",\"max_tokens\":-2}", "--num-tokens -2"),
            ("{\"prompt\":\"a\",\"max_tokens\":1e30}", "invalid type"),
            ("{\"prompt\":\"a\",\"temperature\":-1}", "temperature"),
            ("{\"prompt\":\"a\",\"temperature\":1e400}", "out of range"),
            ("{\"prompt\":\"a\",\"top_p\":2}", "top-p"),
            ("{\"prompt\":\"a\",\"seed\":-1}", "invalid value"),
            ("{\"prompt\":\"a\",\"stop\":[1]}", "did not match"),
            ("{\"prompt\":\"a\",\"logprobs\":1001}", "--logprobs 1001"),
            (&deep, "column"),
        ] {
            let e = read(&format!("\"fine\"\n{line}\n")).expect_err(line);
            let said = e.to_string();
            assert!(matches!(e, Error::Usage(_)) && said.starts_with("line 2: "), "{said}");
            assert!(said.contains(what) && said.lines().count() == 1, "{what}: {said}");
        }
    }
}
