//! A conversation as token ids. Wherever the template allows, new turns only append, so that a cache stays valid.

use super::{Context, Ending, Message, Moment, Role, Segment, Template, encode_segments};
use crate::Result;
use crate::tokenizer::Tokenizer;
use serde::{Deserialize, Serialize};

/// Turns as ids: questions as the template renders them, answers exactly as they were generated.
///
/// Encoding an answer again from its text may give other ids than those generated, and the cache would have to be
/// computed again from there. So every question renders the whole conversation; if the result begins with what was
/// said before, only the rest is encoded. If it does not, because the template changes earlier turns (Qwen 3 drops the
/// thinking of earlier answers), all ids are new, and a cache keeps the common prefix.
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
        let (messages, ids) = (Vec::new(), Vec::new());
        Self { template, system, now: Moment::now(), messages, ids, before: Vec::new() }
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
        let whole =
            self.render(tokenizer, &[&self.messages[..], &[Message::new(Role::User, text)]].concat())?;
        let more = match self.messages.split_last() {
            Some((answer, asked)) if answer.role == Role::Assistant => {
                after(&whole, &self.render(tokenizer, asked)?, &answer.content)
            }
            _ => None,
        };
        let before = match more {
            Some(more) => {
                let ids = encode_segments(tokenizer, more)?;
                let kept = self.ids.len();
                self.ids.extend(ids);
                Before { kept, rest: Vec::new() }
            }
            None => {
                let ids = encode_segments(tokenizer, whole)?;
                let kept = self.ids.iter().zip(&ids).take_while(|(a, b)| a == b).count();
                let rest = std::mem::replace(&mut self.ids, ids).split_off(kept);
                Before { kept, rest }
            }
        };
        self.before.push(before);
        self.messages.push(Message::new(Role::User, text));
        Ok(())
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
mod tests {
    use super::*;

    fn text(t: &str) -> Segment {
        Segment::Text(t.into())
    }

    fn control(t: &str) -> Segment {
        Segment::Control(t.into())
    }

    #[test]
    fn what_follows_an_answer() {
        let head = [control("<"), text("user q\n"), control("<"), text("bot\n")];
        let whole = |answer: &str| {
            let answer = format!("bot\n{answer}");
            [&head[..3], &[text(&answer), control(">"), text("\nuser")]].concat()
        };
        let rest = Some(vec![control(">"), text("\nuser")]);
        for (said, kept) in
            [("a b", "a b"), (" a\n", "a"), (" a\n", " a"), ("", ""), ("\n", ""), ("a ", "a ")]
        {
            assert_eq!(after(&whole(kept), &head, said), rest, "{said:?}");
        }
        assert_eq!(after(&whole("a"), &head, "<think>x</think>a"), None);
        assert_eq!(after(&whole("a")[1..], &head, "a"), None);
        assert_eq!(after(&head, &whole("a"), "a"), None);
        // Plain paragraphs: all of it is one part.
        assert_eq!(after(&[text("q\na\nr\n")], &[text("q\n")], "a"), Some(vec![text("\nr\n")]));
        // The head ends with a control token.
        assert_eq!(
            after(&[control("<"), text("a"), control(">")], &[control("<")], "a"),
            Some(vec![control(">")])
        );
    }
}
