//! Facts about the machine and its limits: processor, kernel, memory, container.
//!
//! Everything is read from text files under `/proc` and `/sys`. Any of them may be missing or unusual (on phones many
//! are), so every answer is optional. The parsers are pure functions of the text.

pub mod cgroup;

use files::{Error, Result};
use rustix::process::{Resource, getrlimit};
use std::fs;
use std::path::PathBuf;

/// Environment variable that replaces the system's available memory in every plan.
const MEMORY_VARIABLE: &str = "ANTIGRAVITY_MEMORY_MIB";

/// Percentage of the last ten seconds in which all tasks waited for memory, from which on memory counts as low on
/// Android. (The low-memory killer starts at 7: 70 ms in a second.) On other systems the file may cover other
/// containers too.
const STALLED: f64 = 5.0;

/// Reads a system file; `None` if it cannot be read.
pub fn read_file(path: &str) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// Bytes in a line `key:  123 kB` of `/proc/meminfo` or `/proc/self/status`.
pub fn kb_field(text: &str, key: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    let mut words = rest.split_whitespace();
    let number: u64 = words.next()?.parse().ok()?;
    match words.next() {
        Some("kB") => number.checked_mul(1024),
        None => Some(number),
        Some(_) => None,
    }
}

/// Processor name in `/proc/cpuinfo`: `model name` on x86, `Hardware` on older Android, otherwise the implementer
/// and part of the fastest kind of Arm core.
pub fn cpu_name(cpuinfo: &str) -> Option<String> {
    let value = |key: &str| {
        cpuinfo.lines().rev().find_map(|line| {
            let (k, v) = line.split_once(':')?;
            (k.trim() == key && !v.trim().is_empty()).then(|| v.trim().to_string())
        })
    };
    value("model name").or_else(|| value("Hardware")).or_else(|| {
        let (implementer, part) = (value("CPU implementer")?, value("CPU part")?);
        Some(format!("Arm implementer {implementer} part {part}"))
    })
}

/// [`cpu_name`] of this machine.
pub fn this_cpu() -> String {
    read_file("/proc/cpuinfo").and_then(|t| cpu_name(&t)).unwrap_or_else(|| std::env::consts::ARCH.into())
}

/// Name and release of the running kernel.
pub fn kernel_name() -> String {
    let part = |file| read_file(file).map(|t| t.trim().to_string());
    let name = part("/proc/sys/kernel/ostype").unwrap_or_else(|| std::env::consts::OS.into());
    part("/proc/sys/kernel/osrelease").map_or(name.clone(), |release| format!("{name} {release}"))
}

/// Peak resident memory of this process so far (`VmHWM`), in bytes.
pub fn peak_rss() -> Option<u64> {
    kb_field(&read_file("/proc/self/status")?, "VmHWM")
}

/// Directory for the user's state; on Android the program's own directory; `None` if there is none.
pub fn state_directory() -> Option<PathBuf> {
    if cfg!(target_os = "android") {
        return Some(std::env::current_exe().ok()?.parent()?.into());
    }
    let path = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let state = path("XDG_STATE_HOME").or_else(|| Some(path("HOME")?.join(".local/state")));
    state.map(|dir| dir.join("antigravity"))
}

/// Memory of the machine and of the container, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// The machine's memory.
    pub total: Option<u64>,
    /// The kernel's estimate of what can be allocated without swapping.
    pub available: Option<u64>,
    /// The container's limit.
    pub limit: Option<u64>,
    /// Bytes left of the container's limit; file cache counts as free.
    pub limit_left: Option<u64>,
    /// Bytes left of the process's limits.
    pub process: ProcessLimits,
}

/// Bytes left of this process's limits; `None` if there is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessLimits {
    /// Left of `ulimit -v`, which counts everything that is mapped.
    pub address_space: Option<u64>,
    /// Left of `ulimit -d`, which counts writable mappings, thread stacks included.
    pub data: Option<u64>,
}

impl ProcessLimits {
    /// Reads the current values.
    fn current() -> Self {
        let status = read_file("/proc/self/status").unwrap_or_default();
        let left = |resource, used: &str| {
            let limit = getrlimit(resource).current?;
            Some(limit.saturating_sub(kb_field(&status, used).unwrap_or(0)))
        };
        Self { address_space: left(Resource::As, "VmSize"), data: left(Resource::Data, "VmData") }
    }
}

/// Bytes of this program's file that its loader has mapped.
pub fn program_bytes() -> Option<u64> {
    let program = std::env::current_exe().ok()?;
    mapped_bytes(&read_file("/proc/self/maps")?, program.to_str()?)
}

/// Bytes of a file in the text of `/proc/self/maps`, without shared mappings: these are a bundle's model, which is
/// counted separately.
fn mapped_bytes(maps: &str, file: &str) -> Option<u64> {
    let bytes = |line: &str| {
        let mut words = line.strip_suffix(file)?.split_whitespace();
        let (from, to) = words.next()?.split_once('-')?;
        words.next().filter(|rights| rights.ends_with('p'))?;
        u64::from_str_radix(to, 16).ok()?.checked_sub(u64::from_str_radix(from, 16).ok()?)
    };
    let all: u64 = maps.lines().filter_map(bytes).sum();
    (all > 0).then_some(all)
}

impl Memory {
    /// Reads the current values of the machine.
    pub fn current() -> Self {
        let info = read_file("/proc/meminfo").unwrap_or_default();
        let limit = cgroup::memory_limit();
        Self {
            total: kb_field(&info, "MemTotal"),
            available: kb_field(&info, "MemAvailable"),
            limit: limit.map(|l| l.limit),
            limit_left: limit.map(|l| l.left),
            process: ProcessLimits::current(),
        }
    }

