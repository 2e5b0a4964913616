//! The context of a conversation: how full it is, and the remedies.

use super::Chat;
use crate::cli::terminal::{Style, style_text};
use crate::cli::word_wrap::wrap_message;
use crate::dims::MAX_POSITION;
use crate::run::eviction::Policy;
use files::print_stderr;

/// The warning that the context fills, which comes once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ContextWarning {
    Due,
    Given,
}

impl Chat<'_> {
    /// Model, context size and device, as one line.
    pub fn describe_setup(&self) -> String {
        let slots = self.engine.options().max_seq_len;
        let model = style_text(Style::Bold, crate::dims::MODEL);
        format!("{model}, {slots} tokens of context, {}", self.session.device_name())
    }

    /// Keeps the system message from being evicted.
    pub fn protect_system_prompt(&mut self) {
        if self.has_eviction() {
            // Rendering errors are reported when the question is asked.
            self.session
                .protect_prefix(self.conversation.count_shared_prefix(self.engine.tokenizer()).unwrap_or(0));
        }
    }

    pub fn has_eviction(&self) -> bool {
        self.engine.options().eviction.policy != Policy::None
    }

    /// Forgets the turns that were evicted long ago, so that neither memory nor the time per turn grows with the
    /// conversation. The remaining turns must be computed again, so this happens once in many contexts.
    pub fn forget_oldest(&mut self) {
        const CONTEXTS: usize = 8;
        let slots = self.session.extent().slots;
        if !self.has_eviction() || self.conversation.ids().len() <= CONTEXTS * slots {
            return;
        }
        // If this fails, the question fails for the same reason and reports it.
        if self.conversation.remove_oldest(self.engine.tokenizer(), slots / 2).is_ok() {
            let left = self.conversation.count_questions();
            self.rng_history.drain(..self.rng_history.len().saturating_sub(left));
            self.print_note(&format!("older messages were dropped; the last {left} are kept"));
        }
    }

    /// Number of leading tokens that the cache and the conversation share.
    pub fn common_prefix_len(&self) -> usize {
        self.session.tokens().iter().zip(self.conversation.ids()).take_while(|(a, b)| a == b).count()
    }

    /// Number of cache slots that the conversation needs.
    pub fn needed_slots(&self) -> usize {
        let (all, held) = (self.conversation.ids().len(), self.session.tokens().len());
        if self.common_prefix_len() == held { self.session.slots() + all - held } else { all }
    }

    /// Warns once that three quarters of the context are full.
    pub fn warn_of_context(&mut self) {
        let (used, have) = (self.session.slots(), self.session.extent().slots);
        let is_filling = used < have && used >= have / 4 * 3;
        if !is_filling || self.context_warning == ContextWarning::Given || self.has_eviction() {
            return;
        }
        self.context_warning = ContextWarning::Given;
        let remedies = describe_remedies(have);
        self.print_note(&format!(
            "The context is three quarters full ({used} of {have} tokens). /clear starts over; {remedies} at the next start \
             makes room."
        ));
    }
}

/// Reports a full context and the remedies; `then` is added after the commands that free room.
pub fn say_context_full(need: usize, have: usize, then: &str) {
    let remedies = describe_remedies(need.max(have));
    let message = format!(
        "The context is full ({need} of {have} tokens). /clear starts over, /undo takes back the last message{then}. To \
         keep everything, /save FILE, then start again with --session FILE and {remedies}."
    );
    print_stderr!("{}", wrap_message(&message));
}

/// Flags with which more than `slots` tokens fit.
fn describe_remedies(slots: usize) -> String {
    let larger = (slots + 1).next_power_of_two().min(MAX_POSITION);
    if larger > slots {
        format!("-c {larger} or --eviction-policy sliding")
    } else {
        "--eviction-policy sliding".into()
    }
}
