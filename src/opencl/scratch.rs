//! Buffers of one forward pass, allocated once.

use super::defines::{FFN_PAD, QKV};
use super::floats;
use crate::dims::*;
use crate::model::weights::Weights;
use opencl_runtime::buffer::{Access, Buffer, Place, Staged};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Integers before the rows of [`Scratch::state`], as `kernels/common.cl` has them.
const HEADER: usize = 16;
/// Where it says how many tokens are observed, and how many slots have a mass.
const H_OBSERVED: usize = 8;
/// Floats of one token's row: the residual, cosines and sines of its position.
pub const STATE_ROW: usize = DIM + HEAD_DIM;
/// Most tokens whose logits are computed at once.
const LOGIT_ROWS: usize = 16;

/// Bytes of the buffer that stands for none.
const NONE: usize = 64;

/// Buffers of one forward pass.
pub struct Scratch {
    /// Header, then `[token][x | cos | sin]`: what the host sends, all at once, and the residual stream.
    pub state: Staged,
    /// `[token][QKV]`
    pub qkv: Buffer,
    /// Attention's output: `[token][head][HEAD_DIM]`
    pub att: Buffer,
    /// Input of the next matrix: `[token][cols]`, bytes or floats.
    pub acts: Buffer,
    /// Their scales: `[token][cols / 32]`
    pub act_scales: Buffer,
    /// `[token][gate: FFN_PAD | up: FFN_PAD]`
    pub gate_up: Buffer,
    /// `[logit_rows][VOCAB]`
    pub logits: Buffer,
    /// For arguments that a kernel does not read.
    pub none: Buffer,
    /// What `state` is sent from.
    host: Vec<f32>,
    /// Tokens that all this is for.
    pub max_tokens: usize,
    /// Tokens whose logits fit.
    pub logit_rows: usize,
}

/// Bytes of each buffer for so many tokens, in the order of the fields.
fn sizes(tokens: usize) -> [usize; 7] {
    let widest = DIM.max(Q_DIM).max(FFN_DIM);
    let floats = [
        HEADER + tokens * STATE_ROW,
        tokens * QKV,
        tokens * Q_DIM,
        tokens * widest,
        tokens * widest.div_ceil(32),
        tokens * 2 * FFN_PAD,
        tokens.min(LOGIT_ROWS) * VOCAB,
    ];
    floats.map(|n| 4 * n)
}

/// Bytes of the logits that a pass of so many tokens computes at once.
pub fn logits_bytes(tokens: usize) -> usize {
    4 * tokens.min(LOGIT_ROWS) * VOCAB
}

/// Bytes of all buffers together.
pub fn bytes(tokens: usize) -> usize {
    sizes(tokens).iter().sum::<usize>() + NONE
}

impl Scratch {
    /// Buffers for `tokens` tokens, or for fewer where the device has no buffer so large.
    pub fn new(device: &Device, tokens: usize) -> Result<Self> {
        let most = device.facts().max_alloc;
        let mut tokens = tokens.max(1);
        while tokens > 1 && sizes(tokens).iter().any(|&n| n as u64 > most) {
            tokens /= 2;
        }
        let [state, qkv, att, acts, act_scales, gate_up, logits] = sizes(tokens);
        let buffer = |len: usize| device.buffer(len, Access::ReadWrite, Place::Device);
        Ok(Self {
            state: Staged::new(device, state, Access::ReadWrite)?,
            qkv: buffer(qkv)?,
            att: buffer(att)?,
            acts: buffer(acts)?,
            act_scales: buffer(act_scales)?,
            gate_up: buffer(gate_up)?,
            logits: buffer(logits)?,
            none: buffer(NONE)?,
            host: vec![0.0; state / 4],
            max_tokens: tokens,
            logit_rows: tokens.min(LOGIT_ROWS),
        })
    }

    /// Looks the tokens' embedding rows up, prepares their RoPE angles and sends both to the device.
    pub fn embed(
        &mut self,
        weights: &Weights,
        tokens: &[u32],
        slot: usize,
        (pos, frequencies): (usize, &[f64]),
    ) -> Result<()> {
        let n = tokens.len();
        for (at, value) in [n, slot, n - 1].into_iter().enumerate() {
            self.host[at] = f32::from_bits(value as u32);
        }
        let rows = self.host[HEADER..].chunks_exact_mut(STATE_ROW);
        for (t, (&token, row)) in tokens.iter().zip(rows).enumerate() {
            let (x, angles) = row.split_at_mut(DIM);
            weights.embed(token as usize, x);
            let (cos, sin) = angles.split_at_mut(HEAD_DIM / 2);
            crate::model::rope::angles(pos + t, frequencies, cos, sin);
        }
        self.state.write(floats::bytes(&self.host[..HEADER + n * STATE_ROW]))
    }

    /// Says for the next [`Scratch::embed`] how many tokens are observed, and how many slots have a mass.
    pub fn observe(&mut self, tokens: usize, slots: usize) {
        self.set_header(H_OBSERVED, [tokens as u32, slots as u32]);
    }

    /// Sets integers of the header, from `first` on; they go out with the next [`Scratch::embed`].
    pub fn set_header<const N: usize>(&mut self, first: usize, values: [u32; N]) {
        self.host[first..first + N].copy_from_slice(&values.map(f32::from_bits));
    }

    /// Reads the residual of token `t`.
    pub fn residual(&self, t: usize, x: &mut [f32]) -> Result<()> {
        self.state.buffer().read(4 * (HEADER + t * STATE_ROW), floats::bytes_mut(x))
    }
}
