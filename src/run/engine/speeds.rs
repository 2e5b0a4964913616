//! How fast each device computes prompts and decodes: measured once, then remembered.

use super::Engine;
use crate::dims::VOCAB;
use crate::model::backend::{Backend, Logits};
use crate::opencl::{self, Cache};
use crate::run::options::EngineOptions;
use crate::run::session::Speed;
use files::Result;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of the prompt that is timed.
const PROMPT: usize = 64;
/// Slots over which decoding is timed the second time.
const DEEP: usize = 1024;
/// Decoded tokens that are timed each time; the fastest counts.
const TOKENS: usize = 3;

/// The options for backends that are only timed.
pub(super) fn options(o: &EngineOptions) -> EngineOptions {
    EngineOptions { max_seq_len: DEEP + 2 * PROMPT, prefill_chunk: o.prefill_chunk.max(PROMPT), ..o.clone() }
}

/// Names everything that speeds depend on.
pub(super) fn key(engine: &Engine, model: &Arc<opencl::Model>) -> String {
    let o = &engine.options;
    let device: Vec<&str> = model.device().facts().identity().into_iter().collect();
    format!(
        "speeds {} {} {} weights {} kv {} threads {} {} on {device:?} {:?}",
        env!("CARGO_PKG_VERSION"),
        engine.weights.fingerprint,
        crate::run::system::this_cpu(),
        o.weight_type,
        o.kv_types,
        o.threads,
        engine.isa.name(),
        (o.gpu_fast, o.zero_copy),
    )
}

/// The speeds of the CPU and of the device: those remembered under `key`, else measured on the backends made.
pub(super) fn of_both(
    key: &str,
    cpu: impl FnOnce() -> Result<Box<dyn Backend>>,
    gpu: impl FnOnce() -> Result<Box<dyn Backend>>,
) -> Result<[Speed; 2]> {
    let cache = Cache::of_user();
    if let Some(speeds) = cache.recall(key).and_then(|text| serde_json::from_str(&text).ok()) {
        return Ok(speeds);
    }
    let speeds = [measure(&mut *gpu()?)?, measure(&mut *cpu()?)?];
    let [gpu, cpu] = speeds;
    if let Ok(text) = serde_json::to_string(&[cpu, gpu]) {
        cache.remember(key, &text);
    }
    Ok([cpu, gpu])
}

/// Times a backend with an empty cache. What it computes does not matter.
fn measure(backend: &mut dyn Backend) -> Result<Speed> {
    let mut logits = vec![0.0; VOCAB];
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|id| id % VOCAB as u32).collect();
    let n = PROMPT.min(backend.max_tokens());
    // Once to wake threads and caches and to compile what is not.
    backend.forward(&prompt[..n], 0, Logits::Last(&mut logits))?;
    backend.set_len(0);
    let began = Instant::now();
    backend.forward(&prompt[..n], 0, Logits::Last(&mut logits))?;
    let prefill = began.elapsed().as_secs_f64() / n as f64;
    let mut token = |slots: usize| -> Result<f64> {
        backend.set_len(slots);
        let mut best = f64::INFINITY;
        for i in 0..=TOKENS {
            let began = Instant::now();
            backend.forward(&prompt[..1], slots + i, Logits::Last(&mut logits))?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let (near, far) = (token(n)?, token(DEEP)?);
    let slot = ((far - near) / (DEEP - n) as f64).max(0.0);
    Ok(Speed { prefill, decode: (near - slot * n as f64).max(1e-9), slot })
}
