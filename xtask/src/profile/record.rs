//! A profile: the program's trace and the device's samples on one clock, and its JSON.

use super::trace::{Pass, Trace};
use crate::sensors::sampler::{self, Plan, Sample, cores_used};
use crate::sensors::{Reading, describe_clusters};
use serde_json::{Value, json};

/// Version of `profile.json`, raised when a field changes its meaning or is removed.
const SCHEMA: u32 = 1;
/// Maximum seconds between the trace's clock and the samples; beyond that the clock is ignored.
const MAX_CLOCK_SKEW: f64 = 600.0;

/// The data of a generation on a device.
pub struct Recording {
    pub device: String,
    pub target: String,
    pub model: String,
    /// The time, as in the directory's name.
    pub time: String,
    /// The program's arguments.
    pub args: Vec<String>,
    pub before: Reading,
    pub after: Reading,
    pub plan: Plan,
    /// Samples; their times are seconds since the device started.
    pub samples: Vec<Sample>,
}

/// A generation with its trace. Times are seconds since `zero`.
pub struct Profile {
    pub recording: Recording,
    pub trace: Trace,
    /// The zero of all times, in seconds since the device started.
    pub zero: f64,
    /// True if the trace has the clock of the samples; else it was shifted to end with them.
    pub aligned: bool,
}

/// A run of decoded tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Bin {
    pub from: f64,
    pub to: f64,
    pub tokens: u64,
    /// Number of tokens before it, prompt and decoded.
    pub position: u64,
    /// Seconds of each step, from the passes whose steps are known.
    pub steps: Vec<f64>,
}

impl Bin {
    /// Tokens per second.
    pub fn rate(&self) -> f64 {
        self.tokens as f64 / (self.to - self.from).max(1e-9)
    }

    fn json(&self) -> Value {
        json!({"from": round(self.from), "to": round(self.to), "tokens": self.tokens, "position": self.position,
               "tokens_per_second": round(self.rate()),
               "steps_ms": self.steps.iter().map(|s| round(s * 1e3)).collect::<Vec<_>>()})
    }
}

impl Profile {
    /// Shifts the trace to the clock of the samples.
    pub fn new(recording: Recording, mut trace: Trace) -> Profile {
        let first = recording.samples.first().map(|s| s.uptime);
        let last = recording.samples.last().map(|s| s.uptime);
        let near = |o: &f64| {
            first.is_none_or(|f| (f - MAX_CLOCK_SKEW..=last.unwrap_or(f) + MAX_CLOCK_SKEW).contains(o))
        };
        let origin = trace.origin.filter(near);
        let guess = last.unwrap_or(0.0) - trace.end().unwrap_or(0.0);
        let begins = origin.unwrap_or(guess);
        let zero = first.map_or(begins, |f| f.min(begins));
        trace.shift(begins - zero);
        Profile { recording, trace, zero, aligned: origin.is_some() }
    }

    /// Seconds until the last known time.
    pub fn span(&self) -> f64 {
        let last = self.recording.samples.last().map(|s| s.uptime - self.zero);
        last.into_iter().chain(self.trace.end()).fold(0.0, f64::max).max(1e-3)
    }

    /// The decoded tokens in about `count` bins of equal time.
    pub fn bins(&self, count: usize) -> Vec<Bin> {
        let (prompt, decode) = self.trace.split();
        let (Some(first), Some(last)) = (decode.first(), decode.last()) else { return Vec::new() };
        let from = prompt.last().map_or(first.from, |p| p.to);
        let length = (last.to - from) / count.max(1) as f64;
        // The end of each bin, as an index of passes.
        let (mut ends, mut began) = (Vec::new(), from);
        for (i, pass) in decode.iter().enumerate() {
            if pass.to - began >= length || i + 1 == decode.len() {
                ends.push(i + 1);
                began = pass.to;
            }
        }
        // A rest of less than half a bin joins the last one.
        if let [.., before, end] = ends[..]
            && decode[end - 1].to - decode[before - 1].to < length / 2.0
        {
            ends.remove(ends.len() - 2);
        }
        let tokens = |passes: &[Pass]| passes.iter().map(|p| p.tokens).sum::<u64>();
        let (mut first, mut from, mut position) = (0, from, tokens(prompt));
        let mut bin = |end: usize| {
            let passes = &decode[first..end];
            let (to, tokens) = (passes[passes.len() - 1].to, tokens(passes));
            let each = self.step_seconds(passes).into_iter().map(|s| s * tokens as f64).collect();
            let bin = Bin { from, to, tokens, position, steps: each };
            (first, from, position) = (end, to, position + tokens);
            bin
        };
        ends.into_iter().map(&mut bin).collect()
    }

    /// Seconds per token of each step, from the passes whose steps are known.
    fn step_seconds(&self, passes: &[Pass]) -> Vec<f64> {
        let known = || passes.iter().filter(|p| p.detailed);
        let tokens = known().map(|p| p.tokens).sum::<u64>().max(1) as f64;
        (0..self.trace.steps.len()).map(|i| known().map(|p| p.steps[i]).sum::<f64>() / tokens).collect()
    }

