//! `bench`: how fast this machine prefills, decodes and loads, and how near that is to what its memory and
//! its arithmetic could give.
//!
//! Repetitions go round-robin over the rows, so that a machine that slows down as it gets warm slows all
//! rows alike. Each row starts from a cache filled to its depth, which is not timed. On the CPU, what memory
//! gives is measured right before and right after each repetition that decodes one sequence: a machine that
//! others use too may read twice as fast a second later.

mod ceiling;
mod cold;
mod compare;
mod device;
mod growth;
mod measure;
mod result;
mod rows;
mod table;

use super::args::{BackendName, MaskArgs};
use super::report::{Side, columns};
use super::signal;
use super::start::{self, Voice};
use super::terminal::put;
use crate::model::trace::Recorder;
use crate::model::weights::WeightType;
use crate::run::engine::Engine;
use crate::run::options::{EngineOptions, PREFILL_CHUNK};
use crate::run::plan::{self, Context, Plan};
use crate::run::session::CancelToken;
use crate::run::system::{self, marker::Marker};
use ceiling::Reader;
use clap::{Args, ValueEnum};
use device::OnDevice;
use files::{Error, Result};
use measure::Bench;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use result::{Environment, Report};
use rows::Lists;
use std::path::PathBuf;
use std::time::Instant;

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Md,
    Csv,
    Json,
    Jsonl,
}

/// Measurements. Lists are separated by commas; flags of lists may be given more than once.
#[derive(Args, Clone)]
pub(super) struct BenchArgs {
    /// Model directory, .safetensors file, .gguf file or packed file [default: the baked model's directory]
    #[arg(short = 'm', long, visible_alias = "model", value_name = "PATH")]
    model_path: Option<PathBuf>,
    /// What weight matrices become: auto (native for GGUF, q4_0 for safetensors), native, q4_0 or f32
    #[arg(long, default_value = "auto", value_name = "TYPE")]
    weight_type: WeightType,
    /// Device that runs the model
    #[arg(short, long, value_enum, default_value = "cpu")]
    backend: BackendName,
    /// OpenCL: number of a device, or part of its name; `doctor` lists them
    #[arg(long, value_name = "DEVICE")]
    cl_device: Option<String>,
    /// OpenCL: attention on the GPU too
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    gpu_attn: bool,
    /// OpenCL: faster kernels where the device has some, whose text may differ from the CPU's; with --gpu-attn
    #[arg(long, requires = "gpu_attn")]
    gpu_fast: bool,
    /// Lengths of prompts to prefill; 0 is none
    #[arg(short = 'p', long, value_delimiter = ',', default_value = "512", value_name = "LIST")]
    n_prompt: Vec<usize>,
    /// Numbers of tokens to decode; 0 is none
    #[arg(short, long, value_delimiter = ',', default_value = "128", value_name = "LIST")]
    n_gen: Vec<usize>,
    /// Sequences that decode together, on the CPU; -n tokens each, of which tokens/s counts all
    #[arg(long, value_delimiter = ',', default_value = "1", value_name = "LIST")]
    batch: Vec<usize>,
    /// Filled slots that each row starts from
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
    /// CPU threads [default: one for each core that --cpu-mask leaves]
    #[arg(short, long, value_delimiter = ',', value_name = "LIST")]
    threads: Vec<usize>,
    #[command(flatten)]
    mask: MaskArgs,
    /// Timed runs of each row; their median counts
    #[arg(short, long, default_value_t = 5, value_name = "N")]
    repetitions: usize,
    /// Most tokens of one prefill step
    #[arg(long, default_value_t = PREFILL_CHUNK, value_name = "N")]
    prefill_chunk: usize,
    /// How results are printed
    #[arg(short, long, value_enum, default_value = "md")]
    output: Output,
    /// Write a Chrome/Perfetto trace of one decoded token, or of one prompt if the rows decode none, and print
    /// its steps on stderr
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Print ratios to the results in this file, written by -o json or -o jsonl
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Measure nothing; drop the model's files from the page cache, so that the next start is a cold one
    #[arg(long, hide = true)]
    drop_cache: bool,
}

impl BenchArgs {
    fn lists(&self) -> Result<Lists> {
        let of_mask = self.mask.threads()?;
        let threads = match self.threads[..] {
            [] => vec![of_mask.unwrap_or_else(numeric::topology::default_threads)],
            _ => self.threads.clone(),
        };
        let kv_types = self.kv_type.iter().map(|&t| KvTypes::both(t)).collect();
        let (prompts, gens) = (self.n_prompt.clone(), self.n_gen.clone());
        let batches = self.batch.clone();
        if let Some(n) = batches.iter().find(|&&n| n != 1).filter(|_| self.backend != BackendName::Cpu) {
            return Err(Error::Usage(format!(
                "--batch {n}: sequences decode together on --backend cpu only"
            )));
        }
        Ok(Lists { prompts, gens, batches, depths: self.depth.clone(), kv_types, threads })
    }

