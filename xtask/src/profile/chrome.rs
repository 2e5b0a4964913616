//! The trace of a profile for Perfetto and `chrome://tracing`: the program's steps and the device's counters.

use super::record::Profile;
use super::trace::micros;
use serde_json::{Map, Value, json};

/// The text of `trace.json`.
pub fn events(profile: &Profile) -> String {
    let recording = &profile.recording;
    let name = |pid: u32, name: &str| {
        let args = json!({"name": name});
        json!({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "ts": 0, "args": args})
    };
    let mut events = vec![name(1, "antigravity"), name(2, &recording.device)];
    events.extend(profile.trace.events.iter().cloned());
    let mut counter = |at: f64, name: &str, mut values: Map<String, Value>| {
        values.retain(|_, v| !v.is_null());
        if !values.is_empty() {
            let ts = micros(at);
            events.push(json!({"name": name, "ph": "C", "pid": 2, "tid": 0, "ts": ts, "args": values}));
        }
    };
    let one = |name: &str, value: Option<f64>| Map::from_iter([(name.to_string(), json!(value))]);
    let mib = |bytes: Option<u64>| bytes.map(|b| b as f64 / f64::from(1 << 20));
    for s in &recording.samples {
        let at = s.uptime - profile.zero;
        let warm = recording.plan.temperatures.iter().zip(&s.celsius);
        counter(at, "temperature °C", warm.map(|(t, celsius)| (t.name.clone(), json!(celsius))).collect());
        let clocks = recording.plan.cores.iter().zip(&s.khz);
        let mhz = |khz: &Option<u64>| json!(khz.map(|k| k as f64 / 1e3));
        counter(at, "clock MHz", clocks.map(|(n, khz)| (format!("cpu {n}"), mhz(khz))).collect());
        let memory = [("RSS", s.rss), ("PSS", s.pss)].map(|(name, bytes)| (name.into(), json!(mib(bytes))));
        counter(at, "memory MiB", memory.into_iter().collect());
        counter(at, "available MiB", one("available", mib(s.available)));
        counter(at, "battery mA", one("current", s.microamps.map(|a| a / 1e3)));
    }
    for bin in profile.bins(120) {
        counter(bin.from, "tokens/s", one("decode", Some(bin.rate())));
    }
    let about = json!({"uptime_s": profile.zero, "device": recording.device, "model": recording.model});
    json!({"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}).to_string()
}
