//! Carries out the commands of a conversation.

use super::command::{Command, HELP};
use super::{Chat, Next, Question};
use crate::cli::args::show_settings;
use crate::cli::flags::in_error;
use files::error::unquoted;
use files::{Result, say};
use std::path::Path;
use text::chat::{Message, ToolCall};
use text::sampler::{Rng, SamplerOptions};

impl Chat<'_> {
    /// Carries out a command. If it fails, it says so and changes nothing.
    ///
    /// # Errors
    ///
    /// If `--session` cannot be saved.
    pub fn obey(&mut self, line: &str) -> Result<Next> {
        match Command::parse(line) {
            Err(wrong) => say!("{wrong}"),
            Ok(Command::Exit) => return Ok(Next::Leave),
            Ok(Command::Help) => say!("{HELP}"),
            Ok(Command::Stats) => self.say_stats(),
            Ok(Command::Retry) => match self.again() {
                Some(question) => return Ok(Next::Ask(question)),
                None => say!("/retry: no message yet"),
            },
            Ok(Command::Undo) => self.undo()?,
            Ok(Command::Tool(name, text)) => match self.result(name, text) {
                Ok(Some(question)) => return Ok(Next::Ask(question)),
                Ok(None) => {
                    let (have, all) = (self.results.len(), self.conversation.calls().len());
                    self.note(&format!("{have} of {all} results"));
                }
                Err(why) => say!("/tool: {why}"),
            },
            Ok(Command::Reset) => {
                self.conversation.reset();
                self.forget()?;
            }
            Ok(Command::System(text)) => {
                self.conversation = self.conversation.anew(Some(text.into()));
                self.forget()?;
                self.note("a new conversation with this system message");
            }
            Ok(Command::Settings) => say!("{}", show_settings(&self.options)),
            Ok(Command::Set(name, value)) => match self.change(name, value) {
                Ok(()) => self.note(&show_settings(&self.options)),
                Err(e) => say!("/set: {}", in_error(e)),
            },
            Ok(Command::Save(file)) => match self.save_to(Path::new(file)) {
                Ok(()) => self.note(&format!("saved: {}", self.size())),
                Err(e) => say!("/save: {}", in_error(e)),
            },
            Ok(Command::Load(file)) => match self.load(Path::new(file)) {
                Ok(()) => {
                    self.note(&format!("loaded: {}", self.size()));
                    self.save()?;
                }
                // Advice about the flag is advice about the command too.
                Err(e) => say!("/load: {}", in_error(e).to_string().replace("--session", "/load")),
            },
        }
        Ok(Next::Read)
    }

    /// Takes the result of a call; once all are there, they are what the model answers next.
    fn result(&mut self, name: &str, text: &str) -> std::result::Result<Option<Question>, String> {
        let calls = self.conversation.calls();
        if calls.is_empty() {
            return Err("the last answer called no function".into());
        }
        let open = |call: &&ToolCall| {
            !self.results.iter().any(|result| result.tool_call_id.as_ref() == Some(&call.id))
        };
        let called = |call: &&ToolCall| call.name == name || call.id == name;
        let Some(call) = calls.iter().filter(open).find(called) else {
            let names: Vec<_> = calls.iter().filter(open).map(|call| call.name.as_str()).collect();
            return Err(format!("{} was not called; called: {}", unquoted(name), names.join(", ")));
        };
        let (result, all) = (Message::result(call, text), calls.len());
        self.results.push(result);
        if self.results.len() < all {
            return Ok(None);
        }
        let messages = std::mem::take(&mut self.results);
        Ok(Some(Question { messages, random: self.random.clone(), answered: None }))
    }

    /// Forgets what belongs to the conversation before.
    fn forget(&mut self) -> Result<()> {
        self.results.clear();
        self.asked.clear();
        self.session.clear();
        self.last = None;
        self.save()
    }

    /// Changes a flag for the answers to come. The random numbers go on, unless the seed changes.
    fn change(&mut self, name: &str, value: &str) -> Result<()> {
        let set = self.set.with(name, value)?;
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

    /// The question to ask again: one without an answer, or the last one, which is taken back.
    fn again(&mut self) -> Option<Question> {
        self.unanswered.take().or_else(|| {
            let answered = Some(self.conversation.state());
            let messages = self.conversation.forget_question()?;
            self.results.clear();
            let random = self.asked.pop().unwrap_or_else(|| self.random.clone());
            Some(Question { messages, random, answered })
        })
    }

    /// Takes back the last question and its answer, as if they had never been.
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
        self.note(&format!("taken back: {begin}{dots}"));
        Ok(())
    }

    /// Drops what the cache holds beyond the conversation.
    fn rewind(&mut self) -> Result<()> {
        if self.session.has_evicted() {
            // What must be computed again waits for the next question, which can be stopped.
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
            "context: {slots} of {all} slots ({:.0} %), evictions: {}; {}",
            100.0 * slots as f64 / all as f64,
            self.session.sequence().cuts.len(),
            self.size()
        );
    }

    /// How long the conversation is.
    fn size(&self) -> String {
        let (messages, tokens) = (self.conversation.questions(), self.conversation.ids().len());
        format!("messages: {messages}, tokens: {tokens}")
    }

    /// Tells somebody who types that a command worked.
    pub fn note(&self, text: &str) {
        if self.input.is_interactive() && !self.is_quiet() {
            say!("{text}");
        }
    }
}
