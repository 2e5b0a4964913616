//! Anthropic's shape: `/v1/messages`.

use super::answer::{Choice, Shape, Step, Usage, named_event};
use super::conversation::{Conversation, content};
use super::fields::Fields;
use super::hub::{Served, name};
use super::refusal::Refusal;
use crate::run::session::StopReason;
use serde_json::{Value, json};
use text::chat::{Message, Part, Role, ToolCall};

type Result<T> = std::result::Result<T, Refusal>;

/// A tool in the form of chat completions.
fn tool(of: &Value) -> Value {
    let mut function = json!({"name": of["name"]});
    if let Some(description) = of.get("description") {
        function["description"] = description.clone();
    }
    function["parameters"] = of["input_schema"].clone();
    json!({"type": "function", "function": function})
}

/// System message, messages and tools of a request.
pub(super) fn conversation(fields: &Fields<'_>) -> Result<Conversation> {
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system") {
        messages.push(Message::new(Role::System, content(Some(system), "system", &["text"])?));
    }
    let all =
        fields.list("messages")?.ok_or_else(|| fields.refuse("messages", "is missing; give an array"))?;
    if all.is_empty() {
        return Err(fields.refuse("messages", "is empty; give one message at least"));
    }
    for (i, of) in all.iter().enumerate() {
        let of = Fields::of(of, &format!("messages[{i}]"))?;
        let role = match of.needed_text("role")? {
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "system" => Role::System,
            other => return Err(of.refuse("role", format!("is {other:?}; use user or assistant"))),
        };
        match of.get("content") {
            Some(Value::Array(blocks)) => turn(role, &of, blocks, &mut messages)?,
            None => return Err(of.refuse("content", "is missing; give a string")),
            other => messages.push(Message::new(role, content(other, &of.name("content"), &[])?)),
        }
    }
    Conversation::new(messages, fields, tool)
}

/// The messages that the blocks of one are: results of tools stand before what else is said.
fn turn(role: Role, of: &Fields<'_>, blocks: &[Value], messages: &mut Vec<Message>) -> Result<()> {
    let mut message = Message::new(role, "");
    for (i, block) in blocks.iter().enumerate() {
        let block = Fields::of(block, &of.name(&format!("content[{i}]")))?;
        match block.needed_text("type")? {
            "text" => message.content += block.needed_text("text")?,
            "thinking" => message.reasoning = block.text("thinking")?.map(str::to_owned),
            "redacted_thinking" => {}
            "tool_use" => {
                let input = block.object("input")?.map(|_| block.get("input").map(Value::to_string));
                let arguments = input.flatten().unwrap_or_else(|| "{}".into());
                let (id, name) = (block.needed_text("id")?.to_owned(), block.needed_text("name")?.to_owned());
                message.tool_calls.push(ToolCall { id, name, arguments });
            }
            "tool_result" => {
                let text = content(block.get("content"), &block.name("content"), &["text"])?;
                let id = block.needed_text("tool_use_id")?.to_owned();
                let calls = messages.iter().flat_map(|m| &m.tool_calls);
                let name = calls.into_iter().find(|call| call.id == id).map(|call| call.name.clone());
                messages.push(Message { tool_call_id: Some(id), name, ..Message::new(Role::Tool, text) });
            }
            other => {
                let why = format!("is {other:?}; this model reads text, thinking, tool_use and tool_result");
                return Err(block.refuse("type", why));
            }
        }
    }
    if !message.content.is_empty() || !message.tool_calls.is_empty() || blocks.is_empty() {
        messages.push(message);
    }
    Ok(())
}

/// The answer to a request.
pub(super) struct Messages {
    id: String,
    model: String,
    stops: Vec<String>,
    /// The stop string that has ended it.
    stop: Option<String>,
    prompt: usize,
    /// The block that is open, and how many there were before it.
    open: Option<&'static str>,
    blocks: usize,
    reason: &'static str,
}

impl Messages {
    pub fn new(served: &Served, stops: &[String], prompt: usize) -> Self {
        let (id, model, stops) = (name("msg_"), served.name.clone(), stops.to_vec());
        Self { id, model, stops, stop: None, prompt, open: None, blocks: 0, reason: "end_turn" }
    }

