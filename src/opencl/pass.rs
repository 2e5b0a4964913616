//! One forward pass: the steps of every layer, of one token or of many, each a launch or the host's.

use super::floats;
use super::kernels::{CHUNK, FUSED_CHUNKS, OBSERVE_ITEMS};
use super::mass::Mass;
use super::rows::{LayerRows, Rows};
use super::scratch::Scratch;
use super::steps::Launches;
use super::{HostAttention, QKV};
use crate::dims::*;
use crate::model::backend::{AttentionJob, Logits};
use crate::model::trace::Steps;
use opencl_runtime::buffer::{Landing, MapFor};
use opencl_runtime::device::Device;
use opencl_runtime::failure::{Failure, Kind, Result};

/// One forward pass under way.
pub struct Pass<'a> {
    pub device: &'a Device,
    pub launches: &'a mut Launches,
    pub rows: &'a mut Rows,
    pub scratch: &'a Scratch,
    pub landing: Option<&'a mut Landing>,
    pub host: Option<&'a mut HostAttention>,
    /// Of a pass that is observed.
    pub mass: Option<&'a mut Mass>,
    /// Tokens.
    pub n: usize,
    pub steps: Steps<'a>,
    /// Whether steps are timed, for which the host must wait for each.
    pub timed: bool,
}

