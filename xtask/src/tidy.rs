//! `cargo xtask tidy`: rules about source files that no other tool checks. [`arrows`] says who may name whom, [`style`]
//! how long files and functions are and how they begin, [`messages`] that the library names no flags, [`pages`] that the files exist which the pages name.

mod arrows;
mod code;
mod messages;
mod pages;
mod style;
mod uses;

use crate::args::Args;
use crate::error::{Error, Result};
use crate::sh;
use std::fs;
use std::path::{Path, PathBuf};
use uses::Modules;

const PLACES: &[&str] = &["build.rs", "src", "xtask", "tests", "kernels"];

pub fn run(words: &[String]) -> Result<()> {
    Args::parse(words, &[])?.no_rest()?;
    let root = sh::root();
    let mut paths = Vec::new();
    for place in PLACES {
        collect(&root.join(place), &mut paths)?;
    }
    paths.sort();
    let mut files = Vec::new();
    for path in &paths {
        let text = fs::read_to_string(path).map_err(|e| Error::at(path, e))?;
        files.push((path.strip_prefix(&root).unwrap_or(path).to_string_lossy().into_owned(), text));
    }
    let mut problems = problems(&files);
    for page in pages::PAGES {
        let path = root.join(page);
        let text = fs::read_to_string(&path).map_err(|e| Error::at(&path, e))?;
        problems.extend(pages::missing(&root, page, &text));
    }
    for problem in &problems {
        eprintln!("{problem}");
    }
    if !problems.is_empty() {
        return Err(Error::Failed(format!("tidy: {} problems in {} files", problems.len(), files.len())));
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

/// What is wrong with the files, each given by its path in the project and its text.
fn problems(files: &[(String, String)]) -> Vec<String> {
    let mut found: Vec<String> = files.iter().flat_map(|(name, text)| style::problems(name, text)).collect();
    found.extend(messages::problems(files));
    let inside = files.iter().filter(|(name, _)| !name.starts_with("tests/"));
    let modules = Modules::new(inside.map(|(name, text)| (name.as_str(), text.as_str())));
    found.extend(modules.code().flat_map(|(name, code)| style::too_long(name, code)));
    let uses = modules.uses();
    found.extend(arrows::upward(&uses));
    found.extend(arrows::circles(&uses));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(files: &[(&str, &str)]) -> Vec<String> {
        let named = files.iter().map(|(name, text)| (name.to_string(), text.to_string()));
        problems(&named.collect::<Vec<_>>())
    }

    #[test]
    fn every_rule_is_asked() {
        let root = ("src/lib.rs", "//! Root.\nmod cli;\nmod run;\n");
        let run = ("src/run.rs", "//! Run.\n");
        assert_eq!(check(&[root, run]), Vec::<String>::new());
        assert_eq!(check(&[root, ("src/run.rs", "fn run() {}\n")]).len(), 1, "no first line");
        let long = format!("//! Run.\n{}", "const A: usize = 1;\n".repeat(401));
        assert_eq!(check(&[root, ("src/run.rs", &long)]).len(), 1, "too long");
        // Upwards, and round.
        let cli = ("src/cli.rs", "//! Cli.\nuse crate::run;\n");
        assert_eq!(check(&[root, cli, ("src/run.rs", "//! Run.\nuse crate::cli::f;\n")]).len(), 2);
    }
}
