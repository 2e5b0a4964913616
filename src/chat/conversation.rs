//! A conversation as ids that only ever grow at the end, so that a cache keeps what it computed.

use super::{Context, Ending, Message, Role, Segment, Template, encode_segments, today};
use crate::Result;
use crate::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

/// Turns as ids: questions as the template renders them, answers exactly as they were generated.
///
/// An answer encoded again from its text may give other ids than those generated, and the cache would
/// have to be computed anew from there.
#[derive(Debug, Clone)]
pub struct Conversation {
    template: Template,
    system: Option<String>,
    date: String,
    ids: Vec<u32>,
    /// Where the last question begins in `ids`.
    question: usize,
}

/// A conversation to be saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversationState {
    /// [`Template::name`]
    pub template: String,
    /// The system message.
    pub system: Option<String>,
    /// All turns.
    pub ids: Vec<u32>,
    /// Where the last question begins in `ids`.
    pub question: usize,
}

impl Conversation {
    /// An empty conversation.
    pub fn new(template: Template, system: Option<String>) -> Self {
        Self { template, system, date: today(), ids: Vec::new(), question: 0 }
    }

    /// What [`Conversation::resume`] takes.
    pub fn state(&self) -> ConversationState {
        ConversationState {
            template: self.template.name().into(),
            system: self.system.clone(),
            ids: self.ids.clone(),
            question: self.question,
        }
    }

    /// Becomes a saved conversation in the same form.
    pub fn resume(&mut self, state: ConversationState) {
        self.question = state.question.min(state.ids.len());
        (self.system, self.ids) = (state.system, state.ids);
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// The form of its turns.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Appends a question and the head of its answer. Control tokens written in `text` stay text.
    pub fn ask(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<()> {
        let context = Context { bos: tokenizer.bos_token(), date: &self.date, ending: Ending::Prompt };
        let user = Message::new(Role::User, text);
        let segments = if self.ids.is_empty() {
            let system = self.system.iter().map(|s| Message::new(Role::System, s.as_str()));
            self.template.render(&system.chain([user]).collect::<Vec<_>>(), &context)
        } else {
            self.template.render_next(user, &context)
        };
        let ids = encode_segments(tokenizer, segments)?;
        self.question = self.ids.len();
        self.ids.extend(ids);
        Ok(())
    }

    /// Appends the generated ids of an answer, without the token that ended it.
    pub fn answer(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
    }

    /// Takes back the last question, and its answer if there is one.
    pub fn forget_question(&mut self) {
        self.ids.truncate(self.question);
    }

    /// Forgets everything but the system message.
    pub fn reset(&mut self) {
        self.ids.clear();
        self.question = 0;
    }

    /// All of it.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

impl Template {
    /// A word for it.
    pub fn name(&self) -> &'static str {
        match self {
            Template::ChatMl { .. } => "chatml",
            Template::Llama3 { .. } => "llama3",
            Template::Plain => "plain",
        }
    }

    /// What follows the content of an answer: its end, the next question and the head of its answer.
    pub fn render_next(&self, user: Message, context: &Context<'_>) -> Vec<Segment> {
        let blank = |role| Message::new(role, "");
        let before = self.render(&[blank(Role::User)], context);
        let mut after = self.render(&[blank(Role::User), blank(Role::Assistant), user], context);
        let same = before.iter().zip(&after).take_while(|(a, b)| a == b).count();
        let mut rest = after.split_off(same);
        // Neighbouring texts are one segment, of which the beginning has been said.
        if let (Some(Segment::Text(said)), Some(Segment::Text(text))) = (before.get(same), rest.first_mut()) {
            *text = text.strip_prefix(said.as_str()).unwrap_or(text).to_owned();
        }
        rest
    }
}
