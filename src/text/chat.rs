//! Conversations as the text that a chat model was trained on.
//!
//! A model's own template is a Jinja program ([`Jinja`]). Models without one get the built-in format of their family, or
//! plain paragraphs. Control tokens and text are kept apart, so that the text of a control token in a message stays text.
//! [`Reader`] reads an answer: thoughts, text, and calls of functions.

mod builtin;
mod calls;
mod clock;
mod conversation;
#[cfg(feature = "grammar")]
mod forced;
mod form;
mod gguf;
mod jinja;
mod loading;
mod message;
mod reader;
mod variables;

pub use clock::Moment;
pub use conversation::{Before, Conversation, ConversationState};
pub use form::Form;
pub use jinja::Jinja;
pub use loading::TemplateSource;
pub use message::{Message, Role, ToolCall};
pub use reader::{Part, Reader};
pub use variables::{Tools, Variables};

use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};
use std::path::Path;

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
    /// In the last message, for the model to go on with its content.
    Continue,
}

/// What a template needs besides the messages.
#[derive(Debug, Clone)]
pub struct Context<'a> {
    /// The tokenizer's begin-of-text token.
    pub bos: Option<&'a str>,
    /// The date and time that the template sees.
    pub now: Moment,
    pub ending: Ending,
    /// Tools, and a caller's own values.
    pub variables: Option<&'a Variables>,
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
    /// `<start_of_turn>role\ncontent<end_of_turn>\n`; the system message begins the first question.
    Gemma,
    /// `<|role|>\ncontent<|end|>\n`.
    Phi3,
    /// `<|role|>content<|end|>` (Phi-4-mini).
    Phi4,
    /// `<|start_of_role|>role<|end_of_role|>content<|end_of_text|>\n`.
    Granite,
    /// A base model: paragraphs.
    Plain,
}

impl Template {
    /// Loads the template of the model at `path`, as [`TemplateSource::of_path`] finds it.
    ///
    /// # Errors
    /// Those of [`TemplateSource::load`].
    pub fn load(path: &Path) -> Result<Self> {
        TemplateSource::of_path(path).load()
    }

    /// Fits the template to this tokenizer: the model's own template learns the control tokens. A chat model without
    /// one gets the format that goes with its control tokens, such as `<|im_end|>` at the end of answers.
    ///
    /// # Errors
    /// [`Error::Model`](crate::Error::Model) for a template that does not work with the tokenizer.
    pub fn for_tokenizer(self, tokenizer: &Tokenizer) -> Result<Self> {
        match self {
            Template::Jinja(template) => match template.clone().for_tokenizer(tokenizer) {
                Ok(fitted) => Ok(Template::Jinja(fitted)),
                // Phi-4-mini's puts control tokens together from parts.
                Err(why) => Self::same_as(template, Self::of_tokens(tokenizer)?).ok_or(why),
            },
            Template::Plain => Self::of_tokens(tokenizer),
            Template::ChatMl { .. } => {
                let first = tokenizer.encode("", AddSpecial::Yes)?.first().copied();
                Ok(Template::ChatMl { bos: first.is_some() && first == tokenizer.bos_id() })
            }
            other => Ok(other),
        }
    }

    /// The built-in format, if it gives the text that `template` gives.
    fn same_as(template: Jinja, format: Self) -> Option<Self> {
        let messages = [Role::System, Role::User, Role::Assistant, Role::User]
            .map(|role| Message::new(role, format!("to {}", role.name())));
        let own = Template::Jinja(template);
        let same = |messages| Some(own.format(messages).ok()? == format.format(messages).ok()?);
        (format != Template::Plain && same(&messages)? && same(&messages[1..])?).then_some(format)
    }

    fn of_tokens(tokenizer: &Tokenizer) -> Result<Self> {
        let has = |token: &str| tokenizer.token_to_id(token).is_some();
        let ends =
            |token: &str| tokenizer.token_to_id(token).is_some_and(|id| tokenizer.eos_ids().contains(&id));
        if ends("<|im_end|>") && has("<|im_start|>") {
            return Self::ChatMl { bos: false }.for_tokenizer(tokenizer);
        }
        Ok(match () {
            () if ends("<|eot_id|>") && has("<|start_header_id|>") && has("<|end_header_id|>") => {
                Template::Llama3
            }
            // The base models have these tokens too.
            () if ends("<end_of_turn>") && has("<start_of_turn>") => Template::Gemma,
            () if has("<|user|>") && has("<|assistant|>") && has("<|end|>") => {
                if has("<s>") {
                    Template::Phi3
                } else {
                    Template::Phi4
                }
            }
            () if has("<|start_of_role|>") && has("<|end_of_role|>") && ends("<|end_of_text|>") => {
                Template::Granite
            }
            () => Template::Plain,
        })
    }

