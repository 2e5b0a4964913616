//! The Markdown pages name only files that exist.

use std::path::Path;

/// The pages that are checked.
pub const PAGES: &[&str] = &[
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    "CRATES.md",
    "src/serve/README.md",
    "xtask/MEASUREMENTS.md",
    "xtask/README.md",
    "xtask/SEVERAL-MACHINES.md",
    "models/story/README.md",
    "models/story-draft/README.md",
];

/// Beginnings of the paths that a page names.
const PLACES: &[&str] = &["src/", "xtask/", "tests/", "kernels/", "models/", ".cargo/"];

/// Problems of a page: the paths in backquotes that do not exist under `root`.
pub fn find_missing(root: &Path, page: &str, text: &str) -> Vec<String> {
    let words = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    // Neither patterns nor placeholders: `src/cli/NAME.rs`.
    let plain = |word: &&str| {
        PLACES.iter().any(|place| word.starts_with(place))
            && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"/._-".contains(&b))
    };
    let gone = words.filter(plain).filter(|word| !root.join(word).exists());
    gone.map(|word| format!("{page}: names {word}, which does not exist")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_gone_is_found() {
        let text = "`src/lib.rs` and `src/gone.rs`\n`src/cli/NAME.rs`, `kernels/*.cl`, `lib.rs`\n";
        let found = find_missing(&crate::command::root(), "README.md", text);
        assert_eq!(found, ["README.md: names src/gone.rs, which does not exist"]);
    }
}
