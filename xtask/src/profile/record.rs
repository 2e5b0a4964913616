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
pub mod tests;
