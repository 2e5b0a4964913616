//! Commands in a conversation: lines that begin with a slash.

use super::context::ContextWarning;
use super::{Chat, NextAction, Question};
use crate::cli::args::format_settings;
use crate::cli::flags::name_flags_in;
use crate::cli::terminal::{Style, style_text};
use crate::cli::word_wrap::wrap_message;
use files::error::escape;
use files::{Error, Result, print_stderr};
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
/tool NAME TEXT  give the result of a function that the last answer called
/set NAME VALUE  change num-tokens or a sampling flag; /set alone shows them
/save FILE       save the conversation, for --session FILE or /load FILE
/load FILE       continue a saved conversation instead of this one
/stats           show the times of the last answer, and how full the context is
/help            show this list
/exit            quit; so do /quit and Ctrl-D

A message is one line. To continue it on the next, end the line with \\, or put the message between \"\"\" and \"\"\". Pasted \
lines are one message where the terminal marks what is pasted, as most do; else each is a message, like lines that are \
typed during an answer. Ctrl-C stops an answer, keeps its text so far and drops what was typed meanwhile; in a message it \
drops the message. A line that starts with a space is never a command.";

/// [`HELP`] with bold commands.
fn styled_help() -> String {
    let styled = |line: &str| match line.split_once("  ").filter(|_| line.starts_with('/')) {
        Some((command, rest)) => format!("{}  {rest}", style_text(Style::Bold, command)),
        None => line.to_owned(),
    };
    wrap_message(HELP).lines().map(styled).collect::<Vec<_>>().join("\n")
}

