//! How JSON is nested, found without a parser: before one is given text that could be too deep for its stack, or text
//! whose end has not come yet.

/// A bracket, comma or colon of JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Where it stands, in bytes.
    pub at: usize,
    pub byte: u8,
    /// Brackets that are open behind it.
    pub depth: usize,
}

/// The brackets, commas and colons outside of strings, in order. The JSON need not be valid.
pub fn marks(json: &[u8]) -> impl Iterator<Item = Mark> {
    let mut nesting = Nesting::default();
    json.iter().enumerate().filter_map(move |(at, &byte)| {
        let depth = nesting.pass(byte)?;
        Some(Mark { at, byte, depth })
    })
}

/// How deep JSON is nested that comes byte by byte. It need not be valid.
#[derive(Debug, Clone, Default)]
pub struct Nesting {
    depth: usize,
    strings: Strings,
}

impl Nesting {
    /// Takes the next byte; brackets that are open behind it, where it is a mark.
    pub fn pass(&mut self, byte: u8) -> Option<usize> {
        if self.strings.pass(byte) {
            return None;
        }
        match byte {
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        b"{}[],:".contains(&byte).then_some(self.depth)
    }

    /// Whether a string is open.
    pub fn is_in_string(&self) -> bool {
        self.strings.inside
    }
}

/// Where strings begin and end.
#[derive(Debug, Clone, Default)]
struct Strings {
    inside: bool,
    escaped: bool,
}

impl Strings {
    /// Whether a string is open behind the next byte.
    fn pass(&mut self, byte: u8) -> bool {
        match byte {
            _ if self.escaped => self.escaped = false,
            b'\\' if self.inside => self.escaped = true,
            b'"' => self.inside = !self.inside,
            _ => {}
        }
        self.inside
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_in_strings_is_no_mark() {
        let json = br#"{"a[,\"{": [1, "]\\"], "b": {}}}}"#;
        let found: Vec<(u8, usize)> = marks(json).map(|m| (m.byte, m.depth)).collect();
        let marks = b"{:[,],:{}}}}";
        let depths = [1, 1, 2, 2, 1, 1, 1, 2, 1, 0, 0, 0];
        assert_eq!(found, marks.iter().copied().zip(depths).collect::<Vec<_>>());
        assert!(super::marks(json).all(|m| json[m.at] == m.byte));
    }

    #[test]
    fn an_escape_outside_of_strings_is_none() {
        assert_eq!(marks(br#"\"{"#).count(), 0);
        assert_eq!(marks(br#"\{"#).count(), 1);
    }
}
