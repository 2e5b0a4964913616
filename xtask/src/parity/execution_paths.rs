//! One text of a model on every path that computes it; and the digest that its logits have had from the first day on.

use super::QUANTISED;
use super::engine::Engine;
use super::reference::Reference;
use crate::error::{AtPath, Error, Result};
use crate::fetch::to_hex;
use crate::tally::Tally;
use crate::{command, json};
use files::model_dir::TEXT_FILES;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs;

const TOKENS: [&str; 3] = ["--ignore-eos", "--num-tokens", "24"];

/// Counts a check for each path, where the model has a text.
pub fn check(engine: &Engine, reference: &Reference) -> Tally {
    let (mut tally, name) = (Tally::default(), &reference.name);
    let Some(text) = reference.texts.first() else { return tally };
    let prompt = &text.text;
    tally += check_prompt(engine, name, prompt, QUANTISED);
    let plain = generate(engine, prompt, QUANTISED, &TOKENS);
    tally.count_quietly(name, check_equal("packed", &plain, generate_packed(engine, reference, prompt)));
    let split = reference.split_flag(["cpu", "cpu"]);
    if let Some(flag) = &split {
        for (what, more) in [("on two devices", &[][..]), ("on two devices with drafts", &["--draft", "4"])] {
            let found = generate(engine, prompt, QUANTISED, &[&TOKENS, &[flag.as_str()][..], more].concat());
            tally.count_quietly(name, check_equal(what, &plain, found));
        }
    }
    if !reference.can_evict() {
        return tally;
    }
    let long = format!("{prompt} ").repeat(12);
    for policy in ["sliding", "snapkv", "h2o"] {
        let chunks = |chunk| {
            let evicting = ["--max-seq-len", "48", "--eviction-policy", policy, "--eviction-window", "32"];
            let more = ["--prefill-chunk", chunk, "--ignore-eos", "--num-tokens", "40"];
            generate(engine, &long, QUANTISED, &[&evicting[..], &more].concat())
        };
        let (what, whole) = (format!("with {policy} in other chunks"), chunks("48"));
        if let Err(Error::Failed(why)) = &whole
            && why.contains("has nothing to evict")
        {
            eprintln!("parity: {name}: SKIPPED eviction: {why}");
            return tally;
        }
        tally.count_quietly(name, check_equal(&what, &whole, chunks("7")));
    }
    tally
}

/// Counts a check for each path that any model has, with some settings.
pub fn check_prompt(engine: &Engine, name: &str, prompt: &str, settings: &[&str]) -> Tally {
    let mut tally = Tally::default();
    let with = |flags: &[&str]| generate(engine, prompt, settings, &[&TOKENS, flags].concat());
    let plain = with(&[]);
    let paths = [
        ("in small chunks", with(&["--prefill-chunk", "3", "--threads", "2"])),
        ("with drafts", with(&["--draft", "4"])),
        ("in a batch", generate_in_batch(engine, prompt, settings)),
        ("over a session", generate_over_session(engine, prompt, settings)),
    ];
    for (what, found) in paths {
        tally.count_quietly(name, check_equal(what, &plain, found));
    }
    tally
}

fn check_equal(what: &str, plain: &Result<String>, found: Result<String>) -> Result<()> {
    let plain = plain.as_ref().map_err(|e| Error::Failed(e.to_string()))?;
    let found = found?;
    if &found == plain {
        return Ok(());
    }
    Err(Error::Failed(format!("{what}: {found:?} instead of {plain:?}")))
}

fn generate(engine: &Engine, prompt: &str, settings: &[&str], more: &[&str]) -> Result<String> {
    engine.generate_text(prompt, &[settings, more].concat())
}

fn generate_packed(engine: &Engine, reference: &Reference, prompt: &str) -> Result<String> {
    generate(&with_packed(engine, reference, QUANTISED)?, prompt, QUANTISED, &TOKENS)
}

/// The program with a packed model that these flags make.
pub fn with_packed(engine: &Engine, reference: &Reference, flags: &[&str]) -> Result<Engine> {
    let dir = engine.file("packed");
    fs::create_dir_all(&dir).at(&dir)?;
    for name in TEXT_FILES.iter().filter(|name| reference.dir.join(name).exists()) {
        fs::copy(reference.dir.join(name), dir.join(name)).at(&dir.join(name))?;
    }
    let mut pack = engine.command("pack");
    pack.args(["--quiet", "--out"]).arg(dir.join("model.packed.safetensors")).args(flags);
    command::stdout(&mut pack)?;
    Ok(engine.with_model(&dir))
}

/// Generates the text in a batch, between two others.
fn generate_in_batch(engine: &Engine, prompt: &str, settings: &[&str]) -> Result<String> {
    let beside = prompt.split_at(prompt.char_indices().nth(3).map_or(prompt.len(), |(at, _)| at)).0;
    let prompts = [beside, prompt, &prompt.repeat(2)];
    let texts = engine.generate_batch(&prompts, &[settings, &TOKENS].concat())?;
    Ok(texts[1].clone())
}

/// Generates the text from a session saved after the prompt: a tiny model's text may end within a character.
fn generate_over_session(engine: &Engine, prompt: &str, settings: &[&str]) -> Result<String> {
    let file = engine.file("text.session");
    let _ = fs::remove_file(&file);
    let session = ["--session", &file.to_string_lossy()];
    generate(engine, prompt, settings, &[&session[..], &["--num-tokens", "0"]].concat())?;
    generate(engine, prompt, settings, &[&session[..], &TOKENS].concat())
}

/// The digests by model.
const GOLDEN: &str = "tests/golden/parity.json";

/// Checks that these logits, with quantised weights and cache, are bit for bit those that were written down; with
/// `ANTIGRAVITY_BLESS` they are from now on.
pub fn check_golden(model: &str, logits: &[u8]) -> Result<()> {
    let file = command::root().join(GOLDEN);
    let digest = &to_hex(Sha256::new_with_prefix(logits))[..16];
    let mut digests: Value = json::read(&file)?;
    if std::env::var_os("ANTIGRAVITY_BLESS").is_some() {
        digests[model] = digest.into();
        json::write(&file, &digests)?;
    }
    if digests[model] == digest {
        return Ok(());
    }
    Err(Error::Failed(format!("the digest of its q4_0 logits is {digest}, in {GOLDEN} {}", digests[model])))
}
