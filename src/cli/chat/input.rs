//! Messages from stdin: through a line editor on a terminal, or as plain lines from a file or pipe.

#[cfg(feature = "line-editor")]
use crate::cli::terminal_mode::{self, EchoGuard};
use files::text_file::strip_bom;
use files::{Error, Result, print_stderr, stderr};
use std::io::{BufRead, IsTerminal, Read};

/// One message or event of the input.
pub enum UserInput {
    Line(String),
    /// A text in triple quotes, which is never a command.
    Quoted(String),
    /// End of input, or Ctrl-D.
    EndOfInput,
    /// Ctrl-C, which raises no signal while the editor has the terminal.
    #[cfg_attr(not(feature = "line-editor"), expect(dead_code, reason = "only the editor reports it"))]
    Interrupt,
}

/// Source of the lines.
pub enum ChatInput {
    /// A file or a pipe.
    Piped,
    /// A terminal without the line editor.
    Terminal,
    #[cfg(feature = "line-editor")]
    Editor(Box<rustyline::DefaultEditor>),
}

const PROMPT: &str = "> ";
/// Prompt for the further lines of a message.
const CONTINUATION_PROMPT: &str = ". ";
/// Delimiter before and after a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Maximum bytes of a message.
const LINE_LIMIT: u64 = 16 << 20;

impl ChatInput {
    /// Opens stdin, with the line editor if stdin and stdout are a terminal.
    pub fn new() -> Self {
        if !std::io::stdin().is_terminal() {
            return ChatInput::Piped;
        }
        // The editor writes to stdout, which is for answers only unless it is the terminal.
        #[cfg(feature = "line-editor")]
        if std::io::stdout().is_terminal() && !crate::cli::terminal::is_dumb() {
            terminal_mode::save_mode();
            let config = rustyline::Config::builder().auto_add_history(true).build();
            if let Ok(editor) = rustyline::DefaultEditor::with_config(config) {
                return ChatInput::Editor(Box::new(editor));
            }
        }
        ChatInput::Terminal
    }

    /// True if a user types at a terminal.
    pub fn is_interactive(&self) -> bool {
        !matches!(self, ChatInput::Piped)
    }

    /// Reads the next message: a line, the lines that a backslash joins, or those in triple quotes.
    pub fn read_message(&mut self) -> Result<UserInput> {
        let line = match self.read_line(PROMPT)? {
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
            match self.append_line(&mut text)? {
                None => {}
                Some(UserInput::EndOfInput) => break,
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
    fn append_line(&mut self, text: &mut String) -> Result<Option<UserInput>> {
        match self.read_line(CONTINUATION_PROMPT)? {
            UserInput::Line(line) => *text += &line,
            other => return Ok(Some(other)),
        }
        if text.len() as u64 > LINE_LIMIT {
            return Err(Error::Usage("message from stdin: longer than 16 MiB".into()));
        }
        Ok(None)
    }

    /// Disables the echo of typed text until the result is dropped; used while an answer is printed.
    #[cfg(feature = "line-editor")]
    pub fn disable_echo(&self) -> Option<EchoGuard> {
        matches!(self, ChatInput::Editor(_)).then(EchoGuard::disable_echo)
    }

    /// The next line, without its end.
    fn read_line(&mut self, prompt: &str) -> Result<UserInput> {
        match self {
            ChatInput::Piped => next_line().map(|line| line.map_or(UserInput::EndOfInput, UserInput::Line)),
            ChatInput::Terminal => {
                stderr::write_stderr(format_args!("{prompt}"));
                let line = next_line()?;
                if line.is_none() {
                    print_stderr!("");
                }
                Ok(line.map_or(UserInput::EndOfInput, UserInput::Line))
            }
            #[cfg(feature = "line-editor")]
            ChatInput::Editor(editor) => match editor.readline(prompt) {
                Ok(line) => Ok(UserInput::Line(line)),
                Err(rustyline::error::ReadlineError::Eof) => Ok(UserInput::EndOfInput),
                Err(rustyline::error::ReadlineError::Interrupted) => Ok(UserInput::Interrupt),
                Err(e) => Err(Error::Usage(format!("message from the terminal: {e}"))),
            },
        }
    }
}

/// The next line of stdin, if there is one.
fn next_line() -> Result<Option<String>> {
    let mut bytes = Vec::new();
    std::io::stdin()
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
