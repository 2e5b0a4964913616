//! Each OpenCL kernel against the CPU's scalar code, bit for bit, on odd sizes; and the same under oclgrind, which sees
//! accesses out of bounds, races and uninitialised reads.

mod attention;
mod formats;
mod products;

use crate::device;
use antigravity::opencl::{Access, Buffer, Device, Kernel, Place, Program, Source};
use std::path::Path;

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
const GRIND: &str = "ANTIGRAVITY_TEST_GRIND";

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
        let run = 1 << head_dim.trailing_zeros();
        let (q_scale, rotation) = (1.0 / (head_dim as f32).sqrt(), 1.0 / (run as f32).sqrt());
        // oclgrind's search for uninitialised values does not know what optimisation makes of the code.
        let plain = if std::env::var_os(GRIND).is_some() { "-cl-opt-disable" } else { "" };
        format!(
            "{plain} -DLAYERS=1 -DDIM={dim} -DHEADS={heads} -DKV_HEADS={kv_heads} -DHEAD_DIM={head_dim} \
             -DFFN_DIM={ffn} -DVOCAB={vocab} -DQ_DIM={q} -DKV_DIM={kv} -DGROUP={group} -DQ_PAD={q_pad} \
             -DKV_PAD={kv_pad} -DQKV={qkv} -DFFN_PAD={ffn} -DQKV_BIAS=1 -DO_BIAS=1 -DQK_NORM=1 -DWG={items} \
             -DRMS_EPS={EPS:e}f -DQ_SCALE={q_scale:e}f -DROTATION={rotation:e}f {more}"
        )
    }
}

/// A kernel of one of the project's sources, with its first arguments.
pub fn kernel(device: &Device, (name, text): (&str, &str), options: &str, args: &[&Buffer]) -> Kernel {
    let exact = match device.facts().correct_divide {
        true => "-cl-fp32-correctly-rounded-divide-sqrt -DCORRECT_DIVIDE",
        false => "",
    };
    let options = format!("{exact} {options}");
    let cache = if options.contains("KV_BLOCK") { KV } else { "" };
    let text = [COMMON, cache, text].concat();
    let program = Program::build(device, &Source { name, text: &text, options: &options }).unwrap();
    let mut kernel = program.kernel(name).unwrap();
    for (i, buffer) in args.iter().enumerate() {
        kernel.arg_buffer(i, buffer).unwrap();
    }
    kernel
}

pub fn bytes_of(x: &[f32]) -> Vec<u8> {
    x.iter().flat_map(|x| x.to_le_bytes()).collect()
}

pub fn buffer(device: &Device, bytes: &[u8]) -> Buffer {
    let buffer = device.buffer(bytes.len(), Access::ReadWrite, Place::Device).unwrap();
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

/// The header and the rows of some tokens: residual, cosines, sines.
pub fn state(header: [usize; 3], rows: &[Vec<f32>]) -> Vec<f32> {
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

/// A seeded generator, so that failures repeat.
pub struct Seeded(pub u64);

impl Seeded {
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as u32
    }

    pub fn float(&mut self) -> f32 {
        (self.bits() % 20_001) as f32 / 10_000.0 - 1.0
    }

    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// Runs tests of this binary on oclgrind; what it said. `None` where it is not installed.
fn grind(test: &str) -> Option<(Option<i32>, String)> {
    let library = "/usr/lib/oclgrind/liboclgrind-rt.so";
    if !Path::new(library).exists() {
        device::skip("oclgrind is not installed");
        return None;
    }
    let mut child = device::child(test, "grind");
    child.env("ANTIGRAVITY_OPENCL_LIB", library).env(GRIND, "1");
    // Its search for uninitialised values is not made for several threads.
    child.env("OCLGRIND_NUM_THREADS", "1");
    // It loses track of float16, which attention uses throughout.
    let uninitialised = if test.starts_with("kernels::attention") { "0" } else { "1" };
    child.env("OCLGRIND_UNINITIALIZED", uninitialised);
    child.env("OCLGRIND_DATA_RACES", "1").env("OCLGRIND_MAX_ERRORS", "4");
    Some(device::ended(&mut child))
}

fn complains(said: &str) -> bool {
    ["Invalid", "race", "Uninitialized", "OCLGRIND"].iter().any(|word| said.contains(word))
}

/// oclgrind has nothing to say about tests of this binary. It is slow: what takes long has a test of its own, so that
/// they run side by side.
fn clean(tests: &[&str]) {
    if device::job().is_some() {
        return;
    }
    for test in tests {
        let Some((code, said)) = grind(test) else { return };
        assert!(code == Some(0) && said.contains("1 passed") && !complains(&said), "{test}: {said}");
    }
}

#[test]
fn products_of_one_token_are_clean() {
    clean(&["kernels::products::one_token", "kernels::products::inputs"]);
}

#[test]
fn products_of_many_tokens_are_clean() {
    clean(&["kernels::products::many_tokens"]);
}

#[test]
fn products_of_other_formats_are_clean() {
    clean(&["kernels::formats::some_formats"]);
}

#[test]
fn attention_is_clean() {
    clean(&["kernels::attention::small"]);
}

#[test]
fn a_planted_error_is_caught() {
    match device::job() {
        // A matrix that is said to have a group of rows more than it has.
        Some(_) => products::head(&device::device().unwrap(), 1),
        None => {
            let Some((_, said)) = grind("kernels::a_planted_error_is_caught") else { return };
            assert!(said.contains("Invalid read"), "{said}");
        }
    }
}
