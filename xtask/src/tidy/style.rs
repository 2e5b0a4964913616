//! How files begin, what they are called and how long they and their functions are.

use super::code::Code;

const BAD_NAMES: &[&str] =
    &["mod.rs", "utils.rs", "util.rs", "helpers.rs", "helper.rs", "common.rs", "manager.rs"];
// Written in two pieces so that this file passes its own check.
const MARKS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Lines of code, not counting tests: of a file, of a function, and of one that lists the steps of a pass.
const FILE: usize = 400;
const FUNCTION: usize = 60;
const FORWARD: usize = 120;
const FORWARDS: &[&str] = &["forward", "pass"];

/// Functions that are longer all the same: the file, the name, and why.
const LONGER: &[(&str, &str, &str)] =
    &[("src/numeric/simd/amx", "add_products", "one loop of assembly, whose macros share its registers")];

/// What is wrong with one file, whatever its code says.
pub fn problems(name: &str, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    if name.ends_with(".rs") && !text.starts_with("//! ") {
        found.push(format!("{name}:1: the first line is not `//! ` and what the file owns"));
    }
    if let Some(bad) = BAD_NAMES.iter().find(|bad| name.rsplit('/').next() == Some(bad)) {
        found.push(format!("{name}: a file named {bad}: name it after what it owns (foo.rs beside foo/)"));
    }
    for (i, line) in text.lines().enumerate() {
        for mark in MARKS.iter().filter(|mark| line.contains(**mark)) {
            found.push(format!(
                "{name}:{}: {mark}: do it, or write the limit down where users read it",
                i + 1
            ));
        }
    }
    if name.ends_with(".cl") {
        found.extend(too_long_file(name, &Code::of(text)));
    }
    found
}

/// What is too long in a file of Rust, whose name comes without `.rs`.
pub fn too_long(name: &str, code: &Code) -> Vec<String> {
    let mut found: Vec<String> = too_long_file(&format!("{name}.rs"), code).into_iter().collect();
    for f in code.functions() {
        let most = if FORWARDS.contains(&f.name.as_str()) { FORWARD } else { FUNCTION };
        let longer = LONGER.iter().any(|(file, function, _)| (*file, *function) == (name, &f.name));
        if f.lines > most && !longer {
            found.push(format!(
                "{name}.rs:{}: fn {}: {} lines of code, of at most {most}",
                f.line, f.name, f.lines
            ));
        }
    }
    found
}

fn too_long_file(file: &str, code: &Code) -> Option<String> {
    let lines = code.lines();
    (lines > FILE)
        .then(|| format!("{file}: {lines} lines of code, of at most {FILE}: a file that asks to be split"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_first_lines() {
        let check = |name: &str, text: &str| problems(name, text).len();
        assert_eq!(check("src/a.rs", "//! Owns a.\n"), 0);
        assert_eq!(check("src/a.rs", "fn main() {}\n"), 1);
        assert_eq!(check("src/a/mod.rs", "//! Owns a.\n"), 1);
        assert_eq!(check("tests/helpers.rs", "//! Owns a.\n"), 1);
        assert_eq!(check("src/uncommon.rs", "//! Owns a.\n"), 0);
        assert_eq!(check("kernels/common.cl", "// prepended\n"), 0);
        assert_eq!(check("src/a.rs", &format!("//! Owns a.\n// {}: later\n", MARKS[0])), 1);
    }

    #[test]
    fn lengths_are_of_code() {
        let long = |text: &str| too_long("src/a", &Code::of(text)).len();
        let line = "const A: usize = 1;\n";
        assert_eq!(long(&line.repeat(FILE)), 0);
        assert_eq!(long(&line.repeat(FILE + 1)), 1);
        assert_eq!(
            long(&format!("{}\n// why\n#[cfg(test)]\nmod tests {{\n{line}}}\n", line.repeat(FILE))),
            0
        );
        assert_eq!(problems("kernels/a.cl", &"float x;\n".repeat(FILE + 1)).len(), 1);

        let function =
            |name: &str, lines: usize| format!("fn {name}() {{\n{}}}\n", "f();\n".repeat(lines - 2));
        assert_eq!(long(&function("a", FUNCTION)), 0);
        assert_eq!(long(&function("a", FUNCTION + 1)), 1);
        assert_eq!(long(&function("forward", FORWARD)), 0);
        assert_eq!(long(&function("forward", FORWARD + 1)), 1);

        let (file, name, _) = LONGER[0];
        assert_eq!(too_long(file, &Code::of(&function(name, FUNCTION + 1))), Vec::<String>::new());
    }
}
