//! Finds the lines of our own scripts in a program's output.
//!
//! `adb shell` returns 0 when its stream breaks, so the script itself must report its end. A marker line is a random
//! nonce, a word and a number: `@a3f0…@ exit 3`. It may follow text without a newline, and may arrive in pieces.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A marker line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Marker {
    /// The process id, on the device, of the program that is about to start.
    Pid(u32),
    /// The exit code of the script, whose output ends here.
    Exit(u32),
}

/// A random word that no program prints.
pub fn make_nonce() -> String {
    let draw = || RandomState::new().build_hasher().finish();
    format!("@{:016x}{:016x}@", draw(), draw())
}

/// Separates marker lines from a program's output.
pub struct MarkerFilter {
    nonce: Vec<u8>,
    /// The possible beginning of a marker, or empty.
    held: Vec<u8>,
}

impl MarkerFilter {
    pub fn new(nonce: &str) -> MarkerFilter {
        MarkerFilter { nonce: nonce.into(), held: Vec::new() }
    }

    /// Takes a piece of the stream; appends the program's bytes to `text` and the markers to `marks`.
    pub fn feed(&mut self, piece: &[u8], text: &mut Vec<u8>, marks: &mut Vec<Marker>) {
        self.held.extend_from_slice(piece);
        while let Some(at) = self.held.windows(self.nonce.len()).position(|w| w == self.nonce) {
            text.extend(self.held.drain(..at));
            let Some(end) = self.held.iter().position(|&b| b == b'\n') else { return };
            let line: Vec<u8> = self.held.drain(..=end).collect();
            match parse_marker(&line[self.nonce.len()..]) {
                Some(mark) => marks.push(mark),
                None => text.extend(line),
            }
        }
        let kept = (0..=self.nonce.len().min(self.held.len()))
            .rev()
            .find(|&n| self.held[self.held.len() - n..] == self.nonce[..n]);
        let text_len = self.held.len() - kept.unwrap_or(0);
        text.extend(self.held.drain(..text_len));
    }

    /// The text that was held back when the stream ended.
    pub fn rest(self) -> Vec<u8> {
        self.held
    }
}

/// Parses ` exit 3\n`, also with the carriage return of old devices.
fn parse_marker(line: &[u8]) -> Option<Marker> {
    let line = std::str::from_utf8(line).ok()?;
    let (what, number) = line.trim_end().strip_prefix(' ')?.split_once(' ')?;
    let number = number.parse().ok()?;
    match what {
        "pid" => Some(Marker::Pid(number)),
        "exit" => Some(Marker::Exit(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const N: &str = "@0123456789abcdef@";

    /// Feeds in pieces of `size` bytes.
    fn split(stream: &[u8], size: usize) -> (Vec<u8>, Vec<Marker>, Vec<u8>) {
        let (mut text, mut found, mut marks) = (Vec::new(), Vec::new(), MarkerFilter::new(N));
        for piece in stream.chunks(size) {
            marks.feed(piece, &mut text, &mut found);
        }
        (text, found, marks.rest())
    }

    #[test]
    fn markers_are_found_however_the_stream_is_split() {
        let stream = format!("{N} pid 77\nOnce\nupon a time{N} exit 3\r\n");
        for size in 1..=stream.len() {
            let (text, marks, rest) = split(stream.as_bytes(), size);
            assert_eq!(text, b"Once\nupon a time", "pieces of {size}");
            assert_eq!(marks, [Marker::Pid(77), Marker::Exit(3)], "pieces of {size}");
            assert!(rest.is_empty());
        }
    }

    #[test]
    fn a_broken_stream_and_hostile_output_have_no_exit_and_keep_their_text() {
        let stream = format!("text{N} exit ");
        let (text, marks, rest) = split(stream.as_bytes(), 5);
        assert_eq!((text.as_slice(), marks.len()), (&b"text"[..], 0));
        assert!(rest.starts_with(N.as_bytes()));
        let (text, marks, rest) = split(b"text@012", 3);
        assert_eq!((text.as_slice(), marks.len(), rest.as_slice()), (&b"text"[..], 0, &b"@012"[..]));
        let other = "@fedcba9876543210@ exit 0\n";
        let odd = format!("{N} exit zero\n{N}\n{N} exit 99999999999\n{N} pid -1\n");
        let bytes = [other.as_bytes(), odd.as_bytes(), b"@@01\xff\0@0123"].concat();
        for size in [1, 2, 7, 100] {
            let (mut text, marks, rest) = split(&bytes, size);
            text.extend(rest);
            assert_eq!(text, bytes);
            assert!(marks.is_empty());
        }
    }
}
