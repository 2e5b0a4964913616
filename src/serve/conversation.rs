//! Chat requests: messages and tools, rendered to a prompt. Content that this model cannot read (such as images) is
//! refused in the newest question, and replaced by a note in earlier messages.

use super::body::{read_field, type_name};
use super::error::{ApiError, ApiResult};
use super::memory::check_longest_part;
use super::state::ServerModel;
use super::tools::{ConvertTool, ToolChoice, read_tools};
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use files::error::{escape, quote};
use serde_json::{Map, Value};
use text::chat::{
    Message, OutputFormat, OutputParser, PromptEnding, RenderContext, Role, Template, TemplateKwargs,
    UtcTime, join_segments,
};

/// A conversation to be answered.
pub struct ChatRequest {
    pub messages: Vec<Message>,
    pub template_kwargs: TemplateKwargs,
    pub tool_choice: ToolChoice,
    pub ending: PromptEnding,
}

/// Prompt of a conversation, and how its answer is parsed.
pub struct ChatPrompt {
    pub ids: Vec<u32>,
    pub output_format: OutputFormat,
    pub parser: OutputParser,
    pub stop_tokens: Vec<u32>,
    pub shown_tokens: Vec<u32>,
}

/// Arguments of an earlier call as text: JSON, or any other string unchanged.
pub fn call_arguments(arguments: Option<&Value>) -> String {
    match arguments {
        None | Some(Value::Null) => "{}".into(),
        Some(Value::String(text)) if ["", "null"].contains(&text.trim()) => "{}".into(),
        Some(Value::String(text)) => text.clone(),
        Some(other) => other.to_string(),
    }
}

/// Finds the name of the function that was called with this id.
pub fn find_called_function(messages: &[Message], id: &str) -> Option<String> {
    let mut calls = messages.iter().flat_map(|message| &message.tool_calls);
    calls.find(|call| call.id == id).map(|call| call.name.clone())
}

impl ChatRequest {
    /// Messages, with tools and template variables from the request body.
    pub fn new(messages: Vec<Message>, body: &Value, convert_tool: ConvertTool) -> ApiResult<Self> {
        let (tools, tool_choice) = read_tools(body, convert_tool)?;
        let mut variables = TemplateKwargs::default();
        variables.tools = tools;
        for (name, value) in
            read_field::<Map<String, Value>>(body, "chat_template_kwargs")?.unwrap_or_default()
        {
            let set = variables.set_variable(&name, &value.to_string());
            set.map_err(|why| ApiError::for_field("chat_template_kwargs", why))?;
        }
        Ok(Self { messages, template_kwargs: variables, tool_choice, ending: PromptEnding::Prompt })
    }

