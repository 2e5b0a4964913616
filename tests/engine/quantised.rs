//! Checkpoints that are quantised already: the baked model's, quantised here, beside one that holds the same values
//! unquantised.

use super::gguf::{checkpoint, error, halves, load, logits};
use crate::support::paths;
use crate::support::test_dir::TestDir;
use antigravity::dims::*;
use antigravity::model::weights::{
    Checkpoint, LoadOptions, Matrix, ModelPath, TensorRole, WeightBytes, WeightType, Weights, load_config,
    model_tensors, pack,
};
use files::blocks::{BLOCK, Dtype};
use files::config::Arch;
use files::source::{Safetensors, Tensor};
use half::f16;
use numeric::quant::format::Format;
use serde_json::{Map, Value, json};
use std::fs;

/// A safetensors file while it is built.
#[derive(Default)]
struct SafetensorsWriter {
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl SafetensorsWriter {
    fn put(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: impl IntoIterator<Item = u8>) {
        let start = self.data.len();
        self.data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, self.data.len()]});
        self.header.insert(name.into(), entry);
    }

    fn put_words(&mut self, name: &str, shape: &[usize], words: impl IntoIterator<Item = u32>) {
        self.put(name, "I32", shape, words.into_iter().flat_map(u32::to_le_bytes));
    }

    fn copy(&mut self, tensor: &Tensor) {
        let bytes = tensor.data.bytes().iter().copied();
        self.put(&tensor.name, &format!("{:?}", tensor.dtype), &tensor.shape, bytes);
    }

    /// The file in a folder of its own, with the model's config and this `quantization_config`.
    fn finish(self, quantization: Value) -> TestDir {
        let header = Value::Object(self.header).to_string().into_bytes();
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, &self.data].concat();
        let text = fs::read_to_string(paths::model().join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["quantization_config"] = quantization;
        TestDir::new().with("model.safetensors", file).with("config.json", config.to_string())
    }
}

/// A matrix as four-bit integers and scales of groups of 32 columns.
struct Quants {
    rows: usize,
    cols: usize,
    /// `[row][col]`, from -8 to 7
    q: Vec<i8>,
    /// `[row][group]`
    scales: Vec<f16>,
}

impl Quants {
    fn of(tensor: &Tensor, is_one_scale: bool) -> Self {
        let values = tensor.dtype.to_f32(tensor.data.bytes());
        let max = |values: &[f32]| values.iter().fold(0f32, |max, x| max.max(x.abs()));
        // A power of two has one bit in every type.
        let all = f16::from_f32((max(&values) / 7.0).log2().ceil().exp2());
        let group_scale = |group: &[f32]| if is_one_scale { all } else { f16::from_f32(max(group) / 7.0) };
        let scales: Vec<f16> = values.chunks(BLOCK).map(group_scale).collect();
        let quantise = |(i, x): (usize, &f32)| {
            let d = scales[i / BLOCK].to_f32();
            if d == 0.0 { 0 } else { (x / d).round().clamp(-8.0, 7.0) as i8 }
        };
        let q = values.iter().enumerate().map(quantise).collect();
        Self { rows: tensor.shape[0], cols: tensor.shape[1], q, scales }
    }

    fn values(&self) -> impl Iterator<Item = f32> {
        self.q.iter().enumerate().map(|(i, q)| f32::from(*q) * self.scales[i / BLOCK].to_f32())
    }

    /// Word of eight integers, plus 8, that `at` places.
    fn word(&self, at: impl Fn(usize) -> (usize, usize)) -> u32 {
        (0..8).fold(0, |word, i| {
            let (row, col) = at(i);
            word | ((self.q[row * self.cols + col] + 8) as u32) << (4 * i)
        })
    }

    fn put_compressed(&self, out: &mut SafetensorsWriter, stem: &str) {
        let (rows, cols) = (self.rows, self.cols);
        let words = (0..rows * cols / 8).map(|i| self.word(|k| (i * 8 / cols, i * 8 % cols + k)));
        out.put_words(&format!("{stem}weight_packed"), &[rows, cols / 8], words);
        let scales = self.scales.iter().flat_map(|d| d.to_le_bytes());
        out.put(&format!("{stem}weight_scale"), "F16", &[rows, cols / BLOCK], scales);
        let shape = [rows, cols].into_iter().flat_map(|size| (size as i64).to_le_bytes());
        out.put(&format!("{stem}weight_shape"), "I64", &[2], shape);
    }