    /// Tokens per second of decoding, from one fraction of the tokens to another.
    pub fn rate(&self, from: f64, to: f64) -> Option<f64> {
        let (prompt, decode) = self.trace.split();
        let at = |f: f64| ((decode.len() as f64 * f).round() as usize).min(decode.len());
        let part = decode.get(at(from)..at(to))?;
        let before = at(from).checked_sub(1).map(|i| decode[i].to).or(prompt.last().map(|p| p.to));
        let time = part.last()?.to - before.unwrap_or(part[0].from);
        Some(part.iter().map(|p| p.tokens).sum::<u64>() as f64 / time.max(1e-9))
    }

    /// Milliseconds per decoded token of each step.
    fn step_milliseconds(&self) -> Vec<f64> {
        self.step_seconds(self.trace.split().1).into_iter().map(|s| s * 1e3).collect()
    }

    /// The maximum over all samples.
    fn peak(&self, of: impl Fn(&Sample) -> Option<f64>) -> Option<f64> {
        self.recording.samples.iter().filter_map(of).max_by(f64::total_cmp)
    }

    fn hottest(&self) -> Option<f64> {
        let Recording { before, after, samples, .. } = &self.recording;
        sampler::find_hottest([before, after], samples)
    }

    /// One sentence about each kind of value that could not be read.
    pub fn notes(&self) -> Vec<&'static str> {
        let any = |of: fn(&Sample) -> bool| self.recording.samples.iter().any(of);
        let known = [
            (any(|s| s.celsius.iter().any(Option::is_some)), "No temperature could be read on the device."),
            (any(|s| s.khz.iter().any(Option::is_some)), "No clock could be read on the device."),
            (any(|s| s.microamps.is_some()), "The battery's current could not be read."),
            (any(|s| s.rss.is_some()), "The program's memory was not sampled."),
            (self.aligned, "The trace has no start time; it was shifted to end with the samples."),
        ];
        known.into_iter().filter(|(known, _)| !known).map(|(_, note)| note).collect()
    }

    /// A few lines for the user.
    pub fn summary(&self) -> String {
        let rate = self.rate(0.0, 1.0).map_or("–".into(), |r| format!("{r:.1}"));
        let hottest = self.hottest().map_or("–".into(), |c| format!("{c:.1} °C"));
        let rss = self.peak(|s| s.rss.map(|b| b as f64 / f64::from(1 << 20)));
        let rss = rss.map_or("–".into(), |m| format!("{m:.0} MiB"));
        let (tokens, samples) = (self.trace.split().1.len(), self.recording.samples.len());
        let numbers = format!(
            "{tokens} tokens at {rate} tokens/s; peak memory {rss}, peak temperature {hottest}; {samples} samples"
        );
        [vec![numbers.as_str()], self.notes()].concat().join("\n")
    }

    pub fn json(&self) -> Value {
        let Recording { device, target, model, time, args, before, after, plan, samples } = &self.recording;
        let clusters = before.clusters();
        let sample = |s: &Sample| {
            let mut value = json!(s);
            value["t"] = json!(round(s.uptime - self.zero));
            value
        };
        json!({
            "schema": SCHEMA, "device": device, "target": target, "model": model, "time": time, "args": args,
            "layout": describe_clusters(&clusters),
            "clusters": clusters.iter().map(|c| json!({"name": c.name(), "cores": c.cores})).collect::<Vec<_>>(),
            "clock": {"zero_uptime_s": self.zero, "aligned": self.aligned},
            "seconds": round(self.span()), "notes": self.notes(),
            "prompt": self.prompt(), "stop": self.trace.stop,
            "asked_seconds": plan.stop_after.map(|limit| limit.as_secs_f64()),
            "ended": self.trace.end().map(round),
            "decode": {
                "tokens": self.trace.split().1.len(), "tokens_per_second": self.rate(0.0, 1.0).map(round),
                "first_fifth": self.rate(0.0, 0.2).map(round), "last_fifth": self.rate(0.8, 1.0).map(round),
            },
            "steps": self.trace.steps,
            "step_ms_per_token": self.step_milliseconds().into_iter().map(round).collect::<Vec<_>>(),
            "bins": self.bins(120).iter().map(Bin::json).collect::<Vec<_>>(),
            "marks": self.trace.marks.iter().map(|m| json!({"t": round(m.at), "kind": m.kind, "text": m.text}))
                .collect::<Vec<_>>(),
            "start": before.json(), "end": after.json(),
            "peak": {
                "celsius": self.hottest(), "rss_bytes": samples.iter().filter_map(|s| s.rss).max(),
                "microamps": self.peak(|s| s.microamps.map(f64::abs)),
                "least_available_bytes": samples.iter().filter_map(|s| s.available).min(),
            },
            "cores_used": cores_used(samples),
            "sampled": plan.json(), "samples": samples.iter().map(sample).collect::<Vec<_>>(),
        })
    }

    /// The prompt for JSON: its tokens, and the time of its computation.
    fn prompt(&self) -> Value {
        let (prompt, _) = self.trace.split();
        let Some((first, last)) = prompt.first().zip(prompt.last()) else { return json!({}) };
        let (from, to) = (first.from, last.to);
        json!({"tokens": prompt.iter().map(|p| p.tokens).sum::<u64>(), "seconds": round(to - from),
               "from": round(from), "to": round(to)})
    }
}

/// Rounds to six decimals.
fn round(x: f64) -> f64 {
    (x * 1e6).round() / 1e6
}

#[cfg(test)]
pub mod tests;