    /// Template values other than the messages.
    fn template_context<'a>(
        &self,
        model: &'a ServerModel,
        variables: &'a TemplateKwargs,
    ) -> RenderContext<'a> {
        let bos = model.engine.tokenizer().bos_token();
        RenderContext { bos, now: UtcTime::now(), ending: self.ending, variables: Some(variables) }
    }

    /// Renders the messages; if the template refuses them, an equivalent arrangement of them.
    fn render_messages<T>(
        &self,
        template: &Template,
        render: impl Fn(&[Message]) -> files::Result<T>,
    ) -> ApiResult<T> {
        let why = match render(&self.messages) {
            Ok(rendered) => return Ok(rendered),
            Err(why) => why,
        };
        let others = Message::fallback_conversations(&self.messages);
        let rendered = others.iter().find_map(|messages| render(messages).ok());
        rendered.ok_or_else(|| ApiError::from_template("messages", template, &why))
    }

    /// Renders the prompt as text.
    pub fn render_prompt(&self, model: &ServerModel) -> ApiResult<String> {
        let template = model.engine.template().map_err(|e| ApiError::from_engine(&e))?;
        let variables = self.template_kwargs.clone().with_defaults(&model.template_kwargs);
        let context = self.template_context(model, &variables);
        self.render_messages(template, |messages| {
            Ok(join_segments(&template.render_messages(messages, &context)?))
        })
    }

    /// Tokenizes the prompt.
    pub fn build_prompt(&self, model: &ServerModel) -> ApiResult<ChatPrompt> {
        let template = model.engine.template().map_err(|e| ApiError::from_engine(&e))?;
        let variables = self.template_kwargs.clone().with_defaults(&model.template_kwargs);
        let context = self.template_context(model, &variables);
        let tokenizer = model.engine.tokenizer();
        self.check_length(&model.engine)?;
        self.check_tools(template, &context)?;
        let encode = |messages: &[Message]| template.encode_with_context(tokenizer, messages, &context);
        let ids = self.render_messages(template, encode)?;
        let form = OutputFormat::for_template(template, tokenizer);
        let form = if self.template_kwargs.tools.is_some() { form } else { form.without_tools() };
        let mut reader = OutputParser::for_prompt(form, tokenizer, &ids, &self.messages)
            .with_tools(self.template_kwargs.tools.as_ref());
        if let (PromptEnding::Continue, Some(last)) = (self.ending, self.messages.last()) {
            // Brings the parser to the end of the message that is continued.
            reader.push(&last.content);
        }
        let (stop_tokens, shown_tokens) = (template.stop_tokens(tokenizer), form.marker_token_ids(tokenizer));
        Ok(ChatPrompt { ids, output_format: form, parser: reader, stop_tokens, shown_tokens })
    }

    /// Refuses prompts that cannot fit, before they are tokenized.
    fn check_length(&self, engine: &Engine) -> ApiResult<()> {
        let o = engine.options();
        let least: usize = self.messages.iter().map(|m| engine.tokenizer().min_tokens(&m.content)).sum();
        if least > o.max_seq_len && o.eviction.policy == Policy::None {
            return Err(ApiError::prompt_too_long("messages", least, o.max_seq_len));
        }
        self.messages.iter().try_for_each(|m| check_longest_part(engine.tokenizer(), &m.content, "messages"))
    }

    fn check_tools(&self, template: &Template, context: &RenderContext<'_>) -> ApiResult<()> {
        if self.template_kwargs.tools.is_none() {
            return Ok(());
        }
        let context = RenderContext { ending: PromptEnding::Prompt, ..context.clone() };
        let system = self.messages.iter().find(|m| m.role == Role::System).map(|m| m.content.as_str());
        // Some templates refuse system messages.
        let takes = template.takes_tools(&context, system).or_else(|_| template.takes_tools(&context, None));
        if takes.map_err(|e| ApiError::from_template("tools", template, &e))? {
            return Ok(());
        }
        let why = "this model's chat template has no place for tools; omit them, or start the server with a \
                   --chat-template that supports tools";
        Err(ApiError::for_field("tools", why))
    }
}

/// Position of a message's content in its conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// History, which is accepted as it is.
    Earlier,
    /// The newest question, which must be readable.
    Newest,
}

/// Classifies messages by their roles. The newest question is the last run of user messages and the system messages
/// among them.
pub fn classify_turns(roles: &[Role]) -> Vec<Turn> {
    let end = roles.iter().rposition(|role| *role == Role::User).map_or(0, |last| last + 1);
    let asks = |role: &&Role| matches!(role, Role::User | Role::System);
    let start = end - roles[..end].iter().rev().take_while(asks).count();
    let is_newest = |(i, role): (usize, &Role)| *role == Role::User && (start..end).contains(&i);
    let turn = |message| if is_newest(message) { Turn::Newest } else { Turn::Earlier };
    roles.iter().enumerate().map(turn).collect()
}

/// Note in place of content that cannot be read, such as `[image left out]`.
pub fn omission_note(kind: &str) -> String {
    let name = ["input_", "output_"].iter().find_map(|before| kind.strip_prefix(before)).unwrap_or(kind);
    let name = ["_url", "_file"].iter().find_map(|after| name.strip_suffix(after)).unwrap_or(name);
    format!("[{} left out]", escape(name))
}

/// Text of a message's content, which is a string or an array of parts.
pub fn content_text(value: Option<Value>, place: &str, turn: Turn) -> ApiResult<String> {
    match value {
        None | Some(Value::Null) if turn == Turn::Earlier => Ok(String::new()),
        None | Some(Value::Null) => Err(ApiError::for_field(place, "is missing; add a string")),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().enumerate().map(|(i, part)| match part {
                Value::String(text) => Ok(text.clone()),
                _ => part_text(part, &format!("{place}[{i}]"), turn),
            });
            texts.collect()
        }
        Some(part @ Value::Object(_)) if turn == Turn::Earlier => part_text(&part, place, turn),
        Some(other) => {
            let why = format!("is {}; use a string or an array of parts", type_name(&other));
            Err(ApiError::for_field(place, why))
        }
    }
}

