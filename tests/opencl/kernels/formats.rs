//! `gemv` and `gemm` with GGUF's block formats as they are stored, against the CPU's scalar code.

use super::products::{GEMM, GEMM_FEW, GEMM_ROWS, GEMV, GEMV_ROWS, quantised, words};
use super::{Dims, GRIND, SMALL, buffer, floats, kernel, read, same, state};
use crate::device;
use crate::support::random::Random;
use antigravity::opencl::variants::{Feature, ProductForm, Tokens, VARIANTS, Variant};
use antigravity::opencl::{Buffer, Device, MatrixStorage};
use files::blocks::BLOCK;
use numeric::quant::activations::ActBlock;
use numeric::quant::format::Format;
use numeric::simd::Isa;
use numeric::simd::groups::Groups;
use numeric::simd::products::multiply;

/// Rows that do not fill their last group.
const ROWS: usize = 40;

/// Offsets of the upper bytes of a block's f16 values.
fn highs(format: Format) -> &'static [usize] {
    match format {
        Format::Q4_1 | Format::Q5_1 | Format::Q4_K | Format::Q5_K => &[1, 3],
        Format::Q6_K => &[209],
        Format::Q2_K => &[81, 83],
        Format::Q3_K => &[109],
        Format::TQ1_0 => &[53],
        Format::TQ2_0 => &[65],
        // Its upper nibble is that of the f16.
        Format::IQ1_M => &[55],
        Format::MXFP4 | Format::NVFP4 => &[],
        _ => &[1],
    }
}

/// A matrix of blocks without a pattern, of scales near each other.
struct Matrix {
    format: Format,
    rows: usize,
    cols: usize,
    quants: Vec<u8>,
    scales: Vec<u8>,
}

impl Matrix {
    fn new(format: Format, cols: usize) -> Self {
        Self::of(format, [ROWS, cols])
    }

    fn of(format: Format, [rows, cols]: [usize; 2]) -> Self {
        let (mut r, block, groups) = (Random(8), format.block_type(), rows.div_ceil(16));
        // Whole spans, of which the last is cut short.
        let whole = cols.next_multiple_of(format.scale_span());
        let (of_quants, of_scales) = format.group_bytes(whole);
        let (mut quants, mut scales) = (vec![0; groups * of_quants], vec![0; groups * of_scales]);
        for row in 0..rows {
            let mut bytes: Vec<u8> = (0..whole / block.values_per_block() * block.bytes_per_block())
                .map(|_| (r.bits() >> 16) as u8)
                .collect();
            for block in bytes.chunks_mut(block.bytes_per_block()) {
                for &at in highs(format) {
                    block[at] = block[at] & 0x87 | 0x30;
                }
                if format == Format::MXFP4 {
                    block[0] = block[0] % 8 + 120;
                }
            }
            let (q, s) = (&mut quants[row / 16 * of_quants..], &mut scales[row / 16 * of_scales..]);
            assert!(format.put_row(q, s, row % 16, &bytes));
        }
        let (cut_quants, cut_scales) = format.group_bytes(cols);
        let quants = quants.chunks(of_quants).flat_map(|group| group[..cut_quants].to_vec()).collect();
        let scales = scales.chunks(of_scales).flat_map(|group| group[..cut_scales].to_vec()).collect();
        Self { format, rows, cols, quants, scales }
    }

    fn groups(&self) -> usize {
        self.rows.div_ceil(16)
    }

    /// The product with one token.
    fn times(&self, acts: &[ActBlock]) -> Vec<f32> {
        let Self { format, ref quants, ref scales, .. } = *self;
        let w = Groups { format, quants, scales, groups: self.groups(), blocks: self.cols / BLOCK };
        let mut out = vec![[0.0; 16]; self.groups()];
        match self.cols {
            32 => multiply::<32>(Isa::Scalar, w, acts, &[], &mut out),
            256 => multiply::<256>(Isa::Scalar, w, acts, &[], &mut out),
            512 => multiply::<512>(Isa::Scalar, w, acts, &[], &mut out),
            576 => multiply::<576>(Isa::Scalar, w, acts, &[], &mut out),
            1536 => multiply::<1536>(Isa::Scalar, w, acts, &[], &mut out),
            cols => unreachable!("no test has {cols} columns"),
        }
        out.as_flattened()[..self.rows].to_vec()
    }