    fn message(&self, content: Value, usage: Value) -> Value {
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        })
    }

    fn close(&mut self, out: &mut String) {
        if self.open.take().is_some() {
            named_event("content_block_stop", json!({"index": self.blocks}), out);
            self.blocks += 1;
        }
    }

    /// Goes on in a block of this kind.
    fn enter(&mut self, kind: &'static str, block: Value, out: &mut String) {
        if self.open != Some(kind) || kind == "tool_use" {
            self.close(out);
            named_event("content_block_start", json!({"index": self.blocks, "content_block": block}), out);
            self.open = Some(kind);
        }
    }

    fn delta(&self, delta: Value, out: &mut String) {
        named_event("content_block_delta", json!({"index": self.blocks, "delta": delta}), out);
    }

    /// Why it has ended, and the stop string that ended it.
    fn end(&self, choice: &Choice) -> (&'static str, Option<&str>) {
        match choice.ending.map(|ending| (ending.reason, ending.stop)) {
            _ if choice.reason() == "tool_calls" => ("tool_use", None),
            Some((StopReason::Stop, stop)) => {
                ("stop_sequence", stop.and_then(|n| self.stops.get(n)).map(String::as_str))
            }
            Some((StopReason::Eos, _)) => ("end_turn", None),
            _ => ("max_tokens", None),
        }
    }
}

fn usage(of: Usage) -> Value {
    json!({
        "input_tokens": of.prompt - of.cached, "cache_read_input_tokens": of.cached, "cache_creation_input_tokens": 0,
        "output_tokens": of.tokens,
    })
}

/// What a tool is called with. What the model wrote was looked at: it is JSON.
fn input(call: &ToolCall) -> Value {
    serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}))
}

impl Shape for Messages {
    fn begin(&mut self, out: &mut String) {
        let usage = usage(Usage { prompt: self.prompt, ..Usage::default() });
        named_event("message_start", json!({"message": self.message(json!([]), usage)}), out);
    }

    fn step(&mut self, _: usize, step: &Step, out: &mut String) {
        for part in &step.parts {
            match part {
                Part::Text(text) => {
                    self.enter("text", json!({"type": "text", "text": ""}), out);
                    self.delta(json!({"type": "text_delta", "text": text}), out);
                }
                Part::Thinking(thought) => {
                    let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.enter("thinking", block, out);
                    self.delta(json!({"type": "thinking_delta", "thinking": thought}), out);
                }
                Part::Begun { id, name } => {
                    let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.enter("tool_use", block, out);
                }
                Part::Arguments(more) => {
                    self.delta(json!({"type": "input_json_delta", "partial_json": more}), out);
                }
                Part::Call(_) => {}
            }
        }
    }

    fn ended(&mut self, _: usize, choice: &Choice, out: &mut String) {
        self.close(out);
        let (reason, stop) = self.end(choice);
        (self.reason, self.stop) = (reason, stop.map(str::to_owned));
    }

    fn over(&mut self, of: Usage, out: &mut String) {
        let delta = json!({"stop_reason": self.reason, "stop_sequence": self.stop});
        named_event("message_delta", json!({"delta": delta, "usage": usage(of)}), out);
        named_event("message_stop", json!({}), out);
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        named_event("error", refusal.anthropic(), out);
    }

    fn whole(&mut self, choices: &[Choice], of: Usage) -> Value {
        let Some(choice) = choices.first() else { return Value::Null };
        let mut content = Vec::new();
        if !choice.thoughts.is_empty() {
            content.push(json!({"type": "thinking", "thinking": choice.thoughts, "signature": ""}));
        }
        if !choice.text.is_empty() || choice.calls.is_empty() {
            content.push(json!({"type": "text", "text": choice.text}));
        }
        let call = |c: &ToolCall| json!({"type": "tool_use", "id": c.id, "name": c.name, "input": input(c)});
        content.extend(choice.calls.iter().map(call));
        let (reason, stop) = self.end(choice);
        let mut message = self.message(content.into(), usage(of));
        (message["stop_reason"], message["stop_sequence"]) = (reason.into(), stop.into());
        message
    }
}
