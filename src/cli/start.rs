//! What every command that runs a model does first: signals, cores, memory, the marker that outlives a kill, and
//! loading.

use super::args::{MaskArgs, told};
use super::flags::named;
use super::signal;
use super::terminal::{Progress, Verbosity};
use crate::run::engine::Engine;
use crate::run::plan::{Context, Opened, Plan, mib};
use crate::run::system::marker::{self, Marker, Planned};
use files::{Error, Result, atomic_file, say};
use numeric::pool;
use numeric::topology;
use std::time::{Duration, Instant};

/// A loaded model. It is held until the run is over.
pub(super) struct Loaded {
    pub engine: Engine,
    /// How long loading took.
    pub took: Duration,
    _marker: Marker,
}

/// How the process runs.
pub(super) struct Process<'a> {
    pub mask: &'a MaskArgs,
    /// Most threads.
    pub threads: usize,
    /// What advice on memory is about.
    pub context: Context,
    pub verbosity: Verbosity,
}

/// Prepares the process for one run of an opened model, and loads it.
///
/// # Errors
///
/// `Memory` if it does not fit, `Usage` if the mask cannot be used, and those of [`Engine::load`].
pub(super) fn load(opened: Opened, mask: &MaskArgs, verbosity: Verbosity) -> Result<Loaded> {
    let (began, opening) = (Instant::now(), opened.took);
    let plan = &opened.plan;
    plan.check()?;
    let process = Process { mask, threads: plan.options.threads, context: Context::MaxSeqLen, verbosity };
    let marker = prepare(plan, plan.planned(), &process)?;
    let progress = Progress::new("loading tensor", verbosity);
    let engine = Engine::load_opened(opened, &|done, all| progress.show(done, all))?;
    Ok(Loaded { engine, took: opening + began.elapsed(), _marker: marker })
}

/// Prepares the process for plans that were checked and need this much in all. `plan`, the first of them, gives the
/// advice after a kill. The marker is held until the run is over.
///
/// # Errors
///
/// `Usage` if the mask cannot be used.
pub(super) fn prepare(plan: &Plan, planned: Planned, process: &Process<'_>) -> Result<Marker> {
    // First, because threads inherit the cores of the thread that starts them.
    place(process.mask, process.threads)?;
    signal::watch()?;
    told::tell();
    let Some(dir) = marker::directory() else { return Ok(Marker::none()) };
    let killed = marker::killed(&dir, &plan.model_id);
    // Users who have asked for less since then need no advice.
    if let Some(then) = killed.filter(|&then| process.verbosity != Verbosity::Quiet && planned.need >= then) {
        say!(
            "warning: the last run of this model with these settings was killed, most likely because memory ran out \
             (planned: {}); {}",
            mib(then),
            named(&plan.smaller(process.context))
        );
    }
    clean_up_on_panic();
    Ok(Marker::leave(&dir, &plan.model_id, planned, &plan.memory))
}

/// Keeps this thread, and all threads it starts, on the cores of the mask; and on the big ones among them if those are
/// enough.
fn place(mask: &MaskArgs, threads: usize) -> Result<()> {
    if let Some(mask) = &mask.cpu_mask {
        pool::keep_to(mask.cores())
            .map_err(|e| Error::Usage(format!("--cpu-mask {mask}: the system refuses it: {e}")))?;
    }
    if let Some(cores) = topology::placement(threads) {
        // The user did not ask for these cores, so a refusal is no error.
        let _ = pool::keep_to(&cores);
    }
    Ok(())
}

/// A panic ends the release program without destructors, but it is not a kill.
fn clean_up_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        marker::remove();
        atomic_file::remove_unfinished();
        before(panic);
    }));
}
