//! Reads the program's trace and splits it into forward passes.
//!
//! The program writes the Chrome trace event format: a span (`"ph":"X"`) for each step of a forward pass, and an
//! instant (`"ph":"i"`) named `switch…` or `evict…` where decoding moved to another backend or the cache evicted slots.
//! `otherData.uptime_s` is the device's uptime at the zero of the trace's clock.

use serde_json::{Value, json};

/// Maximum number of step names; the rest is `other`.
const MAX_STEPS: usize = 11;

/// Prefixes of the names of instants that are marks: a switch of backends, an eviction.
const KINDS: [&str; 2] = ["switch", "evict"];

/// One forward pass. Times are seconds on the trace's clock until [`Trace::shift`] moves them.
#[derive(Debug, Clone, PartialEq)]
pub struct Pass {
    pub from: f64,
    pub to: f64,
    pub tokens: u64,
    /// Seconds of each of [`Trace::steps`].
    pub steps: Vec<f64>,
    /// True if it computed logits, that is, gave a token.
    pub head: bool,
    /// True if its steps are known; a long run has them for some passes only.
    pub detailed: bool,
}

/// An event at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    pub at: f64,
    /// One of [`KINDS`].
    pub kind: &'static str,
    pub text: String,
}

/// The trace of the program.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// The device's uptime at the zero of the trace's clock.
    pub origin: Option<f64>,
    pub steps: Vec<String>,
    pub passes: Vec<Pass>,
    pub marks: Vec<Mark>,
    /// The reason why the text ended.
    pub stop: Option<String>,
    /// The events as they were written.
    pub events: Vec<Value>,
}

impl Trace {
    /// Parses the program's file.
    pub fn parse(text: &str) -> std::result::Result<Trace, String> {
        let mut file: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let Some(Value::Array(mut events)) = file.get_mut("traceEvents").map(Value::take) else {
            return Err("no list `traceEvents`".into());
        };
        let timed = |e: &Value| e["ts"].as_f64().is_some_and(|ts| ts.abs() < 1e15) && e["name"].is_string();
        events.retain(timed);
        events.sort_by(|a, b| seconds(a, "ts").total_cmp(&seconds(b, "ts")));
        let origin = file["otherData"]["uptime_s"].as_f64().filter(|o| (0.0..1e12).contains(o));
        let mut trace = Trace { origin, ..Trace::default() };
        for event in &events {
            match event["ph"].as_str() {
                Some("X") => trace.add_span(event),
                Some("i" | "I" | "R") => {
                    let stop = event["name"].as_str().and_then(|name| name.strip_prefix("stop: "));
                    trace.stop = stop.map(|why| sanitize(why, 40)).or(trace.stop);
                    trace.marks.extend(parse_mark(event));
                }
                _ => {}
            }
        }
        trace.events = events;
        let width = trace.steps.len();
        trace.passes.iter_mut().for_each(|p| p.steps.resize(width, 0.0));
        Ok(trace)
    }

    /// Adds a span to its pass.
    fn add_span(&mut self, event: &Value) {
        let name = event["name"].as_str().unwrap_or_default();
        let (from, time) = (seconds(event, "ts"), seconds(event, "dur").clamp(0.0, 1e9));
        let tokens = event["args"]["tokens"].as_u64().unwrap_or(1);
        if name == "pass" {
            let to = from + time;
            self.passes.push(Pass { from, to, tokens, steps: Vec::new(), head: true, detailed: false });
            return;
        }
        if name == "embed" || self.passes.is_empty() {
            self.passes.push(Pass { from, to: from, tokens, steps: Vec::new(), head: false, detailed: true });
        }
        let step = self.find_step(name);
        let pass = self.passes.last_mut().expect("one was just pushed");
        if pass.steps.len() <= step {
            pass.steps.resize(step + 1, 0.0);
        }
        pass.steps[step] += time;
        pass.to = pass.to.max(from + time);
        pass.head |= name == "head";
    }

    /// The index of a step, which is added if it is new.
    fn find_step(&mut self, name: &str) -> usize {
        let name = if name.is_empty() { "?" } else { name };
        if let Some(at) = self.steps.iter().position(|s| s == name) {
            return at;
        }
        let name = if self.steps.len() < MAX_STEPS { name } else { "other" };
        let known = self.steps.iter().position(|s| s == name);
        known.unwrap_or_else(|| {
            self.steps.push(sanitize(name, 24));
            self.steps.len() - 1
        })
    }

    /// Moves all times by `by` seconds.
    pub fn shift(&mut self, by: f64) {
        for pass in &mut self.passes {
            (pass.from, pass.to) = (pass.from + by, pass.to + by);
        }
        self.marks.iter_mut().for_each(|m| m.at += by);
        for event in &mut self.events {
            event["ts"] = json!(micros(seconds(event, "ts") + by));
        }
    }

    /// The last time in the trace.
    pub fn end(&self) -> Option<f64> {
        let ends = self.passes.iter().map(|p| p.to).chain(self.marks.iter().map(|m| m.at));
        ends.max_by(f64::total_cmp)
    }

