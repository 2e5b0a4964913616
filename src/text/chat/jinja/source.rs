//! A template's text before it is compiled: control tokens become marks, and what grows is counted.
//!
//! Only what the template itself writes out can become a control token. So the text of a control token
//! in the template's own strings is replaced by a mark, one character that no message has; what the
//! messages say stays as it is, whatever the template does to it.
//!
//! The interpreter limits its steps but not the size of what a step makes: forty doublings of a text fill any
//! memory. So every operand of `~`, `+` and `in` goes through a filter that counts it, and what is sliced through a
//! method; `*` is for numbers alone, and long text between tags counts itself. Comparing nested lists is one step too, so lists are checked where
//! they are made. Nothing here adds or removes a line.

mod piece;

use piece::{Kind, Piece, piece};

/// A filter that counts all of a value, and passes it on.
pub(super) const CHARGE: &str = "charge_all";
/// A filter that counts a text, or the places of a list, and passes it on.
pub(super) const CHARGE_PLACES: &str = "charge_places";
/// A filter that passes on a number.
pub(super) const NUMBER: &str = "only_number";
/// A filter for what a namespace keeps: as [`STORED`], and no namespace.
pub(super) const KEPT: &str = "only_values";
/// A filter for lists and variables: not too deep, not too large, and no namespace in them.
pub(super) const STORED: &str = "only_shallow";
/// A method that counts a text, or the places of a list, and gives it back: filters cannot stand before a slice.
pub(super) const COUNT_PART: &str = "count_part";
/// A function that counts bytes, and is nothing.
pub(super) const CHARGE_BYTES: &str = "charge_bytes";

/// Text between tags up to this size is not worth counting.
const SMALL_TEXT: usize = 64;
/// Blanks in a row, which cannot count themselves: tags may strip them.
const MAX_BLANKS: usize = 1024;
const MAX_RAW: usize = 4096;
/// Brackets in brackets, every one of which is looked through; the compiler takes fewer.
const MAX_BRACKETS: usize = 200;

/// Control tokens and the characters that stand for them.
pub(super) struct Marks<'a> {
    /// Longest first, so that a token that begins another one does not win.
    tokens: Vec<(&'a str, char)>,
}

impl<'a> Marks<'a> {
    pub(super) fn new(tokens: impl Iterator<Item = (&'a str, char)>) -> Self {
        let mut tokens: Vec<_> = tokens.filter(|t| !t.0.is_empty()).collect();
        tokens.sort_by_key(|t| std::cmp::Reverse(t.0.len()));
        Self { tokens }
    }

    /// `text` with marks.
    pub(super) fn put(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let (len, c) = match self.tokens.iter().find(|t| rest.starts_with(t.0)) {
                Some(&(token, mark)) => (token.len(), mark),
                None => (c.len_utf8(), c),
            };
            out.push(c);
            rest = &rest[len..];
        }
        out
    }
}

/// The text to compile; the error says what is wrong with `source`. Broken syntax is left for the compiler.
pub(super) fn prepare(source: &str, marks: &Marks<'_>) -> Result<String, String> {
    if source.split(|c: char| !c.is_whitespace()).any(|run| run.len() > MAX_BLANKS) {
        return Err(format!("has more than {MAX_BLANKS} blanks in a row"));
    }
    let mut out = String::with_capacity(source.len() * 2);
    let mut rest = source;
    while let Some(at) = opening(rest) {
        data(&rest[..at], marks, &mut out);
        let (open, inner) = rest[at..].split_at(2);
        let close = match open {
            "{#" => "#}",
            "{%" => "%}",
            _ => "}}",
        };
        let end = if open == "{#" { inner.find(close) } else { None };
        if let Some(end) = end {
            out.push_str(&rest[at..at + 2 + end + 2]);
            rest = &inner[end + 2..];
            continue;
        }
        let Some(code) = Code::read(inner, close).filter(|_| open != "{#") else {
            out.push_str(&rest[at..]);
            return Ok(out);
        };
        if code.depth > MAX_BRACKETS {
            return Err(format!("has brackets nested more than {MAX_BRACKETS} levels deep"));
        }
        out.push_str(open);
        code.write(marks, &mut out);
        let after = inner[code.end..].find(close).expect("invariant: code ends there") + code.end + 2;
        out.push_str(&inner[code.end..after]);
        rest = &inner[after..];
        if close == "%}" && code.words() == ["raw"] {
            let end = end_of_raw(rest);
            if end > MAX_RAW {
                return Err(format!("has a raw block of more than {MAX_RAW} bytes"));
            }
            out.push_str(&marks.put(&rest[..end]));
            rest = &rest[end..];
        }
    }
    data(rest, marks, &mut out);
    Ok(out)
}

