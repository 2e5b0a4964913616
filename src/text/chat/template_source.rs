//! Finds and reads the chat templates of a model.

use super::{Jinja, Template, jinja};
use crate::tokenizer::files::{SettingsSource, find_settings, read_settings};
use crate::{Error, Result};
use files::model_dir::ModelDir;
use files::source::gguf::Gguf;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// The source of a model's chat templates. They are read and checked only when a conversation needs them.
#[derive(Debug)]
pub struct TemplateSource(Origin);

#[derive(Debug)]
enum Origin {
    Path(PathBuf),
    Metadata(Result<ModelTemplates>),
}

/// The name of the template for conversations with tools.
const WITH_TOOLS: &str = "tool_use";
/// The names of the templates that a model may have besides the default one.
const NAMES: [&str; 2] = [WITH_TOOLS, "rag"];

/// The file and field of a template, for messages, and its text.
type TemplateText = (String, String);

/// The templates of a model, and the variables that they get.
#[derive(Debug, Clone, Default)]
struct ModelTemplates {
    /// The default template.
    default: Option<TemplateText>,
    /// The other templates, by name.
    named: Vec<(String, TemplateText)>,
    /// Names and texts of special tokens.
    variables: Vec<(String, String)>,
}

const TEMPLATE: &str = "tokenizer.chat_template";
const TOKENS: &str = "tokenizer.ggml.tokens";
/// The special tokens that templates use by name, except `bos_token`, and the keys of their ids in a GGUF file.
const TOKEN_KEYS: [(&str, &str); 3] = [
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
];

impl TemplateSource {
    /// The templates of the model at `path`. In a GGUF file they are `tokenizer.chat_template` in the metadata; in a
    /// directory or a bundle `chat_template.jinja` with the files of `additional_chat_templates`, or `chat_template` in
    /// `tokenizer_config.json` as one text or as a list of named ones.
    pub fn from_path(path: &Path) -> Self {
        Self(Origin::Path(path.into()))
    }

    /// The templates of a GGUF file, whose header is not needed afterwards.
    pub fn from_gguf(gguf: &Gguf) -> Self {
        Self(Origin::Metadata(read_metadata(gguf)))
    }

    /// Reads and checks the template; [`Template::PLAIN`] if there is none.
    ///
    /// # Errors
    /// [`Error::Model`] for a file or key that cannot be used and for a template with a syntax error.
    pub fn load_template(&self) -> Result<Template> {
        let parts = self.read_templates()?;
        let Some(default) = &parts.default else { return Ok(Template::PLAIN) };
        let with_tools =
            parts.find_named(WITH_TOOLS).map(|source| parts.compile_template(source)).transpose()?;
        Ok(Template::Jinja(parts.compile_template(default)?.and_with_tools(with_tools)))
    }

    /// The model's template of this name, for all conversations. `None` if there is none, or if `name` is "default" and
    /// there is no other template.
    ///
    /// # Errors
    /// Fails where [`TemplateSource::load_template`] does.
    pub fn load_named(&self, name: &str) -> Result<Option<Template>> {
        let parts = self.read_templates()?;
        let default = parts.default.as_ref().filter(|_| name == "default" && !parts.named.is_empty());
        parts
            .find_named(name)
            .or(default)
            .map(|source| parts.compile_template(source).map(Template::Jinja))
            .transpose()
    }

    /// A template in place of the model's: the text `source`, from the file `place`. It gets the model's special
    /// tokens.
    ///
    /// # Errors
    /// Fails where [`TemplateSource::load_template`] does.
    pub fn load_override(&self, place: &str, source: &str) -> Result<Template> {
        Jinja::new(place, source, self.read_templates()?.variables.clone()).map(Template::Jinja)
    }

    fn read_templates(&self) -> Result<Cow<'_, ModelTemplates>> {
        match &self.0 {
            Origin::Path(path) => match find_settings(path)? {
                SettingsSource::Gguf(gguf) => read_metadata(&gguf).map(Cow::Owned),
                SettingsSource::Files(folder) => read_files(&folder).map(Cow::Owned),
            },
            Origin::Metadata(parts) => parts.as_ref().map(Cow::Borrowed).map_err(Clone::clone),
        }
    }
}

impl ModelTemplates {
    fn find_named(&self, name: &str) -> Option<&TemplateText> {
        self.named.iter().find(|(other, _)| other == name).map(|(_, source)| source)
    }

    fn compile_template(&self, (place, source): &TemplateText) -> Result<Jinja> {
        Jinja::new(place, source, self.variables.clone())
    }
}

