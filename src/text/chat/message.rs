//! What is said in a conversation, and by whom.

use serde::{Deserialize, Serialize};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
    /// A function that the model called, with its result.
    Tool,
}

impl Role {
    /// As templates write it.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    pub role: Role,
    pub content: String,
    /// What the model thought before it answered, where that is not in `content`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The functions that an answer calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The [`ToolCall::id`] of the call that this is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The function that this is the result of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// An answer as it was generated, where that is not `content`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<String>,
}

/// A function that an answer calls.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolCall {
    /// Names the call within its conversation.
    pub id: String,
    /// The function.
    pub name: String,
    /// A JSON object as text, as the model wrote it.
    pub arguments: String,
}

impl Message {
    /// What `role` says.
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
    pub fn result(call: &ToolCall, content: impl Into<String>) -> Self {
        let (tool_call_id, name) = (Some(call.id.clone()), Some(call.name.clone()));
        Self { tool_call_id, name, ..Self::new(Role::Tool, content) }
    }

    /// An answer as it was generated.
    pub(super) fn written(&self) -> &str {
        self.written.as_deref().unwrap_or(&self.content)
    }
}
