//! Writes completions for shells and the manual into a folder: what `cargo xtask completions` runs. It is an example of
//! the package, so that what it needs does not get into the program.

use clap_complete::{Shell, generate_to};
use std::io::Result;
use std::path::Path;

fn main() -> Result<()> {
    let dir = std::env::args_os().nth(1).expect("the folder to write");
    write(Path::new(&dir))
}

/// The completions of three shells, and a page of the manual for the program and for each command.
pub fn write(dir: &Path) -> Result<()> {
    let man = dir.join("man1");
    std::fs::create_dir_all(&man)?;
    let command = antigravity::commands::command();
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        generate_to(shell, &mut command.clone(), "antigravity", dir)?;
    }
    clap_mangen::generate_to(command, &man)
}
