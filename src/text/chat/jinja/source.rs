//! A template's text before it is compiled: control tokens become marks, what `set` stores is checked, and products are
//! left to the interpreter.
//!
//! Only what the template itself writes out can become a control token. So the text of a control token in the
//! template's text and strings is replaced by a mark, one character that no message has; what the messages say stays
//! as it is, whatever the template does to it. Nothing here adds or removes a line.

use minijinja::Error;
use minijinja::machinery::{Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use std::ops::Range;

/// The filter that checks what a variable stores.
pub(super) const STORED: &str = "check_stored";
/// The filter that checks what a namespace stores.
pub(super) const STORED_IN_NAMESPACE: &str = "check_stored_in_namespace";

/// A variable that is 1.
pub(super) const ONE: &str = "one_";

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

/// How the templates of chat models are written.
pub(super) fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// The text to compile. Broken syntax is left as it is, for the compiler to report.
pub(super) fn prepare(source: &str, marks: &Marks<'_>) -> Result<String, Error> {
    let mut out = String::with_capacity(source.len() * 2);
    let mut copied = 0;
    let mut replace = |range: Range<usize>, text: &str| {
        out.push_str(&source[copied..range.start]);
        out.push_str(text);
        copied = range.end;
    };
    let mut tag = Tag::default();
    for token in tokenize(source, false, syntax()?) {
        let Ok((token, span)) = token else { break };
        let range = span.start_offset as usize..span.end_offset as usize;
        match token {
            Token::TemplateData(_) | Token::Str(_) | Token::String(_) => {
                replace(range.clone(), &marks.put(&source[range]));
            }
            Token::BlockStart => tag = Tag { statement: Some(0), ..Tag::default() },
            // The compiler multiplies constants and does not pay for it: a variable between them keeps it from that.
            Token::Mul => replace(range, &format!("* {ONE} *")),
            // Tells a trainer which part to learn; without meaning here.
            Token::Ident("generation" | "endgeneration") if tag.statement == Some(0) => {
                replace(range, "set generation_ = 0");
            }
            Token::Ident("set") if tag.statement == Some(0) => tag.set = true,
            Token::Dot if tag.set && tag.stored.is_none() => tag.namespace = true,
            Token::Assign if tag.set && tag.stored.is_none() => {
                let check = if tag.namespace { STORED_IN_NAMESPACE } else { STORED };
                tag.stored = Some(check);
                replace(range, "=(");
            }
            Token::BlockEnd => {
                if let Some(check) = std::mem::take(&mut tag).stored {
                    replace(range.start..range.start, &format!(")|{check} "));
                }
            }
            _ => {}
        }
        tag.statement = tag.statement.map(|n| if matches!(token, Token::BlockStart) { n } else { n + 1 });
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

/// What has been seen of a `{% … %}`.
#[derive(Default)]
struct Tag {
    /// How many words and signs there were; `None` outside of a tag.
    statement: Option<usize>,
    /// It begins with `set`.
    set: bool,
    /// What it sets has a dot, so it is in a namespace.
    namespace: bool,
    /// The filter for what is stored, once that has begun.
    stored: Option<&'static str>,
}

#[cfg(test)]
mod tests;
