//! OpenCL in `doctor`: the libraries tried, the devices, the choice, and what to do if there is none.

use super::{DoctorArgs, facts_text};
use crate::cli::args::{FlagWarnings, check_range};
use crate::cli::background_compile::device_options;
use crate::cli::load::{self, LoadedEngine};
use crate::cli::prompts::MAX_BATCH;
use crate::cli::terminal::{Verbosity, write_stdout};
use crate::opencl::tune::{STEP, Tuning, VariantTiming};
use crate::opencl::variants::Tokens;
use crate::opencl::{Cache, DeviceInfo};
use crate::run::options::EngineOptions;
use crate::run::plan::{OpenedModel, format_mib};
use crate::tools::columns::{Align, align_columns};
use files::error::one_line;
use files::{Error, Result, print_stderr};
use opencl_runtime::device::{DeviceEntry, list_devices, select_device};
use opencl_runtime::device_info::LocalMemory;
use opencl_runtime::load::{Search, install_advice};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Maximum bytes shown of a driver's text.
const MAX_TEXT: usize = 200;

/// Name of the fact that names the chosen device, and the words before its name.
const CHOICE: &str = "opencl choice";
const CHOSEN: &str = "--backend opencl uses device ";

/// The lines of [`list_facts`], printed by a process of its own: a driver that crashes ends only that.
///
/// # Errors
///
/// `Device` if the driver crashes.
pub fn ask_driver(select: Option<&str>) -> Result<String> {
    let here = || Ok(facts_text(list_facts(select)));
    let Ok(program) = std::env::current_exe() else { return here() };
    let mut child = Command::new(program);
    child.args(["doctor", "--only-opencl"]).args(select.map(|device| format!("--cl-device={device}")));
    match child.stdin(Stdio::null()).stderr(Stdio::inherit()).output() {
        Ok(out) if out.status.success() => Ok(String::from_utf8_lossy(&out.stdout).into_owned()),
        Ok(out) => {
            Err(Error::Device(format!("OpenCL: a driver ends the program that asks it: {}", out.status)))
        }
        Err(_) => here(),
    }
}

/// The name of the chosen device in the lines of [`list_facts`], if there is one.
pub fn find_chosen(facts: &str) -> Option<&str> {
    let choice = facts.lines().find_map(|line| line.strip_prefix(CHOICE))?;
    choice.trim_start().strip_prefix(CHOSEN)?.split_once(", ").map(|(_, name)| name)
}

/// Facts as name and text.
pub fn list_facts(select: Option<&str>) -> Vec<(String, String)> {
    let search = Search::get();
    let mut lines = Vec::new();
    for tried in &search.candidates {
        let outcome = match &tried.found {
            Ok(used) => format!("{}: {used}", tried.name),
            // The linker's message usually begins with the name.
            Err(words) if words.starts_with(&tried.name) => words.clone(),
            Err(words) => format!("{}: {words}", tried.name),
        };
        lines.push(("opencl library".to_string(), one_line(&outcome, MAX_TEXT)));
    }
    let found = list_devices().unwrap_or_default();
    for (i, device) in found.iter().enumerate() {
        lines.push((format!("opencl device {i}"), one_line(&describe_identity(&device.facts), 2 * MAX_TEXT)));
        lines.push((String::new(), describe_sizes(&device.facts)));
        lines.push((String::new(), describe_features(&device.facts)));
    }
    let choice = if search.libraries.is_empty() {
        format!("none: {}", install_advice())
    } else {
        describe_choice(found, select)
    };
    lines.push((CHOICE.into(), one_line(&choice, 4 * MAX_TEXT)));
    lines.push(("opencl cache".into(), Cache::for_user().describe_contents()));
    lines
}

/// Measures each kernel variant for one token and for many, and prints a table; the fastest are used from then on. Then
/// compiles all programs of a text with these flags.
pub fn tune_device(args: &DoctorArgs) -> Result<()> {
    let batch = check_range("--batch", args.batch, MAX_BATCH)?;
    let options = EngineOptions { batch, ..device_options(args.model.resolve_options()?) };
    let opened = OpenedModel::new(&options)?;
    let LoadedEngine { engine, .. } = load::load_engine(opened, Verbosity::Normal, &FlagWarnings::default())?;
    if let Some(tuned) = engine.tune_kernels()? {
        write_stdout(&format_timings(&tuned))?;
    }
    let (began, mut count) = (Instant::now(), 0);
    for sequences in [1, batch].into_iter().take(batch.min(2)) {
        count = engine.compile_programs(sequences)?;
    }
    let name = engine.device().map_or("the device", |device| &device.info().name);
    let seconds = began.elapsed().as_secs_f64();
    print_stderr!("{count} OpenCL programs are ready for {name}, after {seconds:.1} s");
    Ok(())
}

/// A table of the variants' times.
fn format_timings(tuned: &Tuning) -> String {
    let line = |timing: &VariantTiming| {
        let (tokens, kernel) = match timing.tokens {
            Tokens::One => ("one token", "gemv"),
            Tokens::Many => ("many tokens", "gemm"),
        };
        let chosen = tuned.fastest.get(timing.tokens) == timing.variant;
        timing_row(
            [tokens, STEP.names().0, &format!("{kernel}:{}", timing.variant.name)],
            timing.took,
            chosen,
        )
    };
    let sides = [Align::Left, Align::Left, Align::Left, Align::Right, Align::Left];
    align_columns(&sides, &tuned.timings.iter().map(line).collect::<Vec<_>>())
}

/// A row of the table of [`format_timings`].
fn timing_row(what: [&str; 3], took: Duration, chosen: bool) -> Vec<String> {
    let [took, chosen] =
        [format!("{:.3} ms", 1e3 * took.as_secs_f64()), if chosen { "chosen".into() } else { String::new() }];
    what.map(String::from).into_iter().chain([took, chosen]).collect()
}

fn describe_choice(found: &[DeviceEntry], select: Option<&str>) -> String {
    match select_device(found, select) {
        Ok(index) => format!("{CHOSEN}{index}, {}", found[index].facts.name),
        Err(failure) => format!("none: {}", failure.message),
    }
}

fn describe_identity(facts: &DeviceInfo) -> String {
    let DeviceInfo { name, vendor, version, c_version, driver, platform, .. } = facts;
    let kind = facts.device_type.name();
    format!("{name}; {kind} by {vendor}; {version}, {c_version}; driver {driver}; platform {platform}")
}

fn describe_sizes(facts: &DeviceInfo) -> String {
    let local = match facts.local_memory_kind {
        LocalMemory::Dedicated => "of its own",
        LocalMemory::Global => "in global memory",
    };
    format!(
        "{} compute units at {} MHz; memory {}, buffers up to {}, {} KiB local {local}; workgroups up to {}; alignment {}",
        facts.compute_units,
        facts.clock_mhz,
        format_mib(facts.global_memory),
        format_mib(facts.max_alloc),
        facts.local_memory >> 10,
        facts.max_work_group,
        facts.base_align
    )
}

fn describe_features(facts: &DeviceInfo) -> String {
    let mut list = Vec::new();
    let mut add = |there: bool, what: &str| list.push(format!("{}{what}", if there { "" } else { "no " }));
    add(facts.unified_memory, "memory shared with the CPU");
    add(facts.has_fp16(), "fp16 arithmetic");
    add(facts.has_subgroups(), "subgroups");
    add(facts.dot_extension().is_some(), "integer dot product");
    if let Some((major, minor)) = facts.compute_capability {
        list.push(format!("compute capability {major}.{minor}"));
    }
    list.join(", ")
}
