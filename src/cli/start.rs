//! What every command does that runs a model, before it is loaded: signals, cores, memory, and the marker that
//! outlives a kill.

use super::args::MaskArgs;
use super::signal;
use crate::run::plan::{Context, Plan};
use crate::run::system::marker::{self, Marker};
use files::{Error, Result};
use numeric::pool;
use numeric::topology;

/// How much is said on stderr.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Voice {
    /// Errors only.
    Quiet,
    /// What a user should know.
    Normal,
}

impl Voice {
    /// As `--quiet` says.
    pub fn of(quiet: bool) -> Self {
        if quiet { Voice::Quiet } else { Voice::Normal }
    }
}

/// Prepares the process for one run. What this returns must be held until the run is over.
///
/// # Errors
///
/// `Memory` where it does not fit, `Usage` where the mask cannot be used.
pub(super) fn model(plan: &Plan, mask: &MaskArgs, voice: Voice) -> Result<Marker> {
    plan.check()?;
    planned(plan, plan.need(), (mask, plan.options.threads), (Context::MaxSeqLen, voice))
}

/// [`model`] for a plan that has been checked, which needs `need` bytes in all and at most so many threads.
pub(super) fn planned(
    plan: &Plan,
    need: u64,
    (mask, threads): (&MaskArgs, usize),
    (context, voice): (Context, Voice),
) -> Result<Marker> {
    // First, since threads that are started stay where their starter is.
    place(mask, threads)?;
    signal::watch()?;
    let Some(dir) = marker::directory() else { return Ok(Marker::none()) };
    let killed = marker::killed(&dir, &plan.model_id);
    // Who has chosen less since then needs no advice.
    if let Some(then) = killed.filter(|&then| voice == Voice::Normal && need >= then) {
        eprintln!(
            "warning: the last run of this model with these settings was killed, most likely for want of memory \
             (planned: {}); {}",
            crate::run::plan::mib(then),
            plan.smaller(context)
        );
    }
    remove_before_panics_end();
    Ok(Marker::leave(&dir, &plan.model_id, need))
}

/// Keeps this thread, and with it all that it starts, on the cores of the mask, and on the big ones among those it
/// may use where they are enough.
fn place(mask: &MaskArgs, threads: usize) -> Result<()> {
    if let Some(mask) = &mask.cpu_mask {
        pool::keep_to(mask.cores())
            .map_err(|e| Error::Usage(format!("--cpu-mask {mask}: the system refuses it: {e}")))?;
    }
    if let Some(cores) = topology::placement(threads) {
        // A default is not worth an error.
        let _ = pool::keep_to(&cores);
    }
    Ok(())
}

/// A panic ends the release program without destructors, and it is no kill.
fn remove_before_panics_end() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        marker::remove();
        before(panic);
    }));
}
