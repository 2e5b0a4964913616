//! The error type, with one variant per exit code, and the escaping and shortening of untrusted text in messages.

use std::path::Path;

/// Maximum bytes of a line on stderr.
pub const MAX_LINE_BYTES: usize = 400;
/// Maximum bytes of an error message; leaves room in the line for a few words before and after it.
const MESSAGE: usize = MAX_LINE_BYTES - 40;
/// Maximum bytes of a value inside a message.
const VALUE: usize = 120;

/// An error, classified by its exit code. Every message names the file or field, the value and the remedy, and is
/// displayed through [`one_line`].
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// Anything else, e.g. an output file that cannot be written. Exit code 1.
    #[error("{}", one_line(.0, MESSAGE))]
    Other(String),
    /// A wrong flag or argument. Exit code 2.
    #[error("{}", one_line(.0, MESSAGE))]
    Usage(String),
    /// An unusable model or tokenizer file. Exit code 3.
    #[error("{}", one_line(.0, MESSAGE))]
    Model(String),
    /// Not enough memory. Exit code 4.
    #[error("{}", one_line(.0, MESSAGE))]
    Memory(String),
    /// A device that is missing or not in this build. Exit code 5.
    #[error("{}", one_line(.0, MESSAGE))]
    Device(String),
    /// A golden test that differs. Exit code 6.
    #[error("{}", one_line(.0, MESSAGE))]
    Golden(String),
    /// Stopped by the user. Exit code 130.
    #[error("interrupted")]
    Interrupted,
    /// The output pipe was closed by its reader, which is not a failure. Exit code 0.
    #[error("output closed")]
    ClosedPipe,
}

/// A result with this [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `path: message`, for a model or tokenizer file that cannot be used.
    pub fn model(path: &Path, message: impl std::fmt::Display) -> Self {
        Error::Model(one_line(&format!("{}: {message}", path.display()), MESSAGE))
    }

    /// `path: message`, for a file that cannot be read or written.
    pub fn io(path: &Path, message: impl std::fmt::Display) -> Self {
        Error::Other(one_line(&format!("{}: {message}", path.display()), MESSAGE))
    }

    /// The process exit code of this class.
    pub fn exit_code(&self) -> i32 {
        match self {
            Error::ClosedPipe => 0,
            Error::Other(_) => 1,
            Error::Usage(_) => 2,
            Error::Model(_) => 3,
            Error::Memory(_) => 4,
            Error::Device(_) => 5,
            Error::Golden(_) => 6,
            Error::Interrupted => 130,
        }
    }
}

/// Quotes, escapes and shortens a value from an untrusted file for a message.
pub fn quote(text: &str) -> String {
    format!("\"{}\"", cut_by(text, VALUE, |c| c.escape_debug().collect()))
}

/// Escapes and shortens a value from an untrusted file, like [`quote`] but without quotes.
pub fn escape(text: &str) -> String {
    one_line(text, VALUE)
}

/// Formats text as one line of at most `most` bytes. Characters that control a terminal or reorder text are escaped.
/// Text that is too long loses its middle, since a message begins with the file and ends with the remedy.
pub fn one_line(text: &str, most: usize) -> String {
    let shown = |c: char| if is_printable(c) { c.to_string() } else { c.escape_default().collect() };
    cut_by(text, most, shown)
}

/// Returns true if a character only displays itself: no control character, zero width or change of direction.
pub fn is_printable(c: char) -> bool {
    !c.is_control()
        && !matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        && !matches!(c, '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Escapes each character with `shown` and drops the middle if the result has more than `most` bytes.
fn cut_by(text: &str, most: usize, shown: impl Fn(char) -> String) -> String {
    const GAP: &str = "…";
    let within = |room: usize| {
        let (mut room, shown) = (room, &shown);
        move |c: char| {
            let part = shown(c);
            room = room.checked_sub(part.len())?;
            Some(part)
        }
    };
    // Only the displayed ends of a long text are read.
    let mut all = within(most);
    if text.len() <= most
        && let Some(whole) = text.chars().map(&mut all).collect()
    {
        return whole;
    }
    let half = most.saturating_sub(GAP.len()) / 2;
    let head: String = text.chars().map_while(within(half)).collect();
    let mut tail: Vec<String> = text.chars().rev().map_while(within(half)).collect();
    tail.reverse();
    head + GAP + &tail.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoted_text_is_short_and_has_no_control_characters() {
        assert_eq!(quote("a\n\u{1b}[2J\"\\"), r#""a\n\u{1b}[2J\"\\""#);
        assert_eq!(quote(&"é".repeat(10_000)).len(), VALUE - 1 + 2);
        assert!(quote(&"\u{9b}".repeat(10_000)).len() <= VALUE + 2);
    }

    #[test]
    fn long_lines_lose_their_middle_and_control_characters_are_escaped() {
        assert_eq!(one_line("\"a\" 'b' é 漢 e\u{301} \\n", 99), "\"a\" 'b' é 漢 e\u{301} \\n");
        assert_eq!(one_line("a\n\t\u{9b}\u{202e}\u{feff}", 99), "a\\n\\t\\u{9b}\\u{202e}\\u{feff}");
        assert_eq!(one_line("0123456789", 10), "0123456789");
        assert_eq!(one_line("0123456789+", 10), "012…89+");
        assert_eq!(one_line("éééééé", 10), "é…é");
        // An escape is never split.
        assert_eq!(one_line(&"\u{1b}".repeat(9), 20), "\\u{1b}…\\u{1b}");
        assert_eq!(one_line("", 0), "");
        let long = Error::Usage("x\n".repeat(5000)).to_string();
        assert!(long.len() <= MESSAGE && !long.contains('\n'), "{long}");
        let message = format!("file: {}; the remedy", "y".repeat(5000));
        let shown = Error::Model(message).to_string();
        assert!(shown.starts_with("file: y") && shown.ends_with("y; the remedy"), "{shown}");
    }
}
