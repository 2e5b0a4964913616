//! Buffers of one forward pass, allocated once. What attention needs for a longer cache, or to be observed, is allocated
//! when the first such cache comes.

use super::defines::{CHUNK, FFN_PAD, QKV};
use super::shapes::SEVERAL;
use super::threads::both;
use crate::dims::*;
use crate::model::device::Run;
use crate::model::rope::{Frequencies, angles};
use crate::model::weights::Weights;
use opencl_runtime::buffer::{Access, Buffer, Place, Staged, bytes_of, bytes_of_mut};
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;

/// Integers before the rows of [`Scratch::state`], as `kernels/common.cl` has them.
pub const HEADER: usize = 16;
/// Where it says the slot of the only token, and next to it the token whose residual the head reads.
const H_SLOT: usize = 0;
/// Floats of one token's row: the residual, cosines and sines of its position.
const STATE_ROW: usize = DIM + 2 * ANGLES;
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
    /// The sums of the halves of their blocks: `[token][cols / 32][2]`
    pub act_sums: Buffer,
    /// `[token][gate: FFN_PAD | up: FFN_PAD]`, without a gate only up
    pub gate_up: Buffer,
    /// `[token][DIM]`: what is normed before it joins the residual, where the model does that.
    pub post: Buffer,
    /// `[logit_rows][VOCAB]`
    pub logits: Buffer,
    /// Chunks of attention of one token, or of a token each of several runs: `[chunk][HEADS][HEAD_DIM]`
    pub partials: Buffer,
    /// Largest score and softmax sum of each: `[chunk][HEADS][2]`
    pub ml: Buffer,
    /// The same of each token of a run, where attention is observed: `[token][HEADS][2]`. `None` until it is.
    pub softmax: Option<Buffer>,
    /// Stands for arguments that a kernel does not read.
    pub none: Buffer,
    /// The integers that `state` begins with.
    header: [u32; HEADER],
    /// The tokens whose rows it has.
    tokens: Vec<Token>,
    /// Tokens that all this is for.
    pub max_tokens: usize,
    /// Tokens whose logits fit.
    pub logit_rows: usize,
    /// Slots of a cache that `partials` and `ml` have room for: whole chunks.
    pub slots: usize,
    /// For how many runs they have that.
    pub at_once: usize,
}

// Rows of keys land in `acts`, those of values in `gate_up`, where the host attends to them; no type has more than 32 bits.
const _: () = assert!(FFN_PAD >= KV_DIM);

/// Bytes of each buffer for so many tokens, in the order of the fields.
fn sizes(tokens: usize) -> [usize; 9] {
    let widest = DIM.max(Q_DIM).max(FFN_DIM);
    let floats = [
        HEADER + tokens * STATE_ROW,
        tokens * QKV,
        tokens * Q_DIM,
        tokens * widest,
        tokens * widest.div_ceil(32),
        tokens * widest.div_ceil(32) * 2,
        tokens * (1 + GATED as usize) * FFN_PAD,
        tokens * if POST_NORMS { DIM } else { 0 },
        tokens.min(LOGIT_ROWS) * VOCAB,
    ];
    floats.map(|n| 4 * n)
}

/// Bytes of `partials` and of `ml` for so many caches of `slots` slots.
fn part_sizes(slots: usize, caches: usize) -> [usize; 2] {
    let heads = HEADS * slots.div_ceil(CHUNK).max(1) * caches;
    [4 * heads * HEAD_DIM, 4 * heads * 2]
}

/// Bytes of the logits that a pass of so many tokens computes at once.
pub fn logits_bytes(tokens: usize) -> usize {
    4 * tokens.min(LOGIT_ROWS) * VOCAB
}

/// Bytes of all buffers together, but for those of attention.
pub fn bytes(tokens: usize) -> usize {
    sizes(tokens).iter().sum::<usize>() + NONE
}

/// Bytes of the chunks of attention over `slots` slots of a token of each of so many sequences.
pub fn parts_bytes(slots: usize, sequences: usize) -> usize {
    part_sizes(slots, at_once(sequences)).iter().sum()
}

/// Of how many sequences a token each is attended at once.
fn at_once(sequences: usize) -> usize {
    sequences.clamp(1, SEVERAL)
}

fn buffer(device: &Device, len: usize) -> Result<Buffer> {
    device.buffer(len, Access::ReadWrite, Place::Device)
}

impl Scratch {
    /// Buffers for `tokens` tokens, or for fewer where the device has no buffer so large, and for so many caches of `slots`
    /// slots.
    pub fn new(device: &Device, tokens: usize, (slots, sequences): (usize, usize)) -> Result<Self> {
        let most = device.facts().max_alloc;
        let mut tokens = tokens.max(1);
        while tokens > 1 && sizes(tokens).iter().any(|&n| n as u64 > most) {
            tokens /= 2;
        }
        let [state, qkv, att, acts, act_scales, act_sums, gate_up, post, logits] = sizes(tokens);
        let none = buffer(device, NONE)?;
        let at_once = at_once(sequences);
        let [partials, ml] = part_sizes(slots, at_once);
        Ok(Self {
            state: Staged::new(device, state, Access::ReadWrite)?,
            qkv: buffer(device, qkv)?,
            att: buffer(device, att)?,
            acts: buffer(device, acts)?,
            act_scales: buffer(device, act_scales)?,
            act_sums: buffer(device, act_sums)?,
            gate_up: buffer(device, gate_up)?,
            post: if POST_NORMS { buffer(device, post)? } else { none.clone() },
            logits: buffer(device, logits)?,
            partials: buffer(device, partials)?,
            ml: buffer(device, ml)?,
            softmax: None,
            none,
            header: [0; HEADER],
            tokens: Vec::with_capacity(tokens),
            max_tokens: tokens,
            logit_rows: tokens.min(LOGIT_ROWS),
            slots: slots.max(1).next_multiple_of(CHUNK),
            at_once,
        })
    }

