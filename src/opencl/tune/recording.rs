//! Whether the launches of a token take less time as a recording.

use super::super::storage::Step;
use super::super::ways::Tokens;
use super::Tuner;
use super::trial::Trial;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Recording;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What it is called where it is left out, and tried.
const NAME: &str = "recorded";
/// The steps that stand for a token; the last one's result is compared.
const STEPS: [Step; 3] = [Step::Qkv, Step::Down, Step::GateUp];
/// Times each is timed, in turn. The fastest counts.
const ROUNDS: usize = 15;
/// A recording is to take so much less. On Intel's runtime it takes as long with these steps, and whole tokens a quarter more.
const GAIN: f64 = 0.9;

impl Tuner<'_> {
    /// Times the products of some layers, queued one by one and recorded.
    pub(super) fn choose_recording(&mut self) -> Result<()> {
        let timed = self.tuned.table.iter().any(|timed| timed.tokens == Tokens::One);
        if !self.device().records() || !timed {
            return Ok(());
        }
        let Some(marker) = self.attempt(NAME) else { return Ok(()) };
        match self.time_recording() {
            Ok(Some([queued, recorded])) => {
                self.tuned.recording = Some([queued, recorded]);
                self.tuned.ways.recorded = recorded < queued.mul_f64(GAIN);
            }
            Ok(None) => self.say_left_out(NAME, "it computes wrong results"),
            Err(e) => self.failed(e, marker).map(|why| self.say_left_out(NAME, &why))?,
        }
        Ok(())
    }

    /// Does without recordings from now on; whether there were any.
    pub(super) fn without_recording(&mut self) -> bool {
        let recorded = std::mem::replace(&mut self.tuned.ways.recorded, false);
        if recorded {
            self.say_left_out(NAME, "results are wrong with it");
        }
        recorded
    }

    /// What both take; `None` where their results differ.
    fn time_recording(&mut self) -> Result<Option<[Duration; 2]>> {
        let trial = |step| self.trial(Tokens::One, step, self.tuned.ways.get(Tokens::One, step));
        let mut trials = STEPS.map(trial).into_iter().collect::<Result<Vec<_>>>()?;
        let last = (Tokens::One, STEPS[STEPS.len() - 1]);
        let (_, expected) = self.first(|device| all(&mut trials, device), last)?;
        let recording = record(&mut trials, self.device())?;
        let (_, found) = self.first(|device| device.replay(&recording), last)?;
        if found != expected {
            return Ok(None);
        }
        let mut best = [Duration::MAX; 2];
        for round in 0..2 * ROUNDS {
            let began = Instant::now();
            match round % 2 {
                0 => all(&mut trials, self.device())?,
                _ => self.device().replay(&recording)?,
            }
            self.device().finish()?;
            best[round % 2] = best[round % 2].min(began.elapsed());
        }
        Ok(Some(best))
    }
}

/// Queues the steps of all layers that are tried.
fn all(trials: &mut [Trial], device: &Device) -> Result<()> {
    let layers = trials[0].layers();
    (0..layers).try_for_each(|layer| trials.iter_mut().try_for_each(|trial| trial.run(layer, device)))
}

fn record(trials: &mut [Trial], device: &Device) -> Result<Arc<Recording>> {
    let recorder = device.record()?;
    all(trials, &recorder)?;
    recorder.recorded()
}
