//! A template's text before it is compiled: control tokens become marks, what `set` stores is checked, and products are
//! left to the interpreter.
//!
//! Only what the template itself writes out can become a control token. So the text of a control token in the
//! template's text and strings is replaced by a mark, one character that no message has; what the messages say stays
//! as it is, whatever the template does to it. Nothing here adds or removes a line.

use minijinja::Error;
use minijinja::machinery::{Span, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use std::ops::Range;

/// The filter that checks what a variable stores.
pub(super) const STORED: &str = "check_stored";
/// The filter that checks what a namespace stores.
pub(super) const STORED_IN_NAMESPACE: &str = "check_stored_in_namespace";

/// The function that makes `varargs` of a macro's arguments.
pub(super) const EXTRA: &str = "extra_arguments_";
/// Arguments beyond those that a macro names, at most.
const MAX_EXTRA: usize = 16;

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
    let tokens: Vec<_> = tokenize(source, false, syntax()?).map_while(Result::ok).collect();
    for (at, (token, span)) in tokens.iter().enumerate() {
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
            Token::Ident("macro") if tag.statement == Some(0) => {
                tag.extra_at = end_of_arguments(&tokens[at..]).map(|n| at + n);
            }
            Token::ParenClose if tag.extra_at == Some(at) => {
                let comma = if matches!(tokens[at - 1].0, Token::ParenOpen) { "" } else { ", " };
                let names = extra_names().map(|name| format!("{name}=none_")).collect::<Vec<_>>().join(", ");
                replace(range.start..range.start, &format!("{comma}{names}"));
            }
            Token::Dot if tag.set && tag.stored.is_none() => tag.namespace = true,
            Token::Assign if tag.set && tag.stored.is_none() => {
                let check = if tag.namespace { STORED_IN_NAMESPACE } else { STORED };
                tag.stored = Some(check);
                replace(range, "=(");
            }
            Token::BlockEnd => {
                let ended = std::mem::take(&mut tag);
                if let Some(check) = ended.stored {
                    replace(range.start..range.start, &format!(")|{check} "));
                }
                if ended.extra_at.is_some() {
                    let names = extra_names().collect::<Vec<_>>().join(", ");
                    replace(range.start..range.start, &format!("%}}{{% set varargs = {EXTRA}({names}) "));
                }
            }
            _ => {}
        }
        tag.statement = tag.statement.map(|n| if matches!(token, Token::BlockStart) { n } else { n + 1 });
    }
    out.push_str(&source[copied..]);
    Ok(out)
}

/// Where the arguments of a macro end, if it asks for `varargs`; `tokens` begin with its name.
///
/// The interpreter has no `varargs`: such a macro gets some arguments more, and makes them of those that are given.
fn end_of_arguments(tokens: &[(Token<'_>, Span)]) -> Option<usize> {
    let end = tokens.iter().position(|(token, _)| matches!(token, Token::BlockEnd))?;
    let mut body = tokens[end..].iter().take_while(|(token, _)| !matches!(token, Token::Ident("endmacro")));
    let asks = body.any(|(token, _)| matches!(token, Token::Ident("varargs")));
    tokens[..end].iter().rposition(|(token, _)| asks && matches!(token, Token::ParenClose))
}

fn extra_names() -> impl Iterator<Item = String> {
    (0..MAX_EXTRA).map(|n| format!("extra_{n}_"))
}

/// What has been seen of a `{% … %}`.
#[derive(Default)]
struct Tag {
    /// How many words and signs there were; `None` outside of a tag.
    statement: Option<usize>,
    /// The token that ends the arguments of a macro with `varargs`.
    extra_at: Option<usize>,
    /// It begins with `set`.
    set: bool,
    /// What it sets has a dot, so it is in a namespace.
    namespace: bool,
    /// The filter for what is stored, once that has begun.
    stored: Option<&'static str>,
}

#[cfg(test)]
mod tests;
