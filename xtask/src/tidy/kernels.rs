//! Calls in OpenCL kernels have as many arguments as the functions and macros that they name. Some kernels are compiled
//! on NVIDIA's devices only, where a program falls back to slower ones if they fail.

use super::Source;
use std::collections::{BTreeSet, HashMap};

/// A name with parentheses behind it.
struct Mention<'a> {
    name: &'a str,
    line: usize,
    arguments: usize,
    /// It is defined here.
    is_definition: bool,
}

/// Problems of the kernels among the sources.
pub fn problems(files: &[Source]) -> Vec<String> {
    let kernels = files.iter().filter(|(name, _)| name.ends_with(".cl"));
    let texts: Vec<(&str, String)> = kernels.map(|(name, text)| (&name[..], strip_comments(text))).collect();
    let all: Vec<(&str, Vec<Mention<'_>>)> =
        texts.iter().map(|(name, text)| (*name, list_mentions(text))).collect();
    let mut defined: HashMap<&str, BTreeSet<usize>> = HashMap::new();
    for mention in all.iter().flat_map(|(_, mentions)| mentions).filter(|mention| mention.is_definition) {
        defined.entry(mention.name).or_default().insert(mention.arguments);
    }
    let wrong = |(file, mentions): &(&str, Vec<Mention<'_>>)| -> Vec<String> {
        let unlike = mentions.iter().filter(|mention| {
            defined.get(mention.name).is_some_and(|counts| !counts.contains(&mention.arguments))
        });
        let describe = |Mention { name, line, arguments, .. }: &Mention<'_>| {
            format!("{file}:{line}: {name} has {:?} arguments, not {arguments}", defined[name])
        };
        unlike.map(describe).collect()
    };
    all.iter().flat_map(wrong).collect()
}

/// The text without comments, each line in its place.
fn strip_comments(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or_default().to_owned() + "\n").collect()
}

fn list_mentions(text: &str) -> Vec<Mention<'_>> {
    let bytes = text.as_bytes();
    let is_word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let mut found = Vec::new();
    for (open, _) in text.match_indices('(') {
        let start = bytes[..open].iter().rposition(|byte| !is_word(*byte)).map_or(0, |at| at + 1);
        let name = &text[start..open];
        let Some((arguments, end)) = count_arguments(&bytes[open..]) else { continue };
        if name.is_empty() || name.as_bytes()[0].is_ascii_digit() {
            continue;
        }
        let before = text[..start].trim_end_matches([' ', '\t']);
        let is_macro = before.ends_with("#define");
        // A type comes before a function's name, and a block after it.
        let is_function =
            before.bytes().next_back().is_some_and(|byte| is_word(byte) || b"*)".contains(&byte))
                && text[open + end..].trim_start().starts_with('{')
                && !["if", "for", "while", "switch"].contains(&name);
        let line = 1 + bytes[..open].iter().filter(|byte| **byte == b'\n').count();
        found.push(Mention { name, line, arguments, is_definition: is_macro || is_function });
    }
    found
}

/// Number of arguments between a parenthesis and its partner, and the length of both and what is between.
fn count_arguments(bytes: &[u8]) -> Option<(usize, usize)> {
    let (mut depth, mut commas) = (0, 0);
    for (at, byte) in bytes.iter().enumerate() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth -= 1,
            b',' if depth == 1 => commas += 1,
            _ => {}
        }
        if depth == 0 {
            let between = bytes[1..at].trim_ascii();
            let is_empty = between.is_empty() || between == b"void";
            return Some((if is_empty { 0 } else { commas + 1 }, at + 1));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_with_an_argument_too_few_is_found() {
        let kernels = [
            ("kernels/a.cl", "void scale(float x, int2 n) {\n}\n#define TWICE(x) scale(x, (int2)(2, 2))\n"),
            (
                "kernels/b.cl",
                "void run(void) {\n  scale(1.0f, n[a, b]);\n  // scale(1.0f)\n  TWICE(3);\n  scale(\n2.0f);\n}",
            ),
            ("src/c.rs", "scale(1);"),
        ];
        let kernels = kernels.map(|(name, text)| (name.to_string(), text.to_string()));
        assert_eq!(problems(&kernels), ["kernels/b.cl:5: scale has {2} arguments, not 1"]);
    }
}
