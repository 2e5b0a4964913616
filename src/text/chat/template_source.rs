//! Finds and reads the chat templates of a model.

use super::{Jinja, Template, jinja};
use crate::tokenizer::files::{SettingsSource, read_settings, settings_of};
use crate::{Error, Result};
use files::folder::Folder;
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
    Metadata(Result<Parts>),
}

/// The name of the template for conversations with tools.
const WITH_TOOLS: &str = "tool_use";
/// The names of the templates that a model may have besides the default one.
const NAMES: [&str; 2] = [WITH_TOOLS, "rag"];

/// The file and field of a template, for messages, and its text.
type Source = (String, String);

/// The templates of a model, and the variables that they get.
#[derive(Debug, Clone, Default)]
struct Parts {
    /// The default template.
    default: Option<Source>,
    /// The other templates, by name.
    named: Vec<(String, Source)>,
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
    pub fn of_path(path: &Path) -> Self {
        Self(Origin::Path(path.into()))
    }

    /// The templates of a GGUF file, whose header is not needed afterwards.
    pub fn of_gguf(gguf: &Gguf) -> Self {
        Self(Origin::Metadata(read_metadata(gguf)))
    }

    /// Reads and checks the template; [`Template::PLAIN`] if there is none.
    ///
    /// # Errors
    /// [`Error::Model`] for a file or key that cannot be used and for a template with a syntax error.
    pub fn load(&self) -> Result<Template> {
        let parts = self.parts()?;
        let Some(default) = &parts.default else { return Ok(Template::PLAIN) };
        let with_tools = parts.named(WITH_TOOLS).map(|source| parts.compile(source)).transpose()?;
        Ok(Template::Jinja(parts.compile(default)?.and_with_tools(with_tools)))
    }

    /// The model's template of this name, for all conversations. `None` if there is none, or if `name` is "default" and
    /// there is no other template.
    ///
    /// # Errors
    /// As of [`TemplateSource::load`].
    pub fn named(&self, name: &str) -> Result<Option<Template>> {
        let parts = self.parts()?;
        let default = parts.default.as_ref().filter(|_| name == "default" && !parts.named.is_empty());
        parts.named(name).or(default).map(|source| parts.compile(source).map(Template::Jinja)).transpose()
    }

    /// A template in place of the model's: the text `source`, from the file `place`. It gets the model's special
    /// tokens.
    ///
    /// # Errors
    /// As of [`TemplateSource::load`].
    pub fn instead(&self, place: &str, source: &str) -> Result<Template> {
        Jinja::new(place, source, self.parts()?.variables.clone()).map(Template::Jinja)
    }

    fn parts(&self) -> Result<Cow<'_, Parts>> {
        match &self.0 {
            Origin::Path(path) => match settings_of(path)? {
                SettingsSource::Gguf(gguf) => read_metadata(&gguf).map(Cow::Owned),
                SettingsSource::Files(folder) => read_files(&folder).map(Cow::Owned),
            },
            Origin::Metadata(parts) => parts.as_ref().map(Cow::Borrowed).map_err(Clone::clone),
        }
    }
}

impl Parts {
    fn named(&self, name: &str) -> Option<&Source> {
        self.named.iter().find(|(other, _)| other == name).map(|(_, source)| source)
    }

    fn compile(&self, (place, source): &Source) -> Result<Jinja> {
        Jinja::new(place, source, self.variables.clone())
    }
}

impl Template {
    /// Loads the template of the model at `path`, as [`TemplateSource::of_path`] finds it.
    ///
    /// # Errors
    /// Those of [`TemplateSource::load`].
    pub fn load(path: &Path) -> Result<Self> {
        TemplateSource::of_path(path).load()
    }
}

/// Reads the templates of a directory or a bundle.
fn read_files(folder: &Folder) -> Result<Parts> {
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
        return Ok(Parts { default: Some(default), named, variables });
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
    Ok(Parts { default: default.into_iter().next().map(|(_, source)| source), named, variables })
}

fn read_source(folder: &Folder, name: &str) -> Result<Option<Source>> {
    let Some(bytes) = folder.read(name, jinja::MAX_SOURCE)? else { return Ok(None) };
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
fn read_metadata(gguf: &Gguf) -> Result<Parts> {
    let refused = |why: String| Error::model(gguf.path(), why);
    let metadata = gguf.metadata();
    let source = metadata.text(TEMPLATE).map_err(refused)?;
    let tokens = metadata.strings(TOKENS).map_err(refused)?;
    let mut variables = vec![];
    for (name, key) in TOKEN_KEYS {
        let id = metadata.integer(key).map_err(refused)?.and_then(|id| usize::try_from(id).ok());
        if let Some(text) = tokens.zip(id).and_then(|(tokens, id)| tokens.get(id)) {
            variables.push((name.to_owned(), text.to_owned()));
        }
    }
    let placed = |key: &str, source: &str| (format!("{}: {key}", gguf.path().display()), source.to_owned());
    let mut named = vec![];
    for name in NAMES {
        let key = format!("{TEMPLATE}.{name}");
        let source = metadata.text(&key).map_err(refused)?;
        named.extend(source.map(|source| (name.to_owned(), placed(&key, source))));
    }
    Ok(Parts { default: source.map(|source| placed(TEMPLATE, source)), named, variables })
}
