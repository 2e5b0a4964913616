//! `gemv`, `gemm` and `activations` against plain loops.

use super::{Dims, EPS, GRIND, SMALL, buffer, bytes_of, floats, kernel, read, same, state};
use crate::device;
use crate::support::random::Random;
use antigravity::opencl::{Buffer, Device, MatrixStorage};
use files::blocks::{BLOCK, BlockQ4};
use half::{bf16, f16};
use numeric::quant::activations::ActBlock;
use numeric::quant::format::{Format, put_block};
use numeric::simd::{Isa, ops};

pub const GEMV: &str =
    concat!(include_str!("../../../kernels/blocks.cl"), include_str!("../../../kernels/gemv.cl"));
pub const GEMM: &str = concat!(
    include_str!("../../../kernels/blocks.cl"),
    include_str!("../../../kernels/gemm_epilogue.cl"),
    include_str!("../../../kernels/gemm.cl")
);
pub const GEMV_ROWS: &str = concat!(
    include_str!("../../../kernels/blocks.cl"),
    include_str!("../../../kernels/whole_rows.cl"),
    include_str!("../../../kernels/gemv.cl")
);
pub const GEMM_ROWS: &str = concat!(
    include_str!("../../../kernels/blocks.cl"),
    include_str!("../../../kernels/whole_rows.cl"),
    include_str!("../../../kernels/gemm_epilogue.cl"),
    include_str!("../../../kernels/gemm_rows.cl")
);
pub const GEMM_FEW: &str = concat!(
    include_str!("../../../kernels/blocks.cl"),
    include_str!("../../../kernels/gemm_epilogue.cl"),
    include_str!("../../../kernels/gemm_few.cl")
);
const ACTIVATIONS: &str = include_str!("../../../kernels/activations.cl");

pub fn q4_options(cols: usize) -> String {
    MatrixStorage::Blocks(Format::Q4_0).kernel_options(cols)
}

/// A packed matrix and what it stands for.
pub struct Packed {
    rows: usize,
    blocks: Vec<Vec<BlockQ4>>,
    pub quants: Vec<u8>,
    pub scales: Vec<u8>,
}

pub fn packed(r: &mut Random, rows: usize, cols: usize) -> Packed {
    let (groups, n) = (rows.div_ceil(16), cols / BLOCK);
    let (of_quants, of_scales) = Format::Q4_0.group_bytes(cols);
    let (mut quants, mut scales) = (vec![0x88; groups * of_quants], vec![0; groups * of_scales]);
    let mut blocks = Vec::new();
    for row in 0..rows {
        let group = row / 16;
        let (q, s) = (&mut quants[group * of_quants..], &mut scales[group * of_scales..]);
        blocks.push(
            (0..n)
                .map(|b| {
                    let block = BlockQ4::quantise(&std::array::from_fn(|_| r.float()));
                    put_block(q, s, b, row % 16, &block);
                    block
                })
                .collect(),
        );
    }
    Packed { rows, blocks, quants, scales }
}

impl Packed {
    /// The product, block by block.
    pub fn times(&self, acts: &[ActBlock]) -> Vec<f32> {
        let row = |row: &Vec<BlockQ4>| {
            row.iter().zip(acts).fold(0.0f32, |acc, (w, a)| {
                let sum: i32 = (0..BLOCK).map(|i| (i32::from(w.nibble_at(i)) - 8) * i32::from(a.q[i])).sum();
                (sum as f32).mul_add(w.d.to_f32() * a.d, acc)
            })
        };
        self.blocks.iter().map(row).collect()
    }

    fn buffers(&self, device: &Device) -> [Buffer; 2] {
        [buffer(device, &self.quants), buffer(device, &self.scales)]
    }
}

pub fn quantised(x: &[f32]) -> Vec<ActBlock> {
    x.as_chunks::<BLOCK>().0.iter().map(ActBlock::quantise).collect()
}

pub fn normed(x: &[f32], w: &[f32]) -> Vec<f32> {
    let mut h = vec![0.0; x.len()];
    ops::rms_norm(Isa::Scalar, x, w, EPS, &mut h);
    h
}