    /// The built-in format of this name, as [`Template::name`] says it.
    pub fn named(name: &str) -> Option<Self> {
        let all = [Self::ChatMl { bos: false }, Self::Llama3, Self::Gemma, Self::Phi3, Self::Phi4];
        all.into_iter().chain([Self::Granite]).find(|template| template.name() == name)
    }

    /// Whether tools in the variables of a conversation come to the model's attention.
    ///
    /// # Errors
    /// See [`Template::render`].
    pub fn takes_tools(&self, context: &Context<'_>, system: Option<&str>) -> Result<bool> {
        let system = system.map(|text| Message::new(Role::System, text));
        let messages: Vec<_> = system.into_iter().chain([Message::new(Role::User, "?")]).collect();
        let without = Context { variables: None, ..context.clone() };
        let names = context.variables.and_then(|v| v.tools.as_ref()).map_or(&[][..], Tools::names);
        let (with, without) = (self.render(&messages, context)?, self.render(&messages, &without)?);
        Ok(with != without && names.iter().all(|name| join(&with).contains(name)))
    }

    /// The conversation in parts.
    ///
    /// # Errors
    /// See [`Jinja::render`]; the other formats never fail. [`Error::Usage`] where the last message is to be continued and
    /// is not shown.
    pub fn render(&self, messages: &[Message], context: &Context<'_>) -> Result<Vec<Segment>> {
        match messages.split_last() {
            Some((last, others)) if context.ending == Ending::Continue => {
                let content = [last.content.as_str(), OPEN_END].concat();
                let marked = [others, &[Message { content, ..last.clone() }]].concat();
                let segments = self.render_whole(&marked, context)?;
                up_to_open_end(segments).ok_or_else(|| {
                    Error::Usage("the chat template leaves out the last message, so it cannot go on".into())
                })
            }
            _ => self.render_whole(messages, context),
        }
    }

    fn render_whole(&self, messages: &[Message], context: &Context<'_>) -> Result<Vec<Segment>> {
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
        let context = Context { bos: None, now: Moment::now(), ending: Ending::Prompt, variables: None };
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
        let context = Context { bos: tokenizer.bos_token(), now, ending, variables: None };
        self.encode_in(tokenizer, messages, &context)
    }

    /// [`Template::encode`] with all that a template may need.
    ///
    /// # Errors
    /// See [`Template::encode`].
    pub fn encode_in(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        context: &Context<'_>,
    ) -> Result<Vec<u32>> {
        encode_segments(tokenizer, self.render(messages, context)?, &|| false)
    }

    /// The tokens that end an answer; those that the tokenizer lacks are left out.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let end = match self {
            Template::Jinja(template) => template.end(),
            Template::ChatMl { .. } => Some("<|im_end|>"),
            Template::Llama3 => Some("<|eot_id|>"),
            Template::Gemma => Some("<end_of_turn>"),
            Template::Phi3 | Template::Phi4 => Some("<|end|>"),
            Template::Granite => Some("<|end_of_text|>"),
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
            Template::Gemma => "gemma".into(),
            Template::Phi3 => "phi3".into(),
            Template::Phi4 => "phi4".into(),
            Template::Granite => "granite".into(),
            Template::Plain => "plain".into(),
        }
    }
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

/// What stands at the end of a message that is to be continued until it is cut there, as transformers does it; without
/// the blank where a template trims.
const OPEN_END: &str = "\u{fdd0}end of the last message\u{fdd0} ";

/// What stands before [`OPEN_END`].
fn up_to_open_end(mut segments: Vec<Segment>) -> Option<Vec<Segment>> {
    let mark = OPEN_END.trim_end();
    let found = segments.iter().enumerate().rev().find_map(|(i, segment)| match segment {
        Segment::Text(text) => Some((i, text.rfind(mark)?)),
        Segment::Control(_) => None,
    });
    let (i, at) = found?;
    segments.truncate(i + 1);
    if let Some(Segment::Text(text)) = segments.last_mut() {
        let trimmed = !text[at..].starts_with(OPEN_END);
        text.truncate(at);
        if trimmed {
            text.truncate(text.trim_end_matches(is_blank).len());
        }
    }
    segments.retain(|segment| !matches!(segment, Segment::Text(text) if text.is_empty()));
    Some(segments)
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
            _ if parts.iter().all(|part| part.is_empty()) => {}
            Some(Segment::Text(text)) => parts.iter().for_each(|p| text.push_str(p)),
            _ => self.0.push(Segment::Text(parts.concat())),
        }
    }
}

#[cfg(test)]
mod tests;
