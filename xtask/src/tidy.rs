//! `cargo xtask tidy`: rules about source files that no other tool checks.

use crate::args::Args;
use crate::error::{Error, Result};
use crate::sh;
use std::fs;
use std::path::{Path, PathBuf};

/// A file longer than this is asking to be split; it is reported, not refused.
const MAX_LINES: usize = 600;
const PLACES: &[&str] = &["build.rs", "src", "xtask", "tests", "kernels"];
const BAD_NAMES: &[&str] = &["mod.rs", "utils.rs", "util.rs", "helpers.rs", "helper.rs", "common.rs"];
// Written in two pieces so that this file passes its own check.
const MARKS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

pub fn run(words: &[String]) -> Result<()> {
    Args::parse(words, &[], &[])?.no_rest()?;
    let root = sh::root();
    let mut files = Vec::new();
    for place in PLACES {
        collect(&root.join(place), &mut files)?;
    }
    files.sort();
    let mut broken = 0;
    for file in &files {
        let text = fs::read_to_string(file).map_err(|e| Error::at(file, e))?;
        let name = file.strip_prefix(&root).unwrap_or(file);
        for problem in problems(name, &text) {
            eprintln!("{}: {problem}", name.display());
            broken += 1;
        }
        let lines = text.lines().count();
        if lines > MAX_LINES {
            eprintln!(
                "{}: note: {lines} lines; over {MAX_LINES} a file is asking to be split",
                name.display()
            );
        }
    }
    if broken > 0 {
        return Err(Error::Failed(format!("tidy: {broken} problems in {} files", files.len())));
    }
    eprintln!("tidy: {} files in order", files.len());
    Ok(())
}

fn collect(place: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if place.is_dir() {
        for entry in fs::read_dir(place).map_err(|e| Error::at(place, e))? {
            collect(&entry.map_err(|e| Error::at(place, e))?.path(), files)?;
        }
    } else if place.extension().is_some_and(|e| e == "rs" || e == "cl") {
        files.push(place.into());
    }
    Ok(())
}

/// What is wrong with one file.
fn problems(name: &Path, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let rust = name.extension().is_some_and(|e| e == "rs");
    if rust && !text.starts_with("//! ") {
        found.push("1: the first line is not `//! ` and what the file owns".into());
    }
    if let Some(bad) = BAD_NAMES.iter().find(|bad| name.ends_with(bad)) {
        found.push(format!("a file named {bad}: name it after what it owns (foo.rs beside foo/)"));
    }
    for (i, line) in text.lines().enumerate() {
        for mark in MARKS.iter().filter(|mark| line.contains(**mark)) {
            found.push(format!("{}: {mark}: do it, or write the limit down where users read it", i + 1));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_fires() {
        let check = |name: &str, text: &str| problems(Path::new(name), text).len();
        assert_eq!(check("src/a.rs", "//! Owns a.\n"), 0);
        assert_eq!(check("src/a.rs", "fn main() {}\n"), 1);
        assert_eq!(check("src/a/mod.rs", "//! Owns a.\n"), 1);
        assert_eq!(check("tests/helpers.rs", "//! Owns a.\n"), 1);
        assert_eq!(check("kernels/common.cl", "// prepended\n"), 0);
        assert_eq!(check("src/a.rs", &format!("//! Owns a.\n// {}: later\n", MARKS[0])), 1);
    }
}
