//! OpenAI's `/v1/chat/completions`.

use super::openai::{MessageRole, ResponseHead, logprobs_json, write_logprobs};
use crate::serve::body::{Object, RequestBody, read_object, read_value, require_field};
use crate::serve::conversation::{
    ChatRequest, Turn, call_arguments, classify_turns, content_text, omission_note,
};
use crate::serve::dialect::{Choice, Dialect, PromptProgress, TokenOutput, Usage};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::JsonWriter;
use crate::serve::params::{LogprobCount, RequestParams};
use crate::serve::prepare::{PreparedRequest, start_chat};
use crate::serve::state::ServerModel;
use crate::serve::tools::convert_chat_tool;
use crate::serve::unsupported::RequestKind;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::sync::Arc;
use text::chat::{AnswerPart, Message, PromptEnding, Role, ToolCall};

/// Fields of chat completions only.
#[derive(Deserialize)]
struct ChatFields {
    logprobs: Option<bool>,
    top_logprobs: Option<LogprobCount>,
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
}

#[derive(Deserialize)]
struct ChatMessage {
    role: MessageRole,
    content: Option<Value>,
    reasoning_content: Option<Value>,
    reasoning: Option<Value>,
    refusal: Option<Value>,
    audio: Option<IgnoredAny>,
    name: Option<String>,
    tool_call_id: Option<String>,
    tool_calls: Option<Vec<Object<MessageCall>>>,
    /// Predecessor of `tool_calls`.
    function_call: Option<Object<CalledFunction>>,
}

#[derive(Deserialize)]
struct MessageCall {
    id: Option<String>,
    function: Option<Object<CalledFunction>>,
    custom: Option<Object<CalledFunction>>,
}

#[derive(Deserialize)]
struct CalledFunction {
    name: String,
    arguments: Option<Value>,
    input: Option<Value>,
}

impl CalledFunction {
    fn into_call(self, id: String) -> ToolCall {
        let arguments = call_arguments(self.arguments.as_ref().or(self.input.as_ref()));
        ToolCall { id, name: self.name, arguments }
    }
}

impl ChatMessage {
    fn into_message(self, place: &str, turn: Turn) -> ApiResult<Message> {
        let text = |value: Option<Value>| value.and_then(|value| value.as_str().map(str::to_owned));
        let MessageRole(role) = self.role;
        let mut message = Message::new(role, content_text(self.content, &format!("{place}.content"), turn)?);
        message.reasoning = text(self.reasoning_content).or_else(|| text(self.reasoning));
        (message.tool_call_id, message.name) = (self.tool_call_id, self.name);
        for (i, Object(call)) in self.tool_calls.unwrap_or_default().into_iter().enumerate() {
            let function =
                require_field(call.function.or(call.custom), format!("{place}.tool_calls[{i}].function"))?;
            message.tool_calls.push(function.0.into_call(call.id.unwrap_or_else(|| format!("call_{i}"))));
        }
        if message.tool_calls.is_empty() {
            message.tool_calls.extend(self.function_call.map(|of| of.0.into_call("call_0".into())));
        }
        if message.content.is_empty() && role == Role::Assistant {
            let audio = self.audio.map(|_| omission_note("audio"));
            message.content = text(self.refusal).or(audio).unwrap_or_default();
        }
        Ok(message)
    }
}

/// Takes `messages` out of a body; there must be at least one.
pub fn take_messages<T: serde::de::DeserializeOwned>(body: &mut Value) -> ApiResult<Vec<T>> {
    let all: Option<Vec<Object<T>>> = read_value(body["messages"].take(), "messages")?;
    let all = all.ok_or_else(|| ApiError::for_field("messages", "is missing; add an array"))?;
    if all.is_empty() {
        return Err(ApiError::for_field("messages", "is empty; add at least one message"));
    }
    Ok(all.into_iter().map(|message| message.0).collect())
}

/// Reads messages, tools, and the end of the prompt.
fn read_chat(body: &mut Value, fields: &ChatFields) -> ApiResult<ChatRequest> {
    let messages: Vec<ChatMessage> = take_messages(body)?;
    let turns = classify_turns(&messages.iter().map(|message| message.role.0).collect::<Vec<_>>());
    let one = |(i, (message, turn)): (usize, (ChatMessage, Turn))| {
        message.into_message(&format!("messages[{i}]"), turn)
    };
    let messages = messages.into_iter().zip(turns).enumerate().map(one).collect::<ApiResult<Vec<_>>>()?;
    let ends_with_calls = messages.last().is_some_and(|last| !last.tool_calls.is_empty());
    let refuse = |why| Err(ApiError::for_field("continue_final_message", why));
    let ending = match (fields.continue_final_message, fields.add_generation_prompt) {
        (Some(true), Some(true)) => {
            return refuse("cannot be combined with `add_generation_prompt`; set that to false");
        }
        (Some(true), _) if ends_with_calls => {
            return refuse(
                "the last message ends with tool calls and cannot be continued; send their results",
            );
        }
        (Some(true), _) => PromptEnding::Continue,
        (_, Some(false)) => PromptEnding::Message,
        _ => PromptEnding::Prompt,
    };
    Ok(ChatRequest { ending, ..ChatRequest::new(messages, body, convert_chat_tool)? })
}

