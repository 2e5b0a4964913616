//! `doctor`: reports what this machine offers and how the program uses it, after a verdict in one line.

mod opencl;

use super::columns::{Align, align_columns};
use crate::cli;
use crate::cli::args::ModelArgs;
use crate::cli::flags::name_flags;
use crate::cli::terminal::write_stdout;
use crate::model::weights::{Checkpoint, ModelPath, WeightType};
use crate::run::options::EngineOptions;
use crate::run::plan::{Plan, format_mib};
use crate::run::split::Split;
use crate::run::system::{self, Memory, cgroup, read_file};
use clap::Args;
use files::bundle::Bundle;
use files::error::{MAX_LINE_BYTES, one_line};
use files::{Error, Result};
use numeric::simd::Isa;
use numeric::topology;
use std::collections::BTreeMap;
use std::path::Path;

/// Flags of `doctor`.
#[derive(Args, Clone)]
#[command(mut_arg("backend", |arg| arg.default_value("opencl")))]
pub struct DoctorArgs {
    /// Compile all OpenCL programs that a text with these flags needs, so that it computes on the GPU from its first
    /// token; measure the kernel variants again, and show the times
    #[arg(long)]
    tune: bool,
    /// With --tune: also compile what N texts together need (--batch of generate, --slots of serve)
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch: usize,
    #[command(flatten)]
    model: ModelArgs,
    /// Print only the facts about OpenCL
    #[arg(long, hide = true)]
    only_opencl: bool,
}

/// Width of the first column: its longest entry.
const WIDTH: usize = "instruction sets".len();
const UNKNOWN: &str = "not reported by this system";

/// Prints a verdict and the facts. An unknown fact is no error; only a broken stdout is.
pub fn run(args: &DoctorArgs) -> Result<()> {
    if args.only_opencl {
        return write_stdout(&facts_text(opencl::list_facts(args.model.load.device.cl_device.as_deref())));
    }
    if args.tune {
        return opencl::tune_device(args);
    }
    let load = &args.model.load;
    let model = load.weights.model.model_path()?;
    let (state, devices) = (model_state(&model), opencl::ask_driver(load.device.cl_device.as_deref()));
    let verdict = one_line(&name_flags(&give_verdict(&model, &state, &devices)), MAX_LINE_BYTES);
    let facts = [
        ("program", cli::version_text()),
        ("cpu", system::this_cpu()),
        ("kernel", system::kernel_name()),
        ("instruction sets", instruction_sets()),
        ("cores", describe_cores()),
        ("core speeds", describe_speeds()),
        ("threads", describe_threads()),
        ("cpu quota", cgroup::cpu_quota().map_or("none".into(), |q| format!("{q:.2} cores' worth of time"))),
        ("memory", describe_memory()),
        ("page size", format!("{} KiB", files::mapped::page_size() >> 10)),
        ("huge pages", huge_pages()),
        ("model path", model.display().to_string()),
        ("model", state.unwrap_or_else(|e| e.to_string())),
    ];
    let split = describe_split(&args.model).map(|split| ("split", split));
    let facts = facts.into_iter().chain(split).map(|(what, is)| (what.into(), is));
    let facts = facts_text(facts.collect());
    let devices = devices.unwrap_or_else(|e| facts_text(vec![("opencl".into(), e.to_string())]));
    write_stdout(&format!("{verdict}\n\n{facts}{devices}"))
}

/// The devices that would be used, or all that is wrong.
fn give_verdict(model: &Path, state: &Result<String>, devices: &Result<String>) -> String {
    let fits = || Plan::new(&EngineOptions::new(model))?.check();
    let model = state.as_ref().map_err(Error::clone).and_then(|_| fits());
    let problems = [Isa::detect().err(), model.err(), devices.as_ref().err().cloned()];
    let problems: Vec<String> = problems.iter().flatten().map(Error::to_string).collect();
    if !problems.is_empty() {
        return format!("not ok: {}", problems.join("; "));
    }
    let gpu = devices.iter().find_map(|facts| opencl::find_chosen(facts));
    let (isa, threads) = (Isa::detect().map_or("?", Isa::name), topology::default_threads());
    let gpu = gpu.map_or("no GPU".into(), |name| format!("OpenCL {name} usable"));
    format!("ok: CPU {isa}, {threads} thread{}; {gpu}", if threads == 1 { "" } else { "s" })
}

/// The lines of some facts.
fn facts_text(facts: Vec<(String, String)>) -> String {
    let line = |(what, is): (String, String)| {
        vec![format!("{what:<WIDTH$}"), one_line(&name_flags(&is), MAX_LINE_BYTES - WIDTH - 2)]
    };
    align_columns(&[Align::Left, Align::Left], &facts.into_iter().map(line).collect::<Vec<_>>())
}

