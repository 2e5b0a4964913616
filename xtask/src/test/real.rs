//! Tests of real models: their logits, texts and perplexity match transformers. One of them has the same text on every
//! instruction set, on Arm, on an OpenCL device, in batches, sessions and conversations.

mod golden;
mod questions;
mod reference;

use super::Outcome;
use super::cargo_test::CargoTest;
use super::report::{Tally, skip};
use crate::parity::engine::Engine;
use crate::{build, fetch};
use std::path::Path;

/// A real model: its configuration is in `models/`, its weights come from the Python package index, its expected values
/// are in `tests/fixtures/real`.
struct RealModel {
    name: &'static str,
    vocabulary: usize,
    /// Tests of [`STRINGS`] for which it has expected values.
    strings: &'static [&'static str],
    /// Number of prompts to compare; with a large vocabulary each takes seconds.
    prompts: usize,
}

/// Tests of `tests/files/real.rs`.
pub const STRINGS: [&str; 2] =
    ["strings_become_its_own_ids_and_strings_again", "conversations_are_rendered_as_its_own_template_says"];

const SMOLLM: RealModel =
    RealModel { name: "smollm2-135m", vocabulary: 49_152, strings: &STRINGS, prompts: 10 };
const GEMMA: RealModel =
    RealModel { name: "gemma3-270m", vocabulary: 262_144, strings: &[STRINGS[0]], prompts: 4 };

pub fn run() -> Outcome {
    let mut tally = Tally::default();
    for real in [SMOLLM, GEMMA] {
        tally += match fetch::fetch_weights(real.name) {
            Ok(file) => real.check(&file)?,
            Err(e) => skip(&format!("no {}: {e}", real.name), "see `cargo xtask fetch --help`"),
        };
    }
    Ok(tally)
}

impl RealModel {
    fn check(&self, file: &Path) -> Outcome {
        let strings = CargoTest::new(&["--test", "files"]).only(&["--ignored"]).only(self.strings);
        let mut tally = strings.env("ANTIGRAVITY_REAL_MODEL", file).run()?;
        let model = build::model_dir(self.name)?;
        let engine = Engine::with_program(&build::build_tested(&model)?, &model, self.name)?.with_model(file);
        reference::check(self, &engine, &mut tally)?;
        if self.name == SMOLLM.name {
            golden::check(&engine, &mut tally)?;
            questions::check(&engine, &mut tally)?;
        }
        Ok(tally)
    }
}
