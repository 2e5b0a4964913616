//! GGUF files of the baked model, of formats mixed as files mix them: the same bits of logits and rows of the cache on
//! an OpenCL device as on the CPU.

use crate::device::{self, is_exact_with};
use crate::support::gguf::file::File;
use crate::support::random::ids;
use crate::support::test_dir::TestDir;
use antigravity::dims::{self, FFN_DIM, LAYERS, Q_DIM, VOCAB};
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{self as seam, KvRows, Logits, Run};
use antigravity::model::weights::{LoadOptions, ModelPath, WeightType, Weights};
use antigravity::opencl::selftest::TOLERANCE;
use antigravity::opencl::{Device, KernelSet, Matrices, Model, OpenClDevice, OpenClOptions, Place};
use antigravity::run::options::BackendKind;
use antigravity::run::plan::{self, Plan};
use antigravity::{EngineOptions, Error};
use files::blocks::BlockType::{self, *};
use files::source::Safetensors;
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokens at once, then some one by one.
const PROMPT: usize = 12;
const MORE: usize = 3;

/// The formats of a file's matrices, by their names in the checkpoint.
type Mixture = fn(&str) -> BlockType;

/// Layers as files of type Q4_K_M have them, some with more bits and some without.
fn like_q4_k_m(name: &str) -> BlockType {
    match layer(name) {
        None => Q6_K,
        Some(l) if l % 2 == 0 && (name.contains("v_proj") || name.contains("down_proj")) => Q6_K,
        Some(_) => Q4_K,
    }
}

/// Every other format, under a head that is not quantised.
fn all_sorts(name: &str) -> BlockType {
    let Some(l) = layer(name) else { return BF16 };
    let [most, some] = [[Q8_0, Q4_0], [Q5_1, Q5_0], [Q5_K, Q4_1]][l % 3];
    if ["v_proj", "gate_proj", "up_proj"].iter().any(|part| name.contains(part)) { some } else { most }
}

/// Formats of one to four bits, all kinds of scales, and a head of codes.
fn few_bits(name: &str) -> BlockType {
    let Some(l) = layer(name) else { return IQ4_XS };
    let [most, some] =
        [[Q2_K, IQ4_NL], [MXFP4, IQ3_S], [IQ2_XXS, Q3_K], [NVFP4, TQ1_0], [IQ1_M, IQ2_S], [Q1_0, Q2_0]]
            [l % 6];
    if ["v_proj", "gate_proj", "up_proj"].iter().any(|part| name.contains(part)) { some } else { most }
}

fn gate_unlike_up(name: &str) -> BlockType {
    if name.contains("layers.1.mlp.gate_proj") { Q5_K } else { Q8_0 }
}

fn queries_unlike_keys(name: &str) -> BlockType {
    if name.contains("layers.1.self_attn.k_proj") { F16 } else { Q8_0 }
}

/// The layer that a tensor is of.
fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}

/// A file of the baked model; `None`, said aloud, where its rows are no whole blocks of 256.
fn written(mixture: Mixture) -> Option<(TestDir, PathBuf)> {
    if [dims::DIM, Q_DIM, FFN_DIM].iter().any(|cols| !cols.is_multiple_of(256)) {
        device::skip("this model's rows are no whole blocks of 256");
        return None;
    }
    let (dir, checkpoint) = (TestDir::new(), Safetensors::open(Path::new(dims::MODEL_DIR)).unwrap());
    let path = dir.file("model.gguf");
    File::of(&checkpoint, mixture).write(&path);
    Some((dir, path))
}

fn load(path: &Path) -> Weights {
    let load = LoadOptions::new(WeightType::Auto, 2);
    Weights::load(&ModelPath::new(path).unwrap().open(load.weight_type).unwrap(), &load).unwrap()
}

fn types() -> KvTypes {
    KvTypes::same(KvType::F16)
}

fn cpu(weights: &Arc<Weights>) -> CpuDevice {
    let isa = Isa::detect().unwrap();
    let options = CpuOptions { threads: 2, isa, kv_types: types(), slots: 100, max_tokens: PROMPT };
    CpuDevice::new(Arc::clone(weights), options).unwrap()
}

fn gpu(device: Device, weights: &Arc<Weights>, matrices: Matrices) -> OpenClDevice {
    let model = Arc::new(Model::new(device, Arc::clone(weights), matrices));
    let (rows, kernels) = (Place::Device, KernelSet::Tuned);
    let (kv_types, slots, max_tokens) = (types(), 100, PROMPT);
    let options = OpenClOptions {
        kv_types,
        slots,
        max_tokens,
        sequences: 2,
        tokens_per_sequence: 1,
        attention: None,
        experts: None,
        cache_place: rows,
        can_evict: true,
        kernels,
    };
    OpenClDevice::new(model, options).unwrap()
}

