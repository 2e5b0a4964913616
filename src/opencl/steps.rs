//! Launches of the forward pass: one kernel object for each layer and step, its arguments bound once.

use super::form::Quantised;
use super::kernels::{Input, Kernels, Name, Observed};
use super::rows::{LayerRows, Rows};
use super::scratch::Scratch;
use super::weights::{Chunk, DeviceWeights, LayerWeights, Step, StepWeights};
use crate::dims::*;
use opencl_runtime::buffer::Buffer;
use opencl_runtime::device::Device;
use opencl_runtime::failure::Result;
use opencl_runtime::program::Kernel;

/// A kernel with its arguments and the items of one work-group.
pub struct Launch {
    kernel: Kernel,
    local: [usize; 2],
}

impl Launch {
    /// Queues it over so many work-groups.
    pub fn run(&self, device: &Device, groups: [usize; 2]) -> Result<()> {
        device.launch(&self.kernel, &[groups[0] * self.local[0], groups[1]], &self.local)
    }
}

/// A matrix (or the part of it that one buffer holds) times its input.
pub struct Product {
    launch: Launch,
    /// First group of sixteen rows of the result, groups.
    rows: [i32; 2],
    /// Work-groups: all of `gemv`, or the tiles of rows of `gemm`.
    groups: usize,
    /// Tokens of a tile of `gemm`.
    tokens: usize,
}

impl Product {
    /// Queues `gemv`.
    fn one(&self, device: &Device) -> Result<()> {
        self.launch.run(device, [self.groups, 1])
    }

    /// Queues `gemm` for so many tokens.
    fn many(&mut self, device: &Device, tokens: usize) -> Result<()> {
        self.launch.kernel.arg_ints(7, &[self.rows[0], self.rows[1], tokens as i32, 0])?;
        self.launch.run(device, [self.groups, tokens.div_ceil(self.tokens)])
    }
}

/// The matrices of a step.
#[derive(Default)]
pub struct Products(Vec<Product>);

impl Products {
    /// Queues the product of one token.
    pub fn one(&self, device: &Device) -> Result<()> {
        self.0.iter().try_for_each(|p| p.one(device))
    }

    /// Queues the product of many tokens.
    pub fn many(&mut self, device: &Device, tokens: usize) -> Result<()> {
        self.0.iter_mut().try_for_each(|p| p.many(device, tokens))
    }
}

/// One layer, one token: five launches where attention is the device's. Each covers the steps it is named for.
pub struct OneToken {
    /// norm, qkv
    pub qkv: Products,
    /// rope, attend; `None` where attention is the host's.
    pub attend: Option<Launch>,
    /// out; of several chunks of attention, at most `FUSED_CHUNKS`.
    pub out: Products,
    /// out, when attention's chunks are merged.
    pub out_merged: Products,
    /// norm, gate_up
    pub gate_up: Products,
    /// down
    pub down: Products,
}

/// One layer, many tokens.
#[allow(missing_docs, reason = "the names are the steps' names")]
pub struct ManyTokens {
    pub norm: Launch,
    pub qkv: Products,
    /// `None` where attention is the host's.
    pub attend: Option<Launch>,
    /// Quantises attention's output.
    pub att: Launch,
    pub out: Products,
    pub ffn_norm: Launch,
    pub gate_up: Products,
    /// silu(gate) * up, as `down` reads it.
    pub silu: Launch,
    pub down: Products,
}

/// Where attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "they say it")]
pub enum AttendOn {
    Device,
    Host,
}

/// All launches of a backend.
pub struct Launches {
    /// By layer.
    pub one: Vec<OneToken>,
    /// By layer; empty where the device takes one token at a time.
    pub many: Vec<ManyTokens>,
    /// By layer: position and rows of new tokens, for `many` and where attention is the host's.
    pub rope: Vec<Launch>,
    /// Final norm and head of one token.
    pub head: Products,
    /// The same of several.
    pub norm: Option<Launch>,
    /// See `norm`.
    pub heads: Products,
    /// Puts the chunks of one token's attention together, where `out` does not.
    pub merge: Option<Launch>,
    /// Queries of a work-group in `many`'s attention.
    pub queries: usize,
    /// By layer; empty until attention is observed.
    pub observe: Vec<Observe>,
}

