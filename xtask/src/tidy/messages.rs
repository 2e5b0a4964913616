//! The library's messages name its own fields, never flags of the command line (`src/cli/flags.rs` puts flags in their
//! place, and its tests know that each is there).

use super::code::Code;

/// Where the library's messages are.
const LIBRARY: &[&str] = &[
    "src/files/",
    "src/model/",
    "src/model.rs",
    "src/numeric/",
    "src/opencl/",
    "src/opencl.rs",
    "src/run/",
    "src/text/",
];
/// Flags of other programs, by the words before them.
const OF_OTHERS: &[&str] = &["cargo build", "llama-gguf-split", "models", "org"];

/// What is wrong with the messages of `files`, each given by its path in the project and its text.
pub fn problems(files: &[(String, String)]) -> Vec<String> {
    let named =
        |name: &str| LIBRARY.iter().any(|place| name.starts_with(place)) && !name.ends_with("/tests.rs");
    let library =
        files.iter().filter(|(name, _)| name.ends_with(".rs") && named(name) && !name.contains("/tests/"));
    let mut found = Vec::new();
    for (name, text) in library {
        for literal in Code::of(text).literals(text) {
            if let Some(flag) = flag(literal) {
                found.push(format!(
                    "{name}: a message names the flag {flag}: name the field, as `Type::field`"
                ));
            }
        }
    }
    found
}

/// The first flag of this program in a text.
fn flag(text: &str) -> Option<&str> {
    let mut at = 0;
    while let Some(next) = text[at..].find("--") {
        let start = at + next;
        at = start + 2;
        let name = text[at..].starts_with(|c: char| c.is_ascii_lowercase());
        if name && !OF_OTHERS.iter().any(|other| text[..start].trim_end().ends_with(other)) {
            return text[start..].split(|c: char| c != '-' && !c.is_ascii_lowercase()).next();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_found() {
        let check = |message: &str| {
            let code = format!(
                "//! A.\n// --size\nfn f() {{ g(\"{message}\") }}\n#[test]\nfn t() {{ f(\"--size\") }}\n"
            );
            problems(&[("src/run/a.rs".into(), code)])
        };
        assert_eq!(check("`Options::size` 3: use 4; cargo build --release"), Vec::<String>::new());
        assert!(
            check("--size 3: use 4")[0].ends_with("names the flag --size: name the field, as `Type::field`")
        );
        assert!(check("x; raise --max-len")[0].contains("--max-len"));
    }
}
