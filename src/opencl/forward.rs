//! One forward pass: the same steps in the same order as the CPU's, each a launch, or a part of one, or the host's.
//!
//! A pass of one token has launches that cover several steps (`kernels/gemv.cl`); a pass of more has a launch or two a
//! step. Only rope, attend and observe know that tokens are of different sequences: they are launched for each run, but
//! for runs of a token each, which attend in one launch (`several`). On NVIDIA a pass of one token, or of a token of each
//! of several sequences, is one launch (`single_launch`, `batch_launch`).

mod host;
mod recorded;
mod whole;

pub use host::HostAttention;

use super::cache::OpenClCache;
use super::defines::CHUNK;
use super::launches::Launches;
use super::logits::{each_of, rows_of, spread, wanted};
use super::scratch::Scratch;
use super::shapes::{FUSED_CHUNKS, OBSERVE_ITEMS};
use super::weights::Model;
use super::whole::Whole;
use crate::dims::*;
use crate::model::device::{CancelToken, Run};
use crate::model::rope::Frequencies;
use crate::model::trace::Steps;
use files::Error;
use opencl_runtime::buffer::{Landing, bytes_of_mut};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use std::ops::Range;

/// One forward pass under way.
pub struct Pass<'a> {
    pub model: &'a Model,
    /// The device that launches are queued on, or recorded.
    pub device: Device,
    pub launches: &'a mut Launches,
    /// Of a pass that is one launch.
    pub whole: Option<&'a mut Whole>,
    pub scratch: &'a mut Scratch,
    pub landing: Option<&'a mut Landing>,
    pub host: Option<&'a mut HostAttention>,
    pub cancel: Option<&'a CancelToken>,
    pub frequencies: &'a Frequencies,
    /// Tokens, of all runs together.
    pub n: usize,
    /// How many of them go on after keys and values of the last layer, where not all do: those of which somebody reads
    /// logits. They are the first ones from there on.
    pub kept: Option<usize>,
    pub steps: Steps<'a>,
    /// Whether steps are timed, for which the host must wait for each.
    pub timed: bool,
    /// Whether it is a token whose launches are recorded for those that follow.
    pub recorded: bool,
}

/// Where the tokens of a run lie, in the pass and in one layer of their cache.
#[derive(Clone, Copy)]
struct Place {
    /// Its first token in the pass.
    first: usize,
    tokens: usize,
    /// Filled slots before them, or positions in a local layer.
    before: usize,
    /// Rows of a head.
    rows: usize,
    /// How many of the tokens, the last ones, are observed.
    observed: usize,
    /// Chunks before the first of which the first token sees anything.
    skipped: usize,
    /// How many of the tokens, the last ones, attend.
    kept: usize,
}

impl Place {
    fn of(run: &mut Run<'_>, first: usize, layer: usize) -> Self {
        let (tokens, pos) = (run.tokens.len(), run.pos);
        let cache = OpenClCache::of(run.cache);
        let (before, observed) = match is_local(layer) {
            true => (pos, 0),
            false => (cache.len(), run.observe.min(tokens)),
        };
        let skipped = window(layer).map_or(0, |window| (before + 1).saturating_sub(window) / CHUNK);
        Self { first, tokens, before, rows: cache.rows.rows(layer), observed, skipped, kept: tokens }
    }

    /// The same of those tokens alone that attend, after keys and values of all have joined the cache.
    fn attending(self) -> Self {
        let left = self.tokens - self.kept;
        Self { first: self.first + left, tokens: self.kept, before: self.before + left, ..self }
    }

    /// `Run` of `kernels/common.cl`.
    fn as_run(self) -> [i32; 4] {
        [self.first, self.tokens, self.before, self.rows].map(|n| n as i32)
    }

    /// The same of the only token of a pass, whose slot the kernel finds in the header.
    fn as_only_run(self) -> [i32; 4] {
        let [first, tokens, _, rows] = self.as_run();
        [first, tokens, -1, rows]
    }

    /// Slots that are filled after the pass.
    fn filled(self) -> usize {
        self.before + self.tokens
    }

    /// Chunks that its only token sees anything of.
    fn chunks(self) -> usize {
        self.filled().div_ceil(CHUNK) - self.skipped
    }
}

