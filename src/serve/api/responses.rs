//! OpenAI's `/v1/responses`, without stored responses and conversations.

use super::openai::MessageRole;
use crate::serve::body::{Object, RequestBody, read_object, read_value, require_field, type_name};
use crate::serve::conversation::{
    ChatRequest, Turn, call_arguments, classify_turns, content_text, find_called_function, omission_note,
};
use crate::serve::dialect::{Choice, Dialect, TokenOutput, Usage, write_named_event};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::JsonWriter;
use crate::serve::models::short_number;
use crate::serve::params::{LogprobCount, RequestParams};
use crate::serve::prepare::{PreparedRequest, start_chat};
use crate::serve::state::{ServerModel, random_id, unix_time};
use crate::serve::tools::convert_responses_tool;
use crate::serve::unsupported::RequestKind;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use text::chat::{AnswerPart, Message, Role, ToolCall};

/// Fields of `/v1/responses` only.
#[derive(Deserialize)]
struct ResponsesFields {
    instructions: Option<String>,
    top_logprobs: Option<LogprobCount>,
    #[serde(rename = "text")]
    _text: Option<Map<String, Value>>,
    previous_response_id: Option<Value>,
    conversation: Option<Value>,
    prompt: Option<Value>,
}

/// An input item: message, tool call, tool result or reasoning.
#[derive(Deserialize)]
struct InputItem {
    #[serde(rename = "type")]
    kind: Option<String>,
    role: Option<MessageRole>,
    id: Option<String>,
    call_id: Option<String>,
    name: Option<String>,
    content: Option<Value>,
    summary: Option<Value>,
    output: Option<Value>,
    input: Option<Value>,
    arguments: Option<Value>,
    operation: Option<Value>,
    action: Option<Value>,
}

/// Error for a field that refers to stored data.
fn refuse_stored(field: impl Into<String>) -> ApiError {
    let why = "refers to stored data, but this server stores none; use `store: false` and send all items in `input`";
    ApiError::for_field(field, why)
}

/// Reads instructions, input and tools.
fn read_chat(body: &mut Value) -> ApiResult<ChatRequest> {
    let fields: ResponsesFields = read_object(body, "")?;
    let stored = [
        ("previous_response_id", fields.previous_response_id),
        ("conversation", fields.conversation),
        ("prompt", fields.prompt),
    ];
    if let Some((field, _)) = stored.into_iter().find(|(_, value)| value.is_some()) {
        return Err(refuse_stored(field));
    }
    if fields.top_logprobs.is_some_and(|n| n.0 > 0) {
        let why = "is not supported here; use /v1/chat/completions";
        return Err(ApiError::for_field("top_logprobs", why));
    }
    let mut messages = Vec::from_iter(fields.instructions.map(|text| Message::new(Role::System, text)));
    match body["input"].take() {
        Value::Null => return Err(ApiError::for_field("input", "is missing; add a string")),
        Value::String(text) => messages.push(Message::new(Role::User, text)),
        items @ Value::Array(_) => {
            let items: Vec<Object<InputItem>> = read_value(items, "input")?;
            let role = |item: &Object<InputItem>| item.0.role.map_or(Role::Assistant, |role| role.0);
            let turns = classify_turns(&items.iter().map(role).collect::<Vec<_>>());
            for (i, (Object(item), turn)) in items.into_iter().zip(turns).enumerate() {
                item.append_to_messages(&mut messages, &format!("input[{i}]"), turn)?;
            }
        }
        other => {
            let why = format!("is {}; use a string or an array", type_name(&other));
            return Err(ApiError::for_field("input", why));
        }
    }
    messages.retain(|m| m.role != Role::Assistant || !m.content.is_empty() || !m.tool_calls.is_empty());
    if messages.is_empty() {
        return Err(ApiError::for_field("input", "is empty; add a message"));
    }
    ChatRequest::new(messages, body, convert_responses_tool)
}

