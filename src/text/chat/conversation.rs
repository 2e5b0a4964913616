//! A conversation as token ids. Wherever the template allows, new turns only append, so that a cache stays valid.

use super::{Context, Ending, Message, Moment, Role, Segment, Template, encode_segments};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Turns as ids: questions as the template renders them, answers exactly as they were generated.
///
/// Encoding an answer again from its text may give other ids than those generated, and the cache would have to be
/// computed again from there. So a question is rendered with what was said before it; if the result begins with that,
/// only the rest is encoded. If it does not, because the template changes earlier turns (Qwen 3 drops the thinking of
/// earlier answers), the whole conversation is rendered, all ids are new, and a cache keeps the common prefix.
///
/// The turn before a question is enough to find what follows it. That this gives the same as the whole conversation is
/// checked for the first few questions ([`Rendered`]); from then on a turn costs the same however many there were.
#[derive(Debug, Clone)]
pub struct Conversation {
    template: Template,
    system: Option<String>,
    now: Moment,
    /// Questions and answers.
    messages: Vec<Message>,
    ids: Vec<u32>,
    /// `ids` before each question.
    before: Vec<Before>,
    rendered: Rendered,
}

/// How much of a conversation is rendered to find what follows an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rendered {
    /// All of it, and the last turn alone, which gave the same for so many questions.
    Both(u32),
    /// The last turn, which always gave the same.
    LastTurn,
    /// All of it, since the last turn alone gave something else.
    All,
}

impl Rendered {
    /// So many questions tell what a template does: none has patterns of more turns.
    const ENOUGH: u32 = 6;

    /// After another question, for which the last turn gave the same as all or not.
    fn next(self, same: bool) -> Self {
        match self {
            Rendered::Both(_) if !same => Rendered::All,
            Rendered::Both(Self::ENOUGH) => Rendered::LastTurn,
            Rendered::Both(n) => Rendered::Both(n + 1),
            settled => settled,
        }
    }
}

/// How to restore the ids before a question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Before {
    /// How many of the leading ids were there already.
    pub kept: usize,
    /// The ids that followed them, if the question changed them.
    pub rest: Vec<u32>,
}

/// A conversation to be saved.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversationState {
    /// [`Template::name`]
    pub template: String,
    /// The system message.
    pub system: Option<String>,
    /// The time that the template sees, in seconds since 1970-01-01.
    pub now: u64,
    /// Questions and answers.
    pub messages: Vec<Message>,
    /// All turns.
    pub ids: Vec<u32>,
    /// The ids before each question.
    pub before: Vec<Before>,
}

impl ConversationState {
    /// Every id in it.
    pub fn all_ids(&self) -> impl Iterator<Item = u32> {
        self.ids.iter().chain(self.before.iter().flat_map(|b| &b.rest)).copied()
    }
}

impl Conversation {
    /// An empty conversation.
    pub fn new(template: Template, system: Option<String>) -> Self {
        let (messages, ids, before) = (Vec::new(), Vec::new(), Vec::new());
        Self { template, system, now: Moment::now(), messages, ids, before, rendered: Rendered::Both(0) }
    }

    /// The state to save, for [`Conversation::resume`].
    pub fn state(&self) -> ConversationState {
        ConversationState {
            template: self.template.name(),
            system: self.system.clone(),
            now: self.now.unix(),
            messages: self.messages.clone(),
            ids: self.ids.clone(),
            before: self.before.clone(),
        }
    }

    /// Restores a saved conversation. Its template must be the same.
    pub fn resume(&mut self, state: ConversationState) {
        (self.system, self.messages, self.ids) = (state.system, state.messages, state.ids);
        self.before = state.before;
        self.now = Moment::from_unix(state.now);
    }

