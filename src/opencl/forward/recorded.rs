//! Passes of one token whose launches are recorded for the tokens that follow.

use super::super::cache::OpenClCache;
use super::super::launches::Recorded;
use super::{Pass, Place};
use crate::model::device::Run;
use files::Error;
use opencl_runtime::program::Recording;
use std::sync::Arc;

impl Pass<'_> {
    /// All layers and the head, as one recording: that of the token before, where it has as many chunks.
    pub(super) fn once_recorded(&mut self, runs: &mut [Run<'_>]) -> Result<(), Error> {
        let chunks = std::array::from_fn(|layer| Place::of(&mut runs[0], 0, layer).chunks());
        let known = OpenClCache::of(runs[0].cache).recorded().take().filter(|known| known.chunks == chunks);
        let recorded = match known {
            Some(recorded) => recorded,
            None => Recorded { chunks, recording: self.record(runs)? },
        };
        self.device.replay(&recorded.recording)?;
        *OpenClCache::of(runs[0].cache).recorded() = Some(recorded);
        Ok(self.read_logits(0..1, runs)?)
    }

    fn record(&mut self, runs: &mut [Run<'_>]) -> Result<Arc<Recording>, Error> {
        let queue = self.device.clone();
        self.device = queue.record()?;
        let done = self.layers(runs).and_then(|()| Ok(self.launches.head.one(&self.device)?));
        let recording = std::mem::replace(&mut self.device, queue);
        done?;
        Ok(recording.recorded()?)
    }
}
