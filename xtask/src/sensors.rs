//! The state of a device: its cores and their clocks, temperatures, throttling, memory, battery.
//!
//! Scripts in the device's shell read everything, without special rights or tools. A value that is missing, locked or
//! odd is `None` or left out, never an error.

pub mod sampler;

mod parse;

use crate::device::{Device, shell};
use crate::error::Result;
use serde::Serialize;
use serde_json::{Value, json};

/// Reads everything once.
pub fn read_sensors(device: &dyn Device) -> Result<Reading> {
    Ok(parse::parse_reading(&shell::capture(device, include_str!("sensors/read.sh"))?.stdout))
}

/// One core.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Core {
    #[serde(rename = "cpu")]
    pub number: u32,
    /// Relative speed; the fastest core has 1024.
    pub capacity: Option<u64>,
    /// The maximum clock of the hardware.
    pub max_khz: Option<u64>,
    /// The maximum clock allowed now, lowered by thermal limits.
    pub allowed_khz: Option<u64>,
    pub khz: Option<u64>,
}

/// One temperature.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Temperature {
    pub name: String,
    pub celsius: f64,
    /// The number of its thermal zone; `None` if it comes from Android's thermal service.
    pub zone: Option<u32>,
}

/// A cooling device, e.g. a limit on a core's clock: its state, of at most `most`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cooling {
    pub kind: String,
    pub state: u64,
    #[serde(rename = "of")]
    pub most: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Battery {
    pub percent: Option<f64>,
    pub celsius: Option<f64>,
    /// The current; the sign for charging differs between manufacturers.
    pub microamps: Option<f64>,
    /// True if the current can be read from a file, which is fast.
    #[serde(skip)]
    pub by_file: bool,
}

/// The state of a device at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Reading {
    /// Seconds since the device started.
    pub uptime: Option<f64>,
    pub cores: Vec<Core>,
    pub temperatures: Vec<Temperature>,
    pub cooling: Vec<Cooling>,
    /// Android's throttling status, from 0 (none) to 6 (shutdown).
    pub thermal_status: Option<u64>,
    /// Bytes of memory, and of memory available without swapping.
    pub total: Option<u64>,
    pub available: Option<u64>,
    pub battery: Battery,
}

/// Cores of one kind: their numbers, ascending.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    pub cores: Vec<u32>,
    pub capacity: Option<u64>,
    pub max_khz: Option<u64>,
}

impl Reading {
    /// The cores grouped by kind, the fastest last.
    pub fn clusters(&self) -> Vec<Cluster> {
        let mut found: Vec<Cluster> = Vec::new();
        for c in &self.cores {
            match found.iter_mut().find(|f| (f.capacity, f.max_khz) == (c.capacity, c.max_khz)) {
                Some(cluster) => cluster.cores.push(c.number),
                None => {
                    found.push(Cluster { cores: vec![c.number], capacity: c.capacity, max_khz: c.max_khz })
                }
            }
        }
        found.sort_by_key(|c| (c.capacity, c.max_khz));
        found
    }

    /// The temperatures of chip and case: at most eight, cores first.
    pub fn watched(&self) -> Vec<Temperature> {
        const KINDS: [(&[&str], usize); 4] = [
            (&["cpu", "x86_pkg", "core", "big", "mid", "little", "soc", "apc", "tsens", "acpitz"], 3),
            (&["skin", "quiet", "shell", "surface", "xo-therm"], 2),
            (&["gpu"], 1),
            (&["batt"], 1),
        ];
        let mut left = self.temperatures.clone();
        left.sort_by(|a, b| b.celsius.total_cmp(&a.celsius));
        let mut chosen = Vec::new();
        for (words, most) in KINDS {
            let fits = |t: &Temperature| words.iter().any(|w| t.name.to_ascii_lowercase().contains(w));
            let (of_kind, others): (Vec<_>, Vec<_>) = left.into_iter().partition(fits);
            chosen.extend(of_kind.into_iter().take(most));
            left = others;
        }
        if chosen.is_empty() {
            chosen.extend(left.into_iter().take(4));
        }
        chosen
    }

    /// The highest of the watched temperatures.
    pub fn hottest(&self) -> Option<f64> {
        self.watched().iter().map(|t| t.celsius).max_by(f64::total_cmp)
    }

