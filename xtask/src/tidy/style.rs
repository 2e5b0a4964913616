//! The first line of a file, its name, and the length of files and functions.

use super::code::{code_lines, functions};
use super::is_test;

/// Clippy refuses `mod.rs`.
const BAD_NAMES: [&str; 6] = ["utils.rs", "util.rs", "helpers.rs", "helper.rs", "common.rs", "manager.rs"];
// Written in two pieces so that this file passes its own check.
const MARKS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Maximum lines of code without tests: of a file, of a function, and of one that lists the steps of a pass.
const FILE: usize = 400;
const FUNCTION: usize = 60;
const FORWARD: usize = 120;
const FORWARDS: [&str; 2] = ["forward", "compute_pass"];
/// Functions that may be longer: the file, the name, and the reason.
const LONGER: [(&str, &str, &str); 1] =
    [("src/numeric/simd/amx.rs", "add_products", "one loop of assembly, whose macros share its registers")];

pub fn problems(name: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    if name.ends_with(".rs") && !text.starts_with("//! ") {
        found.push(format!("{name}:1: the first line is not `//! ` and a sentence on what the file holds"));
    }
    if let Some(bad) = BAD_NAMES.iter().find(|bad| name.rsplit('/').next() == Some(bad)) {
        found.push(format!("{name}: a file named {bad}: name it after the type or task that it holds"));
    }
    for (i, line) in text.lines().enumerate() {
        for mark in MARKS.iter().filter(|mark| line.contains(**mark)) {
            found.push(format!("{name}:{}: {mark}: do it, or state the limit where users read it", i + 1));
        }
    }
    if !is_test(name) {
        found.extend(check_lengths(name, text));
    }
    found
}

fn check_lengths(name: &str, text: &str) -> Vec<String> {
    let (lines, mut found) = (code_lines(text), Vec::new());
    if lines.len() > FILE {
        found.push(format!("{name}: {} lines of code, of at most {FILE}: split the file", lines.len()));
    }
    let functions = if name.ends_with(".rs") { functions(&lines) } else { Vec::new() };
    for (number, function, length) in functions {
        let most = if FORWARDS.contains(&function) { FORWARD } else { FUNCTION };
        let is_excused = LONGER.iter().any(|(file, of, _)| (*file, *of) == (name, function));
        if length > most && !is_excused {
            found.push(format!(
                "{name}:{number}: fn {function}: {length} lines of code, of at most {most}: split it"
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_first_lines_names_and_lengths_are_found() {
        let check = |name: &str, text: &str| problems(name, text).len();
        let line = "const A: usize = 1;\n";
        let function = |name: &str, lines: usize| {
            format!("//! A.\nfn {name}() {{\n{}}}\n", "    f();\n".repeat(lines - 2))
        };
        for (name, text, count) in [
            ("src/a.rs", "//! Owns a.\n".into(), 0),
            ("src/a.rs", "fn main() {}\n".into(), 1),
            ("tests/helpers.rs", "//! Owns a.\n".into(), 1),
            ("src/uncommon.rs", "//! Owns a.\n".into(), 0),
            ("kernels/common.cl", "// prepended\n".into(), 0),
            ("src/a.rs", format!("//! Owns a.\n// {}: later\n", MARKS[0]), 1),
            ("src/a.rs", format!("//! A.\n{}", line.repeat(FILE)), 0),
            ("src/a.rs", format!("//! A.\n{}", line.repeat(FILE + 1)), 1),
            ("kernels/a.cl", "float x;\n".repeat(FILE + 1), 1),
            ("src/a.rs", function("a", FUNCTION), 0),
            ("src/a.rs", function("a", FUNCTION + 1), 1),
            ("src/a.rs", function("forward", FORWARD), 0),
            (LONGER[0].0, function(LONGER[0].1, FUNCTION + 1), 0),
        ] {
            assert_eq!(check(name, &text), count, "{name} {} lines", text.lines().count());
        }
    }
}
