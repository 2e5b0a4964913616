//! Messages and tools of a request, as the prompt of a chat model.

use super::budget::check_part;
use super::content::{Turn, content, left_out, newest};
use super::fields::Fields;
use super::hub::Served;
use super::refusal::Refusal;
use super::tools::{self, ReadsTool, Wanted};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use files::error::quoted;
use serde_json::Value;
use text::chat::{
    Context, Ending, Message, Moment, OutputFormat, OutputParser, Role, Template, TemplateKwargs, ToolCall,
    join,
};

type Result<T> = std::result::Result<T, Refusal>;

/// A conversation that wants an answer.
pub struct Conversation {
    pub messages: Vec<Message>,
    pub variables: TemplateKwargs,
    pub wanted: Wanted,
    pub ending: Ending,
}

/// Its prompt, and how the answer is read.
pub struct Prompt {
    pub ids: Vec<u32>,
    pub form: OutputFormat,
    pub reader: OutputParser,
    pub stop_tokens: Vec<u32>,
    pub shown_tokens: Vec<u32>,
}

/// The list of messages of a request.
pub fn list<'a>(fields: &Fields<'a>) -> Result<&'a [Value]> {
    let all =
        fields.list("messages")?.ok_or_else(|| fields.refuse("messages", "is missing; give an array"))?;
    match all {
        [] => Err(fields.refuse("messages", "is empty; give one message at least")),
        all => Ok(all),
    }
}

/// Who speaks, by the word of either of OpenAI's APIs.
pub fn role(of: &Fields<'_>) -> Result<Role> {
    match of.needed_text("role")? {
        "system" | "developer" => Ok(Role::System),
        "user" => Ok(Role::User),
        "assistant" => Ok(Role::Assistant),
        "tool" | "function" => Ok(Role::Tool),
        other => {
            let why = format!("is {}; use system, developer, user, assistant or tool", quoted(other));
            Err(of.refuse("role", why))
        }
    }
}

/// The `messages` of a chat.
fn messages(fields: &Fields<'_>) -> Result<Vec<Message>> {
    let place = fields.name("messages");
    let all = list(fields)?.iter().enumerate().map(|(i, of)| Fields::of(of, &format!("{place}[{i}]")));
    let all = all.collect::<Result<Vec<_>>>()?;
    let roles = all.iter().map(role).collect::<Result<Vec<_>>>()?;
    let newest = newest(&roles);
    let one = |(i, of)| message(of, (roles[i], Turn::of(&newest, i, roles[i])));
    all.iter().enumerate().map(one).collect()
}

fn message(of: &Fields<'_>, (role, turn): (Role, Turn)) -> Result<Message> {
    if of.get("content").is_none() && turn == Turn::Newest {
        return Err(of.refuse("content", "is missing; give a string"));
    }
    let text = |field: &str| of.get(field).and_then(Value::as_str).map(str::to_owned);
    let mut message = Message::new(role, content(of.get("content"), &of.name("content"), turn)?);
    message.reasoning = text("reasoning_content").or_else(|| text("reasoning"));
    message.tool_call_id = of.text("tool_call_id")?.map(str::to_owned);
    message.name = of.text("name")?.map(str::to_owned);
    for (i, call) in of.list("tool_calls")?.unwrap_or_default().iter().enumerate() {
        let call = Fields::of(call, &of.name(&format!("tool_calls[{i}]")))?;
        let id = call.text("id")?.map_or_else(|| format!("call_{i}"), str::to_owned);
        let (name, arguments) = match (call.object("function")?, call.object("custom")?) {
            (Some(function), _) => {
                (function.needed_text("name")?.to_owned(), arguments(&function, "arguments"))
            }
            (None, Some(custom)) => (custom.needed_text("name")?.to_owned(), arguments(&custom, "input")),
            (None, None) => return Err(call.refuse("function", "is missing; give an object")),
        };
        message.tool_calls.push(ToolCall { id, name, arguments });
    }
    // As calls were once written.
    if let (true, Some(function)) = (message.tool_calls.is_empty(), of.object("function_call")?) {
        let (name, arguments) = (function.needed_text("name")?.to_owned(), arguments(&function, "arguments"));
        message.tool_calls.push(ToolCall { id: "call_0".into(), name, arguments });
    }
    if message.content.is_empty() && role == Role::Assistant {
        let audio = of.get("audio").map(|_| left_out("audio"));
        message.content = text("refusal").or(audio).unwrap_or_default();
    }
    Ok(message)
}

