//! A conversation as token ids. If the template allows, a new turn only appends, so that the KV cache stays valid.

use super::{
    AnswerPart, Message, OutputFormat, OutputParser, PromptEnding, RenderContext, Role, Segment, Template,
    TemplateKwargs, ToolCall, Tools, UtcTime, encode_segments,
};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// A conversation as token ids: questions as the template renders them, answers exactly as they were generated.
///
/// Encoding an answer again from its text may give other ids than those generated, and the KV cache would have to be
/// computed again from there. So a question is rendered together with the messages before it; if the result begins with
/// these, only the rest is encoded. If it does not, because the template changes earlier turns (Qwen 3 drops the
/// thinking of earlier answers), all ids are new, and a KV cache keeps the common prefix.
///
/// Rendering only the last turn with the question is enough to find the text of the question. For the first few
/// questions this is checked against the whole conversation; from then on the cost of a turn does not depend on their
/// number.
#[derive(Debug, Clone)]
pub struct Conversation {
    template: Template,
    system: Option<String>,
    variables: TemplateKwargs,
    /// The format in which answers are parsed.
    output_format: OutputFormat,
    now: UtcTime,
    /// Questions and answers.
    messages: Vec<Message>,
    ids: Vec<u32>,
    /// `ids` before each question.
    undo: Vec<QuestionUndo>,
    /// Number of questions for which the last turn alone gave the same as all turns; `None` once it did not.
    verified_questions: Option<u32>,
}

/// Number of questions after which the last turn alone is trusted: no template has patterns of more turns.
const ENOUGH_QUESTIONS: u32 = 6;

/// The difference that restores the ids before a question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuestionUndo {
    /// Number of leading ids that the question did not change.
    pub kept: usize,
    /// The ids that followed them, if the question replaced them.
    pub rest: Vec<u32>,
}

/// The saved form of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConversationState {
    /// The name of the template, see [`Template::name`].
    pub template: String,
    /// The system message.
    pub system: Option<String>,
    /// The functions that the model may call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tools: Option<Tools>,
    /// The time that the template sees, in seconds since 1970-01-01.
    pub now: u64,
    /// Questions and answers.
    pub messages: Vec<Message>,
    /// The ids of all turns.
    pub ids: Vec<u32>,
    /// The ids before each question.
    pub before: Vec<QuestionUndo>,
}

impl ConversationState {
    /// All ids that it contains.
    pub fn all_ids(&self) -> impl Iterator<Item = u32> {
        self.ids.iter().chain(self.before.iter().flat_map(|b| &b.rest)).copied()
    }
}

impl Conversation {
    /// An empty conversation.
    pub fn new(template: Template, system: Option<String>) -> Self {
        Self {
            template,
            system,
            variables: TemplateKwargs::default(),
            output_format: OutputFormat::default(),
            now: UtcTime::now(),
            messages: Vec::new(),
            ids: Vec::new(),
            undo: Vec::new(),
            verified_questions: Some(0),
        }
    }

    /// The conversation with these tools and variables, and with answers parsed in this format.
    pub fn with_format(self, variables: TemplateKwargs, output_format: OutputFormat) -> Self {
        Self { variables, output_format, ..self }
    }

    /// An empty conversation with another system message and the same settings.
    pub fn new_with_system(&self, system: Option<String>) -> Self {
        Self::new(self.template.clone(), system).with_format(self.variables.clone(), self.output_format)
    }

    /// The state to save, for [`Conversation::restore_state`].
    pub fn state(&self) -> ConversationState {
        ConversationState {
            template: self.template.name(),
            system: self.system.clone(),
            tools: self.variables.tools.clone(),
            now: self.now.unix_seconds(),
            messages: self.messages.clone(),
            ids: self.ids.clone(),
            before: self.undo.clone(),
        }
    }

