//! Whether memory is low right now.

use super::Memory;
use super::text_file::read;

/// Memory counts as low on Android if all tasks waited for it in this share of the last ten seconds, in percent. (The
/// low-memory killer starts at 7: 70 ms in a second.) On other systems the file may cover other containers too.
const STALLED: f64 = 5.0;

/// Whether the system (or the container) has less than `threshold` bytes available, or spends its time waiting for
/// memory. Unknown counts as enough.
pub fn memory_is_low(threshold: u64) -> bool {
    let memory = Memory::to_plan_with().unwrap_or_default();
    memory.usable().is_some_and(|bytes| bytes < threshold)
        || cfg!(target_os = "android")
            && read("/proc/pressure/memory")
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
    fn pressure_is_read_from_the_full_line() {
        let text = "some avg10=9.00 avg60=1.00 avg300=0.10 total=1\nfull avg10=5.25 avg60=0.00 avg300=0.00 total=2\n";
        assert_eq!(full_avg10(text), Some(5.25));
        for text in ["", "some avg10=9.00", "full avg60=1.0", "full avg10=x"] {
            assert_eq!(full_avg10(text), None, "{text}");
        }
    }

    #[test]
    fn memory_is_low_below_the_threshold() {
        assert!(memory_is_low(u64::MAX) || Memory::now().usable().is_none());
    }
}