    fn buffers(&self, device: &Device) -> [Buffer; 2] {
        [buffer(device, &self.quants), buffer(device, &self.scales)]
    }

    fn options(&self, step: &str) -> String {
        let stored = MatrixStorage::Blocks(self.format).kernel_options(self.cols);
        format!("-D{step} -DROWS={} -DCOLS={}{stored}", self.rows, self.cols)
    }
}

/// Blocks that are read at the same time, and blocks whose sums wait, so that the last of the passes over the columns
/// is shorter than the others.
const SHORT_PASSES: [usize; 2] = [4, 3];

/// Reads weights through an image where a variant does.
fn plane(quants: &Buffer, variant: &Variant, words: usize) -> Buffer {
    if variant.needs_feature(Feature::Images) { quants.create_image(words).unwrap() } else { quants.clone() }
}

/// One token by whole rows, onto the residual.
fn one_by_rows(device: &Device, m: &Matrix, variant: &Variant) {
    let (Dims { dim, head_dim, .. }, r) = (SMALL, &mut Random(9));
    let (x, acts) = (r.floats(dim + head_dim), quantised(&r.floats(m.cols)));
    let [quants, scales] = m.buffers(device);
    let s = floats(device, &state([0, 0], std::slice::from_ref(&x)));
    let (input, d) = (buffer(device, &words(&acts)), acts.iter().map(|a| a.d).collect::<Vec<_>>());
    let options = m.options("STEP_DOWN")
        + " -DTILE_GROUPS=2 -DBY_ROWS -DROWS_PER_ITEM=1"
        + &variant.compiler_options(device.info());
    let d = floats(device, &d);
    let args = [&plane(&quants, variant, 1), &scales, &s, &input, &d, &d, &d];
    let mut k = kernel(device, ("gemv", GEMV_ROWS), &SMALL.options(16, &options), &args);
    k.set_ints(7, &[0, m.groups() as i32]).unwrap();
    device.launch(&k, &[16 * m.groups().div_ceil(2)], &[16]).unwrap();
    let expected: Vec<f32> = m.times(&acts).iter().zip(&x).map(|(y, x)| x + y).collect();
    same(&format!("{:?}, one token, {}", m.format, variant.name), &read(&s)[16..16 + m.rows], &expected);
}

/// So many tokens by whole rows.
fn many_by_rows(device: &Device, m: &Matrix, n: usize, variant: &Variant) {
    let (each, r) = (variant.rows, &mut Random(10));
    let dims = Dims { vocab: m.rows.max(SMALL.vocab), ..SMALL };
    let acts: Vec<Vec<ActBlock>> = (0..n).map(|_| quantised(&r.floats(m.cols))).collect();
    let [quants, scales] = m.buffers(device);
    let all = acts.concat();
    let input = match variant.form {
        ProductForm::Floats => {
            floats(device, &all.iter().flat_map(|a| a.q.map(f32::from)).collect::<Vec<_>>())
        }
        _ => buffer(device, &words(&all)),
    };
    let d = floats(device, &all.iter().map(|a| a.d).collect::<Vec<_>>());
    let out = floats(device, &vec![0.0; n * dims.vocab]);
    let args = [&plane(&quants, variant, each), &scales, &out, &input, &d, &out, &d, &sums(device, &all)];
    let options = m.options("STEP_HEAD")
        + &format!(" -DROWS_PER_ITEM={each} -DTOKENS=4 -DTURNS=4{}", variant.compiler_options(device.info()));
    let mut k = kernel(device, ("gemm", GEMM_ROWS), &dims.options(32, &options), &args);
    k.set_ints(8, &[0, m.groups() as i32, n as i32, 0]).unwrap();
    device.launch(&k, &[m.rows.div_ceil(32 * each) * 16, n.div_ceil(16) * 2], &[16, 2]).unwrap();
    for (found, acts) in read(&out).chunks(dims.vocab).zip(&acts) {
        same(&format!("{:?}, {n} tokens, {}", m.format, variant.name), &found[..m.rows], &m.times(acts));
    }
}

