//! Commands in a conversation: lines that begin with a slash.

use super::{Chat, Next, Question};
use crate::cli::args::show_settings;
use crate::cli::flags::name_flags_in;
use files::error::unquoted;
use files::{Error, Result, say};
use std::path::Path;
use text::chat::{Message, ToolCall};
use text::sampler::{Rng, SamplerOptions};

/// The text of `/help`.
const HELP: &str = "\
/retry           retry the last message
/undo            remove the last message and its answer
/clear           forget the conversation, except the system prompt
/reset           same as /clear
/system TEXT     start over with this system prompt
/tool NAME TEXT  give the result of a function that the last answer called; after the last result the model continues
/set NAME VALUE  change num-tokens or a sampling flag, such as temperature; /set alone shows them
/save FILE       save the conversation; continue it later with --session FILE or /load FILE
/load FILE       continue a saved conversation instead of this one
/stats           show the timings of the last answer and how full the context is
/help            show this list
/exit            quit; so do /quit and Ctrl-D
To continue a message on the next line, end the line with \\, or put the message between \"\"\" and \"\"\".
Ctrl-C stops an answer and keeps its text so far. A line that starts with a space is never a command.";

impl Chat<'_> {
    /// Runs the command on a line. A command that fails prints why and changes nothing.
    ///
    /// # Errors
    ///
    /// If `--session` cannot be saved.
    pub fn run_command(&mut self, line: &str) -> Result<Next> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (word, rest.trim()) {
            ("/exit" | "/quit", "") => return Ok(Next::Leave),
            ("/help", "") => say!("{HELP}"),
            ("/stats", "") => self.say_stats(),
            ("/retry", "") => match self.retry() {
                Some(question) => return Ok(Next::Ask(question)),
                None => say!("/retry: no message yet"),
            },
            ("/undo", "") => self.undo()?,
            ("/reset" | "/clear", "") => {
                self.conversation.reset();
                self.forget_answers()?;
            }
            ("/exit" | "/quit" | "/help" | "/stats" | "/retry" | "/undo" | "/reset" | "/clear", _) => {
                say!("{word} takes no argument; see /help")
            }
            ("/system", "") => say!("/system: give a text: /system TEXT"),
            ("/system", text) => {
                self.conversation = self.conversation.anew(Some(text.into()));
                self.forget_answers()?;
                self.note("new conversation with this system prompt");
            }
            ("/tool", result) => match self.add_tool_result(result) {
                Ok(Some(question)) => return Ok(Next::Ask(question)),
                Ok(None) => {
                    let (have, all) = (self.results.len(), self.conversation.calls().len());
                    self.note(&format!("{have} of {all} results received"));
                }
                Err(why) => say!("/tool: {why}"),
            },
            ("/set", "") => say!("{}", show_settings(&self.options)),
            ("/set", setting) => match self.change_setting(setting) {
                Ok(()) => self.note(&show_settings(&self.options)),
                Err(e) => say!("/set: {}", name_flags_in(e)),
            },
            ("/save" | "/load", "") => say!("{word}: give a file: {word} FILE"),
            ("/save", file) => match self.save_to(Path::new(file)) {
                Ok(()) => self.note(&format!("saved: {}", self.size())),
                Err(e) => say!("/save: {}", name_flags_in(e)),
            },
            ("/load", file) => match self.load(Path::new(file)) {
                Ok(()) => {
                    self.note(&format!("loaded: {}", self.size()));
                    self.save()?;
                }
                // The errors are those of `--session`; their advice holds for the command too.
                Err(e) => say!("/load: {}", name_flags_in(e).to_string().replace("--session", "/load")),
            },
            _ => say!(
                "Unknown command {}. See /help. To send it as text, start the line with a space.",
                unquoted(word)
            ),
        }
        Ok(Next::Read)
    }

    /// Adds `NAME TEXT`, the result of a call. Once all results are there, returns them as the next question.
    fn add_tool_result(&mut self, result: &str) -> std::result::Result<Option<Question>, String> {
        let Some((name, text)) = result.split_once(char::is_whitespace) else {
            return Err("give a name and a text: /tool NAME TEXT".into());
        };
        let calls = self.conversation.calls();
        if calls.is_empty() {
            return Err("the last answer called no function".into());
        }
        let is_open = |call: &&ToolCall| {
            !self.results.iter().any(|result| result.tool_call_id.as_ref() == Some(&call.id))
        };
        let open: Vec<&ToolCall> = calls.iter().filter(is_open).collect();
        let Some(call) = open.iter().find(|call| call.name == name || call.id == name) else {
            let names: Vec<_> = open.iter().map(|call| call.name.as_str()).collect();
            return Err(format!("{} was not called; called: {}", unquoted(name), names.join(", ")));
        };
        let (result, all) = (Message::result(call, text.trim_start()), calls.len());
        self.results.push(result);
        if self.results.len() < all {
            return Ok(None);
        }
        Ok(Some(self.question_of_results()))
    }

    /// Forgets the results, answers and cache of the previous conversation.
    fn forget_answers(&mut self) -> Result<()> {
        self.results.clear();
        self.asked.clear();
        self.session.clear();
        self.last = None;
        self.save()
    }

    /// Changes a flag, `NAME VALUE`, for later answers. The random numbers continue, unless the seed changes.
    fn change_setting(&mut self, setting: &str) -> Result<()> {
        let Some((name, value)) = setting.split_once(char::is_whitespace) else {
            return Err(Error::Usage(format!("{}: give a value: /set NAME VALUE", setting.escape_debug())));
        };
        let set = self.set.with(name, value.trim())?;
        let options = set.resolve(self.args.completion.output.format)?;
        let seed = set.sampler.seed().filter(|_| name.trim_start_matches('-') == "seed");
        let sampler = set.sampler.recommend(options.sampler, &self.recommended)?;
        self.options.sampler = SamplerOptions { seed: self.options.sampler.seed, ..sampler };
        self.options.max_tokens = options.max_tokens;
        if let Some(seed) = seed {
            self.options.sampler.seed = seed;
            self.random = Rng::new(seed);
        }
        self.set = set;
        Ok(())
    }

    /// The question to ask again: one without an answer, or the last one, which is removed from the conversation.
    fn retry(&mut self) -> Option<Question> {
        self.unanswered.take().or_else(|| {
            let answered = Some(self.conversation.state());
            let messages = self.conversation.forget_question()?;
            self.results.clear();
            let random = self.asked.pop().unwrap_or_else(|| self.random.clone());
            Some(Question { messages, random, answered })
        })
    }

    /// Removes the last question and its answer, and restores the random state before them.
    fn undo(&mut self) -> Result<()> {
        let Some(messages) = self.conversation.forget_question() else {
            say!("/undo: no message yet");
            return Ok(());
        };
        self.results.clear();
        if let Some(random) = self.asked.pop() {
            self.random = random;
        }
        self.rewind()?;
        self.save()?;
        let text = messages.last().map_or("", |last| &last.content);
        let begin: String = text.chars().take(40).flat_map(char::escape_debug).collect();
        let dots = if text.chars().nth(40).is_some() { "…" } else { "" };
        self.note(&format!("removed: {begin}{dots}"));
        Ok(())
    }

    /// Drops the tokens in the cache beyond the conversation.
    fn rewind(&mut self) -> Result<()> {
        if self.session.has_evicted() {
            // Tokens to compute again wait for the next question, which can be stopped.
            self.session.reuse(self.conversation.ids()).map(|_| ())
        } else {
            self.session.rewind(self.common())
        }
    }

    fn say_stats(&self) {
        match &self.last {
            Some(report) => report.say(&self.session),
            None => say!("no answer yet"),
        }
        let (slots, all) = (self.session.slots(), self.session.extent().slots);
        say!(
            "context: {slots} of {all} tokens ({:.0} %), evictions: {}; {}",
            100.0 * slots as f64 / all as f64,
            self.session.sequence().cuts.len(),
            self.size()
        );
    }

    /// Length of the conversation, in messages and tokens.
    fn size(&self) -> String {
        let (messages, tokens) = (self.conversation.questions(), self.conversation.ids().len());
        format!("messages: {messages}, tokens: {tokens}")
    }

    /// Prints a confirmation for a user at a terminal, unless quiet.
    pub fn note(&self, text: &str) {
        if self.input.is_interactive() && !self.is_quiet() {
            say!("{text}");
        }
    }
}
