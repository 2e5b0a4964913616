//! One profile: what the program traced and what the device sampled, on one clock, and its JSON.

use super::trace::{Kind, Trace};
use crate::sensors::sampler::{Plan, Sample, cores_used};
use crate::sensors::{Cluster, Reading, layout};
use serde_json::{Value, json};

/// Of `profile.json`; counts up when a field changes its meaning or goes.
const SCHEMA: u32 = 1;
/// The trace's clock is believed if it lies this near to the samples, in seconds.
const BELIEVED: f64 = 600.0;

/// Everything known about one generation. Times are seconds since `zero`, but those of the samples, which are
/// seconds since the device started, as is `zero`.
pub struct Profile {
    pub device: String,
    pub target: String,
    pub model: String,
    /// When, as the directory's name has it.
    pub time: String,
    /// The program's arguments.
    pub args: Vec<String>,
    pub before: Reading,
    pub after: Reading,
    pub clusters: Vec<Cluster>,
    pub plan: Plan,
    pub samples: Vec<Sample>,
    pub trace: Trace,
    pub zero: f64,
    /// Both clocks are known to be one; else the trace was made to end with the samples.
    pub aligned: bool,
}

/// Some decoded tokens in a row.
#[derive(Debug, Clone, PartialEq)]
pub struct Bin {
    pub from: f64,
    pub to: f64,
    pub tokens: u64,
    /// Seconds of each step of the trace.
    pub steps: Vec<f64>,
}

impl Bin {
    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / (self.to - self.from).max(1e-9)
    }
}

impl Profile {
    /// `[device, target, model, time]`, the program's arguments, readings before and after, and what was
    /// collected in between.
    pub fn new(
        [device, target, model, time]: [String; 4],
        args: Vec<String>,
        (before, after): (Reading, Reading),
        (plan, samples): (Plan, Vec<Sample>),
        mut trace: Trace,
    ) -> Profile {
        let first = samples.first().map(|s| s.uptime);
        let last = samples.last().map(|s| s.uptime);
        let near = |o: &f64| first.is_none_or(|f| (f - BELIEVED..=last.unwrap_or(f) + BELIEVED).contains(o));
        let origin = trace.origin.filter(near);
        let guess = last.unwrap_or(0.0) - trace.end().unwrap_or(0.0);
        let begins = origin.unwrap_or(guess);
        let zero = first.map_or(begins, |f| f.min(begins));
        trace.shift(begins - zero);
        let clusters = before.clusters();
        Profile {
            device,
            target,
            model,
            time,
            args,
            before,
            after,
            clusters,
            plan,
            samples,
            trace,
            zero,
            aligned: origin.is_some(),
        }
    }

    /// From the first to the last moment known.
    pub fn span(&self) -> f64 {
        let last = self.samples.last().map(|s| s.uptime - self.zero);
        last.into_iter().chain(self.trace.end()).fold(0.0, f64::max).max(1e-3)
    }

    /// Decoded tokens in about `count` bins of equal time.
    pub fn bins(&self, count: usize) -> Vec<Bin> {
        let (prompt, decode) = self.trace.split();
        let (Some(first), Some(last)) = (decode.first(), decode.last()) else { return Vec::new() };
        let mut from = prompt.last().map_or(first.from, |p| p.to);
        let length = (last.to - from) / count.max(1) as f64;
        let (mut bins, mut tokens) = (Vec::new(), 0);
        let mut steps = vec![0.0; self.trace.steps.len()];
        for (i, pass) in decode.iter().enumerate() {
            tokens += pass.tokens;
            steps.iter_mut().zip(&pass.steps).for_each(|(sum, s)| *sum += s);
            if pass.to - from >= length || i + 1 == decode.len() {
                let width = steps.len();
                let steps = std::mem::replace(&mut steps, vec![0.0; width]);
                bins.push(Bin { from, to: pass.to, tokens, steps });
                (from, tokens) = (pass.to, 0);
            }
        }
        // The rest of a bin at the end is too short to be one.
        if let [.., before, rest] = &mut bins[..]
            && rest.to - rest.from < length / 2.0
        {
            before.to = rest.to;
            before.tokens += rest.tokens;
            before.steps.iter_mut().zip(&rest.steps).for_each(|(sum, s)| *sum += s);
            bins.pop();
        }
        bins
    }

