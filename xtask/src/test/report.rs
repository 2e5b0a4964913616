//! Counting tests and saying in the end what happened.

use crate::error::Result;

/// Counts of tests.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
}

impl Tally {
    /// A part that is one test and passed.
    pub const ONE: Tally = Tally { passed: 1, failed: 0, skipped: 0 };
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// The counts in a line such as
/// `test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
pub fn result_line(line: &str) -> Option<Tally> {
    let counts = line.trim_start().strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |what: &str| -> Option<u64> {
        let part = counts.split(';').map(str::trim).find_map(|p| p.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    Some(Tally { passed: count("passed")?, failed: count("failed")?, skipped: count("ignored")? })
}

/// Says loudly that something cannot be tested here, and what would change that.
pub fn skip(why: &str, remedy: &str) -> Tally {
    eprintln!("******** SKIPPED: {why}");
    eprintln!("********          {remedy}");
    Tally { skipped: 1, ..Tally::default() }
}

/// Results of the parts so far.
pub struct Report {
    /// Nothing may be skipped.
    strict: bool,
    total: Tally,
    failed_parts: Vec<String>,
}

impl Report {
    pub fn new(strict: bool) -> Report {
        Report { strict, total: Tally::default(), failed_parts: Vec::new() }
    }

    pub fn add(&mut self, part: &str, outcome: Result<Tally>) {
        let mut tally = outcome.unwrap_or_else(|e| {
            eprintln!("error: {e}");
            Tally { failed: 1, ..Tally::default() }
        });
        let mut why = Vec::new();
        if tally.failed > 0 {
            why.push(format!("{} failed", tally.failed));
        }
        if self.strict && tally.skipped > 0 {
            why.push(format!("{} skipped, which CI=true does not allow", tally.skipped));
            tally.failed += std::mem::take(&mut tally.skipped);
        }
        if !why.is_empty() {
            self.failed_parts.push(format!("  {part}: {}", why.join(", ")));
        }
        self.total += tally;
    }

    pub fn failed(&self) -> bool {
        self.total.failed > 0
    }

    /// Which parts failed, a line each.
    pub fn failures(&self) -> String {
        if self.failed_parts.is_empty() {
            return "no part failed".into();
        }
        format!("failed parts:\n{}", self.failed_parts.join("\n"))
    }

    /// `12 passed, 0 failed`, and `, 1 skipped` if anything was.
    pub fn closing_line(&self) -> String {
        let Tally { passed, failed, skipped } = self.total;
        let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
        format!("{passed} passed, {failed} failed{skipped}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn result_lines_are_counted() {
        let line =
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s";
        assert_eq!(result_line(line), Some(Tally { passed: 12, failed: 0, skipped: 1 }));
        let line = "test result: FAILED. 7 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.25s";
        assert_eq!(result_line(line), Some(Tally { passed: 7, failed: 2, skipped: 0 }));
        for line in
            ["test a::b ... ok", "running 3 tests", "", "test result: odd", "x test result: ok. 1 passed"]
        {
            assert_eq!(result_line(line), None, "{line}");
        }
    }

    #[test]
    fn the_closing_line_mentions_what_was_skipped() {
        let mut report = Report::new(false);
        report.add("a", Ok(Tally { passed: 11, failed: 0, skipped: 0 }));
        assert_eq!(report.closing_line(), "11 passed, 0 failed");
        report.add("b", Ok(Tally { passed: 1, failed: 0, skipped: 1 }));
        assert_eq!(report.closing_line(), "12 passed, 0 failed, 1 skipped");
        assert!(!report.failed());
    }

    #[test]
    fn failures_are_listed() {
        let mut report = Report::new(false);
        report.add("a", Ok(Tally::ONE));
        report.add("b", Err(Error::Failed("no".into())));
        assert!(report.failed());
        assert_eq!(report.failures(), "failed parts:\n  b: 1 failed");
        assert_eq!(report.closing_line(), "1 passed, 1 failed");
    }

    #[test]
    fn a_skip_is_a_failure_when_nothing_may_be_skipped() {
        let mut report = Report::new(true);
        report.add("a", Ok(Tally { passed: 1, failed: 0, skipped: 1 }));
        assert!(report.failed());
        assert_eq!(report.closing_line(), "1 passed, 1 failed");
    }
}
