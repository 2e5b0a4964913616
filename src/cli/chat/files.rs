//! Saved conversations: `--session`, `/save` and `/load`.

use super::Chat;
use crate::run::saved::{self, Content, State};
use files::error::unquoted;
use files::{Error, Result};
use std::path::Path;
use text::chat::ConversationState;

impl Chat<'_> {
    /// Continues the conversation in `file`, if it exists.
    pub fn resume(&mut self, file: &Path) -> Result<()> {
        let Some(state) = saved::load(file, &mut self.session, self.engine)? else { return Ok(()) };
        let saved = self.check_saved(file, &state)?;
        let system = self.conversation.system();
        if !saved.ids.is_empty() && system.is_some() && system != saved.system.as_deref() {
            return Err(Error::Usage(format!(
                "--session {}: was saved with a different --system; remove --system or use another file",
                file.display()
            )));
        }
        let tools = &self.conversation.variables().tools;
        if !saved.ids.is_empty() && tools.is_some() && *tools != saved.tools {
            return Err(Error::Usage(format!(
                "--session {}: was saved with different --tools; remove --tools or use another file",
                file.display()
            )));
        }
        self.note(&format!("continuing after {} tokens; /reset starts over", saved.ids.len()));
        self.adopt(saved, &state);
        Ok(())
    }

    /// Continues the conversation in `file`, with its own system prompt.
    ///
    /// # Errors
    ///
    /// The errors of [`saved::read`]. The conversation is then unchanged, but may have to be computed again.
    pub fn load(&mut self, file: &Path) -> Result<()> {
        let Some(state) = saved::read(file, &mut self.session, self.engine)? else {
            return Err(Error::io(file, "no such file"));
        };
        let saved = self.check_saved(file, &state)?;
        self.adopt(saved, &state);
        self.unanswered = None;
        self.last = None;
        Ok(())
    }

    /// The conversation in a saved state. Fails if it is none, or has another chat template than this model's.
    fn check_saved(&self, file: &Path, state: &State) -> Result<ConversationState> {
        let Content::Chat(saved) = &state.content else {
            return Err(Error::Usage(format!(
                "--session {}: holds a text, not a conversation; continue it with generate, or use another file",
                file.display()
            )));
        };
        let ours = self.conversation.template().name();
        if saved.template != ours {
            let theirs = unquoted(&saved.template);
            let why = format!(
                "was saved with chat template {theirs}, but this model's is {ours}; use the same template"
            );
            return Err(Error::model(file, why));
        }
        Ok(saved.clone())
    }

    fn adopt(&mut self, mut saved: ConversationState, state: &State) {
        if saved.ids.is_empty() {
            saved.system = self.conversation.system().map(str::to_owned).or(saved.system);
            saved.tools = self.conversation.variables().tools.clone().or(saved.tools);
        }
        if let Some(random) = state.random(self.args.completion.sampler.seed(), &mut self.options.sampler) {
            self.random = random;
        }
        self.asked.clear();
        self.results.clear();
        self.conversation.resume(saved);
        self.set_form_of_answers();
    }

    /// Saves the conversation to the file of `--session`, if there is one.
    pub fn save(&mut self) -> Result<()> {
        match self.args.session.as_deref() {
            Some(file) => self.save_to(file),
            None => Ok(()),
        }
    }

    pub fn save_to(&mut self, file: &Path) -> Result<()> {
        let state = State {
            seed: self.options.sampler.seed,
            rng: self.random.clone(),
            content: Content::Chat(self.conversation.state()),
        };
        saved::save(file, &mut self.session, self.engine, state)
    }
}