/// The arguments of an earlier call, as they are: JSON in a text or as it is, or any other text.
pub fn arguments(call: &Fields<'_>, field: &str) -> String {
    match call.get(field) {
        None => "{}".to_owned(),
        Some(Value::String(text)) if ["", "null"].contains(&text.trim()) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// How the prompt of a chat ends.
fn ending(fields: &Fields<'_>) -> Result<Ending> {
    let continues = fields.flag("continue_final_message")?.unwrap_or(false);
    match (continues, fields.flag("add_generation_prompt")?) {
        (true, Some(true)) => {
            let why = "goes on with the last message, and `add_generation_prompt` begins another; set that to false";
            Err(fields.refuse("continue_final_message", why))
        }
        (true, _) => Ok(Ending::Continue),
        (false, Some(false)) => Ok(Ending::Message),
        (false, _) => Ok(Ending::Prompt),
    }
}

/// `chat_template_kwargs`.
fn variables(fields: &Fields<'_>) -> Result<TemplateKwargs> {
    let mut variables = TemplateKwargs::default();
    if let Some(own) = fields.object("chat_template_kwargs")? {
        for (name, value) in own.entries() {
            let set = variables.set(name, &value.to_string());
            set.map_err(|why| fields.refuse("chat_template_kwargs", why))?;
        }
    }
    Ok(variables)
}

/// What a template gets besides messages.
fn context<'a>(served: &'a Served, variables: &'a TemplateKwargs, ending: Ending) -> Context<'a> {
    let bos = served.engine.tokenizer().bos_token();
    Context { bos, now: Moment::now(), ending, variables: Some(variables) }
}

impl Conversation {
    /// With what the fields of a request say beside its messages; `tool` brings a tool to the form of chat completions.
    pub fn new(messages: Vec<Message>, fields: &Fields<'_>, tool: ReadsTool) -> Result<Self> {
        let (tools, wanted) = tools::read(fields, tool)?;
        let mut variables = variables(fields)?;
        variables.tools = tools;
        Ok(Self { messages, variables, wanted, ending: Ending::Prompt })
    }

    /// Of chat completions.
    pub fn of_chat(fields: &Fields<'_>) -> Result<Self> {
        let of = Self::new(messages(fields)?, fields, tools::nested)?;
        let ending = ending(fields)?;
        if ending == Ending::Continue && of.messages.last().is_some_and(|last| !last.tool_calls.is_empty()) {
            let why = "the last message calls functions, so it cannot go on; send their results";
            return Err(fields.refuse("continue_final_message", why));
        }
        Ok(Self { ending, ..of })
    }

    /// Renders the messages, or where the template refuses them some that say the same.
    fn render<T>(&self, template: &Template, render: impl Fn(&[Message]) -> files::Result<T>) -> Result<T> {
        let why = match render(&self.messages) {
            Ok(rendered) => return Ok(rendered),
            Err(why) => why,
        };
        let milder = Message::milder(&self.messages);
        let rendered = milder.iter().find_map(|messages| render(messages).ok());
        rendered.ok_or_else(|| Refusal::of_template("messages", template, &why))
    }

    /// The prompt as a text.
    pub fn text(&self, served: &Served) -> Result<String> {
        let template = served.engine.template().map_err(|e| Refusal::of_run(&e))?;
        let variables = self.variables(served);
        let context = context(served, &variables, self.ending);
        self.render(template, |messages| Ok(join(&template.render(messages, &context)?)))
    }

    /// What its template gets: what the request says, and else the server's flags.
    pub fn variables(&self, served: &Served) -> TemplateKwargs {
        self.variables.clone().or(&served.variables)
    }

    /// The prompt for the answer.
    pub fn prompt(&self, served: &Served) -> Result<Prompt> {
        let engine = &served.engine;
        let template = engine.template().map_err(|e| Refusal::of_run(&e))?;
        let tokenizer = engine.tokenizer();
        self.check_length(engine)?;
        let variables = self.variables(served);
        let context = context(served, &variables, self.ending);
        self.check_tools(template, &context)?;
        let ids = self.render(template, |messages| template.encode_in(tokenizer, messages, &context))?;
        let form = OutputFormat::of(template, tokenizer);
        let form = if self.variables.tools.is_some() { form } else { form.without_tools() };
        const END: usize = 16;
        let end = tokenizer.decode_with_special(&ids[ids.len().saturating_sub(END)..]);
        let calls = self.messages.iter().map(|m| m.tool_calls.len()).sum();
        let mut reader = OutputParser::new(form, &end).with_calls_from(calls);
        if let (Ending::Continue, Some(last)) = (self.ending, self.messages.last()) {
            // It reads on where the message ends.
            reader.push(&last.content);
        }
        Ok(Prompt {
            ids,
            form,
            reader,
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
        self.messages.iter().try_for_each(|m| check_part(engine.tokenizer(), &m.content, "messages"))
    }

    fn check_tools(&self, template: &Template, context: &Context<'_>) -> Result<()> {
        if self.variables.tools.is_none() {
            return Ok(());
        }
        let context = Context { ending: Ending::Prompt, ..context.clone() };
        let system = self.messages.iter().find(|m| m.role == Role::System).map(|m| m.content.as_str());
        // Some refuse system messages.
        let takes = template.takes_tools(&context, system).or_else(|_| template.takes_tools(&context, None));
        match takes.map_err(|e| Refusal::of_template("tools", template, &e))? {
            true => Ok(()),
            false => Err(Refusal::field(
                "tools",
                "this model's chat template has no place for tools; leave it out, or start the server with a \
                 --chat-template that has one",
            )),
        }
    }
}

/// The JSON schema that a format stands for, if it is one.
pub fn schema(format: &Fields<'_>) -> Result<Option<String>> {
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
        false => Err(format.refuse("type", "this server follows no grammars; use text")),
    }
}
