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
                "--session {}: was saved with another --system; leave --system out, or give another file",
                file.display()
            )));
        }
        let tools = &self.conversation.variables().tools;
        if !saved.ids.is_empty() && tools.is_some() && *tools != saved.tools {
            return Err(Error::Usage(format!(
                "--session {}: was saved with other --tools; leave --tools out, or give another file",
                file.display()
            )));
        }
        self.note(&format!("going on after {} tokens; /reset begins anew", saved.ids.len()));
        self.adopt(saved, &state);
        Ok(())
    }

    /// Continues the conversation in `file`, whatever its system message.
    ///
    /// # Errors
    ///
    /// Errors of [`saved::read`]. The conversation is then unchanged, but may have to be computed again.
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

    /// The conversation of a saved state, if it is one and has this model's chat template.
    fn check_saved(&self, file: &Path, state: &State) -> Result<ConversationState> {
        let Content::Chat(saved) = &state.content else {
            return Err(Error::Usage(format!(
                "--session {}: holds a text, not a conversation; go on with it in generate, or give another file",
                file.display()
            )));
        };
        let ours = self.conversation.template().name();
        if saved.template != ours {
            let theirs = unquoted(&saved.template);
            let why =
                format!("was saved with a {theirs} chat template, and this model's is {ours}; use that one");
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

    /// Saves the conversation in the file of `--session`.
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
