//! One text of a model, whichever way it is computed; and the digest that its logits have had from the first day on.

use super::engine::Engine;
use super::reference::Reference;
use super::{QUANTISED, Tally};
use crate::error::{Error, Result};
use crate::fetch::hex;
use crate::{json, sh};
use files::folder::TEXT_FILES;
use sha2::{Digest, Sha256};
use std::fs;

const TOKENS: &str = "24";

/// Counts a check for each way, where the model has a text.
pub fn check(engine: &Engine, reference: &Reference) -> Tally {
    let mut tally = Tally::default();
    let Some(text) = reference.texts.first() else { return tally };
    let prompt = &text.text;
    let plain = told(engine, prompt, &["--num-tokens", TOKENS]);
    let with = |flags: &[&str]| told(engine, prompt, &[&["--num-tokens", TOKENS], flags].concat());
    let ways = [
        ("in small chunks", with(&["--prefill-chunk", "3", "--threads", "2"])),
        ("with drafts", with(&["--draft", "4"])),
        ("packed", packed(engine, reference, prompt)),
        ("in a batch", batch(engine, prompt)),
        ("over a session", session(engine, prompt)),
    ];
    for (what, found) in ways {
        tally.count(&reference.name, same(what, &plain, found));
    }
    if reference.has_learned_positions() {
        return tally;
    }
    let long = format!("{prompt} ").repeat(12);
    for policy in ["sliding", "snapkv", "h2o"] {
        let evicting = ["--max-seq-len", "48", "--eviction-policy", policy, "--eviction-window", "32"];
        let chunks = |chunk| {
            told(engine, &long, &[&evicting[..], &["--prefill-chunk", chunk, "--num-tokens", "40"]].concat())
        };
        let what = format!("with {policy} in other chunks");
        tally.count(&reference.name, same(&what, &chunks("48"), chunks("7")));
    }
    tally
}

fn same(what: &str, plain: &Result<String>, found: Result<String>) -> Result<()> {
    let plain = plain.as_ref().map_err(|e| Error::Failed(e.to_string()))?;
    let found = found?;
    if &found == plain {
        return Ok(());
    }
    Err(Error::Failed(format!("{what}: {found:?} instead of {plain:?}")))
}

fn told(engine: &Engine, prompt: &str, more: &[&str]) -> Result<String> {
    engine.told(prompt, &[&["--ignore-eos"], QUANTISED, more].concat())
}

fn packed(engine: &Engine, reference: &Reference, prompt: &str) -> Result<String> {
    let dir = engine.file("packed");
    fs::create_dir_all(&dir).map_err(|e| Error::at(&dir, e))?;
    for name in TEXT_FILES.iter().filter(|name| reference.dir.join(name).exists()) {
        fs::copy(reference.dir.join(name), dir.join(name)).map_err(|e| Error::at(&dir.join(name), e))?;
    }
    let mut pack = engine.command("pack");
    sh::stdout(pack.args(["--quiet", "--out"]).arg(dir.join("model.packed.safetensors")).args(QUANTISED))?;
    told(&engine.of(&dir), prompt, &["--num-tokens", TOKENS])
}

/// Between two others.
fn batch(engine: &Engine, prompt: &str) -> Result<String> {
    let beside = prompt.split_at(prompt.char_indices().nth(3).map_or(prompt.len(), |(at, _)| at)).0;
    let flags = [&["--ignore-eos", "--num-tokens", TOKENS], QUANTISED].concat();
    let told = engine.batch(&[beside, prompt, &prompt.repeat(2)], &flags)?;
    Ok(told[1].clone())
}

/// Saved behind the prompt: what a toy says next may end within a character.
fn session(engine: &Engine, prompt: &str) -> Result<String> {
    let file = engine.file("text.session");
    let _ = fs::remove_file(&file);
    let file = file.to_string_lossy();
    told(engine, prompt, &["--num-tokens", "0", "--session", &file])?;
    told(engine, prompt, &["--num-tokens", TOKENS, "--session", &file])
}

/// Where the digests are written down.
const GOLDEN: &str = "tests/golden/parity.json";

/// Whether these logits, with quantised weights and cache, are bit for bit those that were written down; with
/// `ANTIGRAVITY_BLESS` they are from now on.
pub fn golden(model: &str, logits: &[u8]) -> Result<()> {
    let file = sh::root().join(GOLDEN);
    let digest = &hex(Sha256::new_with_prefix(logits))[..16];
    let mut digests = json::read(&file)?;
    if std::env::var_os("ANTIGRAVITY_BLESS").is_some() {
        digests[model] = digest.into();
        let text = serde_json::to_string_pretty(&digests).expect("a value is JSON") + "\n";
        fs::write(&file, text).map_err(|e| Error::at(&file, e))?;
    }
    if digests[model] == digest {
        return Ok(());
    }
    Err(Error::Failed(format!("the digest of its q4_0 logits is {digest}, in {GOLDEN} {}", digests[model])))
}
