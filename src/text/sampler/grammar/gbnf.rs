//! Translates GBNF, llama.cpp's form of BNF, to the syntax of `llguidance`.
//!
//! Rules that are not recursive are regular. Each becomes one terminal and keeps its exact meaning. In a recursive rule,
//! a terminal takes the longest match before what follows it. That may rule out a text of the grammar, but never
//! allows one outside of it.

mod parser;

use super::limits::{MAX_LEVELS, MAX_PATTERN};
use parser::{Expr, Parser, Rule};
use std::fmt::Write;

/// Translates a grammar for `llguidance`.
///
/// # Errors
///
/// What is wrong, after its line and column.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let mut parser = Parser::new(text);
    let root = parser.parse_grammar().map_err(|(at, what)| {
        let before = &text[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("line {line} column {column}: {what}")
    })?;
    let rules = parser.rules;
    let terminal = find_terminals(&rules, root)?;
    let name = |rule: usize| format!("{}{rule}", if terminal[rule] { "T" } else { "r" });
    let mut lark = format!("start: {}\n", name(root));
    for (i, rule) in rules.iter().enumerate() {
        if let Some(body) = &rule.body {
            let _ = write!(lark, "{}: ", name(i));
            let from = lark.len();
            write_expr(body, &name, &mut lark);
            if terminal[i] && lark.len() - from > MAX_PATTERN {
                return Err(format!(
                    "a rule becomes a pattern of more than {MAX_PATTERN} bytes; use a shorter one"
                ));
            }
            lark.push('\n');
        }
    }
    Ok(lark)
}

/// A rule on the way from another one.
struct Step {
    rule: usize,
    /// Rules that it names, each with the groups that it stands in, and how many of them were looked at.
    names: Vec<(usize, usize)>,
    next: usize,
    /// Rules and groups above it.
    levels: usize,
}

/// Which rules lead to no rule that leads back to itself: such a rule is a terminal. Goes from rule to rule as the
/// compiler does, so it says how deep that will be.
fn find_terminals(rules: &[Rule], root: usize) -> Result<Vec<bool>, String> {
    /// No number yet.
    const NEW: usize = usize::MAX;
    // Tarjan's strongly connected components, without recursion.
    let (mut number, mut low, mut count) = (vec![NEW; rules.len()], vec![NEW; rules.len()], 0);
    let (mut terminal, mut open) = (vec![true; rules.len()], Vec::new());
    let mut is_open = vec![false; rules.len()];
    for first in std::iter::once(root).chain(0..rules.len()) {
        let begin =
            |rule: usize, levels: usize| Step { rule, names: named_rules(&rules[rule]), next: 0, levels };
        let mut way = if number[first] == NEW { vec![begin(first, 0)] } else { Vec::new() };
        while let Some(step) = way.last_mut() {
            let rule = step.rule;
            if step.next == 0 && number[rule] == NEW {
                (number[rule], low[rule], count) = (count, count, count + 1);
                open.push(rule);
                is_open[rule] = true;
            }
            if let Some(&(groups, to)) = step.names.get(step.next) {
                if number[to] == NEW {
                    let levels = step.levels + groups + 1;
                    if levels > MAX_LEVELS {
                        return Err(format!(
                            "rules and groups lead more than {MAX_LEVELS} levels deep; use fewer"
                        ));
                    }
                    way.push(begin(to, levels));
                    continue;
                }
                step.next += 1;
                if is_open[to] {
                    // It leads back: all rules between are of one circle.
                    low[rule] = low[rule].min(low[to]);
                    terminal[rule] = false;
                }
                terminal[rule] &= terminal[to];
                continue;
            }
            if low[rule] == number[rule] {
                let from = open.iter().rposition(|&r| r == rule).unwrap_or(0);
                for of in open.split_off(from) {
                    is_open[of] = false;
                    terminal[of] &= terminal[rule];
                }
            }
            way.pop();
        }
    }
    Ok(terminal)
}

/// The rules that a rule names, each with the groups that it stands in.
fn named_rules(rule: &Rule) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    let mut left: Vec<(usize, &Expr)> = rule.body.iter().map(|body| (0, body)).collect();
    while let Some((groups, expr)) = left.pop() {
        match expr {
            Expr::Regex(_) => {}
            Expr::Rule(rule) => found.push((groups, *rule)),
            Expr::Sequence(parts) | Expr::Choice(parts) => {
                left.extend(parts.iter().rev().map(|part| (groups + 1, part)));
            }
            Expr::Repeat(part, ..) => left.push((groups + 1, part)),
        }
    }
    found
}

fn write_expr(expr: &Expr, name: &impl Fn(usize) -> String, out: &mut String) {
    let joined = |parts: &[Expr], between: &str, out: &mut String| {
        out.push('(');
        for (i, part) in parts.iter().enumerate() {
            out.push_str(if i == 0 { "" } else { between });
            write_expr(part, name, out);
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
            // The compiler takes only some thirty groups in each other.
            let is_group = matches!(&**part, Expr::Choice(_))
                || matches!(&**part, Expr::Sequence(all) if !all.is_empty());
            out.push_str(if is_group { "" } else { "(" });
            write_expr(part, name, out);
            out.push_str(if is_group { "" } else { ")" });
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
                        T1: ((/[^b-d\\x{a}]/)+ | (\"\" | /(?s:.)/)?)\n";
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
    fn many_rules_take_as_long_as_they_are_and_a_long_chain_is_refused() {
        let chain = |n: usize| {
            let links = (0..n).map(|i| format!("r{i} ::= \"a\" r{}\n", i + 1)).collect::<String>();
            format!("root ::= r0\n{links}r{n} ::= \"b\"\n")
        };
        let lark = to_lark(&chain(300)).expect("converts");
        assert_eq!(lark.lines().filter(|line| line.starts_with('T')).count(), 302, "all are regular");
        let began = std::time::Instant::now();
        let said = to_lark(&chain(20_000)).expect_err("deep");
        assert!(said.contains("levels deep"), "{said}");
        // As many that are no chain.
        let names = (0..20_000).map(|i| format!("r{i} ")).collect::<String>();
        let flat = (0..20_000).map(|i| format!("r{i} ::= \"a\" | root\n")).collect::<String>();
        let lark = to_lark(&format!("root ::= {names}\n{flat}")).expect("converts");
        assert!(lark.starts_with("start: r0\n") && !lark.contains('T'), "each leads back");
        assert!(began.elapsed().as_secs() < 20, "{:?}", began.elapsed());
    }

    #[test]
    fn a_circle_is_found_from_wherever_it_is_entered() {
        // c and d are a circle, a and b lead to it, e does not.
        let lark =
            to_lark("root ::= a e\na ::= b\nb ::= d e\nc ::= d | e\nd ::= \"(\" c \")\"\ne ::= \"x\"\n");
        let lark = lark.expect("converts");
        let kinds: Vec<_> = lark.lines().skip(1).map(|line| &line[..1]).collect();
        assert_eq!(kinds, ["r", "r", "T", "r", "r", "r"], "{lark}");
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
