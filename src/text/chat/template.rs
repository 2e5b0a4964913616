//! The chat template of a model.

use super::builtin::{self, BuiltIn};
use super::{
    Jinja, Message, OPEN_END, PromptEnding, RenderContext, Role, Segment, Tools, UtcTime, encode_segments,
    join_segments, truncate_at_mark,
};
use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};

/// The chat template of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Template {
    /// The model's own template.
    Jinja(Jinja),
    BuiltIn(&'static BuiltIn),
}

impl Template {
    /// The template of a base model: paragraphs.
    pub const PLAIN: Self = Self::BuiltIn(&builtin::PLAIN);

    /// Fits the template to this tokenizer: the model's own template learns the control tokens. A chat model without
    /// one gets the built-in one that goes with its control tokens, such as `<|im_end|>` at the end of answers.
    ///
    /// # Errors
    /// [`Error::Model`](crate::Error::Model) for a template that does not work with the tokenizer.
    pub fn for_tokenizer(self, tokenizer: &Tokenizer) -> Result<Self> {
        match self {
            Template::Jinja(template) => match template.clone().for_tokenizer(tokenizer) {
                Ok(fitted) => Ok(Template::Jinja(fitted)),
                // Phi-4-mini's builds control tokens from parts.
                Err(why) => {
                    let built_in = Self::select_built_in(tokenizer)?;
                    built_in.renders_like(&Template::Jinja(template)).then_some(built_in).ok_or(why)
                }
            },
            Self::PLAIN => Self::select_built_in(tokenizer),
            Template::BuiltIn(template) if *template == builtin::CHATML => {
                let first = tokenizer.encode("", AddSpecial::Yes)?.first().copied();
                let adds_bos = first.is_some() && first == tokenizer.bos_id();
                Ok(Template::BuiltIn(if adds_bos { &builtin::CHATML_AFTER_BOS } else { &builtin::CHATML }))
            }
            other => Ok(other),
        }
    }

    /// True if this built-in template, other than the plain one, renders the same text as another template.
    fn renders_like(&self, other: &Self) -> bool {
        let messages = [Role::System, Role::User, Role::Assistant, Role::User]
            .map(|role| Message::new(role, format!("to {}", role.name())));
        let same = |messages| matches!((self.format_prompt(messages), other.format_prompt(messages)), (Ok(a), Ok(b)) if a == b);
        *self != Self::PLAIN && same(&messages) && same(&messages[1..])
    }

    /// The built-in template that goes with the control tokens of a vocabulary.
    fn select_built_in(tokenizer: &Tokenizer) -> Result<Self> {
        let has = |token: &str| tokenizer.token_to_id(token).is_some();
        let ends =
            |token: &str| tokenizer.token_to_id(token).is_some_and(|id| tokenizer.eos_ids().contains(&id));
        if ends("<|im_end|>") && has("<|im_start|>") {
            return Self::BuiltIn(&builtin::CHATML).for_tokenizer(tokenizer);
        }
        Ok(Self::BuiltIn(if ends("<|eot_id|>") && has("<|start_header_id|>") && has("<|end_header_id|>") {
            &builtin::LLAMA3
        } else if ends("<end_of_turn>") && has("<start_of_turn>") {
            // The base models have these tokens too.
            &builtin::GEMMA
        } else if has("<|user|>") && has("<|assistant|>") && has("<|end|>") {
            if has("<s>") { &builtin::PHI3 } else { &builtin::PHI4 }
        } else if has("<|start_of_role|>") && has("<|end_of_role|>") && ends("<|end_of_text|>") {
            &builtin::GRANITE
        } else {
            &builtin::PLAIN
        }))
    }

    /// The built-in template with this [`Template::name`].
    pub fn built_in_named(name: &str) -> Option<Self> {
        builtin::NAMED.into_iter().find(|template| template.name == name).map(Self::BuiltIn)
    }

    /// True if the template renders the tools of a conversation.
    ///
    /// # Errors
    /// See [`Template::render_messages`].
    pub fn takes_tools(&self, context: &RenderContext<'_>, system: Option<&str>) -> Result<bool> {
        let system = system.map(|text| Message::new(Role::System, text));
        let messages: Vec<_> = system.into_iter().chain([Message::new(Role::User, "?")]).collect();
        let without = RenderContext { variables: None, ..context.clone() };
        let names = context.variables.and_then(|v| v.tools.as_ref()).map_or(&[][..], Tools::function_names);
        let (with, without) =
            (self.render_messages(&messages, context)?, self.render_messages(&messages, &without)?);
        Ok(with != without && names.iter().all(|name| join_segments(&with).contains(name)))
    }

