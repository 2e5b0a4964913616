//! The part of the tests that brings the program to a device through the real `adb`, with a stand-in for
//! the phone: `tests/device/fake_adbd.py` on loopback, where an emulator runs the Arm program.

mod checks;
mod measures;
mod server;
mod stand;

use super::report::{Tally, skip};
use super::{Outcome, arm};
use crate::error::Error;
use crate::{build, sh};
use stand::Bench;

/// What came of one check.
pub enum Verdict {
    Passed,
    /// Why, and what would change that.
    Skipped(&'static str, &'static str),
}

/// One check; a failure says what was expected and what was found.
pub struct Check {
    pub name: &'static str,
    pub run: fn(&Bench) -> std::result::Result<Verdict, String>,
}

pub fn run() -> Outcome {
    if let Some((what, remedy)) = missing() {
        return Ok(skip(&format!("{what} is missing"), &format!("install it with: {remedy}")));
    }
    // Built here, so that no check waits for a compiler.
    let model = build::model_dir("story")?;
    build::tested_for(arm::TARGET, &model)?;
    build::tested(&model)?;
    let bench = Bench::new().map_err(Error::Failed)?;
    let mut tally = Tally::default();
    for check in checks::ALL.iter().chain(server::ALL).chain(measures::ALL) {
        let began = std::time::Instant::now();
        match (check.run)(&bench) {
            Ok(Verdict::Passed) => {
                eprintln!("ok      {} ({:.1} s)", check.name, began.elapsed().as_secs_f64());
                tally.passed += 1;
            }
            Ok(Verdict::Skipped(why, remedy)) => tally += skip(&format!("{}: {why}", check.name), remedy),
            Err(why) => {
                let line = format!("FAILED  {}: {why}", check.name);
                eprintln!("{line}");
                tally.failed += 1;
                tally.said.push(line);
            }
        }
    }
    Ok(tally)
}

/// The first thing that is not installed, and the command that installs it.
fn missing() -> Option<(&'static str, &'static str)> {
    let programs = [("adb", "sudo apt-get install adb"), ("python3", "sudo apt-get install python3")];
    programs.into_iter().find(|(program, _)| !sh::on_path(program)).or_else(arm::missing)
}