/// Logits of every token, the last ones computed one by one, and the rows of the cache.
fn run(on: &mut dyn seam::Device) -> (Vec<f32>, Vec<KvRows>) {
    let ids = ids(PROMPT + MORE);
    let mut logits = vec![0.0; ids.len() * VOCAB];
    let (prompt, rest) = logits.split_at_mut(PROMPT * VOCAB);
    let (mut cache, step) = (on.new_cache(100).unwrap(), on.max_tokens());
    for (i, chunk) in ids[..PROMPT].chunks(step).enumerate() {
        let (first, len) = (i * step, chunk.len());
        let logits = Logits::All(&mut prompt[first * VOCAB..(first + len) * VOCAB]);
        on.forward(&mut [Run::new(&mut *cache, chunk, first, logits)], None).unwrap();
    }
    for (pos, logits) in (PROMPT..).zip(rest.chunks_mut(VOCAB)) {
        let run = Run::new(&mut *cache, &ids[pos..=pos], pos, Logits::Last(logits));
        on.forward(&mut [run], None).unwrap();
    }
    let len = cache.extent().len;
    let rows = (0..LAYERS).map(|layer| {
        let mut rows = KvRows::default();
        cache.read_rows(layer, 0..len, &mut rows).unwrap();
        rows
    });
    let rows = rows.collect();
    (logits, rows)
}

/// Bit for bit where the device is exact; else as near as rounding flips leave it.
#[track_caller]
fn agree(exact: bool, found: &(Vec<f32>, Vec<KvRows>), expected: &(Vec<f32>, Vec<KvRows>)) {
    for (t, (f, e)) in found.0.chunks(VOCAB).zip(expected.0.chunks(VOCAB)).enumerate() {
        let square = |x: f32| f64::from(x).powi(2);
        let diff: f64 = f.iter().zip(e).map(|(f, e)| square(f - e)).sum();
        let d = (diff / e.iter().map(|&e| square(e)).sum::<f64>()).sqrt();
        let same = f.iter().zip(e).all(|(f, e)| f.to_bits() == e.to_bits());
        assert!(same || (!exact && d <= TOLERANCE), "token {t}: relative distance {d:.1e}");
    }
    assert!(!exact || found.1 == expected.1, "other rows");
}

/// And the device's memory is as planned.
#[test]
fn all_formats_have_the_cpus_bits() {
    for mixture in [like_q4_k_m, all_sorts, few_bits] {
        let (Some(device), Some((_dir, path))) = (device::device(), written(mixture)) else { return };
        let (exact, weights) = (is_exact_with(device.info()), Arc::new(load(&path)));
        let matrices = Matrices::copy(&device, &weights, Place::Device).unwrap();
        let (backend, cl_device) = (BackendKind::OpenCl, Some("0".into()));
        let options =
            EngineOptions { backend, cl_device, weight_type: WeightType::Auto, ..EngineOptions::new(path) };
        let items = Plan::new(&options).unwrap().plan_items();
        let planned = items.iter().find(|i| i.purpose == "weights" && i.kind == plan::MemoryKind::Device);
        assert_eq!(planned.map(|i| i.bytes), Some(device.allocated_bytes()));
        agree(exact, &run(&mut gpu(device, &weights, matrices)), &run(&mut cpu(&weights)));
    }
}

/// The CPU reads the device's copy.
#[test]
fn weights_in_one_memory_serve_both_devices() {
    let (Some(device), Some((_dir, path))) = (device::device(), written(like_q4_k_m)) else { return };
    if !device.info().unified_memory {
        return device::skip("this device has memory of its own");
    }
    let (apart, mut weights) = (Arc::new(load(&path)), load(&path));
    let matrices = Matrices::share(&device, &mut weights).unwrap();
    let (exact, weights) = (is_exact_with(device.info()), Arc::new(weights));
    let expected = run(&mut cpu(&apart));
    agree(true, &run(&mut cpu(&weights)), &expected);
    agree(exact, &run(&mut gpu(device, &weights, matrices)), &expected);
}

/// Mixtures that no kernel takes are refused before anything is copied, and the CPU can go on.
#[test]
fn mixtures_without_a_kernel_are_refused() {
    let refusals: [(Mixture, &str); 2] = [
        (gate_unlike_up, "gate and up of a layer are Q5_K and Q8_0"),
        (queries_unlike_keys, "q, k and v of a layer are Q8_0 and F16 and Q8_0"),
    ];
    for (mixture, said) in refusals {
        let (Some(device), Some((_dir, path))) = (device::device(), written(mixture)) else { return };
        let mut weights = load(&path);
        let copied = Matrices::copy(&device, &weights, Place::Device);
        for refused in [copied, Matrices::share(&device, &mut weights)] {
            match refused.map(|_| ()) {
                Err(Error::Device(why)) => assert!(why.contains(said), "{why}"),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(device.allocated_bytes(), 0);
    }
}
