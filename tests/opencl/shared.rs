//! An OpenCL device and the CPU with the same model: one cache that both use in turn, several sequences in one pass,
//! and the attention that slots receive.

use crate::device::{self, is_exact_with};
use crate::support::random::ids;
use antigravity::dims::{self, KV_HEADS, LAYERS, VOCAB, attention_layers};
use antigravity::model::cpu::attention::attention_for_device;
use antigravity::model::cpu::{CpuDevice, CpuOptions};
use antigravity::model::device::{Device, KvCache, KvRows, Logits, Run};
use antigravity::model::weights::{LoadOptions, ModelPath, WeightType, Weights};
use antigravity::opencl::{KernelSet, Matrices, Model, OpenClDevice, OpenClOptions, Place};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

pub const CAPACITY: usize = 300;
const PROMPT: usize = 40;

/// Held by each test: what one allocates on the device is not to be counted by another.
static ALONE: Mutex<()> = Mutex::new(());

pub fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The model on the device; `None`, said aloud, without one.
pub fn model() -> Option<&'static Arc<Model>> {
    static MODEL: OnceLock<Option<Arc<Model>>> = OnceLock::new();
    let load = || {
        let device = device::device()?;
        let matrices = Matrices::copy(&device, weights(), Place::Device).unwrap();
        Some(Arc::new(Model::new(device, Arc::clone(weights()), matrices)))
    };
    MODEL.get_or_init(load).as_ref()
}

fn weights() -> &'static Arc<Weights> {
    static WEIGHTS: OnceLock<Arc<Weights>> = OnceLock::new();
    WEIGHTS.get_or_init(|| {
        let path = ModelPath::new(Path::new(dims::MODEL_DIR)).unwrap();
        let load = LoadOptions::new(WeightType::Q4_0, 2);
        Arc::new(Weights::load(&path.open(load.weight_type).unwrap(), &load).unwrap())
    })
}

fn gpu_options(kv_types: KvTypes, rows: Place) -> OpenClOptions {
    let (max_tokens, kernels) = (128, KernelSet::Tuned);
    let (sequences, drafted, attention) = (32, 1, None);
    let (slots, evicts) = (CAPACITY, true);
    OpenClOptions {
        kv_types,
        slots,
        max_tokens,
        sequences,
        tokens_per_sequence: drafted,
        attention,
        experts: None,
        cache_place: rows,
        can_evict: evicts,
        kernels,
    }
}

pub fn gpu(model: &Arc<Model>, kv_types: KvTypes, rows: Place) -> OpenClDevice {
    OpenClDevice::new(Arc::clone(model), gpu_options(kv_types, rows)).unwrap()
}

/// Creates an OpenCL device with attention on the host.
pub fn gpu_with_host(model: &Arc<Model>, kv_types: KvTypes) -> OpenClDevice {
    let attention = Some(attention_for_device(2, Isa::detect().unwrap(), CAPACITY).unwrap());
    let options = OpenClOptions { attention, ..gpu_options(kv_types, Place::Device) };
    OpenClDevice::new(Arc::clone(model), options).unwrap()
}

pub fn cpu(kv_types: KvTypes) -> CpuDevice {
    let isa = Isa::detect().unwrap();
    let options = CpuOptions { threads: 2, isa, kv_types, slots: CAPACITY, max_tokens: 128 };
    CpuDevice::new(Arc::clone(weights()), options).unwrap()
}

/// Goes on with `tokens`, the last `observe` of which are observed; the logits of the last.
pub fn observed(
    on: &mut dyn Device,
    cache: &mut dyn KvCache,
    tokens: &[u32],
    mut observe: usize,
) -> Vec<f32> {
    let mut logits = vec![0.0; VOCAB];
    let step = on.max_tokens();
    for tokens in tokens.chunks(step) {
        let (pos, out) = (cache.extent().len, Logits::Last(&mut logits));
        observe = observe.min(tokens.len());
        on.forward(&mut [Run { observed_tokens: observe, ..Run::new(cache, tokens, pos, out) }], None)
            .unwrap();
    }
    logits
}