/// `POST /v1/chat/completions`.
pub fn start_request(model: &Arc<ServerModel>, request: RequestBody) -> ApiResult<PreparedRequest> {
    let (mut body, mut params) = RequestParams::read_request(model, request, RequestKind::Chat)?;
    let fields: ChatFields = read_object(&body, "")?;
    let top = fields.top_logprobs.and_then(LogprobCount::to_count);
    match (fields.logprobs, top) {
        (Some(true), n) => params.options.logprobs = n.or(Some(0)),
        (_, Some(1..)) => {
            return Err(ApiError::for_field("top_logprobs", "needs `logprobs` to be true"));
        }
        _ => {}
    }
    let chat = read_chat(&mut body, &fields)?;
    start_chat(&chat, params, |params, _| {
        let objects = ["chat.completion.chunk", "chat.completion"];
        let head = ResponseHead::new("chatcmpl-", objects, params);
        Box::new(ChatDialect { head, calls: vec![0; params.n] })
    })
}

/// `POST /apply-template`, as in llama.cpp's server.
pub fn apply_template(model: &Arc<ServerModel>, request: &mut RequestBody) -> ApiResult<JsonWriter> {
    let mut body = request.parse_json()?;
    let fields = read_object(&body, "")?;
    let prompt = read_chat(&mut body, &fields)?.render_prompt(model)?;
    Ok(JsonWriter::from_value(&json!({"prompt": prompt})))
}

/// Responses of `/v1/chat/completions`.
struct ChatDialect {
    head: ResponseHead,
    /// Number of tool calls of each choice so far.
    calls: Vec<usize>,
}

impl ChatDialect {
    /// Streaming delta of a part.
    fn part_to_delta(&mut self, choice: usize, part: &AnswerPart) -> Option<Value> {
        let calls = &mut self.calls[choice];
        let call = match part {
            AnswerPart::Text(text) => return Some(json!({"content": text})),
            AnswerPart::Thinking(thought) => return Some(json!({"reasoning_content": thought})),
            AnswerPart::ToolCallStart { id, name } => {
                *calls += 1;
                let function = json!({"name": name, "arguments": ""});
                json!({"index": *calls - 1, "id": id, "type": "function", "function": function})
            }
            AnswerPart::ToolCallDelta(more) => {
                json!({"index": calls.saturating_sub(1), "function": {"arguments": more}})
            }
            AnswerPart::ToolCall(_) | AnswerPart::ToolCallCut { .. } => return None,
        };
        Some(json!({"tool_calls": [call]}))
    }
}

fn choice_json(index: usize, delta: Value, finish_reason: Option<&str>) -> Value {
    json!({"index": index, "delta": delta, "finish_reason": finish_reason})
}

fn call_json(call: ToolCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"id": call.id, "type": "function", "function": function})
}

impl Dialect for ChatDialect {
    fn on_start(&mut self, out: &mut String) {
        for index in 0..self.calls.len() {
            let delta = json!({"role": "assistant", "content": null});
            self.head.write_chunk(choice_json(index, delta, None), None, out);
        }
    }

    fn on_token(&mut self, choice: usize, token: &TokenOutput, out: &mut String) {
        let mut deltas: Vec<_> =
            token.parts.iter().filter_map(|part| self.part_to_delta(choice, part)).collect();
        if deltas.is_empty() {
            deltas.push(json!({"content": ""}));
        }
        let mut logprobs = token.logprobs.as_ref();
        for delta in deltas {
            let mut chunk = choice_json(choice, delta, None);
            if let Some(token) = logprobs.take() {
                chunk["logprobs"] = json!({"content": logprobs_json(&self.head.model, token)});
            }
            self.head.write_chunk(chunk, None, out);
        }
    }

    fn on_prompt_progress(&mut self, choice: usize, progress: &PromptProgress, out: &mut String) {
        self.head.write_progress(choice_json(choice, json!({}), None), progress, out);
    }

    fn on_choice_end(&mut self, index: usize, choice: &Choice, out: &mut String) {
        let last = choice_json(index, json!({}), Some(choice.finish_reason()));
        self.head.write_chunk(last, self.head.timings_field(choice.count_usage()), out);
    }

    fn on_end(&mut self, usage: Usage, out: &mut String) {
        self.head.write_end(usage, out);
    }

    fn to_json(&mut self, choices: &mut [Choice], usage: Usage, out: &mut JsonWriter) {
        self.head.write_whole(usage, out, |out| {
            for (index, choice) in choices.iter_mut().enumerate() {
            let finish_reason = choice.finish_reason();
            let calls: Vec<_> = choice.tool_calls.drain(..).map(call_json).collect();
            let text = std::mem::take(&mut choice.text);
            let content = (!text.is_empty() || calls.is_empty()).then_some(text);
            let mut message = json!({"role": "assistant", "content": content});
            if !choice.reasoning.is_empty() {
                message["reasoning_content"] = std::mem::take(&mut choice.reasoning).into();
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            let logprobs = std::mem::take(&mut choice.logprobs);
            let object =
                json!({"index": index, "message": message, "logprobs": null, "finish_reason": finish_reason});
            out.write_object_with(&object, "logprobs", |out| {
                if logprobs.is_empty() {
                    return out.write_value(&Value::Null);
                }
                out.write_object(|out| {
                    out.write_key("content");
                    write_logprobs(&self.head.model, logprobs, out);
                });
            });
            }
        });
    }
}