/// The sums of the halves of blocks.
fn sums(device: &Device, acts: &[ActBlock]) -> Buffer {
    let halves = acts.iter().flat_map(|a| a.q.as_chunks::<16>().0);
    let sums = halves.flat_map(|half| half.iter().map(|&q| i32::from(q)).sum::<i32>().to_le_bytes());
    buffer(device, &sums.collect::<Vec<u8>>())
}

/// So many tokens, as few at once, so many blocks and tokens of a work-group.
fn few(device: &Device, m: &Matrix, n: usize, [slices, tokens]: [usize; 2]) {
    let r = &mut Random(10);
    let dims = Dims { vocab: m.rows.max(SMALL.vocab), ..SMALL };
    let acts: Vec<Vec<ActBlock>> = (0..n).map(|_| quantised(&r.floats(m.cols))).collect();
    let ([quants, scales], all) = (m.buffers(device), acts.concat());
    let (input, d) = (buffer(device, &words(&all)), all.iter().map(|a| a.d).collect::<Vec<_>>());
    let (d, out) = (floats(device, &d), floats(device, &vec![0.0; n * dims.vocab]));
    let args = [&quants, &scales, &out, &input, &d, &out, &d, &sums(device, &all)];
    let options = m.options("STEP_HEAD") + &format!(" -DFEW -DW_HELD -DSLICES={slices} -DTOKENS={tokens}");
    let mut k = kernel(device, ("gemm", GEMM_FEW), &dims.options(4 * slices, &options), &args);
    k.set_ints(8, &[0, m.groups() as i32, n as i32, 0]).unwrap();
    device.launch(&k, &[n.div_ceil(tokens) * 4 * slices, m.groups()], &[4 * slices, 1]).unwrap();
    for (found, acts) in read(&out).chunks(dims.vocab).zip(&acts) {
        same(&format!("{:?}, {n} of few tokens", m.format), &found[..m.rows], &m.times(acts));
    }
}

/// The variants by whole rows that the device has.
fn by_rows(device: &Device) -> impl Iterator<Item = &'static Variant> {
    VARIANTS.iter().filter(|variant| variant.by_rows() && variant.missing_feature(device.info()).is_none())
}

/// One token where the variant is for one, and many.
fn any_by_rows(device: &Device, m: &Matrix, variant: &Variant) {
    if variant.for_tokens.contains(&Tokens::One) {
        one_by_rows(device, m, variant);
    }
    many_by_rows(device, m, 21, variant);
}

#[test]
fn whole_rows_have_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    for format in [Format::Q4_0, Format::Q6_K] {
        for name in ["rows", "floats"] {
            any_by_rows(&device, &Matrix::new(format, 256), Variant::from_name(name).unwrap());
        }
    }
}

#[test]
fn variants_of_formats_have_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    for format in
        [Format::Q4_0, Format::Q5_1, Format::Q8_0, Format::Q4_K, Format::Q2_K, Format::IQ2_S, Format::NVFP4]
    {
        let m = Matrix::new(format, 512);
        for variant in by_rows(&device) {
            any_by_rows(&device, &m, variant);
        }
    }
}

