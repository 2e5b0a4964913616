//! The files of a profile for people: a trace for Perfetto and `chrome://tracing`, with the program's steps and the
//! device's counters, and a page with charts, which needs no network.

use super::record::Profile;
use super::trace::micros;
use serde_json::{Map, Value, json};

const TEMPLATE: &str = include_str!("page.html");
/// Maximum number of samples in the page, far more than a screen can show.
const MAX_SAMPLES: usize = 4000;

/// The page of a `profile.json`.
pub fn render_page(mut numbers: Value) -> String {
    let samples = numbers["samples"].as_array().map_or(&[][..], Vec::as_slice);
    let (taken, each) = (samples.len(), samples.len().div_ceil(MAX_SAMPLES).max(1));
    numbers["samples"] = samples.iter().step_by(each).cloned().collect();
    numbers["taken"] = taken.into();
    // Only `<` can end a script element, and in JSON it stands only in strings.
    TEMPLATE.replacen("PROFILE", &numbers.to_string().replace('<', "\\u003c"), 1)
}

/// The text of `trace.json`.
pub fn trace_events(profile: &Profile) -> String {
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

#[cfg(test)]
mod tests {
    use super::super::record::tests::{nothing, phone};
    use super::*;
    use std::process::Command;

    /// Draws the page in node with a fake document, and checks it by `page.test.js`.
    fn draw(page: &str, expectations: &str) {
        let file =
            std::env::temp_dir().join(format!("xtask-page-{}-{expectations}.html", std::process::id()));
        std::fs::write(&file, page).unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/src/profile/page.test.js");
        match Command::new("node").arg(script).arg(&file).arg(expectations).output() {
            Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
            Err(e) => eprintln!("the page's script is not checked: node: {e}"),
        }
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_page_has_every_chart_names_are_text_and_nothing_is_fetched() {
        let page = render_page(phone().json());
        // For looking at it: ANTIGRAVITY_PAGE=FILE cargo test -p xtask page
        if let Some(file) = std::env::var_os("ANTIGRAVITY_PAGE") {
            std::fs::write(file, &page).unwrap();
        }
        assert!(page.contains("name=\"viewport\"") && page.contains("prefers-color-scheme:dark"));
        draw(&page, "phone");
        assert!(page.contains("R58M \\u003c1>") && page.contains("\\u003ci>opencl\\u003c/i>"));
        assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (2, 2));
        assert!(!page.contains("PROFILE") && !page.contains("innerHTML"));
        let page = page.replace("\"http://www.w3.org/2000/svg\"", "the name of a format");
        for fetch in ["src=", "href=", "http:", "https:", "url(", "@import"] {
            assert!(!page.contains(fetch), "{fetch}");
        }
    }

    #[test]
    fn an_empty_page_says_so_and_a_day_of_samples_is_thinned() {
        draw(&render_page(nothing().json()), "nothing");
        let numbers = serde_json::json!({"samples": vec![1; 400_000]});
        assert!(render_page(numbers).len() < TEMPLATE.len() + 3 * MAX_SAMPLES);
    }
}
