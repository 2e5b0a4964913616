//! Messages and tools of a request, as the prompt of a chat model.

use super::fields::{Fields, kind};
use super::hub::Served;
use super::refusal::Refusal;
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use files::error::quoted;
use serde_json::Value;
use text::chat::{
    Context, Ending, Form, Message, Moment, Reader, Role, Template, ToolCall, Tools, Variables,
};

type Result<T> = std::result::Result<T, Refusal>;

/// A conversation that wants an answer.
pub(super) struct Conversation {
    pub messages: Vec<Message>,
    pub variables: Variables,
    pub wanted: Wanted,
}

/// Whether functions may be called, or must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wanted {
    Auto,
    Never,
    Any,
    One(String),
}

/// Its prompt, and how the answer is read.
pub(super) struct Prompt {
    pub ids: Vec<u32>,
    pub form: Form,
    pub reader: Reader,
    pub stop_tokens: Vec<u32>,
    pub shown_tokens: Vec<u32>,
}

/// The text of a content: a string, or parts of text. `kinds` are the types that parts may have.
pub(super) fn content(value: Option<&Value>, place: &str, kinds: &[&str]) -> Result<String> {
    match value {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for (i, part) in parts.iter().enumerate() {
                let part = Fields::of(part, &format!("{place}[{i}]"))?;
                match part.needed_text("type")? {
                    of if kinds.contains(&of) => text += part.needed_text("text")?,
                    other => {
                        let why = format!("is {other:?}; this model reads text alone");
                        return Err(part.refuse("type", why));
                    }
                }
            }
            Ok(text)
        }
        Some(other) => {
            Err(Refusal::field(place, format!("is {}; use a string or an array of parts", kind(other))))
        }
    }
}

/// The `messages` of a chat.
pub(super) fn messages(fields: &Fields<'_>) -> Result<Vec<Message>> {
    let all =
        fields.list("messages")?.ok_or_else(|| fields.refuse("messages", "is missing; give an array"))?;
    if all.is_empty() {
        return Err(fields.refuse("messages", "is empty; give one message at least"));
    }
    let place = fields.name("messages");
    all.iter().enumerate().map(|(i, of)| message(&Fields::of(of, &format!("{place}[{i}]"))?)).collect()
}

fn message(of: &Fields<'_>) -> Result<Message> {
    let role = match of.needed_text("role")? {
        "system" | "developer" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" | "function" => Role::Tool,
        other => {
            let why = format!("is {other:?}; use system, developer, user, assistant or tool");
            return Err(of.refuse("role", why));
        }
    };
    let text = content(of.get("content"), &of.name("content"), &["text", "input_text", "output_text"])?;
    let mut message = Message::new(role, text);
    message.reasoning = of.text("reasoning_content")?.map(str::to_owned);
    message.tool_call_id = of.text("tool_call_id")?.map(str::to_owned);
    message.name = of.text("name")?.map(str::to_owned);
    for (i, call) in of.list("tool_calls")?.unwrap_or_default().iter().enumerate() {
        let call = Fields::of(call, &of.name(&format!("tool_calls[{i}]")))?;
        let Some(function) = call.object("function")? else {
            return Err(call.refuse("function", "is missing; give an object"));
        };
        let name = function.needed_text("name")?.to_owned();
        let arguments = arguments(&function)?;
        let id = call.text("id")?.map_or_else(|| format!("call_{i}"), str::to_owned);
        message.tool_calls.push(ToolCall { id, name, arguments });
    }
    if of.get("content").is_none() && role != Role::Assistant {
        return Err(of.refuse("content", "is missing; give a string"));
    }
    Ok(message)
}

/// The arguments of a call: JSON in a text, or as it is.
pub(super) fn arguments(function: &Fields<'_>) -> Result<String> {
    let text = match function.get("arguments") {
        None => "{}".to_owned(),
        Some(Value::String(text)) if text.trim().is_empty() => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(other) => {
            return Err(function.refuse("arguments", format!("is {}; use JSON in a string", kind(other))));
        }
    };
    match serde_json::from_str::<serde_json::Map<String, Value>>(&text) {
        Ok(_) => Ok(text),
        Err(_) => Err(function.refuse("arguments", "is no JSON object")),
    }
}

/// `tools` and `chat_template_kwargs`, where `tool` brings a tool to the form of chat completions.
fn variables(fields: &Fields<'_>, tool: fn(&Value) -> Value) -> Result<Variables> {
    let mut variables = Variables::default();
    if let Some(own) = fields.object("chat_template_kwargs")? {
        for (name, value) in own.entries() {
            let set = variables.set(name, &value.to_string());
            set.map_err(|why| fields.refuse("chat_template_kwargs", why))?;
        }
    }
    let tools = match fields.list("tools")? {
        Some(all) if !all.is_empty() => Value::Array(all.iter().map(tool).collect()),
        _ => return Ok(variables),
    };
    let parsed = Tools::parse(&tools.to_string()).map_err(|why| fields.refuse("tools", why))?;
    variables.tools = Some(parsed);
    Ok(variables)
}

