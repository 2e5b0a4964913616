//! `eval`: perplexity of a text, recall of facts, and the difference between settings of the engine.

mod engines;
mod input;
mod perplexity;
mod recall;
mod settings;

use crate::cli::args::{FlagWarnings, Format, ModelArgs, QuietArgs};
use crate::cli::load;
use crate::cli::terminal::{Verbosity, track_progress, write_stdout};
use crate::run::engine::tokenizer_of;
use crate::run::plan::{self, ContextName, Plan, format_mib};
use clap::Args;
use engines::{EvalEngines, EvalModels, engine_key};
use files::{Error, Result, print_stderr};
use input::{EncodedQuestion, EvalInput};
use perplexity::Predictor;
use settings::EvalSettings;
use std::path::PathBuf;
use std::time::Instant;
use text::tokenizer::AddSpecial;

/// Flags of `eval`.
#[derive(Args, Clone)]
pub struct EvalArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    /// Text file to predict
    #[arg(short, long, value_name = "FILE", required_unless_present_any = ["tokens", "recall"])]
    #[arg(conflicts_with = "tokens")]
    pub file: Option<PathBuf>,
    /// File of token ids to predict: a JSON array, or an object with tokens and chunk
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// File of questions to answer: a JSON object with items, each with form, distance, prompt, answer_ids and
    /// correct_f32
    #[arg(long, value_name = "FILE")]
    pub recall: Option<PathBuf>,
    /// Tokens per chunk; each chunk starts with an empty context [default: from the token file, else 512]
    #[arg(long, value_name = "N")]
    pub chunk: Option<usize>,
    /// Maximum number of chunks to predict
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Add a row with changed settings, such as kv=q4,policy=snapkv,window=25% (keys: kv, k, v, weights, policy,
    /// window, prefix, backend); may be repeated
    #[arg(long, value_name = "SETTINGS")]
    pub settings: Vec<String>,
    /// Compare each row with these settings, such as kv=f32,weights=f32 (same keys)
    #[arg(long, value_name = "SETTINGS")]
    pub against: Option<String>,
    /// Text, or one JSON object per table row
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    #[command(flatten)]
    pub quiet: QuietArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

const DEFAULT_CHUNK: usize = 512;

/// The settings to measure, and the text and questions to measure them with.
struct Evaluation {
    rows: Vec<EvalSettings>,
    /// The settings that the rows are compared with.
    base: Option<EvalSettings>,
    input: Option<EvalInput>,
    chunk: usize,
    questions: Vec<EncodedQuestion>,
}

pub fn run(args: &EvalArgs) -> Result<()> {
    let (work, models) = Evaluation::from_args(args)?;
    let began = Instant::now();
    prepare_run(args, &work, &models)?;
    let engines = EvalEngines::load_all(
        models,
        work.chunk.max(recall::longest_question(&work.questions)),
        args.quiet.verbosity(),
    )?;
    let chunks = evaluate_text(args, &work, &engines)?;
    evaluate_recall(args, &work, &engines)?;
    if args.quiet.verbosity() != Verbosity::Quiet {
        let chunks = match chunks {
            0 => String::new(),
            1 => format!("1 chunk of up to {} tokens, ", work.chunk),
            n => format!("{n} chunks of up to {} tokens, ", work.chunk),
        };
        let questions = match work.questions.len() {
            0 => String::new(),
            n => format!("{n} questions, "),
        };
        print_stderr!("{chunks}{questions}{:.1} s", began.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Measures and prints perplexities if there is a text. Returns the number of chunks.
fn evaluate_text(args: &EvalArgs, work: &Evaluation, engines: &EvalEngines) -> Result<usize> {
    let Some(input) = &work.input else { return Ok(0) };
    let mut chunks = input.split_chunks(work.chunk, engines.tokenizer())?;
    chunks.truncate(args.limit.unwrap_or(usize::MAX));
    let row = |s| Ok(Predictor::new(s, engines.open_session(&s.for_text(work.chunk)?)?));
    let mut rows = work.rows.iter().map(row).collect::<Result<Vec<_>>>()?;
    let mut base = work.base.as_ref().map(row).transpose()?;
    perplexity::measure_perplexity(
        &mut rows,
        base.as_mut(),
        &chunks,
        &track_progress("evaluating", "chunks", args.quiet.verbosity()),
    )?;
    match args.format {
        Format::Text => write_stdout(&perplexity::format_table(&rows, base.as_ref()))?,
        Format::Jsonl => {
            let lines = rows.iter().map(|row| perplexity::row_json(row, base.as_ref(), work.chunk));
            write_stdout(&lines.map(|line| format!("{line}\n")).collect::<String>())?;
        }
    }
    Ok(chunks.len())
}

/// Measures and prints recall, if there are questions.
fn evaluate_recall(args: &EvalArgs, work: &Evaluation, engines: &EvalEngines) -> Result<()> {
    if work.questions.is_empty() {
        return Ok(());
    }
    let mut recalled = Vec::new();
    for settings in work.base.iter().chain(&work.rows) {
        let progress = track_progress("asking", "questions", args.quiet.verbosity());
        recalled.push(recall::measure_recall(settings, engines, &work.questions, &progress)?);
    }
    match args.format {
        Format::Text if work.input.is_some() => {
            write_stdout(&format!("\n{}", recall::format_table(&recalled)))
        }
        Format::Text => write_stdout(&recall::format_table(&recalled)),
        Format::Jsonl => {
            write_stdout(&recalled.iter().map(|record| format!("{record}\n")).collect::<String>())
        }
    }
}

impl Evaluation {
    /// Resolves the flags and opens the models that the settings need.
    fn from_args(args: &EvalArgs) -> Result<(Self, EvalModels)> {
        let mut options = args.model.resolve_options()?;
        // Resolves `auto`, because the table names the weight type.
        let model = options.open_model()?;
        options.weight_type = model.weight_type;
        let flags = EvalSettings::from_flags(options);
        let rows = match args.settings.as_slice() {
            [] => vec![flags.clone()],
            some => some.iter().map(|text| flags.with_changes("--settings", text)).collect::<Result<_>>()?,
        };
        let base = args.against.as_deref().map(|text| flags.with_changes("--against", text)).transpose()?;
        for (flag, n, least) in [("--chunk", args.chunk, 2), ("--limit", args.limit, 1)] {
            if let Some(n) = n.filter(|&n| n < least) {
                return Err(Error::Usage(format!("{flag} {n}: use {least} or more")));
            }
        }
        let input = EvalInput::read_input(args.tokens.as_deref(), args.file.as_deref())?;
        let chunk = args.chunk.or(input.as_ref().and_then(EvalInput::chunk_size)).unwrap_or(DEFAULT_CHUNK);
        let mut questions = Vec::new();
        if let Some(file) = &args.recall {
            let asked = input::read_questions(file)?;
            // Encoded before the model is loaded, because the memory plan depends on the lengths.
            let tokenizer = tokenizer_of(&model)?;
            for question in asked {
                let prompt = tokenizer.encode(&question.prompt, AddSpecial::Yes)?;
                questions.push(EncodedQuestion { question, prompt });
            }
        }
        let work = Self { rows, base, input, chunk, questions };
        let models = EvalModels::open_all(model, work.all_settings())?;
        Ok((work, models))
    }

    fn all_settings(&self) -> impl Iterator<Item = &EvalSettings> {
        self.rows.iter().chain(&self.base)
    }

    /// A memory plan for each of the settings, with this many slots.
    fn plan_all(&self, models: &EvalModels, slots: usize) -> Result<Vec<Plan>> {
        self.all_settings().map(|s| models.plan_memory(s, slots)).collect()
    }
}

/// Fails if the evaluation does not fit in memory; else prepares the process.
fn prepare_run(args: &EvalArgs, work: &Evaluation, models: &EvalModels) -> Result<()> {
    let mut threads = 1;
    if work.input.is_some() {
        // All sessions exist at once. Each holds a block of logits; the base's logits are copied beside it.
        let rows = |i: usize| if i < work.rows.len() { 1 } else { 2 };
        let plans = work.plan_all(models, work.chunk)?.into_iter().enumerate();
        let plans: Vec<Plan> = plans.map(|(i, p)| p.with_rows(rows(i))).collect();
        check_concurrent_memory(&plans)?;
        threads = plans.first().map_or(threads, |plan| plan.options.threads);
    }
    if !work.questions.is_empty() {
        // One session at a time, while all models are loaded.
        let longest = recall::longest_question(&work.questions);
        let plans = work.plan_all(models, longest)?;
        let most = |group: &[Plan]| Ok(group.iter().map(Plan::needed_bytes).max().unwrap_or(0));
        let what = format!("for prompts of {longest} tokens");
        check_memory(&plans, sum_by_engine(&plans, most)?, &what)?;
        threads = plans.first().map_or(threads, |plan| plan.options.threads);
    }
    load::prepare_process(threads, &args.warnings)
}

/// Memory of sequences that all exist at once.
fn check_concurrent_memory(plans: &[Plan]) -> Result<u64> {
    if plans.len() <= 2 {
        plan::check_models_fit(plans, ContextName::Chunk)?;
        return Ok(plans.iter().fold(0u64, |sum, p| sum.saturating_add(p.needed_bytes())));
    }
    let remedy = "use a smaller --chunk or fewer --settings";
    let need = sum_by_engine(plans, |group| plan::check_sequences_fit(group, ContextName::Chunk, remedy))?;
    check_memory(plans, need, &format!("for {} settings at once", plans.len()))
}

/// Sum of `need` over the groups of plans that share an engine.
fn sum_by_engine(plans: &[Plan], need: impl Fn(&[Plan]) -> Result<u64>) -> Result<u64> {
    let mut left = plans.to_vec();
    let mut sum = 0u64;
    while let Some(key) = left.first().map(|p| engine_key(&p.options)) {
        let (group, others): (Vec<Plan>, Vec<Plan>) =
            left.into_iter().partition(|p| engines::engine_key(&p.options) == key);
        sum = sum.saturating_add(need(&group)?);
        left = others;
    }
    Ok(sum)
}

/// `need`, or an error if less memory is available.
fn check_memory(plans: &[Plan], need: u64, what: &str) -> Result<u64> {
    let Some((first, have)) = plans.first().and_then(|p| Some((p, p.memory.usable_bytes()?))) else {
        return Ok(need);
    };
    if need > have {
        return Err(Error::Memory(format!(
            "{}: needs {} of memory {what}, but {} are available; use fewer or shorter ones, a smaller KV type, \
             or close other programs",
            first.options.model.display(),
            format_mib(need),
            format_mib(have)
        )));
    }
    Ok(need)
}
