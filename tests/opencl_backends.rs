//! An OpenCL backend beside a CPU backend of the same model: rows in one memory, which both use in turn, and the
//! attention that slots receive.
//!
//! Runs on the first device there is, a CPU-type one (PoCL) if need be. Without OpenCL these tests are skipped, loudly;
//! in CI they fail.
#![cfg(unix)]

#[allow(dead_code, reason = "shared with other tests, which use the rest")]
#[path = "opencl/bed.rs"]
mod bed;

use antigravity::dims::{self, KV_HEADS, LAYERS, VOCAB};
use antigravity::model::backend::{Backend, KvRows, Logits};
use antigravity::model::cpu::attention::for_others;
use antigravity::model::cpu::{CpuBackend, CpuOptions};
use antigravity::model::weights::{LoadOptions, ModelPath, WeightType, Weights};
use antigravity::opencl::{Matrices, Model, OpenClBackend, OpenClOptions, Place, Variants};
use numeric::kv::{KvType, KvTypes};
use numeric::simd::Isa;
use opencl_runtime::buffer::POISON;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

const CAPACITY: usize = 300;
const PROMPT: usize = 40;

/// Held by each test: what one allocates on the device is not to be counted by another.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The model on the device; `None`, said aloud, without one.
fn model() -> Option<&'static Arc<Model>> {
    static MODEL: OnceLock<Option<Arc<Model>>> = OnceLock::new();
    let load = || {
        let device = bed::device()?;
        let matrices = Matrices::copy(&device, weights(), Place::Device).unwrap();
        Some(Arc::new(Model::new(device, Arc::clone(weights()), matrices)))
    };
    MODEL.get_or_init(load).as_ref()
}

fn weights() -> &'static Arc<Weights> {
    static WEIGHTS: OnceLock<Arc<Weights>> = OnceLock::new();
    WEIGHTS.get_or_init(|| {
        let path = ModelPath::new(Path::new(dims::MODEL_DIR)).unwrap();
        let load = LoadOptions { weight_type: WeightType::Q4_0, threads: 2, progress: &|_, _| {} };
        Arc::new(Weights::load(&path.open(load.weight_type).unwrap(), &load).unwrap())
    })
}

fn gpu_options(kv_types: KvTypes, rows: Place) -> OpenClOptions {
    let (max_tokens, variants) = (64, Variants::Fastest);
    OpenClOptions { kv_types, capacity: CAPACITY, max_tokens, attention: None, rows, variants }
}

fn gpu(model: &Arc<Model>, kv_types: KvTypes, rows: Place) -> OpenClBackend {
    OpenClBackend::new(Arc::clone(model), gpu_options(kv_types, rows)).unwrap()
}

fn cpu_options(kv_types: KvTypes) -> CpuOptions {
    CpuOptions { threads: 2, isa: Isa::detect().unwrap(), kv_types, capacity: CAPACITY, max_tokens: 64 }
}

fn cpu(kv_types: KvTypes) -> CpuBackend {
    CpuBackend::new(Arc::clone(weights()), cpu_options(kv_types)).unwrap()
}

/// Token ids that are no text but spread over the vocabulary.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 7) % VOCAB as u32).collect()
}

/// Goes on with `tokens`; the logits of the last.
fn forward(on: &mut dyn Backend, tokens: &[u32]) -> Vec<f32> {
    let mut logits = vec![0.0; VOCAB];
    for chunk in tokens.chunks(on.max_tokens()) {
        let pos = on.len();
        on.forward(chunk, pos, Logits::Last(&mut logits)).unwrap();
    }
    logits
}

/// Appends `more` tokens to `text`, the likeliest after `logits`, which become those of the last.
fn decode(on: &mut dyn Backend, (text, logits): (&mut Vec<u32>, &mut Vec<f32>), more: usize) {
    for _ in 0..more {
        let best = (0..VOCAB).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
        text.push(best as u32);
        *logits = forward(on, &[best as u32]);
    }
}

fn rows_of(backend: &mut dyn Backend) -> Vec<KvRows> {
    let read = |layer| {
        let mut rows = KvRows::default();
        backend.read_kv(layer, 0..backend.len(), &mut rows).unwrap();
        rows
    };
    (0..LAYERS).map(read).collect()
}