/// Goes on with `tokens`; the logits of the last.
pub fn forward(on: &mut dyn Device, cache: &mut dyn KvCache, tokens: &[u32]) -> Vec<f32> {
    observed(on, cache, tokens, 0)
}

/// Some text that goes on.
struct Text {
    tokens: Vec<u32>,
    /// After the last of them.
    logits: Vec<f32>,
}

impl Text {
    fn of(logits: Vec<f32>) -> Self {
        Self { tokens: Vec::new(), logits }
    }

    /// Appends `more` tokens, the likeliest each.
    fn decode(&mut self, on: &mut dyn Device, cache: &mut dyn KvCache, more: usize) {
        for _ in 0..more {
            let best = (0..VOCAB).max_by(|&a, &b| self.logits[a].total_cmp(&self.logits[b])).unwrap();
            self.tokens.push(best as u32);
            self.logits = forward(on, cache, &[best as u32]);
        }
    }
}

pub fn rows_of(cache: &mut dyn KvCache) -> Vec<KvRows> {
    let len = cache.extent().len;
    let read = |layer| {
        let mut rows = KvRows::default();
        cache.read_rows(layer, 0..len, &mut rows).unwrap();
        rows
    };
    attention_layers().map(read).collect()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn the_cpu_and_the_device_use_one_cache_in_turn() {
    let _alone = alone();
    let Some(model) = model() else { return };
    if !model.device().info().unified_memory {
        return device::skip("this device has memory of its own");
    }
    for types in KvType::ALL.map(KvTypes::same).into_iter().chain([KvTypes { k: KvType::Q8, v: KvType::F16 }])
    {
        let mut cpu = cpu(types);
        let mut alone = cpu.new_cache(CAPACITY).unwrap();
        let mut text = Text::of(forward(&mut cpu, &mut *alone, &ids(PROMPT)));
        text.decode(&mut cpu, &mut *alone, 40);

        let mut gpu = gpu(model, types, Place::HostVisible);
        assert!(gpu.shares_rows());
        let mut cache = gpu.new_cache(CAPACITY).unwrap();
        let allocated = model.device().allocated_bytes();
        let mut found = Text::of(forward(&mut cpu, &mut *cache, &ids(PROMPT)));
        found.decode(&mut gpu, &mut *cache, 20);
        found.decode(&mut cpu, &mut *cache, 20);
        assert_eq!(model.device().allocated_bytes(), allocated);
        assert_eq!(found.tokens, text.tokens, "{types}");
        if is_exact_with(model.device().info()) {
            assert_eq!(bits(&found.logits), bits(&text.logits), "{types}");
            assert!(rows_of(&mut *cache) == rows_of(&mut *alone), "{types}: other rows");
        }
    }
}

#[test]
fn the_cpu_has_rows_until_the_device_needs_them() {
    let _alone = alone();
    let Some(model) = model() else { return };
    let (types, mut cpu) = (KvTypes::same(KvType::Q8), cpu(KvTypes::same(KvType::Q8)));
    let mut far = gpu(model, types, Place::Device);
    assert!(!far.shares_rows());
    let mut cache = far.new_cache(CAPACITY).unwrap();
    let unreachable = catch_unwind(AssertUnwindSafe(|| drop(forward(&mut cpu, &mut *cache, &[1]))));
    assert!(unreachable.is_err(), "the CPU reaches a GPU's own memory");
    if !model.device().info().unified_memory {
        return device::skip("this device has memory of its own");
    }

    let mut gpu = gpu(model, types, Place::HostVisible);
    let mut cache = gpu.new_cache(CAPACITY).unwrap();
    forward(&mut gpu, &mut *cache, &ids(10));
    type Use = fn(&mut OpenClDevice, &mut dyn KvCache);
    let uses: [Use; 5] = [
        |gpu, cache| drop(forward(gpu, cache, &[1])),
        |_, cache| cache.resize(400).unwrap(),
        |_, cache| cache.retain_slots(0, 0, &[0, 1]).unwrap(),
        |_, cache| cache.read_rows(0, 0..1, &mut KvRows::default()).unwrap(),
        |_, cache| cache.write_mass(0, &vec![0.0; KV_HEADS * cache.extent().len]).unwrap(),
    ];
    for used in uses {
        let first = cache.host_rows().unwrap().layer_rows(0).0.as_ptr();
        let again = cache.host_rows().unwrap().layer_rows(0).0.as_ptr();
        assert_eq!(first, again, "mapped once");
        used(&mut gpu, &mut *cache);
    }
    assert_eq!(cache.extent().len, 11);

    // What the CPU writes, and how it shortens, is there afterwards.
    let expected = {
        let mut own = cpu.new_cache(CAPACITY).unwrap();
        forward(&mut cpu, &mut *own, &ids(PROMPT));
        forward(&mut cpu, &mut *own, &[1]);
        rows_of(&mut *own)
    };
    cache.set_len(0);
    forward(&mut cpu, &mut *cache, &ids(PROMPT + 5));
    cache.set_len(PROMPT);
    forward(&mut gpu, &mut *cache, &[1]);
    if is_exact_with(model.device().info()) {
        assert!(rows_of(&mut *cache) == expected);
    }
}

/// A sequence: what is in its cache, and what a pass adds.
struct Sequence {
    before: Vec<u32>,
    tokens: Vec<u32>,
    observe: usize,
    /// Rows of logits that are wanted: none, the last or all.
    rows: usize,
}

fn logits_of<'a>(sequence: &Sequence, out: &'a mut [f32]) -> Logits<'a> {
    match sequence.rows {
        0 => Logits::None,
        1 => Logits::Last(out),
        _ => Logits::All(out),
    }
}

