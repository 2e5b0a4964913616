//! Speed of each device for prompts and for decoding, measured once and remembered.

use super::{DeviceCache, MeasuredSchedule, Speed};
use crate::dims::{LEARNED_POSITIONS, VOCAB};
use crate::model::device::{KvCache, Logits, Run, lock_device};
use crate::opencl::{self, device_info::DeviceInfo, variants::VariantPair};
use crate::run::options::{EngineOptions, Side};
use files::Result;
use numeric::simd::Isa;
use std::time::Instant;

/// Tokens of the prompt that is timed.
const PROMPT_TOKENS: usize = 64;
/// Filled slots in the second measurement of decoding.
const DEEP_SLOTS: usize = 1024;
/// Decoded tokens timed in each measurement; the fastest counts.
const TOKENS: usize = 3;

/// Slots of a cache for measurements.
pub const MEASURED_SLOTS: usize = DEEP_SLOTS + 2 * PROMPT_TOKENS;

/// Options for devices that are only measured.
pub fn measured_options(o: &EngineOptions) -> EngineOptions {
    EngineOptions {
        max_seq_len: MEASURED_SLOTS,
        prefill_chunk: o.prefill_chunk.max(PROMPT_TOKENS),
        ..o.clone()
    }
}

/// Options whose plan has memory for a sequence while both devices are measured.
pub fn options_with_measuring(o: &EngineOptions) -> EngineOptions {
    EngineOptions { max_seq_len: o.max_seq_len.saturating_add(MEASURED_SLOTS), ..o.clone() }
}

/// Cache key with everything that speeds depend on.
pub fn speeds_key(
    o: &EngineOptions,
    fingerprint: &str,
    isa: Isa,
    (facts, variants): (&DeviceInfo, VariantPair),
) -> String {
    let device = facts.cache_key_parts();
    format!(
        "speeds {} {} {} weights {} kv {} threads {} {} on {device:?} {} {:?}",
        env!("CARGO_PKG_VERSION"),
        fingerprint,
        crate::run::system::this_cpu(),
        o.weight_type,
        o.kv_types,
        o.threads,
        isa.name(),
        variants,
        o.zero_copy,
    )
}

/// Speeds of the CPU and the device that an earlier start measured for the weights with this fingerprint.
pub fn known_speeds(
    o: &EngineOptions,
    fingerprint: &str,
    isa: Isa,
    facts: &DeviceInfo,
) -> Option<[Speed; 2]> {
    let variants = opencl::tune::known_variants(facts, fingerprint, &opencl::Cache::for_user()).ok()??;
    cached_speeds(&speeds_key(o, fingerprint, isa, (facts, variants)))
}

/// Speeds remembered under `key`.
fn cached_speeds(key: &str) -> Option<[Speed; 2]> {
    opencl::Cache::for_user().get_text(key).and_then(|text| serde_json::from_str(&text).ok())
}

/// Speeds of both devices: remembered, or measured now.
pub fn measure_both(
    key: &str,
    cpu: impl FnOnce() -> Result<DeviceCache>,
    gpu: impl FnOnce() -> Result<DeviceCache>,
) -> Result<[Speed; 2]> {
    if let Some(speeds) = cached_speeds(key) {
        return Ok(speeds);
    }
    let speeds = [measure_speed(gpu()?)?, measure_speed(cpu()?)?];
    let [gpu, cpu] = speeds;
    if let Ok(text) = serde_json::to_string(&[cpu, gpu]) {
        opencl::Cache::for_user().put_text(key, &text);
    }
    Ok([cpu, gpu])
}

/// Measures a device, with arbitrary tokens.
fn measure_speed(mut cache: DeviceCache) -> Result<Speed> {
    let device = cache.device();
    let cache = cache.cache();
    let mut device = lock_device(&device);
    let mut logits = vec![0.0; VOCAB];
    let prompt: Vec<u32> = (0..PROMPT_TOKENS as u32).map(|id| id % VOCAB as u32).collect();
    let n = PROMPT_TOKENS.min(device.max_tokens());
    // The first pass warms up threads and caches and compiles kernels.
    let mut pass = |cache: &mut dyn KvCache, tokens: &[u32], pos: usize| {
        device.forward(&mut [Run::new(cache, tokens, pos, Logits::Last(&mut logits))], None)
    };
    pass(cache, &prompt[..n], 0)?;
    cache.set_len(0);
    let began = Instant::now();
    pass(cache, &prompt[..n], 0)?;
    let prefill = began.elapsed().as_secs_f64() / n as f64;
    let mut token = |slots: usize| -> Result<f64> {
        cache.set_len(slots);
        let mut best = f64::INFINITY;
        for i in 0..=TOKENS {
            let began = Instant::now();
            // A model with learned positions may not have so many.
            let pos = if LEARNED_POSITIONS { i } else { slots + i };
            pass(cache, &prompt[..1], pos)?;
            best = best.min(began.elapsed().as_secs_f64());
        }
        Ok(best)
    };
    let (near, far) = (token(n)?, token(DEEP_SLOTS)?);
    let slot = ((far - near) / (DEEP_SLOTS - n) as f64).max(0.0);
    Ok(Speed { prefill, decode: (near - slot * n as f64).max(1e-9), slot })
}

/// True if an earlier start found that `auto` means the CPU for the weights with this fingerprint; this is reported.
/// Then the device need not be opened: drivers take memory, and some slow the CPU down.
pub fn is_known_to_be_the_cpu(o: &EngineOptions, fingerprint: &str) -> bool {
    let is_cpu = || {
        let isa = o.isa.map_or_else(Isa::detect, Ok).ok()?;
        let facts = opencl::facts_of(o.cl_device.as_deref())?;
        let speeds = known_speeds(o, fingerprint, isa, facts)?;
        let only = MeasuredSchedule::new(speeds)
            .single_best_device(o.max_seq_len)
            .filter(|&side| side == Side::Cpu)?;
        report_choice(o, Some(only), speeds);
        Some(())
    };
    is_cpu().is_some()
}

/// Reports that `auto` chooses one device, `only`, or both, and why.
pub fn report_choice(o: &EngineOptions, only: Option<Side>, [cpu, gpu]: [Speed; 2]) {
    let choice = match only {
        Some(Side::Cpu) => "using the CPU",
        Some(Side::Gpu) => "using the GPU",
        None => "using each device for what it does faster",
    };
    let most = o.max_seq_len;
    o.notice.warn(&format!(
        "auto: {choice}: prompt {:.0} tokens/s on the CPU, {:.0} on the GPU; decode {:.1} and {:.1}, over {most} slots \
         {:.1} and {:.1}",
        1.0 / cpu.prefill,
        1.0 / gpu.prefill,
        1.0 / cpu.token_seconds(0),
        1.0 / gpu.token_seconds(0),
        1.0 / cpu.token_seconds(most),
        1.0 / gpu.token_seconds(most),
    ));
}
