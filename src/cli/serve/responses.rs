//! OpenAI's `/v1/responses`, as far as it needs no memory of earlier requests.

use super::answer::{Choice, Shape, Step, Usage, named_event};
use super::asked::Asked;
use super::conversation::{Conversation, arguments, content, schema};
use super::facts::short;
use super::fields::{Fields, kind};
use super::hub::{Served, name, now};
use super::refusal::Refusal;
use serde_json::{Value, json};
use text::chat::{Message, Part, Role, ToolCall};

type Result<T> = std::result::Result<T, Refusal>;

/// A tool in the form of chat completions.
fn tool(of: &Value) -> Value {
    if of.get("function").is_some() {
        return of.clone();
    }
    let mut function = of.clone();
    let kind = function.as_object_mut().and_then(|fields| fields.shift_remove("type"));
    json!({"type": kind, "function": function})
}

/// Instructions, input and tools of a request, and the schema that the answer must follow.
pub(super) fn conversation(fields: &Fields<'_>) -> Result<(Conversation, Option<String>)> {
    if fields.get("previous_response_id").is_some() {
        return Err(
            fields.refuse("previous_response_id", "earlier answers are not kept; send them in `input`")
        );
    }
    let mut messages = Vec::new();
    if let Some(text) = fields.text("instructions")? {
        messages.push(Message::new(Role::System, text));
    }
    match fields.get("input") {
        None => return Err(fields.refuse("input", "is missing; give a string")),
        Some(Value::String(text)) => messages.push(Message::new(Role::User, text.as_str())),
        Some(Value::Array(items)) => {
            for (i, item) in items.iter().enumerate() {
                read(&Fields::of(item, &format!("input[{i}]"))?, &mut messages)?;
            }
        }
        Some(other) => {
            return Err(fields.refuse("input", format!("is {}; use a string or an array", kind(other))));
        }
    }
    if messages.is_empty() {
        return Err(fields.refuse("input", "is empty; give a message"));
    }
    let format = match fields.object("text")? {
        Some(text) => text.object("format")?,
        None => None,
    };
    let schema = format.map(|format| schema(&format)).transpose()?.flatten();
    Ok((Conversation::new(messages, fields, tool)?, schema))
}

/// An item of the input.
fn read(item: &Fields<'_>, messages: &mut Vec<Message>) -> Result<()> {
    let call_id = || item.needed_text("call_id").map(str::to_owned);
    match item.text("type")?.unwrap_or("message") {
        "message" => {
            let role = match item.needed_text("role")? {
                "system" | "developer" => Role::System,
                "user" => Role::User,
                "assistant" => Role::Assistant,
                other => {
                    let why = format!("is {other:?}; use system, developer, user or assistant");
                    return Err(item.refuse("role", why));
                }
            };
            let kinds = ["input_text", "output_text", "text"];
            messages.push(Message::new(role, content(item.get("content"), &item.name("content"), &kinds)?));
        }
        "function_call" => {
            let name = item.needed_text("name")?.to_owned();
            let call = ToolCall { id: call_id()?, name, arguments: arguments(item)? };
            match messages.last_mut().filter(|last| last.role == Role::Assistant) {
                Some(last) => last.tool_calls.push(call),
                None => {
                    messages.push(Message { tool_calls: vec![call], ..Message::new(Role::Assistant, "") })
                }
            }
        }
        "function_call_output" => {
            let text = content(item.get("output"), &item.name("output"), &["input_text", "output_text"])?;
            let id = call_id()?;
            let name = messages.iter().flat_map(|m| &m.tool_calls).find(|call| call.id == id);
            let name = name.map(|call| call.name.clone());
            messages.push(Message { tool_call_id: Some(id), name, ..Message::new(Role::Tool, text) });
        }
        "reasoning" => {}
        other => {
            return Err(item.refuse("type", format!("is {other:?}; use message or function_call_output")));
        }
    }
    Ok(())
}

/// What an item of the output is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    Call,
}