    /// Restores a saved conversation and its tools. The template must be the same.
    pub fn restore_state(&mut self, state: ConversationState) {
        self.variables.tools = state.tools;
        (self.system, self.messages, self.ids) = (state.system, state.messages, state.ids);
        self.undo = state.before;
        self.now = UtcTime::from_unix(state.now);
    }

    /// The system message.
    pub fn system_message(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// The tools and variables of the template.
    pub fn template_kwargs(&self) -> &TemplateKwargs {
        &self.variables
    }

    /// The format in which answers are parsed.
    pub fn output_format(&self) -> OutputFormat {
        self.output_format
    }

    /// Parses the next answers in another format.
    pub fn set_output_format(&mut self, output_format: OutputFormat) {
        self.output_format = output_format;
    }

    /// The tool calls of the last message.
    pub fn last_tool_calls(&self) -> &[ToolCall] {
        self.messages.last().map_or(&[], |last| &last.tool_calls)
    }

    /// A parser for the next answer.
    pub fn output_parser(&self, tokenizer: &Tokenizer) -> OutputParser {
        OutputParser::for_prompt(self.output_format, tokenizer, &self.ids, &self.messages)
            .with_tools(self.variables.tools.as_ref())
    }

    /// The chat template.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Appends a question and the start of its answer. Control tokens in `text` stay text.
    ///
    /// # Errors
    /// See [`Template::encode_messages`]; the conversation is then unchanged.
    pub fn add_question(&mut self, tokenizer: &Tokenizer, text: &str) -> Result<()> {
        self.add_question_until(tokenizer, text, &|| false)
    }

    /// [`Conversation::add_question`] that ends early once `stop` returns true: a text of megabytes takes seconds.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `stop` was true before the end, and those of [`Conversation::add_question`].
    pub fn add_question_until(
        &mut self,
        tokenizer: &Tokenizer,
        text: &str,
        stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        self.add_messages_until(tokenizer, &[Message::new(Role::User, text)], stop)
    }

    /// [`Conversation::add_question_until`] with messages in place of a text: results of tool calls, or a question.
    ///
    /// # Errors
    /// Fails where [`Conversation::add_question_until`] does.
    pub fn add_messages_until(
        &mut self,
        tokenizer: &Tokenizer,
        question: &[Message],
        stop: &dyn Fn() -> bool,
    ) -> Result<()> {
        let before = match self.render_question(tokenizer, question)? {
            Some(more) => {
                let ids = encode_segments(tokenizer, more, stop)?;
                let kept = self.ids.len();
                self.ids.extend(ids);
                QuestionUndo { kept, rest: Vec::new() }
            }
            None => {
                let whole = self.render_messages(tokenizer, &[&self.messages, question].concat())?;
                let ids = encode_segments(tokenizer, whole, stop)?;
                let kept = common_prefix(&self.ids, &ids);
                let rest = std::mem::replace(&mut self.ids, ids).split_off(kept);
                QuestionUndo { kept, rest }
            }
        };
        self.undo.push(before);
        self.messages.extend_from_slice(question);
        Ok(())
    }

    /// Number of leading ids that all conversations with this system message share.
    ///
    /// # Errors
    /// See [`Template::encode_messages`].
    pub fn count_shared_prefix(&self, tokenizer: &Tokenizer) -> Result<usize> {
        let with = |question| {
            let segments = self.render_messages(tokenizer, &[Message::new(Role::User, question)])?;
            encode_segments(tokenizer, segments, &|| false)
        };
        Ok(common_prefix(&with("A")?, &with("B")?))
    }

    /// Renders the segments that a question appends after the last answer; `None` if the template changes earlier
    /// turns.
    fn render_question(
        &mut self,
        tokenizer: &Tokenizer,
        question: &[Message],
    ) -> Result<Option<Vec<Segment>>> {
        // Includes all tool calls since, and their results.
        let Some(turn) = self.messages.iter().rposition(|m| m.role == Role::User) else { return Ok(None) };
        let Some(same) = self.verified_questions else {
            return self.render_question_after(0, tokenizer, question);
        };
        let last = self.render_question_after(turn, tokenizer, question);
        if turn == 0 || (same >= ENOUGH_QUESTIONS && last.is_ok()) {
            return last;
        }
        match self.render_question_after(0, tokenizer, question) {
            // A template has limits, and a saved conversation may already have reached them.
            Err(Error::Model(_)) if last.is_ok() => last,
            all => {
                self.verified_questions = (all == last).then_some(same + 1);
                all
            }
        }
    }

    /// [`Conversation::render_question`] with only the messages from `first` on.
    fn render_question_after(
        &self,
        first: usize,
        tokenizer: &Tokenizer,
        question: &[Message],
    ) -> Result<Option<Vec<Segment>>> {
        let Some((answer, asked)) = self.messages[first..].split_last() else { return Ok(None) };
        if answer.role != Role::Assistant {
            return Ok(None);
        }
        let whole = self.render_messages(tokenizer, &[&self.messages[first..], question].concat())?;
        Ok(text_after(&whole, &self.render_messages(tokenizer, asked)?, answer.generated_text()))
    }

    /// Renders the system message, `messages` and the start of an answer.
    fn render_messages(&self, tokenizer: &Tokenizer, messages: &[Message]) -> Result<Vec<Segment>> {
        let context = self.render_context(tokenizer);
        let system = self.system.iter().map(|s| Message::new(Role::System, s.as_str()));
        let all: Vec<_> = system.chain(messages.iter().cloned()).collect();
        self.template.render_messages(&all, &context)
    }

    /// The context that the template is rendered with.
    pub fn render_context<'a>(&'a self, tokenizer: &'a Tokenizer) -> RenderContext<'a> {
        let (bos, variables) = (tokenizer.bos_token(), Some(&self.variables));
        RenderContext { bos, now: self.now, ending: PromptEnding::Prompt, variables }
    }

    /// Appends the generated ids of an answer, without the end-of-text token.
    pub fn add_answer(&mut self, tokenizer: &Tokenizer, ids: &[u32]) {
        let written = self.output_format.decode_answer(tokenizer, ids);
        let mut parser = self.output_parser(tokenizer);
        let parts: Vec<AnswerPart> = parser.push(&written).into_iter().chain(parser.finish()).collect();
        self.messages.push(self.build_message(written, parts));
        self.ids.extend_from_slice(ids);
    }

    /// Builds the message of an answer in the form that the template takes.
    fn build_message(&self, written: String, parts: Vec<AnswerPart>) -> Message {
        let mut message = Message::new(Role::Assistant, "");
        let mut reasoning = String::new();
        for part in parts {
            match part {
                AnswerPart::Text(text) | AnswerPart::ToolCallCut { written: text, .. } => {
                    message.content += &text
                }
                AnswerPart::Thinking(text) => reasoning += &text,
                AnswerPart::ToolCall(call) => message.tool_calls.push(call),
                AnswerPart::ToolCallStart { .. } | AnswerPart::ToolCallDelta(_) => {}
            }
        }
        if !message.tool_calls.is_empty() && self.output_format.reads_calls {
            message.content.truncate(message.content.trim_end().len());
        } else if self.output_format.headers.is_empty()
            && (reasoning.is_empty() || !self.output_format.reads_reasoning)
        {
            message.content.clone_from(&written);
        }
        let has_reasoning = !reasoning.is_empty() && self.output_format.reads_reasoning;
        message.reasoning = has_reasoning.then_some(reasoning);
        message.written = (message.content != written).then_some(written);
        message
    }

    /// Removes the last question and its answer, and returns the messages of the question.
    pub fn pop_question(&mut self) -> Option<Vec<Message>> {
        let before = self.undo.pop()?;
        self.ids.truncate(before.kept);
        self.ids.extend(before.rest);
        self.messages.pop_if(|m| m.role == Role::Assistant);
        let first = self.messages.iter().rposition(|m| m.role == Role::Assistant).map_or(0, |at| at + 1);
        Some(self.messages.split_off(first))
    }

    /// Removes the oldest turns until at most `most` ids are left; the last turn always stays. The answers that stay
    /// are encoded again.
    ///
    /// # Errors
    /// See [`Template::encode_messages`]; the conversation is then unchanged.
    pub fn remove_oldest(&mut self, tokenizer: &Tokenizer, most: usize) -> Result<()> {
        let fits = |before: &QuestionUndo| self.ids.len() - before.kept.min(self.ids.len()) <= most;
        let Some(fitting) = self.undo.iter().position(fits).or(self.undo.len().checked_sub(1)) else {
            return Ok(());
        };
        // The start of each question. Results of tool calls stay with the question that led to the calls.
        let mut starts = Vec::new();
        for (at, message) in self.messages.iter().enumerate() {
            if message.role != Role::Assistant && (at == 0 || self.messages[at - 1].role == Role::Assistant) {
                starts.push(at);
            }
        }
        let alone = |&at: &usize| self.messages[at].role == Role::User;
        let (before, after) = starts.split_at(fitting.min(starts.len()));
        let first = after.iter().copied().find(alone).or(before.iter().copied().rfind(alone));
        let Some(first) = first.filter(|&first| first > 0) else { return Ok(()) };
        let mut rest = Self {
            now: self.now,
            verified_questions: self.verified_questions,
            ..self.new_with_system(self.system.clone())
        };
        for turn in
            self.messages[first..].chunk_by(|a, b| (a.role == Role::Assistant) == (b.role == Role::Assistant))
        {
            if turn[0].role != Role::Assistant {
                rest.add_messages_until(tokenizer, turn, &|| false)?;
                continue;
            }
            for answer in turn {
                let parts = self.output_format.split_segments(tokenizer, answer.generated_text());
                rest.ids.extend(encode_segments(tokenizer, parts, &|| false)?);
                rest.messages.push(answer.clone());
            }
        }
        *self = rest;
        Ok(())
    }

    /// The number of questions.
    pub fn count_questions(&self) -> usize {
        self.undo.len()
    }

    /// Removes everything except the system message.
    pub fn reset(&mut self) {
        self.messages.clear();
        self.ids.clear();
        self.undo.clear();
    }

    /// The ids of the whole conversation.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

/// The length of the common prefix.
fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The segments that follow an answer in the rendered conversation `whole`; `None` if `whole` does not begin with
/// `head` and the answer. A template may strip the answer.
fn text_after(whole: &[Segment], head: &[Segment], answer: &str) -> Option<Vec<Segment>> {
    let (last, same) = head.split_last()?;
    let mut rest = whole.strip_prefix(same)?.to_vec();
    match (rest.first_mut()?, last) {
        // Neighbouring texts are one segment, which begins with the text of `head`.
        (Segment::Text(text), Segment::Text(said)) => *text = text.strip_prefix(said.as_str())?.to_owned(),
        (first, last) if first == last => drop(rest.remove(0)),
        _ => return None,
    }
    let spellings = [answer, answer.trim_end(), answer.trim()];
    let mut rest = spellings.iter().find_map(|answer| strip_text(&rest, answer))?;
    rest.retain(|segment| !matches!(segment, Segment::Text(text) if text.is_empty()));
    Some(rest)
}

/// Removes `text` from the beginning of `parts`; markers in it may be control tokens.
fn strip_text(parts: &[Segment], mut text: &str) -> Option<Vec<Segment>> {
    let mut rest = parts.to_vec();
    while !text.is_empty() {
        match rest.first_mut()? {
            Segment::Text(part) if !text.starts_with(part.as_str()) => {
                *part = part.strip_prefix(text)?.to_owned();
                text = "";
            }
            Segment::Text(part) | Segment::Control(part) => {
                text = text.strip_prefix(part.as_str())?;
                rest.remove(0);
            }
        }
    }
    Some(rest)
}

#[cfg(test)]
mod tests;