impl Pass<'_> {
    /// All steps of all layers on the tokens of `runs`, and the logits that are wanted.
    pub fn run(&mut self, runs: &mut [Run<'_>]) -> std::result::Result<(), Error> {
        self.scratch.embed(&self.model.weights, runs, self.frequencies)?; // rows of the embedding, angles of RoPE
        self.done("embed", 0)?;
        if let Some(whole) = self.whole.take()
            && self.one_launch(whole, runs)?
        {
            return Ok(()); // fused: all steps of all layers
        }
        if self.recorded {
            return self.once_recorded(runs);
        }
        self.layers(runs)?;
        Ok(self.head(runs)?) // final RMS norm, one logit per vocabulary entry
    }

    fn layers(&mut self, runs: &mut [Run<'_>]) -> std::result::Result<(), Error> {
        let last = runs.last().map_or(0, |run| run.pos + run.tokens.len() - 1);
        for layer in 0..LAYERS {
            self.go_on()?;
            self.norm(layer)?; // RMS norm before attention
            let (mut first, kept) = (0, self.kept.filter(|_| layer == LAYERS - 1));
            match kept {
                None => self.qkv(layer)?, // queries, keys and values
                Some(_) => self.qkv_wanted(layer, runs)?,
            }
            for run in &mut *runs {
                let mut place = Place::of(run, first, layer);
                if kept.is_some() {
                    place.kept = rows_of(run);
                }
                first += place.tokens;
                let cache = OpenClCache::of(run.cache);
                if self.joins(place, run.observe) {
                    self.join(layer, place, cache)?; // rope and attend of a token each, together
                    continue;
                }
                self.rope(layer, place, cache)?; // keys get their position and join the cache
                self.attend(layer, place, cache)?; // each query over all slots up to its own
                self.observe(layer, place, cache)?; // what each slot received of it
            }
            self.attend_joined(layer)?;
            if let Some(kept) = kept {
                wanted(runs).enumerate().try_for_each(|(to, from)| self.scratch.move_token(from, to))?;
                self.n = kept;
            }
            if self.n == 0 {
                break; // nobody reads what follows
            }
            self.out(layer, Place::of(&mut runs[0], 0, layer))?; // attention's output joins the residual
            self.ffn_norm(layer)?; // RMS norm before the feed-forward layer
            self.gate_up(layer)?; // silu(gate) * up
            self.down(layer)?; // back to the residual's width, and joins it
            self.residual(last, layer)?;
            if layer == 0 && !self.recorded {
                self.device.begin()?; // the rest is queued meanwhile
            }
        }
        Ok(())
    }

    fn device(&self) -> &Device {
        &self.device
    }

    /// Whether the kernels for one token compute a layer's steps.
    fn by_one(&self) -> bool {
        self.n == 1 && self.launches.has_one()
    }

    /// Whether `out` merges the chunks of attention.
    fn out_merges(&self, place: Place) -> bool {
        self.by_one() && self.kept.is_none() && self.host.is_none() && place.chunks() <= FUSED_CHUNKS
    }

    fn done(&mut self, step: &'static str, layer: usize) -> Result<()> {
        if self.timed {
            self.device().finish()?;
            self.steps.done(step, layer);
        }
        Ok(())
    }

    /// Ends the pass where it is cancelled.
    fn go_on(&self) -> std::result::Result<(), Error> {
        if let Some(cancel) = self.cancel {
            // Launches are only queued: those of all layers would run whatever happens.
            self.device().finish()?;
            if cancel.is_cancelled() {
                return Err(Error::Interrupted);
            }
        }
        Ok(())
    }

    /// Of one token a part of `qkv`.
    fn norm(&mut self, layer: usize) -> Result<()> {
        if self.by_one() {
            return Ok(());
        }
        self.launches.many[layer].norm.run(self.device(), [self.n, 1])?;
        self.done("norm", layer)
    }

    fn qkv(&mut self, layer: usize) -> Result<()> {
        let device = &self.device;
        match self.by_one() {
            true => self.launches.one[layer].qkv.one(device)?, // fused: norm, qkv
            false => self.launches.many[layer].qkv.many(device, self.n)?,
        }
        self.done("qkv", layer)
    }

    /// Keys and values of all tokens, queries of those whose logits are wanted.
    fn qkv_wanted(&mut self, layer: usize, runs: &[Run<'_>]) -> Result<()> {
        let (device, qkv) = (&self.device, &mut self.launches.many[layer].qkv);
        qkv.groups_from(device, self.n, Q_DIM / 16)?;
        let mut some = 0..0; // neighbours together
        for token in wanted(runs) {
            if token != some.end {
                qkv.groups_before(device, self.n, Q_DIM.div_ceil(16), some)?;
                some = token..token;
            }
            some.end += 1;
        }
        qkv.groups_before(device, self.n, Q_DIM.div_ceil(16), some)
    }

    /// Of one token a part of `attend`, where that is the device's.
    fn rope(&mut self, layer: usize, place: Place, cache: &mut OpenClCache) -> Result<()> {
        let bound = cache.layer(layer);
        if bound.by_one(place.tokens) {
            return Ok(());
        }
        let rope = bound.rope.as_mut().expect("invariant: bound for many tokens and for the host");
        let run = match self.host {
            // Rows of these tokens alone.
            Some(_) => Place { before: 0, rows: place.tokens, ..place }.as_run(),
            None => place.as_run(),
        };
        rope.with(&run)?.run(self.device(), [HEADS + 2 * KV_HEADS, place.tokens])?;
        if self.host.is_none() {
            return Ok(());
        }
        self.land(layer, place, cache)?;
        // Timed by itself where the host computes attention, otherwise as part of it.
        self.done("rope", layer)
    }

    fn attend(&mut self, layer: usize, place: Place, cache: &mut OpenClCache) -> Result<()> {
        let attending = place.attending();
        if self.host.is_some() {
            if attending.tokens > 0 {
                self.attend_on_host(layer, attending, cache)?;
            }
            return self.done("attend", layer);
        }
        let merges = self.out_merges(place);
        let (device, bound) = (&self.device, cache.layer(layer));
        if let Some(one) = bound.attend_one.as_mut().filter(|_| place.tokens == 1) {
            let chunks = place.chunks();
            let run = if self.n == 1 { place.as_only_run() } else { place.as_run() };
            one.with(&run)?.run(device, [chunks * KV_HEADS, 1])?; // fused: rope, attend
            if !merges {
                let merge = self.launches.merge.as_mut().expect("invariant: there is one with `attend_one`");
                merge.with(&[place.first as i32, chunks as i32])?.run(device, [HEADS, 1])?;
            }
        } else if attending.tokens > 0 {
            let attend = bound.attend.as_mut().expect("invariant: bound for many tokens");
            let tiles = (attending.tokens * GROUP).div_ceil(self.launches.queries);
            let attend = attend.with(&attending.as_run())?.and(&[place.observed as i32])?;
            attend.run(device, [tiles, KV_HEADS])?;
        }
        self.done("attend", layer)
    }

    /// Whether attention of a run is computed with that of others.
    fn joins(&self, place: Place, observe: usize) -> bool {
        self.launches.several.is_some() && self.n > 1 && place.tokens == 1 && observe == 0
    }

    fn join(&mut self, layer: usize, place: Place, cache: &OpenClCache) -> Result<()> {
        let Some(several) = &mut self.launches.several else { return Ok(()) };
        let rows = cache.rows.layer(layer).expect("invariant: attention is the device's");
        several.add(layer, place.as_run(), place.chunks(), rows)?;
        if several.is_full() { several.run(&self.device, layer) } else { Ok(()) }
    }

    fn attend_joined(&mut self, layer: usize) -> Result<()> {
        let Some(several) = &mut self.launches.several else { return Ok(()) };
        several.run(&self.device, layer)?;
        self.done("attend", layer)
    }

    /// Adds the attention that was just computed to the mass of the slots; the host's attention has done so itself.
    fn observe(&mut self, layer: usize, place: Place, cache: &mut OpenClCache) -> Result<()> {
        if place.observed == 0 || self.host.is_some() {
            return Ok(());
        }
        let massed = cache.mass.as_ref().map_or(0, |mass| mass.filled());
        let bound = cache.layer(layer);
        let launch = if bound.by_one(place.tokens) { &mut bound.observe_one } else { &mut bound.observe };
        let launch = launch.as_mut().expect("invariant: bound with the mass");
        let launch = launch.with(&place.as_run())?.and(&[place.observed as i32, massed as i32])?;
        launch.run(&self.device, [place.filled().div_ceil(OBSERVE_ITEMS), KV_HEADS])?;
        self.done("observe", layer)
    }

    fn out(&mut self, layer: usize, place: Place) -> Result<()> {
        let merges = self.out_merges(place);
        let (device, n) = (&self.device, self.n);
        if !self.by_one() {
            let l = &mut self.launches.many[layer];
            l.att.run(device, [n, 1])?;
            l.out.many(device, n)?;
        } else if merges {
            self.launches.one[layer].out.one(device)?; // fused: the end of attend, out
        } else {
            self.launches.one[layer].out_merged.one(device)?;
        }
        self.post_norm(layer, 0)?;
        self.done("out", layer)
    }

    /// Of one token a part of `gate_up`.
    fn ffn_norm(&mut self, layer: usize) -> Result<()> {
        if self.by_one() {
            return Ok(());
        }
        self.launches.many[layer].ffn_norm.run(self.device(), [self.n, 1])?;
        self.done("norm", layer)
    }

    fn gate_up(&mut self, layer: usize) -> Result<()> {
        let (device, n) = (&self.device, self.n);
        if self.by_one() {
            self.launches.one[layer].gate_up.one(device)?; // fused: norm, gate_up
        } else {
            let l = &mut self.launches.many[layer];
            l.gate_up.many(device, n)?;
            l.silu.run(device, [n, 1])?;
        }
        self.done("gate_up", layer)
    }

    fn down(&mut self, layer: usize) -> Result<()> {
        let device = &self.device;
        match self.by_one() {
            true => self.launches.one[layer].down.one(device)?,
            false => self.launches.many[layer].down.many(device, self.n)?,
        }
        self.post_norm(layer, 1)?;
        self.done("down", layer)
    }

    /// Where the model norms what joins the residual: that of attention (0) or of the feed-forward layer (1).
    fn post_norm(&self, layer: usize, which: usize) -> Result<()> {
        let norms = self.launches.post_norms.get(layer);
        norms.map_or(Ok(()), |norms| norms[which].run(self.device(), [self.n, 1]))
    }

    /// Notes the residual of the last token, which is at `pos`.
    fn residual(&mut self, pos: usize, layer: usize) -> Result<()> {
        if self.timed {
            let mut x = [0.0; DIM];
            self.scratch.residual(self.n - 1, &mut x)?;
            self.steps.residual(pos, layer, &x);
        }
        Ok(())
    }

    /// Logits of the tokens for which they are wanted.
    fn head(&mut self, runs: &mut [Run<'_>]) -> Result<()> {
        match wanted(runs).count() {
            // The host does not wait here, so the device has to be told to begin.
            0 => return self.device.flush(),
            1 => {
                self.launches.head.one(&self.device)?; // fused: norm, head
                self.read_logits(0..1, runs)?;
            }
            count => {
                for first in (0..count).step_by(self.scratch.logit_rows) {
                    let rows = first..count.min(first + self.scratch.logit_rows);
                    match self.kept {
                        Some(_) => self.norm_wanted(rows.clone())?,
                        None => self.norm_wanted(wanted(runs).skip(first).take(rows.len()))?,
                    }
                    self.launches.heads.many(&self.device, rows.len())?;
                    self.read_logits(rows, runs)?;
                }
            }
        }
        self.done("head", LAYERS)
    }

    /// The final norm of some tokens, those that follow each other in one launch.
    fn norm_wanted(&mut self, tokens: impl Iterator<Item = usize>) -> Result<()> {
        let norm = self.launches.norm.as_mut().expect("invariant: there is a norm for many tokens");
        let (mut tokens, mut to) = (tokens.peekable(), 0);
        while let Some(first) = tokens.next() {
            let mut n = 1;
            while tokens.next_if_eq(&(first + n)).is_some() {
                n += 1;
            }
            norm.with(&[first as i32, to as i32])?.run(&self.device, [n, 1])?;
            to += n;
        }
        Ok(())
    }

    /// Waits for the logits that the last launch computes, these of all that are wanted, and brings them where they
    /// belong.
    fn read_logits(&mut self, rows: Range<usize>, runs: &mut [Run<'_>]) -> Result<()> {
        let logits = &self.scratch.logits;
        match &mut self.landing {
            Some(landing) => {
                // A read costs as much as half a megabyte.
                spread(landing.fetch(logits, 0..4 * rows.len() * VOCAB)?, (rows, 0), runs);
                Ok(())
            }
            None => each_of(&rows, 0, runs).try_for_each(|(first, out)| {
                logits.read(4 * (first - rows.start) * VOCAB, bytes_of_mut(out))
            }),
        }
    }
}