pub fn silu(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let mut y = gate.to_vec();
    ops::silu_mul(Isa::Scalar, &mut y, up);
    y
}

/// The dot product in sixteen lanes.
fn dot16(w: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for (i, (w, x)) in w.iter().zip(x).enumerate() {
        lanes[i % 16] = w.mul_add(*x, lanes[i % 16]);
    }
    for n in [8, 4, 2, 1] {
        for j in 0..n {
            lanes[j] += lanes[j + n];
        }
    }
    lanes[0]
}

pub fn words(acts: &[ActBlock]) -> Vec<u8> {
    acts.iter().flat_map(|a| a.q.map(|q| q as u8)).collect()
}

/// Norm and head over rows that do not fill their last group; `more` groups are said to be there.
pub fn head(device: &Device, more: i32) {
    let (Dims { dim, vocab, head_dim, .. }, r) = (SMALL, &mut Random(1));
    let (m, x, w) = (packed(r, vocab, dim), r.floats(dim + head_dim), r.floats(dim));
    let [quants, scales] = m.buffers(device);
    let s = floats(device, &state([0, 0], std::slice::from_ref(&x)));
    let (norm, out) = (floats(device, &w), floats(device, &vec![0.0; vocab]));
    let options = format!(
        "-DSTEP_HEAD -DROWS={vocab} -DCOLS={dim}{} -DTILE_GROUPS=4 -DSLICES=4 -DPASS=2",
        q4_options(dim)
    );
    let mut k = kernel(
        device,
        ("gemv", GEMV),
        &SMALL.options(64, &options),
        &[&quants, &scales, &s, &norm, &norm, &out, &out],
    );
    k.set_ints(7, &[0, vocab.div_ceil(16) as i32 + more]).unwrap();
    device.launch(&k, &[64], &[64]).unwrap();
    same("head", &read(&out), &m.times(&quantised(&normed(&x[..dim], &w))));
}

#[test]
fn products_of_one_token_have_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    head(&device, 0);
    gate_up(&device);
    dense_down(&device);
}

/// Norm, both halves, and blocks as `down` reads them.
fn gate_up(device: &Device) {
    let (Dims { dim, ffn, head_dim, .. }, r) = (SMALL, &mut Random(2));
    let (gate, up) = (packed(r, ffn, dim), packed(r, ffn, dim));
    let (x, w) = (r.floats(dim + head_dim), r.floats(dim));
    let quants = buffer(device, &[&gate.quants[..], &up.quants].concat());
    let scales = buffer(device, &[&gate.scales[..], &up.scales].concat());
    let s = floats(device, &state([0, 0], std::slice::from_ref(&x)));
    let norm = floats(device, &w);
    let (out, out_scales) = (buffer(device, &vec![0; ffn]), floats(device, &vec![0.0; ffn / BLOCK]));
    let options = format!(
        "-DSTEP_GATE_UP -DDOWN_QUANTISED -DROWS={ffn} -DCOLS={dim}{} -DTILE_GROUPS=2 -DSLICES=4 -DPASS=3",
        q4_options(dim)
    );
    let args = [&quants, &scales, &s, &norm, &norm, &out, &out_scales];
    let mut k = kernel(device, ("gemv", GEMV), &SMALL.options(64, &options), &args);
    k.set_ints(7, &[0, (ffn / 16) as i32]).unwrap();
    device.launch(&k, &[128], &[64]).unwrap();
    let acts = quantised(&normed(&x[..dim], &w));
    let expected = quantised(&silu(&gate.times(&acts), &up.times(&acts)));
    let mut found = vec![0; ffn];
    out.read(0, &mut found).unwrap();
    assert_eq!(found, words(&expected));
    same("scales", &read(&out_scales), &expected.iter().map(|a| a.d).collect::<Vec<_>>());
}

