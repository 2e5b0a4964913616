//! Models with an adapter of `tests/fixtures/lora`, against the logits that PEFT has of them.

use super::engine::{Engine, Variant};
use super::execution_paths::with_packed;
use super::reference::{Reference, to_floats};
use super::{FLOAT, QUANTISED, check_same_bits, check_within};
use crate::error::Result;
use crate::{command, json};
use serde::Deserialize;
use std::collections::BTreeMap;

/// `expected.json` beside an adapter.
#[derive(Deserialize)]
struct AdapterCase {
    ids: Vec<u32>,
    /// The last logits, by the adapter's scale.
    logits: BTreeMap<String, Vec<f32>>,
}

/// Compares the logits of a model with its adapter, if there is one; a packed file with it gives the same bits.
pub fn check(engine: &Engine, reference: &Reference) -> Option<Result<()>> {
    let (dir, vocab) = (command::root().join("tests/fixtures/lora").join(&reference.name), reference.vocab);
    let adapter = dir.to_string_lossy().into_owned();
    let compare = || {
        let case: AdapterCase = json::read(&dir.join("expected.json"))?;
        let expected = case.logits.get("1").map_or(&[][..], Vec::as_slice);
        let lora = ["--lora", &adapter];
        let (exact, quantised) = ([FLOAT, &lora].concat(), [QUANTISED, &lora].concat());
        let found = engine.logits(&case.ids, vocab, Variant::with(&exact))?;
        let found = to_floats(&found);
        check_within("adapter", &found[found.len() - vocab..], expected, vocab).1?;
        let loaded = engine.logits(&case.ids, vocab, Variant::with(&quantised))?;
        let packed = with_packed(engine, reference, &quantised)?;
        let mapped = packed.logits(&case.ids, vocab, Variant::with(QUANTISED))?;
        check_same_bits(&loaded, &mapped, vocab, "from a packed file with an adapter")
    };
    dir.is_dir().then(compare)
}