    /// The passes of the prompt, the last of which gives the first token, and the passes of one token each after it.
    pub fn split(&self) -> (&[Pass], &[Pass]) {
        let first = self.passes.iter().position(|p| p.head).map_or(self.passes.len(), |at| at + 1);
        self.passes.split_at(first)
    }
}

fn seconds(event: &Value, field: &str) -> f64 {
    event[field].as_f64().unwrap_or(0.0) / 1e6
}

/// Microseconds with three decimals.
pub fn micros(seconds: f64) -> f64 {
    (seconds * 1e9).round() / 1e3
}

fn parse_mark(event: &Value) -> Option<Mark> {
    let name = event["name"].as_str()?;
    let kind = KINDS.into_iter().find(|kind| name.starts_with(kind))?;
    let args = event["args"].as_object().into_iter().flatten();
    let value = |v: &Value| v.as_str().map_or_else(|| v.to_string(), String::from);
    let args = args.map(|(k, v)| format!("{k} {}", value(v))).collect::<Vec<_>>().join(", ");
    let text = if args.is_empty() { name.to_string() } else { format!("{name}: {args}") };
    Some(Mark { at: seconds(event, "ts"), kind, text: sanitize(&text, 120) })
}

/// At most `most` characters of a text, without control characters.
fn sanitize(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_evictions_and_switches_of_a_trace_are_found() {
        let span = |name: &str, ts: f64, tokens: u64| {
            json!({"name": name, "ph": "X", "ts": ts, "dur": 10.0, "pid": 1, "tid": 1,
                   "args": {"layer": 0, "tokens": tokens}})
        };
        let events = [
            span("embed", 0.0, 4),
            span("qkv", 10.0, 4),
            span("embed", 20.0, 2),
            span("head", 30.0, 2),
            span("embed", 50.0, 1),
            span("qkv", 60.0, 1),
            span("qkv", 70.0, 1),
            span("head", 80.0, 1),
        ];
        let text = json!({"otherData": {"uptime_s": 100.5}, "traceEvents": events}).to_string();
        let mut trace = Trace::parse(&text).unwrap();
        assert_eq!((trace.origin, trace.steps.join(" ")), (Some(100.5), "embed qkv head".into()));
        let (prompt, decode) = trace.split();
        assert_eq!((prompt.len(), prompt[0].tokens, prompt[1].head), (2, 4, true));
        assert_eq!(decode.len(), 1);
        assert!((decode[0].steps[1] - 20e-6).abs() < 1e-12 && (decode[0].to - 90e-6).abs() < 1e-12);
        trace.shift(2.0);
        assert!((trace.passes[2].from - 2.00005).abs() < 1e-9 && trace.end().is_some_and(|e| e > 2.0));
        assert_eq!(trace.events[4]["ts"], 2_000_050.0);
        let instant =
            |name: &str| json!({"name": name, "ph": "i", "ts": 5e6, "args": {"slots": 512, "to": "<gpu>"}});
        let events = [
            instant("switch"),
            instant("evict"),
            instant("other"),
            json!({"name": "stop: context", "ph": "i", "ts": 7e6}),
            json!({"name": "evict", "ph": "i", "ts": 6e6}),
        ];
        let trace = Trace::parse(&json!({"traceEvents": events}).to_string()).unwrap();
        let marks: Vec<(&str, &str)> = trace.marks.iter().map(|m| (m.kind, m.text.as_str())).collect();
        let args = "slots 512, to <gpu>";
        let texts = [format!("switch: {args}"), format!("evict: {args}")];
        assert_eq!(marks, [("switch", &*texts[0]), ("evict", &*texts[1]), ("evict", "evict")]);
        assert_eq!((trace.marks[0].at, trace.origin), (5.0, None));
        assert_eq!(trace.stop.as_deref(), Some("context"));
    }

    #[test]
    fn hostile_traces_are_refused_or_harmless() {
        for text in ["", "{", "[]", "{}", "{\"traceEvents\":{}}", "null"] {
            assert!(Trace::parse(text).is_err(), "{text}");
        }
        let odd = json!({"otherData": {"uptime_s": -1}, "traceEvents": [
            null, 3, {"name": "embed"}, {"name": 3, "ts": 1}, {"name": "x", "ts": 1e300, "ph": "X"},
            {"name": "", "ts": 1, "ph": "X", "dur": -5, "args": {"tokens": -1}},
            {"name": "embed", "ts": 2, "ph": "X", "dur": "x"}]});
        let trace = Trace::parse(&odd.to_string()).unwrap();
        assert_eq!((trace.origin, trace.passes.len()), (None, 2));
        assert!(trace.passes.iter().all(|p| p.to == p.from && p.tokens == 1));
        let many: Vec<Value> =
            (0..100).map(|i| json!({"name": format!("s{i}"), "ts": i, "ph": "X", "dur": 1})).collect();
        let trace = Trace::parse(&json!({"traceEvents": many}).to_string()).unwrap();
        assert_eq!((trace.steps.len(), trace.steps[MAX_STEPS].as_str()), (MAX_STEPS + 1, "other"));
        assert!(trace.passes.iter().all(|p| p.steps.len() == MAX_STEPS + 1));
    }
}