/// Bits of the logits of a sequence, its rows, and bits of their mass.
type Left = (Vec<u32>, Vec<KvRows>, Vec<u32>);

#[track_caller]
fn agree(found: &[Left], expected: &[Left], what: &str) {
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!(f.0 == e.0, "{what}: sequence {i}: other logits");
        assert!(f.1 == e.1, "{what}: sequence {i}: other rows");
        assert!(f.2 == e.2, "{what}: sequence {i}: other mass");
    }
}

/// Returns the state of the sequences after one pass with all of them, or after a pass each.
fn passes(on: &mut dyn Device, sequences: &[Sequence], together: bool) -> Vec<Left> {
    let mut caches: Vec<_> = sequences.iter().map(|_| on.new_cache(CAPACITY).unwrap()).collect();
    for (cache, sequence) in caches.iter_mut().zip(sequences) {
        if sequence.observe > 0 {
            cache.write_mass(0, &[]).unwrap();
        }
        if !sequence.before.is_empty() {
            forward(on, &mut **cache, &sequence.before);
        }
    }
    let mut out: Vec<_> = sequences.iter().map(|s| vec![0.0; s.rows * VOCAB]).collect();
    let each = caches.iter_mut().zip(sequences).zip(&mut out);
    let mut runs: Vec<_> = each
        .map(|((cache, s), out)| Run {
            observed_tokens: s.observe,
            ..Run::new(&mut **cache, &s.tokens, s.before.len(), logits_of(s, out))
        })
        .collect();
    if together {
        on.forward(&mut runs, None).unwrap();
    } else {
        runs.chunks_mut(1).for_each(|run| on.forward(run, None).unwrap());
    }
    drop(runs);
    let found = caches.iter_mut().zip(&out);
    found.map(|(cache, out)| (bits(out), rows_of(&mut **cache), mass_of(&mut **cache))).collect()
}

