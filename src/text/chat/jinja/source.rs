//! Rewrites the text of a template before it is compiled: control tokens become marks, values stored by `set` are
//! checked, and products are not folded.
//!
//! Only text that the template itself spells out can become a control token. So the text of a control token in the
//! template's text and strings is replaced by a mark, a character that no message contains; the text of messages is
//! never replaced. No line is added or removed.

use minijinja::Error;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use std::ops::Range;

/// The filter that checks the value of a variable.
pub(super) const CHECK_FILTER: &str = "check_value";
/// The filter that checks the value of a field of a namespace.
pub(super) const CHECK_IN_NAMESPACE: &str = "check_in_namespace";

/// The name of a variable with value 1.
pub(super) const CONST_ONE: &str = "one_";

/// Control tokens and their marks.
pub(super) struct Marks<'a> {
    /// Tokens and marks, longest token first, so that a token that begins another one does not win.
    tokens: Vec<(&'a str, char)>,
}

impl<'a> Marks<'a> {
    pub(super) fn new(tokens: impl Iterator<Item = (&'a str, char)>) -> Self {
        let mut tokens: Vec<_> = tokens.filter(|t| !t.0.is_empty()).collect();
        tokens.sort_by_key(|t| std::cmp::Reverse(t.0.len()));
        Self { tokens }
    }

    /// Replaces the control tokens in `text` by their marks.
    pub(super) fn insert_marks(&self, text: &str) -> String {
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

/// The syntax of chat templates.
pub(super) fn syntax_config() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// Rewrites `source` for the compiler. Broken syntax is kept, for the compiler to report.
pub(super) fn prepare_source(source: &str, marks: &Marks<'_>) -> Result<String, Error> {
    let mut out = String::with_capacity(source.len() * 2);
    let mut copied = 0;
    let mut replace = |range: Range<usize>, text: &str| {
        out.push_str(&source[copied..range.start]);
        out.push_str(text);
        copied = range.end;
    };
    let mut place = SourcePlace::Other;
    for (token, span) in tokenize(source, false, syntax_config()?).map_while(Result::ok) {
        let range = span.start_offset as usize..span.end_offset as usize;
        place = match (token, place) {
            (Token::TemplateData(_) | Token::Str(_) | Token::String(_), place) => {
                replace(range.clone(), &marks.insert_marks(&source[range]));
                place
            }
            (Token::BlockStart, _) => SourcePlace::TagStart,
            // Marks the part that training learns from; no meaning here.
            (Token::Ident("generation" | "endgeneration"), SourcePlace::TagStart) => {
                replace(range, "set generation_ = 0");
                SourcePlace::Other
            }
            (Token::Ident("set"), SourcePlace::TagStart) => SourcePlace::SetTarget(CHECK_FILTER),
            (Token::Dot, SourcePlace::SetTarget(_)) => SourcePlace::SetTarget(CHECK_IN_NAMESPACE),
            (Token::Assign, SourcePlace::SetTarget(filter)) => {
                replace(range, "=(");
                SourcePlace::SetValue(filter)
            }
            (Token::BlockEnd, SourcePlace::SetValue(filter)) => {
                replace(range.start..range.start, &format!(")|{filter} "));
                SourcePlace::Other
            }
            // Constant folding bypasses fuel: a variable between constants prevents it.
            (Token::Mul, place) => {
                replace(range, &format!("* {CONST_ONE} *"));
                place
            }
            (Token::BlockEnd, _) | (_, SourcePlace::TagStart) => SourcePlace::Other,
            (_, place) => place,
        };
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

/// The place of a token in its tag.
#[derive(Clone, Copy)]
enum SourcePlace {
    /// The first word of a `{% … %}`.
    TagStart,
    /// The name that is set, with the filter for its value; a field of a namespace has a dot.
    SetTarget(&'static str),
    /// The value that is stored, with its filter.
    SetValue(&'static str),
    Other,
}

#[cfg(test)]
mod tests;