/// A word, Anthropic's object with one, or what names a function in either API.
fn wanted(fields: &Fields<'_>, tools: Option<&Tools>) -> Result<Wanted> {
    let Some(choice) = fields.get("tool_choice") else { return Ok(Wanted::Auto) };
    let name = || choice.get("name").or_else(|| choice.get("function")?.get("name"))?.as_str();
    let wanted = match (choice.as_str().or_else(|| choice.get("type")?.as_str()), name()) {
        (Some("auto"), _) => return Ok(Wanted::Auto),
        (Some("none"), _) => return Ok(Wanted::Never),
        (Some("required" | "any"), _) => Wanted::Any,
        (Some("function" | "tool"), Some(name)) => Wanted::One(name.into()),
        _ => {
            let why = "is none that is known; use \"auto\", \"none\", \"required\" or the name of a function";
            return Err(fields.refuse("tool_choice", why));
        }
    };
    let why = match (tools, &wanted) {
        _ if cfg!(not(feature = "grammar")) => {
            "this program was built without grammars, so the model itself decides what it calls; build it with \
             --features grammar, or use \"auto\" or \"none\""
                .into()
        }
        (None, _) => "asks for a call, and there are no `tools`; give them".into(),
        (Some(tools), Wanted::One(name)) if !tools.names().contains(name) => {
            format!("asks for {}, which is not one of `tools`; add it", quoted(name))
        }
        _ => return Ok(wanted),
    };
    Err(fields.refuse("tool_choice", why))
}

/// What a template gets besides messages.
pub(super) fn context<'a>(served: &'a Served, variables: &'a Variables, ending: Ending) -> Context<'a> {
    let bos = served.engine.tokenizer().bos_token();
    Context { bos, now: Moment::now(), ending, variables: Some(variables) }
}

impl Conversation {
    /// With what the fields of a request say beside its messages; `tool` brings a tool to the form of chat completions.
    pub fn new(messages: Vec<Message>, fields: &Fields<'_>, tool: fn(&Value) -> Value) -> Result<Self> {
        let mut variables = variables(fields, tool)?;
        let wanted = wanted(fields, variables.tools.as_ref())?;
        variables.tools = variables.tools.filter(|_| wanted != Wanted::Never);
        Ok(Self { messages, variables, wanted })
    }

    /// What its template gets: what the request says, and else the server's flags.
    pub fn variables(&self, served: &Served) -> Variables {
        self.variables.clone().or(&served.variables)
    }

    /// The prompt for the answer.
    pub fn prompt(&self, served: &Served) -> Result<Prompt> {
        let engine = &served.engine;
        let template = engine.template().map_err(|e| Refusal::of_run(&e))?;
        let tokenizer = engine.tokenizer();
        self.check_length(engine)?;
        let variables = self.variables(served);
        let context = context(served, &variables, Ending::Prompt);
        self.check_tools(template, &context)?;
        let ids = template.encode_in(tokenizer, &self.messages, &context);
        let ids = ids.map_err(|e| Refusal { param: Some("messages".into()), ..Refusal::of_input(&e) })?;
        let form = Form::of(template, tokenizer);
        let form = if self.variables.tools.is_some() { form } else { form.without_tools() };
        const END: usize = 16;
        let end = tokenizer.decode_with_special(&ids[ids.len().saturating_sub(END)..]);
        let calls = self.messages.iter().map(|m| m.tool_calls.len()).sum();
        Ok(Prompt {
            ids,
            form,
            reader: Reader::new(form, &end).with_calls_from(calls),
            stop_tokens: template.stop_tokens(tokenizer),
            shown_tokens: form.shown(tokenizer),
        })
    }

    /// Refuses what cannot fit before time is spent on it.
    fn check_length(&self, engine: &Engine) -> Result<()> {
        let o = engine.options();
        let least: usize = self.messages.iter().map(|m| engine.tokenizer().least_tokens(&m.content)).sum();
        if least > o.max_seq_len && o.eviction.policy == Policy::None {
            return Err(Refusal::too_long("messages", least, o.max_seq_len));
        }
        Ok(())
    }

    fn check_tools(&self, template: &Template, context: &Context<'_>) -> Result<()> {
        let system = self.messages.iter().find(|m| m.role == Role::System).map(|m| m.content.as_str());
        let takes = || template.takes_tools(context, system).map_err(|e| Refusal::of_input(&e));
        match self.variables.tools.is_some() && !takes()? {
            true => Err(Refusal::field(
                "tools",
                "this model's chat template has no place for tools; leave it out",
            )),
            false => Ok(()),
        }
    }
}

/// The JSON schema that a format stands for, if it is one.
pub(super) fn schema(format: &Fields<'_>) -> Result<Option<String>> {
    let schema = match format.needed_text("type")? {
        "text" => return Ok(None),
        "json_object" => match format.get("schema") {
            Some(schema) => schema.to_string(),
            None => "{\"type\":\"object\"}".to_owned(),
        },
        "json_schema" => {
            let of = format.object("json_schema")?;
            let schema = of.as_ref().and_then(|of| of.get("schema")).or_else(|| format.get("schema"));
            let missing = || format.refuse("json_schema.schema", "is missing; give a JSON schema");
            schema.ok_or_else(missing)?.to_string()
        }
        other => {
            let why = format!("is {other:?}; use text, json_object or json_schema");
            return Err(format.refuse("type", why));
        }
    };
    match cfg!(feature = "grammar") {
        true => Ok(Some(schema)),
        false => Err(format.refuse(
            "type",
            "this program was built without grammars; build it with --features grammar, or use text",
        )),
    }
}
