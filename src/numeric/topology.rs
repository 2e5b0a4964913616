//! Number and cores of the threads: one for each big core that this process may use, or those of a mask.

mod mask;

pub use mask::{CpuMask, format_ranges};

use std::fs;
use std::path::Path;

/// Root of the system's files; tests use their own tree.
const ROOT: &str = "/";

/// A logical core of the kernel: each hyper-thread is one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Core {
    number: usize,
    /// Its capacity for the kernel's scheduler: 1024 is the fastest core of the system.
    capacity: Option<u64>,
    /// Highest clock, in kHz.
    clock: Option<u64>,
    /// List of the hyper-threads that share its arithmetic units and caches, itself included.
    siblings: String,
}

impl Core {
    fn read(root: &Path, number: usize) -> Self {
        let base = root.join(format!("sys/devices/system/cpu/cpu{number}"));
        let text = |file: &str| Some(fs::read_to_string(base.join(file)).ok()?.trim().to_string());
        let value = |file: &str| text(file)?.parse().ok();
        let siblings = text("topology/thread_siblings_list").unwrap_or_else(|| number.to_string());
        Self { number, capacity: value("cpu_capacity"), clock: value("cpufreq/cpuinfo_max_freq"), siblings }
    }
}

/// Default number of threads: the big cores (one hyper-thread of each) that affinity and the container's CPU quota
/// allow; at least one.
pub fn default_threads() -> usize {
    let quota = std::thread::available_parallelism().map_or(1, |n| n.get());
    count_big_cores(list_cores(Path::new(ROOT))).map_or(quota, |n| n.min(quota))
}

/// Counts big cores. Hyper-threads of one core count once, because they share the units that limit all kernels.
fn count_big_cores(cores: Vec<Core>) -> Option<usize> {
    let mut big: Vec<String> = keep_big(cores).into_iter().map(|core| core.siblings).collect();
    big.sort_unstable();
    big.dedup();
    (!big.is_empty()).then_some(big.len())
}

/// Cores to pin threads to: the big ones, if there are others and the big ones are enough for `threads`.
pub fn choose_cores(threads: usize) -> Option<Vec<usize>> {
    place_threads(list_cores(Path::new(ROOT)), threads)
}

fn place_threads(all: Vec<Core>, threads: usize) -> Option<Vec<usize>> {
    let big = keep_big(all.clone());
    (big.len() < all.len() && threads <= big.len()).then(|| big.into_iter().map(|c| c.number).collect())
}

/// The big cores among those this process may run on.
pub fn big_cores() -> Vec<usize> {
    keep_big(list_cores(Path::new(ROOT))).into_iter().map(|c| c.number).collect()
}

fn list_cores(root: &Path) -> Vec<Core> {
    list_allowed(root).into_iter().map(|number| Core::read(root, number)).collect()
}

/// Keeps the big cores, on which a thread saves more time than the others lose by waiting for it: at least half the
/// capacity of the fastest, or at least four fifths of its clock if capacities are unknown. Clocks tell less: a small
/// core of a phone does half as much per cycle, at 0.6 to 0.75 of the clock. Cores of unknown speed, as in most virtual
/// machines, count as big.
fn keep_big(cores: Vec<Core>) -> Vec<Core> {
    let known = cores.iter().all(|c| c.capacity.is_some());
    let (speed, part): (fn(&Core) -> Option<u64>, _) =
        if known { (|c| c.capacity, (1, 2)) } else { (|c| c.clock, (4, 5)) };
    let fastest = cores.iter().filter_map(speed).max().unwrap_or(0);
    let least = fastest.saturating_mul(part.0).div_ceil(part.1);
    cores.into_iter().filter(|c| speed(c).is_none_or(|s| s >= least)).collect()
}

/// Cores this process may run on: allowed by affinity and cpusets, and online.
pub fn allowed_cores() -> Vec<usize> {
    list_allowed(Path::new(ROOT))
}

fn list_allowed(root: &Path) -> Vec<usize> {
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let mut cores = list.map(|l| parse_list(l.trim())).unwrap_or_default();
    // Allowed cores may be offline: phones switch cores off to save power or when they are hot.
    if let Ok(online) = fs::read_to_string(root.join("sys/devices/system/cpu/online")) {
        let online = parse_list(online.trim());
        cores.retain(|core| online.contains(core));
    }
    cores
}

/// Parses a list of cores: `0-3,7` -> 0, 1, 2, 3, 7.
fn parse_list(list: &str) -> Vec<usize> {
    let range = |part: &str| -> Option<std::ops::RangeInclusive<usize>> {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        let (a, b) = (a.parse().ok()?, b.parse().ok()?);
        (b < 1 << 16).then_some(a..=b)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests;
