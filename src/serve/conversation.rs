//! Messages and tools of a request, as the prompt of a chat model.

use super::body::read_field;
use super::error::{ApiError, ApiResult};
use super::memory::check_longest_part;
use super::state::LoadedModel;
use super::tools::{ConvertTool, ToolChoice, read_tools};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use serde_json::{Map, Value};
use text::chat::{Context, Ending, Form, Message, Moment, Reader, Role, Template, Variables, join};

/// Tokens at the end of a prompt that tell how its answer is read.
const PROMPT_END: usize = 16;

/// A conversation that wants an answer.
pub struct ChatRequest {
    pub messages: Vec<Message>,
    pub variables: Variables,
    pub tool_choice: ToolChoice,
    pub ending: Ending,
}

/// Its prompt, and how the answer is read.
pub struct ChatPrompt {
    pub ids: Vec<u32>,
    pub form: Form,
    pub reader: Reader,
    pub stop_tokens: Vec<u32>,
    pub shown_tokens: Vec<u32>,
}

/// The arguments of an earlier call, as they are: JSON in a text or as it is, or any other text.
pub fn arguments_of_call(arguments: Option<&Value>) -> String {
    match arguments {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) if ["", "null"].contains(&text.trim()) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// The name of the function that was called with this id.
pub fn called_function(messages: &[Message], id: &str) -> Option<String> {
    let mut calls = messages.iter().flat_map(|message| &message.tool_calls);
    calls.find(|call| call.id == id).map(|call| call.name.clone())
}

/// Values that a template gets besides messages.
fn template_context<'a>(model: &'a LoadedModel, variables: &'a Variables, ending: Ending) -> Context<'a> {
    let bos = model.engine.tokenizer().bos_token();
    Context { bos, now: Moment::now(), ending, variables: Some(variables) }
}

impl ChatRequest {
    /// Messages, with what the body of their request says beside them.
    pub fn new(messages: Vec<Message>, body: &Value, convert_tool: ConvertTool) -> ApiResult<Self> {
        let (tools, tool_choice) = read_tools(body, convert_tool)?;
        let mut variables = Variables::default();
        variables.tools = tools;
        for (name, value) in
            read_field::<Map<String, Value>>(body, "chat_template_kwargs")?.unwrap_or_default()
        {
            let set = variables.set(&name, &value.to_string());
            set.map_err(|why| ApiError::for_field("chat_template_kwargs", why))?;
        }
        Ok(Self { messages, variables, tool_choice, ending: Ending::Prompt })
    }

    /// Renders the messages, or where the template refuses them some that say the same.
    fn render_messages<T>(
        &self,
        template: &Template,
        render: impl Fn(&[Message]) -> files::Result<T>,
    ) -> ApiResult<T> {
        let why = match render(&self.messages) {
            Ok(rendered) => return Ok(rendered),
            Err(why) => why,
        };
        let milder = Message::milder(&self.messages);
        let rendered = milder.iter().find_map(|messages| render(messages).ok());
        rendered.ok_or_else(|| ApiError::from_template("messages", template, &why))
    }

    /// The prompt as a text.
    pub fn to_text(&self, model: &LoadedModel) -> ApiResult<String> {
        let template = model.engine.template().map_err(|e| ApiError::from_engine(&e))?;
        let variables = self.variables.clone().or(&model.variables);
        let context = template_context(model, &variables, self.ending);
        self.render_messages(template, |messages| Ok(join(&template.render(messages, &context)?)))
    }

    /// The prompt for the answer.
    pub fn to_prompt(&self, model: &LoadedModel) -> ApiResult<ChatPrompt> {
        let template = model.engine.template().map_err(|e| ApiError::from_engine(&e))?;
        let tokenizer = model.engine.tokenizer();
        self.check_length(&model.engine)?;
        let variables = self.variables.clone().or(&model.variables);
        let context = template_context(model, &variables, self.ending);
        self.check_tools(template, &context)?;
        let encode = |messages: &[Message]| template.encode_in(tokenizer, messages, &context);
        let ids = self.render_messages(template, encode)?;
        let form = Form::of(template, tokenizer);
        let form = if self.variables.tools.is_some() { form } else { form.without_tools() };
        let end = tokenizer.decode_with_special(&ids[ids.len().saturating_sub(PROMPT_END)..]);
        let calls = self.messages.iter().map(|m| m.tool_calls.len()).sum();
        let mut reader = Reader::new(form, &end).with_calls_from(calls);
        if let (Ending::Continue, Some(last)) = (self.ending, self.messages.last()) {
            // It reads on where the message ends.
            reader.push(&last.content);
        }
        let (stop_tokens, shown_tokens) = (template.stop_tokens(tokenizer), form.shown(tokenizer));
        Ok(ChatPrompt { ids, form, reader, stop_tokens, shown_tokens })
    }

    /// Refuses what cannot fit before time is spent on it.
    fn check_length(&self, engine: &Engine) -> ApiResult<()> {
        let o = engine.options();
        let least: usize = self.messages.iter().map(|m| engine.tokenizer().least_tokens(&m.content)).sum();
        if least > o.max_seq_len && o.eviction.policy == Policy::None {
            return Err(ApiError::prompt_too_long("messages", least, o.max_seq_len));
        }
        self.messages.iter().try_for_each(|m| check_longest_part(engine.tokenizer(), &m.content, "messages"))
    }

    fn check_tools(&self, template: &Template, context: &Context<'_>) -> ApiResult<()> {
        if self.variables.tools.is_none() {
            return Ok(());
        }
        let context = Context { ending: Ending::Prompt, ..context.clone() };
        let system = self.messages.iter().find(|m| m.role == Role::System).map(|m| m.content.as_str());
        // Some refuse system messages.
        let takes = template.takes_tools(&context, system).or_else(|_| template.takes_tools(&context, None));
        if takes.map_err(|e| ApiError::from_template("tools", template, &e))? {
            return Ok(());
        }
        let why = "this model's chat template has no place for tools; leave it out, or start the server with a \
                   --chat-template that has one";
        Err(ApiError::for_field("tools", why))
    }
}