/// Rows as stored, of every type, with a number of columns that divides by nothing; onto the residual.
fn dense_down(device: &Device) {
    let (Dims { dim, head_dim, .. }, cols, r) = (SMALL, 50, &mut Random(3));
    let (w, x, input) = (r.floats(dim * cols), r.floats(dim + head_dim), r.floats(cols));
    for (kind, stored, wide) in dense_types(&w) {
        let (rows, s) = (buffer(device, &stored), floats(device, &state([0, 0], std::slice::from_ref(&x))));
        let acts = floats(device, &input);
        let options = format!("-DSTEP_DOWN -DROWS={dim} -DCOLS={cols} -DW_TYPE={kind} -DTILE_GROUPS=1");
        let args = [&rows, &rows, &s, &acts, &acts, &acts, &acts];
        let mut k = kernel(device, ("gemv", GEMV), &SMALL.options(64, &options), &args);
        k.set_ints(7, &[0, (dim / 16) as i32]).unwrap();
        device.launch(&k, &[64 * 6], &[64]).unwrap();
        let expected: Vec<f32> = wide.chunks(cols).zip(&x).map(|(row, x)| x + dot16(row, &input)).collect();
        same("down", &read(&s)[16..16 + dim], &expected);
    }
}

/// A matrix as f32, f16 and bf16: number of the type, bytes, and what they stand for.
fn dense_types(w: &[f32]) -> [(usize, Vec<u8>, Vec<f32>); 3] {
    let half: Vec<f16> = w.iter().map(|&x| f16::from_f32(x)).collect();
    let brain: Vec<bf16> = w.iter().map(|&x| bf16::from_f32(x)).collect();
    [
        (1, bytes_of(w), w.to_vec()),
        (2, half.iter().flat_map(|h| h.to_le_bytes()).collect(), half.iter().map(|h| h.to_f32()).collect()),
        (3, brain.iter().flat_map(|h| h.to_le_bytes()).collect(), brain.iter().map(|h| h.to_f32()).collect()),
    ]
}

#[test]
fn products_of_many_tokens_have_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    qkv(&device);
    dense_out(&device);
}

/// So many tokens, or under oclgrind, which is slow, some of a tile.
fn tokens(n: usize) -> usize {
    if std::env::var_os(GRIND).is_some() { 5 } else { n }
}

/// Several tiles of rows and two of tokens, with biases.
fn qkv(device: &Device) {
    let (Dims { dim, .. }, r) = (SMALL, &mut Random(4));
    let (rows, n) = (SMALL.qkv(), tokens(67));
    let (m, bias) = (packed(r, rows, dim), r.floats(rows));
    let acts: Vec<Vec<ActBlock>> = (0..n).map(|_| quantised(&r.floats(dim))).collect();
    let [quants, scales] = m.buffers(device);
    let all = acts.concat();
    let (input, d) = (buffer(device, &words(&all)), all.iter().map(|a| a.d).collect::<Vec<_>>());
    let (d, out, bias_at) = (floats(device, &d), floats(device, &vec![0.0; n * rows]), floats(device, &bias));
    let options = format!("-DSTEP_QKV -DROWS={rows} -DCOLS={dim}{}", q4_options(dim));
    let args = [&quants, &scales, &out, &input, &d, &out, &bias_at];
    let mut k = kernel(device, ("gemm", GEMM), &SMALL.options(256, &options), &args);
    k.set_ints(7, &[0, (rows / 16) as i32, n as i32, 0]).unwrap();
    device.launch(&k, &[rows.div_ceil(64) * 256, n.div_ceil(64)], &[256, 1]).unwrap();
    let product = |a: &Vec<ActBlock>| m.times(a).iter().zip(&bias).map(|(y, b)| y + b).collect::<Vec<_>>();
    same("qkv", &read(&out), &acts.iter().flat_map(product).collect::<Vec<_>>());
    assert_eq!(m.rows, rows);
}

