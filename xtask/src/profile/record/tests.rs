//! Made-up profiles, and tests of them.

use super::super::export;
use super::*;
use crate::sensors::{Core, Temperature};
use std::time::Duration;

/// A phone with two kinds of cores that gets warm and slow, with a switch, an eviction and hostile names.
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
    let plan = Plan::new(&before, Duration::from_millis(200));
    let plan = Plan { stop_after: Some(Duration::from_secs(30)), ..plan };
    let sample = |i: usize| {
        let warmth = 1.0 - (-(i as f64) / 40.0).exp();
        let slow = if i > 60 { 0.7 } else { 1.0 };
        let clock = |n: u32| {
            Some(if n >= 4 { (2_840_000.0 * slow) as u64 } else { 600_000 + 20_000 * (i as u64 % 9) })
        };
        Sample {
            uptime: 1000.0 + i as f64 * 0.2,
            khz: (0..8).map(clock).collect(),
            celsius: vec![Some(35.0 + 30.0 * warmth), i.is_multiple_of(5).then_some(32.0 + 8.0 * warmth)],
            microamps: Some(-900_000.0 - 300_000.0 * slow),
            percent: Some(83.0),
            available: Some((3500 << 20) - (i as u64).min(8) * (90 << 20)),
            rss: Some((i as u64).min(8) * (95 << 20) + (10 << 20)),
            pss: i.is_multiple_of(5).then_some((i as u64).min(8) * (94 << 20)),
            tasks: vec![(1, 4, i as u64 * 20), (2, 5, i as u64 * 20)],
        }
    };
    let samples = (0..120).map(sample).collect();
    let recording = Recording {
        device: "R58M <1>".into(),
        target: "aarch64-linux-android".into(),
        model: "story".into(),
        time: "20261121-170000".into(),
        args: ["generate", "--prompt", "<script>alert(1)</script>"].map(String::from).into(),
        before,
        after,
        plan,
        ..recording(samples)
    };
    Profile::new(recording, generation())
}

/// A trace: loading until 1.5 s, a prompt of 40 tokens, then decoding, slower from 12 s on.
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
            events
                .push(json!({"name": step, "ph": "X", "pid": 1, "tid": 1, "ts": at * 1e6, "dur": time * 1e6,
                               "args": {"layer": 0, "tokens": tokens}}));
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
    events.push(json!({"name": "stop: context", "ph": "i", "pid": 1, "tid": 1, "ts": 22e6, "s": "g"}));
    let file = json!({"otherData": {"uptime_s": 1001.5}, "traceEvents": events});
    Trace::parse(&file.to_string()).unwrap()
}

/// A profile without sensors and without tokens.
pub fn nothing() -> Profile {
    Profile::new(recording(Vec::new()), Trace::parse("{\"traceEvents\":[]}").unwrap())
}

/// A recording with nothing but these samples.
fn recording(samples: Vec<Sample>) -> Recording {
    let [device, target, model, time] = ["d", "t", "m", "x"].map(String::from);
    let (before, after) = (Reading::default(), Reading::default());
    let plan = Plan::new(&before, Duration::from_millis(200));
    Recording { device, target, model, time, args: Vec::new(), before, after, plan, samples }
}

#[test]
fn a_trace_without_a_clock_ends_with_the_samples() {
    for origin in [json!(null), json!(5.0), json!(1e9)] {
        let span = json!({"name": "embed", "ph": "X", "ts": 0, "dur": 4e6});
        let trace = json!({"otherData": {"uptime_s": origin}, "traceEvents": [span]}).to_string();
        let sample = |uptime| Sample { uptime, ..Sample::default() };
        let samples = vec![sample(10_000.0), sample(10_010.0)];
        let p = Profile::new(recording(samples), Trace::parse(&trace).unwrap());
        assert!(!p.aligned && p.zero == 10_000.0, "{origin}");
        assert!((p.trace.end().unwrap() - 10.0).abs() < 1e-6, "{origin}");
    }
}

#[test]
fn rates_follow_the_tokens_on_one_clock() {
    let p = phone();
    assert_eq!((p.zero, p.aligned), (1000.0, true));
    let first = &p.trace.passes[0];
    assert!((first.from - 1.5).abs() < 1e-6 && (p.trace.marks[0].at - 7.5).abs() < 1e-9, "{first:?}");
    let bins = p.bins(50);
    assert!((45..=51).contains(&bins.len()), "{}", bins.len());
    assert_eq!(bins.iter().map(|b| b.tokens).sum::<u64>() as usize, p.trace.split().1.len());
    assert!(bins.windows(2).all(|w| w[0].to == w[1].from));
    let (first, last) = (p.rate(0.0, 0.2).unwrap(), p.rate(0.8, 1.0).unwrap());
    assert!((18.0..20.0).contains(&first) && (12.0..13.0).contains(&last), "{first} {last}");
    let back: Value = serde_json::from_str(&p.json().to_string()).unwrap();
    assert_eq!(
        (&back["schema"], &back["prompt"]["tokens"], &back["cores_used"]),
        (&json!(1), &json!(40), &json!([4, 5]))
    );
    assert_eq!((&back["marks"][0]["kind"], &back["samples"][5]["t"]), (&json!("switch"), &json!(1.0)));
    let all: f64 = p.step_milliseconds().iter().sum();
    assert!((all - 1e3 / p.rate(0.0, 1.0).unwrap()).abs() < 0.01, "{all}");
}

#[test]
fn the_trace_has_spans_and_counters_on_one_clock() {
    let p = phone();
    let back: Value = serde_json::from_str(&export::trace_events(&p)).unwrap();
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
    let empty: Value = serde_json::from_str(&export::trace_events(&nothing())).unwrap();
    assert_eq!(empty["traceEvents"].as_array().unwrap().len(), 2);
}
