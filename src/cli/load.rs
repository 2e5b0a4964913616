//! Loads the model, after the steps that every command that runs one needs: cores, signals, warnings.

use super::args::FlagWarnings;
pub use super::background_compile::continue_compiling;
use super::signal;
use super::terminal::{Verbosity, track_progress};
use crate::run::engine::Engine;
use crate::run::kept_experts::{ExpertKeeper, KeptBytes};
use crate::run::options::Progress;
use crate::run::plan::{OpenedModel, format_mib};
use files::{Result, atomic_file, print_stderr};
use numeric::pool;
use numeric::topology;
use std::time::{Duration, Instant};

/// A loaded model.
pub struct LoadedEngine {
    pub engine: Engine,
    /// Loading time.
    pub load_time: Duration,
}

/// Prepares the process to run an opened model, and loads the model.
///
/// # Errors
///
/// `Memory` if it does not fit, and the errors of [`Engine::load`].
pub fn load_engine(
    opened: OpenedModel,
    verbosity: Verbosity,
    warnings: &FlagWarnings,
) -> Result<LoadedEngine> {
    let (began, opening) = (Instant::now(), opened.took);
    opened.plan.check()?;
    prepare_process(opened.plan.options.threads, warnings)?;
    let engine = load_with_progress(opened, verbosity)?;
    Ok(LoadedEngine { engine, load_time: opening + began.elapsed() })
}

/// Loads an opened model and shows the progress, unless quiet; later also that of kernels that are waited for.
pub fn load_with_progress(mut opened: OpenedModel, verbosity: Verbosity) -> Result<Engine> {
    opened.plan.options.compile_progress = Progress::new(track_progress("compiling kernels", "", verbosity));
    let engine = Engine::load_opened(opened, &track_progress("loading", "tensors", verbosity))?;
    if let Some(KeptBytes { kept, all }) = engine.expert_keeper().and_then(ExpertKeeper::kept_bytes)
        && verbosity != Verbosity::Quiet
    {
        let [kept, all] = [kept, all].map(format_mib);
        print_stderr!("{kept} of {all} of experts stay in memory, those used most so far");
    }
    Ok(engine)
}

/// Prepares the process to run at most `threads` threads, after the memory plans were checked.
pub fn prepare_process(threads: usize, warnings: &FlagWarnings) -> Result<()> {
    // First, because threads inherit their parent's cores: the big ones among those allowed, if there are enough.
    // The user did not ask for them, so a failure is no error.
    if let Some(cores) = topology::choose_cores(threads) {
        let _ = pool::pin_to_cores(&cores);
    }
    signal::watch_signals()?;
    warnings.print_all();
    clean_up_on_panic();
    Ok(())
}

/// Removes unfinished files on a panic, because release builds then run no destructors.
fn clean_up_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        atomic_file::remove_temporary_files();
        before(panic);
    }));
}
