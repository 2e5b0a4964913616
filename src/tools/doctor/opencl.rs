//! OpenCL in `doctor`: the libraries tried, the devices, the choice, and what to do if there is none.

use crate::opencl::tune::{STEP, Timing};
use crate::opencl::variants::Tokens;
use crate::opencl::{Cache, Facts};
use crate::run::engine::Engine;
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::plan::mib;
use crate::run::session::Notice;
use crate::tools::columns::{Align, columns};
use files::error::one_line;
use files::{Result, say};
use opencl_runtime::device::{Found, choose, devices};
use opencl_runtime::facts::LocalMemory;
use opencl_runtime::load::{Search, remedy};
use std::path::Path;
use std::time::Duration;

/// Maximum bytes shown of a driver's text.
const MAX_TEXT: usize = 200;

/// Facts as name and text.
pub fn facts(select: Option<&str>) -> Vec<(String, String)> {
    let search = Search::get();
    let mut lines = Vec::new();
    for tried in &search.tried {
        let outcome = match &tried.found {
            Ok(used) => format!("{}: {used}", tried.name),
            // The linker's message usually begins with the name.
            Err(words) if words.starts_with(&tried.name) => words.clone(),
            Err(words) => format!("{}: {words}", tried.name),
        };
        lines.push(("opencl library".to_string(), one_line(&outcome, MAX_TEXT)));
    }
    let found = devices().unwrap_or_default();
    for (i, device) in found.iter().enumerate() {
        lines.push((format!("opencl device {i}"), one_line(&identity(&device.facts), 2 * MAX_TEXT)));
        lines.push((String::new(), sizes(&device.facts)));
        lines.push((String::new(), features(&device.facts)));
    }
    let choice =
        if search.libraries.is_empty() { format!("none: {}", remedy()) } else { choice(found, select) };
    lines.push(("opencl choice".into(), one_line(&choice, 4 * MAX_TEXT)));
    lines.push(("opencl cache".into(), Cache::of_user().describe()));
    lines
}

/// Measures each kernel variant for one token and for many, and returns a table. The fastest are used from then on.
pub fn tuned(model: &Path, select: Option<&str>) -> Result<String> {
    let options = EngineOptions {
        backend: BackendKind::OpenCl,
        cl_device: select.map(str::to_string),
        notice: Notice::new(|line| say!("{line}")),
        ..EngineOptions::new(model)
    };
    let Some(tuned) = Engine::load(options)?.tune()? else { return Ok(String::new()) };
    let line = |timing: &Timing| {
        let (tokens, kernel) = match timing.tokens {
            Tokens::One => ("one token", "gemv"),
            Tokens::Many => ("many tokens", "gemm"),
        };
        let chosen = tuned.fastest.get(timing.tokens) == timing.variant;
        row([tokens, STEP.names().0, &format!("{kernel}:{}", timing.variant.name)], timing.took, chosen)
    };
    let sides = [Align::Left, Align::Left, Align::Left, Align::Right, Align::Left];
    let rows = tuned.timings.iter().map(line);
    Ok(columns(&sides, &rows.collect::<Vec<_>>()))
}

/// A row of the table of [`tuned`].
fn row(what: [&str; 3], took: Duration, chosen: bool) -> Vec<String> {
    let [took, chosen] =
        [format!("{:.3} ms", 1e3 * took.as_secs_f64()), if chosen { "chosen".into() } else { String::new() }];
    what.map(String::from).into_iter().chain([took, chosen]).collect()
}

fn choice(found: &[Found], select: Option<&str>) -> String {
    match choose(found, select) {
        Ok(index) => format!("--backend opencl uses device {index}, {}", found[index].facts.name),
        Err(failure) => format!("none: {}", failure.message),
    }
}

fn identity(facts: &Facts) -> String {
    let Facts { name, vendor, version, c_version, driver, platform, .. } = facts;
    let kind = facts.device_type.name();
    format!("{name}; {kind} by {vendor}; {version}, {c_version}; driver {driver}; platform {platform}")
}

fn sizes(facts: &Facts) -> String {
    let local = match facts.local_memory_is {
        LocalMemory::Own => "of its own",
        LocalMemory::Global => "in global memory",
    };
    format!(
        "{} compute units at {} MHz; memory {}, buffers up to {}, {} KiB local {local}; workgroups up to {}; alignment {}",
        facts.compute_units,
        facts.clock_mhz,
        mib(facts.global_memory),
        mib(facts.max_alloc),
        facts.local_memory >> 10,
        facts.max_work_group,
        facts.base_align
    )
}

fn features(facts: &Facts) -> String {
    let mut list = Vec::new();
    let mut add = |there: bool, what: &str| list.push(format!("{}{what}", if there { "" } else { "no " }));
    add(facts.unified_memory, "memory shared with the CPU");
    add(facts.fp16(), "fp16 arithmetic");
    add(facts.subgroups(), "subgroups");
    add(facts.dot().is_some(), "integer dot product");
    if let Some((major, minor)) = facts.compute_capability {
        list.push(format!("compute capability {major}.{minor}"));
    }
    list.join(", ")
}