/// An item of the output.
struct Item {
    kind: Kind,
    id: String,
    text: String,
    call: Option<ToolCall>,
}

impl Item {
    fn new(kind: Kind) -> Self {
        let id = match kind {
            Kind::Text => name("msg_"),
            Kind::Thinking => name("rs_"),
            Kind::Call => name("fc_"),
        };
        Self { kind, id, text: String::new(), call: None }
    }

    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Text => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            _ => json!({"type": "reasoning_text", "text": text}),
        }
    }

    /// As it is when it begins, or when it is whole.
    fn json(&self, status: &str) -> Value {
        let whole = status == "completed";
        let parts = if whole { json!([self.part(&self.text)]) } else { json!([]) };
        match (self.kind, &self.call) {
            (Kind::Call, Some(call)) => json!({
                "type": "function_call", "id": self.id, "call_id": call.id, "name": call.name, "status": status,
                "arguments": if whole { call.arguments.as_str() } else { "" },
            }),
            (Kind::Thinking, _) => {
                json!({"type": "reasoning", "id": self.id, "summary": [], "content": parts, "status": status})
            }
            _ => json!({
                "type": "message", "id": self.id, "role": "assistant", "status": status, "content": parts,
            }),
        }
    }
}

/// The answer to a request.
pub(super) struct Responses {
    /// The parts of the answer that stay the same.
    base: Value,
    /// Items so far; the last one is open.
    items: Vec<Item>,
    open: bool,
    events: usize,
    reason: &'static str,
}

impl Responses {
    pub fn new(served: &Served, asked: &Asked) -> Self {
        let o = &asked.options;
        let base = json!({
            "id": name("resp_"), "object": "response", "created_at": now(), "model": served.name, "error": null,
            "incomplete_details": null, "instructions": null, "metadata": {}, "parallel_tool_calls": true,
            "previous_response_id": null, "temperature": short(o.sampler.temperature), "top_p": short(o.sampler.top_p),
            "max_output_tokens": o.max_tokens, "tool_choice": "auto", "tools": [], "store": false, "usage": null,
            "system_fingerprint": served.fingerprint,
        });
        Self { base, items: Vec::new(), open: false, events: 0, reason: "stop" }
    }

    fn event(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["sequence_number"] = self.events.into();
        self.events += 1;
        named_event(name, data, out);
    }

    /// An event of the last item.
    fn of_item(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["output_index"] = (self.items.len() - 1).into();
        if let (None, Some(item)) = (data.get("item"), self.items.last()) {
            data["item_id"] = item.id.as_str().into();
        }
        self.event(name, data, out);
    }

    fn response(&self, status: &str, usage: Option<Usage>) -> Value {
        let mut response = self.base.clone();
        response["status"] = status.into();
        response["output"] = self.items.iter().map(|item| item.json("completed")).collect();
        if status == "incomplete" {
            response["incomplete_details"] = json!({"reason": "max_output_tokens"});
        }
        if let Some(Usage { prompt, cached, tokens, .. }) = usage {
            response["usage"] = json!({
                "input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}, "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": prompt + tokens,
            });
        }
        response
    }