fn switch(from: &mut dyn Backend, to: &mut dyn Backend) {
    let rows = from.lend().unwrap().expect("they share their rows");
    assert!(from.is_empty());
    to.adopt(rows).unwrap();
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn rows_are_used_in_turn() {
    let _alone = alone();
    let Some(model) = model() else { return };
    if !model.device().facts().unified_memory {
        return bed::skip("this device has memory of its own");
    }
    for types in KvType::ALL.map(KvTypes::both).into_iter().chain([KvTypes { k: KvType::Q8, v: KvType::F16 }])
    {
        let mut alone = cpu(types);
        let mut logits = forward(&mut alone, &ids(PROMPT));
        let mut text = Vec::new();
        decode(&mut alone, (&mut text, &mut logits), 40);

        let mut cpu = CpuBackend::without_rows(Arc::clone(weights()), cpu_options(types)).unwrap();
        let mut gpu = gpu(model, types, Place::HostVisible);
        let allocated = model.device().allocated();
        switch(&mut gpu, &mut cpu);
        let mut found = forward(&mut cpu, &ids(PROMPT));
        let mut words = Vec::new();
        switch(&mut cpu, &mut gpu);
        decode(&mut gpu, (&mut words, &mut found), 20);
        switch(&mut gpu, &mut cpu);
        decode(&mut cpu, (&mut words, &mut found), 20);
        assert_eq!(model.device().allocated(), allocated);
        assert_eq!(words, text, "{types}");
        if model.device().facts().correct_divide {
            assert_eq!(bits(&found), bits(&logits), "{types}");
            let rows = rows_of(&mut cpu);
            assert!(rows == rows_of(&mut alone), "{types}: other rows");
            switch(&mut cpu, &mut gpu);
            assert!(rows == rows_of(&mut gpu), "{types}: other rows come back");
        }
    }
}

#[test]
fn lent_rows_are_the_borrowers() {
    let _alone = alone();
    let Some(model) = model() else { return };
    if !model.device().facts().unified_memory {
        return bed::skip("this device has memory of its own");
    }
    let types = KvTypes::both(KvType::Q8);
    assert!(gpu(model, types, Place::Device).lend().unwrap().is_none());
    assert!(cpu(types).lend().unwrap().is_none());
    let panics = |f: &mut dyn FnMut()| {
        let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("it panics");
        payload.downcast::<String>().map_or_else(|p| p.downcast::<&str>().unwrap().to_string(), |s| *s)
    };
    let mut cpu = CpuBackend::without_rows(Arc::clone(weights()), cpu_options(types)).unwrap();
    assert!(panics(&mut || drop(forward(&mut cpu, &[1]))).contains("before it adopts"));
    assert!(cpu.lend().unwrap().is_none());

    let mut gpu = gpu(model, types, Place::HostVisible);
    forward(&mut gpu, &ids(10));
    let rows = gpu.lend().unwrap().expect("they are shared");
    assert_eq!((rows.len, rows.capacity), (10, CAPACITY));
    let uses: [fn(&mut OpenClBackend); 6] = [
        |gpu| drop(forward(gpu, &[1])),
        |gpu| gpu.set_len(3),
        |gpu| gpu.resize(400).unwrap(),
        |gpu| gpu.keep(0, 0, &[]).unwrap(),
        |gpu| drop(gpu.lend()),
        |gpu| gpu.read_kv(0, 0..1, &mut KvRows::default()).unwrap(),
    ];
    for used in uses {
        assert!(panics(&mut || used(&mut gpu)).contains("lent to the CPU"));
    }
    let stale = rows.memory.layer(0).0.as_ptr();
    gpu.adopt(rows).unwrap();
    assert_eq!(gpu.len(), 10);
    if cfg!(debug_assertions) {
        // SAFETY: the shadow lives as long as the buffer; this is the mistake it is there to show.
        assert_eq!(unsafe { *stale }, POISON);
    }

    // Who resizes has the rows.
    gpu.resize(400).unwrap();
    switch(&mut gpu, &mut cpu);
    assert_eq!((cpu.len(), cpu.capacity()), (10, 400));
    assert!(panics(&mut || cpu.resize(500).unwrap()).contains("by their lender"));
    // The device is lost with the rows: the CPU goes on with its own.
    drop(cpu.lend());
    drop(gpu);
    cpu.resize(CAPACITY).unwrap();
    let expected = forward(&mut self::cpu(types), &ids(PROMPT));
    assert_eq!(bits(&forward(&mut cpu, &ids(PROMPT))), bits(&expected));
}

fn mass_of(backend: &mut dyn Backend) -> Vec<u32> {
    let mut mass = vec![0.0; KV_HEADS * backend.len()];
    let mut all = Vec::new();
    for layer in 0..LAYERS {
        backend.read_mass(layer, &mut mass).unwrap();
        all.extend(bits(&mass));
    }
    all
}

/// Keeps every third slot and the last, and other ones of the second head.
fn evict(backend: &mut dyn Backend) {
    let last = backend.len() as u32 - 1;
    for (layer, kv_head) in (0..LAYERS).flat_map(|l| (0..KV_HEADS).map(move |h| (l, h))) {
        let slots: Vec<u32> = (0..last / 3).map(|i| 3 * i + u32::from(kv_head == 1)).chain([last]).collect();
        backend.keep(layer, kv_head, &slots).unwrap();
    }
    backend.set_len(last as usize / 3 + 1);
}

/// What is done to a backend.
type Step = (&'static str, fn(&mut dyn Backend));

/// What a session may do to a backend that is observed, step by step.
const STEPS: [Step; 8] = [
    ("a prompt of which all is observed", |b| {
        b.observe(usize::MAX).unwrap();
        forward(b, &ids(130));
    }),
    ("one of which the last tokens are", |b| {
        b.observe(5).unwrap();
        forward(b, &ids(70));
    }),
    ("single tokens", |b| ids(20).chunks(1).for_each(|id| drop(forward(b, id)))),
    ("tokens that nobody observes", |b| {
        b.observe(0).unwrap();
        forward(b, &ids(4));
        forward(b, &ids(1));
    }),
    ("and some that somebody does", |b| {
        b.observe(1).unwrap();
        forward(b, &ids(3));
        forward(b, &ids(1));
    }),
    ("an eviction", |b| {
        evict(b);
        forward(b, &ids(2));
    }),
    ("a rewind", |b| {
        b.set_len(40);
        forward(b, &ids(10));
    }),
    ("another size", |b| {
        b.resize(260).unwrap();
        forward(b, &ids(1));
    }),
];

#[test]
fn slots_receive_the_same_attention() {
    let _alone = alone();
    let Some(model) = model() else { return };
    if !model.device().facts().correct_divide {
        return bed::skip("this device does not have the CPU's bits");
    }
    for types in KvType::ALL.map(KvTypes::both) {
        let mut cpu = cpu(types);
        let expected = STEPS.map(|(_, step)| {
            step(&mut cpu);
            mass_of(&mut cpu)
        });
        assert!(expected.iter().all(|mass| mass.iter().any(|&m| m != 0)));
        for on_host in [false, true] {
            let attention = on_host.then(|| for_others(2, Isa::detect().unwrap(), CAPACITY).unwrap());
            let options = OpenClOptions { attention, ..gpu_options(types, Place::Device) };
            let mut gpu = OpenClBackend::new(Arc::clone(model), options).unwrap();
            let allocated = model.device().allocated();
            gpu.observe(0).unwrap();
            assert_eq!(model.device().allocated(), allocated, "nobody observes");
            for ((what, step), expected) in STEPS.iter().zip(&expected) {
                step(&mut gpu);
                let found = mass_of(&mut gpu);
                let other = found.iter().zip(expected).filter(|(f, e)| f != e).count();
                assert!(
                    found.len() == expected.len() && other == 0,
                    "{types}, on the host: {on_host}: {what}: {other}"
                );
            }
            let half: Vec<f32> = (0..KV_HEADS * gpu.len()).map(|i| i as f32 / 2.0).collect();
            gpu.write_mass(LAYERS - 1, &half).unwrap();
            assert!(mass_of(&mut gpu).ends_with(&bits(&half)));
        }
    }
}
