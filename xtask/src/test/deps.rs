//! Checks the program's crates: none needs a C toolchain, all have licences that `deny.toml` allows, and `CRATES.md`
//! names them.

use super::report::Tally;
use super::{Outcome, cargo};
use crate::command;
use crate::error::{AtPath, Error, Result};
use crate::targets::TARGETS;
use std::collections::BTreeSet;
use std::fs;

pub fn run() -> Outcome {
    // Crates for other systems may not be on this machine; crates of the supported targets are.
    let everywhere = list_crates(&["all"]).or_else(|e| {
        eprintln!("{e}\ntrying the supported targets only");
        list_crates(TARGETS)
    })?;
    let bad: Vec<&str> = everywhere.iter().map(|c| &*c.name).filter(|name| needs_c(name)).collect();
    if !bad.is_empty() {
        return Err(Error::Failed(format!(
            "dependencies that need a C toolchain: {}; `cargo tree --invert <name>` shows who asks for them",
            bad.join(", ")
        )));
    }
    let deny = read("deny.toml")?;
    let allowed = parse_allowed(&deny);
    let bad: Vec<String> = everywhere
        .iter()
        .filter(|c| !is_allowed(&c.licence, &allowed))
        .map(|c| format!("{} ({})", c.name, c.licence))
        .collect();
    if !bad.is_empty() {
        let remedy = "allow the licence in deny.toml if it is acceptable, or use another crate";
        return Err(Error::Failed(format!("licences: {}; {remedy}", bad.join(", "))));
    }
    let contained: BTreeSet<String> = list_crates(TARGETS)?.into_iter().map(|c| c.name).collect();
    let named = parse_named(&read(PAGE)?);
    let lists = [
        ("lacks", contained.difference(&named)),
        ("names crates that are not used:", named.difference(&contained)),
    ];
    for (what, names) in lists {
        let names: Vec<&str> = names.map(String::as_str).collect();
        if !names.is_empty() {
            return Err(Error::Failed(format!("{PAGE} {what} {}", names.join(", "))));
        }
    }
    eprintln!("{} crates, {} of them for the supported targets, all Rust", everywhere.len(), contained.len());
    Ok(Tally::ONE)
}

/// A crate of the program, not of the project.
struct Crate {
    name: String,
    /// The licence in its manifest, e.g. `MIT OR Apache-2.0`.
    licence: String,
}

/// The crates of the program for some targets.
fn list_crates(targets: &[&str]) -> Result<Vec<Crate>> {
    let words = ["tree", "--package", "antigravity", "--edges", "normal,build", "--prefix", "none"];
    let mut tree = cargo(&words);
    tree.args(["--format", "{p}|{l}"]).args(targets.iter().flat_map(|target| ["--target", target]));
    eprintln!("$ {}", command::show(&tree));
    let lines = command::stdout(&mut tree)?;
    let lines = String::from_utf8_lossy(&lines);
    let mut lines: Vec<&str> = lines.lines().map(|l| l.trim_end_matches(" (*)")).collect();
    lines.sort();
    lines.dedup();
    let parsed = lines.into_iter().filter_map(|line| {
        let (package, licence) = line.split_once('|')?;
        let name = package.split_whitespace().next()?;
        Some(Crate { name: name.into(), licence: licence.into() })
    });
    Ok(parsed.filter(|c| c.name != "antigravity" && !c.name.starts_with("antigravity-")).collect())
}

/// True for crates that compile or link C. The four `-sys` crates here are only Rust declarations.
fn needs_c(name: &str) -> bool {
    let tools = ["cc", "cmake", "bindgen", "pkg-config"];
    let rust = ["windows-sys", "linux-raw-sys", "js-sys", "web-sys"];
    tools.contains(&name) || ((name.ends_with("-sys") || name.ends_with("_sys")) && !rust.contains(&name))
}

/// True if one of the alternatives has only allowed licences.
fn is_allowed(licence: &str, allowed: &[&str]) -> bool {
    // Brackets are used only as in `(MIT OR Apache-2.0) AND Unicode-3.0`.
    let all_of = |part: &str| part.split(" AND ").all(|one| allowed.contains(&one.trim()));
    match licence.strip_prefix('(').and_then(|rest| rest.split_once(") AND ")) {
        Some((first, second)) => is_allowed(first, allowed) && is_allowed(second, allowed),
        None => licence.replace('/', " OR ").split(" OR ").any(all_of),
    }
}

/// The licences in the list `allow`.
fn parse_allowed(deny: &str) -> Vec<&str> {
    let list = deny.split_once("allow = [").and_then(|(_, rest)| rest.split_once(']'));
    list.map_or("", |(list, _)| list).split('"').skip(1).step_by(2).collect()
}

/// The page with the table of crates.
const PAGE: &str = "CRATES.md";

/// The crates in the page's table: words in backquotes.
fn parse_named(page: &str) -> BTreeSet<String> {
    let rows = page.lines().filter(|line| line.starts_with('|'));
    rows.flat_map(|row| row.split('`').skip(1).step_by(2)).map(String::from).collect()
}

fn read(file: &str) -> Result<String> {
    let path = command::root().join(file);
    fs::read_to_string(&path).at(&path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c_crates_licences_and_the_table_are_recognised() {
        for name in ["cc", "onig_sys", "zstd-sys", "pkg-config", "cmake", "bindgen"] {
            assert!(needs_c(name), "{name}");
        }
        for name in ["windows-sys", "linux-raw-sys", "libc", "ccx", "systemd"] {
            assert!(!needs_c(name), "{name}");
        }
        let allowed = parse_allowed("[licenses]\nallow = [\n  \"MIT\",\n  \"Unicode-3.0\",\n]\n");
        assert_eq!(allowed, ["MIT", "Unicode-3.0"]);
        for licence in ["MIT", "GPL-3.0 OR MIT", "GPL-3.0/MIT", "(MIT OR GPL-3.0) AND Unicode-3.0"] {
            assert!(is_allowed(licence, &allowed), "{licence}");
        }
        for licence in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR GPL-3.0) AND ISC"] {
            assert!(!is_allowed(licence, &allowed), "{licence}");
        }
        let page = "# x\n`not`\n\n| crates | for |\n|---|---|\n| `a` `b` | c |\ntext `d`\n| `e` | f |\n";
        assert_eq!(parse_named(page), ["a", "b", "e"].map(String::from).into());
        assert!(parse_named("no table").is_empty());
    }
}
