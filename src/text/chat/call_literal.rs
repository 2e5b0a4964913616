//! Converts the literals in tool calls, Python's and Gemma's, to JSON. JSON itself is one of them.

use super::template_kwargs::MAX_NESTING;
use serde_json::{Number, Value};

/// Gemma's delimiter of strings, between which nothing is escaped.
pub(super) const GEMMA_QUOTE: &str = "<|\"|>";
/// Delimiters of strings.
const QUOTES: [&str; 5] = ["\"\"\"", "'''", "\"", "'", GEMMA_QUOTE];

/// A text that is read from its start, and the JSON of the literals so far.
pub(super) struct LiteralReader<'a> {
    pub rest: &'a str,
    pub json: String,
}

/// Converts `text` if it is one literal.
pub(super) fn convert_literal(text: &str) -> Option<String> {
    let mut reader = LiteralReader { rest: text, json: String::new() };
    reader.read_value(0)?;
    reader.rest.trim().is_empty().then_some(reader.json)
}

impl LiteralReader<'_> {
    /// Skips blanks, and `token`; returns false if it does not follow.
    pub fn skip_token(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let after = self.rest.strip_prefix(token);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    fn read_value(&mut self, depth: usize) -> Option<()> {
        if depth > MAX_NESTING {
            return None;
        }
        if self.skip_token("{") {
            return self.read_fields(":", "}", depth);
        }
        for (open, close) in [("[", "]"), ("(", ")")] {
            if self.skip_token(open) {
                return self.read_list(('[', ']'), close, |reader| reader.read_value(depth + 1));
            }
        }
        if let Some(quote) = self.find_quote() {
            let text = self.read_string(quote)?;
            self.json += &Value::from(text).to_string();
            return Some(());
        }
        let end =
            self.rest.find(|c: char| c.is_whitespace() || ",]})".contains(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.json += match word {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            _ => word.parse::<Number>().ok().map(|_| word)?,
        };
        self.rest = rest;
        Some(())
    }

    /// Reads the fields of an object up to `close`. Names need no quotes; `colon` follows each.
    pub fn read_fields(&mut self, colon: &str, close: &str, depth: usize) -> Option<()> {
        self.read_list(('{', '}'), close, |reader| {
            let name = match reader.find_quote() {
                Some(quote) => reader.read_string(quote)?,
                None => {
                    let end = reader.rest.find(|c: char| c.is_whitespace() || ":=,{}[]()".contains(c))?;
                    let (name, rest) = reader.rest.split_at(end);
                    reader.rest = rest;
                    Some(name.to_owned()).filter(|name| !name.is_empty())?
                }
            };
            reader.json += &Value::from(name).to_string();
            reader.json += ": ";
            reader.skip_token(colon).then(|| reader.read_value(depth + 1))?
        })
    }

    /// Reads elements with commas between them up to `close`; `brackets` are JSON's.
    fn read_list(
        &mut self,
        brackets: (char, char),
        close: &str,
        read_element: impl Fn(&mut Self) -> Option<()>,
    ) -> Option<()> {
        self.json.push(brackets.0);
        let mut separator = "";
        while !self.skip_token(close) {
            self.json += std::mem::replace(&mut separator, ", ");
            read_element(self)?;
            if !self.skip_token(",") && !self.rest.starts_with(close) {
                return None;
            }
        }
        self.json.push(brackets.1);
        Some(())
    }

    fn find_quote(&self) -> Option<&'static str> {
        QUOTES.into_iter().find(|quote| self.rest.starts_with(quote))
    }

    /// Reads a string, whose quote is next.
    fn read_string(&mut self, quote: &str) -> Option<String> {
        let (mut text, mut rest) = (String::new(), &self.rest[quote.len()..]);
        while !rest.starts_with(quote) {
            let mut chars = rest.chars();
            let c = chars.next()?;
            rest = chars.as_str();
            match c {
                '\\' if quote != GEMMA_QUOTE => rest = read_escape(rest, &mut text)?,
                c => text.push(c),
            }
        }
        self.rest = &rest[quote.len()..];
        Some(text)
    }
}

/// Appends the character that `text` spells after a backslash; returns the text after it.
fn read_escape<'a>(text: &'a str, out: &mut String) -> Option<&'a str> {
    let hex = |from: usize, digits: usize| u32::from_str_radix(text.get(from..from + digits)?, 16).ok();
    let c = text.chars().next()?;
    let digits = match c {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => 0,
    };
    if digits > 0 {
        let code = hex(1, digits)?;
        let low = if text.get(5..7) == Some("\\u") { hex(7, 4) } else { None };
        // JSON spells characters beyond 16 bits as two.
        let pair = low.filter(|low| digits == 4 && code >> 10 == 0x36 && low >> 10 == 0x37);
        let both = pair.map(|low| 0x10000 + ((code & 0x3ff) << 10) + (low & 0x3ff));
        out.push(char::from_u32(both.unwrap_or(code)).unwrap_or(char::REPLACEMENT_CHARACTER));
        return text.get(if both.is_some() { 11 } else { 1 + digits }..);
    }
    match c {
        'n' => out.push('\n'),
        't' => out.push('\t'),
        'r' => out.push('\r'),
        'b' => out.push('\u{8}'),
        'f' => out.push('\u{c}'),
        '\\' | '\'' | '"' | '/' => out.push(c),
        '\n' => {}
        _ => out.extend(['\\', c]),
    }
    Some(&text[c.len_utf8()..])
}

#[cfg(test)]
mod tests {
    use super::convert_literal;

    #[test]
    fn literals_of_python_and_gemma_become_json() {
        for (literal, json) in [
            ("-1.5e3", "-1.5e3"),
            (" True ", "true"),
            ("None", "null"),
            ("false", "false"),
            ("'it''s'", ""),
            (r#"'it\'s "\x41é\n\d\u20ac'"#, r#""it's \"Aé\n\\d€""#),
            (r#""\ud83d\ude00 \ud83d""#, "\"\u{1f600} \u{fffd}\""),
            ("'''a\n'b'''", r#""a\n'b""#),
            (r#"<|"|>a\n"b<|"|>"#, r#""a\\n\"b""#),
            ("[1, (2,), {'a': [], \"b\": None,}]", r#"[1, [2], {"a": [], "b": null}]"#),
            ("{a:<|\"|>x<|\"|>,b_c:{d:true}}", r#"{"a": "x", "b_c": {"d": true}}"#),
            ("", ""),
            ("word", ""),
            ("1 2", ""),
            ("[1", ""),
            ("[1 2]", ""),
            ("[,]", ""),
            ("{:1}", ""),
            ("{a}", ""),
            ("'a", ""),
            ("'\\", ""),
            ("'\\u12é4'", ""),
            ("1e999", ""),
            ("NaN", ""),
        ] {
            let expected = Some(json.to_owned()).filter(|json| !json.is_empty());
            assert_eq!(convert_literal(literal), expected, "{literal}");
        }
        let nested = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(convert_literal(&nested(25)).is_some() && convert_literal(&nested(100_000)).is_none());
    }
}
