//! `bench`: how fast this machine prefills, decodes and loads, and how close that is to what its memory and its
//! arithmetic allow.
//!
//! Repetitions go round-robin over the rows, so that a machine that slows down as it gets warm slows all rows alike. Each
//! row starts from a cache filled to its depth, which is not timed. On the CPU, the read bandwidth is measured right
//! before and right after each repetition that decodes one sequence, because a machine that others use too may read
//! twice as fast a second later.

mod ceiling;
mod cold;
mod compare;
mod device;
mod growth;
mod measure;
mod result;
mod rows;
mod spread;
mod table;

use super::report::{Side, columns};
use crate::cli::args::{LoadArgs, MaskArgs, text_of, within};
use crate::cli::signal;
use crate::cli::start;
use crate::cli::terminal::put;
use crate::model::trace::Trace;
use crate::model::weights::ModelPath;
use crate::run::engine::Engine;
use crate::run::options::EngineOptions;
use crate::run::plan::{self, Context, Opened, Plan};
use crate::run::session::CancelToken;
use crate::run::system;
use ceiling::{Ceilings, Reader};
use clap::{Args, ValueEnum};
use device::OnDevice;
use files::{Error, Result, say, stderr};
use measure::Bench;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use result::{BenchResult, Environment};
use rows::{Lists, Row};
use std::path::PathBuf;
use std::time::Instant;
use text::tokenizer::AddSpecial;

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Md,
    Csv,
    Json,
    Jsonl,
}

/// Measurements. Lists are separated by commas; flags with lists may be repeated.
#[derive(Args, Clone)]
pub struct BenchArgs {
    /// Lengths of prompts to prefill; 0 is none
    #[arg(short = 'p', long, value_delimiter = ',', default_value = "512", value_name = "LIST")]
    n_prompt: Vec<usize>,
    /// Numbers of tokens to decode; 0 is none
    #[arg(short, long, value_delimiter = ',', default_value = "128", value_name = "LIST")]
    n_gen: Vec<usize>,
    /// Numbers of sequences that decode -n tokens each, together; tokens/s counts all of them
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "LIST")]
    batch: Vec<usize>,
    /// Numbers of cache slots that are filled before each run
    #[arg(
        short,
        long,
        visible_alias = "n-depth",
        value_delimiter = ',',
        default_value = "0",
        value_name = "LIST"
    )]
    depth: Vec<usize>,
    /// Element types of the KV cache: f32, f16, q8 or q4
    #[arg(long, value_delimiter = ',', default_value = "q4", value_name = "LIST")]
    kv_type: Vec<KvType>,
    /// Numbers of CPU threads [default: one for each core to run on]
    #[arg(short, long, value_delimiter = ',', value_name = "LIST")]
    threads: Vec<usize>,
    #[command(flatten)]
    mask: MaskArgs,
    /// Timed runs of each row, whose median is shown
    #[arg(short, long, default_value_t = 5, value_name = "N")]
    repetitions: usize,
    /// Measure with the tokens of this text, from its start again where it ends [default: any mixture of tokens]
    #[arg(short = 'f', long, visible_alias = "file", value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// How results are printed
    #[arg(short, long, value_enum, default_value = "md")]
    output: Output,
    /// Write a Chrome/Perfetto trace of one decoded token, or of one prompt if no row decodes, and print its steps on
    /// stderr
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print ratios to the results in this file, which -o json or -o jsonl wrote
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Measure nothing; drop the model's files from the page cache, so that the next start is a cold one
    #[arg(long, hide = true)]
    drop_cache: bool,
    #[command(flatten, next_help_heading = "Model")]
    load: LoadArgs,
}

impl BenchArgs {
    /// Checks the flags; the options lack what each group sets.
    fn resolve(&self) -> Result<EngineOptions> {
        within("--repetitions", self.repetitions, 10_000)?;
        Ok(EngineOptions { isa: Some(Isa::detect()?), ..self.load.resolve()? })
    }

    /// The tokens of `--prompt-file`.
    fn text(&self, engine: &Engine) -> Result<Vec<u32>> {
        let Some(file) = &self.prompt_file else { return Ok(Vec::new()) };
        match text_of("--prompt-file", file)? {
            text if text.is_empty() => {
                Err(Error::Usage(format!("--prompt-file {}: is empty; give a text", file.display())))
            }
            // All of it, however long: each row takes what it needs from the start.
            text => engine.tokenizer().encode(&text, AddSpecial::Yes),
        }
    }

    /// Checks the lists and makes the rows.
    fn rows(&self) -> Result<Vec<Row>> {
        let of_mask = self.mask.keep()?;
        let threads = match self.threads[..] {
            [] => vec![of_mask.unwrap_or_else(numeric::topology::default_threads)],
            _ => self.threads.clone(),
        };
        let lists = Lists {
            prompts: self.n_prompt.clone(),
            gens: self.n_gen.clone(),
            batches: self.batch.clone(),
            depths: self.depth.clone(),
            kv_types: self.kv_type.iter().map(|&t| KvTypes::both(t)).collect(),
            threads,
        };
        lists.rows()
    }
}