    fn put_gptq(&self, out: &mut SafetensorsWriter, stem: &str) {
        let (rows, groups) = (self.rows, self.cols / BLOCK);
        let words = (0..self.cols / 8 * rows).map(|i| self.word(|k| (i % rows, i / rows * 8 + k)));
        out.put_words(&format!("{stem}qweight"), &[self.cols / 8, rows], words);
        let zeros = vec![0x7777_7777; groups * rows.div_ceil(8)];
        out.put_words(&format!("{stem}qzeros"), &[groups, rows.div_ceil(8)], zeros);
        let scale = |i: usize| self.scales[i % rows * groups + i / rows].to_le_bytes();
        out.put(&format!("{stem}scales"), "F16", &[groups, rows], (0..groups * rows).flat_map(scale));
        out.put_words(&format!("{stem}g_idx"), &[self.cols], (0..self.cols).map(|col| (col / BLOCK) as u32));
    }

    fn put_fp8(&self, out: &mut SafetensorsWriter, stem: &str) {
        let byte = |q: &i8| {
            let is_it = |byte: &u8| Dtype::F8_E4M3.widen_array::<1>(&[*byte]) == [f32::from(*q)];
            (0..=255).find(is_it).expect("FP8 has small integers")
        };
        out.put(&format!("{stem}weight"), "F8_E4M3", &[self.rows, self.cols], self.q.iter().map(byte));
        let scale = self.scales[0].to_f32();
        out.put(&format!("{stem}weight_scale_inv"), "F32", &[], scale.to_le_bytes());
    }
}

/// True if the file's tensor is one or more matrices.
fn is_matrix(tensor: &Tensor) -> bool {
    let name = |stored: &str| tensor.name == stored || tensor.name.ends_with(&format!(".{stored}"));
    let is_it = |spec: &antigravity::model::weights::TensorSpec| {
        spec.role == TensorRole::Matrix && !spec.tied && name(&spec.stored.name)
    };
    tensor.shape.len() == 2 && tensor.shape[1].is_multiple_of(BLOCK) && model_tensors().iter().any(is_it)
}

/// Puts the parts of a quantised matrix, whose names begin with this.
type PutQuants = fn(&Quants, &mut SafetensorsWriter, &str);

/// The model with quantised matrices, and the one with their values in f32.
fn quantised(source: &Safetensors, quantization: Value, put: PutQuants) -> (TestDir, TestDir) {
    let (mut coded, mut plain) = (SafetensorsWriter::default(), SafetensorsWriter::default());
    for tensor in source.tensors() {
        if is_matrix(tensor) {
            let quants = Quants::of(tensor, quantization["quant_method"] == "fp8");
            put(&quants, &mut coded, tensor.name.strip_suffix("weight").unwrap());
            plain.put(&tensor.name, "F32", &tensor.shape, quants.values().flat_map(f32::to_le_bytes));
        } else {
            coded.copy(tensor);
            plain.copy(tensor);
        }
    }
    (coded.finish(quantization), plain.finish(Value::Null))
}

/// All rows of a layer's down projection and of its queries.
fn decode(weights: &Weights, layer: usize) -> Vec<u32> {
    fn rows<const ROWS: usize, const COLS: usize>(matrix: &Matrix<ROWS, COLS>) -> Vec<u32> {
        let mut x = vec![0.0; COLS];
        (0..ROWS)
            .flat_map(|row| {
                matrix.decode_row(row, &mut x);
                x.iter().map(|x| (x + 0.0).to_bits()).collect::<Vec<_>>()
            })
            .collect()
    }
    let (attention, ffn) = halves(&weights.layers[layer]);
    [rows(&ffn.down), rows(&ffn.up), rows(&attention.wq), rows(attention.wk.as_ref().unwrap())].concat()
}

fn down_format(weights: &Weights) -> Option<Format> {
    match &halves(&weights.layers[0]).1.down {
        Matrix::Quantised(matrix) => Some(matrix.format()),
        Matrix::Dense { .. } => None,
    }
}

