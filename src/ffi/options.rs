//! Options as JSON objects whose fields are flags of the program: `{"top_k": 5}` is `--top-k 5`.

use crate::cli::args::{CompletionArgs, ModelArgs, PoolingArgs, TemplateChoiceArgs, one_line};
use crate::run::embed::EmbedOptions;
use clap::Parser;
use files::error::quote;
use files::{Error, Result};
use serde_json::{Map, Value};
use text::chat::{TemplateKwargs, Tools};

/// Flags for loading a model.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true, disable_version_flag = true)]
pub struct LoadFlags {
    #[command(flatten)]
    pub model: ModelArgs,
    #[command(flatten)]
    pub template: TemplateChoiceArgs,
}

/// Flags of one text.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true, disable_version_flag = true)]
struct TextFlags {
    #[command(flatten)]
    completion: CompletionArgs,
}

/// Flags of an answer, which by default is not cut off.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true, disable_version_flag = true)]
#[command(mut_arg("num_tokens", |arg| arg.default_value("-1")))]
struct AnswerFlags {
    #[command(flatten)]
    completion: CompletionArgs,
}

/// Flags of embeddings.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true, disable_version_flag = true)]
struct EmbedFlags {
    #[command(flatten)]
    pooling: PoolingArgs,
}

/// Flags of a text that are about the program's output.
const OUTPUT_FLAGS: [&str; 5] = ["format", "logprobs", "quiet", "trace", "verbose"];

impl LoadFlags {
    /// Parses options for a model at this path.
    pub fn parse_options(options: &str, model: &str) -> Result<Self> {
        let mut fields = parse_object(options)?;
        fields.insert("model_path".into(), model.into());
        parse_flags(fields)
    }
}

/// Parses the options of a text.
pub fn parse_text_options(options: Map<String, Value>) -> Result<CompletionArgs> {
    parse_flags::<TextFlags>(without_output(options)?).map(|flags| flags.completion)
}

/// Parses the options of an answer.
pub fn parse_answer_options(options: Map<String, Value>) -> Result<CompletionArgs> {
    parse_flags::<AnswerFlags>(without_output(options)?).map(|flags| flags.completion)
}

/// Parses the options of embeddings.
pub fn parse_embed_options(options: &str) -> Result<EmbedOptions> {
    parse_flags::<EmbedFlags>(parse_object(options)?).map(|flags| flags.pooling.embed_options())
}

/// The options, with those that switch the program's own output off.
fn without_output(mut options: Map<String, Value>) -> Result<Map<String, Value>> {
    if let Some(name) = OUTPUT_FLAGS.iter().find(|name| options.contains_key(**name)) {
        return Err(Error::Usage(format!("option `{name}` is not for the library; remove it")));
    }
    options.insert("quiet".into(), true.into());
    Ok(options)
}

/// Takes the fields of a conversation's template out of its options: `tools` and `chat_template_kwargs`.
pub fn take_template_kwargs(options: &mut Map<String, Value>) -> Result<TemplateKwargs> {
    let wrong = |field: &str, why: String| Error::Usage(format!("option `{field}`: {why}"));
    let mut kwargs = TemplateKwargs::default();
    if let Some(tools) = options.remove("tools") {
        kwargs.tools = Some(Tools::parse_json(&tools.to_string()).map_err(|why| wrong("tools", why))?);
    }
    match options.remove("chat_template_kwargs") {
        None => {}
        Some(Value::Object(variables)) => {
            for (name, value) in variables {
                let set = kwargs.set_variable(&name, &value.to_string());
                set.map_err(|why| wrong("chat_template_kwargs", why))?;
            }
        }
        Some(_) => return Err(wrong("chat_template_kwargs", "is not an object".into())),
    }
    Ok(kwargs)
}

/// Parses the text of options; an empty one is an empty object.
pub fn parse_object(options: &str) -> Result<Map<String, Value>> {
    if options.is_empty() {
        return Ok(Map::new());
    }
    serde_json::from_str(options).map_err(|e| {
        Error::Usage(format!("`options` is not a JSON object: {e}; give for example {{\"seed\": 1}}"))
    })
}

/// Parses fields as flags.
fn parse_flags<T: Parser>(fields: Map<String, Value>) -> Result<T> {
    let mut flags = Vec::new();
    for (name, value) in fields {
        if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
            return Err(Error::Usage(format!("option {} is unknown; use names of flags", quote(&name))));
        }
        let flag = format!("--{}", name.replace('_', "-"));
        let with_value = |value: Value| match value {
            Value::String(text) => format!("{flag}={text}"),
            other => format!("{flag}={other}"),
        };
        match value {
            Value::Null | Value::Bool(false) => {}
            Value::Bool(true) => flags.push(flag),
            Value::Array(all) => flags.extend(all.into_iter().map(with_value)),
            one => flags.push(with_value(one)),
        }
    }
    T::try_parse_from(flags).map_err(|e| Error::Usage(one_line(&e, None)))
}