#[test]
fn several_sequences_in_one_pass_are_each_as_alone() {
    let _alone = alone();
    let Some(model) = model() else { return };
    if !is_exact_with(model.device().info()) {
        return device::skip("this device does not have the CPU's bits");
    }
    let sequence = |before: usize, n: usize, observe: usize, rows: usize| {
        let all = ids(before + n);
        Sequence { before: all[..before].to_vec(), tokens: all[before..].to_vec(), observe, rows }
    };
    // Decoding over one and over two chunks of attention, a prompt's chunk, a draft, a first token, one nobody samples.
    let sequences = [
        sequence(5, 1, 0, 1),
        sequence(150, 1, 0, 1),
        sequence(40, 20, 0, 1),
        sequence(131, 1, 1, 1),
        sequence(9, 18, 3, 18),
        sequence(0, 1, 0, 1),
        sequence(3, 2, 0, 0),
    ];
    // The same where the last layer is only for tokens whose logits are read.
    let unobserved = [
        sequence(3, 2, 0, 0),
        sequence(140, 20, 0, 1),
        sequence(150, 1, 0, 0),
        sequence(9, 4, 0, 4),
        sequence(5, 1, 0, 1),
        sequence(0, 100, 0, 1),
    ];
    let (f16, mixed) = (KvTypes::same(KvType::F16), KvTypes { k: KvType::Q8, v: KvType::Q4 });
    for (types, sequences) in [(f16, &sequences[..]), (mixed, &sequences), (mixed, &unobserved)] {
        let expected = passes(&mut cpu(types), sequences, false);
        let near = gpu(model, types, Place::Device);
        for mut on in [near, gpu_with_host(model, types)] {
            for together in [false, true] {
                let found = passes(&mut on, sequences, together);
                agree(&found, &expected, &format!("{}, {types}, together: {together}", on.name()));
            }
        }
    }
}

/// More than one launch of attention takes, of a token each over up to three chunks, and others between them.
#[test]
fn a_token_of_each_of_many_sequences_is_computed_as_alone() {
    let _alone = alone();
    let Some(model) = model() else { return };
    if !is_exact_with(model.device().info()) {
        return device::skip("this device does not have the CPU's bits");
    }
    let sequence = |before: usize, n: usize, rows: usize| {
        let all = ids(before + n);
        Sequence { before: all[..before].to_vec(), tokens: all[before..].to_vec(), observe: 0, rows }
    };
    let mut sequences: Vec<_> = (0..20).map(|i| sequence(i * i % 271, 1, 1)).collect();
    sequences.insert(3, sequence(4, 3, 3));
    sequences.insert(9, sequence(130, 1, 0));
    for types in KvType::ALL.map(KvTypes::same) {
        let expected = passes(&mut cpu(types), &sequences, false);
        let mut on = gpu(model, types, Place::Device);
        // Of two passes the second finds launches bound to caches that are gone.
        for together in [&sequences[..], &sequences[..5]] {
            agree(&passes(&mut on, together, true), &expected, &types.to_string());
        }
    }
}

/// Weights are read once for all sequences, and none has launches of its own.
#[test]
fn a_pass_has_as_many_launches_for_many_sequences_as_for_two() {
    let _alone = alone();
    let Some(model) = model() else { return };
    let mut on = gpu(model, KvTypes::same(KvType::F16), Place::Device);
    let mut launches = |n: usize| {
        let mut caches: Vec<_> = (0..n).map(|_| on.new_cache(CAPACITY).unwrap()).collect();
        let mut out = vec![0.0; n * VOCAB];
        let runs = caches.iter_mut().zip(out.chunks_mut(VOCAB));
        let mut runs: Vec<_> =
            runs.map(|(cache, out)| Run::new(&mut **cache, &[1], 0, Logits::Last(out))).collect();
        let before = model.device().launch_count();
        on.forward(&mut runs, None).unwrap();
        model.device().launch_count() - before
    };
    let (two, sixteen) = (launches(2), launches(16));
    assert_eq!(two, sixteen);
    assert!(sixteen <= 10 * LAYERS as u64 + 2, "{sixteen} launches, {LAYERS} layers");
}

pub fn mass_of(cache: &mut dyn KvCache) -> Vec<u32> {
    let mut mass = vec![0.0; KV_HEADS * cache.extent().len];
    let mut all = Vec::new();
    for layer in attention_layers() {
        cache.read_mass(layer, &mut mass).unwrap();
        all.extend(bits(&mass));
    }
    all
}

