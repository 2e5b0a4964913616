//! Each OpenCL kernel against the CPU's scalar code, bit for bit, on odd sizes.

mod attention;
mod experts;
mod formats;
pub mod products;

use antigravity::opencl::{Access, Buffer, Device, Kernel, Place, Program, Source};

const COMMON: &str = include_str!("../../kernels/common.cl");
const KV: &str = include_str!("../../kernels/kv.cl");

/// Sizes of a model that divide by nothing in particular.
#[derive(Clone, Copy)]
pub struct Dims {
    pub dim: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    pub vocab: usize,
}

pub const SMALL: Dims = Dims { dim: 96, heads: 4, kv_heads: 2, head_dim: 20, ffn: 64, vocab: 100 };
pub const EPS: f32 = 1e-5;
/// Set in a child that runs under oclgrind.
pub const GRIND: &str = "ANTIGRAVITY_TEST_GRIND";

impl Dims {
    pub fn q_pad(self) -> usize {
        (self.heads * self.head_dim).next_multiple_of(16)
    }

    pub fn kv_pad(self) -> usize {
        (self.kv_heads * self.head_dim).next_multiple_of(16)
    }

    pub fn qkv(self) -> usize {
        self.q_pad() + 2 * self.kv_pad()
    }

    /// Options that name every size, and more.
    pub fn options(self, items: usize, more: &str) -> String {
        let Dims { dim, heads, kv_heads, head_dim, ffn, vocab } = self;
        let (q, kv, group) = (heads * head_dim, kv_heads * head_dim, heads / kv_heads);
        let (q_pad, kv_pad, qkv) = (self.q_pad(), self.kv_pad(), self.qkv());
        let (run, half) = (1 << head_dim.trailing_zeros(), head_dim / 2);
        let (q_scale, rotation) = (1.0 / (head_dim as f32).sqrt(), 1.0 / (run as f32).sqrt());
        // oclgrind's search for uninitialised values does not know what optimisation makes of the code.
        let plain = if std::env::var_os(GRIND).is_some() { "-cl-opt-disable" } else { "" };
        format!(
            "{plain} -DLAYERS=1 -DDIM={dim} -DHEADS={heads} -DKV_HEADS={kv_heads} -DHEAD_DIM={head_dim} \
             -DFFN_DIM={ffn} -DVOCAB={vocab} -DQ_DIM={q} -DKV_DIM={kv} -DGROUP={group} -DQ_PAD={q_pad} \
             -DKV_PAD={kv_pad} -DQKV={qkv} -DFFN_PAD={ffn} -DQKV_BIAS=1 -DO_BIAS=1 -DQK_NORM=1 -DWG={items} \
             -DNORM_EPS={EPS:e}f -DROPE_DIM={head_dim} -DANGLES={half} -DANGLES_AT=0 -DWINDOW=0 \
             -DNORM_BIAS=0 -DPRE_NORMS=1 -DPOST_NORMS=0 -DGATED=1 -DGELU=0 -DMLP_BIAS=0 \
             -DQ_SCALE={q_scale:e}f -DROTATION={rotation:e}f {more}"
        )
    }
}

/// A kernel of one of the project's sources, with its first arguments.
pub fn kernel(device: &Device, (name, text): (&str, &str), options: &str, args: &[&Buffer]) -> Kernel {
    let exact = match device.info().has_correct_divide {
        true => "-cl-fp32-correctly-rounded-divide-sqrt -DCORRECT_DIVIDE",
        false => "",
    };
    let options = format!("{exact} {options}");
    let cache = if options.contains("KV_BLOCK") { KV } else { "" };
    let text = [COMMON, cache, text].concat();
    let program = Program::build(device, &Source { name, text: &text, options: &options }).unwrap();
    let mut kernel = program.create_kernel(name).unwrap();
    for (i, buffer) in args.iter().enumerate() {
        kernel.set_buffer(i, buffer).unwrap();
    }
    kernel
}

pub fn bytes_of(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn buffer(device: &Device, bytes: &[u8]) -> Buffer {
    let buffer = device.allocate_buffer(bytes.len(), Access::ReadWrite, Place::Device).unwrap();
    buffer.write(0, bytes).unwrap();
    buffer
}

pub fn floats(device: &Device, x: &[f32]) -> Buffer {
    buffer(device, &bytes_of(x))
}

pub fn read(buffer: &Buffer) -> Vec<f32> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read(0, &mut bytes).unwrap();
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// The header (the slot of a single token, the token that the head reads) and the rows of some tokens: residual,
/// cosines, sines.
pub fn state(header: [usize; 2], rows: &[Vec<f32>]) -> Vec<f32> {
    let mut all = vec![0.0f32; 16];
    for (at, value) in header.into_iter().enumerate() {
        all[at] = f32::from_bits(value as u32);
    }
    rows.iter().for_each(|row| all.extend_from_slice(row));
    all
}

#[track_caller]
pub fn same(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert_eq!(f.to_bits(), e.to_bits(), "{what}: element {i}: {f} instead of {e}");
    }
}
