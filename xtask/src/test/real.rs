//! The part of the tests that runs real models: their logits, texts and perplexity are those of transformers, and one has
//! one text on every instruction set, on Arm, on an OpenCL device, in batches, sessions and conversations.

mod golden;
mod questions;
mod reference;

use super::Outcome;
use super::cargo_test::CargoTest;
use super::report::{Tally, skip};
use crate::parity::engine::Engine;
use crate::{build, fetch};
use std::path::Path;

/// A model whose configuration is in `models/`, whose weights come from the Python package registry, and whose expected
/// values are in `tests/fixtures/real`.
struct Real {
    name: &'static str,
    vocabulary: usize,
    /// Those of [`STRINGS`] that it has values for.
    strings: &'static [&'static str],
    /// How many prompts are compared; a large vocabulary takes seconds for each.
    prompts: usize,
}

/// Tests of `tests/files/real.rs`.
pub const STRINGS: [&str; 2] =
    ["strings_become_its_own_ids_and_strings_again", "conversations_are_rendered_as_its_own_template_says"];

const SMOLLM: Real = Real { name: "smollm2-135m", vocabulary: 49_152, strings: &STRINGS, prompts: 10 };
const GEMMA: Real = Real { name: "gemma3-270m", vocabulary: 262_144, strings: &[STRINGS[0]], prompts: 4 };

pub fn run() -> Outcome {
    let mut tally = Tally::default();
    for real in [SMOLLM, GEMMA] {
        tally += match fetch::weights(real.name) {
            Ok(file) => real.check(&file)?,
            Err(e) => skip(&format!("no {}: {e}", real.name), "see `cargo xtask fetch --help`"),
        };
    }
    Ok(tally)
}

impl Real {
    fn check(&self, file: &Path) -> Outcome {
        let strings = CargoTest::new(&["--test", "files"]).only(&["--ignored"]).only(self.strings);
        let mut tally = strings.env("ANTIGRAVITY_REAL_MODEL", file).run()?;
        let model = build::model_dir(self.name)?;
        let engine = Engine::with_copy(&build::tested(&model)?, &model, self.name)?.with_model(file);
        reference::check(self, &engine, &mut tally)?;
        if self.name == SMOLLM.name {
            golden::check(&engine, &mut tally)?;
            questions::check(&engine, &mut tally)?;
        }
        Ok(tally)
    }
}