    /// Tokens per second over a part of the decode, from one fraction of its tokens to another.
    pub fn rate(&self, from: f64, to: f64) -> Option<f64> {
        let (prompt, decode) = self.trace.split();
        let at = |f: f64| ((decode.len() as f64 * f).round() as usize).min(decode.len());
        let part = decode.get(at(from)..at(to))?;
        let before = at(from).checked_sub(1).map(|i| decode[i].to).or(prompt.last().map(|p| p.to));
        let time = part.last()?.to - before.unwrap_or(part[0].from);
        Some(part.iter().map(|p| p.tokens).sum::<u64>() as f64 / time.max(1e-9))
    }

    /// Tokens of the prompt, and the seconds that they took.
    pub fn prompt(&self) -> Option<(u64, f64)> {
        let (prompt, _) = self.trace.split();
        Some((prompt.iter().map(|p| p.tokens).sum(), prompt.last()?.to - prompt.first()?.from))
    }

    /// Decoding: milliseconds a token of each step.
    pub fn steps(&self) -> Vec<(String, f64)> {
        let (_, decode) = self.trace.split();
        let tokens = decode.iter().map(|p| p.tokens).sum::<u64>().max(1) as f64;
        let sum = |i: usize| decode.iter().map(|p| p.steps[i]).sum::<f64>() * 1e3 / tokens;
        self.trace.steps.iter().enumerate().map(|(i, s)| (s.clone(), sum(i))).collect()
    }

    /// The highest value of all samples.
    pub fn peak(&self, of: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        self.samples.iter().filter_map(of).max_by(f64::total_cmp)
    }

    /// The highest of the watched temperatures, at any time.
    pub fn hottest(&self) -> Option<f64> {
        let during = self.samples.iter().flat_map(|s| s.celsius.iter().flatten().copied());
        let ends = [self.before.hottest(), self.after.hottest()];
        during.chain(ends.into_iter().flatten()).max_by(f64::total_cmp)
    }

