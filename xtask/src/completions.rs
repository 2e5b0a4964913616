//! `cargo xtask completions`: shell completions and manual pages, from the flags of the program.

use crate::error::Result;
use crate::{command, targets};
use clap::Args;
use std::path::PathBuf;

#[derive(Args)]
pub struct CompletionsArgs {
    /// The folder to write [default: target/completions]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub fn run(args: &CompletionsArgs) -> Result<()> {
    let dir = args.out.clone().unwrap_or_else(|| targets::target_dir().join("completions"));
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    let mut write = command::cargo(&["run", "--package", "antigravity", "--example", "completions", "--"]);
    command::run(write.arg(&dir))?;
    let dir = dir.display();
    println!("bash: source {dir}/antigravity.bash");
    println!("fish: source {dir}/antigravity.fish");
    println!("zsh:  fpath+=({dir}) before compinit");
    println!("man:  man {dir}/man1/antigravity.1");
    Ok(())
}