    fn status(&self) -> &'static str {
        if self.reason == "length" { "incomplete" } else { "completed" }
    }

    /// Goes on in an item of this kind.
    fn enter(&mut self, item: Item, out: &mut String) {
        if self.open
            && item.kind != Kind::Call
            && self.items.last().is_some_and(|last| last.kind == item.kind)
        {
            return;
        }
        self.close(out);
        let (kind, added, part) = (item.kind, item.json("in_progress"), item.part(""));
        self.items.push(item);
        self.open = true;
        self.of_item("response.output_item.added", json!({"item": added}), out);
        if kind != Kind::Call {
            self.of_item("response.content_part.added", json!({"content_index": 0, "part": part}), out);
        }
    }

    /// Ends the item that is open.
    fn close(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.open, false) {
            return;
        }
        let Some(item) = self.items.last() else { return };
        let (kind, whole, text, part) =
            (item.kind, item.json("completed"), item.text.clone(), item.part(&item.text));
        let call = item.call.clone();
        match (kind, call) {
            (Kind::Call, Some(call)) => {
                let done = json!({"name": call.name, "arguments": call.arguments});
                self.of_item("response.function_call_arguments.done", done, out);
            }
            (Kind::Thinking, _) => {
                let done = json!({"content_index": 0, "text": text});
                self.of_item("response.reasoning_text.done", done, out);
                self.of_item("response.content_part.done", json!({"content_index": 0, "part": part}), out);
            }
            _ => {
                let done = json!({"content_index": 0, "text": text, "logprobs": []});
                self.of_item("response.output_text.done", done, out);
                self.of_item("response.content_part.done", json!({"content_index": 0, "part": part}), out);
            }
        }
        self.of_item("response.output_item.done", json!({"item": whole}), out);
    }

    fn take(&mut self, part: &Part, out: &mut String) {
        match part {
            Part::Text(text) | Part::Thinking(text) => {
                let thinks = matches!(part, Part::Thinking(_));
                self.enter(Item::new(if thinks { Kind::Thinking } else { Kind::Text }), out);
                if let Some(item) = self.items.last_mut() {
                    item.text += text;
                }
                let (name, logprobs) = match thinks {
                    true => ("response.reasoning_text.delta", None),
                    false => ("response.output_text.delta", Some(json!([]))),
                };
                let mut delta = json!({"content_index": 0, "delta": text});
                if let Some(logprobs) = logprobs {
                    delta["logprobs"] = logprobs;
                }
                self.of_item(name, delta, out);
            }
            Part::Begun { id, name } => {
                let call = ToolCall { id: id.clone(), name: name.clone(), arguments: String::new() };
                self.enter(Item { call: Some(call), ..Item::new(Kind::Call) }, out);
            }
            Part::Arguments(more) => {
                if let Some(call) = self.items.last_mut().and_then(|item| item.call.as_mut()) {
                    call.arguments += more;
                }
                self.of_item("response.function_call_arguments.delta", json!({"delta": more}), out);
            }
            Part::Call(_) => {}
        }
    }
}

impl Shape for Responses {
    fn begin(&mut self, out: &mut String) {
        for name in ["response.created", "response.in_progress"] {
            self.event(name, json!({"response": self.response("in_progress", None)}), out);
        }
    }

    fn step(&mut self, _: usize, step: &Step, out: &mut String) {
        step.parts.iter().for_each(|part| self.take(part, out));
    }

    fn ended(&mut self, _: usize, choice: &Choice, out: &mut String) {
        if self.items.is_empty() {
            self.enter(Item::new(Kind::Text), out);
        }
        self.close(out);
        self.reason = choice.reason();
    }

    fn over(&mut self, usage: Usage, out: &mut String) {
        let response = self.response(self.status(), Some(usage));
        self.event(&format!("response.{}", self.status()), json!({"response": response}), out);
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        let error = json!({"code": "server_error", "message": refusal.message, "param": null});
        self.event("error", error, out);
    }

    fn whole(&mut self, choices: &[Choice], usage: Usage) -> Value {
        let (mut events, Some(choice)) = (String::new(), choices.first()) else { return Value::Null };
        let parts = [
            Some(Part::Thinking(choice.thoughts.clone())).filter(|_| !choice.thoughts.is_empty()),
            Some(Part::Text(choice.text.clone()))
                .filter(|_| !choice.text.is_empty() || choice.calls.is_empty()),
        ];
        let calls = choice.calls.iter().cloned().flat_map(|ToolCall { id, name, arguments }| {
            [Part::Begun { id, name }, Part::Arguments(arguments)]
        });
        parts.into_iter().flatten().chain(calls).for_each(|part| self.take(&part, &mut events));
        self.reason = choice.reason();
        self.response(self.status(), Some(usage))
    }
}
