//! How many threads to start, and where: one on each big core that this process may use, or on the cores of a mask.

mod mask;

pub use mask::{CpuMask, ranges};

use std::fs;
use std::path::Path;

/// The root of the system's files; tests have their own tree.
const ROOT: &str = "/";

/// A core, as the kernel numbers them. Each hyper-thread counts as one.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Core {
    number: usize,
    /// Its speed as the kernel's scheduler knows it: 1024 is the fastest core of the system.
    capacity: Option<u64>,
    /// Highest clock, in kHz.
    clock: Option<u64>,
    /// The hyper-threads that share its arithmetic units and caches, itself included.
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

/// The number of cores that are not much slower than the fastest, one hyper-thread of each, as far as affinity and the
/// container's CPU quota allow; at least one.
pub fn default_threads() -> usize {
    let quota = std::thread::available_parallelism().map_or(1, |n| n.get());
    big_threads(cores(Path::new(ROOT))).map_or(quota, |n| n.min(quota))
}

/// The number of big cores. Hyper-threads of one core count once, because they share the units that limit all kernels.
fn big_threads(cores: Vec<Core>) -> Option<usize> {
    let mut big: Vec<String> = big(cores).into_iter().map(|core| core.siblings).collect();
    big.sort_unstable();
    big.dedup();
    (!big.is_empty()).then_some(big.len())
}

/// The cores that threads should keep to: the big ones, if there are others and the big ones are enough for `threads`.
pub fn placement(threads: usize) -> Option<Vec<usize>> {
    place(cores(Path::new(ROOT)), threads)
}

fn place(all: Vec<Core>, threads: usize) -> Option<Vec<usize>> {
    let big = big(all.clone());
    (big.len() < all.len() && threads <= big.len()).then(|| big.into_iter().map(|c| c.number).collect())
}

/// The big cores among those this process may run on.
pub fn big_cores() -> Vec<usize> {
    big(cores(Path::new(ROOT))).into_iter().map(|c| c.number).collect()
}

fn cores(root: &Path) -> Vec<Core> {
    available(root).into_iter().map(|number| Core::read(root, number)).collect()
}

/// Those on which a thread brings more than it costs the others in waiting: of at least half the capacity of the
/// fastest, or of at least four fifths of its clock where capacities are not told. Clocks say less: a small core
/// of a phone does half as much in a cycle, at 0.6 to 0.75 of the clock. Cores of unknown speed, as those of most
/// virtual machines, count as fast.
fn big(cores: Vec<Core>) -> Vec<Core> {
    let told = cores.iter().all(|c| c.capacity.is_some());
    let (speed, part): (fn(&Core) -> Option<u64>, _) =
        if told { (|c| c.capacity, (1, 2)) } else { (|c| c.clock, (4, 5)) };
    let fastest = cores.iter().filter_map(speed).max().unwrap_or(0);
    let least = fastest.saturating_mul(part.0).div_ceil(part.1);
    cores.into_iter().filter(|c| speed(c).is_none_or(|s| s >= least)).collect()
}

/// Cores this process may run on: those that affinity and cpusets allow it and that are switched on.
pub fn allowed_cores() -> Vec<usize> {
    available(Path::new(ROOT))
}

fn available(root: &Path) -> Vec<usize> {
    let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let mut cores = list.map(|l| parse_list(l.trim())).unwrap_or_default();
    // What is allowed may be switched off, as phones do with cores to save power or when they are hot.
    if let Ok(online) = fs::read_to_string(root.join("sys/devices/system/cpu/online")) {
        let online = parse_list(online.trim());
        cores.retain(|core| online.contains(core));
    }
    cores
}

/// `0-3,7` -> 0, 1, 2, 3, 7.
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
