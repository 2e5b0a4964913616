//! The pieces that a template's code is made of.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Word,
    Number,
    /// A string with its quotes.
    Text,
    Sign,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Piece<'a> {
    pub(super) kind: Kind,
    pub(super) text: &'a str,
    pub(super) start: usize,
}

impl Piece<'_> {
    pub(super) fn end(&self) -> usize {
        self.start + self.text.len()
    }

    pub(super) fn is(&self, sign: &str) -> bool {
        self.kind == Kind::Sign && self.text == sign
    }

    /// Whether an operand can end here, so that a sign that follows stands between two.
    pub(super) fn ends_operand(&self) -> bool {
        const KEYWORDS: [&str; 9] = ["and", "or", "not", "in", "if", "elif", "else", "is", "recursive"];
        match self.kind {
            Kind::Word => !KEYWORDS.contains(&self.text),
            Kind::Number | Kind::Text => true,
            Kind::Sign => [")", "]", "}"].contains(&self.text),
        }
    }
}

/// Kind and length of the first piece of `text`, which comes after `last`; `None` for a string without an end.
pub(super) fn piece(text: &str, last: Option<&Piece<'_>>) -> Option<(Kind, usize)> {
    let c = text.chars().next()?;
    let run = |text: &str, in_run: &dyn Fn(char) -> bool| {
        text.char_indices().find(|&(_, c)| !in_run(c)).map_or(text.len(), |(at, _)| at)
    };
    if c == '"' || c == '\'' {
        let mut escaped = false;
        for (at, x) in text.char_indices().skip(1) {
            match x {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                x if x == c => return Some((Kind::Text, at + 1)),
                _ => {}
            }
        }
        return None;
    }
    if c.is_ascii_digit() {
        let whole = run(text, &|c| c.is_ascii_digit() || c == '_');
        let fraction = text[whole..].strip_prefix('.').map_or(0, |t| run(t, &|c| c.is_ascii_digit()));
        // `list.0.1` is two places of lists.
        let is_place = last.is_some_and(|p| p.is("."));
        return Some((Kind::Number, if fraction > 0 && !is_place { whole + 1 + fraction } else { whole }));
    }
    if c.is_alphabetic() || c == '_' {
        return Some((Kind::Word, run(text, &|c| c.is_alphanumeric() || c == '_')));
    }
    let two = ["**", "//", "==", "!=", "<=", ">="].iter().any(|sign| text.starts_with(sign));
    Some((Kind::Sign, if two { 2 } else { c.len_utf8() }))
}