impl InputItem {
    /// Adds the item to the messages.
    fn append_to_messages(self, messages: &mut Vec<Message>, place: &str, turn: Turn) -> ApiResult<()> {
        let is_stored = self.kind.is_none() && self.role.is_none() && self.id.is_some();
        let id = self.call_id.or(self.id).unwrap_or_default();
        match self.kind.as_deref().unwrap_or("message") {
            "item_reference" => return Err(refuse_stored(format!("{place}.type"))),
            _ if is_stored => return Err(refuse_stored(format!("{place}.id"))),
            "message" => {
                let MessageRole(role) = require_field(self.role, format!("{place}.role"))?;
                let text = content_text(self.content, &format!("{place}.content"), turn)?;
                match messages.last_mut().filter(|last| role == Role::Assistant && has_only_reasoning(last)) {
                    Some(thought) => thought.content = text,
                    None => messages.push(Message::new(role, text)),
                }
            }
            "reasoning" => {
                let is_filled = |parts: &Value| parts.as_array().is_some_and(|parts| !parts.is_empty());
                let parts = self.content.filter(is_filled).or(self.summary.filter(is_filled));
                let thought = content_text(parts, &format!("{place}.content"), Turn::Earlier)?;
                if !thought.is_empty() {
                    last_answer(messages).reasoning.get_or_insert_default().push_str(&thought);
                }
            }
            kind if kind.ends_with("_output") && self.output.is_some() => {
                let text = content_text(self.output, &format!("{place}.output"), Turn::Earlier)?;
                let name = find_called_function(messages, &id);
                messages.push(Message { tool_call_id: Some(id), name, ..Message::new(Role::Tool, text) });
            }
            "function_call" | "custom_tool_call" | "mcp_call" => {
                let name = require_field(self.name, format!("{place}.name"))?;
                let arguments = call_arguments(self.input.as_ref().or(self.arguments.as_ref()));
                let call = ToolCall { id, name, arguments };
                last_answer(messages).tool_calls.push(call.clone());
                // A call that already has its result.
                if let Some(output) = self.output {
                    let output = content_text(Some(output), &format!("{place}.output"), Turn::Earlier)?;
                    messages.push(Message::tool_result(&call, output));
                }
            }
            kind @ ("local_shell_call" | "shell_call" | "computer_call" | "apply_patch_call") => {
                let name = kind.trim_end_matches("_call").to_owned();
                let arguments = call_arguments(self.operation.as_ref().or(self.action.as_ref()));
                last_answer(messages).tool_calls.push(ToolCall { id, name, arguments });
            }
            kind => {
                let note = omission_note(kind.strip_suffix("_generation_call").unwrap_or(kind));
                let content = &mut last_answer(messages).content;
                *content = [content.as_str(), if content.is_empty() { "" } else { "\n" }, &note].concat();
            }
        }
        Ok(())
    }
}

/// Tells if a message has only reasoning so far.
fn has_only_reasoning(message: &Message) -> bool {
    message.reasoning.is_some() && message.content.is_empty() && message.tool_calls.is_empty()
}

