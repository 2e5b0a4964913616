//! `bench`: measures the speed of prefill, decode and loading, compared with the limits of this machine's memory and
//! arithmetic.
//!
//! Repetitions go round-robin over the rows, so that a machine that slows down as it gets warm slows all rows alike.
//! Each row starts from a cache filled to its depth, which is not timed. On the CPU, the read bandwidth is measured
//! right before and after each repetition that decodes one sequence, because on a shared machine it may double within a
//! second.

mod device;
mod limits;
mod measure;
mod page_cache;
mod result;
mod rows;
mod table;

use super::columns::{Align, align_columns};
use crate::cli::args::{FlagWarnings, LoadArgs, MaskArgs, check_range, read_trimmed_text};
use crate::cli::load;
use crate::cli::signal;
use crate::cli::terminal::{Verbosity, write_stdout};
use crate::model::trace::Trace;
use crate::run::engine::Engine;
use crate::run::options::EngineOptions;
use crate::run::plan::{self, ContextName, OpenedModel, Plan};
use crate::run::session::CancelToken;
use crate::run::system;
use clap::{Args, ValueEnum};
use device::DeviceFigures;
use files::{Error, Result, print_stderr, stderr};
use limits::{BandwidthReader, MachineLimits};
use measure::Bench;
use numeric::simd::Isa;
use numeric::topology;
use result::{BenchResult, Environment};
use rows::RowLists;
use std::path::PathBuf;
use std::time::Instant;
use table::Detail;
use text::tokenizer::AddSpecial;

/// Format of results.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BenchFormat {
    Md,
    Csv,
    Json,
    Jsonl,
}

/// Flags of `bench`. Lists are separated by commas; flags with lists may be repeated.
#[derive(Args, Clone)]
pub struct BenchArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    #[command(flatten)]
    lists: RowLists,
    #[command(flatten)]
    mask: MaskArgs,
    /// Timed runs per row; the median is shown
    #[arg(short, long, default_value_t = 5, value_name = "N")]
    repetitions: usize,
    /// Use the tokens of this text, repeated as needed [default: random tokens]
    #[arg(short = 'f', long, visible_alias = "file", value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "md")]
    output: BenchFormat,
    /// Show all columns and the limits of this machine. Otherwise "% of limit" is of the read bandwidth for generation,
    /// and of the integer peak for prompts
    #[arg(short, long)]
    verbose: bool,
    /// Write a Chrome/Perfetto trace of one generated token, or of one prompt if no row generates, and print its steps
    /// on stderr
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Measure nothing; drop the model's files from the page cache, so that the next start is cold
    #[arg(long, hide = true)]
    drop_cache: bool,
    #[command(flatten, next_help_heading = "Model")]
    load: LoadArgs,
}

impl BenchArgs {
    /// Checks and resolves the flags, except those that each group of rows sets.
    fn resolve_options(&self) -> Result<EngineOptions> {
        check_range("--repetitions", self.repetitions, 10_000)?;
        Ok(EngineOptions { isa: Some(Isa::detect()?), ..self.load.resolve_options()? })
    }

    /// Reads the tokens of `--prompt-file`.
    fn read_tokens(&self, engine: &Engine) -> Result<Vec<u32>> {
        let Some(file) = &self.prompt_file else { return Ok(Vec::new()) };
        match read_trimmed_text("--prompt-file", file)? {
            text if text.is_empty() => {
                Err(Error::Usage(format!("--prompt-file {}: is empty; give a text", file.display())))
            }
            // The whole text, however long; each row takes what it needs.
            text => engine.tokenizer().encode(&text, AddSpecial::Yes),
        }
    }
}

