//! Conversations as the text that a chat model was trained on.
//!
//! A model's own template is a Jinja program ([`Jinja`]). Models without one get one of two common formats, or plain
//! paragraphs. Control tokens and text are kept apart, so that the text of a control token in a message stays text.

mod builtin;
mod clock;
mod conversation;
mod gguf;
mod jinja;

pub use clock::Moment;
pub use conversation::{Before, Conversation, ConversationState};
pub use jinja::Jinja;

use crate::tokenizer::files::{Settings, read_settings, settings_of};
use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};
use files::folder::Folder;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    System,
    User,
    Assistant,
}

impl Role {
    /// As templates write it.
    pub fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Message {
    pub role: Role,
    pub content: String,
}

impl Message {
    /// What `role` says.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into() }
    }
}

/// A part of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// The text of one control token.
    Control(String),
    /// All text between two control tokens. It must be encoded in one piece to give the ids that the model was
    /// trained on.
    Text(String),
}

/// How a rendered conversation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// With the start of an answer, for the model to continue.
    Prompt,
    /// With the last message.
    Message,
}

/// What a template needs besides the messages.
#[derive(Debug, Clone)]
pub struct Context<'a> {
    /// The tokenizer's begin-of-text token.
    pub bos: Option<&'a str>,
    /// The date and time that the template sees.
    pub now: Moment,
    pub ending: Ending,
}

/// The format of a model's conversations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Template {
    /// The model's own.
    Jinja(Jinja),
    /// `<|im_start|>role\ncontent<|im_end|>\n` (Qwen and many others).
    ChatMl {
        /// Whether a conversation begins with the begin-of-text token.
        bos: bool,
    },
    /// `<|start_header_id|>role<|end_header_id|>\n\ncontent<|eot_id|>`, contents trimmed.
    Llama3,
    /// A base model: paragraphs.
    Plain,
}

/// Where a model's template is, not yet read from files nor checked: that is for those who hold conversations.
#[derive(Debug)]
pub struct TemplateSource(Origin);

#[derive(Debug)]
enum Origin {
    Path(PathBuf),
    Jinja(Parts),
    Plain,
    Refused(Error),
}

/// What a [`Jinja`] is made of.
#[derive(Debug, Clone)]
struct Parts {
    place: String,
    source: String,
    variables: Vec<(String, String)>,
}

impl TemplateSource {
    /// That of the model at `path`, as [`Template::load`] finds it.
    pub fn of_path(path: &Path) -> Self {
        Self(Origin::Path(path.into()))
    }

    /// Reads and checks the template; [`Template::Plain`] where there is none.
    ///
    /// # Errors
    /// [`Error::Model`] for a file or key that cannot be used and for a template with a syntax error.
    pub fn load(&self) -> Result<Template> {
        match &self.0 {
            Origin::Path(path) => Template::load(path),
            Origin::Jinja(Parts { place, source, variables }) => {
                Jinja::new(place, source, variables.clone()).map(Template::Jinja)
            }
            Origin::Plain => Ok(Template::Plain),
            Origin::Refused(why) => Err(why.clone()),
        }
    }
}

impl Template {
    /// Loads the template of the model at `path`: `tokenizer.chat_template` in the metadata of a GGUF file; in a
    /// directory, that of another file, or a bundle, `chat_template.jinja`, or `chat_template` in
    /// `tokenizer_config.json` as one text or as a list of named ones; [`Template::Plain`] where there is none.
    ///
    /// # Errors
    /// [`Error::Model`] for a file that cannot be used and for a template with a syntax error.
    pub fn load(path: &Path) -> Result<Self> {
        match settings_of(path)? {
            Settings::Gguf(gguf) => TemplateSource::of_gguf(&gguf).load(),
            Settings::Files(folder) => Self::load_from(&folder),
        }
    }

