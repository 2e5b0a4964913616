//! Loading the model, after what every command that runs one does first: cores, signals, warnings.

use super::args::FlagWarnings;
use super::signal;
use super::terminal::{ProgressLine, Verbosity};
use crate::run::engine::Engine;
use crate::run::plan::Opened;
use files::{Result, atomic_file};
use numeric::pool;
use numeric::topology;
use std::time::{Duration, Instant};

/// A loaded model.
pub struct LoadedEngine {
    pub engine: Engine,
    /// Duration of loading.
    pub took: Duration,
}

/// Prepares the process for one run of an opened model, and loads it.
///
/// # Errors
///
/// `Memory` if it does not fit, and those of [`Engine::load`].
pub fn load(opened: Opened, verbosity: Verbosity, warnings: &FlagWarnings) -> Result<LoadedEngine> {
    let (began, opening) = (Instant::now(), opened.took);
    opened.plan.check()?;
    prepare(opened.plan.options.threads, warnings)?;
    let progress = ProgressLine::new("loading tensor", verbosity);
    let engine = Engine::load_opened(opened, &|done, all| progress.show(done, all))?;
    Ok(LoadedEngine { engine, took: opening + began.elapsed() })
}

/// Prepares the process for plans that were checked and have at most so many threads.
pub fn prepare(threads: usize, warnings: &FlagWarnings) -> Result<()> {
    // First, because threads inherit the cores of the thread that starts them: the big ones of those that it may use, if
    // they are enough. The user did not ask for these, so a refusal is no error.
    if let Some(cores) = topology::placement(threads) {
        let _ = pool::keep_to(&cores);
    }
    signal::watch()?;
    warnings.print();
    clean_up_on_panic();
    Ok(())
}

/// A panic ends the release program without destructors.
fn clean_up_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        atomic_file::remove_unfinished();
        before(panic);
    }));
}
