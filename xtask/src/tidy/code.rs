//! What tidy reads of a Rust file: its code without comments, literals and tests, and the names, paths and functions in it.

use std::ops::Range;

/// The code of one file, as long as the file: comments and tests are blanks, literals are quotation marks.
pub struct Code(String);

/// A path of names as it is written, such as `crate::run::plan::Plan`.
#[derive(Debug, Clone, PartialEq)]
pub struct Path {
    pub names: Vec<String>,
    /// The name that a `use` gives it; `None` for a path in the code and for `*`.
    pub alias: Option<String>,
    pub line: usize,
}

/// A function: its name, its first line, its lines of code.
#[derive(Debug, PartialEq)]
pub struct Function {
    pub name: String,
    pub line: usize,
    pub lines: usize,
}

/// An identifier, `::`, or any other character.
#[derive(Clone, Copy)]
struct Token<'a> {
    text: &'a str,
    at: usize,
}

impl Token<'_> {
    fn is_name(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

impl Code {
    pub fn of(text: &str) -> Self {
        let mut code = text.as_bytes().to_vec();
        let mut at = 0;
        while at < text.len() {
            let (end, with) = skipped(&text[at..]);
            fill(&mut code, at..at + end, with);
            at += end.max(1);
        }
        let mut code = String::from_utf8(code).expect("whole characters were overwritten");
        while let Some(test) = first_test(&code) {
            let mut bytes = code.into_bytes();
            fill(&mut bytes, test, Some(b' '));
            code = String::from_utf8(bytes).expect("whole characters were overwritten");
        }
        Self(code)
    }

    /// Lines that hold code.
    pub fn lines(&self) -> usize {
        lines(&self.0)
    }

    /// The literals of the text that this is the code of.
    pub fn literals<'a>(&self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let marks = self.0.as_bytes();
        let mut at = 0;
        std::iter::from_fn(move || {
            let start = at + marks[at..].iter().position(|&b| b == b'"')?;
            // Across lines, whose ends are left as they are.
            let length = marks[start..].iter().position(|&b| b != b'"' && b != b'\n');
            at = length.map_or(marks.len(), |n| start + n);
            Some(&text[start..at])
        })
    }

    /// The modules that this file declares.
    pub fn modules(&self) -> Vec<&str> {
        let tokens = tokens(&self.0);
        tokens.windows(2).filter(|w| w[0].text == "mod" && w[1].is_name()).map(|w| w[1].text).collect()
    }

    pub fn functions(&self) -> Vec<Function> {
        let tokens = tokens(&self.0);
        let starts = tokens.windows(2).enumerate().filter(|(_, w)| w[0].text == "fn" && w[1].is_name());
        starts
            .filter_map(|(i, w)| {
                let end = item_end(&tokens[i..])?;
                let (text, line) = (&self.0[w[0].at..tokens[i + end].at + 1], self.line(w[0].at));
                text.ends_with('}').then(|| Function { name: w[1].text.into(), line, lines: lines(text) })
            })
            .collect()
    }

    /// The paths of `use` declarations, and those in the code that have at least two names.
    pub fn paths(&self) -> Vec<Path> {
        let tokens = tokens(&self.0);
        let (mut found, mut i) = (Vec::new(), 0);
        while i < tokens.len() {
            let declares = tokens[i].text == "use" && tokens.get(i + 1).is_some_and(|t| t.text != "<");
            let mut at = i + usize::from(declares);
            if declares {
                self.tree(&tokens, &mut at, Vec::new(), &mut found);
            } else {
                let names = names(&tokens, &mut at);
                if names.len() > 1 {
                    found.push(Path { names, alias: None, line: self.line(tokens[i].at) });
                }
            }
            i = at.max(i + 1);
        }
        found
    }

    /// Reads what a `use` declares from token `at` on, after the names of `above`.
    fn tree(&self, tokens: &[Token<'_>], at: &mut usize, above: Vec<String>, found: &mut Vec<Path>) {
        let Some(first) = tokens.get(*at) else { return };
        let own = names(tokens, at);
        let names = [above, own].concat();
        match tokens.get(*at).map(|t| t.text) {
            Some("{") => {
                *at += 1;
                while tokens.get(*at).is_some_and(|t| t.text != "}") {
                    let before = *at;
                    self.tree(tokens, at, names.clone(), found);
                    if tokens.get(*at).is_some_and(|t| t.text == ",") || *at == before {
                        *at += 1;
                    }
                }
                *at += 1;
            }
            Some("*") => {
                *at += 1;
                found.push(Path { names, alias: None, line: self.line(first.at) });
            }
            next => {
                let renamed = next == Some("as");
                let alias =
                    if renamed { tokens.get(*at + 1).map(|t| t.text.into()) } else { names.last().cloned() };
                *at += if renamed { 2 } else { 0 };
                found.push(Path { names, alias, line: self.line(first.at) });
            }
        }
    }

    fn line(&self, at: usize) -> usize {
        1 + self.0[..at].matches('\n').count()
    }
}

/// How many bytes at the start of `rest` are a comment or a literal, and what takes their place.
fn skipped(rest: &str) -> (usize, Option<u8>) {
    let until = |end: &str, from: usize| rest[from..].find(end).map_or(rest.len(), |n| from + n + end.len());
    let first = rest.chars().next().map_or(1, char::len_utf8);
    if rest.starts_with("//") {
        (rest.find('\n').unwrap_or(rest.len()), Some(b' '))
    } else if rest.starts_with("/*") {
        (until("*/", 2), Some(b' '))
    } else if rest.starts_with("r\"") || rest.starts_with("r#") {
        let marks = rest[1..].bytes().take_while(|&b| b == b'#').count();
        let raw = rest[1 + marks..].starts_with('"');
        if raw { (until(&format!("\"{}", "#".repeat(marks)), 2 + marks), Some(b'"')) } else { (2, None) }
    } else if rest.starts_with('"') {
        (quoted(rest, '"'), Some(b'"'))
    } else if let Some(inner) = rest.strip_prefix('\'') {
        // A lifetime has no second quotation mark right after its first character.
        let mut chars = inner.chars();
        let literal = chars.next() == Some('\\') || chars.next() == Some('\'');
        if literal { (quoted(rest, '\''), Some(b'"')) } else { (1, None) }
    } else if first == 1 && rest.starts_with(|c: char| c.is_alphanumeric() || c == '_') {
        // A whole word, so that an r at its end starts no raw literal. The prefixes b and c leave their literal.
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        if ["br", "cr"].contains(&&rest[..word]) { (1, None) } else { (word, None) }
    } else {
        (first, None)
    }
}

/// The length of a literal with escapes, from one quotation mark to the other.
fn quoted(rest: &str, mark: char) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        if c == mark && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    rest.len()
}