pub fn run(args: &BenchArgs) -> Result<()> {
    if args.drop_cache {
        let model = args.load.weights.model.model_path()?;
        return write_stdout(&format!("{}\n", page_cache::drop_cache(&model)?));
    }
    let cores = args.mask.pin_thread()?;
    let rows = args.lists.combine_rows(cores.unwrap_or_else(topology::default_threads))?;
    let base = args.resolve_options()?;
    let groups = rows::longest_of_groups(&rows);
    let options: Vec<EngineOptions> = groups.iter().map(|row| row.with_options(&base)).collect();
    let began = Instant::now();
    let model = base.open_model()?;
    let plans = options.iter().map(|o| Plan::for_model(&model, o)).collect::<Result<Vec<_>>>()?;
    let took = began.elapsed();
    prepare_run(&plans, args)?;
    // Loading checks the memory for the longest context.
    let plan = plans.into_iter().max_by_key(|p| p.options.max_seq_len).expect("invariant: there are rows");
    let began = Instant::now();
    let opened = OpenedModel { plan, model, tokenizer: None, took }.resolve_auto();
    let mut engine = load::load_with_progress(opened, Verbosity::Normal)?;
    if args.prompt_file.is_none() {
        engine.discard_expert_counts(); // random tokens choose other experts than texts
    }
    let engine = engine;
    let load_ms = (took + began.elapsed()).as_secs_f64() * 1e3;
    let environment = Environment::new(&engine, &rows);
    print_stderr!("{}", environment.summary_line());
    let device =
        engine.device().map(|d| DeviceFigures::measure(&engine, d, &options[0])).transpose()?.flatten();
    if let Some(device) = &device {
        print_stderr!("{}", device.summary_line());
    }

    let cancel = CancelToken::default();
    signal::connect_cancel(&cancel);
    let mut bench = Bench::new(&engine, &groups, &options, &cancel, args.read_tokens(&engine)?)?;
    bench.warm_up(&rows)?;
    let peak_rss = system::peak_rss();
    let weight_bytes = engine.weights().bytes_per_token;
    let reader = engine.device().is_none().then(|| BandwidthReader::new(&environment.threads, weight_bytes));
    let mut reader = reader.flatten();
    let samples = bench.run(&rows, args.repetitions, reader.as_mut())?;
    if let Some(file) = &args.trace {
        let (what, trace) = bench.trace_bench_row(&rows)?;
        trace.write_chrome(file)?;
        stderr::write_stderr(format_args!("{what}\n{}", steps_table(&trace)));
    }
    // Without the reader's buffer, which the model does not need. The peak after the warm-up alone is too low, because
    // decoding writes slots that the warm-up did not.
    let buffer = reader.as_ref().map_or(0, BandwidthReader::buffer_bytes);
    let peak_rss_bytes = peak_rss.max(system::peak_rss().map(|peak| peak.saturating_sub(buffer)));
    drop(bench);
    let limits = measure_limits(&engine, &environment.threads, reader.as_ref())?;
    let rows = result::compute_results(&rows, samples, &limits, weight_bytes);
    let result = BenchResult { environment, device, load_ms, peak_rss_bytes, limits, rows };
    write_stdout(&match args.output {
        BenchFormat::Md if args.verbose => table::to_markdown(&result, Detail::All),
        BenchFormat::Md => table::to_markdown(&result, Detail::Short),
        BenchFormat::Csv => table::to_csv(&result),
        BenchFormat::Json => format!("{:#}\n", result.to_json()),
        BenchFormat::Jsonl => result.json_lines(),
    })
}

/// Measures the limits of the device that runs the model.
fn measure_limits(
    engine: &Engine,
    threads: &[usize],
    reader: Option<&BandwidthReader>,
) -> Result<MachineLimits> {
    if let Some(device) = engine.device() {
        return limits::measure_device(device, threads);
    }
    // The integer peak is a limit only if the weights are multiplied as integers.
    let isa = engine.options().isa.filter(|_| engine.weights().head.activation_forms().blocks);
    Ok(limits::measure_cpu(threads, reader, isa))
}

/// Fails if the caches of all groups do not fit in memory together; else prepares the process.
fn prepare_run(plans: &[Plan], args: &BenchArgs) -> Result<()> {
    plan::check_sequences_fit(
        plans,
        ContextName::Row,
        "measure fewer --depth, --kv-type or --threads at a time",
    )?;
    load::prepare_process(plans.iter().map(|p| p.options.threads).max().unwrap_or(1), &args.warnings)
}

/// A table of the time of each step.
fn steps_table(trace: &Trace) -> String {
    let totals = trace.step_totals();
    let all: u64 = totals.iter().map(|t| t.1).sum();
    let mut lines = vec![vec!["step".to_string(), "calls".into(), "ms".into(), "%".into()]];
    let mut line = |step: &str, calls: u64, ns: u64| {
        let percent = 100.0 * ns as f64 / all.max(1) as f64;
        let ms = ns as f64 / 1e6;
        lines.push(vec![step.into(), calls.to_string(), format!("{ms:.3}"), format!("{percent:.1}")]);
    };
    totals.iter().for_each(|&(step, ns, calls)| line(step, calls, ns));
    line("all", totals.iter().map(|t| t.2).sum(), all);
    align_columns(&[Align::Left, Align::Right, Align::Right, Align::Right], &lines)
}