fn instruction_sets() -> String {
    let found: Vec<&str> = Isa::available().iter().map(|i| i.name()).collect();
    let chosen = match Isa::detect() {
        Ok(isa) => format!("{} is used", isa.name()),
        Err(e) => e.to_string(),
    };
    format!("{}; {chosen}", found.join(", "))
}

/// The items as `0, 1, 4`, or [`UNKNOWN`].
fn join_or_unknown(items: &[impl ToString]) -> String {
    match items {
        [] => UNKNOWN.into(),
        _ => items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
    }
}

fn describe_cores() -> String {
    let online = read_file("/sys/devices/system/cpu/online").map_or("?".into(), |t| t.trim().to_string());
    format!("{online} online; this process may use {}", join_or_unknown(&topology::allowed_cores()))
}

/// The layers of each device, if they are split, and whether they fit.
fn describe_split(model: &ModelArgs) -> Option<String> {
    let device = &model.load.device;
    if !device.is_split() {
        return None;
    }
    let plan = match model.resolve_options().and_then(|options| Plan::new(&options)) {
        Ok(plan) => plan,
        Err(e) => return Some(e.to_string()),
    };
    let split = plan.options.split.as_ref().map_or("none".into(), Split::to_string);
    Some(plan.check().map_or_else(|e| format!("{split}: {e}"), |()| format!("{split}: fits")))
}

/// Cores grouped by capacity (1024 is the fastest) or by maximum clock.
fn describe_speeds() -> String {
    let mut kinds: BTreeMap<(u64, &str), Vec<usize>> = BTreeMap::new();
    for core in topology::allowed_cores() {
        let number = |file: &str| -> Option<u64> {
            read_file(&format!("/sys/devices/system/cpu/cpu{core}/{file}"))?.trim().parse().ok()
        };
        let speed = number("cpu_capacity").map(|c| (c, "capacity"));
        let speed = speed.or_else(|| number("cpufreq/cpuinfo_max_freq").map(|khz| (khz / 1000, "MHz")));
        if let Some(speed) = speed {
            kinds.entry(speed).or_default().push(core);
        }
    }
    let kinds: Vec<String> = kinds
        .iter()
        .rev()
        .map(|((n, unit), cores)| format!("{n} {unit} on core {}", join_or_unknown(cores)))
        .collect();
    if kinds.is_empty() { UNKNOWN.into() } else { kinds.join("; ") }
}

fn describe_threads() -> String {
    let (chosen, allowed, big) =
        (topology::default_threads(), topology::allowed_cores().len(), topology::big_cores());
    let why = match std::thread::available_parallelism().map(|n| n.get()) {
        Ok(n) if n < allowed => format!("the CPU quota allows {n} of {allowed} cores"),
        Ok(_) if big.len() < allowed => format!("the big cores are {}", topology::format_ranges(&big)),
        Ok(n) if chosen < n => "one per two hyper-threads".into(),
        _ => "one per core this process may use".into(),
    };
    format!("{chosen} by default: {why}")
}

fn describe_memory() -> String {
    let m = Memory::current();
    let size = |bytes: Option<u64>| bytes.map_or("?".into(), format_mib);
    let limit = match (m.limit, m.limit_left) {
        (Some(limit), Some(left)) => format!("{}, of which {} are left", format_mib(limit), format_mib(left)),
        _ => "none".into(),
    };
    format!("{} total, {} available; container limit: {limit}", size(m.total), size(m.available))
}

fn huge_pages() -> String {
    let setting = read_file("/sys/kernel/mm/transparent_hugepage/enabled");
    let meaning = match setting.as_deref().and_then(|s| s.split_once('[')?.1.split(']').next()) {
        Some("always" | "madvise") => "used for weights and cache",
        Some("never") => "off; \"madvise\" would make generation faster",
        _ => return "none in this kernel".into(),
    };
    format!("{}: {meaning}", setting.unwrap_or_default().trim())
}

/// State of the model: found, made for this program, packed.
fn model_state(path: &Path) -> Result<String> {
    let path = ModelPath::new(path)?;
    let model = path.open(WeightType::Auto)?;
    model.check_config()?;
    let opened = model.checkpoint;
    if let Some(bundle) = Bundle::open(&path.weights)? {
        bundle.verify_checksums()?;
        let files = bundle.file_names().collect::<Vec<_>>().join(", ");
        return Ok(format!("a bundle, every byte verified: {files}"));
    }
    if opened.packed().is_some() {
        return Ok(format!("packed: {}", opened.path().display()));
    }
    let Some(beside) = path.packed_path() else { return Ok("a checkpoint".into()) };
    let state = match Checkpoint::open(&beside) {
        Ok(_) => "from another checkpoint or version",
        Err(_) => "missing",
    };
    Ok(format!("a checkpoint; {} is {state}: run `antigravity pack` for instant loading", beside.display()))
}