    /// Makes room for attention over `slots` slots. What is bound to the buffers for fewer is to be bound anew.
    pub fn reserve(&mut self, device: &Device, slots: usize) -> Result<()> {
        if slots > self.slots {
            let [partials, ml] = part_sizes(slots, self.at_once);
            (self.partials, self.ml) = (buffer(device, partials)?, buffer(device, ml)?);
            self.slots = slots.next_multiple_of(CHUNK);
        }
        Ok(())
    }

    /// Makes room for what observing the attention of many tokens needs.
    pub fn reserve_softmax(&mut self, device: &Device) -> Result<()> {
        if self.softmax.is_none() {
            self.softmax = Some(buffer(device, 4 * 2 * HEADS * self.max_tokens)?);
        }
        Ok(())
    }

    /// Looks the tokens' embedding rows up, prepares their RoPE angles and sends both to the device.
    pub fn embed(&mut self, weights: &Weights, runs: &[Run<'_>], frequencies: &Frequencies) -> Result<()> {
        self.tokens.clear();
        for run in runs {
            let at = run.tokens.iter().zip(run.pos..);
            self.tokens.extend(at.map(|(&id, pos)| Token { id, pos, known: run.known }));
        }
        let (header, tokens) = (self.header, &self.tokens[..]);
        self.state.write(4 * (HEADER + tokens.len() * STATE_ROW), |bytes| {
            let (first, rows) = bytes.split_at_mut(4 * HEADER);
            first.copy_from_slice(header.map(u32::to_ne_bytes).as_flattened());
            embed_all(weights, frequencies, tokens, rows);
        })
    }

    /// Says for the next [`Scratch::embed`] in which slot a single token comes, and which token's residual the head reads
    /// where it reads one.
    pub fn set_token(&mut self, slot: usize, row: usize) {
        self.set_header(H_SLOT, [slot as u32, row as u32]);
    }

    /// Sets integers of the header, from `first` on; they go out with the next [`Scratch::embed`].
    pub fn set_header<const N: usize>(&mut self, first: usize, values: [u32; N]) {
        self.header[first..first + N].copy_from_slice(&values);
    }

    /// Queues that the residual and attention's output of token `from` become those of token `to`.
    pub fn move_token(&self, from: usize, to: usize) -> Result<()> {
        if from == to {
            return Ok(());
        }
        let ([x, new_x], state) = ([from, to].map(|t| 4 * (HEADER + t * STATE_ROW)), self.state.buffer());
        state.copy(x..x + 4 * DIM, state, new_x)?;
        let [att, new_att] = [from, to].map(|t| 4 * t * Q_DIM);
        self.att.copy(att..att + 4 * Q_DIM, &self.att, new_att)
    }

    /// Reads the residual of token `t`.
    pub fn residual(&self, t: usize, x: &mut [f32]) -> Result<()> {
        self.state.buffer().read(4 * (HEADER + t * STATE_ROW), bytes_of_mut(x))
    }
}

/// A token of a pass.
#[derive(Clone, Copy)]
struct Token {
    id: u32,
    pos: usize,
    /// Tokens of its sequence that are known.
    known: usize,
}

/// Rows that a thread more writes in less time than it takes to begin.
const EACH: usize = 64;

/// Writes the tokens' rows of [`Scratch::state`]. Of a long prompt several threads do it: one takes a sixth of the time in
/// which a fast GPU does all the rest.
fn embed_all(weights: &Weights, frequencies: &Frequencies, tokens: &[Token], rows: &mut [u8]) {
    if tokens.len() >= 2 * EACH {
        let (some, others) = tokens.split_at(tokens.len() / 2);
        let (of_some, of_others) = rows.split_at_mut(4 * STATE_ROW * some.len());
        let embed_others = || embed_all(weights, frequencies, others, of_others);
        return both(embed_others, || embed_all(weights, frequencies, some, of_some));
    }
    for (&Token { id, pos, known }, row) in tokens.iter().zip(rows.chunks_exact_mut(4 * STATE_ROW)) {
        let mut floats = [0.0; STATE_ROW];
        let (x, of_pos) = floats.split_at_mut(DIM);
        weights.embed(id as usize, pos, x);
        let (cos, sin) = of_pos.split_at_mut(ANGLES);
        angles(pos, frequencies.at(pos, known), cos, sin);
        row.copy_from_slice(bytes_of(&floats));
    }
}
