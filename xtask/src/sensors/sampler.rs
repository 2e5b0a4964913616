//! Samples a device while a program runs there, by a shell loop that prints one line per sample and ends with the
//! program. The lines have times of the device's clock, so that the connection does not delay them.

use super::parse::{celsius, khz, parse_temperature, seconds};
use super::{Reading, Temperature};
use crate::device::{Device, shell};
use crate::error::Result;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::time::Duration;

/// The values to sample.
#[derive(Debug, Clone)]
pub struct Plan {
    pub cores: Vec<u32>,
    pub temperatures: Vec<Temperature>,
    /// Sample the battery's current and level, from files.
    pub battery: bool,
    /// The minimum time between two samples.
    pub interval: Duration,
    /// Time after which the program is interrupted.
    pub stop_after: Option<Duration>,
}

/// The values at one moment; `None` if one could not be read.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Sample {
    /// Seconds since the device started.
    #[serde(rename = "uptime_s")]
    pub uptime: f64,
    /// Clocks of the plan's cores.
    pub khz: Vec<Option<u64>>,
    /// The plan's temperatures.
    pub celsius: Vec<Option<f64>>,
    pub microamps: Option<f64>,
    #[serde(rename = "battery_percent")]
    pub percent: Option<f64>,
    /// Available memory of the device, in bytes.
    #[serde(rename = "available_bytes")]
    pub available: Option<u64>,
    /// Memory of the program, in bytes.
    #[serde(rename = "rss_bytes")]
    pub rss: Option<u64>,
    /// Memory with shared pages divided among processes, in bytes; not in every sample, as it is slow to read.
    #[serde(rename = "pss_bytes")]
    pub pss: Option<u64>,
    /// For each thread: its id, the core that it last ran on, and its CPU ticks.
    #[serde(skip)]
    pub tasks: Vec<(u32, u32, u64)>,
}

impl Plan {
    /// A plan to sample everything that a reading found.
    pub fn new(reading: &Reading, interval: Duration) -> Plan {
        Plan {
            cores: reading.cores.iter().map(|c| c.number).collect(),
            temperatures: reading.watched(),
            battery: reading.battery.by_file,
            interval,
            stop_after: None,
        }
    }

    /// The names of the values in a sample, for JSON.
    pub fn json(&self) -> Value {
        let names = self.temperatures.iter().map(|t| &t.name).collect::<Vec<_>>();
        json!({"interval_ms": self.interval.as_millis() as u64, "cores": self.cores, "temperatures": names})
    }

    /// The script that samples process `pid`: settings, then `sample.sh`.
    fn script(&self, pid: u32) -> String {
        let mut files: Vec<String> = vec!["/proc/uptime".into()];
        let clock = |n: &u32| format!("/sys/devices/system/cpu/cpu{n}/cpufreq/scaling_cur_freq");
        files.extend(self.cores.iter().map(clock));
        let zones = self.temperatures.iter().filter_map(|t| t.zone);
        files.extend(zones.map(|n| format!("/sys/class/thermal/thermal_zone{n}/temp")));
        if self.battery {
            files.extend(["current_now", "capacity"].map(|f| format!("/sys/class/power_supply/battery/{f}")));
        }
        let seconds = self.interval.as_secs_f64();
        let every = |time: f64| (time / seconds).ceil().clamp(1.0, 1e6) as u64;
        let has_service = self.temperatures.iter().any(|t| t.zone.is_none());
        let service = if has_service { every(2.0).to_string() } else { String::new() };
        format!(
            "pid={pid} stop={} service={service} shared={} pause={:.3} files='{}'\n{}",
            self.stop_after.map_or(String::new(), |time| time.as_secs().to_string()),
            every(1.0),
            seconds.max(0.001),
            files.join(" "),
            include_str!("sample.sh")
        )
    }

    /// Samples until the program has ended.
    pub fn run(&self, device: &dyn Device, pid: u32) -> Result<Vec<Sample>> {
        Ok(self.parse(&shell::capture_apart(device, &self.script(pid))?.stdout))
    }

    /// Parses the lines that are samples.
    fn parse(&self, text: &str) -> Vec<Sample> {
        let mut service: Vec<Option<f64>> = vec![None; self.temperatures.len()];
        let mut samples: Vec<Sample> = Vec::new();
        for line in text.lines() {
            if let Some(warm) = line.strip_prefix("service ").and_then(parse_temperature) {
                let at = self.temperatures.iter().position(|t| t.zone.is_none() && t.name == warm.name);
                if let Some(at) = at {
                    service[at] = Some(warm.celsius);
                }
            }
            let Some(mut sample) = line.strip_prefix("sample ").and_then(|l| self.parse_sample(l)) else {
                continue;
            };
            for (i, latest) in service.iter_mut().enumerate() {
                sample.celsius[i] = sample.celsius[i].or(latest.take());
            }
            // A line whose time goes back is damaged.
            if samples.last().is_none_or(|last| last.uptime <= sample.uptime) {
                samples.push(sample);
            }
        }
        samples
    }

