//! Parts of the package use only those below them. The manifests of the members check that between packages.

use super::code::code_lines;
use super::{Source, is_test};

/// Folders of `src`, the lowest first: a part may use itself and the ones before it.
const PARTS: [&str; 6] = ["opencl", "run", "cli", "serve", "tools", "commands"];
/// Names that a folder may not use: devices do not know each other, and nothing above them knows a memory layout.
const APART: [(&str, &str); 13] = [
    ("src/opencl", "crate::model::cpu"),
    ("src/run", "numeric::quant"),
    ("src/run", "files::blocks"),
    ("src/cli", "numeric::quant"),
    ("src/cli", "files::blocks"),
    ("src/run", "crate::ffi"),
    ("src/cli", "crate::ffi"),
    ("src/ffi", "crate::serve"),
    ("src/ffi", "crate::tools"),
    ("src/ffi", "numeric::"),
    ("src/serve", "numeric::"),
    ("src/tools", "numeric::quant"),
    ("src/tools", "files::blocks"),
];

pub fn problems(files: &[Source]) -> Vec<String> {
    let mut found = Vec::new();
    let is_code = |name: &str| name.starts_with("src/") && name.ends_with(".rs") && !is_test(name);
    for (name, text) in files.iter().filter(|(name, _)| is_code(name)) {
        for (number, line) in code_lines(text) {
            let named = find_upward(name, line).or_else(|| find_apart(name, line));
            found.extend(named.map(|named| {
                format!("{name}:{number}: uses {named}, which is not below it: see PARTS in xtask/src/tidy/parts.rs")
            }));
        }
    }
    found
}

/// The index in [`PARTS`] of a file.
fn part_of(file: &str) -> Option<usize> {
    PARTS.iter().position(|part| is_in(file, &format!("src/{part}")))
}

fn is_in(file: &str, place: &str) -> bool {
    file.strip_prefix(place).is_some_and(|rest| rest.starts_with('/') || rest == ".rs")
}

/// A part above the file's own that the line names.
fn find_upward<'a>(file: &str, line: &'a str) -> Option<&'a str> {
    let own = part_of(file)?;
    let words = line.split("crate::").skip(1).flat_map(|rest| match rest.strip_prefix('{') {
        Some(group) => group.split(", ").collect(),
        None => vec![rest],
    });
    let names = words.map(|word| word.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(""));
    names.into_iter().find(|name| PARTS.iter().position(|part| part == name).is_some_and(|part| part > own))
}

/// A name of [`APART`] that the line has.
fn find_apart(file: &str, line: &str) -> Option<&'static str> {
    let of_file = APART.iter().filter(|(place, _)| is_in(file, place));
    of_file.map(|(_, other)| *other).find(|other| line.contains(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn imports_of_a_higher_part_are_found() {
        let check = |name: &str, line: &str| problems(&[(name.into(), format!("//! A.\n{line}\n"))]).len();
        for (name, line) in [
            ("src/cli/generate.rs", "use crate::run::engine;"),
            ("src/run.rs", "use crate::{dims, opencl};"),
            ("src/opencl/kv.rs", "use crate::model::device::Device;"),
            ("src/run/plan.rs", "// crate::cli"),
            ("src/lib.rs", "use crate::cli;"),
        ] {
            assert_eq!(check(name, line), 0, "{name} {line}");
        }
        for (name, line) in [
            ("src/run/engine.rs", "use crate::cli::args;"),
            ("src/opencl/weights.rs", "fn f() { crate::{dims, run}::g() }"),
            ("src/opencl/kv.rs", "use crate::model::cpu::kv;"),
            ("src/run/plan.rs", "use numeric::quant::format;"),
        ] {
            assert_eq!(check(name, line), 1, "{name} {line}");
        }
    }
}
