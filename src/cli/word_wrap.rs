//! Word wrap on a terminal. A word is printed piece by piece as it is generated; if it does not fit, it is erased and
//! printed again on the next line.

use super::terminal::is_dumb;
use std::io::IsTerminal;
use unicode_width::UnicodeWidthChar;

/// The text of a message with line breaks between words, if stderr is a terminal.
pub fn wrap_message(text: &str) -> String {
    let mut wrap = if std::io::stderr().is_terminal() { WordWrap::for_stdout() } else { WordWrap::default() };
    wrap.wrap_piece(text)
}

/// State of the current line.
#[derive(Default)]
pub struct WordWrap {
    /// Maximum cells per line; 0 leaves wrapping to the terminal.
    width: usize,
    /// Cells written on this line.
    column: usize,
    /// The word at the end of the line, and its width in cells.
    word: String,
    cells: usize,
}

impl WordWrap {
    /// Wraps at the width of stdout; the first piece begins at the left edge.
    pub fn for_stdout() -> Self {
        let stdout = std::io::stdout();
        let size = if stdout.is_terminal() && !is_dumb() {
            rustix::termios::tcgetwinsize(&stdout).ok()
        } else {
            None
        };
        // The last cell stays free, because terminals differ there.
        Self::new(size.map_or(0, |size| usize::from(size.ws_col).saturating_sub(1)))
    }

    fn new(width: usize) -> Self {
        Self { width, ..Self::default() }
    }

    /// The next piece with line breaks inserted.
    pub fn wrap_piece(&mut self, text: &str) -> String {
        if self.width == 0 {
            return text.into();
        }
        let mut out = String::with_capacity(text.len() + 8);
        text.chars().for_each(|c| self.wrap_char(c, &mut out));
        out
    }

    fn wrap_char(&mut self, c: char, out: &mut String) {
        // A tab has no width; it counts as one cell.
        let cells = c.width().unwrap_or(1);
        match c {
            '\n' | '\r' => {
                out.push(c);
                self.begin_line();
            }
            _ if c.is_whitespace() => {
                // A space at the edge becomes the line break.
                if self.column + cells > self.width {
                    out.push('\n');
                    self.begin_line();
                } else {
                    out.push(c);
                    self.column += cells;
                    self.begin_word();
                }
            }
            _ => {
                // Lines may break between wide characters, which have no spaces.
                if cells == 2 {
                    self.begin_word();
                }
                if self.column + cells > self.width {
                    self.break_before(out);
                }
                out.push(c);
                self.word.push(c);
                self.cells += cells;
                self.column += cells;
            }
        }
    }

    /// Begins the next line, and moves the current word there if it is not alone on this one.
    fn break_before(&mut self, out: &mut String) {
        if self.cells == self.column {
            out.push('\n');
            self.begin_line();
            return;
        }
        if self.cells > 0 {
            *out += &format!("\x1b[{}D\x1b[K", self.cells);
        }
        out.push('\n');
        *out += &self.word;
        self.column = self.cells;
    }

    fn begin_line(&mut self) {
        self.column = 0;
        self.begin_word();
    }

    fn begin_word(&mut self) {
        self.word.clear();
        self.cells = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that a terminal shows for the output of [`WordWrap`].
    fn shown(width: usize, pieces: &[&str]) -> Vec<String> {
        let mut wrap = WordWrap::new(width);
        let text: String = pieces.iter().map(|piece| wrap.wrap_piece(piece)).collect();
        let mut lines = vec![String::new()];
        let mut rest = text.as_str();
        while let Some(c) = rest.chars().next() {
            let last = lines.last_mut().expect("a line");
            if let Some(back) = rest.strip_prefix("\x1b[") {
                let (count, after) = back.split_once("D\x1b[K").expect("only this is written");
                (0..count.parse().expect("a number")).for_each(|_| _ = last.pop());
                rest = after;
                continue;
            }
            if c == '\n' {
                lines.push(String::new())
            } else {
                last.push(c)
            }
            rest = &rest[c.len_utf8()..];
        }
        lines
    }

    #[test]
    fn words_go_to_the_next_line_as_a_whole() {
        let text = ["Once", " upon", " a ti", "me there", " was"];
        assert_eq!(shown(12, &text), ["Once upon a ", "time there ", "was"]);
        assert_eq!(shown(0, &text), [text.concat()]);
        assert_eq!(shown(4, &["ab cdefghijk l"]), ["ab ", "cdef", "ghij", "k l"]);
        assert_eq!(shown(4, &["abcd efgh\nij"]), ["abcd", "efgh", "ij"]);
    }

    #[test]
    fn wide_characters_need_no_blanks() {
        assert_eq!(shown(5, &["日本語", "の文"]), ["日本", "語の", "文"]);
        assert_eq!(
            shown(4, &["e\u{301}e\u{301}e\u{301}e\u{301} x"]),
            ["e\u{301}e\u{301}e\u{301}e\u{301}", "x"]
        );
    }
}
