//! How many threads to start: the big cores this process may use.

use std::fs;

/// The cores that are not much slower than the fastest, among those that affinity and the container's CPU
/// quota allow; at least one.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, |n| n.get());
    let speeds: Vec<u64> = allowed_cores().into_iter().filter_map(speed).collect();
    let fastest = speeds.iter().copied().max().unwrap_or(0);
    // A thread on a core of less than half the speed costs more in waiting than it brings.
    let big = speeds.iter().filter(|&&s| 2 * s >= fastest).count();
    if big == 0 { allowed } else { big.min(allowed) }
}

/// Relative speed of a core: the kernel's capacity (1024 is the fastest of the system), else its highest
/// clock. `None` where neither is told, as in most virtual machines.
fn speed(core: usize) -> Option<u64> {
    let base = format!("/sys/devices/system/cpu/cpu{core}");
    ["cpu_capacity", "cpufreq/cpuinfo_max_freq"]
        .iter()
        .find_map(|file| fs::read_to_string(format!("{base}/{file}")).ok()?.trim().parse().ok())
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
    #[test]
    fn core_lists() {
        assert_eq!(super::parse_list("0-3,7"), [0, 1, 2, 3, 7]);
        assert_eq!(super::parse_list("5"), [5]);
        assert_eq!(super::parse_list(""), [0usize; 0]);
        assert_eq!(super::parse_list("x,2-1,0-99999999999"), [0usize; 0]);
        assert!(super::default_threads() >= 1);
    }
}