/// Text of one content part.
pub fn part_text(part: &Value, place: &str, turn: Turn) -> ApiResult<String> {
    let wrong = |field: &str, why: String| ApiError::for_field(format!("{place}{field}"), why);
    if !part.is_object() {
        return Err(wrong("", format!("is {}; use an object", type_name(part))));
    }
    let string = |field: &str| match &part[field] {
        Value::String(text) => Ok(text.as_str()),
        Value::Null if turn == Turn::Earlier => Ok(""),
        Value::Null => Err(wrong(&format!(".{field}"), "is missing; add a string".into())),
        other => Err(wrong(&format!(".{field}"), format!("is {}; use a string", type_name(other)))),
    };
    match string("type")? {
        "" => Ok(find_text(part).unwrap_or_else(|| part.to_string())),
        "text" | "input_text" | "output_text" => Ok(string("text")?.into()),
        "thinking" | "redacted_thinking" | "reasoning" => Ok(String::new()),
        other => match find_text(part) {
            Some(text) => Ok(text),
            None if turn == Turn::Earlier => Ok(omission_note(other)),
            None => Err(wrong(".type", format!("is {}; this model reads only text", quote(other)))),
        },
    }
}

/// Finds the text of a document, a tool result or a refusal.
fn find_text(part: &Value) -> Option<String> {
    let string = |value: &Value| value.as_str().map(str::to_owned);
    let source = &part["source"];
    let data = Some(&source["data"]).filter(|_| source["type"] == "text");
    string(&part["text"])
        .or_else(|| string(&part["refusal"]))
        .or_else(|| data.and_then(string))
        .or_else(|| join_texts(&source["content"]))
        .or_else(|| join_texts(&part["content"]))
}

/// Concatenates the texts of parts; `None` if there are none.
fn join_texts(parts: &Value) -> Option<String> {
    let text = |part: &Value| part.as_str().or_else(|| part.get("text")?.as_str()).map(str::to_owned);
    match parts {
        Value::Array(all) => Some(all.iter().filter_map(text).collect::<String>()).filter(|t| !t.is_empty()),
        one => text(one),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_cannot_be_read_is_refused_in_the_newest_question_and_else_left_out() {
        use Role::{Assistant, System, Tool, User};
        for (roles, newest) in [
            (&[System, User][..], &[1][..]),
            (&[User, Assistant, User, System, User], &[2, 4]),
            (&[User, Assistant, User, Assistant, Tool], &[2]),
            (&[Assistant], &[]),
        ] {
            let turns = classify_turns(roles).into_iter().enumerate();
            let found: Vec<_> = turns.filter(|(_, turn)| *turn == Turn::Newest).map(|(i, _)| i).collect();
            assert_eq!(found, newest, "{roles:?}");
        }
        let document = |source: Value| json!({"type": "document", "source": source});
        let found = json!({"type": "search_result", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        for (part, earlier, newest) in [
            (json!({"type": "text", "text": "a"}), "a", Some("a")),
            (json!("a"), "a", Some("a")),
            (json!({"type": "text", "text": null}), "", None),
            (json!({"text": "a"}), "a", None),
            (json!({"stdout": "a"}), r#"{"stdout":"a"}"#, None),
            (json!({"type": "image_url", "image_url": {"url": "data:"}}), "[image left out]", None),
            (json!({"type": "input_image", "file_id": "x"}), "[image left out]", None),
            (json!({"type": "input_audio"}), "[audio left out]", None),
            (document(json!({"type": "base64", "data": "AA"})), "[document left out]", None),
            (document(json!({"type": "text", "data": "a"})), "a", Some("a")),
            (document(json!({"type": "content", "content": "a"})), "a", Some("a")),
            (found, "ab", Some("ab")),
            (json!({"type": "refusal", "refusal": "no"}), "no", Some("no")),
            (
                json!({"type": "web_search_tool_result", "content": [{"url": "x"}]}),
                "[web_search_tool_result left out]",
                None,
            ),
            (json!({"type": "\u{1b}[2J"}), "[\\u{1b}[2J left out]", None),
        ] {
            let list = json!([part]);
            assert_eq!(content_text(Some(list.clone()), "c", Turn::Earlier), Ok(earlier.into()), "{list}");
            let said = content_text(Some(list.clone()), "c", Turn::Newest);
            match newest {
                Some(text) => assert_eq!(said, Ok(text.into()), "{list}"),
                None => {
                    assert!(said.is_err_and(|e| e.param.is_some_and(|p| p.starts_with("c[0]."))), "{list}")
                }
            }
        }
    }
}
