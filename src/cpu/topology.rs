//! How many threads to start, and where: one on each big core this process may use.

use std::fs;

/// A core as the kernel numbers them; with hyper-threads, one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Core {
    number: usize,
    /// Relative speed: the kernel's capacity (1024 is the fastest of the system), else its highest clock.
    /// `None` where neither is told, as in most virtual machines.
    speed: Option<u64>,
    /// The hyper-threads it shares its arithmetic and caches with, itself included.
    siblings: String,
}

impl Core {
    fn read(number: usize) -> Self {
        let base = format!("/sys/devices/system/cpu/cpu{number}");
        let text = |file: &str| Some(fs::read_to_string(format!("{base}/{file}")).ok()?.trim().to_string());
        let speed =
            ["cpu_capacity", "cpufreq/cpuinfo_max_freq"].iter().find_map(|file| text(file)?.parse().ok());
        let siblings = text("topology/thread_siblings_list").unwrap_or_else(|| number.to_string());
        Self { number, speed, siblings }
    }
}

/// The cores that are not much slower than the fastest, one hyper-thread of each, among those that affinity
/// and the container's CPU quota allow; at least one.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut big: Vec<String> = big(cores()).into_iter().map(|core| core.siblings).collect();
    // Two hyper-threads share the units that all kernels are bound by.
    big.sort_unstable();
    big.dedup();
    if big.is_empty() { allowed } else { big.len().min(allowed) }
}

/// The cores that threads should keep to: the big ones, where there are others and they are enough for
/// `threads`.
pub fn placement(threads: usize) -> Option<Vec<usize>> {
    let all = cores();
    let big = big(all.clone());
    (big.len() < all.len() && threads <= big.len()).then(|| big.into_iter().map(|c| c.number).collect())
}

fn cores() -> Vec<Core> {
    allowed_cores().into_iter().map(Core::read).collect()
}

/// Those of at least half the speed of the fastest: a thread on a slower one costs more in waiting than it
/// brings. Cores of unknown speed count as fast.
fn big(cores: Vec<Core>) -> Vec<Core> {
    let fastest = cores.iter().filter_map(|c| c.speed).max().unwrap_or(0);
    cores.into_iter().filter(|c| c.speed.is_none_or(|s| 2 * s >= fastest)).collect()
}

/// Cores this process may run on.
pub fn allowed_cores() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.map(|l| parse_list(l.trim())).unwrap_or_default()
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
mod tests {
    use super::Core;

    #[test]
    fn big_cores() {
        let core = |number, speed| Core { number, speed, siblings: number.to_string() };
        // A phone: four small, three big, one largest.
        let phone: Vec<Core> = [250, 250, 250, 250, 760, 760, 760, 1024]
            .iter()
            .enumerate()
            .map(|(i, &s)| core(i, Some(s)))
            .collect();
        let numbers: Vec<usize> = super::big(phone).iter().map(|c| c.number).collect();
        assert_eq!(numbers, [4, 5, 6, 7]);
        let unknown = vec![core(0, None), core(1, None)];
        assert_eq!(super::big(unknown.clone()), unknown);
    }

    #[test]
    fn core_lists() {
        assert_eq!(super::parse_list("0-3,7"), [0, 1, 2, 3, 7]);
        assert_eq!(super::parse_list("5"), [5]);
        assert_eq!(super::parse_list(""), [0usize; 0]);
        assert_eq!(super::parse_list("x,2-1,0-99999999999"), [0usize; 0]);
        assert!(super::default_threads() >= 1);
    }
}
