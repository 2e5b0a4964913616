//! The end of a test run: seconds, failures, and a line of counts.

use crate::error::Result;
pub use crate::tally::Tally;
use std::time::Duration;

/// [`skip`] for a thing that is not installed, with the command that installs it.
pub fn skip_missing((what, remedy): (&str, &str)) -> Tally {
    skip(&format!("{what} is missing"), &format!("install it with: {remedy}"))
}

/// Prints that something cannot be tested here, and the remedy.
pub fn skip(why: &str, remedy: &str) -> Tally {
    eprintln!("******** SKIPPED: {why}");
    eprintln!("********          {remedy}");
    Tally { skipped: 1, ..Tally::default() }
}

/// Lines of a part's failures that are printed again at the end.
const MESSAGES: usize = 60;

/// Results of the parts so far.
pub struct Report {
    /// Nothing may be skipped.
    strict: bool,
    total: Tally,
    failures: Vec<String>,
    times: Vec<(String, Duration)>,
}

impl Report {
    pub fn new(strict: bool) -> Report {
        Report { strict, total: Tally::default(), failures: Vec::new(), times: Vec::new() }
    }

    pub fn add(&mut self, part: &str, outcome: Result<Tally>, time: Duration) {
        let mut tally = outcome.unwrap_or_else(|e| {
            eprintln!("error: {e}");
            let messages = e.to_string().lines().map(String::from).collect();
            Tally { failed: 1, messages, ..Tally::default() }
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
            self.failures.push(format!("  {part}: {}", why.join(", ")));
            let messages = std::mem::take(&mut tally.messages);
            self.failures.extend(messages.iter().take(MESSAGES).map(|line| format!("    {line}")));
        }
        self.total += tally;
        self.times.push((part.into(), time));
        let sum: Duration = self.times.iter().map(|(_, time)| *time).sum();
        eprintln!("{part} {:.0} s, all so far {:.0} s", time.as_secs_f64(), sum.as_secs_f64());
    }

    pub fn failed(&self) -> bool {
        self.total.failed > 0
    }

    /// Seconds of each part, and of builds that took a second or more, longest first. Builds may wait for cargo's lock,
    /// and some run during other parts.
    pub fn times(&self, builds: &[(String, Duration)]) -> String {
        let table = |title: &str, times: &[(String, Duration)]| {
            let line = |(name, time): &(String, Duration)| format!("{:>7.0}  {name}\n", time.as_secs_f64());
            let lines: String = times.iter().map(line).collect();
            let sum: Duration = times.iter().map(|(_, time)| time).sum();
            format!("seconds  {title}\n{lines}{:>7.0}  all\n", sum.as_secs_f64())
        };
        let mut builds: Vec<_> = builds.iter().filter(|(_, time)| time.as_secs() > 0).cloned().collect();
        builds.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        format!("{}\n{}", table("part", &self.times), table("build", &builds))
    }

    /// The parts that failed, with their messages, so that they need not be searched in the output.
    pub fn failures(&self) -> String {
        if self.failures.is_empty() {
            return "no part failed".into();
        }
        format!("failed parts:\n{}", self.failures.join("\n"))
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

    #[test]
    fn a_report_sums_up_and_a_skip_fails_where_nothing_may_be_skipped() {
        let skipped = || Ok(Tally { passed: 11, skipped: 1, ..Tally::default() });
        let mut report = Report::new(false);
        report.add("a", skipped(), Duration::from_secs(2));
        assert!(!report.failed() && report.closing_line() == "11 passed, 0 failed, 1 skipped");
        report.add("b", Err(Error::Failed("no".into())), Duration::from_secs(3));
        assert_eq!(report.failures(), "failed parts:\n  b: 1 failed\n    no");
        let builds = [("x".to_string(), Duration::from_secs(1)), ("y".into(), Duration::from_secs(9))];
        let times = report.times(&builds);
        assert!(
            times.contains("      2  a\n      3  b\n      5  all\n")
                && times.ends_with("      9  y\n      1  x\n     10  all\n"),
            "{times}"
        );
        let mut report = Report::new(true);
        report.add("a", skipped(), Duration::ZERO);
        assert!(report.failed() && report.closing_line() == "11 passed, 1 failed");
    }
}
