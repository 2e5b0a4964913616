//! Anthropic's shape: `/v1/messages`.

use super::answer::{Choice, Shape, Step, Usage, named_event};
use super::content::{Turn, content, newest, text_of};
use super::conversation::{Conversation, arguments, list};
use super::fields::Fields;
use super::hub::{Served, name};
use super::refusal::Refusal;
use super::tools;
use super::whole::Whole;
use crate::run::session::StopReason;
use files::error::quoted;
use files::nesting::marks;
use serde::Serialize;
use serde_json::{Value, json};
use text::chat::{Ending, Message, Part, Role, ToolCall};

type Result<T> = std::result::Result<T, Refusal>;

/// The line that Claude Code puts first, which differs from one conversation to the next: with it no two prompts would
/// begin alike.
const BILLING: &str = "x-anthropic-billing-header:";

/// A text without the line of that name that it begins with.
fn without_billing(text: &str) -> &str {
    match text.starts_with(BILLING) {
        true => text.split_once('\n').map_or("", |(_, rest)| rest.trim_start_matches('\n')),
        false => text,
    }
}

/// The system message.
fn system(of: &Value) -> Result<String> {
    let mut parts = of.clone();
    let first = match &mut parts {
        Value::Array(all) => all.first_mut().and_then(|first| first.get_mut("text")),
        one => Some(one),
    };
    if let Some(Value::String(text)) = first {
        *text = without_billing(text).to_owned();
    }
    content(Some(&parts), "system", Turn::Earlier)
}

/// System message, messages and tools of a request. A last message of the assistant is continued.
pub fn conversation(fields: &Fields<'_>) -> Result<Conversation> {
    let mut messages = Vec::new();
    if let Some(of) = fields.get("system") {
        let text = system(of)?;
        messages.extend(Some(text).filter(|text| !text.is_empty()).map(|t| Message::new(Role::System, t)));
    }
    let all = list(fields)?.iter().enumerate().map(|(i, of)| Fields::of(of, &format!("messages[{i}]")));
    let all = all.collect::<Result<Vec<_>>>()?;
    let speakers = all.iter().map(role).collect::<Result<Vec<_>>>()?;
    // Results of tools are no question.
    let is_result = |block: &Value| block["type"] == "tool_result";
    let has_results = |of: &Fields<'_>| {
        let blocks = of.get("content").and_then(Value::as_array);
        blocks.is_some_and(|blocks| !blocks.is_empty() && blocks.iter().all(is_result))
    };
    let roles: Vec<_> = all
        .iter()
        .zip(&speakers)
        .map(|(of, role)| if has_results(of) { Role::Tool } else { *role })
        .collect();
    let newest = newest(&roles);
    for (i, (of, role)) in all.iter().zip(speakers).enumerate() {
        let turn = Turn::of(&newest, i, role);
        match of.get("content") {
            Some(Value::Array(blocks)) => read((role, turn), of, blocks, &mut messages)?,
            None if turn == Turn::Newest => return Err(of.refuse("content", "is missing; give a string")),
            other => messages.push(Message::new(role, content(other, &of.name("content"), turn)?)),
        }
    }
    let of = Conversation::new(messages, fields, tools::with_input_schema)?;
    let open = |last: &Message| last.role == Role::Assistant && last.tool_calls.is_empty();
    let ending = if of.messages.last().is_some_and(open) { Ending::Continue } else { Ending::Prompt };
    Ok(Conversation { ending, ..of })
}

/// Who speaks.
fn role(of: &Fields<'_>) -> Result<Role> {
    match of.needed_text("role")? {
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        "system" => Ok(Role::System),
        other => Err(of.refuse("role", format!("is {}; use user or assistant", quoted(other)))),
    }
}

/// The messages that the blocks of one are: results of tools stand before what else is said.
fn read(
    (role, turn): (Role, Turn),
    of: &Fields<'_>,
    blocks: &[Value],
    messages: &mut Vec<Message>,
) -> Result<()> {
    let mut message = Message::new(role, "");
    for (i, block) in blocks.iter().enumerate() {
        let block = Fields::of(block, &of.name(&format!("content[{i}]")))?;
        match block.needed_text("type")? {
            "thinking" => {
                let thought = block.text("thinking")?.unwrap_or_default();
                message.reasoning.get_or_insert_default().push_str(thought);
            }
            "tool_use" => {
                let (id, name) = (block.needed_text("id")?.to_owned(), block.needed_text("name")?.to_owned());
                message.tool_calls.push(ToolCall { id, name, arguments: arguments(&block, "input") });
            }
            "tool_result" => {
                let text = content(block.get("content"), &block.name("content"), Turn::Earlier)?;
                let id = block.needed_text("tool_use_id")?.to_owned();
                let calls = messages.iter().flat_map(|m| &m.tool_calls);
                let name = calls.into_iter().find(|call| call.id == id).map(|call| call.name.clone());
                messages.push(Message { tool_call_id: Some(id), name, ..Message::new(Role::Tool, text) });
            }
            _ => message.content += &text_of(&block, turn)?,
        }
    }
    if !message.content.is_empty() || !message.tool_calls.is_empty() || blocks.is_empty() {
        messages.push(message);
    }
    Ok(())
}

/// The answer to a request.
pub struct Messages {
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

/// What a tool is called with. Of arguments that break off it is what is whole of them, as clients read a stream.
fn input(call: &ToolCall) -> Value {
    let read = |text: &str| serde_json::from_str(text).ok().filter(Value::is_object);
    read(&call.arguments).or_else(|| read(&closed(&call.arguments))).unwrap_or_else(|| json!({}))
}

/// JSON that breaks off, up to the last value that is whole, and ended there.
fn closed(json: &str) -> String {
    let (mut open, mut end) = (Vec::new(), 0);
    for mark in marks(json.as_bytes()).filter(|mark| mark.byte != b':') {
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

/// A block of the content that is text or thought.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
enum Block<'a> {
    Thinking { thinking: &'a str, signature: &'a str },
    Text { text: &'a str },
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
                Part::ToolCallStart { id, name } => {
                    let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                    self.enter("tool_use", block, out);
                }
                Part::ToolCallDelta(more) => {
                    self.delta(json!({"type": "input_json_delta", "partial_json": more}), out);
                }
                Part::Call(_) | Part::Cut { .. } => {}
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

    fn whole(&mut self, choices: &mut [Choice], of: Usage, out: &mut Whole) {
        let Some(choice) = choices.first() else { return out.value(&Value::Null) };
        let (reason, stop) = self.end(choice);
        let mut message = self.message(json!([]), usage(of));
        (message["stop_reason"], message["stop_sequence"]) = (reason.into(), stop.into());
        out.object_with(&message, "content", |out| {
            out.begin(b'[');
            if !choice.thoughts.is_empty() {
                out.value(&Block::Thinking { thinking: &choice.thoughts, signature: "" });
            }
            if !choice.text.is_empty() || choice.calls.is_empty() {
                out.value(&Block::Text { text: &choice.text });
            }
            for call in &choice.calls {
                out.value(
                    &json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input(call)}),
                );
            }
            out.end(b']');
        });
    }
}
