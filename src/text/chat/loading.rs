//! Where a model's template is, and what it is made of.

use super::{Jinja, Template, jinja};
use crate::tokenizer::files::{Settings, read_settings, settings_of};
use crate::{Error, Result};
use files::folder::Folder;
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::path::{Path, PathBuf};

/// Where a model's template is, not yet read from files nor checked: that is for those who hold conversations.
#[derive(Debug)]
pub struct TemplateSource(pub(super) Origin);

#[derive(Debug)]
pub(super) enum Origin {
    Path(PathBuf),
    Known(Parts),
    Refused(Error),
}

/// What a [`Jinja`] is made of.
#[derive(Debug, Clone, Default)]
pub(super) struct Parts {
    /// The place for messages, and the text; `None` where there is no template.
    pub text: Option<(String, String)>,
    pub variables: Vec<(String, String)>,
}

impl TemplateSource {
    /// That of the model at `path`: `tokenizer.chat_template` in the metadata of a GGUF file; in a directory, that of
    /// another file, or a bundle, `chat_template.jinja`, or `chat_template` in `tokenizer_config.json` as one text or
    /// as a list of named ones.
    pub fn of_path(path: &Path) -> Self {
        Self(Origin::Path(path.into()))
    }

    /// Reads and checks the template; [`Template::Plain`] where there is none.
    ///
    /// # Errors
    /// [`Error::Model`] for a file or key that cannot be used and for a template with a syntax error.
    pub fn load(&self) -> Result<Template> {
        let parts = self.parts()?;
        match &parts.text {
            Some((place, source)) => Jinja::new(place, source, parts.variables.clone()).map(Template::Jinja),
            None => Ok(Template::Plain),
        }
    }

    /// Another template in place of the model's: `source`, from `place`. It gets the model's special tokens.
    ///
    /// # Errors
    /// As of [`TemplateSource::load`].
    pub fn instead(&self, place: &str, source: &str) -> Result<Template> {
        Jinja::new(place, source, self.parts()?.variables.clone()).map(Template::Jinja)
    }

    fn parts(&self) -> Result<Cow<'_, Parts>> {
        match &self.0 {
            Origin::Path(path) => match settings_of(path)? {
                Settings::Gguf(gguf) => {
                    Self::of_gguf(&gguf).parts().map(|parts| Cow::Owned(parts.into_owned()))
                }
                Settings::Files(folder) => read(&folder).map(Cow::Owned),
            },
            Origin::Known(parts) => Ok(Cow::Borrowed(parts)),
            Origin::Refused(why) => Err(why.clone()),
        }
    }
}

/// Reads what a directory or a bundle has.
fn read(folder: &Folder) -> Result<Parts> {
    const CONFIG: &str = "tokenizer_config.json";
    const OWN: &str = "chat_template.jinja";
    let mut settings = read_settings(folder, CONFIG)?.unwrap_or_default();
    let variables = special_tokens(&settings);
    let (config, path) = (folder.path(CONFIG), folder.path(OWN));
    if let Some(bytes) = folder.read(OWN, jinja::MAX_SOURCE)? {
        let source = String::from_utf8(bytes)
            .map_err(|_| Error::model(&path, "is not UTF-8; use the file published with the model"))?;
        return Ok(Parts { text: Some((path.display().to_string(), source)), variables });
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
    let place = format!("{}: field `chat_template`", config.display());
    Ok(Parts { text: source.map(|source| (place, source)), variables })
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
