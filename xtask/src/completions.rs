//! `cargo xtask completions`: completions for shells and the manual, from the flags that the program has.

use crate::args::{Args, Flag, Flags};
use crate::error::Result;
use crate::{sh, targets};
use std::path::PathBuf;

pub const FLAGS: Flags = &[&[Flag::valued("--out", "DIR", "where to write [target/completions]")]];

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, FLAGS)?;
    args.no_rest()?;
    let dir = args.value("--out").map_or_else(|| targets::target_dir().join("completions"), PathBuf::from);
    let dir = std::path::absolute(&dir).unwrap_or(dir);
    let mut write =
        sh::cargo(&["run", "--quiet", "--package", "antigravity", "--example", "completions", "--"]);
    sh::run(write.arg(&dir))?;
    let dir = dir.display();
    println!("bash: source {dir}/antigravity.bash");
    println!("fish: source {dir}/antigravity.fish");
    println!("zsh:  fpath+=({dir}) before compinit");
    println!("man:  man {dir}/man1/antigravity.1");
    Ok(())
}
