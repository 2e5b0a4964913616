//! Lines that begin with a slash.

use files::error::unquoted;

/// What `/help` prints.
pub const HELP: &str = "\
/retry           answer the last message again; or ask it, if it got no answer
/undo            take back the last message and its answer
/clear           forget the conversation, except the system message
/reset           the same
/system TEXT     begin anew with this system message
/tool NAME TEXT  the result of a function that the last answer called; the model goes on when it has all of them
/set NAME VALUE  change a flag of the sampler, such as temperature, or num-tokens; /set alone shows them
/save FILE       save the conversation; continue it later with --session FILE or /load FILE
/load FILE       continue a saved conversation instead of this one
/stats           times of the last answer, and how full the cache is
/help            this list
/exit            leave; so do /quit and Ctrl-D
A message goes on after \\ at the end of a line. It may also stand between \"\"\" and \"\"\", on any number of lines.
Ctrl-C stops an answer and keeps what was said. A line that begins with a blank is never a command.";

/// A line that is no message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command<'a> {
    Exit,
    Help,
    Load(&'a str),
    Reset,
    Retry,
    Save(&'a str),
    Set(&'a str, &'a str),
    Settings,
    Stats,
    System(&'a str),
    Tool(&'a str, &'a str),
    Undo,
}

impl<'a> Command<'a> {
    /// The command in a line that begins with a slash, or what is wrong with it.
    pub fn parse(line: &'a str) -> std::result::Result<Self, String> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let command = match (word, rest.trim()) {
            ("/exit" | "/quit", "") => Command::Exit,
            ("/help", "") => Command::Help,
            ("/reset" | "/clear", "") => Command::Reset,
            ("/retry", "") => Command::Retry,
            ("/stats", "") => Command::Stats,
            ("/undo", "") => Command::Undo,
            ("/set", "") => Command::Settings,
            ("/set", setting) => match setting.split_once(char::is_whitespace) {
                Some((name, value)) => Command::Set(name, value.trim()),
                None => {
                    return Err(format!("/set {}: give a value: /set NAME VALUE", setting.escape_debug()));
                }
            },
            ("/system", "") => return Err("/system: give a text: /system TEXT".into()),
            ("/system", text) => Command::System(text),
            ("/tool", result) => match result.split_once(char::is_whitespace) {
                Some((name, text)) => Command::Tool(name, text.trim_start()),
                None => return Err("/tool: give a name and a text: /tool NAME TEXT".into()),
            },
            ("/save" | "/load", "") => return Err(format!("{word}: give a file: {word} FILE")),
            ("/save", file) => Command::Save(file),
            ("/load", file) => Command::Load(file),
            ("/exit" | "/quit" | "/help" | "/clear" | "/reset" | "/retry" | "/stats" | "/undo", _) => {
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
        assert_eq!(Command::parse("/clear"), Ok(Command::Reset));
        assert_eq!(Command::parse("/set top-k  5 "), Ok(Command::Set("top-k", "5")));
        assert_eq!(Command::parse("/system Be brief. "), Ok(Command::System("Be brief.")));
        assert_eq!(
            Command::parse("/tool get_weather 18 degrees"),
            Ok(Command::Tool("get_weather", "18 degrees"))
        );
        for (line, words) in [
            ("/tool", "/tool NAME TEXT"),
            ("/tool get_weather", "/tool NAME TEXT"),
            ("/set temperature", "/set NAME VALUE"),
            ("/system", "/system TEXT"),
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
