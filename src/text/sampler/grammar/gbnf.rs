//! Translates GBNF, llama.cpp's form of BNF, to the syntax of `llguidance`.
//!
//! Rules that are not recursive are regular: each becomes one terminal and keeps its exact meaning. In a recursive
//! rule, a terminal always takes the longest match. That may rule out some texts of the grammar, but never allows one
//! that it does not have.

mod parser;

use super::limits::{MAX_LEVELS, MAX_PATTERN};
use parser::{Parser, Rule};
use std::fmt::Write;

/// Translates a grammar for `llguidance`.
///
/// # Errors
///
/// A message with line and column.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let mut parser = Parser::new(text);
    let root = parser.parse_grammar().map_err(|(at, what)| {
        let before = &text[..at];
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
        format!("line {line} column {column}: {what}")
    })?;
    let is_regular = find_regular(&parser.rules)?;
    let name = |rule: usize| format!("{}{rule}", if is_regular[rule] { "T" } else { "r" });
    let mut lark = format!("start: {}\n", name(root));
    for (i, rule) in parser.rules.iter().enumerate() {
        let body = rule.body.as_ref().map_or("", |body| &body.lark);
        if is_regular[i] && body.len() > MAX_PATTERN {
            return Err(format!(
                "a rule becomes a pattern of more than {MAX_PATTERN} bytes; use a shorter one"
            ));
        }
        let _ = write!(lark, "{}: ", name(i));
        for (at, part) in body.split('@').enumerate() {
            // Every second part is the number of a rule: see `Expr::lark`.
            let rule = part.parse().ok().filter(|_| at % 2 == 1).map(name);
            lark.push_str(rule.as_deref().unwrap_or(part));
        }
        lark.push('\n');
    }
    Ok(lark)
}

/// Returns true for each rule that is regular: neither it nor a rule that it uses is recursive. Refuses rules nested
/// too deep: the compiler follows them by recursion.
fn find_regular(rules: &[Rule]) -> Result<Vec<bool>, String> {
    let names: Vec<&[(usize, usize)]> =
        rules.iter().map(|rule| rule.body.as_ref().map_or(&[][..], |body| &body.names)).collect();
    let mut named_by = vec![Vec::new(); rules.len()];
    for (rule, names) in names.iter().enumerate() {
        names.iter().for_each(|&(_, to)| named_by[to].push(rule));
    }
    // A rule is regular once all rules that it names are.
    let mut open: Vec<usize> = names.iter().map(|names| names.len()).collect();
    let mut ready: Vec<usize> = (0..rules.len()).filter(|&rule| open[rule] == 0).collect();
    let mut levels: Vec<Option<usize>> = vec![None; rules.len()];
    while let Some(rule) = ready.pop() {
        let below = names[rule].iter().map(|&(groups, to)| groups + 1 + levels[to].unwrap_or(0));
        levels[rule] = Some(below.max().unwrap_or(0));
        for &by in &named_by[rule] {
            open[by] -= 1;
            if open[by] == 0 {
                ready.push(by);
            }
        }
    }
    // A path through the recursive rules may use all of them.
    let deepest = levels.iter().flatten().max().copied().unwrap_or(0);
    let others = names.iter().zip(&levels).filter(|(_, level)| level.is_none());
    let others: usize = others.map(|(names, _)| 1 + names.iter().map(|name| name.0).max().unwrap_or(0)).sum();
    if deepest > MAX_LEVELS || others > 2 * MAX_LEVELS {
        return Err(format!("rules and groups are nested more than {MAX_LEVELS} levels deep; use fewer"));
    }
    Ok(levels.iter().map(Option::is_some).collect())
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
        // Many that are no chain.
        let flat = |n: usize, more: &str| {
            let names = (0..n).map(|i| format!("r{i} ")).collect::<String>();
            let rules = (0..n).map(|i| format!("r{i} ::= \"a\"{more}\n")).collect::<String>();
            to_lark(&format!("root ::= {names}\n{rules}"))
        };
        let lark = flat(2_000, "").expect("converts");
        assert!(lark.starts_with("start: T0\n") && !lark.contains("\nr"), "none leads back");
        let lark = flat(1_000, " | root").expect("converts");
        assert!(lark.starts_with("start: r0\n") && !lark.contains('T'), "each leads back");
        assert!(flat(20_000, " | root").expect_err("each leads back").contains("levels deep"));
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
            ("", "line 1 column 1", "rule root is not defined"),
            ("root ::= \"a\n", "line 1 column 10", "no end"),
            ("root ::= [a\n", "line 1 column 10", "no end"),
            ("root ::= [b-a]", "line 1 column 11", "reversed"),
            ("root ::= []", "line 1 column 10", "no characters"),
            ("root ::= (\"a\"\n", "line 2 column 1", ") is missing"),
            ("root ::= x\ny ::= \"a\"", "line 1 column 10", "rule x is not defined"),
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