/// Keeps every third slot and the last, and other ones of the second head.
pub fn evict(cache: &mut dyn KvCache) {
    let last = cache.extent().len as u32 - 1;
    for (layer, kv_head) in (0..LAYERS).flat_map(|l| (0..KV_HEADS).map(move |h| (l, h))) {
        let slots: Vec<u32> = (0..last / 3).map(|i| 3 * i + u32::from(kv_head == 1)).chain([last]).collect();
        cache.retain_slots(layer, kv_head, &slots).unwrap();
    }
    cache.set_len(last as usize / 3 + 1);
}

/// Named action on a device and a cache.
type Step = (&'static str, fn(&mut dyn Device, &mut dyn KvCache));

/// Steps that a session may take with an observed sequence.
const STEPS: [Step; 8] = [
    ("a prompt of which all is observed", |d, c| drop(observed(d, c, &ids(130), usize::MAX))),
    ("one of which the last tokens are", |d, c| drop(observed(d, c, &ids(70), 5))),
    ("single tokens", |d, c| ids(20).chunks(1).for_each(|id| drop(observed(d, c, id, 5)))),
    ("tokens that nobody observes", |d, c| {
        forward(d, c, &ids(4));
        forward(d, c, &ids(1));
    }),
    ("and some that somebody does", |d, c| {
        observed(d, c, &ids(3), 1);
        observed(d, c, &ids(1), 1);
    }),
    ("an eviction", |d, c| {
        evict(c);
        observed(d, c, &ids(2), 1);
    }),
    ("a rewind", |d, c| {
        c.set_len(40);
        observed(d, c, &ids(10), 1);
    }),
    ("another size", |d, c| {
        c.resize(260).unwrap();
        observed(d, c, &ids(1), 1);
    }),
];

#[test]
fn slots_receive_the_same_attention() {
    let _alone = alone();
    let Some(model) = model() else { return };
    if !is_exact_with(model.device().info()) {
        return device::skip("this device does not have the CPU's bits");
    }
    for types in KvType::ALL.map(KvTypes::same) {
        let mut cpu = cpu(types);
        let mut cache = cpu.new_cache(CAPACITY).unwrap();
        cache.write_mass(0, &[]).unwrap();
        let expected = STEPS.map(|(_, step)| {
            step(&mut cpu, &mut *cache);
            mass_of(&mut *cache)
        });
        assert!(expected.iter().all(|mass| mass.iter().any(|&m| m != 0)));
        for mut gpu in [gpu(model, types, Place::Device), gpu_with_host(model, types)] {
            let mut cache = gpu.new_cache(CAPACITY).unwrap();
            cache.write_mass(0, &[]).unwrap();
            for ((what, step), expected) in STEPS.iter().zip(&expected) {
                step(&mut gpu, &mut *cache);
                let found = mass_of(&mut *cache);
                let other = found.iter().zip(expected).filter(|(f, e)| f != e).count();
                assert!(
                    found.len() == expected.len() && other == 0,
                    "{types}, {}: {what}: {other}",
                    gpu.name()
                );
            }
            let half: Vec<f32> = (0..KV_HEADS * cache.extent().len).map(|i| i as f32 / 2.0).collect();
            cache.write_mass(LAYERS - 1, &half).unwrap();
            assert!(mass_of(&mut *cache).ends_with(&bits(&half)));
        }
        if model.device().info().unified_memory {
            // Both in turn, with one cache.
            let mut gpu = gpu(model, types, Place::HostVisible);
            let mut cache = gpu.new_cache(CAPACITY).unwrap();
            cache.write_mass(0, &[]).unwrap();
            for (i, ((what, step), expected)) in STEPS.iter().zip(&expected).enumerate() {
                let on: &mut dyn Device = if i % 2 == 0 { &mut cpu } else { &mut gpu };
                step(on, &mut *cache);
                assert!(mass_of(&mut *cache) == *expected, "{types}, in turn: {what}");
            }
        }
    }
}