fn opening(text: &str) -> Option<usize> {
    text.match_indices('{').map(|(at, _)| at).find(|at| text[at + 1..].starts_with(['{', '%', '#']))
}

/// Where the tag is that ends a raw block.
fn end_of_raw(text: &str) -> usize {
    let is_end =
        |at: &usize| text[at + 2..].trim_start_matches(['-', '+']).trim_start().starts_with("endraw");
    text.match_indices("{%").map(|(at, _)| at).find(is_end).unwrap_or(text.len())
}

/// Text between tags. It counts itself between its first two words, where no tag strips blanks.
fn data(text: &str, marks: &Marks<'_>, out: &mut String) {
    let word = text.char_indices().find(|(_, c)| !c.is_whitespace()).map(|(at, c)| at + c.len_utf8());
    match word.filter(|&at| text.len() > SMALL_TEXT && !text[at..].trim().is_empty()) {
        // Where the text of a token would be torn apart, the count comes after it.
        Some(at) => {
            let lead = text[..at].trim_start().len();
            let start = at - lead;
            let token = marks.tokens.iter().find(|t| text[start..].starts_with(t.0));
            let at = token.map_or(at, |t| start + t.0.len());
            out.push_str(&marks.put(&text[..at]));
            out.push_str(&format!("{{{{ {CHARGE_BYTES}({}) }}}}", text.len()));
            out.push_str(&marks.put(&text[at..]));
        }
        None => out.push_str(&marks.put(text)),
    }
}

/// What is put after a piece; methods bind closer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Count {
    Method(&'static str),
    Filter(&'static str),
}

/// What is between `{{` and `}}`, or `{%` and `%}`.
struct Code<'a> {
    text: &'a str,
    pieces: Vec<Piece<'a>>,
    /// Most brackets in brackets.
    depth: usize,
    /// Where it ends: at the closing tag, or at the blank-stripping sign before that.
    end: usize,
}