impl Pass<'_> {
    pub fn done(&mut self, step: &'static str, layer: usize) -> Result<()> {
        if self.timed {
            self.device.finish()?;
            self.steps.done(step, layer);
        }
        Ok(())
    }

    /// One token through one layer. A launch covers what its comment names.
    pub fn one_token(&mut self, layer: usize) -> Result<()> {
        self.launches.one[layer].qkv.one(self.device)?; // norm, queries, keys and values
        self.done("qkv", layer)?;
        let chunks = (self.rows.len() + 1).div_ceil(CHUNK);
        match &self.launches.one[layer].attend {
            Some(attend) => {
                attend.run(self.device, [chunks * KV_HEADS, 1])?; // positions, the new row, attention in chunks
                self.done("attend", layer)?;
                self.observe(layer)?;
            }
            None => self.attend_on_host(layer)?,
        }
        let l = &self.launches.one[layer];
        match &self.launches.merge {
            Some(_) if chunks <= FUSED_CHUNKS => l.out.one(self.device)?, // attention whole, projection, onto the residual
            merge => {
                merge.iter().try_for_each(|m| m.run(self.device, [HEADS, 1]))?;
                l.out_merged.one(self.device)?; // attention's output joins the residual
            }
        }
        self.done("out", layer)?;
        self.launches.one[layer].gate_up.one(self.device)?; // norm, silu(gate) * up
        self.done("gate_up", layer)?;
        self.launches.one[layer].down.one(self.device)?; // back to the residual's width, and joins it
        self.done("down", layer)
    }

    /// Many tokens through one layer.
    pub fn many_tokens(&mut self, layer: usize) -> Result<()> {
        let (device, n) = (self.device, self.n);
        self.launches.many[layer].norm.run(device, [n, 1])?; // RMS norm before attention
        self.done("norm", layer)?;
        self.launches.many[layer].qkv.many(device, n)?; // queries, keys and values
        self.done("qkv", layer)?;
        match &self.launches.many[layer].attend {
            Some(attend) => {
                self.launches.rope[layer].run(device, [HEADS + 2 * KV_HEADS, n])?; // positions, new rows
                let tiles = (n * GROUP).div_ceil(self.launches.queries);
                attend.run(device, [tiles, KV_HEADS])?; // each query over all slots up to its own
                self.done("attend", layer)?;
                self.observe(layer)?;
            }
            None => self.attend_on_host(layer)?,
        }
        let l = &mut self.launches.many[layer];
        l.att.run(device, [n, 1])?;
        l.out.many(device, n)?; // attention's output joins the residual
        self.done("out", layer)?;
        self.launches.many[layer].ffn_norm.run(device, [n, 1])?; // RMS norm before the feed-forward layer
        self.done("norm", layer)?;
        let l = &mut self.launches.many[layer];
        l.gate_up.many(device, n)?;
        l.silu.run(device, [n, 1])?; // silu(gate) * up
        self.done("gate_up", layer)?;
        self.launches.many[layer].down.many(device, n)?; // back to the residual's width, and joins it
        self.done("down", layer)
    }

    /// Adds the attention that was just computed on the device to the mass of the slots, if it is observed.
    fn observe(&mut self, layer: usize) -> Result<()> {
        if self.mass.is_none() {
            return Ok(());
        }
        let observe = &self.launches.observe[layer];
        let launch = match &observe.many {
            Some(many) if self.n > 1 => many,
            _ => &observe.one,
        };
        launch.run(self.device, [(self.rows.len() + self.n).div_ceil(OBSERVE_ITEMS), KV_HEADS])?;
        self.done("observe", layer)
    }

    /// Positions and new rows on the device, then attention on the host over the mapped rows.
    fn attend_on_host(&mut self, layer: usize) -> Result<()> {
        let (device, n) = (self.device, self.n);
        self.launches.rope[layer].run(device, [HEADS + 2 * KV_HEADS, n])?;
        self.done("rope", layer)?;
        let host = self.host.as_mut().expect("invariant: without attention there is a host's");
        let (qkv, att) = (&mut host.qkv[..n * QKV], &mut host.att[..n * Q_DIM]);
        self.scratch.qkv.read(0, floats::bytes_mut(qkv))?;
        let (types, capacity, before) = (self.rows.types(), self.rows.capacity(), self.rows.len());
        // Up to the last head's last slot.
        let used = (KV_HEADS - 1) * capacity + before + n;
        let LayerRows { k, v } = self.rows.layer_mut(layer);
        let k = k.map(0..used * types.k.row_bytes(HEAD_DIM), MapFor::Reading)?;
        let v = v.map(0..used * types.v.row_bytes(HEAD_DIM), MapFor::Reading)?;
        (host.attend)(AttentionJob {
            tokens: n,
            before,
            queries: qkv,
            stride: QKV,
            k: &k,
            v: &v,
            capacity,
            types,
            att,
            mass: self.mass.as_mut().and_then(|m| m.on_host(layer, before + n, n)),
        });
        k.unmap()?;
        v.unmap()?;
        self.scratch.att.write(0, floats::bytes(att))?;
        self.done("attend", layer)
    }

    /// Logits of the last token, or of all.
    pub fn head(&mut self, out: Logits<'_>) -> Result<()> {
        let (device, n, s) = (self.device, self.n, self.scratch);
        match out {
            // Nobody waits, so the device has to be told to begin.
            Logits::None => return device.flush(),
            Logits::All(logits) if n > 1 => {
                let norm = self.launches.norm.as_mut().expect("invariant: there is a norm for many tokens");
                for (i, logits) in logits.chunks_mut(s.logit_rows * VOCAB).enumerate() {
                    let rows = logits.len() / VOCAB;
                    norm.start_at(i * s.logit_rows)?.run(device, [rows, 1])?; // final RMS norm
                    self.launches.heads.many(device, rows)?; // one logit per vocabulary entry
                    read_logits(s, &mut self.landing, logits)?;
                }
            }
            Logits::Last(logits) | Logits::All(logits) => {
                self.launches.head.one(device)?; // final RMS norm, one logit per vocabulary entry
                read_logits(s, &mut self.landing, logits)?;
            }
        }
        self.done("head", LAYERS)
    }

    /// The logits of a token that was one launch, if anybody wants them.
    pub fn logits(&mut self, out: Logits<'_>) -> Result<()> {
        match out {
            Logits::None => self.device.flush(),
            Logits::Last(logits) | Logits::All(logits) => {
                read_logits(self.scratch, &mut self.landing, logits)?;
                // What the kernel says where not all of its groups came to its barrier.
                match logits[0].is_nan() {
                    true => {
                        Err(Failure::new(Kind::Lost, "groups of kernel decode were not all running at once"))
                    }
                    false => Ok(()),
                }
            }
        }
    }
}

/// Waits for the logits that the last launch computes.
fn read_logits(s: &Scratch, landing: &mut Option<&mut Landing>, logits: &mut [f32]) -> Result<()> {
    let bytes = floats::bytes_mut(logits);
    match landing {
        Some(landing) => landing.read(&s.logits, bytes),
        None => s.logits.read(0, bytes),
    }
}