/// Rows as stored, onto the residual, with biases.
fn dense_out(device: &Device) {
    let (Dims { dim, head_dim, .. }, n, r) = (SMALL, tokens(9), &mut Random(5));
    let cols = SMALL.heads * head_dim;
    let (w, bias) = (r.floats(dim * cols), r.floats(dim));
    let x: Vec<Vec<f32>> = (0..n).map(|_| r.floats(dim + head_dim)).collect();
    let input = r.floats(n * cols);
    for (kind, stored, wide) in dense_types(&w) {
        let (rows, s) = (buffer(device, &stored), floats(device, &state([0, 0], &x)));
        let (acts, bias_at) = (floats(device, &input), floats(device, &bias));
        let options = format!("-DSTEP_OUT -DROWS={dim} -DCOLS={cols} -DW_TYPE={kind}");
        let args = [&rows, &rows, &s, &acts, &acts, &acts, &bias_at];
        let mut k = kernel(device, ("gemm", GEMM), &SMALL.options(256, &options), &args);
        k.set_ints(7, &[0, (dim / 16) as i32, n as i32, 0]).unwrap();
        device.launch(&k, &[dim / 16 * 256, n.div_ceil(8)], &[256, 1]).unwrap();
        let found = read(&s);
        for (t, (x, input)) in x.iter().zip(input.chunks(cols)).enumerate() {
            let y = wide.chunks(cols).map(|row| dot16(row, input)).zip(&bias).zip(x);
            let expected: Vec<f32> = y.map(|((y, b), x)| x + (y + b)).collect();
            same("out", &found[16 + t * (dim + head_dim)..][..dim], &expected);
        }
    }
}

/// Norm and SiLU, quantised and not.
#[test]
fn inputs_of_products_have_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    let (Dims { dim, ffn, head_dim, .. }, n, r) = (SMALL, 3, &mut Random(6));
    let (x, w) = ((0..n + 1).map(|_| r.floats(dim + head_dim)).collect::<Vec<_>>(), r.floats(dim));
    let pairs: Vec<Vec<f32>> = (0..n).map(|_| r.floats(2 * ffn)).collect();
    let norms: Vec<Vec<f32>> = x[1..].iter().map(|x| normed(&x[..dim], &w)).collect();
    let products: Vec<Vec<f32>> = pairs.iter().map(|p| silu(&p[..ffn], &p[ffn..])).collect();
    let from_state = state([0, 0], &x);
    let cases = [("NORM", dim, from_state, norms), ("FFN", ffn, pairs.concat(), products)];
    for (input, cols, from, expected) in cases {
        let (src, norm) = (floats(&device, &from), floats(&device, &w));
        for quantise in [0, 1, 2] {
            // One token's room is left before them.
            let room = (n + 1) * cols;
            let (out, scales) =
                (buffer(&device, &vec![0; 4 * room]), floats(&device, &vec![0.0; room / BLOCK]));
            let options = format!("-DINPUT_{input} -DCOLS={cols} -DQUANTISED={quantise}");
            let sums = buffer(&device, &vec![0; 8 * room / BLOCK]);
            let args = [&src, &norm, &out, &scales, &sums];
            let mut k = kernel(&device, ("activations", ACTIVATIONS), &SMALL.options(64, &options), &args);
            // The norm is of tokens from the second on.
            k.set_ints(5, &[i32::from(input == "NORM"), 1]).unwrap();
            device.launch(&k, &[n * 64], &[64]).unwrap();
            if quantise == 0 {
                same(input, &read(&out)[cols..], &expected.concat());
                continue;
            }
            let blocks: Vec<ActBlock> = expected.iter().flat_map(|x| quantised(x)).collect();
            if quantise == 1 {
                let mut found = vec![0; n * cols];
                out.read(cols, &mut found).unwrap();
                assert_eq!(found, words(&blocks), "{input}");
            } else {
                let expected: Vec<f32> = blocks.iter().flat_map(|a| a.q.map(f32::from)).collect();
                same(input, &read(&out)[cols..], &expected);
            }
            let halves = blocks.iter().flat_map(|a| a.q.as_chunks::<16>().0);
            let expected: Vec<u32> =
                halves.map(|half| half.iter().map(|&q| i32::from(q)).sum::<i32>() as u32).collect();
            let found: Vec<u32> = read(&sums)[2 * cols / BLOCK..].iter().map(|x| x.to_bits()).collect();
            assert_eq!(found, expected, "{input}: sums");
            same(input, &read(&scales)[cols / BLOCK..], &blocks.iter().map(|a| a.d).collect::<Vec<_>>());
        }
    }
}