/// One token, onto the residual.
fn one(device: &Device, m: &Matrix, [slices, pass]: [usize; 2]) {
    let (Dims { dim, head_dim, .. }, r) = (SMALL, &mut Random(9));
    let (x, acts) = (r.floats(dim + head_dim), quantised(&r.floats(m.cols)));
    let [quants, scales] = m.buffers(device);
    let s = floats(device, &state([0, 0], std::slice::from_ref(&x)));
    let (input, d) = (buffer(device, &words(&acts)), acts.iter().map(|a| a.d).collect::<Vec<_>>());
    let items = 8 * slices;
    let options = m.options("STEP_DOWN") + &format!(" -DTILE_GROUPS=2 -DSLICES={slices} -DPASS={pass}");
    let d = floats(device, &d);
    let args = [&quants, &scales, &s, &input, &d, &d, &d];
    let mut k = kernel(device, ("gemv", GEMV), &SMALL.options(items, &options), &args);
    k.set_ints(7, &[0, m.groups() as i32]).unwrap();
    device.launch(&k, &[items * m.groups().div_ceil(2)], &[items]).unwrap();
    let expected: Vec<f32> = m.times(&acts).iter().zip(&x).map(|(y, x)| x + y).collect();
    same(&format!("{:?}, one token", m.format), &read(&s)[16..16 + m.rows], &expected);
}

/// So many tokens.
fn many(device: &Device, m: &Matrix, n: usize) {
    let r = &mut Random(10);
    let dims = Dims { vocab: m.rows.max(SMALL.vocab), ..SMALL };
    let acts: Vec<Vec<ActBlock>> = (0..n).map(|_| quantised(&r.floats(m.cols))).collect();
    let [quants, scales] = m.buffers(device);
    let all = acts.concat();
    let (input, d) = (buffer(device, &words(&all)), all.iter().map(|a| a.d).collect::<Vec<_>>());
    let (d, out) = (floats(device, &d), floats(device, &vec![0.0; n * dims.vocab]));
    let args = [&quants, &scales, &out, &input, &d, &out, &d];
    let mut k = kernel(device, ("gemm", GEMM), &dims.options(256, &m.options("STEP_HEAD")), &args);
    k.set_ints(7, &[0, m.groups() as i32, n as i32, 0]).unwrap();
    device.launch(&k, &[m.rows.div_ceil(64) * 256, n.div_ceil(64)], &[256, 1]).unwrap();
    for (found, acts) in read(&out).chunks(dims.vocab).zip(&acts) {
        same(&format!("{:?}, {n} tokens", m.format), &found[..m.rows], &m.times(acts));
    }
}

/// Of SmolLM2-135M: 576 columns are 18 blocks, of which some items of `gemv` have two and most have one. PoCL computed
/// nonsense of a loop with as many rounds.
#[test]
fn matrices_of_a_real_model_have_the_cpus_bits_each_time() {
    let Some(device) = device::device() else { return };
    let grind = std::env::var_os(GRIND).is_some();
    if grind {
        return many(&device, &Matrix::of(Format::Q4_1, [80, 576]), 2);
    }
    for format in [Format::Q4_0, Format::Q4_1] {
        for shape in [[576, 576], [1536, 576], [576, 1536]] {
            let m = Matrix::of(format, shape);
            (0..3).for_each(|_| many(&device, &m, 67));
        }
        for cols in [576, 1536] {
            one(&device, &Matrix::new(format, cols), [16, cols / BLOCK]);
        }
    }
}

#[test]
fn every_format_has_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    for format in Format::ALL {
        let m = Matrix::new(format, 512);
        one(&device, &m, SHORT_PASSES);
        one(&device, &Matrix::new(format, 576), [16, 18]);
        many(&device, &m, 67);
        // All blocks at once; one pass over blocks and a part of another; a tile of tokens and a part of another.
        few(&device, &m, 16, [32, 8]);
        few(&device, &Matrix::new(format, 576), 11, [16, 4]);
    }
}

/// For oclgrind: every way to unpack and to scale, on few columns.
#[test]
fn some_formats_have_the_cpus_bits_on_few_columns() {
    let Some(device) = device::device() else { return };
    if std::env::var_os(GRIND).is_some() {
        for format in [Format::Q5_1, Format::Q8_0, Format::Q4_K, Format::Q6_K, Format::Q2_K, Format::MXFP4] {
            one(&device, &Matrix::new(format, format.scale_span()), SHORT_PASSES);
        }
        for format in [Format::Q5_1, Format::Q2_K, Format::IQ1_M] {
            many(&device, &Matrix::new(format, format.scale_span()), 3);
            few(&device, &Matrix::new(format, format.scale_span()), 5, [16, 4]);
        }
    }
}