/// The assistant's last message, or a new one, for the next item.
fn last_answer(messages: &mut Vec<Message>) -> &mut Message {
    if messages.last().is_none_or(|last| last.role != Role::Assistant) {
        messages.push(Message::new(Role::Assistant, ""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// `POST /v1/responses`.
pub fn start_request(model: &Arc<ServerModel>, request: RequestBody) -> ApiResult<PreparedRequest> {
    let (mut body, mut params) = RequestParams::read_request(model, request, RequestKind::Chat)?;
    params.n = 1;
    let chat = read_chat(&mut body)?;
    start_chat(&chat, params, |params, _| Box::new(ResponsesDialect::new(params, &body)))
}

/// Kind of an output item.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ItemKind {
    Text,
    Thinking,
    Call,
}

impl ItemKind {
    /// Prefix of its event names.
    fn event_prefix(self) -> &'static str {
        match self {
            ItemKind::Text => "response.output_text",
            ItemKind::Thinking => "response.reasoning_text",
            ItemKind::Call => "response.function_call_arguments",
        }
    }

    /// Fields of an event with a text or a part of one.
    fn text_fields(self, name: &str, text: &str) -> Value {
        match self {
            ItemKind::Text => json!({"content_index": 0, name: text, "logprobs": []}),
            ItemKind::Thinking => json!({"content_index": 0, name: text}),
            ItemKind::Call => json!({name: text}),
        }
    }

    /// Content part with a text.
    fn part_json(self, text: &str) -> Value {
        match self {
            ItemKind::Text => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            _ => json!({"type": "reasoning_text", "text": text}),
        }
    }
}

/// An output item.
struct OutputItem {
    kind: ItemKind,
    id: String,
    /// Text, reasoning, or arguments of the call.
    text: String,
    /// Id and name of the call.
    call: [String; 2],
    status: &'static str,
}

impl OutputItem {
    fn new(kind: ItemKind) -> Self {
        let prefix = match kind {
            ItemKind::Text => "msg_",
            ItemKind::Thinking => "rs_",
            ItemKind::Call => "fc_",
        };
        let (id, call) = (random_id(prefix), [String::new(), String::new()]);
        Self { kind, id, text: String::new(), call, status: "in_progress" }
    }

    fn new_call(id: &str, name: &str) -> Self {
        Self { call: [id.to_owned(), name.to_owned()], ..Self::new(ItemKind::Call) }
    }

    /// The item at its start or its end.
    fn to_json(&self) -> Value {
        let Self { kind, id, text, call: [call_id, name], status } = self;
        let content = if *status == "in_progress" { json!([]) } else { json!([kind.part_json(text)]) };
        match kind {
            ItemKind::Call => json!({
                "type": "function_call", "id": id, "call_id": call_id, "name": name, "status": status, "arguments": text,
            }),
            ItemKind::Thinking => {
                json!({"type": "reasoning", "id": id, "summary": [], "content": content, "status": status})
            }
            ItemKind::Text => {
                json!({"type": "message", "id": id, "role": "assistant", "status": status, "content": content})
            }
        }
    }
}

/// Responses of `/v1/responses`.
struct ResponsesDialect {
    /// Fields that stay the same.
    base: Value,
    items: Vec<OutputItem>,
    /// Set while the last item is incomplete.
    is_open: bool,
    /// Number of events so far.
    events: usize,
    status: &'static str,
}

impl ResponsesDialect {
    /// Response that repeats fields of the request body.
    fn new(params: &RequestParams, body: &Value) -> Self {
        let RequestParams { model, options: o, .. } = params;
        let [temperature, top_p] = [o.sampler.temperature, o.sampler.top_p].map(short_number);
        let mut base = json!({
            "id": random_id("resp_"), "object": "response", "created_at": unix_time(), "model": model.name, "error": null,
            "incomplete_details": null, "previous_response_id": null, "temperature": temperature, "top_p": top_p,
            "max_output_tokens": o.max_tokens, "usage": null, "background": false, "system_fingerprint": model.fingerprint,
        });
        let repeated = json!({
            "instructions": null, "max_tool_calls": null, "metadata": {}, "parallel_tool_calls": true,
            "prompt_cache_key": null, "reasoning": {"effort": null, "summary": null}, "safety_identifier": null,
            "service_tier": "default", "store": false, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
            "tools": [], "top_logprobs": 0, "truncation": "disabled", "user": null,
        });
        for (field, default) in repeated.as_object().into_iter().flatten() {
            base[field] = body.get(field).filter(|value| !value.is_null()).unwrap_or(default).clone();
        }
        Self { base, items: Vec::new(), is_open: false, events: 0, status: "in_progress" }
    }

    fn write_event(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["sequence_number"] = self.events.into();
        self.events += 1;
        write_named_event(name, data, out);
    }

    /// Writes an event about the last item.
    fn write_item_event(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["output_index"] = (self.items.len() - 1).into();
        if let (None, Some(item)) = (data.get("item"), self.items.last()) {
            data["item_id"] = item.id.as_str().into();
        }
        self.write_event(name, data, out);
    }

    fn response_json(&self, usage: Option<Usage>) -> Value {
        let mut response = self.base.clone();
        response["status"] = self.status.into();
        response["output"] = self.items.iter().map(OutputItem::to_json).collect();
        if self.status == "incomplete" {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        if let Some(Usage {
            prompt_tokens: prompt, cached_tokens: cached, generated_tokens: tokens, ..
        }) = usage
        {
            response["usage"] = json!({
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + tokens,
            });
        }
        response
    }

    fn set_status(&mut self, choice: &Choice) {
        self.status = if choice.finish_reason() == "length" { "incomplete" } else { "completed" };
    }

    /// Continues an item of this kind, or begins one.
    fn enter_item(&mut self, item: OutputItem, out: &mut String) {
        let kind = item.kind;
        let continues = self.items.last().is_some_and(|last| last.kind == kind && kind != ItemKind::Call);
        if self.is_open && continues {
            return;
        }
        self.end_item("completed", out);
        let added = json!({"item": item.to_json()});
        self.items.push(item);
        self.is_open = true;
        self.write_item_event("response.output_item.added", added, out);
        if kind != ItemKind::Call {
            let part = json!({"content_index": 0, "part": kind.part_json("")});
            self.write_item_event("response.content_part.added", part, out);
        }
    }

    /// Appends to the open item.
    fn write_delta(&mut self, delta: &str, out: &mut String) {
        let Some(item) = self.items.last_mut() else { return };
        item.text += delta;
        let kind = item.kind;
        let data = kind.text_fields("delta", delta);
        self.write_item_event(&format!("{}.delta", kind.event_prefix()), data, out);
    }

    /// Ends the open item, if there is one.
    fn end_item(&mut self, status: &'static str, out: &mut String) {
        let Some(item) = self.items.last_mut().filter(|_| std::mem::take(&mut self.is_open)) else { return };
        item.status = status;
        let (kind, text, whole) = (item.kind, item.text.as_str(), json!({"item": item.to_json()}));
        let done = match kind {
            ItemKind::Call => json!({"name": item.call[1], "arguments": text}),
            _ => kind.text_fields("text", text),
        };
        let part = json!({"content_index": 0, "part": kind.part_json(text)});
        self.write_item_event(&format!("{}.done", kind.event_prefix()), done, out);
        if kind != ItemKind::Call {
            self.write_item_event("response.content_part.done", part, out);
        }
        self.write_item_event("response.output_item.done", whole, out);
    }
}

impl Dialect for ResponsesDialect {
    fn on_start(&mut self, out: &mut String) {
        for name in ["response.created", "response.in_progress"] {
            self.write_event(name, json!({"response": self.response_json(None)}), out);
        }
    }

    fn on_token(&mut self, _: usize, token: &TokenOutput, out: &mut String) {
        for part in &token.parts {
            match part {
                AnswerPart::Text(text) => {
                    self.enter_item(OutputItem::new(ItemKind::Text), out);
                    self.write_delta(text, out);
                }
                AnswerPart::Thinking(thought) => {
                    self.enter_item(OutputItem::new(ItemKind::Thinking), out);
                    self.write_delta(thought, out);
                }
                AnswerPart::ToolCallStart { id, name } => {
                    self.enter_item(OutputItem::new_call(id, name), out)
                }
                AnswerPart::ToolCallDelta(more) => self.write_delta(more, out),
                AnswerPart::ToolCall(_) | AnswerPart::ToolCallCut { .. } => {}
            }
        }
    }

    fn on_choice_end(&mut self, _: usize, choice: &Choice, out: &mut String) {
        if self.items.is_empty() {
            self.enter_item(OutputItem::new(ItemKind::Text), out);
        }
        self.set_status(choice);
        self.end_item(self.status, out);
    }

    fn on_end(&mut self, usage: Usage, out: &mut String) {
        let response = json!({"response": self.response_json(Some(usage))});
        self.write_event(&format!("response.{}", self.status), response, out);
    }

    fn on_error(&mut self, error: &ApiError, out: &mut String) {
        let error = json!({"code": "server_error", "message": error.message, "param": null});
        self.write_event("error", error, out);
    }

    fn to_json(&mut self, choices: &mut [Choice], usage: Usage, out: &mut JsonWriter) {
        let Some(choice) = choices.first_mut() else { return out.write_value(&Value::Null) };
        self.set_status(choice);
        let mut add = |item: OutputItem, text: String| {
            self.items.push(OutputItem { text, status: "completed", ..item });
        };
        if !choice.reasoning.is_empty() {
            add(OutputItem::new(ItemKind::Thinking), std::mem::take(&mut choice.reasoning));
        }
        if !choice.text.is_empty() || choice.tool_calls.is_empty() {
            add(OutputItem::new(ItemKind::Text), std::mem::take(&mut choice.text));
        }
        for call in choice.tool_calls.drain(..) {
            add(OutputItem::new_call(&call.id, &call.name), call.arguments);
        }
        if let Some(last) = self.items.last_mut() {
            last.status = self.status;
        }
        out.write_value(&self.response_json(Some(usage)));
    }
}
