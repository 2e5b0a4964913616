//! One way of computing a product, run on what it is always tried on: its bits, and what it takes.

use super::super::launches::{AttendOn, Binder};
use super::super::products::{Launch, Products};
use super::super::storage::Step;
use super::super::ways::{Tokens, Way};
use super::Tuner;
use crate::dims::*;
use opencl_runtime::buffer::{Buffer, bytes_of};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use std::time::{Duration, Instant};

/// Layers whose matrices are read in turn, so that they do not stay in a cache.
const LAYERS_IN_TURN: usize = if LAYERS < 8 { LAYERS } else { 8 };
/// How long one way is timed, if it takes less.
const EACH: Duration = Duration::from_millis(20);

/// One way, ready to run.
pub(super) struct Trial {
    tokens: usize,
    /// Of some layers.
    products: Vec<(Option<Launch>, Products)>,
}

impl Trial {
    /// Of how many layers it has the products.
    pub(super) fn layers(&self) -> usize {
        self.products.len()
    }

    pub(super) fn run(&mut self, i: usize, device: &Device) -> Result<()> {
        let (n, layers) = (self.tokens, self.products.len());
        match &mut self.products[i % layers] {
            (Some(input), products) => {
                input.run(device, [n, 1])?;
                products.many(device, n)
            }
            (None, products) => products.one(device),
        }
    }
}

impl Tuner<'_> {
    pub(super) fn trial(&mut self, tokens: Tokens, step: Step, way: Way) -> Result<Trial> {
        self.kernels.set_way(tokens, step, way);
        let matrices = &self.model.matrices;
        let (kernels, scratch) = (&mut self.kernels, &self.scratch);
        let mut binder =
            Binder { kernels, matrices, calibration: &[], scratch, attend: AttendOn::Device, one: true };
        if step == Step::Head {
            let product = match tokens {
                Tokens::One => (None, binder.head()?),
                Tokens::Many => {
                    (Some(binder.norm(step, &matrices.norm, matrices.head.reads)?), binder.heads()?)
                }
            };
            return Ok(Trial { tokens: self.tokens(tokens, step), products: vec![product] });
        }
        let of_layer = |l| match tokens {
            Tokens::One => binder.one(step, l).map(|products| (None, products)),
            Tokens::Many => binder.many(step, l).map(|(input, products)| (Some(input), products)),
        };
        let products = matrices.layers[..LAYERS_IN_TURN].iter().map(of_layer).collect::<Result<_>>()?;
        Ok(Trial { tokens: self.tokens(tokens, step), products })
    }

    /// How many tokens a step is tried with.
    fn tokens(&self, tokens: Tokens, step: Step) -> usize {
        match (tokens, step) {
            (Tokens::One, _) => 1,
            (Tokens::Many, Step::Head) => self.scratch.logit_rows,
            (Tokens::Many, _) => self.scratch.max_tokens,
        }
    }

    /// Runs once what computes a step, on what it is always tried on: what it took, and what it left.
    pub(super) fn first(
        &mut self,
        run: impl FnOnce(&Device) -> Result<()>,
        (tokens, step): (Tokens, Step),
    ) -> Result<(Duration, Vec<u8>)> {
        let s = &self.scratch;
        // Without a header, which says that the residual is the first token's.
        let floats = |buffer: &Buffer, first: usize| {
            let n = buffer.len() / 4 - first;
            let floats: Vec<f32> = (0..n as u32).map(|i| (i % 251) as f32 / 251.0 - 0.5).collect();
            buffer.write(4 * first, bytes_of(&floats))
        };
        s.state.buffer().write(0, &[0; 64])?;
        floats(s.state.buffer(), 16)?;
        [&s.att, &s.gate_up, &s.act_scales].into_iter().try_for_each(|buffer| floats(buffer, 0))?;
        let acts: Vec<u8> = (0..s.acts.len()).map(|i| (i % 251) as u8).collect();
        s.acts.write(0, &acts)?;
        let began = Instant::now();
        run(self.device())?;
        self.device().finish()?;
        let took = began.elapsed();
        let out: &[&Buffer] = match (step, tokens) {
            (Step::Qkv, _) => &[&s.qkv],
            (Step::Out | Step::Down, _) if POST_NORMS => &[&s.post],
            (Step::Out | Step::Down, _) => &[s.state.buffer()],
            (Step::GateUp, Tokens::One) => &[&s.acts, &s.act_scales],
            (Step::GateUp, Tokens::Many) => &[&s.gate_up],
            (Step::Head, _) => &[&s.logits],
        };
        let mut found = Vec::new();
        for buffer in out {
            let at = found.len();
            found.resize(at + buffer.len(), 0);
            buffer.read(0, &mut found[at..])?;
        }
        Ok((took, found))
    }

    /// What a product takes, when `first` is what the first one took: the fastest of some rounds.
    pub(super) fn time(&mut self, trial: &mut Trial, first: Duration) -> Result<Duration> {
        let times = (EACH.as_secs_f64() / 3.0 / first.as_secs_f64().max(1e-6)).clamp(1.0, 64.0) as usize;
        let mut best = first;
        let rounds = if first > EACH { 1 } else { 3 };
        for _ in 0..rounds {
            let began = Instant::now();
            for i in 0..times {
                trial.run(i, self.model.device())?;
            }
            self.device().finish()?;
            best = best.min(began.elapsed() / times as u32);
        }
        Ok(best)
    }
}