    /// Checks the flags; the options are those of the model, without a group's own.
    fn resolve(&self) -> Result<EngineOptions> {
        let within = |flag: &str, n: usize, most: usize| match (1..=most).contains(&n) {
            true => Ok(n),
            false => Err(Error::Usage(format!("{flag} {n}: use a number from 1 to {most}"))),
        };
        within("--repetitions", self.repetitions, 10_000)?;
        let mut options =
            EngineOptions::new(self.model_path.clone().unwrap_or_else(super::args::default_model));
        options.weight_type = self.weight_type;
        options.prefill_chunk = within("--prefill-chunk", self.prefill_chunk, 4096)?;
        options.isa = Some(Isa::detect()?);
        options.backend = self.backend.kind();
        options.cl_device.clone_from(&self.cl_device);
        options.gpu_attn = self.gpu_attn;
        options.gpu_fast = self.gpu_fast;
        options.notice = |line| eprintln!("{line}");
        Ok(options)
    }
}

pub(super) fn run(args: &BenchArgs) -> Result<()> {
    if args.drop_cache {
        let model = args.model_path.clone().unwrap_or_else(super::args::default_model);
        return put(&format!("{}\n", cold::drop_cache(&model)?));
    }
    let base = args.resolve()?;
    let rows = args.lists()?.rows()?;
    let earlier = args.compare.as_deref().map(compare::read).transpose()?;
    let groups = rows::groups(&rows);
    // The longest context first: that is what loading checks the memory for.
    let options: Vec<EngineOptions> = groups.iter().map(|g| g.options(&base)).collect();
    let largest = options.iter().max_by_key(|o| o.max_seq_len).expect("invariant: there are rows").clone();
    let _marker = prepare(&args.mask, &options)?;
    let began = Instant::now();
    let engine = Engine::load(largest)?;
    let load = began.elapsed();
    let environment = Environment::new(&engine, &rows);
    eprintln!("{}", environment.line());
    let device = engine.device().map(|d| OnDevice::measure(&engine, d, &options[0])).transpose()?.flatten();
    if let Some(device) = &device {
        eprintln!("{}", device.line());
    }

    let cancel = CancelToken::default();
    signal::connect(&cancel);
    let mut bench = Bench::new(&engine, &groups, &options, &cancel)?;
    bench.warm_up(&rows)?;
    let peak_rss = system::peak_rss();
    let bytes_per_token = engine.weights().bytes_per_token;
    let reader = engine.device().is_none().then(|| Reader::new(&environment.threads, bytes_per_token));
    let mut reader = reader.flatten();
    let timed = bench.run(&rows, args.repetitions, reader.as_mut())?;
    if let Some(file) = &args.trace {
        let (what, recorder) = bench.trace(&rows)?;
        recorder.write_chrome(file)?;
        eprint!("{what}\n{}", steps(&recorder));
    }
    let peak_rss = peak_rss.max(without(system::peak_rss(), reader.as_ref()));
    drop(bench);
    let integers = base.isa.filter(|_| engine.weights().head.reads().blocks);
    let ceilings = match engine.device() {
        Some(device) => ceiling::of_device(device, &environment.threads)?,
        None => ceiling::measure(&environment.threads, reader.as_ref(), integers),
    };
    let mut report = Report { environment, device, load, peak_rss, ceilings, rows: Vec::new() };
    report.add(&rows, timed, bytes_per_token);
    if let Some(earlier) = &earlier {
        compare::apply(&mut report, earlier);
    }
    put(&match args.output {
        Output::Md => table::markdown(&report),
        Output::Csv => table::csv(&report),
        Output::Json => format!("{:#}\n", report.json()),
        Output::Jsonl => report.json_lines(),
    })
}

/// The most memory in use, less the reader's buffer, which the model does not need. Rows that decode write
/// slots of their cache that the warm-up did not, and so the peak after it alone would be too low.
fn without(peak: Option<u64>, reader: Option<&Reader>) -> Option<u64> {
    peak.map(|peak| peak.saturating_sub(reader.map_or(0, Reader::bytes)))
}

/// Refuses what will not fit, since all groups keep their caches at once, and prepares the process.
fn prepare(mask: &MaskArgs, options: &[EngineOptions]) -> Result<Marker> {
    let plans = options.iter().map(Plan::new).collect::<Result<Vec<_>>>()?;
    let need =
        plan::check_sharing(&plans, Context::Row, "measure fewer --depth, --kv-type or --threads at a time")?;
    let threads = options.iter().map(|o| o.threads).max().unwrap_or(1);
    start::planned(&plans[0], need, (mask, threads), (Context::Row, Voice::Normal))
}

/// What each step took.
fn steps(recorder: &Recorder) -> String {
    let totals = recorder.totals();
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