pub fn run(args: &BenchArgs) -> Result<()> {
    if args.drop_cache {
        let model = args.load.weights.model.path()?;
        return put(&format!("{}\n", cold::drop_cache(&model)?));
    }
    let rows = args.rows()?;
    let base = args.resolve()?;
    let earlier = args.compare.as_deref().map(compare::read).transpose()?;
    let groups = rows::groups(&rows);
    let options: Vec<EngineOptions> = groups.iter().map(|g| g.options(&base)).collect();
    let began = Instant::now();
    let model = ModelPath::new(&base.model)?.open(base.weight_type)?;
    let plans = options.iter().map(|o| Plan::of(&model, o)).collect::<Result<Vec<_>>>()?;
    let took = began.elapsed();
    prepare(&plans)?;
    // The longest context, because loading checks the memory for it.
    let plan = plans.into_iter().max_by_key(|p| p.options.max_seq_len).expect("invariant: there are rows");
    let began = Instant::now();
    let engine = Engine::load_opened(Opened { plan, model, took }.settled(), &|_, _| {})?;
    let load_ms = (took + began.elapsed()).as_secs_f64() * 1e3;
    let environment = Environment::new(&engine, &rows);
    say!("{}", environment.line());
    let device = engine.device().map(|d| OnDevice::measure(&engine, d, &options[0])).transpose()?.flatten();
    if let Some(device) = &device {
        say!("{}", device.line());
    }

    let cancel = CancelToken::default();
    signal::connect(&cancel);
    let mut bench = Bench::new(&engine, &groups, &options, &cancel, args.text(&engine)?)?;
    bench.warm_up(&rows)?;
    let peak_rss = system::peak_rss();
    let weight_bytes = engine.weights().bytes_per_token;
    let reader = engine.device().is_none().then(|| Reader::new(&environment.threads, weight_bytes));
    let mut reader = reader.flatten();
    let timed = bench.run(&rows, args.repetitions, reader.as_mut())?;
    if let Some(file) = &args.trace {
        let (what, trace) = bench.trace(&rows)?;
        trace.write_chrome(file)?;
        stderr::write(format_args!("{what}\n{}", steps(&trace)));
    }
    let peak_rss_bytes = peak_rss.max(without(system::peak_rss(), reader.as_ref()));
    drop(bench);
    let ceilings = ceilings(&engine, &environment.threads, reader.as_ref())?;
    let rows = result::lines(&rows, timed, &ceilings, weight_bytes);
    let mut result = BenchResult { environment, device, load_ms, peak_rss_bytes, ceilings, rows };
    if let Some(earlier) = &earlier {
        compare::apply(&mut result, earlier);
    }
    put(&match args.output {
        Output::Md => table::markdown(&result.json()),
        Output::Csv => table::csv(&result.json()),
        Output::Json => format!("{:#}\n", result.json()),
        Output::Jsonl => result.json_lines(),
    })
}

/// The limits of whatever runs the model.
fn ceilings(engine: &Engine, threads: &[usize], reader: Option<&Reader>) -> Result<Ceilings> {
    if let Some(device) = engine.device() {
        return ceiling::of_device(device, threads);
    }
    // Of integers only if the weights are multiplied as integers.
    let isa = engine.options().isa.filter(|_| engine.weights().head.reads().blocks);
    Ok(ceiling::measure(threads, reader, isa))
}

/// The peak of memory in use, less the reader's buffer, which the model does not need. The peak after the warm-up alone
/// would be too low, because rows that decode write slots that the warm-up did not.
fn without(peak: Option<u64>, reader: Option<&Reader>) -> Option<u64> {
    peak.map(|peak| peak.saturating_sub(reader.map_or(0, Reader::bytes)))
}

/// Refuses what does not fit in memory, because all groups keep their caches at once, and prepares the process.
fn prepare(plans: &[Plan]) -> Result<()> {
    plan::check_sharing(plans, Context::Row, "measure fewer --depth, --kv-type or --threads at a time")?;
    start::prepare(plans.iter().map(|p| p.options.threads).max().unwrap_or(1))
}

/// A table of the time that each step took.
fn steps(trace: &Trace) -> String {
    let totals = trace.totals();
    let all: u64 = totals.iter().map(|t| t.1).sum();
    let mut lines = vec![vec!["step".to_string(), "calls".into(), "ms".into(), "%".into()]];
    let mut line = |step: &str, calls: u64, ns: u64| {
        let percent = 100.0 * ns as f64 / all.max(1) as f64;
        let ms = ns as f64 / 1e6;
        lines.push(vec![step.into(), calls.to_string(), format!("{ms:.3}"), format!("{percent:.1}")]);
    };
    totals.iter().for_each(|&(step, ns, calls)| line(step, calls, ns));
    line("all", totals.iter().map(|t| t.2).sum(), all);
    columns(&[Side::Left, Side::Right, Side::Right, Side::Right], &lines)
}
