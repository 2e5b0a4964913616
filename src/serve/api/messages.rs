//! Anthropic's `/v1/messages`.

use super::chat::take_messages;
use crate::run::session::StopReason;
use crate::serve::body::{RequestBody, read_object, require_field};
use crate::serve::conversation::{
    ChatRequest, Turn, call_arguments, classify_turns, content_text, find_called_function, part_text,
};
use crate::serve::dialect::{Choice, Dialect, TokenOutput, Usage, write_named_event};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::JsonWriter;
use crate::serve::params::RequestParams;
use crate::serve::prepare::{PreparedRequest, start_chat};
use crate::serve::state::{ServerModel, random_id};
use crate::serve::tools::convert_anthropic_tool;
use crate::serve::unsupported::RequestKind;
use files::error::quote;
use files::json_depth::list_tokens;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use text::chat::{AnswerPart, Message, PromptEnding, Role, ToolCall};

/// First line that Claude Code adds. It differs between conversations, so it would defeat the prefix cache.
const BILLING_LINE: &str = "x-anthropic-billing-header:";

#[derive(Deserialize)]
struct AnthropicMessage {
    role: String,
    content: Option<Value>,
}

/// A content block.
#[derive(Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: String,
    id: Option<String>,
    name: Option<String>,
    input: Option<Value>,
    tool_use_id: Option<String>,
    content: Option<Value>,
}

/// Takes the system prompt out of a body, without Claude Code's billing line.
fn take_system(body: &mut Value) -> ApiResult<String> {
    let mut system = body["system"].take();
    let first = match &mut system {
        Value::Array(all) => all.first_mut().and_then(|first| first.get_mut("text")),
        one => Some(one),
    };
    if let Some(Value::String(text)) = first
        && text.starts_with(BILLING_LINE)
    {
        let rest = text.split_once('\n').map_or("", |(_, rest)| rest.trim_start_matches('\n'));
        *text = rest.to_owned();
    }
    content_text(Some(system), "system", Turn::Earlier)
}

/// Reads system prompt, messages and tools. A last message of the assistant is continued.
fn read_chat(body: &mut Value) -> ApiResult<ChatRequest> {
    let system = take_system(body)?;
    let mut messages = Vec::new();
    if !system.is_empty() {
        messages.push(Message::new(Role::System, system));
    }
    let all: Vec<AnthropicMessage> = take_messages(body)?;
    let role = |(i, message): (usize, &AnthropicMessage)| match message.role.as_str() {
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        "system" => Ok(Role::System),
        other => {
            let why = format!("is {}; use user or assistant", quote(other));
            Err(ApiError::for_field(format!("messages[{i}].role"), why))
        }
    };
    let roles = all.iter().enumerate().map(role).collect::<ApiResult<Vec<_>>>()?;
    // Tool results are not a question.
    let is_result = |block: &Value| block["type"] == "tool_result";
    let has_results = |message: &AnthropicMessage| {
        let blocks = message.content.as_ref().and_then(Value::as_array);
        blocks.is_some_and(|blocks| !blocks.is_empty() && blocks.iter().all(is_result))
    };
    let speakers = all.iter().zip(&roles);
    let speakers = speakers.map(|(message, role)| if has_results(message) { Role::Tool } else { *role });
    let turns = classify_turns(&speakers.collect::<Vec<_>>());
    for (i, (message, (role, turn))) in all.into_iter().zip(roles.into_iter().zip(turns)).enumerate() {
        let place = format!("messages[{i}].content");
        match message.content {
            Some(Value::Array(blocks)) => read_blocks((role, turn), &place, &blocks, &mut messages)?,
            other => messages.push(Message::new(role, content_text(other, &place, turn)?)),
        }
    }
    let chat = ChatRequest::new(messages, body, convert_anthropic_tool)?;
    let is_open = |last: &Message| last.role == Role::Assistant && last.tool_calls.is_empty();
    let ending =
        if chat.messages.last().is_some_and(is_open) { PromptEnding::Continue } else { PromptEnding::Prompt };
    Ok(ChatRequest { ending, ..chat })
}

