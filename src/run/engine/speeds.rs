//! How fast each device computes prompts and decodes: measured once, then remembered.

use super::Engine;
use crate::dims::{LEARNED_POSITIONS, VOCAB};
use crate::model::device::{Cache, Logits, Run, locked};
use crate::opencl;
use crate::run::options::EngineOptions;
use crate::run::session::{Seat, Speed};
use files::Result;
use std::sync::Arc;
use std::time::Instant;

/// Tokens of the prompt that is timed.
const PROMPT: usize = 64;
/// Slots over which decoding is timed the second time.
const DEEP: usize = 1024;
/// Decoded tokens that are timed each time; the fastest counts.
const TOKENS: usize = 3;

/// Slots of caches that are only timed.
pub(super) const SLOTS: usize = DEEP + 2 * PROMPT;

/// The options for devices that are only timed.
pub(super) fn options(o: &EngineOptions) -> EngineOptions {
    EngineOptions { max_seq_len: SLOTS, prefill_chunk: o.prefill_chunk.max(PROMPT), ..o.clone() }
}

/// Names everything that speeds depend on.
pub(super) fn key(engine: &Engine, model: &Arc<opencl::Model>) -> String {
    let o = &engine.options;
    let device: Vec<&str> = model.device().facts().identity().into_iter().collect();
    format!(
        "speeds {} {} {} weights {} kv {} threads {} {} on {device:?} {} {:?}",
        env!("CARGO_PKG_VERSION"),
        engine.weights.fingerprint,
        crate::run::system::this_cpu(),
        o.weight_type,
        o.kv_types,
        o.threads,
        engine.isa.name(),
        model.ways().unwrap_or_default(),
        o.zero_copy,
    )
}

/// The speeds of the CPU and of the device: those remembered under `key`, else measured.
pub(super) fn of_both(
    key: &str,
    cpu: impl FnOnce() -> Result<Seat>,
    gpu: impl FnOnce() -> Result<Seat>,
) -> Result<[Speed; 2]> {
    let cache = opencl::Cache::of_user();
    if let Some(speeds) = cache.recall(key).and_then(|text| serde_json::from_str(&text).ok()) {
        return Ok(speeds);
    }
    let speeds = [measure(gpu()?)?, measure(cpu()?)?];
    let [gpu, cpu] = speeds;
    if let Ok(text) = serde_json::to_string(&[cpu, gpu]) {
        cache.remember(key, &text);
    }
    Ok([cpu, gpu])
}

/// Times a device. What it computes does not matter.
fn measure(seat: Seat) -> Result<Speed> {
    let Seat { device, mut cache } = seat;
    let mut device = locked(&device);
    let mut logits = vec![0.0; VOCAB];
    let prompt: Vec<u32> = (0..PROMPT as u32).map(|id| id % VOCAB as u32).collect();
    let n = PROMPT.min(device.max_tokens());
    // Once to wake threads and caches and to compile what is not.
    let mut pass = |cache: &mut dyn Cache, tokens: &[u32], pos: usize| {
        device.forward(&mut [Run::new(cache, tokens, pos, Logits::Last(&mut logits))], None)
    };
    pass(&mut *cache, &prompt[..n], 0)?;
    cache.set_len(0);
    let began = Instant::now();
    pass(&mut *cache, &prompt[..n], 0)?;
    let prefill = began.elapsed().as_secs_f64() / n as f64;
    let mut token = |slots: usize| -> Result<f64> {
        cache.set_len(slots);
        let mut best = f64::INFINITY;
        for i in 0..=TOKENS {
            let began = Instant::now();
            // A model whose positions are learned may not have its own.
            let pos = if LEARNED_POSITIONS { i } else { slots + i };
            pass(&mut *cache, &prompt[..1], pos)?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let (near, far) = (token(n)?, token(DEEP)?);
    let slot = ((far - near) / (DEEP - n) as f64).max(0.0);
    Ok(Speed { prefill, decode: (near - slot * n as f64).max(1e-9), slot })
}