impl<'a> Code<'a> {
    /// From after the opening tag; `None` if `close` does not come.
    fn read(text: &'a str, close: &str) -> Option<Self> {
        let (mut pieces, mut depth, mut deepest) = (Vec::<Piece<'_>>::new(), 0usize, 0);
        let mut at = usize::from(text.starts_with(['-', '+']));
        loop {
            let rest = &text[at..];
            let c = rest.chars().next()?;
            let strips = rest.starts_with(['-', '+']) && rest[1..].starts_with(close);
            if depth == 0 && (strips || rest.starts_with(close)) {
                return Some(Self { text, pieces, depth: deepest, end: at });
            }
            if c.is_whitespace() {
                at += c.len_utf8();
                continue;
            }
            let (kind, len) = piece(rest, pieces.last())?;
            match &rest[..len] {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                _ => {}
            }
            deepest = deepest.max(depth);
            pieces.push(Piece { kind, text: &rest[..len], start: at });
            at += len;
        }
    }

    fn words(&self) -> Vec<&str> {
        self.pieces.iter().map(|p| p.text).collect()
    }

    /// The code with marks in its strings and counts at its operands.
    fn write(&self, marks: &Marks<'_>, out: &mut String) {
        let mut counts = self.counts();
        counts.sort_unstable();
        counts.dedup();
        let mut counts = counts.into_iter().peekable();
        let stored = self.stored();
        let mut from = 0;
        for (i, piece) in self.pieces.iter().enumerate() {
            out.push_str(&self.text[from..piece.start]);
            if stored == Some(i) {
                out.push('(');
            }
            match piece.kind {
                Kind::Text => out.push_str(&marks.put(piece.text)),
                // Marks what to train on, for others.
                Kind::Word if i == 0 && ["generation", "endgeneration"].contains(&piece.text) => {
                    out.push_str("set generation_ = 0");
                }
                _ => out.push_str(piece.text),
            }
            while let Some((_, count)) = counts.next_if(|c| c.0 == i) {
                match count {
                    Count::Method(name) => out.extend([".", name, "()"]),
                    Count::Filter(name) => out.extend(["|", name]),
                }
            }
            if stored.is_some() && i + 1 == self.pieces.len() {
                out.push_str(")|");
                out.push_str(if self.pieces[2].is(".") { KEPT } else { STORED });
            }
            from = piece.end();
        }
        out.push_str(&self.text[from..self.end]);
    }

    /// Where the value begins in `set name = value`.
    fn stored(&self) -> Option<usize> {
        self.pieces.first().filter(|p| p.text == "set")?;
        let value = self.pieces.iter().position(|p| p.is("="))? + 1;
        (value < self.pieces.len()).then_some(value)
    }

    /// What to put after pieces.
    fn counts(&self) -> Vec<(usize, Count)> {
        let mut counts = Vec::new();
        for (i, piece) in self.pieces.iter().enumerate() {
            if piece.kind == Kind::Sign && self.makes_list(i) {
                counts.extend(self.operand(i).map(|end| (end, Count::Filter(STORED))));
            }
            if let Some(end) = self.slice(i) {
                counts.extend([i - 1, end].map(|at| (at, Count::Method(COUNT_PART))));
            }
            let (left, right) = match piece.text {
                "~" => (CHARGE, CHARGE),
                "+" => (CHARGE_PLACES, CHARGE),
                "*" => (NUMBER, NUMBER),
                "in" if self.is_operator(i) => (CHARGE, CHARGE),
                _ => continue,
            };
            let before = if i > 1 && self.pieces[i - 1].text == "not" { 2 } else { 1 };
            // Words can be names here that are keywords there.
            let joins = |p: &Piece<'_>| p.kind != Kind::Sign || p.ends_operand();
            if piece.kind != Kind::Text && i >= before && joins(&self.pieces[i - before]) {
                counts.push((i - before, Count::Filter(left)));
                counts.extend(self.operand(i + 1).map(|end| (end, Count::Filter(right))));
            }
        }
        counts
    }

    /// Whether the `in` at `at` stands between operands: it is not that of a loop, a test or a name after a dot.
    fn is_operator(&self, at: usize) -> bool {
        let after_dot = |i: usize| i > 0 && self.pieces[i - 1].is(".");
        let of_loop =
            self.pieces[0].text == "for" && !(1..at).any(|i| self.pieces[i].text == "in" && !after_dot(i));
        let is = match at.checked_sub(1) {
            Some(i) if self.pieces[i].text == "not" => i.checked_sub(1),
            before => before,
        };
        let of_test =
            is.is_some_and(|i| i > 0 && self.pieces[i].text == "is" && self.pieces[i - 1].ends_operand());
        !of_loop && !after_dot(at) && !of_test
    }

    /// Where the slice ends that begins with the bracket at `at`.
    fn slice(&self, at: usize) -> Option<usize> {
        if at == 0 || !self.pieces[at].is("[") {
            return None;
        }
        self.closing(at).filter(|&end| self.has_sign(":", at + 1, end))
    }

    /// Whether a list, dictionary or tuple begins at `at`.
    fn makes_list(&self, at: usize) -> bool {
        let before = at.checked_sub(1).map(|i| &self.pieces[i]);
        if before.is_some_and(Piece::ends_operand) {
            return false;
        }
        match self.pieces[at].text {
            "[" | "{" => true,
            // `for (a, b) in` takes a tuple apart, but reads `for` as an operand.
            "(" => self.closing(at).is_some_and(|end| self.has_sign(",", at + 1, end)),
            _ => false,
        }
    }

    /// Whether there is a comma or colon between pieces, outside of further brackets.
    fn has_sign(&self, sign: &str, from: usize, to: usize) -> bool {
        let mut depth = 0usize;
        self.pieces[from..to].iter().any(|piece| {
            match piece.text {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.saturating_sub(1),
                _ => {}
            }
            depth == 0 && piece.is(sign)
        })
    }

    /// The last piece of the operand that begins with piece `at`.
    fn operand(&self, mut at: usize) -> Option<usize> {
        let piece = |i: usize| self.pieces.get(i);
        let next_is = |i: usize, sign: &str| piece(i + 1).is_some_and(|p| p.is(sign));
        while piece(at)?.is("-") || piece(at)?.is("+") || piece(at)?.text == "not" {
            at += 1;
        }
        match piece(at)?.kind {
            Kind::Sign => at = self.closing(at)?,
            Kind::Text => {
                while piece(at + 1).is_some_and(|p| p.kind == Kind::Text) {
                    at += 1;
                }
            }
            Kind::Word | Kind::Number => {}
        }
        loop {
            if next_is(at, ".") || next_is(at, "|") {
                at += 2;
                piece(at)?;
            } else if next_is(at, "(") || next_is(at, "[") {
                at = self.closing(at + 1)?;
            } else {
                return Some(at);
            }
        }
    }

    /// The bracket that closes the one at `open`; `None` where that is none.
    fn closing(&self, open: usize) -> Option<usize> {
        let mut depth = 0usize;
        for (i, piece) in self.pieces.iter().enumerate().skip(open) {
            match piece.text {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => depth = depth.checked_sub(1)?,
                _ => {}
            }
            if depth == 0 {
                return (i > open).then_some(i);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests;