    /// The system message.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// The format of its turns.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Appends a question and the start of its answer. Control tokens in `text` stay text.
    ///
    /// # Errors
    /// See [`Template::encode`]; the conversation is then unchanged.
    pub fn ask(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<()> {
        self.ask_until(tokenizer, text, &|| false)
    }

    /// [`Conversation::ask`], which takes seconds for a text of megabytes, until `stop` is true.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `stop` was true before the end, and those of [`Conversation::ask`].
    pub fn ask_until(&mut self, tokenizer: &Tokenizer, text: &str, stop: &dyn Fn() -> bool) -> Result<()> {
        let before = match self.following(tokenizer, text)? {
            Some(more) => {
                let ids = encode_segments(tokenizer, more, stop)?;
                let kept = self.ids.len();
                self.ids.extend(ids);
                Before { kept, rest: Vec::new() }
            }
            None => {
                let whole = self.render(tokenizer, &self.with_question(0, text))?;
                let ids = encode_segments(tokenizer, whole, stop)?;
                let kept = self.ids.iter().zip(&ids).take_while(|(a, b)| a == b).count();
                let rest = std::mem::replace(&mut self.ids, ids).split_off(kept);
                Before { kept, rest }
            }
        };
        self.before.push(before);
        self.messages.push(Message::new(Role::User, text));
        Ok(())
    }

    /// The messages from `first` on, and a question.
    fn with_question(&self, first: usize, text: &str) -> Vec<Message> {
        [&self.messages[first..], &[Message::new(Role::User, text)]].concat()
    }

    /// What follows the last answer when `text` is asked; `None` where the template changes what was said before.
    fn following(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<Option<Vec<Segment>>> {
        const TURN: usize = 2;
        let Some(turn) = self.messages.len().checked_sub(TURN) else { return Ok(None) };
        let last = self.following_from(turn, tokenizer, text);
        if turn == 0 || (self.rendered == Rendered::LastTurn && last.is_ok()) {
            return last;
        }
        match self.following_from(0, tokenizer, text) {
            // A template has limits; that of a saved conversation may have been reached before.
            Err(Error::Model(_)) if self.rendered != Rendered::All && last.is_ok() => last,
            all => {
                self.rendered = self.rendered.next(all == last);
                all
            }
        }
    }

    /// The same, with only the messages from `first` on.
    fn following_from(
        &self,
        first: usize,
        tokenizer: &Tokenizer,
        text: &str,
    ) -> Result<Option<Vec<Segment>>> {
        let Some((answer, asked)) = self.messages[first..].split_last() else { return Ok(None) };
        if answer.role != Role::Assistant {
            return Ok(None);
        }
        let whole = self.render(tokenizer, &self.with_question(first, text))?;
        Ok(after(&whole, &self.render(tokenizer, asked)?, &answer.content))
    }

    /// `messages` and the start of an answer.
    fn render(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<Segment>> {
        let context = Context { bos: tokenizer.bos_token(), now: self.now, ending: Ending::Prompt };
        let system = self.system.iter().map(|s| Message::new(Role::System, s.as_str()));
        let all: Vec<_> = system.chain(messages.iter().cloned()).collect();
        self.template.render(&all, &context)
    }

    /// Appends the generated ids of an answer, without the token that ended it.
    pub fn answer(&mut self, tokenizer: &Tokenizer, ids: &[u32]) {
        self.messages.push(Message::new(Role::Assistant, tokenizer.decode(ids)));
        self.ids.extend_from_slice(ids);
    }

    /// Removes the last question and its answer, if any, and returns the question.
    pub fn forget_question(&mut self) -> Option<String> {
        let before = self.before.pop()?;
        self.ids.truncate(before.kept);
        self.ids.extend(before.rest);
        while let Some(message) = self.messages.pop() {
            if message.role == Role::User {
                return Some(message.content);
            }
        }
        None
    }

    /// Forgets the oldest turns, so that what is left takes at most `most` ids; the last turn stays in any case. Their
    /// answers are encoded again.
    ///
    /// # Errors
    /// See [`Template::encode`]; the conversation is then unchanged.
    pub fn forget_oldest(&mut self, tokenizer: &Tokenizer, most: usize) -> Result<()> {
        let fits = |before: &Before| self.ids.len() - before.kept.min(self.ids.len()) <= most;
        let Some(first) = self.before.iter().position(fits).or(self.before.len().checked_sub(1)) else {
            return Ok(());
        };
        let mut questions = self.messages.iter().enumerate().filter(|(_, m)| m.role == Role::User);
        let Some((start, _)) = questions.nth(first).filter(|_| first > 0) else { return Ok(()) };
        let mut rest = Self { now: self.now, ..Self::new(self.template.clone(), self.system.clone()) };
        rest.rendered = self.rendered;
        for Message { role, content } in &self.messages[start..] {
            if *role == Role::User {
                rest.ask(tokenizer, content)?;
            } else {
                rest.ids.extend(tokenizer.encode_plain(content)?);
                rest.messages.push(Message::new(*role, content.as_str()));
            }
        }
        *self = rest;
        Ok(())
    }

    /// The number of questions.
    pub fn questions(&self) -> usize {
        self.before.len()
    }

    /// Forgets everything but the system message.
    pub fn reset(&mut self) {
        self.messages.clear();
        self.ids.clear();
        self.before.clear();
    }

    /// The ids of the whole conversation.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

/// What follows an answer in the rendered conversation `whole`, if that begins with `head` and the answer; else
/// `None`. A template may strip the answer.
fn after(whole: &[Segment], head: &[Segment], answer: &str) -> Option<Vec<Segment>> {
    let (last, same) = head.split_last()?;
    let mut rest = whole.strip_prefix(same)?.to_vec();
    match (rest.first_mut()?, last) {
        // Neighbouring texts are one segment, which begins with what was said before.
        (Segment::Text(text), Segment::Text(said)) => *text = text.strip_prefix(said.as_str())?.to_owned(),
        (first, last) if first == last => drop(rest.remove(0)),
        _ => return None,
    }
    match rest.first_mut() {
        Some(Segment::Text(text)) => {
            let forms = [answer, answer.trim_end(), answer.trim()];
            *text = forms.iter().find_map(|form| text.strip_prefix(form))?.to_owned();
        }
        _ if answer.trim().is_empty() => {}
        _ => return None,
    }
    rest.retain(|segment| !matches!(segment, Segment::Text(text) if text.is_empty()));
    Some(rest)
}

#[cfg(test)]
mod tests;
