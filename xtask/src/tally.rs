//! Counts of checks that passed, failed and were skipped.

use crate::error::Result;

#[derive(Debug, Default, Clone, PartialEq)]
pub struct Tally {
    pub passed: u64,
    pub failed: u64,
    pub skipped: u64,
    /// One line for each failed check.
    pub messages: Vec<String>,
}

impl Tally {
    /// One check that passed.
    pub const ONE: Tally = Tally { passed: 1, failed: 0, skipped: 0, messages: Vec::new() };

    /// Number of all checks, including skipped ones.
    pub fn total(&self) -> u64 {
        self.passed + self.failed + self.skipped
    }

    /// Counts the outcome of a check and prints it.
    pub fn count(&mut self, promise: &str, outcome: Result<()>) {
        if outcome.is_ok() {
            eprintln!("holds: {promise}");
        }
        self.count_quietly(promise, outcome);
    }

    /// Counts the outcome of a check and prints it only if it failed.
    pub fn count_quietly(&mut self, promise: &str, outcome: Result<()>) {
        match outcome {
            Ok(()) => self.passed += 1,
            Err(e) => {
                let broken = format!("broken: {promise}: {e}");
                eprintln!("{broken}");
                self.failed += 1;
                self.messages.push(broken);
            }
        }
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.passed, self.passed + self.failed)
    }
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Tally) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.messages.extend(other.messages);
    }
}
