//! Loading the model, after what every command that runs one does first: cores, signals, warnings, the marker that
//! outlives a kill.

use super::args::FlagWarnings;
use super::flags::name_flags;
use super::signal;
use super::terminal::{ProgressLine, Verbosity};
use crate::run::engine::Engine;
use crate::run::plan::{Context, Opened, Plan, mib};
use crate::run::system::marker::{self, Marker, Planned};
use files::{Result, atomic_file, say};
use numeric::pool;
use numeric::topology;
use std::time::{Duration, Instant};

/// A loaded model. It is held until the run is over.
pub struct LoadedEngine {
    pub engine: Engine,
    /// Duration of loading.
    pub took: Duration,
    _marker: Marker,
}

/// Settings of the process.
pub struct ProcessSettings<'a> {
    pub threads: usize,
    /// The context that advice on memory is about.
    pub context: Context,
    pub verbosity: Verbosity,
    pub warnings: &'a FlagWarnings,
}

/// Prepares the process for one run of an opened model, and loads it.
///
/// # Errors
///
/// `Memory` if it does not fit, and those of [`Engine::load`].
pub fn load(opened: Opened, verbosity: Verbosity, warnings: &FlagWarnings) -> Result<LoadedEngine> {
    let (began, opening) = (Instant::now(), opened.took);
    let plan = &opened.plan;
    plan.check()?;
    let process =
        ProcessSettings { threads: plan.options.threads, context: Context::MaxSeqLen, verbosity, warnings };
    let marker = prepare(plan, plan.planned(), &process)?;
    let progress = ProgressLine::new("loading tensor", verbosity);
    let engine = Engine::load_opened(opened, &|done, all| progress.show(done, all))?;
    Ok(LoadedEngine { engine, took: opening + began.elapsed(), _marker: marker })
}

/// Prepares the process for plans that were checked and need this much in all. `plan`, the first of them, gives the
/// advice after a kill. The marker is held until the run is over.
pub fn prepare(plan: &Plan, planned: Planned, process: &ProcessSettings<'_>) -> Result<Marker> {
    // First, because threads inherit the cores of the thread that starts them: the big ones of those that it may use, if
    // they are enough. The user did not ask for these, so a refusal is no error.
    if let Some(cores) = topology::placement(process.threads) {
        let _ = pool::keep_to(&cores);
    }
    signal::watch()?;
    process.warnings.print();
    let Some(dir) = marker::directory() else { return Ok(Marker::none()) };
    let killed = marker::killed(&dir, &plan.model_id);
    // Users who have asked for less since then need no advice.
    if let Some(then) = killed.filter(|&then| process.verbosity != Verbosity::Quiet && planned.need >= then) {
        say!(
            "warning: the last run of this model with these settings was killed, most likely because memory ran out \
             (planned: {}); {}",
            mib(then),
            name_flags(&plan.smaller(process.context))
        );
    }
    clean_up_on_panic();
    Ok(Marker::leave(&dir, &plan.model_id, planned, &plan.memory))
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
