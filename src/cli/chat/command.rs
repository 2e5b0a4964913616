//! Lines that begin with a slash.

use files::error::unquoted;

/// What `/help` prints.
pub(super) const HELP: &str = "\
/retry      answer the last message again; or ask it, if it got no answer
/undo       take back the last message and its answer
/reset      forget the conversation, except the --system message
/save FILE  save the conversation; continue it later with --session FILE or /load FILE
/load FILE  continue a saved conversation instead of this one
/stats      times of the last answer, and how full the cache is
/help       this list
/exit       leave; so do /quit and Ctrl-D
Ctrl-C stops an answer and keeps what was said. A line that begins with a blank is never a command.";

/// A line that is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Command<'a> {
    Exit,
    Help,
    Load(&'a str),
    Reset,
    Retry,
    Save(&'a str),
    Stats,
    Undo,
}

impl<'a> Command<'a> {
    /// The command in a line that begins with a slash, or what is wrong with it.
    pub fn parse(line: &'a str) -> std::result::Result<Self, String> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let command = match (word, rest.trim()) {
            ("/exit" | "/quit", "") => Command::Exit,
            ("/help", "") => Command::Help,
            ("/reset", "") => Command::Reset,
            ("/retry", "") => Command::Retry,
            ("/stats", "") => Command::Stats,
            ("/undo", "") => Command::Undo,
            ("/save" | "/load", "") => return Err(format!("{word}: give a file: {word} FILE")),
            ("/save", file) => Command::Save(file),
            ("/load", file) => Command::Load(file),
            ("/exit" | "/quit" | "/help" | "/reset" | "/retry" | "/stats" | "/undo", _) => {
                return Err(format!("{word}: stands alone; /help lists the commands"));
            }
            _ => {
                let word = unquoted(word);
                return Err(format!(
                    "{word}: no such command; /help lists them, and after a blank it is a message"
                ));
            }
        };
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_a_slash() {
        assert_eq!(Command::parse("/undo"), Ok(Command::Undo));
        assert_eq!(Command::parse("/quit "), Ok(Command::Exit));
        assert_eq!(Command::parse("/save  a file.bin "), Ok(Command::Save("a file.bin")));
        for (line, words) in [
            ("/load", "/load FILE"),
            ("/undo 2", "/undo: stands alone"),
            ("/", "/: no such command"),
            ("/etc/passwd\u{1b}[2J is", "/etc/passwd\\u{1b}[2J: no such command"),
        ] {
            let said = Command::parse(line).expect_err(line);
            assert!(said.contains(words), "{said}");
        }
    }
}
