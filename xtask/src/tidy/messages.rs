//! The library's messages name its own fields, never flags of the command line, which `src/cli/flags.rs` puts in their
//! place.

use super::code::code_lines;
use super::{Source, is_test};

/// Beginnings of the paths of the library's sources.
const LIBRARY: [&str; 6] = ["src/files/", "src/model", "src/numeric/", "src/opencl", "src/run", "src/text/"];
/// Words before flags of other programs.
const OF_OTHERS: [&str; 4] = ["cargo build", "llama-gguf-split", "models", "org"];

pub fn problems(files: &[Source]) -> Vec<String> {
    let in_library =
        |name: &str| LIBRARY.iter().any(|place| name.starts_with(place)) && name.ends_with(".rs");
    let mut found = Vec::new();
    for (name, text) in files.iter().filter(|(name, _)| in_library(name) && !is_test(name)) {
        // Two hyphens stand in literals only.
        for (number, line) in code_lines(text) {
            let line = line.split(" // ").next().unwrap_or_default();
            if let Some(flag) = find_flag(line) {
                found.push(format!(
                    "{name}:{number}: a message names the flag {flag}: name the field, as `Type::field`"
                ));
            }
        }
    }
    found
}

/// The first flag of this program in a line.
fn find_flag(line: &str) -> Option<&str> {
    let is_ours = |(at, _): &(usize, &str)| {
        line[at + 2..].starts_with(|c: char| c.is_ascii_lowercase())
            && !OF_OTHERS.iter().any(|other| line[..*at].trim_end().ends_with(other))
    };
    let (at, _) = line.match_indices("--").find(is_ours)?;
    line[at..].split(|c: char| c != '-' && !c.is_ascii_lowercase()).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_in_messages_of_the_library_are_found() {
        let check = |message: &str| {
            let code = format!(
                "//! A.\n// --size\nfn f() {{\n    g(\"{message}\") // --size\n}}\n#[test]\nfn t() {{\n    f(\"--size\")\n}}\n"
            );
            problems(&[("src/run/a.rs".into(), code)])
        };
        assert_eq!(check("`Options::size` 3: use 4; cargo build --release"), Vec::<String>::new());
        assert!(check("--size 3: use 4")[0].contains("names the flag --size: name the field"));
        assert!(check("x; raise --max-len")[0].contains("--max-len"));
    }
}