#[test]
fn weights_are_those_that_the_quantised_ones_stand_for() {
    let Some(source) = checkpoint() else { return };
    let is_usual = model_tensors().iter().any(|spec| spec.name == "model.layers.0.mlp.down_proj.weight")
        && (0..LAYERS).all(|layer| !is_recurrent(layer));
    if ARCH == Arch::Gpt2 || !is_usual || [DIM, Q_DIM, FFN_DIM].iter().any(|cols| !cols.is_multiple_of(BLOCK))
    {
        return;
    }
    let compressed = json!({"quant_method": "compressed-tensors", "format": "pack-quantized"});
    let methods: [(Value, PutQuants, Format); 3] = [
        (compressed, Quants::put_compressed, Format::Q4_0),
        (json!({"quant_method": "gptq", "bits": 4, "desc_act": false}), Quants::put_gptq, Format::Q4_0),
        (json!({"quant_method": "fp8"}), Quants::put_fp8, Format::Q8_0),
    ];
    for (quantization, put, format) in methods {
        let method = quantization["quant_method"].clone();
        let (coded, plain) = quantised(&source, quantization, put);
        let want = load(&plain.0, WeightType::F32, 2).unwrap();
        let exact = load(&coded.0, WeightType::F32, 2).unwrap();
        let native = load(&coded.0, WeightType::Auto, 2).unwrap();
        assert_eq!(
            (native.weight_type, down_format(&native)),
            (WeightType::Native, Some(format)),
            "{method}"
        );
        for layer in [0, LAYERS - 1] {
            assert!(decode(&exact, layer) == decode(&want, layer), "{method}: layer {layer} in f32");
            if format == Format::Q4_0 {
                let found = load(&plain.0, WeightType::Q4_0, 2).unwrap();
                assert!(
                    decode(&found, layer) == decode(&want, layer),
                    "{method}: layer {layer} is on a grid"
                );
                assert!(decode(&native, layer) == decode(&want, layer), "{method}: layer {layer} in blocks");
            }
        }
        // Half a step of Q8_0, whose scale is rounded to f16.
        let value = |bits: &u32| f32::from_bits(*bits);
        for (found, want) in decode(&native, 0).chunks(BLOCK).zip(decode(&want, 0).chunks(BLOCK)) {
            let max = want.iter().fold(0f32, |max, x| max.max(value(x).abs()));
            let mut pairs = found.iter().zip(want);
            assert!(pairs.all(|(a, b)| (value(a) - value(b)).abs() <= max * 0.54 / 127.0), "{method}: {max}");
        }
        let want = logits(want);
        assert!(logits(exact) == want, "{method}: the same logits in f32");
        let native = logits(native);
        let (most, rms) = error(&native, &want);
        assert!(most <= 0.5 && rms <= 0.06, "{method}: {most} {rms}");
        if format == Format::Q4_0 {
            let found = load(&coded.0, WeightType::Q4_0, 1).unwrap();
            let want = load(&plain.0, WeightType::F32, 1).unwrap();
            assert!(decode(&found, 0) == decode(&want, 0), "{method}: asked for Q4_0");
        }

        let opened = ModelPath::new(&coded.0).unwrap().open(WeightType::Auto).unwrap();
        let planned = WeightBytes::for_model(&opened);
        let packed = coded.file("some.packed.safetensors");
        let options = LoadOptions::new(WeightType::Auto, 2);
        let checkpoint = Checkpoint::open(&coded.0).unwrap();
        let config = load_config(&coded.0, &checkpoint).unwrap();
        pack::write_packed(&checkpoint, &config, &packed, &options, None).unwrap();
        assert!(logits(load(&packed, WeightType::Auto, 2).unwrap()) == native, "{method}: packed");
        let found = WeightBytes::for_model(&ModelPath::new(&packed).unwrap().open(WeightType::Auto).unwrap());
        assert_eq!(planned.device, found.device, "{method}: planned for a device");
        assert!(
            planned.own > 0 && planned.own <= found.own + found.mapped,
            "{method}: {planned:?} {found:?}"
        );
    }
}
