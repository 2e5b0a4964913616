//! `cargo xtask tidy`: rules about source files that neither Cargo's members nor clippy hold. [`style`] says how files
//! begin and how long they and their functions are, [`parts`] which part of the package names which, [`messages`] that
//! the library names no flags, [`pages`] that the files exist which the pages name.

mod code;
mod messages;
mod pages;
mod parts;
mod style;

use crate::command;
use crate::error::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};

const PLACES: &[&str] = &["build.rs", "src", "xtask", "tests", "kernels"];

/// A file by its path in the project, and its text.
type Source = (String, String);

pub fn run() -> Result<()> {
    let root = command::root();
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

fn problems(files: &[Source]) -> Vec<String> {
    let mut found: Vec<String> = files.iter().flat_map(|(name, text)| style::problems(name, text)).collect();
    found.extend(parts::problems(files));
    found.extend(messages::problems(files));
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
        assert_eq!(check(&[root, ("src/run.rs", "//! Run.\n")]), Vec::<String>::new());
        assert_eq!(check(&[root, ("src/run.rs", "fn run() {}\n")]).len(), 1, "no first line");
        assert_eq!(check(&[root, ("src/run.rs", "//! Run.\nuse crate::cli::f;\n")]).len(), 1, "upwards");
        assert_eq!(check(&[root, ("src/run.rs", "//! Run.\nfn f() { g(\"--size\") }\n")]).len(), 1, "a flag");
    }
}
