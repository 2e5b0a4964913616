//! `cargo test`: builds first, to time the build separately, and adds up the result lines.

use super::report::Tally;
use super::{Outcome, cargo};
use crate::android::NdkUse;
use crate::error::{Error, Result};
use crate::targets::Product;
use crate::{build, command};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Some tests of the workspace.
#[derive(Clone)]
pub struct CargoTest {
    /// Cargo's words.
    args: Vec<String>,
    /// Words of the test binaries: names and flags.
    words: Vec<String>,
    target: Option<&'static str>,
    /// Another model than the story model.
    model: Option<PathBuf>,
    environment: Vec<(String, std::ffi::OsString)>,
}

fn owned<'a>(words: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    words.into_iter().map(String::from).collect()
}

impl CargoTest {
    /// The tests of all packages, in the given cargo targets or in all.
    pub fn new(targets: &[&str]) -> CargoTest {
        let args = owned(["--workspace", "--no-fail-fast"].iter().chain(targets).copied());
        CargoTest { args, words: Vec::new(), target: None, model: None, environment: Vec::new() }
    }

    /// The tests of one package. They are built together with xtask, so that dependencies keep the features of the
    /// whole workspace and are not compiled again.
    pub fn of_package(package: &str, targets: &[&str]) -> CargoTest {
        let args = owned(["--package", package, "--package", "xtask"].iter().chain(targets).copied());
        CargoTest { args, ..CargoTest::new(&[]) }
    }

    /// Tests for a target, without this tool's own.
    pub fn for_target(mut self, target: &'static str) -> CargoTest {
        self.args.extend(owned(["--exclude", "xtask", "--target", target]));
        CargoTest { target: Some(target), ..self }
    }

    /// Tests of a model's program, not optimised.
    pub fn for_model(self, model: &Path) -> CargoTest {
        CargoTest { model: Some(model.into()), ..self }
    }

    pub fn with_pointer_checks(mut self) -> CargoTest {
        self.args.extend(build::pointer_check_flags());
        self
    }

    /// Adds words for the test binaries: names of tests that run, and flags.
    pub fn only(mut self, words: &[&str]) -> CargoTest {
        self.words.extend(owned(words.iter().copied()));
        self
    }

    pub fn skip(mut self, names: &[&str]) -> CargoTest {
        self.words.extend(names.iter().flat_map(|name| ["--skip".into(), name.to_string()]));
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> CargoTest {
        self.environment.push((name.into(), value.as_ref().into()));
        self
    }

    fn command(&self, more: &[&str]) -> Result<Command> {
        let mut command = cargo(&["test"]);
        command.args(&self.args).args(more);
        if let Some(model) = &self.model {
            build::make_unoptimised(&mut command, model);
            let (stack, bytes) = build::UNOPTIMISED_STACK;
            command.env(stack, bytes);
        }
        if let Some(target) = self.target {
            crate::cargo::prepare(&mut command, target, (NdkUse::Never, Product::Program))?;
        }
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        Ok(command)
    }

    fn run_command(&self) -> Result<Command> {
        let mut command = self.command(&[])?;
        command.arg("--").args(&self.words);
        Ok(command)
    }

    pub fn build(&self) -> Result<()> {
        // Documentation tests are built one by one as they run.
        if self.args.iter().any(|word| word == "--doc") {
            return Ok(());
        }
        command::build(&mut self.command(&["--no-run"])?)
    }

    pub fn run(&self) -> Outcome {
        if let Err(e) = self.build() {
            return Ok(Reader::default().end(Err(e)));
        }
        let mut reader = Reader::default();
        let ended = command::stream(&mut self.run_command()?, |line| reader.read(line));
        Ok(reader.end(ended))
    }

    /// Runs them without showing their output before the end; they are built already.
    fn run_hidden(&self) -> Outcome {
        let out = command::output(&mut self.run_command()?)?;
        eprint!("{}", String::from_utf8_lossy(&out.stderr));
        let mut reader = Reader::default();
        for line in String::from_utf8_lossy(&out.stdout).lines() {
            println!("{line}");
            reader.read(line);
        }
        let ended = Error::Failed(format!("`cargo test` ended with {}", out.status));
        Ok(reader.end(if out.status.success() { Ok(()) } else { Err(ended) }))
    }
}

/// Runs tests that use one core at the same time as others, and prints their output last.
pub fn run_beside(tests: &CargoTest, others: impl FnOnce() -> Outcome) -> Outcome {
    std::thread::scope(|scope| {
        let tests = scope.spawn(|| tests.run_hidden());
        let mut tally = others()?;
        tally += tests.join().expect("invariant: nothing in it panics")?;
        Ok(tally)
    })
}

/// Sums up the output of `cargo test`.
#[derive(Default)]
struct Reader {
    tally: Tally,
    /// Between `failures:` and the result.
    failures: bool,
}

impl Reader {
    fn read(&mut self, line: &str) {
        if let Some(tally) = parse_result(line) {
            self.failures = false;
            self.tally += tally;
        } else if line == "failures:" {
            self.failures = true;
        } else if self.failures && !line.trim().is_empty() {
            self.tally.messages.push(line.chars().take(400).collect());
        }
    }

    /// The sum, given how the command ended. A failure without a result line (a build error, a crash) counts as one.
    fn end(self, ended: Result<()>) -> Tally {
        let mut tally = self.tally;
        if let Err(e) = ended {
            eprintln!("error: {e}");
            tally.failed = tally.failed.max(1);
            tally.messages.push(e.to_string());
        }
        tally
    }
}

/// The counts in a line such as
/// `test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s`.
fn parse_result(line: &str) -> Option<Tally> {
    let counts = line.trim_start().strip_prefix("test result: ")?.split_once(". ")?.1;
    let count = |what: &str| -> Option<u64> {
        let part = counts.split(';').map(str::trim).find_map(|p| p.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    let (passed, failed, skipped) = (count("passed")?, count("failed")?, count("ignored")?);
    Some(Tally { passed, failed, skipped, ..Tally::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_messages_of_failed_tests_are_summed_up() {
        let output = "running 2 tests\ntest a ... ok\ntest b ... FAILED\n\nfailures:\n\n---- b stdout ----\n\
            thread 'b' panicked at c.rs:1:2:\nno\n\n\nfailures:\n    b\n\n\
            test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s\n\
            test result: odd\nrunning 0 tests\n\
            test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.00s\n";
        let mut reader = Reader::default();
        output.lines().for_each(|line| reader.read(line));
        let said = ["---- b stdout ----", "thread 'b' panicked at c.rs:1:2:", "no", "    b"];
        let expected = Tally { passed: 13, failed: 1, skipped: 1, messages: said.map(String::from).into() };
        assert_eq!(reader.tally, expected);
        let crashed = Reader::default().end(Err(Error::Failed("no".into())));
        assert_eq!((crashed.failed, crashed.messages.len()), (1, 1));
    }
}
