//! Translates GBNF, llama.cpp's form of BNF, to the syntax of `llguidance`.
//!
//! Rules that are not recursive are regular. Each becomes one terminal and keeps its exact meaning. In a recursive rule,
//! a terminal takes the longest match before what follows it. That may rule out a text of the grammar, but never
//! allows one outside of it.

mod parser;

use parser::{Expr, Parser, Rule};
use std::fmt::Write;

/// The same grammar for `llguidance`.
///
/// # Errors
///
/// What is wrong, after its line and column.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let mut parser = Parser::new(text);
    let root = parser.grammar().map_err(|(at, what)| {
        let before = &text[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("line {line} column {column}: {what}")
    })?;
    let rules = parser.rules;
    let recursive: Vec<bool> = (0..rules.len()).map(|rule| leads_back(&rules, rule)).collect();
    // A rule that reaches a recursive rule cannot be a terminal either.
    let terminal: Vec<bool> =
        (0..rules.len()).map(|rule| !reached(&rules, rule).iter().any(|&r| recursive[r])).collect();
    let name = |rule: usize| format!("{}{rule}", if terminal[rule] { "T" } else { "r" });
    let mut lark = format!("start: {}\n", name(root));
    for (i, rule) in rules.iter().enumerate() {
        if let Some(body) = &rule.body {
            let _ = write!(lark, "{}: ", name(i));
            emit(body, &name, &mut lark);
            lark.push('\n');
        }
    }
    Ok(lark)
}

/// The rules that a rule leads to, itself included.
fn reached(rules: &[Rule], from: usize) -> Vec<usize> {
    let mut found = vec![from];
    let mut next = 0;
    while let Some(&rule) = found.get(next) {
        next += 1;
        for named in named(&rules[rule]) {
            if !found.contains(&named) {
                found.push(named);
            }
        }
    }
    found
}

fn leads_back(rules: &[Rule], rule: usize) -> bool {
    named(&rules[rule]).iter().any(|&next| reached(rules, next).contains(&rule))
}

/// The rules that a rule names.
fn named(rule: &Rule) -> Vec<usize> {
    let mut found = Vec::new();
    let mut left: Vec<&Expr> = rule.body.iter().collect();
    while let Some(expr) = left.pop() {
        match expr {
            Expr::Regex(_) => {}
            Expr::Rule(rule) => found.push(*rule),
            Expr::Sequence(parts) | Expr::Choice(parts) => left.extend(parts),
            Expr::Repeat(part, ..) => left.push(part),
        }
    }
    found
}

fn emit(expr: &Expr, name: &impl Fn(usize) -> String, out: &mut String) {
    let joined = |parts: &[Expr], between: &str, out: &mut String| {
        out.push('(');
        for (i, part) in parts.iter().enumerate() {
            out.push_str(if i == 0 { "" } else { between });
            emit(part, name, out);
        }
        out.push(')');
    };
    match expr {
        Expr::Regex(regex) => {
            let _ = write!(out, "/{regex}/");
        }
        Expr::Rule(rule) => out.push_str(&name(*rule)),
        // Nothing at all.
        Expr::Sequence(parts) if parts.is_empty() => out.push_str("\"\""),
        Expr::Sequence(parts) => joined(parts, " ", out),
        Expr::Choice(parts) => joined(parts, " | ", out),
        Expr::Repeat(part, least, most) => {
            out.push('(');
            emit(part, name, out);
            out.push(')');
            let _ = match (least, most) {
                (0, None) => write!(out, "*"),
                (1, None) => write!(out, "+"),
                (0, Some(1)) => write!(out, "?"),
                (least, None) => write!(out, "{{{least},}}"),
                (least, Some(most)) => write!(out, "{{{least},{most}}}"),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_rules_are_terminals() {
        let lark = to_lark("root ::= \"a-\" x{2,3}\n# comment\nx ::= [^b-d\\n]+ |\n  ( \"\" | .)? # end\n");
        let expected = "start: T0\nT0: (/a\\x{2d}/ (T1){2,3})\n\
                        T1: ((/[^b-d\\x{a}]/)+ | ((\"\" | /(?s:.)/))?)\n";
        assert_eq!(lark.as_deref(), Ok(expected));
    }

    #[test]
    fn recursive_rules_are_rules() {
        let lark = to_lark(
            "root ::= list\nlist ::= \"[\" (item (\",\" item)*)? \"]\"\nitem ::= num | list\nnum ::= [0-9]+",
        );
        let lines = lark.expect("converts");
        for start in ["start: r0", "r0: r1", "r1: ", "r2: (T3 | r1)", "T3: "] {
            assert!(lines.lines().any(|l| l.starts_with(start)), "{start}: {lines}");
        }
    }

    #[test]
    fn errors_have_a_place() {
        let deep = format!("root ::= {}", "(".repeat(100));
        for (text, at, words) in [
            ("", "line 1 column 1", "no rule root"),
            ("root ::= \"a\n", "line 1 column 10", "no end"),
            ("root ::= [a\n", "line 1 column 10", "no end"),
            ("root ::= [b-a]", "line 1 column 11", "upside down"),
            ("root ::= []", "line 1 column 10", "no characters"),
            ("root ::= (\"a\"\n", "line 2 column 1", ") is missing"),
            ("root ::= x\ny ::= \"a\"", "line 1 column 10", "no rule x"),
            ("root ::= \"a\"\nroot ::= \"b\"", "line 2 column 1", "twice"),
            ("root = \"a\"", "line 1 column 6", "::="),
            ("root ::= \"\\q\"", "line 1 column 11", "unknown escape"),
            ("root ::= \"\\uD800\"", "line 1 column 11", "hexadecimal"),
            ("root ::= \"a\"{3,2}", "line 1 column 13", "{m,n}"),
            ("root ::= \"a\"{99999}", "line 1 column 13", "{m,n}"),
            ("root ::= \"a\" )", "line 1 column 14", "should end here"),
            ("root ::= é", "line 1 column 10", "should end here"),
            (&deep, "line 1 column 75", "groups"),
        ] {
            let said = to_lark(text).expect_err(text);
            assert!(said.starts_with(at) && said.contains(words), "{text:?}: {said}");
        }
    }
}