    /// In a sentence each, what could not be read.
    pub fn notes(&self) -> Vec<&'static str> {
        let any = |of: fn(&Sample) -> bool| self.samples.iter().any(of);
        let mut notes = Vec::new();
        if !any(|s| s.celsius.iter().any(Option::is_some)) {
            notes.push("No temperature can be read there.");
        }
        if !any(|s| s.khz.iter().any(Option::is_some)) {
            notes.push("No clock can be read there.");
        }
        if !any(|s| s.microamps.is_some()) {
            notes.push("The battery's current cannot be read there.");
        }
        if !any(|s| s.rss.is_some()) {
            notes.push("The program's memory was not sampled.");
        }
        if !self.aligned {
            notes.push("The trace does not tell when it began: it was made to end with the samples.");
        }
        notes
    }

    /// For people, in a few lines.
    pub fn summary(&self) -> String {
        let rate = self.rate(0.0, 1.0).map_or("–".into(), |r| format!("{r:.1}"));
        let hottest = self.hottest().map_or("–".into(), |c| format!("{c:.1} °C"));
        let rss = self.peak(|s| s.rss.map(|b| b as f64 / f64::from(1 << 20)));
        let rss = rss.map_or("–".into(), |m| format!("{m:.0} MiB"));
        let n = self.trace.split().1.len();
        let counts = format!("{n} tokens decoded, {} samples", self.samples.len());
        let mut lines = vec![format!("{counts}: {rate} tokens/s, at most {hottest} and {rss}")];
        lines.extend(self.notes().into_iter().map(String::from));
        lines.join("\n")
    }

    pub fn json(&self) -> Value {
        let sample = |s: &Sample| {
            json!({"t": round(s.uptime - self.zero), "khz": s.khz, "celsius": s.celsius,
                   "rss_bytes": s.rss, "pss_bytes": s.pss, "available_bytes": s.available,
                   "microamps": s.microamps, "battery_percent": s.percent})
        };
        let bin = |b: &Bin| {
            json!({"from": round(b.from), "to": round(b.to), "tokens": b.tokens, "tokens_per_second": round(b.rate()),
                   "steps_ms": b.steps.iter().map(|s| round(s * 1e3)).collect::<Vec<_>>()})
        };
        let mark = |m: &super::trace::Mark| {
            let kind = if m.kind == Kind::Switch { "switch" } else { "evict" };
            json!({"t": round(m.at), "kind": kind, "text": m.text})
        };
        let (tokens, seconds) = self.prompt().unzip();
        json!({
            "schema": SCHEMA, "device": self.device, "target": self.target, "model": self.model,
            "time": self.time, "args": self.args, "layout": layout(&self.clusters),
            "clock": {"zero_uptime_s": self.zero, "aligned": self.aligned},
            "seconds": round(self.span()), "notes": self.notes(),
            "prompt": {"tokens": tokens, "seconds": seconds.map(round)},
            "decode": {
                "tokens": self.trace.split().1.len(), "tokens_per_second": self.rate(0.0, 1.0).map(round),
                "first_fifth": self.rate(0.0, 0.2).map(round), "last_fifth": self.rate(0.8, 1.0).map(round),
            },
            "steps": self.trace.steps,
            "step_ms_per_token": self.steps().iter().map(|(_, ms)| round(*ms)).collect::<Vec<_>>(),
            "bins": self.bins(120).iter().map(bin).collect::<Vec<_>>(),
            "marks": self.trace.marks.iter().map(mark).collect::<Vec<_>>(),
            "start": self.before.json(), "end": self.after.json(),
            "cores_used": cores_used(&self.samples),
            "sampled": {
                "interval_ms": self.plan.interval.as_millis() as u64, "cores": self.plan.cores,
                "temperatures": self.plan.temperatures.iter().map(|t| &t.name).collect::<Vec<_>>(),
            },
            "samples": self.samples.iter().map(sample).collect::<Vec<_>>(),
        })
    }
}

/// To a millionth.
fn round(x: f64) -> f64 {
    (x * 1e6).round() / 1e6
}

#[cfg(test)]
pub mod tests {
    use super::super::trace;
    use super::*;
    use crate::sensors::{Core, Temperature};
    use std::time::Duration;

    /// A phone of two kinds of cores that gets warm and slow, with a switch and an eviction; its names are
    /// hostile.
    pub fn phone() -> Profile {
        let core = |n: u32| {
            let fast = n >= 4;
            let max = if fast { 2_840_000 } else { 1_800_000 };
            let capacity = Some(if fast { 1024 } else { 300 });
            Core { number: n, capacity, max_khz: Some(max), allowed_khz: Some(max), khz: Some(max) }
        };
        let warm = |name: &str, zone| Temperature { name: name.into(), celsius: 35.0, zone: Some(zone) };
        let temperatures = vec![warm("cpu-1-0 <b>&\"'</script>", 1), warm("skin-therm", 2)];
        let mut before = Reading { cores: (0..8).map(core).collect(), temperatures, ..Reading::default() };
        before.thermal_status = Some(0);
        before.battery.by_file = true;
        before.battery.percent = Some(83.0);
        let mut after = before.clone();
        after.thermal_status = Some(2);
        after.temperatures[0].celsius = 61.0;
        let plan = Plan::of(&before, Duration::from_millis(200));
        let sample = |i: usize| {
            let warmth = 1.0 - (-(i as f64) / 40.0).exp();
            let slow = if i > 60 { 0.7 } else { 1.0 };
            let clock = |n: u32| {
                Some(if n >= 4 { (2_840_000.0 * slow) as u64 } else { 600_000 + 20_000 * (i as u64 % 9) })
            };
            Sample {
                uptime: 1000.0 + i as f64 * 0.2,
                khz: (0..8).map(clock).collect(),
                celsius: vec![Some(35.0 + 30.0 * warmth), (i % 5 == 0).then_some(32.0 + 8.0 * warmth)],
                microamps: Some(-900_000.0 - 300_000.0 * slow),
                percent: Some(83.0),
                available: Some((3500 << 20) - (i as u64).min(8) * (90 << 20)),
                rss: Some((i as u64).min(8) * (95 << 20) + (10 << 20)),
                pss: (i % 5 == 0).then_some((i as u64).min(8) * (94 << 20)),
                tasks: vec![(1, 4, i as u64 * 20), (2, 5, i as u64 * 20)],
            }
        };
        let samples = (0..120).map(sample).collect();
        let args = ["generate", "--prompt", "<script>alert(1)</script>"].map(String::from).into();
        let name = ["R58M <1>", "aarch64-linux-android", "story", "20261121-170000"].map(String::from);
        Profile::new(name, args, (before, after), (plan, samples), generation())
    }