    /// The limits on the cores in a few words; `None` if nothing is known.
    pub fn throttling(&self) -> Option<String> {
        const STATUS: [&str; 7] =
            ["none", "light", "moderate", "severe", "critical", "emergency", "shutdown"];
        let mut words = Vec::new();
        if let Some(status) = self.thermal_status.filter(|s| *s > 0) {
            words.push(STATUS.get(status as usize).map_or(format!("status {status}"), |s| s.to_string()));
        }
        let acts = |c: &&Cooling| {
            let kind = c.kind.to_ascii_lowercase();
            c.state > 0 && ["cpu", "processor", "gpu"].iter().any(|w| kind.contains(w))
        };
        words.extend(self.cooling.iter().filter(acts).map(|c| format!("{} {}/{}", c.kind, c.state, c.most)));
        let held = |c: &&Core| c.allowed_khz.zip(c.max_khz).is_some_and(|(now, most)| now < most);
        let held: Vec<String> = self.cores.iter().filter(held).map(|c| c.number.to_string()).collect();
        if !held.is_empty() {
            words.push(format!("clock limited on cpu {}", held.join(" ")));
        }
        let known = self.thermal_status.is_some()
            || !self.cooling.is_empty()
            || self.cores.iter().any(|c| c.allowed_khz.is_some());
        if words.is_empty() { known.then(|| "none".into()) } else { Some(words.join(", ")) }
    }

    pub fn json(&self) -> Value {
        json!({
            "uptime_s": self.uptime, "cores": self.cores, "temperatures": self.temperatures,
            "cooling": self.cooling, "hottest": self.hottest(), "thermal_status": self.thermal_status,
            "throttling": self.throttling(), "memory_total_bytes": self.total,
            "memory_available_bytes": self.available, "battery": self.battery,
        })
    }
}

impl Cluster {
    /// The name of the cluster, e.g. `cpu 4-6`.
    pub fn name(&self) -> String {
        format!("cpu {}", format_ranges(&self.cores))
    }
}

/// Formats ascending numbers as ranges: `0-3, 7`.
pub fn format_ranges(numbers: &[u32]) -> String {
    let mut parts: Vec<(u32, u32)> = Vec::new();
    for &n in numbers {
        match parts.last_mut() {
            Some((_, end)) if n == end.saturating_add(1) => *end = n,
            _ => parts.push((n, n)),
        }
    }
    let part = |(a, b): &(u32, u32)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    parts.iter().map(part).collect::<Vec<_>>().join(", ")
}

/// Describes the clusters, e.g. `cpu 0-3 (1.80 GHz) + cpu 4-7 (2.84 GHz)`.
pub fn describe_clusters(clusters: &[Cluster]) -> String {
    let one = |c: &Cluster| match (c.max_khz, c.capacity) {
        (Some(khz), _) => format!("{} ({:.2} GHz)", c.name(), khz as f64 / 1e6),
        (None, Some(capacity)) => format!("{} (capacity {capacity})", c.name()),
        (None, None) => c.name(),
    };
    clusters.iter().map(one).collect::<Vec<_>>().join(" + ")
}

/// Shortens a name and removes its control characters.
pub fn sanitize_name(name: &str) -> String {
    name.trim().chars().filter(|c| !c.is_control()).take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_grouped_and_the_important_temperatures_are_watched() {
        let core = |number, capacity| Core { number, capacity, ..Core::default() };
        let cores = vec![core(7, Some(1024)), core(0, Some(300)), core(1, Some(300)), core(2, None)];
        let names = ["pmic", "CPU-0-0", "cpu-1", "cpu-2", "cpu-3", "skin-therm", "gpuss", "battery", "modem"];
        let warm = |(i, name): (usize, &&str)| Temperature {
            name: name.to_string(),
            celsius: 30.0 + i as f64,
            zone: Some(0),
        };
        let temperatures = names.iter().enumerate().map(warm).collect();
        let reading = Reading { cores, temperatures, ..Reading::default() };
        assert_eq!(
            describe_clusters(&reading.clusters()),
            "cpu 2 + cpu 0-1 (capacity 300) + cpu 7 (capacity 1024)"
        );
        assert_eq!(format_ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        let watched: Vec<String> = reading.watched().into_iter().map(|t| t.name).collect();
        assert_eq!(watched, ["cpu-3", "cpu-2", "cpu-1", "skin-therm", "gpuss", "battery"]);
        assert_eq!((reading.hottest(), Reading::default().hottest()), (Some(37.0), None));
    }

    #[test]
    fn throttling_is_described_in_words() {
        assert_eq!(Reading::default().throttling(), None);
        let cool = Reading { thermal_status: Some(0), ..Reading::default() };
        assert_eq!(cool.throttling().as_deref(), Some("none"));
        let cooling = vec![
            Cooling { kind: "thermal-cpufreq-0".into(), state: 3, most: 10 },
            Cooling { kind: "fan".into(), state: 1, most: 2 },
        ];
        let core = Core { number: 4, max_khz: Some(3000), allowed_khz: Some(2000), ..Core::default() };
        let hot = Reading { thermal_status: Some(2), cooling, cores: vec![core], ..Reading::default() };
        assert_eq!(hot.throttling().unwrap(), "moderate, thermal-cpufreq-0 3/10, clock limited on cpu 4");
    }
}
