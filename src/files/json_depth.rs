//! Measures the nesting of JSON without parsing it: for text that could be too deep for a parser's stack, or that is
//! not complete yet.

/// A bracket, comma or colon of JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JsonToken {
    /// Offset in bytes.
    pub at: usize,
    pub byte: u8,
    /// Number of open brackets after it.
    pub depth: usize,
}

/// Lists the brackets, commas and colons outside strings, in order. The JSON need not be valid.
pub fn list_tokens(json: &[u8]) -> impl Iterator<Item = JsonToken> {
    let mut nesting = JsonDepth::default();
    json.iter().enumerate().filter_map(move |(at, &byte)| {
        let depth = nesting.push_byte(byte)?;
        Some(JsonToken { at, byte, depth })
    })
}

/// The nesting of JSON that arrives byte by byte. It need not be valid.
#[derive(Debug, Clone, Default)]
pub struct JsonDepth {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonDepth {
    /// Takes the next byte. Returns the number of open brackets after it if it is a [`JsonToken`].
    pub fn push_byte(&mut self, byte: u8) -> Option<usize> {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.in_string => self.escaped = true,
            b'"' => self.in_string = !self.in_string,
            _ => {}
        }
        if self.in_string {
            return None;
        }
        match byte {
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        b"{}[],:".contains(&byte).then_some(self.depth)
    }

    /// Returns true if a string is open.
    pub fn is_in_string(&self) -> bool {
        self.in_string
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_strings_do_not_change_the_depth() {
        let json = br#"{"a[,\"{": [1, "]\\"], "b": {}}}}"#;
        let found: Vec<(u8, usize)> = list_tokens(json).map(|m| (m.byte, m.depth)).collect();
        let marks = b"{:[,],:{}}}}";
        let depths = [1, 1, 2, 2, 1, 1, 1, 2, 1, 0, 0, 0];
        assert_eq!(found, marks.iter().copied().zip(depths).collect::<Vec<_>>());
        assert!(list_tokens(json).all(|m| json[m.at] == m.byte));
    }

    #[test]
    fn a_backslash_outside_of_strings_escapes_nothing() {
        assert_eq!(list_tokens(br#"\"{"#).count(), 0);
        assert_eq!(list_tokens(br#"\{"#).count(), 1);
    }
}
