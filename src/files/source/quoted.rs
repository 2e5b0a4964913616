//! Text of an untrusted file inside a message.
//!
//! This file is compiled twice, into the library and into `build.rs`, so it imports nothing of the crate.

/// A value of the file for a message: quoted, without control characters, not too long.
pub fn quoted(text: &str) -> String {
    const LONGEST: usize = 100;
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_cannot_carry_control_characters() {
        assert_eq!(quoted("a\n\u{1b}[2J"), r#""a\n\u{1b}[2J""#);
        assert!(quoted(&"é".repeat(10_000)).chars().count() < 110);
    }
}