    /// Loading ends at 1.5 s; a prompt of 40 tokens, then decode, slower from 12 s on.
    fn generation() -> Trace {
        const STEPS: [(&str, f64); 8] = [
            ("embed", 0.01),
            ("norm", 0.03),
            ("qkv", 0.18),
            ("attend", 0.12),
            ("out", 0.1),
            ("gate_up", 0.3),
            ("down", 0.16),
            ("head", 0.1),
        ];
        let (mut events, mut at) = (Vec::new(), 0.0);
        let mut pass = |tokens: u64, seconds: f64| {
            for (step, share) in STEPS {
                let time = seconds * share;
                events.push(
                    json!({"name": step, "ph": "X", "pid": 1, "tid": 1, "ts": at * 1e6, "dur": time * 1e6,
                                   "args": {"layer": 0, "tokens": tokens}}),
                );
                at += time;
            }
            at
        };
        let mut now = pass(40, 1.0);
        while now < 22.0 {
            now = pass(1, if now < 10.5 { 0.05 } else { 0.072 } + 0.0004 * now);
        }
        events.push(json!({"name": "switch", "ph": "i", "pid": 1, "tid": 1, "ts": 6e6, "s": "g",
                           "args": {"to": "<i>opencl</i>", "position": 512}}));
        events.push(json!({"name": "evict", "ph": "i", "pid": 1, "tid": 1, "ts": 15e6, "s": "g", "args": {"slots": 1024}}));
        let file = json!({"otherData": {"uptime_s": 1001.5}, "traceEvents": events});
        Trace::parse(&file.to_string()).unwrap()
    }

    /// A machine that tells nothing, and a program that did nothing.
    pub fn nothing() -> Profile {
        let plan = Plan::of(&Reading::default(), Duration::from_millis(200));
        let name = ["d", "t", "m", "x"].map(String::from);
        let trace = Trace::parse("{\"traceEvents\":[]}").unwrap();
        Profile::new(name, Vec::new(), Default::default(), (plan, Vec::new()), trace)
    }

    #[test]
    fn both_clocks_become_one() {
        let p = phone();
        assert_eq!((p.zero, p.aligned), (1000.0, true));
        let first = &p.trace.passes[0];
        assert!((first.from - 1.5).abs() < 1e-6 && (first.to - 2.5).abs() < 1e-6, "{first:?}");
        assert!((p.trace.marks[0].at - 7.5).abs() < 1e-9);
        assert!(p.span() > 23.0 && p.span() < 25.0);
    }