impl Template {
    /// Loads the template of the model at `path`, as [`TemplateSource::from_path`] finds it.
    ///
    /// # Errors
    /// Fails where [`TemplateSource::load_template`] does.
    pub fn load_from_path(path: &Path) -> Result<Self> {
        TemplateSource::from_path(path).load_template()
    }
}

/// Reads the templates of a directory or a bundle.
fn read_files(folder: &ModelDir) -> Result<ModelTemplates> {
    const CONFIG: &str = "tokenizer_config.json";
    const OWN: &str = "chat_template.jinja";
    let mut settings = read_settings(folder, CONFIG)?.unwrap_or_default();
    let variables = special_tokens(&settings);
    let config = folder.path(CONFIG);
    if let Some(default) = read_source(folder, OWN)? {
        let mut named = Vec::new();
        for name in NAMES {
            let source = read_source(folder, &format!("additional_chat_templates/{name}.jinja"))?;
            named.extend(source.map(|source| (name.to_owned(), source)));
        }
        return Ok(ModelTemplates { default: Some(default), named, variables });
    }
    let templates = match settings.remove("chat_template") {
        None | Some(Value::Null) => Ok(vec![]),
        Some(Value::String(text)) => Ok(vec![("default".to_owned(), text)]),
        Some(Value::Array(list)) => list.iter().map(name_and_text).collect::<Option<_>>().ok_or(()),
        Some(_) => Err(()),
    };
    let templates: Vec<(String, String)> = templates.map_err(|()| {
        let what = "field `chat_template` is neither a text nor a list of {name, template}";
        Error::model(&config, format!("{what}; use the file published with the model"))
    })?;
    let place = format!("{}: field `chat_template`", config.display());
    let placed = |(name, source): (String, String)| (name, (place.clone(), source));
    let (default, named): (Vec<_>, Vec<_>) =
        templates.into_iter().map(placed).partition(|(name, _)| name == "default");
    Ok(ModelTemplates { default: default.into_iter().next().map(|(_, source)| source), named, variables })
}

fn read_source(folder: &ModelDir, name: &str) -> Result<Option<TemplateText>> {
    let Some(bytes) = folder.read_file(name, jinja::MAX_SOURCE)? else { return Ok(None) };
    let path = folder.path(name);
    let text = String::from_utf8(bytes)
        .map_err(|_| Error::model(&path, "is not UTF-8; use the file published with the model"))?;
    Ok(Some((path.display().to_string(), text)))
}

/// The name and text of an entry `{name, template}`.
fn name_and_text(entry: &Value) -> Option<(String, String)> {
    let text = |field: &str| entry.get(field)?.as_str().map(str::to_owned);
    Some((text("name")?, text("template")?))
}

/// The texts of the special tokens that templates use by name: each a text, or an object with `content`.
fn special_tokens(settings: &Map<String, Value>) -> Vec<(String, String)> {
    let text = |name: &str| {
        let field = settings.get(name)?;
        let text = field.as_str().or_else(|| field.get("content")?.as_str())?;
        Some((name.to_owned(), text.to_owned()))
    };
    TOKEN_KEYS.into_iter().filter_map(|(name, _)| text(name)).collect()
}

/// Reads the templates of a GGUF file.
fn read_metadata(gguf: &Gguf) -> Result<ModelTemplates> {
    let refused = |why: String| Error::model(gguf.path(), why);
    let metadata = gguf.metadata();
    let source = metadata.get_str(TEMPLATE).map_err(refused)?;
    let tokens = metadata.get_strings(TOKENS).map_err(refused)?;
    let mut variables = vec![];
    for (name, key) in TOKEN_KEYS {
        let id = metadata.get_u64(key).map_err(refused)?.and_then(|id| usize::try_from(id).ok());
        if let Some(text) = tokens.zip(id).and_then(|(tokens, id)| tokens.get(id)) {
            variables.push((name.to_owned(), text.to_owned()));
        }
    }
    let placed = |key: &str, source: &str| (format!("{}: {key}", gguf.path().display()), source.to_owned());
    let mut named = vec![];
    for name in NAMES {
        let key = format!("{TEMPLATE}.{name}");
        let source = metadata.get_str(&key).map_err(refused)?;
        named.extend(source.map(|source| (name.to_owned(), placed(&key, source))));
    }
    Ok(ModelTemplates { default: source.map(|source| placed(TEMPLATE, source)), named, variables })
}
