//! Tests of devices through the real `adb`, with a fake phone: `tests/device/fake_adbd.py` on loopback, which runs the Arm
//! program in an emulator.

mod checks;
mod harness;

use super::report::{Tally, skip_missing};
use super::{Outcome, arm};
use crate::error::Error;
use crate::targets::ARM_LINUX;
use crate::{build, command};
use harness::AdbHarness;

pub fn run() -> Outcome {
    if let Some(missing) = missing() {
        return Ok(skip_missing(missing));
    }
    // Built first, so that no check waits for a compiler.
    let model = build::model_dir("story")?;
    build::tested_for(ARM_LINUX, &model)?;
    build::tested(&model)?;
    let harness = AdbHarness::start().map_err(Error::Failed)?;
    let mut tally = Tally::default();
    for (promise, check) in checks::ALL {
        tally.count(promise, check(&harness).map_err(Error::Failed));
    }
    Ok(tally)
}

/// The first missing program, and the command that installs it.
fn missing() -> Option<(&'static str, &'static str)> {
    let programs = [("adb", "sudo apt-get install adb"), ("python3", "sudo apt-get install python3")];
    programs.into_iter().find(|(program, _)| !command::is_on_path(program)).or_else(arm::missing)
}