    fn load_from(folder: &Folder) -> Result<Self> {
        const CONFIG: &str = "tokenizer_config.json";
        const OWN: &str = "chat_template.jinja";
        let mut settings = read_settings(folder, CONFIG)?.unwrap_or_default();
        let (config, path) = (folder.path(CONFIG), folder.path(OWN));
        if let Some(bytes) = folder.read(OWN, jinja::MAX_SOURCE)? {
            let source = String::from_utf8(bytes)
                .map_err(|_| Error::model(&path, "is not UTF-8; use the file published with the model"))?;
            let place = path.display().to_string();
            return Ok(Template::Jinja(Jinja::new(place, source, special_tokens(&settings))?));
        }
        let source = match settings.remove("chat_template") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(Value::Array(list)) => default_of(&list),
            Some(_) => Err(()),
        };
        let source = source.map_err(|()| {
            let what = "field `chat_template` is neither a text nor a list of {name, template}";
            Error::model(&config, format!("{what}; use the file published with the model"))
        })?;
        let Some(source) = source else { return Ok(Template::Plain) };
        let place = format!("{}: field `chat_template`", config.display());
        Ok(Template::Jinja(Jinja::new(place, source, special_tokens(&settings))?))
    }

    /// Fits the template to this tokenizer: the model's own template learns the control tokens. A chat model without
    /// one gets the format that goes with the token that ends its answers, `<|im_end|>` or `<|eot_id|>`.
    ///
    /// # Errors
    /// [`Error::Model`] for a template that does not work with the tokenizer.
    pub fn for_tokenizer(self, tokenizer: &Tokenizer) -> Result<Self> {
        match self {
            Template::Jinja(template) => Ok(Template::Jinja(template.for_tokenizer(tokenizer)?)),
            Template::Plain => Self::of_tokens(tokenizer),
            other => Ok(other),
        }
    }

    fn of_tokens(tokenizer: &Tokenizer) -> Result<Self> {
        let has = |token: &str| tokenizer.token_to_id(token).is_some();
        let ends =
            |token: &str| tokenizer.token_to_id(token).is_some_and(|id| tokenizer.eos_ids().contains(&id));
        if ends("<|im_end|>") && has("<|im_start|>") {
            let first = tokenizer.encode("", AddSpecial::Yes)?.first().copied();
            let bos = first.is_some() && first == tokenizer.bos_id();
            return Ok(Template::ChatMl { bos });
        }
        if ends("<|eot_id|>") && has("<|start_header_id|>") && has("<|end_header_id|>") {
            return Ok(Template::Llama3);
        }
        Ok(Template::Plain)
    }

    /// The conversation in parts.
    ///
    /// # Errors
    /// See [`Jinja::render`]; the other formats never fail.
    pub fn render(&self, messages: &[Message], context: &Context<'_>) -> Result<Vec<Segment>> {
        match self {
            Template::Jinja(template) => template.render(messages, context),
            other => Ok(builtin::render(other, messages, context)),
        }
    }

    /// The prompt for a question, as one text: the specification's `FormatSimple`. An empty `system` is none.
    ///
    /// ```
    /// use text::chat::Template;
    /// let template = Template::ChatMl { bos: false };
    /// let prompt = template.format_simple("You are helpful.", "Write hello world in Go")?;
    /// assert_eq!(
    ///     prompt,
    ///     "<|im_start|>system\nYou are helpful.<|im_end|>\n\
    ///      <|im_start|>user\nWrite hello world in Go<|im_end|>\n<|im_start|>assistant\n"
    /// );
    /// # Ok::<(), files::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Template::render`].
    pub fn format_simple(&self, system: &str, user: &str) -> Result<String> {
        let system = Some(system).filter(|s| !s.is_empty()).map(|s| Message::new(Role::System, s));
        let messages: Vec<_> = system.into_iter().chain([Message::new(Role::User, user)]).collect();
        self.format(&messages)
    }

    /// The prompt for the next answer, as one text: the specification's `Format`.
    ///
    /// The begin-of-text token is left out; encoding the text with [`AddSpecial::Yes`] adds it. In one text, a control
    /// token in a message looks like any other: use [`Template::encode`] to keep them apart.
    ///
    /// ```
    /// use text::chat::{Jinja, Message, Role, Template};
    /// let source = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}\
    ///               {% if add_generation_prompt %}[assistant]{% endif %}";
    /// let template = Template::Jinja(Jinja::new("example", source, vec![])?);
    /// let prompt = template.format(&[
    ///     Message::new(Role::User, "What is 2+2? "),
    ///     Message::new(Role::Assistant, "4"),
    ///     Message::new(Role::User, "And 3+3?"),
    /// ])?;
    /// assert_eq!(prompt, "[user] What is 2+2?\n[assistant] 4\n[user] And 3+3?\n[assistant]");
    /// # Ok::<(), files::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Template::render`].
    pub fn format(&self, messages: &[Message]) -> Result<String> {
        let context = Context { bos: None, now: Moment::now(), ending: Ending::Prompt };
        Ok(join(&self.render(messages, &context)?))
    }

    /// The conversation as ids. The template itself decides about the begin-of-text token.
    ///
    /// # Errors
    /// See [`Template::render`] and [`Tokenizer::encode`].
    pub fn encode(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        now: Moment,
        ending: Ending,
    ) -> Result<Vec<u32>> {
        let context = Context { bos: tokenizer.bos_token(), now, ending };
        encode_segments(tokenizer, self.render(messages, &context)?, &|| false)
    }

    /// The tokens that end an answer; those that the tokenizer lacks are left out.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let end = match self {
            Template::Jinja(template) => template.end(),
            Template::ChatMl { .. } => Some("<|im_end|>"),
            Template::Llama3 => Some("<|eot_id|>"),
            Template::Plain => None,
        };
        // Llama ends a message that calls a tool, but not the turn, with this one.
        let other = end.filter(|end| *end == "<|eot_id|>").map(|_| "<|eom_id|>");
        end.into_iter().chain(other).filter_map(|name| tokenizer.token_to_id(name)).collect()
    }

    /// A short name, the same for the same template.
    pub fn name(&self) -> String {
        match self {
            Template::Jinja(template) => format!("jinja-{:08x}", template.digest()),
            Template::ChatMl { .. } => "chatml".into(),
            Template::Llama3 => "llama3".into(),
            Template::Plain => "plain".into(),
        }
    }
}

