//! Bounds on the regular expressions of a tokenizer file. The engine behind them backtracks where a
//! pattern looks around, so a pattern must not be able to make it explore many ways.

use regex_syntax::ast::parse::ParserBuilder;
use regex_syntax::ast::{self, Ast, GroupKind, RepetitionKind, RepetitionRange};

/// Published patterns have at most a few hundred characters.
const MAX_LENGTH: usize = 2048;
const MAX_NESTING: u32 = 16;
const MAX_COUNT: u32 = 1000;
/// The name that a look-around gets to be parsed, with its position.
const AROUND: &str = "look_around_";

/// Says why `pattern` is refused.
pub(super) fn check(pattern: &str) -> Result<(), String> {
    if pattern.is_empty() || pattern.len() > MAX_LENGTH {
        return Err(format!("a pattern of {} bytes; supported: 1 to {MAX_LENGTH}", pattern.len()));
    }
    let mut parser = ParserBuilder::new().nest_limit(MAX_NESTING).build();
    let ast = parser
        .parse(&without_look_around(pattern))
        .map_err(|e| format!("a pattern that is not supported: {} at {}", e.kind(), e.span().start.offset))?;
    ast::visit(&ast, Repetitions::default())
}

/// The pattern with look-arounds as groups with a name, and possessive repetitions as plain ones: the parser knows
/// neither.
fn without_look_around(pattern: &str) -> String {
    let mut plain = String::new();
    let mut rest = pattern;
    while let Some(c) = rest.chars().next() {
        let around = ["(?=", "(?!", "(?<=", "(?<!"].into_iter().find(|around| rest.starts_with(around));
        let possessive = ["*+", "++", "?+", "}+"].iter().any(|sign| rest.starts_with(sign));
        let escaped = rest.strip_prefix('\\').and_then(|after| after.chars().next());
        let length = around.map_or(c.len_utf8(), str::len) + escaped.map_or(0, char::len_utf8);
        match around {
            Some(_) => plain.push_str(&format!("(?P<{AROUND}{}>", plain.len())),
            None => plain.push_str(&rest[..length]),
        }
        rest = &rest[length + usize::from(possessive)..];
    }
    plain
}

/// What there is around a part of a pattern.
#[derive(Default)]
struct Repetitions {
    repeated: usize,
    looked_around: usize,
}

impl Repetitions {
    fn is_look_around(ast: &Ast) -> bool {
        let Ast::Group(group) = ast else { return false };
        matches!(&group.kind, GroupKind::CaptureName { name, .. } if name.name.starts_with(AROUND))
    }
}

impl ast::Visitor for Repetitions {
    type Output = ();
    type Err = String;

    fn finish(self) -> Result<(), String> {
        Ok(())
    }

    fn visit_pre(&mut self, ast: &Ast) -> Result<(), String> {
        self.looked_around += usize::from(Self::is_look_around(ast));
        let Ast::Repetition(repetition) = ast else { return Ok(()) };
        let highest = match &repetition.op.kind {
            // At most once is no repetition.
            RepetitionKind::ZeroOrOne => return Ok(()),
            RepetitionKind::Range(RepetitionRange::Exactly(n) | RepetitionRange::AtLeast(n)) => *n,
            RepetitionKind::Range(RepetitionRange::Bounded(_, n)) => *n,
            RepetitionKind::ZeroOrMore | RepetitionKind::OneOrMore => 0,
        };
        if highest > MAX_COUNT {
            return Err(format!("a count of {highest}; supported: up to {MAX_COUNT}"));
        }
        if self.looked_around > 0 {
            return Err("a repetition inside a look-around".into());
        }
        if self.repeated > 0 {
            return Err("a repetition of a repetition".into());
        }
        self.repeated += 1;
        Ok(())
    }

    fn visit_post(&mut self, ast: &Ast) -> Result<(), String> {
        self.looked_around -= usize::from(Self::is_look_around(ast));
        if matches!(ast, Ast::Repetition(r) if r.op.kind != RepetitionKind::ZeroOrOne) {
            self.repeated -= 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn published_patterns_pass() {
        for pattern in [
            // Llama 3, Qwen 2, GPT-2, GPT-4o, DeepSeek
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[!-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*",
            r"[a-z&&[^]aeiou]]",
        ] {
            assert_eq!(check(pattern), Ok(()), "{pattern}");
        }
    }

    #[test]
    fn explosive_patterns_are_refused() {
        let nested = format!("{}a{}", "(".repeat(100), ")".repeat(100));
        let long = "a".repeat(3000);
        let classes = "[".repeat(100);
        for pattern in [
            "",
            "(a+)+$",
            "(a*)*",
            "((a+)b?)*",
            "(?:a|b+)+c",
            "(a{1,9}){9}",
            "a{1000000000}",
            "(a)\\1",
            "(?=a+)b",
            "(?<!a*)b",
            r"\k<x>",
            "(?(1)a|b)",
            "[abc",
            "a)",
            &nested,
            &long,
            &classes,
            "(?=(?:a+))",
            "a{99999999999999999999}",
        ] {
            assert!(check(pattern).is_err(), "{pattern}");
        }
    }
}