    /// [`Memory::current`], or the available memory given in `ANTIGRAVITY_MEMORY_MIB`: to plan for another machine, or
    /// to leave memory to other programs.
    ///
    /// # Errors
    ///
    /// `Usage`: the variable is not a number.
    pub fn for_planning() -> Result<Self> {
        match std::env::var_os(MEMORY_VARIABLE) {
            None => Ok(Self::current()),
            // The limits of the process still apply.
            Some(value) => {
                Ok(Self { process: ProcessLimits::current(), ..Self::from_mib(&value.to_string_lossy())? })
            }
        }
    }

    fn from_mib(value: &str) -> Result<Self> {
        let bytes = value.parse::<u64>().ok().and_then(|mib| mib.checked_mul(1 << 20));
        let available = bytes.ok_or_else(|| {
            Error::Usage(format!(
                "{MEMORY_VARIABLE}={value}: give the available memory in MiB, a whole number"
            ))
        })?;
        Ok(Self { available: Some(available), ..Self::default() })
    }

    /// Bytes that this process may use; `None` if nothing is known.
    pub fn usable_bytes(&self) -> Option<u64> {
        match (self.available, self.limit_left) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }
}

/// True if the system (or the container) has less than `threshold` bytes available, or spends its time waiting for
/// memory. Unknown counts as enough.
pub fn memory_is_low(threshold: u64) -> bool {
    let memory = Memory::for_planning().unwrap_or_default();
    memory.usable_bytes().is_some_and(|bytes| bytes < threshold)
        || cfg!(target_os = "android")
            && read_file("/proc/pressure/memory")
                .and_then(|t| full_avg10(&t))
                .is_some_and(|percent| percent >= STALLED)
}

/// `full avg10` of a pressure file: <https://docs.kernel.org/accounting/psi.html>.
fn full_avg10(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|l| l.strip_prefix("full "))?;
    line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kilobyte_fields_become_bytes() {
        let info = "MemTotal:       24684084 kB\nMemAvailable:\t 10 kB\nHugePages_Total:       3\nX: y kB\n";
        assert_eq!(kb_field(info, "MemTotal"), Some(24684084 << 10));
        assert_eq!(kb_field(info, "MemAvailable"), Some(10 << 10));
        assert_eq!(kb_field(info, "HugePages_Total"), Some(3));
        assert_eq!(kb_field(info, "Mem"), None);
        assert_eq!(kb_field(info, "X"), None);
        assert_eq!(kb_field("A: 18446744073709551615 kB", "A"), None);
        assert_eq!(kb_field("A: 5 MB", "A"), None);
        assert_eq!(kb_field("", "A"), None);
    }

    #[test]
    fn processors_have_names_on_x86_and_arm() {
        assert_eq!(cpu_name("processor\t: 0\nmodel name\t: AMD EPYC\n").as_deref(), Some("AMD EPYC"));
        let arm =
            "CPU implementer\t: 0x41\nCPU part\t: 0xd05\n\nCPU implementer\t: 0x41\nCPU part\t: 0xd44\n";
        assert_eq!(cpu_name(arm).as_deref(), Some("Arm implementer 0x41 part 0xd44"));
        let phone = format!("{arm}Hardware\t: Qualcomm SM8550\n");
        assert_eq!(cpu_name(&phone).as_deref(), Some("Qualcomm SM8550"));
        assert_eq!(cpu_name("nonsense\n:\nmodel name :\n"), None);
    }

    #[test]
    fn stated_memory_is_a_whole_number_of_mib() {
        assert_eq!(Memory::from_mib("900").map(|m| m.usable_bytes()), Ok(Some(900 << 20)));
        for bad in ["", "x", "-1", "1.5", "99999999999999999"] {
            let said = Memory::from_mib(bad).expect_err("no number").to_string();
            assert!(said.starts_with(&format!("ANTIGRAVITY_MEMORY_MIB={bad}: ")), "{said}");
        }
    }

    #[test]
    fn a_program_is_as_large_as_its_mappings() {
        let maps = "5500-5700 r--p 00000000 08:01 1 /bin/program\n5700-6700 r-xp 00000200 08:01 1 /bin/program\n\
                    7f00-7f10 rw-p 00000000 00:00 0\n8000-9000 r--p 00000000 08:01 2 /lib/libc.so\n";
        assert_eq!(mapped_bytes(maps, "/bin/program"), Some(0x1200));
        assert_eq!(mapped_bytes(maps, "/bin/other"), None);
        assert!(program_bytes().is_none_or(|bytes| bytes > 100_000));
    }

    #[test]
    fn the_smaller_of_two_limits_counts() {
        let m = |available, limit_left| Memory { available, limit_left, ..Memory::default() };
        assert_eq!(m(Some(5), Some(3)).usable_bytes(), Some(3));
        assert_eq!(m(Some(5), None).usable_bytes(), Some(5));
        assert_eq!(m(None, Some(3)).usable_bytes(), Some(3));
        assert_eq!(m(None, None).usable_bytes(), None);
    }

    #[test]
    fn pressure_is_read_from_the_full_line() {
        let text = "some avg10=9.00 avg60=1.00 avg300=0.10 total=1\nfull avg10=5.25 avg60=0.00 avg300=0.00 total=2\n";
        assert_eq!(full_avg10(text), Some(5.25));
        for text in ["", "some avg10=9.00", "full avg60=1.0", "full avg10=x"] {
            assert_eq!(full_avg10(text), None, "{text}");
        }
    }

    #[test]
    fn memory_is_low_below_the_threshold() {
        assert!(memory_is_low(u64::MAX) || Memory::current().usable_bytes().is_none());
    }
}