    /// Renders the conversation to segments.
    ///
    /// # Errors
    /// See [`Jinja::render_messages`]. [`Error::Usage`] if the last message is to be continued and the template leaves
    /// it out.
    pub fn render_messages(&self, messages: &[Message], context: &RenderContext<'_>) -> Result<Vec<Segment>> {
        match messages.split_last() {
            Some((last, others)) if context.ending == PromptEnding::Continue => {
                let content = [last.content.as_str(), OPEN_END].concat();
                let marked = [others, &[Message { content, ..last.clone() }]].concat();
                let segments = self.render_whole(&marked, context)?;
                truncate_at_mark(segments).ok_or_else(|| {
                    Error::Usage(
                        "the chat template leaves out the last message, so it cannot be continued".into(),
                    )
                })
            }
            _ => self.render_whole(messages, context),
        }
    }

    fn render_whole(&self, messages: &[Message], context: &RenderContext<'_>) -> Result<Vec<Segment>> {
        match self {
            Template::Jinja(template) => template.render_messages(messages, context),
            Template::BuiltIn(template) => {
                Jinja::built_in(template, context.bos).render_messages(messages, context)
            }
        }
    }

    /// Renders the prompt for one question: the specification's `FormatSimple`. An empty `system` adds no system
    /// message.
    ///
    /// ```
    /// use text::chat::Template;
    /// let template = Template::built_in_named("chatml").expect("is built in");
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
    /// See [`Template::render_messages`].
    pub fn format_simple(&self, system: &str, user: &str) -> Result<String> {
        let system = Some(system).filter(|s| !s.is_empty()).map(|s| Message::new(Role::System, s));
        let messages: Vec<_> = system.into_iter().chain([Message::new(Role::User, user)]).collect();
        self.format_prompt(&messages)
    }

    /// Renders the prompt for the next answer: the specification's `Format`.
    ///
    /// The begin-of-text token is left out; encoding the text with [`AddSpecial::Yes`] adds it. In one text, a control
    /// token in a message looks like any other: use [`Template::encode_messages`] to keep them apart.
    ///
    /// ```
    /// use text::chat::{Jinja, Message, Role, Template};
    /// let source = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}\
    ///               {% if add_generation_prompt %}[assistant]{% endif %}";
    /// let template = Template::Jinja(Jinja::new("example", source, vec![])?);
    /// let prompt = template.format_prompt(&[
    ///     Message::new(Role::User, "What is 2+2? "),
    ///     Message::new(Role::Assistant, "4"),
    ///     Message::new(Role::User, "And 3+3?"),
    /// ])?;
    /// assert_eq!(prompt, "[user] What is 2+2?\n[assistant] 4\n[user] And 3+3?\n[assistant]");
    /// # Ok::<(), files::Error>(())
    /// ```
    ///
    /// # Errors
    /// See [`Template::render_messages`].
    pub fn format_prompt(&self, messages: &[Message]) -> Result<String> {
        let context =
            RenderContext { bos: None, now: UtcTime::now(), ending: PromptEnding::Prompt, variables: None };
        Ok(join_segments(&self.render_messages(messages, &context)?))
    }

    /// Renders and encodes the conversation. The template decides about the begin-of-text token.
    ///
    /// # Errors
    /// See [`Template::render_messages`] and [`Tokenizer::encode`].
    pub fn encode_messages(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        now: UtcTime,
        ending: PromptEnding,
    ) -> Result<Vec<u32>> {
        let context = RenderContext { bos: tokenizer.bos_token(), now, ending, variables: None };
        self.encode_with_context(tokenizer, messages, &context)
    }

    /// [`Template::encode_messages`] with all the inputs of a template.
    ///
    /// # Errors
    /// See [`Template::encode_messages`].
    pub fn encode_with_context(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        context: &RenderContext<'_>,
    ) -> Result<Vec<u32>> {
        encode_segments(tokenizer, self.render_messages(messages, context)?, &|| false)
    }

    /// The tokens that end an answer, except those that the tokenizer lacks.
    pub fn stop_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let end = match self {
            Template::Jinja(template) => template.end_token(),
            Template::BuiltIn(template) => template.end,
        };
        let has = |text| matches!(self, Template::Jinja(jinja) if jinja.has_text(text));
        // A message with a tool call ends otherwise, and does not end the turn.
        let ends = match end {
            Some("<|eot_id|>") => &["<|eot_id|>", "<|eom_id|>"],
            Some("<turn|>") => &["<turn|>", "<|tool_response>"],
            // Of gpt-oss: `<|end|>` is followed by another message.
            Some("<|end|>") if has("<|return|>") => &["<|return|>", "<|call|>"],
            _ => end.as_slice(),
        };
        ends.iter().filter_map(|name| tokenizer.token_to_id(name)).collect()
    }

    /// A short name that identifies the template.
    pub fn name(&self) -> String {
        match self {
            Template::Jinja(template) => format!("jinja-{:08x}", template.compute_checksum()),
            Template::BuiltIn(template) => template.name.into(),
        }
    }
}