impl Chat<'_> {
    /// Runs the command on a line. A command that fails prints why and changes nothing.
    ///
    /// # Errors
    ///
    /// If `--session` cannot be saved.
    pub fn run_command(&mut self, line: &str) -> Result<NextAction> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match (word, rest.trim()) {
            ("/exit" | "/quit", "") => return Ok(NextAction::Leave),
            ("/help", "") => print_stderr!("{}", styled_help()),
            ("/stats", "") => self.say_stats(),
            ("/retry", "") => match self.take_retry_question() {
                Some(question) => return Ok(NextAction::Ask(question)),
                None => print_stderr!("/retry: no message yet"),
            },
            ("/undo", "") => self.undo_turn()?,
            ("/reset" | "/clear", "") => {
                self.conversation.reset();
                self.forget_history()?;
            }
            ("/exit" | "/quit" | "/help" | "/stats" | "/retry" | "/undo" | "/reset" | "/clear", _) => {
                print_stderr!("{word} takes no argument; see /help")
            }
            ("/system", "") => print_stderr!("/system: give a text: /system TEXT"),
            ("/system", text) => {
                self.conversation = self.conversation.new_with_system(Some(text.into()));
                self.forget_history()?;
                self.print_note("new conversation with this system prompt");
            }
            ("/tool", result) => match self.add_tool_result(result) {
                Ok(Some(question)) => return Ok(NextAction::Ask(question)),
                Ok(None) => {
                    let (have, all) = (self.tool_results.len(), self.conversation.last_tool_calls().len());
                    self.print_note(&format!("{have} of {all} results received"));
                }
                Err(why) => print_stderr!("/tool: {why}"),
            },
            ("/set", "") => print_stderr!("{}", format_settings(&self.options)),
            ("/set", setting) => match self.change_setting(setting) {
                Ok(()) => self.print_note(&format_settings(&self.options)),
                Err(e) => print_stderr!("/set: {}", name_flags_in(e)),
            },
            ("/save" | "/load", "") => print_stderr!("{word}: give a file: {word} FILE"),
            ("/save", file) => match self.save_to(Path::new(file)) {
                Ok(()) => self.print_note(&format!("saved: {}", self.describe_length())),
                Err(e) => print_stderr!("/save: {}", name_flags_in(e)),
            },
            ("/load", file) => match self.load_conversation(Path::new(file)) {
                Ok(()) => {
                    self.print_note(&format!("loaded: {}", self.describe_length()));
                    self.save_session()?;
                }
                // The errors are those of `--session`; their advice holds for the command too.
                Err(e) => {
                    print_stderr!("/load: {}", name_flags_in(e).to_string().replace("--session", "/load"))
                }
            },
            _ => print_stderr!(
                "Unknown command {}. See /help. To send it as text, start the line with a space.",
                escape(word)
            ),
        }
        Ok(NextAction::Read)
    }

    /// Adds `NAME TEXT`, the result of a call. Once all results are there, returns them as the next question.
    fn add_tool_result(&mut self, result: &str) -> std::result::Result<Option<Question>, String> {
        let Some((name, text)) = result.split_once(char::is_whitespace) else {
            return Err("give a name and a text: /tool NAME TEXT".into());
        };
        let calls = self.conversation.last_tool_calls();
        if calls.is_empty() {
            return Err("the last answer called no function".into());
        }
        let is_open = |call: &&ToolCall| {
            !self.tool_results.iter().any(|result| result.tool_call_id.as_ref() == Some(&call.id))
        };
        let open: Vec<&ToolCall> = calls.iter().filter(is_open).collect();
        let Some(call) = open.iter().find(|call| call.name == name || call.id == name) else {
            let names: Vec<_> = open.iter().map(|call| call.name.as_str()).collect();
            return Err(format!("{} was not called; called: {}", escape(name), names.join(", ")));
        };
        let (result, all) = (Message::tool_result(call, text.trim_start()), calls.len());
        self.tool_results.push(result);
        if self.tool_results.len() < all {
            return Ok(None);
        }
        Ok(Some(self.question_from_results()))
    }

    /// Forgets the results, answers and cache of the previous conversation.
    fn forget_history(&mut self) -> Result<()> {
        self.tool_results.clear();
        self.rng_history.clear();
        self.session.clear();
        self.last_report = None;
        self.context_warning = ContextWarning::Due;
        self.save_session()
    }

    /// Changes a flag, `NAME VALUE`, for later answers. The random numbers continue, unless the seed changes.
    fn change_setting(&mut self, setting: &str) -> Result<()> {
        let Some((name, value)) = setting.split_once(char::is_whitespace) else {
            return Err(Error::Usage(format!("{}: give a value: /set NAME VALUE", setting.escape_debug())));
        };
        let set = self.current_flags.with_setting(name, value.trim())?;
        let options = set.resolve_options(self.args.completion.output.format)?;
        let seed = set.sampler.parse_seed().filter(|_| name.trim_start_matches('-') == "seed");
        let sampler = set.sampler.with_recommended(options.sampler, &self.recommended)?;
        self.options.sampler = SamplerOptions { seed: self.options.sampler.seed, ..sampler };
        self.options.max_tokens = options.max_tokens;
        if let Some(seed) = seed {
            self.options.sampler.seed = seed;
            self.rng = Rng::new(seed);
        }
        self.current_flags = set;
        Ok(())
    }

    /// The question to ask again: one without an answer, or the last one, which is removed from the conversation.
    fn take_retry_question(&mut self) -> Option<Question> {
        self.unanswered.take().or_else(|| {
            let answered = Some(self.conversation.state());
            let messages = self.conversation.pop_question()?;
            self.tool_results.clear();
            let random = self.rng_history.pop().unwrap_or_else(|| self.rng.clone());
            Some(Question { messages, rng: random, previous_state: answered })
        })
    }

    /// Removes the last question and its answer, and restores the random state before them.
    fn undo_turn(&mut self) -> Result<()> {
        let Some(messages) = self.conversation.pop_question() else {
            print_stderr!("/undo: no message yet");
            return Ok(());
        };
        self.tool_results.clear();
        if let Some(random) = self.rng_history.pop() {
            self.rng = random;
        }
        self.rewind_cache()?;
        self.save_session()?;
        let text = messages.last().map_or("", |last| &last.content);
        let begin: String = text.chars().take(40).flat_map(char::escape_debug).collect();
        let dots = if text.chars().nth(40).is_some() { "…" } else { "" };
        self.print_note(&format!("removed: {begin}{dots}"));
        Ok(())
    }

    /// Drops the tokens in the cache beyond the conversation.
    fn rewind_cache(&mut self) -> Result<()> {
        if self.session.has_evicted() {
            // Tokens to compute again wait for the next question, which can be stopped.
            self.session.reuse_prefix(self.conversation.ids()).map(|_| ())
        } else {
            self.session.rewind(self.common_prefix_len())
        }
    }

    fn say_stats(&self) {
        match &self.last_report {
            Some(report) => report.print_stats(&self.session),
            None => print_stderr!("no answer yet"),
        }
        let (slots, all) = (self.session.slots(), self.session.extent().slots);
        let line = format!(
            "context: {slots} of {all} tokens ({:.0} %), evictions: {}; {}",
            100.0 * slots as f64 / all as f64,
            self.session.sequence().cuts.len(),
            self.describe_length()
        );
        print_stderr!("{}", style_text(Style::Dim, &line));
    }

    /// Length of the conversation, in messages and tokens.
    fn describe_length(&self) -> String {
        let (messages, tokens) = (self.conversation.count_questions(), self.conversation.ids().len());
        format!("messages: {messages}, tokens: {tokens}")
    }

    /// Prints a confirmation for a user at a terminal, unless quiet.
    pub fn print_note(&self, text: &str) {
        if self.input.is_interactive() && !self.is_quiet() {
            print_stderr!("{}", wrap_message(text));
        }
    }
}
