//! Passes that are one launch.

use super::super::cache::OpenClCache;
use super::super::whole::Whole;
use super::Pass;
use crate::model::device::{Logits, Run};
use opencl_runtime::failure::Result;

impl Pass<'_> {
    /// All steps of all layers on a token, or on a token of each of several sequences, and the logits that are wanted;
    /// `false` where their caches are not of that kind.
    pub(super) fn one_launch(&mut self, whole: &mut Whole, runs: &mut [Run<'_>]) -> Result<bool> {
        let (device, Whole { single, batch, arriving }) = (self.device(), whole);
        match batch.as_mut().filter(|_| self.n > 1) {
            None => {
                let logits = arriving.buffer(device, 0, &runs[0].logits)?;
                let bound = OpenClCache::of(runs[0].cache).launches.as_mut().and_then(|l| l.single.as_mut());
                single.run(device, bound.expect("the caller has looked"), &logits)?;
            }
            Some(batch) => {
                let sequences = runs.iter_mut().enumerate().map(|(i, run)| {
                    let (cache, logits) =
                        (OpenClCache::of(run.cache), arriving.buffer(device, i, &run.logits));
                    (&cache.rows, cache.len(), logits)
                });
                if !batch.run(device, self.scratch, sequences)? {
                    return Ok(false);
                }
            }
        }
        match runs {
            [Run { logits: Logits::None, .. }] => device.flush()?,
            _ => device.finish()?,
        }
        let mut logits = runs.iter_mut().map(|run| &mut run.logits).enumerate();
        logits.try_for_each(|(i, logits)| arriving.bring(i, logits))?;
        Ok(true)
    }
}
