//! Models with an adapter of `tests/fixtures/lora`, against the logits that PEFT has of them.

use super::engine::{Engine, Variant};
use super::{FLOAT, QUANTISED, check_same_bits, check_within, reference};
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
pub fn check(engine: &Engine, name: &str, vocab: usize) -> Option<Result<()>> {
    let dir = command::root().join("tests/fixtures/lora").join(name);
    let adapter = dir.to_string_lossy().into_owned();
    let compare = || {
        let case: AdapterCase = json::read(&dir.join("expected.json"))?;
        let expected = case.logits.get("1").map_or(&[][..], Vec::as_slice);
        let with = |flags: &[&str], more: &[&str]| [flags, more].concat();
        let lora = ["--lora", &adapter];
        let found = engine.logits(&case.ids, vocab, Variant::with(&with(FLOAT, &lora)))?;
        let found = reference::to_floats(&found);
        check_within("adapter", &found[found.len() - vocab..], expected, vocab).1?;
        let loaded = engine.logits(&case.ids, vocab, Variant::with(&with(QUANTISED, &lora)))?;
        let packed = engine.file("lora.packed.safetensors");
        let mut pack = engine.command("pack");
        command::stdout(pack.args(["--quiet", "--out"]).arg(&packed).args(with(QUANTISED, &lora)))?;
        let mapped = engine.with_model(&packed).logits(&case.ids, vocab, Variant::with(QUANTISED))?;
        check_same_bits(&loaded, &mapped, vocab, "from a packed file with an adapter")
    };
    dir.is_dir().then(compare)
}
