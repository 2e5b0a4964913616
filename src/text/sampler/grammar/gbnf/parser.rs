//! Parser of GBNF.

use std::collections::HashMap;
use std::fmt::Write;

/// A part of a rule, in the syntax of `llguidance`.
pub(super) struct Expr {
    /// Its text, in which `@7@` stands for rule number 7; a literal `@` of the grammar is always escaped.
    pub lark: String,
    /// The rules that it uses: number of groups around each use, and number of the rule.
    pub names: Vec<(usize, usize)>,
    /// True if the text is in parentheses.
    is_group: bool,
}

impl Expr {
    fn of_regex(regex: &str) -> Self {
        Self { lark: format!("/{regex}/"), names: Vec::new(), is_group: false }
    }

    fn of_rule(rule: usize) -> Self {
        Self { lark: format!("@{rule}@"), names: vec![(0, rule)], is_group: false }
    }

    fn join_parts(mut parts: Vec<Self>, between: &str) -> Self {
        if parts.len() == 1 {
            return parts.remove(0);
        }
        if parts.is_empty() {
            return Self { lark: "\"\"".into(), names: Vec::new(), is_group: false };
        }
        let texts: Vec<&str> = parts.iter().map(|part| part.lark.as_str()).collect();
        let lark = format!("({})", texts.join(between));
        let names = parts.iter().flat_map(|part| &part.names).map(|&(groups, rule)| (groups + 1, rule));
        Self { lark, names: names.collect(), is_group: true }
    }

    fn repeat_times(self, least: u32, most: Option<u32>) -> Self {
        let times = match (least, most) {
            (0, None) => "*".into(),
            (1, None) => "+".into(),
            (0, Some(1)) => "?".into(),
            (least, None) => format!("{{{least},}}"),
            (least, Some(most)) => format!("{{{least},{most}}}"),
        };
        // The compiler takes only about thirty nested groups.
        let lark = if self.is_group { self.lark + &times } else { format!("({}){times}", self.lark) };
        let names = self.names.into_iter().map(|(groups, rule)| (groups + 1, rule)).collect();
        Self { lark, names, is_group: false }
    }
}

pub(super) struct Rule {
    pub name: String,
    /// The offset of its first use, for the error if it is never defined.
    pub at: usize,
    pub body: Option<Expr>,
}

/// Maximum nesting of groups.
const MAX_DEPTH: usize = 64;
/// Maximum count of a repetition.
const MAX_REPEAT: u32 = 10_000;

/// Appends a character, escaped for a regular expression.
fn push_escaped(c: char, out: &mut String) {
    match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' => out.push(c),
        c => {
            let _ = write!(out, "\\x{{{:x}}}", u32::from(c));
        }
    }
}

/// The offset of an error, and its description.
pub(super) type ParseError = (usize, String);

pub(super) struct Parser<'a> {
    text: &'a str,
    at: usize,
    pub rules: Vec<Rule>,
    /// Numbers of the rules by name.
    numbers: HashMap<&'a str, usize>,
}

/// The treatment of line breaks: they end the rule, or are skipped.
#[derive(Clone, Copy, PartialEq)]
enum LineBreaks {
    End,
    Skip,
}