    #[test]
    fn a_trace_without_a_clock_ends_with_the_samples() {
        for origin in [json!(null), json!(5.0), json!(1e9)] {
            let span = json!({"name": "embed", "ph": "X", "ts": 0, "dur": 4e6});
            let trace = json!({"otherData": {"uptime_s": origin}, "traceEvents": [span]}).to_string();
            let sample = |uptime| Sample { uptime, ..Sample::default() };
            let plan = Plan::of(&Reading::default(), Duration::from_millis(200));
            let name = ["d", "t", "m", "x"].map(String::from);
            let samples = vec![sample(10_000.0), sample(10_010.0)];
            let trace = Trace::parse(&trace).unwrap();
            let p = Profile::new(name, Vec::new(), Default::default(), (plan, samples), trace);
            assert!(!p.aligned && p.zero == 10_000.0, "{origin}");
            assert!((p.trace.end().unwrap() - 10.0).abs() < 1e-6, "{origin}");
        }
    }

    #[test]
    fn rates_follow_the_tokens() {
        let p = phone();
        let bins = p.bins(50);
        assert!((45..=51).contains(&bins.len()), "{}", bins.len());
        assert_eq!(bins.iter().map(|b| b.tokens).sum::<u64>() as usize, p.trace.split().1.len());
        assert!(bins.windows(2).all(|w| w[0].to == w[1].from));
        let (first, last) = (p.rate(0.0, 0.2).unwrap(), p.rate(0.8, 1.0).unwrap());
        assert!((18.0..20.0).contains(&first) && (12.0..13.0).contains(&last), "{first} {last}");
        assert_eq!(p.prompt().map(|(n, _)| n), Some(40));
        let all: f64 = p.steps().iter().map(|(_, ms)| ms).sum();
        assert!((all - 1e3 / p.rate(0.0, 1.0).unwrap()).abs() < 0.01, "{all}");
    }

    #[test]
    fn json_can_be_read_back() {
        let p = phone();
        let back: Value = serde_json::from_str(&p.json().to_string()).unwrap();
        assert_eq!((back["schema"].as_u64(), back["samples"].as_array().map(Vec::len)), (Some(1), Some(120)));
        assert_eq!(back["sampled"]["temperatures"][0], "cpu-1-0 <b>&\"'</script>");
        assert_eq!(back["cores_used"], json!([4, 5]));
        assert_eq!(back["marks"][0]["kind"], "switch");
        assert_eq!(back["samples"][5]["t"], 1.0);
        let empty: Value = serde_json::from_str(&nothing().json().to_string()).unwrap();
        assert_eq!(empty["decode"]["tokens"], 0);
        assert!(
            empty["decode"]["tokens_per_second"].is_null() && empty["notes"].as_array().unwrap().len() == 5
        );
    }

    #[test]
    fn the_trace_has_spans_and_counters_on_one_clock() {
        let p = phone();
        let back: Value = serde_json::from_str(&trace::chrome(&p)).unwrap();
        let events = back["traceEvents"].as_array().unwrap();
        let of = |ph: &str, name: &str| -> Vec<&Value> {
            events.iter().filter(|e| e["ph"] == ph && (name.is_empty() || e["name"] == name)).collect()
        };
        assert_eq!(of("M", "").len(), 2);
        assert_eq!(of("X", "embed")[0]["ts"], 1_500_000.0);
        let clocks = of("C", "clock MHz");
        assert_eq!((clocks.len(), clocks[5]["ts"].as_f64()), (120, Some(1_000_000.0)));
        assert_eq!(clocks[0]["args"]["cpu 7"], 2840.0);
        assert_eq!(of("C", "memory MiB")[1]["args"], json!({"RSS": 105.0}));
        assert!(!of("C", "tokens/s").is_empty() && of("C", "temperature °C").len() == 120);
        assert_eq!(of("i", "switch")[0]["ts"], 7_500_000.0);
        let valid = |e: &Value| e["ph"].is_string() && e["pid"].is_u64() && e["ts"].is_number();
        assert!(events.iter().all(valid));
        let empty: Value = serde_json::from_str(&trace::chrome(&nothing())).unwrap();
        assert_eq!(empty["traceEvents"].as_array().unwrap().len(), 2);
    }
}
