//! `eval`: perplexity of a text, recall of facts, and how far settings of the engine are apart.

mod input;
mod perplexity;
mod recall;
mod settings;

use super::args::{Format, ModelArgs};
use super::start::{self, Voice};
use super::terminal::{Progress, put};
use crate::dims::VOCAB;
use crate::model::weights::{ModelPath, WeightType};
use crate::run::engine::Engine;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::plan::{self, Context, Plan, mib};
use crate::run::session::Session;
use crate::run::system::marker::Marker;
use clap::Args;
use files::{Error, Result};
use input::{Input, Question};
use perplexity::Row;
use settings::Settings;
use std::path::PathBuf;
use std::time::Instant;
use text::tokenizer::{AddSpecial, Tokenizer};

/// Perplexity, recall, and comparisons.
#[derive(Args, Clone)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to predict
    #[arg(short, long, value_name = "FILE", required_unless_present_any = ["tokens", "recall"])]
    #[arg(conflicts_with = "tokens")]
    pub file: Option<PathBuf>,
    /// Token ids to predict: a JSON array, or an object with `tokens` and `chunk`
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// Questions at the end of prompts: a JSON object with `items`, each with form, distance, prompt, answer_ids and
    /// correct_f32
    #[arg(long, value_name = "FILE")]
    pub recall: Option<PathBuf>,
    /// Tokens of one chunk; each begins with an empty cache [default: the token file's, else 512]
    #[arg(long, value_name = "N")]
    pub chunk: Option<usize>,
    /// Most chunks
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Settings of a row, for others than the flags say; may be given more than once, e.g.
    /// kv=q4,policy=snapkv,window=25% (keys: kv, k, v, weights, policy, window, prefix, backend)
    #[arg(long, value_name = "SETTINGS")]
    pub settings: Vec<String>,
    /// Predict with these settings too and compare, e.g. kv=f32,weights=f32 (the same keys)
    #[arg(long, value_name = "SETTINGS")]
    pub against: Option<String>,
    /// Text, or one JSON object for each row of each table
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    /// Say nothing but errors on stderr
    #[arg(short, long)]
    pub quiet: bool,
}

const DEFAULT_CHUNK: usize = 512;

/// What is measured, and with what.
struct Work {
    rows: Vec<Settings>,
    /// What the rows are held against.
    base: Option<Settings>,
    input: Option<Input>,
    chunk: usize,
    /// With the token ids of their prompts.
    questions: Vec<(Question, Vec<u32>)>,
}

