//! Figures of an OpenCL device: launches, host time per token, time to build programs.

use crate::cli::generation_report::milliseconds;
use crate::model::device::{KvCache, Logits, Run, lock_device};
use crate::opencl::Device;
use crate::run::engine::Engine;
use crate::run::options::EngineOptions;
use files::Result;
use opencl_runtime::device::BuildStats;
use serde::Serialize;
use std::time::Instant;

/// Tokens to measure, after one that is not measured.
const TOKENS: usize = 16;

/// Launches and host time per token, and the time to build programs.
#[derive(Serialize)]
pub struct DeviceFigures {
    name: String,
    driver: String,
    launches_per_token: f64,
    /// Time until all work of a token is queued.
    host_us_per_token: f64,
    compiled: usize,
    compiling_ms: f64,
    from_cache: usize,
    from_cache_ms: f64,
}

impl DeviceFigures {
    /// Creates a cache on the device, which builds the programs, and decodes some tokens without logits. `None` if the
    /// engine has no device.
    pub fn measure(engine: &Engine, device: &Device, options: &EngineOptions) -> Result<Option<Self>> {
        let tokens = TOKENS.min(options.max_seq_len - 1);
        let Some(mut cache) = engine.device_cache(options)? else { return Ok(None) };
        let runs = cache.device();
        let mut runs = lock_device(&runs);
        let mut one = |cache: &mut dyn KvCache, pos| {
            runs.forward(&mut [Run::new(cache, &[0], pos, Logits::None)], None)
        };
        let BuildStats { compiled, compiling, loaded, loading, .. } = device.build_stats();
        one(cache.cache(), 0)?;
        device.finish()?;
        let before = device.launch_count();
        let start = Instant::now();
        (1..=tokens).try_for_each(|pos| one(cache.cache(), pos))?;
        let host = start.elapsed();
        device.finish()?;
        let each = tokens.max(1) as f64;
        Ok(Some(Self {
            name: device.info().name.clone(),
            driver: device.info().driver.clone(),
            launches_per_token: (device.launch_count() - before) as f64 / each,
            host_us_per_token: host.as_secs_f64() * 1e6 / each,
            compiled,
            compiling_ms: milliseconds(compiling),
            from_cache: loaded,
            from_cache_ms: milliseconds(loading),
        }))
    }

    /// The figures as one line of text.
    pub fn summary_line(&self) -> String {
        format!(
            "{}, driver {}: {} launches and {:.0} us of host time per token; programs: {} compiled in {:.0} ms, {} from \
             the cache in {:.0} ms",
            self.name,
            self.driver,
            self.launches_per_token,
            self.host_us_per_token,
            self.compiled,
            self.compiling_ms,
            self.from_cache,
            self.from_cache_ms,
        )
    }
}
