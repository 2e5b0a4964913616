//! Saved conversations: `--session`, `/save` and `/load`.

use super::Chat;
use crate::run::saved::{self, SavedContent, SavedState};
use files::error::escape;
use files::{Error, Result};
use std::path::Path;
use text::chat::ConversationState;

impl Chat<'_> {
    /// Continues the conversation in `file`, if it exists.
    pub fn resume_session(&mut self, file: &Path) -> Result<()> {
        let Some(state) = saved::load_session(file, &mut self.session, self.engine)? else { return Ok(()) };
        let saved = self.check_saved(file, &state)?;
        let system = self.conversation.system_message();
        if !saved.ids.is_empty() && system.is_some() && system != saved.system.as_deref() {
            return Err(Error::Usage(format!(
                "--session {}: was saved with a different --system; remove --system or use another file",
                file.display()
            )));
        }
        let tools = &self.conversation.template_kwargs().tools;
        if !saved.ids.is_empty() && tools.is_some() && *tools != saved.tools {
            return Err(Error::Usage(format!(
                "--session {}: was saved with different --tools; remove --tools or use another file",
                file.display()
            )));
        }
        self.print_note(&format!("continuing after {} tokens; /reset starts over", saved.ids.len()));
        self.adopt_state(saved, &state);
        Ok(())
    }

    /// Continues the conversation in `file`, with its own system prompt.
    ///
    /// # Errors
    ///
    /// The errors of [`saved::read_session`]. The conversation is then unchanged, but may have to be computed again.
    pub fn load_conversation(&mut self, file: &Path) -> Result<()> {
        let Some(state) = saved::read_session(file, &mut self.session, self.engine)? else {
            return Err(Error::io(file, "no such file"));
        };
        let saved = self.check_saved(file, &state)?;
        self.adopt_state(saved, &state);
        self.unanswered = None;
        self.last_report = None;
        Ok(())
    }

    /// The conversation in a saved state. Fails if it is none, or has another chat template than this model's.
    fn check_saved(&self, file: &Path, state: &SavedState) -> Result<ConversationState> {
        let SavedContent::Chat(saved) = &state.content else {
            return Err(Error::Usage(format!(
                "--session {}: holds a text, not a conversation; continue it with generate, or use another file",
                file.display()
            )));
        };
        let ours = self.conversation.template().name();
        if saved.template != ours {
            let theirs = escape(&saved.template);
            let why = format!(
                "was saved with chat template {theirs}, but this model's is {ours}; use the same template"
            );
            return Err(Error::model(file, why));
        }
        Ok(saved.clone())
    }

    fn adopt_state(&mut self, mut saved: ConversationState, state: &SavedState) {
        if saved.ids.is_empty() {
            saved.system = self.conversation.system_message().map(str::to_owned).or(saved.system);
            saved.tools = self.conversation.template_kwargs().tools.clone().or(saved.tools);
        }
        if let Some(random) =
            state.resume_rng(self.args.completion.sampler.parse_seed(), &mut self.options.sampler)
        {
            self.rng = random;
        }
        self.rng_history.clear();
        self.tool_results.clear();
        self.conversation.restore_state(saved);
        self.update_output_format();
    }

    /// Saves the conversation to the file of `--session`, if there is one.
    pub fn save_session(&mut self) -> Result<()> {
        match self.args.session.as_deref() {
            Some(file) => self.save_to(file),
            None => Ok(()),
        }
    }

    pub fn save_to(&mut self, file: &Path) -> Result<()> {
        let state = SavedState {
            seed: self.options.sampler.seed,
            rng: self.rng.clone(),
            content: SavedContent::Chat(self.conversation.state()),
        };
        saved::save_session(file, &mut self.session, self.engine, state)
    }
}
