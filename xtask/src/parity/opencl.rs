//! Runs the same program through OpenCL, on the first device there is, and compares the bits with the CPU's.

use super::engine::{Engine, Variant};
use super::reference::Reference;
use super::{FLOAT, check_same_bits};
use crate::error::Error;
use crate::tally::Tally;

/// Paths through the kernels: many tokens at once and one by one; attention on the other side, too.
const PATHS: &[&[&str]] = &[&["--gpu-attn"], &["--gpu-attn", "--prefill-chunk", "1"]];
const MORE_PATHS: &[&[&str]] = &[&[], &["--prefill-chunk", "1"], &["--gpu-attn", "--zero-copy"]];
/// Kernels that a model is checked with, chosen by its name, as a device's compiler works for seconds on each; models that
/// are checked on all paths have both. Nothing is timed to choose them.
const KERNELS: [&str; 2] = ["floats-four", "tile"];
/// Weights and caches that each model is checked with.
const SETTINGS: &[&[&str]] = &[&["--kv-type", "q4"]];
const MORE_SETTINGS: &[&[&str]] = &[FLOAT, &["--kv-type", "f32"], &["--kv-type", "q8"]];
/// Models that are checked on all paths, with all settings; a device's compiler works for a minute for each. They have
/// biases, other norms and no gate, and two kinds of layers.
const THOROUGH: [&str; 3] = ["m4-qwen2-bf16", "m8-gpt2-bare-f32", "m9-gemma3-270m-bf16"];
/// Runs the program on the first device.
pub const DEVICE_FLAGS: &[&str] = &["--backend", "opencl", "--cl-device", "0", "--wait-for-gpu"];

/// Logits with both kinds of weights and several types of cache, against the CPU's. Without OpenCL nothing is checked,
/// which is said, and is a failure where `CI` is set.
pub fn check(engine: &Engine, reference: &Reference) -> Tally {
    let (mut tally, case) = (Tally::default(), reference.longest_case());
    let kernels = reference.name.bytes().map(usize::from).sum::<usize>() % KERNELS.len();
    let thorough = THOROUGH.contains(&reference.name.as_str());
    let (more_settings, more_paths) = if thorough { (MORE_SETTINGS, MORE_PATHS) } else { (&[][..], &[][..]) };
    for settings in SETTINGS.iter().chain(more_settings) {
        let cpu = Variant::with(settings);
        let expected = engine.logits(&case.ids, reference.vocab, cpu);
        let splits = [["cl:0", "cpu"], ["cpu", "cl:0"]].map(|devices| reference.split_flag(devices));
        let splits: Vec<[&str; 1]> = splits.iter().flatten().map(|flag| [flag.as_str()]).collect();
        let splits = splits.iter().map(|flag| &flag[..]);
        for (i, path) in PATHS.iter().chain(more_paths).copied().chain(splits).enumerate() {
            let flags = [settings, DEVICE_FLAGS, path].concat();
            let kernels = (kernels + usize::from(thorough && i >= PATHS.len())) % KERNELS.len();
            let device = Variant { flags: &flags, opencl: Some(KERNELS[kernels]), ..Variant::default() };
            let found = engine.logits(&case.ids, reference.vocab, device);
            let outcome = match (&expected, found) {
                (_, Err(Error::Failed(why)))
                    if why.contains("OpenCL:") && std::env::var_os("CI").is_none() =>
                {
                    eprintln!("parity: {}: SKIPPED OpenCL: {why}", reference.name);
                    return tally;
                }
                (Ok(expected), Ok(found)) => {
                    check_same_bits(expected, &found, reference.vocab, &format!("with {}", flags.join(" ")))
                }
                (Err(e), _) => Err(Error::Failed(e.to_string())),
                (_, Err(e)) => Err(e),
            };
            tally.count_quietly(&reference.name, outcome);
        }
    }
    tally
}