impl<'a> Parser<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0, rules: Vec::new(), numbers: HashMap::new() }
    }

    fn error_here<T>(&self, what: impl Into<String>) -> Result<T, ParseError> {
        Err((self.at, what.into()))
    }

    fn peek_char(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next_char(&mut self) -> Option<char> {
        let c = self.peek_char()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn skip_prefix(&mut self, what: &str) -> bool {
        let there = self.text[self.at..].starts_with(what);
        self.at += if there { what.len() } else { 0 };
        there
    }

    /// Skips whitespace and comments.
    fn skip_blanks(&mut self, lines: LineBreaks) {
        while let Some(c) = self.peek_char() {
            match c {
                '#' => self.at += self.text[self.at..].find('\n').unwrap_or(self.text.len() - self.at),
                '\n' | '\r' if lines == LineBreaks::End => return,
                ' ' | '\t' | '\n' | '\r' => self.at += 1,
                _ => return,
            }
        }
    }

    /// Parses all rules; returns the number of `root`.
    pub fn parse_grammar(&mut self) -> Result<usize, ParseError> {
        self.skip_blanks(LineBreaks::Skip);
        while self.peek_char().is_some() {
            let at = self.at;
            let rule = self.parse_name()?;
            if self.rules[rule].body.is_some() {
                return Err((at, format!("the rule {} is defined twice", self.rules[rule].name)));
            }
            self.skip_blanks(LineBreaks::Skip);
            if !self.skip_prefix("::=") {
                return self.error_here("::= is missing after the name of a rule");
            }
            self.skip_blanks(LineBreaks::Skip);
            let body = self.parse_choice(0)?;
            self.rules[rule].body = Some(body);
            if !matches!(self.peek_char(), None | Some('\n' | '\r')) {
                return self.error_here("the rule should end here; a | or a line break is missing");
            }
            self.skip_blanks(LineBreaks::Skip);
        }
        if let Some(rule) = self.rules.iter().find(|r| r.body.is_none()) {
            return Err((rule.at, format!("rule {} is not defined", rule.name)));
        }
        match self.numbers.get("root") {
            Some(&root) => Ok(root),
            None => self.error_here("rule root is not defined"),
        }
    }

    /// Parses the name of a rule; returns its number.
    fn parse_name(&mut self) -> Result<usize, ParseError> {
        let rest = &self.text[self.at..];
        let length = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-').unwrap_or(rest.len());
        if length == 0 {
            return self.error_here("the name of a rule is missing: letters, digits and -");
        }
        let (name, at) = (&rest[..length], self.at);
        self.at += length;
        let next = self.rules.len();
        let rule = *self.numbers.entry(name).or_insert(next);
        if rule == next {
            self.rules.push(Rule { name: name.into(), at, body: None });
        }
        Ok(rule)
    }

    fn parse_choice(&mut self, depth: usize) -> Result<Expr, ParseError> {
        if depth > MAX_DEPTH {
            return self.error_here(format!("groups are nested more than {MAX_DEPTH} levels deep"));
        }
        let lines = if depth == 0 { LineBreaks::End } else { LineBreaks::Skip };
        let mut parts = vec![self.parse_sequence(depth, lines)?];
        while self.skip_prefix("|") {
            self.skip_blanks(LineBreaks::Skip);
            parts.push(self.parse_sequence(depth, lines)?);
        }
        Ok(Expr::join_parts(parts, " | "))
    }

    fn parse_sequence(&mut self, depth: usize, lines: LineBreaks) -> Result<Expr, ParseError> {
        let mut parts = Vec::new();
        while let Some(c) = self.peek_char() {
            let part = match c {
                '"' => self.parse_literal()?,
                '[' => self.parse_class()?,
                '.' => {
                    self.at += 1;
                    Expr::of_regex("(?s:.)")
                }
                '(' => {
                    self.at += 1;
                    self.skip_blanks(LineBreaks::Skip);
                    let group = self.parse_choice(depth + 1)?;
                    if !self.skip_prefix(")") {
                        return self.error_here("a ) is missing");
                    }
                    group
                }
                c if c.is_ascii_alphanumeric() => Expr::of_rule(self.parse_name()?),
                _ => break,
            };
            self.skip_blanks(lines);
            let part = self.parse_repetition(part)?;
            self.skip_blanks(lines);
            parts.push(part);
        }
        Ok(Expr::join_parts(parts, " "))
    }

    /// Parses the repetition that may follow an item.
    fn parse_repetition(&mut self, part: Expr) -> Result<Expr, ParseError> {
        let (least, most) = match self.peek_char() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.parse_count(part),
            _ => return Ok(part),
        };
        self.at += 1;
        Ok(part.repeat_times(least, most))
    }

    fn parse_count(&mut self, part: Expr) -> Result<Expr, ParseError> {
        let at = self.at;
        let inner = self.text[at..].strip_prefix('{').and_then(|rest| rest.split_once('}')).map(|x| x.0);
        let number = |text: &str| text.trim().parse().ok().filter(|&n: &u32| n <= MAX_REPEAT);
        let range = inner.and_then(|inner| match inner.split_once(',') {
            None => number(inner).map(|n| (n, Some(n))),
            Some((least, most)) if most.trim().is_empty() => number(least).map(|n| (n, None)),
            Some((least, most)) => Some((number(least)?, Some(number(most)?))),
        });
        match (inner, range) {
            (Some(inner), Some((least, most))) if most.is_none_or(|most| least <= most) => {
                self.at += inner.len() + 2;
                Ok(part.repeat_times(least, most))
            }
            _ => self
                .error_here(format!("{{m}}, {{m,}} or {{m,n}} with numbers up to {MAX_REPEAT} is expected")),
        }
    }

    fn parse_literal(&mut self) -> Result<Expr, ParseError> {
        let start = self.at;
        self.at += 1;
        let mut regex = String::new();
        loop {
            match self.peek_char() {
                None | Some('\n') => return Err((start, "the string that begins here has no end".into())),
                Some('"') => break,
                Some(_) => push_escaped(self.parse_character()?, &mut regex),
            }
        }
        self.at += 1;
        Ok(if regex.is_empty() { Expr::join_parts(Vec::new(), "") } else { Expr::of_regex(&regex) })
    }

    fn parse_class(&mut self) -> Result<Expr, ParseError> {
        let start = self.at;
        self.at += 1;
        let mut regex = String::from(if self.skip_prefix("^") { "[^" } else { "[" });
        let empty = regex.len();
        loop {
            match self.peek_char() {
                None | Some('\n') => return Err((start, "the class that begins here has no end".into())),
                Some(']') => break,
                Some(_) => {}
            }
            let (at, first) = (self.at, self.parse_character()?);
            push_escaped(first, &mut regex);
            if self.peek_char() == Some('-') && !self.text[self.at..].starts_with("-]") {
                self.at += 1;
                let last = self.parse_character()?;
                if last < first {
                    return Err((at, format!("the range {first}-{last} is reversed")));
                }
                regex.push('-');
                push_escaped(last, &mut regex);
            }
        }
        if regex.len() == empty {
            return Err((start, "no characters between [ and ]".into()));
        }
        self.at += 1;
        regex.push(']');
        Ok(Expr::of_regex(&regex))
    }

    /// Parses one character, literal or escaped with a backslash.
    fn parse_character(&mut self) -> Result<char, ParseError> {
        let start = self.at;
        let Some(c) = self.next_char() else { return self.error_here("a character is missing") };
        if c != '\\' {
            return Ok(c);
        }
        let digits = match self.next_char() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some(c @ ('\\' | '"' | '[' | ']' | '-' | '^')) => return Ok(c),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => {
                let known = "unknown escape; known: \\n \\r \\t \\\\ \\\" \\[ \\] \\xHH \\uHHHH";
                return Err((start, known.into()));
            }
        };
        let hex = self.text.get(self.at..self.at + digits);
        let c = hex.and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        self.at += if c.is_some() { digits } else { 0 };
        c.ok_or((start, format!("\\ and {digits} hexadecimal digits of a character are expected")))
    }
}
