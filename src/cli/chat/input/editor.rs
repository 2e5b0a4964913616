//! The line editor of a chat: history, pasted text, and Ctrl-C in a line.

use super::UserInput;
use crate::cli::terminal::{Style, style_text};
use files::{Error, Result};
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::DefaultHistory;
use rustyline::validate::Validator;
use rustyline::{CompletionType, Config, Context, Editor, Helper};
use std::cell::Cell;

/// An editor that keeps lines after the one that it returns.
pub struct LineEditor {
    editor: Editor<TypedLine, DefaultHistory>,
    config: Config,
}

impl LineEditor {
    /// Opens the terminal; `None` if it cannot be edited on.
    pub fn open() -> Option<Self> {
        let config = Config::builder().auto_add_history(true).completion_type(CompletionType::List).build();
        let history = DefaultHistory::with_config(&config);
        Self::with_history(config, history)
    }

    fn with_history(config: Config, history: DefaultHistory) -> Option<Self> {
        let mut editor = Editor::with_history(config.clone(), history).ok()?;
        editor.set_helper(Some(TypedLine::default()));
        Some(Self { editor, config })
    }

    /// Reads a line.
    pub fn read_line(&mut self, prompt: &str) -> Result<UserInput> {
        match self.editor.readline(&(prompt, style_text(Style::Dim, prompt))) {
            Ok(line) => Ok(UserInput::Line(line)),
            Err(ReadlineError::Eof) => Ok(UserInput::EndOfInput),
            Err(ReadlineError::Interrupted) if self.has_text() => Ok(UserInput::Dropped),
            Err(ReadlineError::Interrupted) => Ok(UserInput::Interrupt),
            Err(e) => Err(Error::Usage(format!("message from the terminal: {e}"))),
        }
    }

    /// True if the last line had text when it ended.
    fn has_text(&self) -> bool {
        self.editor.helper().is_some_and(|line| line.has_text.get())
    }

    /// Drops the lines after the one that was returned last.
    pub fn drop_typed_lines(&mut self) {
        let history = std::mem::replace(self.editor.history_mut(), DefaultHistory::with_config(&self.config));
        if let Some(fresh) = Self::with_history(self.config.clone(), history) {
            *self = fresh;
        }
    }
}

/// Follows the line as it is edited: on Ctrl-C the editor does not tell its text.
#[derive(Default)]
struct TypedLine {
    has_text: Cell<bool>,
}

/// Called whenever the line has changed.
impl Hinter for TypedLine {
    type Hint = String;

    fn hint(&self, line: &str, _: usize, _: &Context<'_>) -> Option<String> {
        self.has_text.set(!line.is_empty());
        None
    }
}

/// A tab is a tab, because pasted text has some.
impl Completer for TypedLine {
    type Candidate = String;

    fn complete(&self, _: &str, at: usize, _: &Context<'_>) -> rustyline::Result<(usize, Vec<String>)> {
        Ok((at, vec!["\t".into()]))
    }
}

/// With a highlighter, the editor shows prompts in their style.
impl Highlighter for TypedLine {}
impl Validator for TypedLine {}
impl Helper for TypedLine {}