/// The template named `default` in a list of `{name, template}`, all of them texts; an error if they are not.
fn default_of(list: &[Value]) -> std::result::Result<Option<String>, ()> {
    let mut found = None;
    for entry in list {
        let text = |field: &str| entry.get(field).and_then(Value::as_str).ok_or(());
        let (name, template) = (text("name")?, text("template")?);
        if name == "default" {
            found.get_or_insert_with(|| template.to_owned());
        }
    }
    Ok(found)
}

/// The special tokens that templates ask for by name, `bos_token` excepted: a text, or an object with `content`.
fn special_tokens(settings: &Map<String, Value>) -> Vec<(String, String)> {
    let text = |name: &&str| {
        let field = settings.get(*name)?;
        field
            .as_str()
            .or_else(|| field.get("content")?.as_str())
            .map(|text| (name.to_string(), text.to_owned()))
    };
    ["eos_token", "pad_token", "unk_token"].iter().filter_map(text).collect()
}

/// The ids of the parts; only control parts become control tokens.
fn encode_segments(
    tokenizer: &Tokenizer,
    segments: Vec<Segment>,
    stop: &dyn Fn() -> bool,
) -> Result<Vec<u32>> {
    let mut ids = vec![];
    for segment in segments {
        ids.extend(match segment {
            Segment::Control(token) => tokenizer.encode(&token, AddSpecial::No)?,
            Segment::Text(text) => tokenizer.encode_plain_until(&text, stop)?,
        });
    }
    Ok(ids)
}

/// The parts as one text.
pub fn join(segments: &[Segment]) -> String {
    segments
        .iter()
        .map(|s| match s {
            Segment::Control(text) | Segment::Text(text) => text.as_str(),
        })
        .collect()
}

/// Whether Python counts it as whitespace: four separators more than Rust.
fn is_blank(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// Segments under construction; neighbouring texts are joined.
#[derive(Default)]
struct Segments(Vec<Segment>);

impl Segments {
    fn control(&mut self, token: &str) {
        self.0.push(Segment::Control(token.into()));
    }

    fn text(&mut self, parts: &[&str]) {
        match self.0.last_mut() {
            Some(Segment::Text(text)) => parts.iter().for_each(|p| text.push_str(p)),
            _ => self.0.push(Segment::Text(parts.concat())),
        }
    }
}

#[cfg(test)]
mod tests;
