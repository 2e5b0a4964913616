//! The pages name files that are there.

use std::path::Path;

/// The pages at the root and beside what they are about.
pub const PAGES: &[&str] = &[
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "tests/README.md",
    "xtask/README.md",
    "models/story/README.md",
    "models/story-draft/README.md",
];

/// Places that a page names by their paths.
const PLACES: &[&str] = &["src/", "xtask/", "tests/", "kernels/", "models/", ".cargo/"];

/// The paths that a page of this name gives in backquotes and that are not under `root`.
pub fn missing(root: &Path, page: &str, text: &str) -> Vec<String> {
    let words = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    // Not patterns, nor names that stand for others: `src/cli/NAME.rs`.
    let plain = |word: &&str| {
        PLACES.iter().any(|place| word.starts_with(place))
            && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"/._-".contains(&b))
    };
    let gone = words.filter(plain).filter(|word| !root.join(word).exists());
    gone.map(|word| format!("{page}: names {word}, which is not there")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_gone_is_found() {
        let text = "`src/lib.rs` and `src/gone.rs`\n`src/cli/NAME.rs`, `kernels/*.cl`, `lib.rs`\n";
        let found = missing(&crate::command::root(), "README.md", text);
        assert_eq!(found, ["README.md: names src/gone.rs, which is not there"]);
    }
}