    fn parse_sample(&self, line: &str) -> Option<Sample> {
        let mut words = line.split_whitespace();
        let uptime = seconds(words.next()?)?;
        let clocks = self.cores.iter().map(|_| words.next().map(khz)).collect::<Option<Vec<_>>>()?;
        let zone = |t: &Temperature| match t.zone {
            Some(_) => words.next().map(celsius),
            None => Some(None),
        };
        let celsius = self.temperatures.iter().map(zone).collect::<Option<Vec<_>>>()?;
        let (mut microamps, mut percent) = (None, None);
        if self.battery {
            microamps = words.next()?.parse::<i64>().ok().map(|a| a as f64);
            percent = words.next()?.parse::<u64>().ok().filter(|p| *p <= 100).map(|p| p as f64);
        }
        let mut bytes = || Some(words.next()?.parse::<u64>().ok().and_then(|kb| kb.checked_mul(1024)));
        let (available, rss, pss) = (bytes()?, bytes()?, bytes()?);
        let tasks = words.filter_map(parse_task).collect();
        Some(Sample { uptime, khz: clocks, celsius, microamps, percent, available, rss, pss, tasks })
    }
}

/// Parses `1234:7:560`: thread, core, ticks.
fn parse_task(word: &str) -> Option<(u32, u32, u64)> {
    let mut numbers = word.split(':');
    let task = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
    numbers.next().is_none().then_some(task)
}

/// The highest watched temperature, before, after and in between.
pub fn find_hottest(ends: [&Reading; 2], samples: &[Sample]) -> Option<f64> {
    let during = samples.iter().flat_map(|s| s.celsius.iter().flatten().copied());
    ends.into_iter().filter_map(Reading::hottest).chain(during).max_by(f64::total_cmp)
}

/// The cores that did more than 5 % of the busiest one's work, ascending. A thread's ticks between two samples count
/// for the core on which it was seen last.
pub fn cores_used(samples: &[Sample]) -> Vec<u32> {
    let (mut before, mut work) = (HashMap::new(), HashMap::<u32, u64>::new());
    for &(thread, core, ticks) in samples.iter().flat_map(|s| &s.tasks) {
        let since = before.insert(thread, ticks).unwrap_or(0);
        *work.entry(core).or_default() += ticks.saturating_sub(since);
    }
    let most = work.values().copied().max().unwrap_or(0);
    let mut used: Vec<u32> =
        work.iter().filter(|(_, w)| **w > 0 && **w * 20 > most).map(|(c, _)| *c).collect();
    used.sort_unstable();
    used
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::local::Local;
    use std::process::Command;

    fn plan() -> Plan {
        let warm = |name: &str, zone| Temperature { name: name.into(), celsius: 40.0, zone };
        Plan {
            cores: vec![0, 7],
            temperatures: vec![warm("cpu", Some(3)), warm("skin", None)],
            battery: true,
            interval: Duration::from_millis(50),
            stop_after: None,
        }
    }

    #[test]
    fn samples_are_read_and_nonsense_is_none() {
        let text = "service Temperature{mValue=36.5, mType=3, mName=skin, mStatus=0}\n\
            sample 10.50 1800000 - 41200 -400000 83 3000 200 - 11:0:5 12:7:9\n\
            sample 10.60 - 2800000 - - - - - 150 12:7:30\n";
        let samples = plan().parse(text);
        assert_eq!(samples.len(), 2);
        let first = &samples[0];
        assert_eq!((first.uptime, &*first.khz), (10.5, &[Some(1_800_000), None][..]));
        assert_eq!((&*first.celsius, first.microamps), (&[Some(41.2), Some(36.5)][..], Some(-400_000.0)));
        assert_eq!((first.available, first.rss, first.pss), (Some(3000 << 10), Some(200 << 10), None));
        assert_eq!((&*samples[1].celsius, samples[1].pss), (&[None, None][..], Some(150 << 10)));
        assert_eq!((cores_used(&samples), cores_used(&[])), (vec![0, 7], vec![]));
        for line in [
            "sample",
            "sample x 1 1 1 1 1 1 1 1",
            "sample NaN 1 1 1 1 1 1 1 1",
            "sampler 1 1 1 1 1 1 1 1 1",
            "\u{1b}[2J",
        ] {
            assert!(plan().parse(line).is_empty(), "{line:?}");
        }
        let odd = plan().parse("sample 5 a b c d 101 18446744073709551615 - - 1:2 1:2:3:4 x:y:z -1:0:0\n");
        assert_eq!((&odd[0].tasks[..], odd[0].percent, odd[0].available), (&[][..], None, None));
        let back = plan().parse("sample 5 - - - - - - - -\nsample 4 - - - - - - - -\n");
        assert_eq!(back.len(), 1);
    }

    #[test]
    fn a_process_is_sampled_until_it_ends() {
        let device = Local::open();
        let reading = super::super::read_sensors(&device).unwrap();
        let plan = Plan::new(&reading, Duration::from_millis(20));
        // Tests in the background, and their children, may ignore interrupts.
        let sleep = ["--default-signal=INT", "sleep", "100"];
        let mut child = Command::new("env").args(sleep).spawn().unwrap();
        let plan = Plan { stop_after: Some(Duration::ZERO), ..plan };
        let pid = child.id();
        let reaper = std::thread::spawn(move || child.wait().unwrap());
        let samples = plan.run(&device, pid).unwrap();
        assert!(!reaper.join().unwrap().success());
        assert!(!samples.is_empty() && samples[0].rss.is_some_and(|b| b > 0), "{samples:?}");
        assert!(samples[0].available.is_some() && samples[0].uptime >= reading.uptime.unwrap());
    }
}
