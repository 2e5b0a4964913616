//! The end of a run of tests: seconds, failures, and a line that sums it up.

use crate::error::Result;
pub use crate::tally::Tally;
use std::time::Duration;

/// Says loudly that something cannot be tested here, and what would change that.
pub fn skip(why: &str, remedy: &str) -> Tally {
    eprintln!("******** SKIPPED: {why}");
    eprintln!("********          {remedy}");
    Tally { skipped: 1, ..Tally::default() }
}

/// How many lines of a part's failures are printed again in the end.
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
        eprintln!("{part} {:.0} s", time.as_secs_f64());
        self.times.push((part.into(), time));
    }

    pub fn failed(&self) -> bool {
        self.total.failed > 0
    }

    /// Seconds of the parts, and of the builds in them that took one or more, the longest first. Builds wait for each
    /// other's locks, and some run beside other parts.
    pub fn times(&self, builds: &[(String, Duration)]) -> String {
        let line = |(name, time): &(String, Duration)| format!("{:>7.0}  {name}\n", time.as_secs_f64());
        let mut builds: Vec<_> = builds.iter().filter(|(_, time)| time.as_secs() > 0).collect();
        builds.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        let parts: String = self.times.iter().map(line).collect();
        let sum = |times: &mut dyn Iterator<Item = &Duration>| times.map(Duration::as_secs_f64).sum::<f64>();
        let all = sum(&mut self.times.iter().map(|(_, time)| time));
        let built = sum(&mut builds.iter().map(|(_, time)| time));
        let builds: String = builds.into_iter().map(line).collect();
        format!("seconds  part\n{parts}{all:>7.0}  all\n\nseconds  build\n{builds}{built:>7.0}  all\n")
    }

    /// The parts that failed with their messages: nobody should have to look for them in all of the output.
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

/// The counts in a [closing line](Report::closing_line).
pub fn parse_closing_line(line: &str) -> Option<Tally> {
    let count = |word: &str| {
        let part = line.split(", ").find_map(|part| part.strip_suffix(word));
        part.map_or(Some(0), |number| number.trim().parse().ok())
    };
    let (passed, failed) = (count("passed")?, count("failed")?);
    line.contains("passed").then_some(Tally {
        passed,
        failed,
        skipped: count("skipped")?,
        messages: Vec::new(),
    })
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
        assert_eq!(parse_closing_line(&report.closing_line()), skipped().ok());
        assert_eq!(parse_closing_line("error: no"), None);
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
