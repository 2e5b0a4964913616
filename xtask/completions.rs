//! Writes shell completions and manual pages into a folder, for `cargo xtask completions`. It is an example of the
//! package, so that its dependencies stay out of the program.

use clap_complete::{Shell, generate_to};
use std::io::Result;
use std::path::Path;

fn main() -> Result<()> {
    write_completions(Path::new(&std::env::args_os().nth(1).expect("the folder to write")))
}

/// Writes the completions of bash, fish and zsh into `dir`, and the manual pages into `dir/man1`.
pub fn write_completions(dir: &Path) -> Result<()> {
    let man = dir.join("man1");
    std::fs::create_dir_all(&man)?;
    let command = antigravity::commands::clap_command();
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        generate_to(shell, &mut command.clone(), "antigravity", dir)?;
    }
    clap_mangen::generate_to(command, &man)
}