pub(super) fn run(args: &EvalArgs) -> Result<()> {
    let work = Work::resolve(args)?;
    let began = Instant::now();
    let _marker = prepare(args, &work)?;
    let engines = Engines::load(&work)?;
    let chunks = predict(args, &work, &engines)?;
    ask(args, &work, &engines)?;
    if !args.quiet {
        let mut done = Vec::new();
        if chunks > 0 {
            done.push(format!("{chunks} chunks of {} tokens", work.chunk));
        }
        if !work.questions.is_empty() {
            done.push(format!("{} questions", work.questions.len()));
        }
        eprintln!("{}, {:.1} s", done.join(", "), began.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Perplexities, if there is a text; how many chunks it had.
fn predict(args: &EvalArgs, work: &Work, engines: &Engines) -> Result<usize> {
    let Some(input) = &work.input else { return Ok(0) };
    let mut chunks = input.chunks(work.chunk, engines.tokenizer())?;
    chunks.truncate(args.limit.unwrap_or(usize::MAX));
    let row = |s| Ok(Row::new(s, engines.session(&s.for_text(work.chunk)?)?));
    let mut rows = work.rows.iter().map(row).collect::<Result<Vec<_>>>()?;
    let mut base = work.base.as_ref().map(row).transpose()?;
    perplexity::measure(&mut rows, base.as_mut(), &chunks, &Progress::new("chunk", args.quiet))?;
    match args.format {
        Format::Text => put(&perplexity::text(&rows, base.as_ref()))?,
        Format::Jsonl => {
            let lines = rows.iter().map(|row| perplexity::json(row, base.as_ref(), work.chunk));
            put(&lines.map(|line| format!("{line}\n")).collect::<String>())?;
        }
    }
    Ok(chunks.len())
}

/// Recall, if there are questions.
fn ask(args: &EvalArgs, work: &Work, engines: &Engines) -> Result<()> {
    if work.questions.is_empty() {
        return Ok(());
    }
    let mut recalled = Vec::new();
    for settings in work.base.iter().chain(&work.rows) {
        let progress = Progress::new("question", args.quiet);
        recalled.push(recall::measure(settings, engines, &work.questions, &progress)?);
    }
    match args.format {
        Format::Text if work.input.is_some() => put(&format!("\n{}", recall::text(&recalled))),
        Format::Text => put(&recall::text(&recalled)),
        Format::Jsonl => put(&recalled.iter().map(|r| format!("{}\n", r.json())).collect::<String>()),
    }
}

impl Work {
    fn resolve(args: &EvalArgs) -> Result<Self> {
        let mut options = args.model.resolve()?;
        // Rows of the table say what `auto` is.
        options.weight_type =
            ModelPath::new(&options.model)?.open(options.weight_type)?.settle(options.weight_type);
        let flags = Settings::of_flags(options);
        let rows = match args.settings.as_slice() {
            [] => vec![flags.clone()],
            some => some.iter().map(|text| flags.with("--settings", text)).collect::<Result<_>>()?,
        };
        let base = args.against.as_deref().map(|text| flags.with("--against", text)).transpose()?;
        for (flag, n, least) in [("--chunk", args.chunk, 2), ("--limit", args.limit, 1)] {
            if let Some(n) = n.filter(|&n| n < least) {
                return Err(Error::Usage(format!("{flag} {n}: use a number from {least}")));
            }
        }
        let input = Input::read(args.tokens.as_deref(), args.file.as_deref())?;
        let chunk = args.chunk.or(input.as_ref().and_then(Input::chunk)).unwrap_or(DEFAULT_CHUNK);
        let mut questions = Vec::new();
        if let Some(file) = &args.recall {
            let asked = input::read_questions(file)?;
            // Ahead of the model: how much memory it takes depends on how long they are.
            let tokenizer = Tokenizer::open_for(&ModelPath::new(&flags.options().model)?.weights, VOCAB)?;
            for question in asked {
                let prompt = tokenizer.encode(&question.prompt, AddSpecial::Yes)?;
                questions.push((question, prompt));
            }
        }
        Ok(Self { rows, base, input, chunk, questions })
    }

    fn settings(&self) -> impl Iterator<Item = &Settings> {
        self.rows.iter().chain(&self.base)
    }

    /// One plan for each of the settings, with so many slots.
    fn plans(&self, slots: usize) -> Result<Vec<Plan>> {
        let plan = |s: &Settings| Plan::new(&EngineOptions { max_seq_len: slots, ..s.options().clone() });
        self.settings().map(plan).collect()
    }
}

/// Refuses what will not fit, and prepares the process.
fn prepare(args: &EvalArgs, work: &Work) -> Result<Marker> {
    let mut need = 0;
    let mut first = None;
    if work.input.is_some() {
        // All at once. Sessions hold a block of logits; those compared with are held beside it.
        let rows = |i: usize| if i < work.rows.len() { 1 } else { 2 };
        let plans = work.plans(work.chunk)?.into_iter().enumerate();
        let plans: Vec<Plan> = plans.map(|(i, p)| p.with_rows(rows(i))).collect();
        need = needed_at_once(&plans)?;
        first = plans.into_iter().next();
    }
    if !work.questions.is_empty() {
        // One after another, of all models that are loaded.
        let longest = recall::longest(&work.questions);
        let plans = work.plans(longest)?;
        let most = |group: &[Plan]| Ok(group.iter().map(Plan::need).max().unwrap_or(0));
        let what = format!("for prompts of {longest} tokens");
        need = need.max(check(&plans, by_engine(&plans, most)?, &what)?);
        first = first.or(plans.into_iter().next());
    }
    let Some(first) = first else { return Ok(Marker::none()) };
    let mask = (&args.model.cores.mask, first.options.threads);
    start::planned(&first, need, mask, (Context::Chunk, Voice::of(args.quiet)))
}

/// What sequences that are all there at once need.
fn needed_at_once(plans: &[Plan]) -> Result<u64> {
    if plans.len() <= 2 {
        plan::check_apart(plans, Context::Chunk)?;
        return Ok(plans.iter().fold(0u64, |sum, p| sum.saturating_add(p.need())));
    }
    let remedy = "use a smaller --chunk or fewer --settings";
    let need = by_engine(plans, |group| plan::check_sharing(group, Context::Chunk, remedy))?;
    check(plans, need, &format!("for {} settings at once", plans.len()))
}

/// The sum of what the plans of each engine need.
fn by_engine(plans: &[Plan], need: impl Fn(&[Plan]) -> Result<u64>) -> Result<u64> {
    let mut left = plans.to_vec();
    let mut sum = 0u64;
    while let Some(key) = left.first().map(|p| key(&p.options)) {
        let (group, others): (Vec<Plan>, Vec<Plan>) =
            left.into_iter().partition(|p| self::key(&p.options) == key);
        sum = sum.saturating_add(need(&group)?);
        left = others;
    }
    Ok(sum)
}

fn check(plans: &[Plan], need: u64, what: &str) -> Result<u64> {
    let Some((first, have)) = plans.first().and_then(|p| Some((p, p.memory.usable()?))) else {
        return Ok(need);
    };
    match need > have {
        true => Err(Error::Memory(format!(
            "{}: needs {} of memory {what}, but {} are available; use less of them, a smaller KV type, or close \
             other programs",
            first.options.model.display(),
            mib(need),
            mib(have)
        ))),
        false => Ok(need),
    }
}

/// What makes another engine necessary.
type Key = (WeightType, BackendKind);

fn key(o: &EngineOptions) -> Key {
    (o.weight_type, o.backend)
}

/// The models loaded, one for each type of weights and backend among the settings.
struct Engines(Vec<(Key, Engine)>);

impl Engines {
    fn load(work: &Work) -> Result<Self> {
        let longest = work.chunk.max(recall::longest(&work.questions));
        let mut engines: Vec<(Key, Engine)> = Vec::new();
        for o in work.settings().map(Settings::options) {
            if engines.iter().all(|(k, _)| *k != key(o)) {
                let engine = Engine::load(EngineOptions { max_seq_len: longest, ..o.clone() })?;
                engines.push((key(o), engine));
            }
        }
        Ok(Self(engines))
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.0[0].1.tokenizer()
    }

    /// An empty sequence with these options.
    fn session(&self, o: &EngineOptions) -> Result<Session> {
        let (_, engine) = self.0.iter().find(|(k, _)| *k == key(o)).unwrap_or(&self.0[0]);
        engine.session_of(&EngineOptions { threads: engine.options().threads, ..o.clone() })
    }
}
