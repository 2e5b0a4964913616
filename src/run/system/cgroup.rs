//! Limits of this process's control group, versions 1 and 2: memory and processor time.
//!
//! Any ancestor of the group may have a limit, so all are read. In a container, `/proc/self/cgroup` may have the host's
//! path, which does not exist inside. Then the mount's root, which is among the ancestors, has the limit.

use super::read_file;

/// A memory limit and the rest of it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The limit.
    pub limit: u64,
    /// Limit minus usage. Cached file contents do not count as used, since they can be dropped.
    pub left: u64,
}

/// Smallest value that means "no limit" in version 1.
const NO_LIMIT: u64 = 1 << 60;

/// Path of this process's group in `/proc/self/cgroup` for a controller of version 1, or for version 2 if `controller`
/// is empty.
fn group_path<'a>(text: &'a str, controller: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let ours = controllers.split(',').any(|c| c == controller);
        (ours && path.starts_with('/')).then_some(path)
    })
}

/// The group and its ancestors, the root last, without trailing slashes.
fn ancestor_groups(path: &str) -> Vec<&str> {
    // A path with `..` is outside what this process can see.
    let mut rest = if path.split('/').any(|p| p == "..") { "" } else { path.trim_end_matches('/') };
    let mut all = vec![rest];
    while let Some(cut) = rest.rfind('/') {
        rest = &rest[..cut];
        all.push(rest);
    }
    all
}

/// The limit of one group, from the texts of its limit, its usage and `memory.stat`.
fn group_limit(limit: &str, usage: &str, stat: &str) -> Option<MemoryLimit> {
    let limit: u64 = limit.trim().parse().ok()?;
    if limit >= NO_LIMIT {
        return None;
    }
    let usage: u64 = usage.trim().parse().ok()?;
    // In version 1, totals over the descendants have another name.
    let field = |names: [&str; 2]| names.iter().find_map(|name| stat_value(stat, name)).unwrap_or(0);
    let cache = field(["total_inactive_file", "inactive_file"])
        .saturating_add(field(["total_active_file", "active_file"]));
    Some(MemoryLimit { limit, left: limit.saturating_sub(usage.saturating_sub(cache)) })
}

/// The tightest memory limit of any ancestor.
pub fn memory_limit() -> Option<MemoryLimit> {
    let groups = read_file("/proc/self/cgroup")?;
    let places = [
        ("", "/sys/fs/cgroup", ["memory.max", "memory.current"]),
        ("", "/sys/fs/cgroup/unified", ["memory.max", "memory.current"]),
        ("memory", "/sys/fs/cgroup/memory", ["memory.limit_in_bytes", "memory.usage_in_bytes"]),
    ];
    let limits = places.iter().flat_map(|(controller, root, [limit, usage])| {
        let path = group_path(&groups, controller).unwrap_or("/");
        ancestor_groups(path).into_iter().filter_map(move |group| {
            let file = |name: &str| read_file(&format!("{root}{group}/{name}"));
            group_limit(&file(limit)?, &file(usage)?, &file("memory.stat").unwrap_or_default())
        })
    });
    limits.min_by_key(|l| l.left)
}

/// The number in a line `key 123`.
fn stat_value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// The number of cores' worth of time in version 2's `cpu.max` (`200000 100000`, or `max 100000`).
fn quota_v2(text: &str) -> Option<f64> {
    let mut words = text.split_whitespace();
    cpu_share(words.next()?.parse().ok()?, words.next()?.parse().ok()?)
}

/// Quota over period; in version 1 a negative quota means "no limit".
fn cpu_share(quota: i64, period: i64) -> Option<f64> {
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

/// The smallest number of cores' worth of time that any ancestor allows.
pub fn cpu_quota() -> Option<f64> {
    let groups = read_file("/proc/self/cgroup")?;
    let v2 = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].into_iter().flat_map(|root| {
        let path = group_path(&groups, "").unwrap_or("/");
        ancestor_groups(path)
            .into_iter()
            .filter_map(move |g| quota_v2(&read_file(&format!("{root}{g}/cpu.max"))?))
    });
    let path = group_path(&groups, "cpu").unwrap_or("/");
    let v1 = ancestor_groups(path).into_iter().filter_map(|g| {
        let number = |name: &str| read_file(&format!("/sys/fs/cgroup/cpu{g}/{name}"))?.trim().parse().ok();
        cpu_share(number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?)
    });
    v2.chain(v1).min_by(f64::total_cmp)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_found_in_both_versions() {
        let text = "4:memory:/a/b\n3:cpu,cpuacct:/c\n1:name=systemd:/\n0::/x\nbroken\n7:\n";
        assert_eq!(group_path(text, "memory"), Some("/a/b"));
        assert_eq!(group_path(text, "cpu"), Some("/c"));
        assert_eq!(group_path(text, ""), Some("/x"));
        assert_eq!(group_path(text, "pids"), None);
        assert_eq!(group_path("0::relative", ""), None);
    }

    #[test]
    fn ancestors_end_with_the_root() {
        assert_eq!(ancestor_groups("/a/b"), ["/a/b", "/a", ""]);
        assert_eq!(ancestor_groups("/"), [""]);
        assert_eq!(ancestor_groups("/../../host"), [""]);
    }

    #[test]
    fn file_cache_does_not_count_as_used() {
        let v2 = "anon 500\nfile 300\ninactive_file 200\nactive_file 100\n";
        let limit = |limit, left| Some(MemoryLimit { limit, left });
        assert_eq!(group_limit("1000\n", "800\n", v2), limit(1000, 500));
        let v1 = "inactive_file 1\nactive_file 1\ntotal_inactive_file 200\ntotal_active_file 50\n";
        assert_eq!(group_limit("1000", "800", v1), limit(1000, 450));
        assert_eq!(group_limit("1000", "2000", ""), limit(1000, 0));
        assert_eq!(group_limit("1000", "10", "inactive_file 99\nactive_file x"), limit(1000, 1000));
        assert_eq!(group_limit("max\n", "800", v2), None);
        assert_eq!(group_limit("9223372036854771712", "800", v2), None);
        assert_eq!(group_limit("", "", ""), None);
    }

    #[test]
    fn quotas_are_cores_worth_of_time() {
        assert_eq!(quota_v2("150000 100000\n"), Some(1.5));
        assert_eq!(quota_v2("max 100000\n"), None);
        assert_eq!(quota_v2("5"), None);
        assert_eq!(cpu_share(-1, 100_000), None);
        assert_eq!(cpu_share(100, 0), None);
    }
}
