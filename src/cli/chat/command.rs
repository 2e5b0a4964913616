//! Lines that begin with a slash.

use super::{Chat, Question};
use files::Result;
use std::path::Path;

const HELP: &str = "\
/retry      answer the last message once more; one that got no answer is asked again
/undo       take the last message and its answer back
/reset      forget the conversation, but for --system
/save FILE  save the conversation; --session FILE or /load FILE goes on with it
/load FILE  go on with a saved conversation instead of this one
/stats      times of the last answer, and what the conversation fills
/help       this list
/exit       leave, as /quit and Ctrl-D do
Ctrl-C stops an answer, which is kept as far as it came. A line that begins with a blank is never a command.";

/// What a line asks for besides an answer.
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
                let word = word.escape_debug();
                return Err(format!(
                    "{word}: no such command; /help lists them, and after a blank it is a message"
                ));
            }
        };
        Ok(command)
    }
}

/// What follows a command.
pub(super) enum Next {
    Leave,
    Read,
    Ask(Question),
}

impl Chat<'_> {
    /// Carries a command out. What it cannot do is said, and the conversation is as before.
    ///
    /// # Errors
    ///
    /// Where `--session` cannot be saved.
    pub(super) fn obey(&mut self, line: &str) -> Result<Next> {
        match Command::parse(line) {
            Err(wrong) => eprintln!("{wrong}"),
            Ok(Command::Exit) => return Ok(Next::Leave),
            Ok(Command::Help) => eprintln!("{HELP}"),
            Ok(Command::Stats) => self.say_stats(),
            Ok(Command::Retry) => match self.again() {
                Some(question) => return Ok(Next::Ask(question)),
                None => eprintln!("/retry: no message yet"),
            },
            Ok(Command::Undo) => self.undo()?,
            Ok(Command::Reset) => {
                self.conversation.reset();
                self.asked.clear();
                self.session.clear();
                self.last = None;
                self.save()?;
            }
            Ok(Command::Save(file)) => match self.save_to(Path::new(file)) {
                Ok(()) => self.note(&format!("saved: {}", self.size())),
                Err(e) => eprintln!("/save: {e}"),
            },
            Ok(Command::Load(file)) => match self.load(Path::new(file)) {
                Ok(()) => {
                    self.note(&format!("loaded: {}", self.size()));
                    self.save()?;
                }
                // The advice that goes with a flag goes with the command too.
                Err(e) => eprintln!("/load: {}", e.to_string().replace("--session", "/load")),
            },
        }
        Ok(Next::Read)
    }

    /// Takes the last question back, to be asked again, unless there is one without an answer.
    fn again(&mut self) -> Option<Question> {
        self.unanswered.take().or_else(|| {
            let answered = Some(self.conversation.state());
            let text = self.conversation.forget_question()?;
            let random = self.asked.pop().unwrap_or_else(|| self.random.clone());
            Some(Question { text, random, answered })
        })
    }

    /// Takes the last question and its answer back: what follows is what would have followed without them.
    fn undo(&mut self) -> Result<()> {
        let Some(text) = self.conversation.forget_question() else {
            eprintln!("/undo: no message yet");
            return Ok(());
        };
        if let Some(random) = self.asked.pop() {
            self.random = random;
        }
        self.rewind()?;
        self.save()?;
        let begin: String = text.chars().take(40).flat_map(char::escape_debug).collect();
        let dots = if text.chars().nth(40).is_some() { "…" } else { "" };
        self.note(&format!("taken back: {begin}{dots}"));
        Ok(())
    }

    /// Drops what the cache has beyond the conversation.
    fn rewind(&mut self) -> Result<()> {
        let ids = self.conversation.ids();
        let common = self.common();
        match self.session.has_evicted() {
            // What has to be computed again waits for the next question, where it can be stopped.
            true => self.session.reuse(ids).map(|_| ()),
            false => self.session.rewind(common),
        }
    }

    fn say_stats(&self) {
        match &self.last {
            Some(report) => report.say(&self.session),
            None => eprintln!("no answer yet"),
        }
        let (slots, all) = (self.session.slots(), self.session.backend().capacity());
        eprintln!(
            "context: {slots} of {all} slots ({:.0} %), evictions: {}; {}",
            100.0 * slots as f64 / all as f64,
            self.session.sequence().cuts.len(),
            self.size()
        );
    }

    /// How much the conversation is.
    fn size(&self) -> String {
        let (messages, tokens) = (self.conversation.questions(), self.conversation.ids().len());
        format!("messages: {messages}, tokens: {tokens}")
    }

    /// Says what went well.
    fn note(&self, text: &str) {
        if self.input.is_interactive() && !self.args.output.quiet {
            eprintln!("{text}");
        }
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
