//! What only an OpenCL device has: launches, the host's share of a token, the time that building its programs took.

use crate::model::backend::Logits;
use crate::opencl::Device;
use crate::run::engine::Engine;
use crate::run::options::EngineOptions;
use files::Result;
use opencl_runtime::device::Builds;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Tokens whose launches and time are taken, after one that is not.
const TOKENS: usize = 16;

/// A device, besides how fast it is.
pub(super) struct OnDevice {
    name: String,
    driver: String,
    launches_per_token: f64,
    /// Until everything of a token is queued.
    host_per_token: Duration,
    builds: Builds,
}

impl OnDevice {
    /// Makes a backend with these options, which builds its programs, and decodes some tokens without their logits.
    /// `None` where the engine has no device.
    pub fn measure(engine: &Engine, device: &Device, options: &EngineOptions) -> Result<Option<Self>> {
        let tokens = TOKENS.min(options.max_seq_len - 1);
        let Some(mut backend) = engine.device_backend(options)? else { return Ok(None) };
        let builds = device.builds();
        backend.forward(&[0], 0, Logits::None)?;
        device.finish()?;
        let before = device.launches();
        let start = Instant::now();
        (1..=tokens).try_for_each(|pos| backend.forward(&[0], pos, Logits::None))?;
        let host = start.elapsed();
        device.finish()?;
        let per_token = tokens.max(1) as u32;
        Ok(Some(Self {
            name: device.facts().name.clone(),
            driver: device.facts().driver.clone(),
            launches_per_token: (device.launches() - before) as f64 / f64::from(per_token),
            host_per_token: host / per_token,
            builds,
        }))
    }

    /// For people.
    pub fn line(&self) -> String {
        let Builds { compiled, compiling, loaded, loading } = self.builds;
        let ms = |d: Duration| d.as_secs_f64() * 1e3;
        format!(
            "{}, driver {}: {} launches and {:.0} us of the host a token; programs: {compiled} compiled in {:.0} ms, \
             {loaded} from the cache in {:.0} ms",
            self.name,
            self.driver,
            self.launches_per_token,
            self.host_per_token.as_secs_f64() * 1e6,
            ms(compiling),
            ms(loading),
        )
    }

    pub fn json(&self) -> Value {
        let Builds { compiled, compiling, loaded, loading } = self.builds;
        json!({
            "name": self.name, "driver": self.driver, "launches_per_token": self.launches_per_token,
            "host_us_per_token": self.host_per_token.as_secs_f64() * 1e6,
            "compiled": compiled, "compiling_ms": compiling.as_secs_f64() * 1e3,
            "from_cache": loaded, "from_cache_ms": loading.as_secs_f64() * 1e3,
        })
    }
}