/// One layer: attention joins the mass of the slots.
pub struct Observe {
    /// After attention of one token.
    pub one: Launch,
    /// After that of many.
    pub many: Option<Launch>,
}

/// What attention leaves for those who observe it, and where the mass is.
pub struct ObservedBuffers<'a> {
    /// Largest scores and sums of many tokens: `[token][HEADS][2]`
    pub softmax: &'a Buffer,
    /// By layer: `[kv_head][capacity]`
    pub mass: &'a [Buffer],
}

/// What a product reads and writes besides its matrix and the state; see `kernels/gemv.cl`.
struct Io<'a> {
    input: &'a Buffer,
    scales: &'a Buffer,
    out: &'a Buffer,
    extra: &'a Buffer,
}

/// Binds launches to the buffers of one backend.
struct Binder<'a> {
    kernels: &'a mut Kernels,
    scratch: &'a Scratch,
    rows: &'a Rows,
    attend: AttendOn,
}

impl Launches {
    /// Builds all kernels that are needed and binds them.
    pub fn new(
        kernels: &mut Kernels,
        weights: &DeviceWeights,
        scratch: &Scratch,
        rows: &Rows,
        attend: AttendOn,
    ) -> Result<Self> {
        let many = scratch.max_tokens > 1;
        let mut b = Binder { kernels, scratch, rows, attend };
        let layers: Vec<_> = weights.layers.iter().enumerate().map(|(i, l)| (l, rows.layer(i))).collect();
        let mut launches = Self {
            one: layers.iter().map(|(l, r)| b.one_token(l, r)).collect::<Result<_>>()?,
            many: Vec::new(),
            rope: Vec::new(),
            head: {
                let s = scratch;
                let io = Io { input: &weights.norm, scales: &s.none, out: &s.logits, extra: &s.none };
                b.gemv(Step::Head, &weights.head, (Input::Norm, Quantised::No), io)?
            },
            norm: None,
            heads: Products::default(),
            merge: None,
            queries: b.kernels.shapes().attend.map_or(1, |s| s.queries),
            observe: Vec::new(),
        };
        if attend == AttendOn::Device {
            let buffers = [scratch.state.buffer(), &rows.partials, &rows.ml, &scratch.att];
            launches.merge = Some(b.launch(Name::Merge, &buffers)?);
        }
        if many || attend == AttendOn::Host {
            launches.rope = layers.iter().map(|(l, r)| b.rope(l, r)).collect::<Result<_>>()?;
        }
        if many {
            launches.many = layers.iter().map(|(l, r)| b.many_tokens(l, r)).collect::<Result<_>>()?;
            launches.norm = Some(b.norm(&weights.norm, weights.head.reads)?);
            launches.heads = b.gemm(Step::Head, &weights.head, &scratch.logits, &scratch.none)?;
        }
        Ok(launches)
    }

    /// Binds what observes attention on the device.
    pub fn observe(
        &mut self,
        kernels: &mut Kernels,
        weights: &DeviceWeights,
        (scratch, rows): (&Scratch, &Rows),
        buffers: ObservedBuffers<'_>,
    ) -> Result<()> {
        let mut b = Binder { kernels, scratch, rows, attend: AttendOn::Device };
        let layers = weights.layers.iter().zip(buffers.mass).enumerate();
        let many = scratch.max_tokens > 1;
        let observe = layers.map(|(i, (l, mass))| {
            let one = b.observe(Observed::OneToken, (l, rows.layer(i)), [&rows.ml, mass])?;
            let of_many = || b.observe(Observed::ManyTokens, (l, rows.layer(i)), [buffers.softmax, mass]);
            Ok(Observe { one, many: many.then(of_many).transpose()? })
        });
        self.observe = observe.collect::<Result<_>>()?;
        for attend in self.many.iter_mut().filter_map(|m| m.attend.as_mut()) {
            attend.kernel.arg_buffer(SOFTMAX, buffers.softmax)?;
        }
        Ok(())
    }
}

