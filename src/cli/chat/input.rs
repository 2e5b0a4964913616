//! Messages from stdin: through a line editor on a terminal, or as plain lines from a file or pipe.

#[cfg(feature = "line-editor")]
mod editor;

use crate::cli::terminal::{Style, style_text};
#[cfg(feature = "line-editor")]
use crate::cli::terminal_mode::{self, TypingGuard};
use crate::run::session::CancelToken;
#[cfg(feature = "line-editor")]
use editor::LineEditor;
use files::text_file::strip_bom;
use files::{Error, Result, print_stderr, stderr};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{BufRead, IsTerminal, Read, stdin};

/// One message or event of the input.
pub enum UserInput {
    Line(String),
    /// A text in triple quotes, which is never a command.
    Quoted(String),
    /// End of input, or Ctrl-D.
    EndOfInput,
    /// Ctrl-C with nothing typed.
    Interrupt,
    /// Ctrl-C in a message, which is gone.
    Dropped,
}

/// Source of the lines.
pub enum ChatInput {
    /// A file or a pipe.
    Piped,
    /// A terminal without the line editor.
    Terminal,
    #[cfg(feature = "line-editor")]
    Editor(Box<LineEditor>),
}

const PROMPT: &str = "> ";
/// Prompt for the further lines of a message.
const CONTINUATION_PROMPT: &str = ". ";
/// Delimiter before and after a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Maximum bytes of a message.
const LINE_LIMIT: u64 = 16 << 20;
/// Interval at which the program looks for Ctrl-C while nothing is typed.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

impl ChatInput {
    /// Opens stdin, with the line editor if stdin and stdout are a terminal.
    pub fn new() -> Self {
        if !stdin().is_terminal() {
            return ChatInput::Piped;
        }
        // The editor writes to stdout, which is for answers only unless it is the terminal.
        #[cfg(feature = "line-editor")]
        if std::io::stdout().is_terminal() && !crate::cli::terminal::is_dumb() {
            terminal_mode::save_mode();
            if let Some(editor) = LineEditor::open() {
                return ChatInput::Editor(Box::new(editor));
            }
        }
        ChatInput::Terminal
    }

    /// True if a user types at a terminal.
    pub fn is_interactive(&self) -> bool {
        !matches!(self, ChatInput::Piped)
    }

    /// Reads the next message: a line, the lines that a backslash joins, or those in triple quotes. Where Ctrl-C is a
    /// signal, `cancel` tells of it.
    pub fn read_message(&mut self, cancel: &CancelToken) -> Result<UserInput> {
        let line = match self.read_line(PROMPT, cancel)? {
            UserInput::Line(line) => line,
            other => return Ok(other),
        };
        let opened = line.trim_start().strip_prefix(QUOTES).map(str::to_owned);
        let is_quoted = opened.is_some();
        let mut text = opened.unwrap_or(line);
        let continues =
            |text: &str| if is_quoted { !text.trim_end().ends_with(QUOTES) } else { text.ends_with('\\') };
        while continues(&text) {
            if !is_quoted {
                text.pop();
            }
            // The opening quotes may stand alone on their line.
            if !is_quoted || !text.is_empty() {
                text.push('\n');
            }
            match self.append_line(&mut text, cancel)? {
                None => {}
                Some(UserInput::EndOfInput) => break,
                Some(UserInput::Interrupt) => return Ok(UserInput::Dropped),
                Some(other) => return Ok(other),
            }
        }
        if !is_quoted {
            return Ok(UserInput::Line(text));
        }
        let text = text.trim_end();
        let text = text.strip_suffix(QUOTES).unwrap_or(text);
        Ok(UserInput::Quoted(text.strip_suffix('\n').unwrap_or(text).into()))
    }

    /// Adds the next line of a message to `text`. Returns anything else that was typed.
    fn append_line(&mut self, text: &mut String, cancel: &CancelToken) -> Result<Option<UserInput>> {
        match self.read_line(CONTINUATION_PROMPT, cancel)? {
            UserInput::Line(line) => *text += &line,
            other => return Ok(Some(other)),
        }
        if text.len() as u64 > LINE_LIMIT {
            return Err(Error::Usage("message from stdin: longer than 16 MiB".into()));
        }
        Ok(None)
    }

    /// Keeps typed text for the next prompt, unseen, until the result is dropped; used while the model is loaded and
    /// while an answer is printed.
    #[cfg(feature = "line-editor")]
    pub fn hold_typing(&self) -> Option<TypingGuard> {
        matches!(self, ChatInput::Editor(_)).then(TypingGuard::hold_typing)
    }

    /// Drops lines that were typed ahead. Ctrl-C has dropped those that the editor has not read yet.
    pub fn drop_typed_lines(&mut self) {
        #[cfg(feature = "line-editor")]
        if let ChatInput::Editor(editor) = self {
            editor.drop_typed_lines();
        }
    }

    /// The next line, without its end.
    fn read_line(&mut self, prompt: &str, cancel: &CancelToken) -> Result<UserInput> {
        match self {
            ChatInput::Piped => next_line().map(|line| line.map_or(UserInput::EndOfInput, UserInput::Line)),
            ChatInput::Terminal => {
                let before = cancel.is_cancelled();
                stderr::write_stderr(format_args!("{}", style_text(Style::Dim, prompt)));
                if is_interrupted(cancel, before) {
                    print_stderr!("");
                    return Ok(UserInput::Interrupt);
                }
                let line = next_line()?;
                if line.is_none() {
                    print_stderr!("");
                }
                Ok(line.map_or(UserInput::EndOfInput, UserInput::Line))
            }
            #[cfg(feature = "line-editor")]
            ChatInput::Editor(editor) => editor.read_line(prompt),
        }
    }
}

/// Waits until there is a line to read. True if Ctrl-C comes first, unless it came `before` the prompt and the next one
/// ends the program.
fn is_interrupted(cancel: &CancelToken, before: bool) -> bool {
    while let Ok(0) | Err(rustix::io::Errno::INTR) =
        poll(&mut [PollFd::new(&stdin(), PollFlags::IN)], Some(&POLL_INTERVAL))
    {
        if !before && cancel.is_cancelled() {
            return true;
        }
    }
    false
}

/// The next line of stdin, if there is one.
fn next_line() -> Result<Option<String>> {
    let mut bytes = Vec::new();
    stdin()
        .lock()
        .take(LINE_LIMIT + 1)
        .read_until(b'\n', &mut bytes)
        .map_err(|e| Error::Usage(format!("message from stdin: {e}")))?;
    if bytes.len() as u64 > LINE_LIMIT {
        return Err(Error::Usage("message from stdin: a line longer than 16 MiB".into()));
    }
    if bytes.is_empty() {
        return Ok(None);
    }
    let text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::Usage(format!("message from stdin: byte {at} of the line is not UTF-8; convert the text"))
    })?;
    Ok(Some(strip_bom(&text).trim_end_matches(['\n', '\r']).into()))
}
