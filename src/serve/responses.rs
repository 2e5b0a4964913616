//! OpenAI's `/v1/responses`, as far as it needs no memory of earlier requests.

use super::answer::{Choice, Shape, Step, Usage, named_event};
use super::asked::Asked;
use super::content::{Turn, content, left_out, newest};
use super::conversation::{Conversation, arguments, role};
use super::facts::short;
use super::fields::{Fields, kind};
use super::hub::{Served, name, now};
use super::refusal::Refusal;
use super::tools;
use super::whole::Whole;
use serde_json::{Value, json};
use text::chat::{Message, Part, Role, ToolCall};

type Result<T> = std::result::Result<T, Refusal>;

/// Refuses what was stored, as nothing is.
fn refuse_stored(fields: &Fields<'_>, field: &str) -> Refusal {
    fields.refuse(
        field,
        "names what was stored, and nothing is kept here; use `store: false` and send all items in `input`",
    )
}

/// Instructions, input and tools of a request.
pub fn conversation(fields: &Fields<'_>) -> Result<Conversation> {
    let stored = ["previous_response_id", "conversation", "prompt"];
    if let Some(field) = stored.into_iter().find(|field| fields.get(field).is_some()) {
        return Err(refuse_stored(fields, field));
    }
    let mut messages = Vec::new();
    if let Some(text) = fields.text("instructions")? {
        messages.push(Message::new(Role::System, text));
    }
    match fields.get("input") {
        None => return Err(fields.refuse("input", "is missing; give a string")),
        Some(Value::String(text)) => messages.push(Message::new(Role::User, text.as_str())),
        Some(Value::Array(items)) => {
            let items = items.iter().enumerate().map(|(i, of)| Fields::of(of, &format!("input[{i}]")));
            let items = items.collect::<Result<Vec<_>>>()?;
            // What is no message is a call, its result, or a thought.
            let role = |item: &Fields<'_>| role(item).unwrap_or(Role::Assistant);
            let newest = newest(&items.iter().map(role).collect::<Vec<_>>());
            for (i, item) in items.iter().enumerate() {
                read(item, Turn::of(&newest, i, role(item)), &mut messages)?;
            }
        }
        Some(other) => {
            return Err(fields.refuse("input", format!("is {}; use a string or an array", kind(other))));
        }
    }
    messages.retain(|m| m.role != Role::Assistant || !m.content.is_empty() || !m.tool_calls.is_empty());
    if messages.is_empty() {
        return Err(fields.refuse("input", "is empty; give a message"));
    }
    fields.object("text")?;
    if fields.whole("top_logprobs", 0..=20)?.is_some_and(|n| n > 0) {
        return Err(fields.refuse("top_logprobs", "is not followed here; use /v1/chat/completions"));
    }
    Conversation::new(messages, fields, tools::flat)
}

/// An item of the input.
fn read(item: &Fields<'_>, turn: Turn, messages: &mut Vec<Message>) -> Result<()> {
    let stored = item.get("type").is_none() && item.get("role").is_none() && item.get("id").is_some();
    let call_id = || -> Result<String> {
        Ok(item.text("call_id")?.or(item.text("id")?).unwrap_or_default().to_owned())
    };
    match item.text("type")?.unwrap_or("message") {
        "item_reference" => return Err(refuse_stored(item, "type")),
        _ if stored => return Err(refuse_stored(item, "id")),
        "message" => {
            let role = role(item)?;
            if item.get("content").is_none() && turn == Turn::Newest {
                return Err(item.refuse("content", "is missing; give a string"));
            }
            let text = content(item.get("content"), &item.name("content"), turn)?;
            match messages.last_mut().filter(|last| role == Role::Assistant && is_thought(last)) {
                Some(thought) => thought.content = text,
                None => messages.push(Message::new(role, text)),
            }
        }
        "reasoning" => {
            let list =
                |field: &str| item.get(field).filter(|of| of.as_array().is_some_and(|of| !of.is_empty()));
            let thought = content(list("content").or(list("summary")), &item.name("content"), Turn::Earlier)?;
            if !thought.is_empty() {
                answer(messages).reasoning.get_or_insert_default().push_str(&thought);
            }
        }
        kind if kind.ends_with("_output") && item.get("output").is_some() => {
            let text = content(item.get("output"), &item.name("output"), Turn::Earlier)?;
            let id = call_id()?;
            let name = messages.iter().flat_map(|m| &m.tool_calls).find(|call| call.id == id);
            let name = name.map(|call| call.name.clone());
            messages.push(Message { tool_call_id: Some(id), name, ..Message::new(Role::Tool, text) });
        }
        "function_call" | "custom_tool_call" | "mcp_call" => {
            let field = if item.get("input").is_some() { "input" } else { "arguments" };
            let (id, name) = (call_id()?, item.needed_text("name")?.to_owned());
            let call = ToolCall { id, name, arguments: arguments(item, field) };
            answer(messages).tool_calls.push(call.clone());
            // A call that a server has answered.
            messages.extend(item.text("output")?.map(|output| Message::result(&call, output)));
        }
        kind @ ("local_shell_call" | "shell_call" | "computer_call" | "apply_patch_call") => {
            let field = if item.get("operation").is_some() { "operation" } else { "action" };
            let (id, name) = (call_id()?, kind.trim_end_matches("_call").to_owned());
            answer(messages).tool_calls.push(ToolCall { id, name, arguments: arguments(item, field) });
        }
        kind => {
            let note = left_out(kind.strip_suffix("_generation_call").unwrap_or(kind));
            let content = &mut answer(messages).content;
            *content = [content.as_str(), if content.is_empty() { "" } else { "\n" }, &note].concat();
        }
    }
    Ok(())
}

