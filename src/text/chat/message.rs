//! The messages of a conversation.

use serde::{Deserialize, Serialize};

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
    /// The result of a tool call.
    Tool,
}

impl Role {
    /// The name that templates use.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    pub role: Role,
    pub content: String,
    /// The thinking before the answer, if it is not in `content`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The tool calls of an answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The [`ToolCall::id`] of the call whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The function whose result this is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// An answer as it was generated, if that is not `content`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<String>,
}

/// A call of a function in an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// A name of the call that is unique in its conversation.
    pub id: String,
    /// The name of the function.
    pub name: String,
    /// The text of a JSON object, as the model wrote it; in messages of clients, any text.
    pub arguments: String,
}

impl ToolCall {
    /// Wraps arguments that are not a JSON object into one.
    fn wrap_arguments(&mut self) {
        if serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&self.arguments).is_err() {
            self.arguments = serde_json::json!({"arguments": self.arguments}).to_string();
        }
    }
}

impl Message {
    /// A message of `role`.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: content.into(),
            reasoning: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
            written: None,
        }
    }

    /// The result of a call.
    pub fn tool_result(call: &ToolCall, content: impl Into<String>) -> Self {
        let (tool_call_id, name) = (Some(call.id.clone()), Some(call.name.clone()));
        Self { tool_call_id, name, ..Self::new(Role::Tool, content) }
    }

    /// Equivalent conversations for templates that reject `messages`, from the most similar to the least: first,
    /// arguments of calls that are not objects are wrapped into objects; second, system messages move to the front and
    /// neighbouring messages of a role become one; third, the system message becomes part of the first question.
    pub fn fallback_conversations(messages: &[Self]) -> Vec<Vec<Self>> {
        let mut objects = messages.to_vec();
        objects.iter_mut().flat_map(|m| &mut m.tool_calls).for_each(ToolCall::wrap_arguments);
        let joined = Self::merge_neighbours(&objects);
        let mut all = vec![messages.to_vec(), objects, joined];
        if let [system, question, others @ ..] = &all[2][..]
            && (system.role, question.role) == (Role::System, Role::User)
        {
            let mut first = Self { role: Role::User, ..system.clone() };
            first.append_message(question);
            all.push([&[first], others].concat());
        }
        all.dedup();
        all.split_off(1)
    }

    /// The messages with one system message at the front, and no two neighbouring questions or answers.
    fn merge_neighbours(messages: &[Self]) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::new();
        let (system, others): (Vec<_>, Vec<_>) = messages.iter().partition(|m| m.role == Role::System);
        for message in system.into_iter().chain(others) {
            match all.last_mut().filter(|last| last.role == message.role && message.role != Role::Tool) {
                Some(last) => last.append_message(message),
                None => all.push(message.clone()),
            }
        }
        all
    }

    /// Appends the contents of `other`.
    fn append_message(&mut self, other: &Self) {
        let join = |text: &mut String, more: &str| {
            let between = if text.is_empty() || more.is_empty() { "" } else { "\n\n" };
            *text = [text, between, more].concat();
        };
        join(&mut self.content, &other.content);
        if let Some(more) = &other.reasoning {
            join(self.reasoning.get_or_insert_default(), more);
        }
        self.tool_calls.extend_from_slice(&other.tool_calls);
    }

    /// An answer as it was generated.
    pub(super) fn generated_text(&self) -> &str {
        self.written.as_deref().unwrap_or(&self.content)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_told_in_other_turns_from_the_most_alike_to_the_least() {
        let call =
            |arguments: &str| ToolCall { id: "1".into(), name: "f".into(), arguments: arguments.into() };
        let says = |role, text: &str| Message::new(role, text);
        let calls = |text: &str, arguments: &str| Message {
            tool_calls: vec![call(arguments)],
            ..Message::new(Role::Assistant, text)
        };
        let messages = [
            says(Role::User, "a"),
            says(Role::System, "s"),
            says(Role::User, ""),
            says(Role::User, "b"),
            says(Role::Assistant, "c"),
            calls("", "[1"),
            Message::tool_result(&call(""), "d"),
            Message::tool_result(&call(""), "e"),
            says(Role::System, "t"),
        ];
        let milder = Message::fallback_conversations(&messages);
        let rest = [
            calls("c", r#"{"arguments":"[1"}"#),
            Message::tool_result(&call(""), "d"),
            Message::tool_result(&call(""), "e"),
        ];
        let begins = |first: &[Message]| [first, &rest].concat();
        assert_eq!(milder.len(), 3);
        assert_eq!(milder[0].len(), messages.len());
        assert_eq!(milder[0][5], calls("", r#"{"arguments":"[1"}"#));
        assert_eq!(milder[1], begins(&[says(Role::System, "s\n\nt"), says(Role::User, "a\n\nb")]));
        assert_eq!(milder[2], begins(&[says(Role::User, "s\n\nt\n\na\n\nb")]));
        let plain = [says(Role::User, "a"), calls("b", "{}")];
        assert_eq!(Message::fallback_conversations(&plain), Vec::<Vec<Message>>::new());
    }
}