/// Converts the blocks of one message to messages: tool results become messages of their own, before the rest.
fn read_blocks(
    (role, turn): (Role, Turn),
    place: &str,
    blocks: &[Value],
    messages: &mut Vec<Message>,
) -> ApiResult<()> {
    let mut message = Message::new(role, "");
    for (i, value) in blocks.iter().enumerate() {
        let place = format!("{place}[{i}]");
        let block: Block = read_object(value, &place)?;
        match block.kind.as_str() {
            "thinking" => {
                let thought = value["thinking"].as_str().unwrap_or_default();
                message.reasoning.get_or_insert_default().push_str(thought);
            }
            "tool_use" => {
                let id = require_field(block.id, format!("{place}.id"))?;
                let name = require_field(block.name, format!("{place}.name"))?;
                let arguments = call_arguments(block.input.as_ref());
                message.tool_calls.push(ToolCall { id, name, arguments });
            }
            "tool_result" => {
                let text = content_text(block.content, &format!("{place}.content"), Turn::Earlier)?;
                let id = require_field(block.tool_use_id, format!("{place}.tool_use_id"))?;
                let name = find_called_function(messages, &id);
                messages.push(Message { tool_call_id: Some(id), name, ..Message::new(Role::Tool, text) });
            }
            _ => message.content += &part_text(value, &place, turn)?,
        }
    }
    if !message.content.is_empty() || !message.tool_calls.is_empty() || blocks.is_empty() {
        messages.push(message);
    }
    Ok(())
}

/// `POST /v1/messages`.
pub fn start_request(model: &Arc<ServerModel>, request: RequestBody) -> ApiResult<PreparedRequest> {
    let (mut body, mut params) = RequestParams::read_request(model, request, RequestKind::Chat)?;
    params.n = 1;
    let chat = read_chat(&mut body)?;
    start_chat(&chat, params, |params, prompt| Box::new(MessagesDialect::new(params, prompt)))
}

/// `POST /v1/messages/count_tokens`.
pub fn count_tokens(model: &Arc<ServerModel>, request: &mut RequestBody) -> ApiResult<JsonWriter> {
    let prompt = read_chat(&mut request.parse_json()?)?.build_prompt(model)?;
    Ok(JsonWriter::from_value(&json!({"input_tokens": prompt.ids.len()})))
}

/// Responses of `/v1/messages`.
struct MessagesDialect {
    id: String,
    model: String,
    stops: Vec<String>,
    /// Length of the prompt in tokens.
    prompt: usize,
    /// Type of the open block.
    open: Option<&'static str>,
    /// Number of finished blocks.
    blocks: usize,
    /// `stop_reason` and `stop_sequence`, once they are known.
    stop: [Option<String>; 2],
}

impl MessagesDialect {
    fn new(params: &RequestParams, prompt: usize) -> Self {
        let (id, model, stops) = (random_id("msg_"), params.model.name.clone(), params.options.stop.clone());
        Self { id, model, stops, prompt, open: None, blocks: 0, stop: [None, None] }
    }

    fn message_json(&self, usage: Value) -> Value {
        let [reason, sequence] = &self.stop;
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": reason, "stop_sequence": sequence, "usage": usage,
        })
    }

    /// Ends the open block, if there is one.
    fn end_block(&mut self, out: &mut String) {
        if self.open.take().is_some() {
            write_named_event("content_block_stop", json!({"index": self.blocks}), out);
            self.blocks += 1;
        }
    }

    /// Continues a block of this type, or begins one.
    fn enter_block(&mut self, kind: &'static str, block: Value, out: &mut String) {
        if self.open != Some(kind) || kind == "tool_use" {
            self.end_block(out);
            let start = json!({"index": self.blocks, "content_block": block});
            write_named_event("content_block_start", start, out);
            self.open = Some(kind);
        }
    }

    fn write_delta(&self, delta: Value, out: &mut String) {
        write_named_event("content_block_delta", json!({"index": self.blocks, "delta": delta}), out);
    }

    /// Sets `stop_reason` and `stop_sequence`.
    fn set_stop(&mut self, choice: &Choice) {
        let reason = match choice.ending.map(|ending| ending.reason) {
            _ if choice.finish_reason() == "tool_calls" => "tool_use",
            Some(StopReason::Stop) => "stop_sequence",
            Some(StopReason::Eos) => "end_turn",
            _ => "max_tokens",
        };
        let sequence = choice.stop_string(&self.stops).filter(|_| reason == "stop_sequence");
        self.stop = [Some(reason.to_owned()), sequence.map(str::to_owned)];
    }
}

