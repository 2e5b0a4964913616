//! Passes that are one launch.

use super::super::batch_launch::BatchLaunch;
use super::super::cache::OpenClCache;
use super::super::single_launch::SingleLaunch;
use super::Pass;
use crate::model::device::{Logits, Run};
use opencl_runtime::failure::{Failure, Kind, Result};

impl Pass<'_> {
    /// One token, and its logits if they are wanted.
    pub(super) fn single_launch(&mut self, single: &mut SingleLaunch, runs: &mut [Run<'_>]) -> Result<()> {
        let bound = OpenClCache::of(runs[0].cache).launches.as_ref().and_then(|l| l.single.as_ref());
        single.run(self.device(), bound.expect("the caller has looked"))?;
        let (Logits::Last(logits) | Logits::All(logits)) = &mut runs[0].logits else {
            return self.device().flush();
        };
        single.read(logits)?;
        all_ran(logits)
    }

    /// A token of each of several sequences, and its logits; `false` where their caches are not of that kind.
    pub(super) fn batch_launch(&mut self, batch: &mut BatchLaunch, runs: &mut [Run<'_>]) -> Result<bool> {
        let caches = runs.iter_mut().map(|run| {
            let cache = OpenClCache::of(run.cache);
            (&cache.rows, cache.len())
        });
        if !batch.run(self.model.device(), self.scratch, caches)? {
            return Ok(false);
        }
        self.read_logits(0..self.n, runs)?;
        for run in runs {
            let (Logits::Last(logits) | Logits::All(logits)) = &mut run.logits else { continue };
            all_ran(logits)?;
        }
        Ok(true)
    }
}

/// Fails where a launch of a whole pass says that one of its groups waited in vain for another.
fn all_ran(logits: &[f32]) -> Result<()> {
    if logits[0].is_nan() {
        return Err(Failure::new(Kind::Lost, "groups of a kernel were not all running at once"));
    }
    Ok(())
}