/// Whether an answer was only thought about so far.
fn is_thought(message: &Message) -> bool {
    message.reasoning.is_some() && message.content.is_empty() && message.tool_calls.is_empty()
}

/// The answer that the next item belongs to.
fn answer(messages: &mut Vec<Message>) -> &mut Message {
    if messages.last().is_none_or(|last| last.role != Role::Assistant) {
        messages.push(Message::new(Role::Assistant, ""));
    }
    let last = messages.len() - 1;
    &mut messages[last]
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
    /// Of what has come so far.
    status: &'static str,
}

impl Item {
    fn new(kind: Kind) -> Self {
        let id = match kind {
            Kind::Text => name("msg_"),
            Kind::Thinking => name("rs_"),
            Kind::Call => name("fc_"),
        };
        Self { kind, id, text: String::new(), call: None, status: "in_progress" }
    }

    fn part(&self, text: &str) -> Value {
        match self.kind {
            Kind::Text => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
            _ => json!({"type": "reasoning_text", "text": text}),
        }
    }

    /// As it is when it begins, or when it has ended.
    fn json(&self) -> Value {
        let status = self.status;
        let ended = status != "in_progress";
        let parts = if ended { json!([self.part(&self.text)]) } else { json!([]) };
        match (self.kind, &self.call) {
            (Kind::Call, Some(call)) => json!({
                "type": "function_call", "id": self.id, "call_id": call.id, "name": call.name, "status": status,
                "arguments": if ended { call.arguments.as_str() } else { "" },
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

/// Fields of a request that its answer has as they were asked.
const ECHOED: [&str; 15] = [
    "instructions",
    "max_tool_calls",
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "store",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
];

/// The answer to a request.
pub struct Responses {
    /// The parts of the answer that stay the same.
    base: Value,
    /// Items so far; the last one is open.
    items: Vec<Item>,
    open: bool,
    events: usize,
    reason: &'static str,
}

impl Responses {
    /// For a request with these fields, which it says again.
    pub fn new(served: &Served, asked: &Asked, fields: &Fields<'_>) -> Self {
        let o = &asked.options;
        let mut base = json!({
            "id": name("resp_"), "object": "response", "created_at": now(), "model": served.name, "error": null,
            "incomplete_details": null, "instructions": null, "metadata": {}, "parallel_tool_calls": true,
            "previous_response_id": null, "temperature": short(o.sampler.temperature), "top_p": short(o.sampler.top_p),
            "max_output_tokens": o.max_tokens, "tool_choice": "auto", "tools": [], "store": false, "usage": null,
            "background": false, "reasoning": {"effort": null, "summary": null}, "text": {"format": {"type": "text"}},
            "truncation": "disabled", "system_fingerprint": served.fingerprint,
        });
        for field in ECHOED {
            if let Some(value) = fields.get(field) {
                base[field] = value.clone();
            }
        }
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
        response["output"] = self.items.iter().map(Item::json).collect();
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
        self.close("completed", out);
        let (kind, added, part) = (item.kind, item.json(), item.part(""));
        self.items.push(item);
        self.open = true;
        self.of_item("response.output_item.added", json!({"item": added}), out);
        if kind != Kind::Call {
            self.of_item("response.content_part.added", json!({"content_index": 0, "part": part}), out);
        }
    }

    /// Ends the item that is open.
    fn close(&mut self, status: &'static str, out: &mut String) {
        if !std::mem::replace(&mut self.open, false) {
            return;
        }
        let Some(item) = self.items.last_mut() else { return };
        item.status = status;
        let (kind, whole, text, part) = (item.kind, item.json(), item.text.clone(), item.part(&item.text));
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
            Part::ToolCallStart { id, name } => {
                let call = ToolCall { id: id.clone(), name: name.clone(), arguments: String::new() };
                self.enter(Item { call: Some(call), ..Item::new(Kind::Call) }, out);
            }
            Part::ToolCallDelta(more) => {
                if let Some(call) = self.items.last_mut().and_then(|item| item.call.as_mut()) {
                    call.arguments += more;
                }
                self.of_item("response.function_call_arguments.delta", json!({"delta": more}), out);
            }
            Part::Call(_) | Part::Cut { .. } => {}
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
        self.reason = choice.reason();
        self.close(self.status(), out);
    }

    fn over(&mut self, usage: Usage, out: &mut String) {
        let response = self.response(self.status(), Some(usage));
        self.event(&format!("response.{}", self.status()), json!({"response": response}), out);
    }

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        let error = json!({"code": "server_error", "message": refusal.message, "param": null});
        self.event("error", error, out);
    }

    fn whole(&mut self, choices: &mut [Choice], usage: Usage, out: &mut Whole) {
        let Some(choice) = choices.first_mut() else { return out.value(&Value::Null) };
        self.reason = choice.reason();
        let status = self.status();
        let response = self.response(status, Some(usage));
        let text = |kind: Kind, text: &mut String| Item { text: std::mem::take(text), ..Item::new(kind) };
        let (thinks, says) =
            (!choice.thoughts.is_empty(), !choice.text.is_empty() || choice.calls.is_empty());
        let call = |call| Item { call: Some(call), ..Item::new(Kind::Call) };
        out.object_with(&response, "output", |out| {
            out.begin(b'[');
            let thought = thinks.then(|| text(Kind::Thinking, &mut choice.thoughts));
            let said = says.then(|| text(Kind::Text, &mut choice.text));
            let items = thought.into_iter().chain(said).chain(choice.calls.drain(..).map(call));
            let mut items = items.map(|item| Item { status: "completed", ..item }).peekable();
            while let Some(mut item) = items.next() {
                if items.peek().is_none() {
                    item.status = status;
                }
                out.value(&item.json());
            }
            out.end(b']');
        });
    }
}