/// Which argument of `attend` that is.
const SOFTMAX: usize = 5;

impl Binder<'_> {
    /// A kernel with its buffers, from argument 0 on.
    fn launch(&mut self, name: Name, buffers: &[&Buffer]) -> Result<Launch> {
        let mut kernel = self.kernels.kernel(name)?;
        for (i, buffer) in buffers.iter().enumerate() {
            kernel.arg_buffer(i, buffer)?;
        }
        Ok(Launch { kernel, local: [self.kernels.items(name), 1] })
    }

    fn product(&mut self, name: Name, chunk: &Chunk, io: &Io<'_>) -> Result<Product> {
        let state = self.scratch.state.buffer();
        let Chunk { quants, scales, first, groups, .. } = chunk;
        let scales = scales.as_ref().unwrap_or(quants);
        let launch = self.launch(name, &[quants, scales, state, io.input, io.scales, io.out, io.extra])?;
        Ok(Product { launch, rows: [*first as i32, *groups as i32], groups: *groups, tokens: 1 })
    }

    /// One token times the matrices of a step, its input from where the first of the pair says, its result as
    /// the second says.
    fn gemv(
        &mut self,
        step: Step,
        w: &StepWeights,
        (input, next): (Input, Quantised),
        io: Io<'_>,
    ) -> Result<Products> {
        let mut products = Vec::with_capacity(w.chunks.len());
        for chunk in &w.chunks {
            let name = Name::Gemv { step, form: chunk.form, input, next };
            let mut p = self.product(name, chunk, &io)?;
            p.launch.kernel.arg_ints(7, &p.rows)?;
            p.groups = self.kernels.shapes().gemv_groups(step, chunk.form, p.groups);
            products.push(p);
        }
        Ok(Products(products))
    }

    /// Many tokens times the matrices of a step.
    fn gemm(&mut self, step: Step, w: &StepWeights, out: &Buffer, bias: &Buffer) -> Result<Products> {
        let s = self.scratch;
        let io = Io { input: &s.acts, scales: &s.act_scales, out, extra: bias };
        let mut products = Vec::with_capacity(w.chunks.len());
        for chunk in &w.chunks {
            let mut p = self.product(Name::Gemm(step, chunk.form), chunk, &io)?;
            let [rows, tokens] = self.kernels.shapes().gemm_tile(step, chunk.form);
            p.groups = (p.groups * step.halves() * 16).div_ceil(rows);
            p.tokens = tokens;
            products.push(p);
        }
        Ok(Products(products))
    }

    fn one_token(&mut self, l: &LayerWeights, rows: &LayerRows) -> Result<OneToken> {
        let s = self.scratch;
        let [qkv, out, gate_up, down] = &l.steps;
        let norm = l.qk_norm.as_ref().unwrap_or(&s.none);
        let qkv_bias = l.qkv_bias.as_ref().unwrap_or(&s.none);
        let o_bias = l.o_bias.as_ref().unwrap_or(&s.none);
        let qkv_io = Io { input: &l.attn_norm, scales: &s.none, out: &s.qkv, extra: qkv_bias };
        let merged_io = Io { input: &s.att, scales: &s.none, out: &s.none, extra: o_bias };
        let (partials, ml) = (&self.rows.partials, &self.rows.ml);
        let out_io = Io { input: partials, scales: ml, out: &s.none, extra: o_bias };
        let gate_io = Io { input: &l.ffn_norm, scales: &s.none, out: &s.acts, extra: &s.act_scales };
        let down_io = Io { input: &s.acts, scales: &s.act_scales, out: &s.none, extra: &s.none };
        Ok(OneToken {
            qkv: self.gemv(Step::Qkv, qkv, (Input::Norm, Quantised::No), qkv_io)?,
            attend: match self.attend {
                AttendOn::Device => {
                    let buffers = [s.state.buffer(), &s.qkv, norm, &rows.k, &rows.v, partials, ml];
                    let mut launch = self.launch(Name::AttendOne, &buffers)?;
                    launch.kernel.arg_i32(7, self.rows.capacity() as i32)?;
                    Some(launch)
                }
                AttendOn::Host => None,
            },
            out: match self.attend {
                AttendOn::Device => self.gemv(Step::Out, out, (Input::Merge, Quantised::No), out_io)?,
                AttendOn::Host => Products::default(),
            },
            out_merged: self.gemv(Step::Out, out, (Input::Att, Quantised::No), merged_io)?,
            gate_up: self.gemv(Step::GateUp, gate_up, (Input::Norm, down.reads), gate_io)?,
            down: self.gemv(Step::Down, down, (Input::Ffn, Quantised::No), down_io)?,
        })
    }

    fn rope(&mut self, l: &LayerWeights, rows: &LayerRows) -> Result<Launch> {
        let s = self.scratch;
        let norm = l.qk_norm.as_ref().unwrap_or(&s.none);
        let mut launch = self.launch(Name::Rope, &[s.state.buffer(), &s.qkv, norm, &rows.k, &rows.v])?;
        launch.kernel.arg_i32(5, self.rows.capacity() as i32)?;
        Ok(launch)
    }

    fn observe(
        &mut self,
        of: Observed,
        (l, rows): (&LayerWeights, &LayerRows),
        [softmax, mass]: [&Buffer; 2],
    ) -> Result<Launch> {
        let s = self.scratch;
        let norm = l.qk_norm.as_ref().unwrap_or(&s.none);
        let buffers = [s.state.buffer(), &s.qkv, norm, &rows.k, softmax, mass];
        let mut launch = self.launch(Name::Observe(of), &buffers)?;
        launch.kernel.arg_i32(6, self.rows.capacity() as i32)?;
        Ok(launch)
    }

    /// Norm of the residual from token 0 on, as a matrix reads it.
    fn norm(&mut self, w: &Buffer, quantised: Quantised) -> Result<Launch> {
        let s = self.scratch;
        let name = Name::Acts(Input::Norm, DIM, quantised);
        let mut launch = self.launch(name, &[s.state.buffer(), w, &s.acts, &s.act_scales])?;
        launch.kernel.arg_i32(4, 0)?;
        Ok(launch)
    }

    fn acts(&mut self, name: Name, from: &Buffer) -> Result<Launch> {
        let s = self.scratch;
        let mut launch = self.launch(name, &[from, &s.none, &s.acts, &s.act_scales])?;
        launch.kernel.arg_i32(4, 0)?;
        Ok(launch)
    }

    fn many_tokens(&mut self, l: &LayerWeights, rows: &LayerRows) -> Result<ManyTokens> {
        let s = self.scratch;
        let [qkv, out, gate_up, down] = &l.steps;
        let qkv_bias = l.qkv_bias.as_ref().unwrap_or(&s.none);
        let o_bias = l.o_bias.as_ref().unwrap_or(&s.none);
        Ok(ManyTokens {
            norm: self.norm(&l.attn_norm, qkv.reads)?,
            qkv: self.gemm(Step::Qkv, qkv, &s.qkv, qkv_bias)?,
            attend: match self.attend {
                AttendOn::Device => {
                    let buffers = [s.state.buffer(), &s.qkv, &rows.k, &rows.v, &s.att, &s.none];
                    let mut launch = self.launch(Name::Attend, &buffers)?;
                    launch.kernel.arg_i32(6, self.rows.capacity() as i32)?;
                    Some(launch)
                }
                AttendOn::Host => None,
            },
            att: self.acts(Name::Acts(Input::Att, Q_DIM, out.reads), &s.att)?,
            out: self.gemm(Step::Out, out, &s.none, o_bias)?,
            ffn_norm: self.norm(&l.ffn_norm, gate_up.reads)?,
            gate_up: self.gemm(Step::GateUp, gate_up, &s.gate_up, &s.none)?,
            silu: self.acts(Name::Acts(Input::Ffn, FFN_DIM, down.reads), &s.gate_up)?,
            down: self.gemm(Step::Down, down, &s.none, &s.none)?,
        })
    }
}

impl Launch {
    /// Sets the first token that the final norm reads.
    pub fn start_at(&mut self, first: usize) -> Result<&mut Self> {
        self.kernel.arg_i32(4, first as i32)?;
        Ok(self)
    }
}
