//! `cargo xtask tidy`: rules about source files that neither Cargo's members nor clippy check.
//!
//! [`style`]: the first line of a file, its name, and the length of files and functions. [`names`]: names of types and
//! functions, and the beginnings of doc comments. [`parts`]: the parts of the package that a part may use.
//! [`header`]: the header of the C API is up to date. [`messages`]: no flags in the library's messages. [`kernels`]: calls in OpenCL kernels. [`pages`]: the Markdown pages name only files that exist.

mod code;
mod kernels;
mod messages;
mod names;
mod pages;
mod parts;
mod style;

use crate::command;
use crate::error::{AtPath, Error, Result};
use crate::header;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders and files whose sources are checked.
const PLACES: &[&str] = &["build.rs", "src", "xtask", "tests", "kernels"];

/// A file: its path in the project, and its text.
type Source = (String, String);

pub fn run() -> Result<()> {
    let root = command::root();
    let mut paths = Vec::new();
    PLACES.iter().try_for_each(|place| collect_sources(&root.join(place), &mut paths))?;
    paths.sort();
    let mut files = Vec::new();
    for path in &paths {
        let text = fs::read_to_string(path).at(path)?;
        files.push((path.strip_prefix(&root).unwrap_or(path).to_string_lossy().into_owned(), text));
    }
    let mut problems = problems(&files);
    for page in pages::PAGES {
        let path = root.join(page);
        let text = fs::read_to_string(&path).at(&path)?;
        problems.extend(pages::find_missing(&root, page, &text));
    }
    problems.extend(header::find_problem()?);
    for problem in &problems {
        eprintln!("{problem}");
    }
    if !problems.is_empty() {
        return Err(Error::Failed(format!("tidy: {} problems in {} files", problems.len(), files.len())));
    }
    eprintln!("tidy: {} files in order", files.len());
    Ok(())
}

fn collect_sources(place: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if place.is_dir() {
        for entry in fs::read_dir(place).at(place)? {
            collect_sources(&entry.at(place)?.path(), files)?;
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
    found.extend(names::problems(files));
    found.extend(kernels::problems(files));
    found
}

/// Files that hold nothing but tests.
fn is_test(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or_default();
    file.ends_with("tests.rs")
        || file == "hostile.rs"
        || name.starts_with("tests/")
        || name.contains("/tests/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(files: &[(&str, &str)]) -> Vec<String> {
        let named = files.iter().map(|(name, text)| (name.to_string(), text.to_string()));
        problems(&named.collect::<Vec<_>>())
    }

    #[test]
    fn every_rule_is_checked() {
        let root = ("src/lib.rs", "//! Root.\nmod cli;\nmod run;\n");
        let check = |file: &str, text: &str| {
            let problems = check(&[root, (file, text)]).into_iter();
            problems.filter(|problem| !problem.contains("bare_words.txt: no function")).collect::<Vec<_>>()
        };
        assert_eq!(check("src/run.rs", "//! Run.\n"), Vec::<String>::new());
        assert_eq!(check("src/run.rs", "fn run_it() {}\n").len(), 1, "no first line");
        assert_eq!(check("src/run.rs", "//! Run.\nuse crate::cli::f;\n").len(), 1, "upwards");
        assert_eq!(check("src/run.rs", "//! Run.\nfn do_it() { g(\"--size\") }\n").len(), 1, "a flag");
        assert_eq!(check("src/run.rs", "//! Run.\n/// What it is.\nstruct A;\n").len(), 1, "a riddle");
    }
}