fn usage_json(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.prompt_tokens - usage.cached_tokens, "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0, "output_tokens": usage.generated_tokens,
    })
}

/// Arguments of a call as an object. Incomplete ones are cut after their last whole value, as streaming clients do.
fn call_input(call: &ToolCall) -> Value {
    let read = |text: &str| serde_json::from_str(text).ok().filter(Value::is_object);
    read(&call.arguments).or_else(|| read(&close_json(&call.arguments))).unwrap_or_else(|| json!({}))
}

/// Cuts incomplete JSON after its last whole value and closes it there.
fn close_json(json: &str) -> String {
    let (mut open, mut end) = (Vec::new(), 0);
    for mark in list_tokens(json.as_bytes()).filter(|mark| mark.byte != b':') {
        match mark.byte {
            b'{' => open.push('}'),
            b'[' => open.push(']'),
            b'}' | b']' => drop(open.pop()),
            _ => {}
        }
        end = mark.at + usize::from(mark.byte != b',');
    }
    json[..end].chars().chain(open.into_iter().rev()).collect()
}

impl Dialect for MessagesDialect {
    fn on_start(&mut self, out: &mut String) {
        let usage = usage_json(Usage { prompt_tokens: self.prompt, ..Usage::default() });
        write_named_event("message_start", json!({"message": self.message_json(usage)}), out);
    }

    fn on_token(&mut self, _: usize, token: &TokenOutput, out: &mut String) {
        for part in &token.parts {
            match part {
                AnswerPart::Text(text) => {
                    self.enter_block("text", json!({"type": "text", "text": ""}), out);
                    self.write_delta(json!({"type": "text_delta", "text": text}), out);
                }
                AnswerPart::Thinking(thought) => {
                    let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.enter_block("thinking", block, out);
                    self.write_delta(json!({"type": "thinking_delta", "thinking": thought}), out);
                }
                AnswerPart::ToolCallStart { id, name } => {
                    let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.enter_block("tool_use", block, out);
                }
                AnswerPart::ToolCallDelta(more) => {
                    self.write_delta(json!({"type": "input_json_delta", "partial_json": more}), out);
                }
                AnswerPart::ToolCall(_) | AnswerPart::ToolCallCut { .. } => {}
            }
        }
    }

    fn on_choice_end(&mut self, _: usize, choice: &Choice, out: &mut String) {
        self.end_block(out);
        self.set_stop(choice);
    }

    fn on_end(&mut self, usage: Usage, out: &mut String) {
        let [reason, sequence] = &self.stop;
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        write_named_event("message_delta", json!({"delta": delta, "usage": usage_json(usage)}), out);
        write_named_event("message_stop", json!({}), out);
    }

    fn on_error(&mut self, error: &ApiError, out: &mut String) {
        write_named_event("error", error.to_anthropic(), out);
    }

    fn to_json(&mut self, choices: &mut [Choice], usage: Usage, out: &mut JsonWriter) {
        let Some(choice) = choices.first_mut() else { return out.write_value(&Value::Null) };
        self.set_stop(choice);
        let (thoughts, text) = (std::mem::take(&mut choice.reasoning), std::mem::take(&mut choice.text));
        out.write_object_with(&self.message_json(usage_json(usage)), "content", |out| {
            out.write_array(|out| {
                if !thoughts.is_empty() {
                    out.write_value(&json!({"type": "thinking", "thinking": thoughts, "signature": ""}));
                }
                if !text.is_empty() || choice.tool_calls.is_empty() {
                    out.write_value(&json!({"type": "text", "text": text}));
                }
                for call in &choice.tool_calls {
                    let input = call_input(call);
                    out.write_value(
                        &json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input}),
                    );
                }
            });
        });
    }

    fn keep_alive(&self) -> &'static str {
        "event: ping\ndata: {\"type\": \"ping\"}\n\n"
    }
}
