//! Counting tests and saying in the end what happened.

use crate::error::Result;

/// Counts of tests.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
    /// What the failed ones said, in lines.
    pub said: Vec<String>,
}

impl Tally {
    /// A part that is one test and passed.
    pub const ONE: Tally = Tally { passed: 1, failed: 0, skipped: 0, said: Vec::new() };

    /// Counts a promise, and says whether it holds.
    pub fn count(&mut self, promise: &str, outcome: Result<()>) {
        match outcome {
            Ok(()) => {
                eprintln!("holds: {promise}");
                self.passed += 1;
            }
            Err(e) => {
                let broken = format!("broken: {promise}: {e}");
                eprintln!("{broken}");
                self.failed += 1;
                self.said.push(broken);
            }
        }
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.said.extend(other.said);
    }
}

/// Sums up what `cargo test` prints.
#[derive(Default)]
pub struct Reader {
    pub tally: Tally,
    /// Between `failures:` and the result.
    failures: bool,
}

impl Reader {
    pub fn line(&mut self, line: &str) {
        if let Some(tally) = result_line(line) {
            self.failures = false;
            self.tally += tally;
        } else if line == "failures:" {
            self.failures = true;
        } else if self.failures && !line.trim().is_empty() {
            self.tally.said.push(line.chars().take(400).collect());
        }
    }

    /// The sum, where the command ended so. A failure that no line accounts for (a build error, a crash) counts as one.
    pub fn ended(self, ended: Result<()>) -> Tally {
        let mut tally = self.tally;
        if let Err(e) = ended {
            eprintln!("error: {e}");
            tally.failed = tally.failed.max(1);
            tally.said.push(e.to_string());
        }
        tally
    }
}

/// The counts in a line such as
/// `test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
fn result_line(line: &str) -> Option<Tally> {
    let counts = line.trim_start().strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |what: &str| -> Option<u64> {
        let part = counts.split(';').map(str::trim).find_map(|p| p.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    let (passed, failed, skipped) = (count("passed")?, count("failed")?, count("ignored")?);
    Some(Tally { passed, failed, skipped, ..Tally::default() })
}

/// Says loudly that something cannot be tested here, and what would change that.
pub fn skip(why: &str, remedy: &str) -> Tally {
    eprintln!("******** SKIPPED: {why}");
    eprintln!("********          {remedy}");
    Tally { skipped: 1, ..Tally::default() }
}

/// How many lines of a part's failures are said again in the end.
const SAID: usize = 60;

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
            let said = e.to_string().lines().map(String::from).collect();
            Tally { failed: 1, said, ..Tally::default() }
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
            let said = std::mem::take(&mut tally.said);
            self.failed_parts.extend(said.iter().take(SAID).map(|line| format!("    {line}")));
        }
        self.total += tally;
    }

    pub fn failed(&self) -> bool {
        self.total.failed > 0
    }

    /// Which parts failed and what they said: nobody should have to look for it in all of the output.
    pub fn failures(&self) -> String {
        if self.failed_parts.is_empty() {
            return "no part failed".into();
        }
        format!("failed parts:\n{}", self.failed_parts.join("\n"))
    }

    /// `12 passed, 0 failed`, and `, 1 skipped` if anything was.
    pub fn closing_line(&self) -> String {
        let Tally { passed, failed, skipped, .. } = self.total;
        let skipped = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
        format!("{passed} passed, {failed} failed{skipped}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn tally(passed: u64, failed: u64, skipped: u64) -> Tally {
        Tally { passed, failed, skipped, said: Vec::new() }
    }

    #[test]
    fn what_failed_tests_say_is_kept() {
        let output = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\n\
            thread 'b' panicked at c.rs:1:2:\nno\n\n\nfailures:\n    b\n\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s\n\
            running 0 tests\n";
        let mut reader = Reader::default();
        output.lines().for_each(|line| reader.line(line));
        let said = ["---- b stdout ----", "thread 'b' panicked at c.rs:1:2:", "no", "    b"];
        assert_eq!(reader.tally, Tally { said: said.map(String::from).into(), ..tally(1, 1, 0) });
    }

    #[test]
    fn result_lines_are_counted() {
        let line =
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s";
        assert_eq!(result_line(line), Some(tally(12, 0, 1)));
        let line = "test result: FAILED. 7 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.25s";
        assert_eq!(result_line(line), Some(tally(7, 2, 0)));
        for line in
            ["test a::b ... ok", "running 3 tests", "", "test result: odd", "x test result: ok. 1 passed"]
        {
            assert_eq!(result_line(line), None, "{line}");
        }
    }

    #[test]
    fn the_closing_line_mentions_what_was_skipped() {
        let mut report = Report::new(false);
        report.add("a", Ok(tally(11, 0, 0)));
        assert_eq!(report.closing_line(), "11 passed, 0 failed");
        report.add("b", Ok(tally(1, 0, 1)));
        assert_eq!(report.closing_line(), "12 passed, 0 failed, 1 skipped");
        assert!(!report.failed());
    }

    #[test]
    fn failures_are_listed() {
        let mut report = Report::new(false);
        report.add("a", Ok(Tally::ONE));
        report.add("b", Err(Error::Failed("no".into())));
        assert!(report.failed());
        assert_eq!(report.failures(), "failed parts:\n  b: 1 failed\n    no");
        assert_eq!(report.closing_line(), "1 passed, 1 failed");
    }

    #[test]
    fn a_skip_is_a_failure_when_nothing_may_be_skipped() {
        let mut report = Report::new(true);
        report.add("a", Ok(tally(1, 0, 1)));
        assert!(report.failed());
        assert_eq!(report.closing_line(), "1 passed, 1 failed");
    }
}
