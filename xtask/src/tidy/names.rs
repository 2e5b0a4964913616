//! Names of types and functions, and the words that doc comments begin with.

use super::code::{code_lines, declared_name, functions};
use super::{Source, is_test};
use std::collections::{BTreeMap, BTreeSet};

/// Folders that are packages of their own; everything else in `src` is one, and so is `xtask`.
const MEMBERS: [&str; 6] =
    ["src/files/", "src/model/", "src/numeric/", "src/opencl/runtime/", "src/text/", "xtask/"];
/// Type names that a member may have twice: `cfg` chooses one of the two.
const TWICE: [&str; 4] = ["ActTile", "BoundDecode", "PersistentKernels", "TensorCores"];
/// The functions in `src` that may be named by one word, ascending.
const BARE_WORDS: &str = include_str!("bare_words.txt");
const BARE_WORDS_FILE: &str = "xtask/src/tidy/bare_words.txt";
/// Words that make a riddle of a doc comment which they begin.
const RIDDLES: [&str; 7] = ["How", "The same", "Those", "What", "Where", "Whether", "Whoever"];

pub fn problems(files: &[Source]) -> Vec<String> {
    let code: Vec<&Source> =
        files.iter().filter(|(name, _)| name.ends_with(".rs") && !is_test(name)).collect();
    let mut found = find_repeated_types(&code);
    found.extend(find_bare_words(&code, BARE_WORDS));
    found.extend(files.iter().flat_map(|(name, text)| find_riddles(name, text)));
    found
}

fn find_repeated_types(files: &[&Source]) -> Vec<String> {
    let mut first: BTreeMap<(&str, &str), String> = BTreeMap::new();
    let mut found = Vec::new();
    for (file, text) in files {
        let member = MEMBERS.into_iter().find(|member| file.starts_with(member)).unwrap_or("src/");
        for (number, line) in code_lines(text) {
            let name = declared_name(line, &["struct", "enum", "trait", "union"]);
            let Some(name) = name.filter(|name| !TWICE.contains(name)) else { continue };
            let place = format!("{file}:{number}");
            match first.get(&(member, name)) {
                Some(other) => found.push(format!(
                    "{place}: type {name} stands in {other} too: name each after what it alone is, as in `GgufHeader`"
                )),
                None => drop(first.insert((member, name), place)),
            }
        }
    }
    found
}

/// Functions of one word that the list lacks, and words of the list that no function has.
fn find_bare_words(files: &[&Source], list: &str) -> Vec<String> {
    let allowed: BTreeSet<&str> = list.lines().collect();
    let mut bare: BTreeMap<&str, String> = BTreeMap::new();
    for (file, text) in files.iter().filter(|(file, _)| file.starts_with("src/")) {
        for (number, name, _) in functions(&code_lines(text)) {
            if !name.contains('_') {
                bare.entry(name).or_insert_with(|| format!("{file}:{number}"));
            }
        }
    }
    let unlisted = bare.iter().filter(|(name, _)| !allowed.contains(*name)).map(|(name, place)| {
        format!(
            "{place}: fn {name} is one bare word: name it verb and object, as in `read_header`; a word that the standard \
             library uses goes into {BARE_WORDS_FILE}"
        )
    });
    let unused = allowed.iter().filter(|name| !bare.contains_key(*name));
    let unused = unused.map(|name| format!("{BARE_WORDS_FILE}: no function is named {name}: take it out"));
    unlisted.chain(unused).collect()
}

fn find_riddles(file: &str, text: &str) -> Vec<String> {
    let (mut found, mut before) = (Vec::new(), None);
    for (number, line) in text.lines().enumerate() {
        let comment = line.trim_start().strip_prefix("//");
        let doc = comment.and_then(|rest| rest.strip_prefix(['/', '!']));
        // A comment of a file and one of an item are two, also without a blank line between them.
        let kind = doc.and(comment).and_then(|rest| rest.chars().next());
        let starts_with = |riddle: &&&str| {
            let rest = doc.and_then(|doc| doc.trim_start().strip_prefix(**riddle));
            rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
        };
        if let Some(riddle) = RIDDLES.iter().find(starts_with).filter(|_| kind != before) {
            found.push(format!(
                "{file}:{}: a doc comment begins with {riddle}: say what the thing is or does, beginning with a noun or a verb",
                number + 1
            ));
        }
        before = kind;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_types_bare_words_and_riddles_are_found() {
        let file = |name: &str, text: &str| (name.to_string(), text.to_string());
        let files = [
            file("src/run/a.rs", "pub struct Header;\nfn len() {}\nfn read_it() {}\n"),
            file(
                "src/cli/b.rs",
                "pub(super) enum Header {}\npub trait TensorCores {}\nstruct TensorCores;\nfn heed() {}\n",
            ),
            file(
                "src/files/a.rs",
                "struct Header;\n#[cfg(test)]\nmod tests {\n    struct Header;\n    fn flee() {}\n}\n",
            ),
            file("xtask/src/a.rs", "fn told() {}\n"),
        ];
        let files: Vec<&Source> = files.iter().collect();
        let types = find_repeated_types(&files);
        assert!(
            types.len() == 1
                && types[0].starts_with("src/cli/b.rs:1: type Header stands in src/run/a.rs:1 too")
        );
        let words = find_bare_words(&files, "gone\nlen\n");
        assert!(words[0].starts_with("src/cli/b.rs:4: fn heed is one bare word: "), "{words:?}");
        assert!(
            words[1].ends_with("bare_words.txt: no function is named gone: take it out") && words.len() == 2
        );
        for (text, count) in [
            ("/// What it is.\nfn f() {}\n", 1),
            ("    /// The same for b.\n", 1),
            ("//! Whether.\n", 1),
            ("/// Whatever comes, the sum.\n/// What continues a sentence.\n", 0),
            ("// How it is done.\n", 0),
        ] {
            assert_eq!(find_riddles("a.rs", text).len(), count, "{text}");
        }
        assert!(BARE_WORDS.lines().is_sorted(), "{BARE_WORDS_FILE}");
    }
}