fn fill(code: &mut [u8], range: Range<usize>, with: Option<u8>) {
    let Some(with) = with else { return };
    code[range].iter_mut().filter(|b| **b != b'\n').for_each(|b| *b = with);
}

/// The first item that only tests have, its attribute included.
fn first_test(code: &str) -> Option<Range<usize>> {
    let start =
        ["#[cfg(test)]", "#[cfg(all(test", "#[test]"].iter().filter_map(|mark| code.find(mark)).min()?;
    let tokens = tokens(&code[start..]);
    let end = item_end(&tokens).map_or(code.len(), |end| start + tokens[end].at + 1);
    Some(start..end)
}

/// The last token of the item that the tokens begin with: `;` or the end of the body, whichever comes first.
fn item_end(tokens: &[Token<'_>]) -> Option<usize> {
    let mut depth = 0;
    let mut imports = false;
    for (i, token) in tokens.iter().enumerate() {
        match token.text {
            "use" if depth == 0 => imports = true,
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        // The braces of `Name<{ N }>` and those of imports are no body.
        let argument = tokens.get(i + 1).is_some_and(|next| [">", ","].contains(&next.text));
        if depth == 0 && (token.text == ";" || token.text == "}" && !imports && !argument) {
            return Some(i);
        }
    }
    None
}

/// The names of the path at token `at`, which moves past it. A leading `::` counts as an empty name.
fn names(tokens: &[Token<'_>], at: &mut usize) -> Vec<String> {
    let mut names = Vec::new();
    if tokens.get(*at).is_some_and(|t| t.text == "::") {
        names.push(String::new());
        *at += 1;
    }
    while let Some(name) = tokens.get(*at).filter(|t| t.is_name()) {
        names.push(name.text.to_owned());
        *at += 1;
        if tokens.get(*at).is_none_or(|t| t.text != "::") {
            break;
        }
        *at += 1;
    }
    names
}

fn lines(code: &str) -> usize {
    code.lines().filter(|line| !line.trim().is_empty()).count()
}

fn tokens(code: &str) -> Vec<Token<'_>> {
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(c) = code[at..].chars().next() {
        let word = code[at..].find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(code.len() - at);
        let length = if word > 0 {
            word
        } else if code[at..].starts_with("::") {
            2
        } else {
            c.len_utf8()
        };
        if !c.is_whitespace() {
            found.push(Token { text: &code[at..at + length], at });
        }
        at += length;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(text: &str) -> Vec<String> {
        let shown =
            |p: Path| p.names.join("::") + &p.alias.map_or(String::new(), |alias| format!(" as {alias}"));
        Code::of(text).paths().into_iter().map(shown).collect()
    }

    #[test]
    fn paths_are_found_in_imports_and_in_code() {
        assert_eq!(
            paths("use crate::a::{self, B, c::{D as E, *}};\nfn f() { super::g::h(x::<y::Z>) }"),
            [
                "crate::a::self as self",
                "crate::a::B as B",
                "crate::a::c::D as E",
                "crate::a::c",
                "super::g::h",
                "y::Z"
            ]
        );
        assert_eq!(paths("use ::files::Error;"), ["::files::Error as Error"]);
    }

    #[test]
    fn comments_literals_and_tests_name_nothing() {
        let text = "// a::b\n/* a::b */ const S: &str = \"a::b \\\" a::b\"; const R: &str = r#\"a::b \" a::b\"#;\n\
                    const C: char = '\"'; fn f<'a>(x: &'a str) {}\n\
                    #[cfg(test)]\nuse a::{b, c};\n#[cfg(test)]\nmod tests { fn g() { a::b() } }\nuse d::e;";
        assert_eq!(paths(text), ["d::e as e"]);
    }

    #[test]
    fn functions_are_counted_without_blanks_and_comments() {
        let text = "fn a(\n    x: [u8; 2],\n) {\n    // why\n\n    b()\n}\ntrait T {\n    fn c();\n}\n";
        assert_eq!(Code::of(text).functions(), [Function { name: "a".into(), line: 1, lines: 5 }]);
        assert_eq!(Code::of(text).lines(), 8);
    }
}
