//! The same program through OpenCL, on whatever device comes first: the CPU's bits.

use super::engine::{Engine, Variant};
use super::reference::Reference;
use super::{FLOAT, Tally, longest, same_bits};
use crate::error::Error;

/// Every way through the kernels: attention on either side, many tokens at once and one by one.
const WAYS: &[&[&str]] = &[
    &["--gpu-attn"],
    &["--gpu-attn", "--prefill-chunk", "1"],
    &[],
    &["--prefill-chunk", "1"],
    &["--gpu-attn", "--zero-copy"],
];
/// Weights and caches that each model is checked with, and those of [`THOROUGH`] ones. A device's compiler takes seconds
/// for each.
const SETTINGS: &[&[&str]] = &[FLOAT, &["--kv-type", "q4"]];
const MORE: &[&[&str]] = &[&["--kv-type", "f32"], &["--kv-type", "q8"]];
/// One with biases, and one with two kinds of layers.
const THOROUGH: [&str; 2] = ["m4-qwen2-bf16", "m9-gemma3-270m-bf16"];
const DEVICE: &[&str] = &["--backend", "opencl", "--cl-device", "0"];

/// Logits with both kinds of weights and several types of cache, against the CPU's. Without OpenCL nothing is checked,
/// which is said, and is a failure where `CI` is set.
pub fn check(engine: &Engine, reference: &Reference) -> Tally {
    let (mut tally, case) = (Tally::default(), longest(reference));
    let more = if THOROUGH.contains(&reference.name.as_str()) { MORE } else { &[] };
    for settings in SETTINGS.iter().chain(more) {
        let cpu = Variant { flags: settings, ..Variant::default() };
        let expected = engine.logits(&case.ids, reference.vocab, cpu);
        for way in WAYS {
            let flags = [settings, DEVICE, *way].concat();
            let device = Variant { flags: &flags, opencl: true, ..Variant::default() };
            let found = engine.logits(&case.ids, reference.vocab, device);
            let outcome = match (&expected, found) {
                (_, Err(Error::Failed(why)))
                    if why.contains("OpenCL:") && std::env::var_os("CI").is_none() =>
                {
                    eprintln!("parity: {}: SKIPPED OpenCL: {why}", reference.name);
                    return tally;
                }
                (Ok(expected), Ok(found)) => {
                    same_bits(expected, &found, reference.vocab, &format!("with {}", flags.join(" ")))
                }
                (Err(e), _) => Err(Error::Failed(e.to_string())),
                (_, Err(e)) => Err(e),
            };
            tally.count(&reference.name, outcome);
        }
    }
    tally
}
