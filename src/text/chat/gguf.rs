//! The chat templates in the metadata of a GGUF file.

use super::loading::{NAMES, Origin, Parts, TemplateSource};
use crate::{Error, Result};
use files::source::gguf::Gguf;

const TEMPLATE: &str = "tokenizer.chat_template";
const TOKENS: &str = "tokenizer.ggml.tokens";
/// The special tokens that templates ask for by name, `bos_token` excepted, and the keys of their ids.
const VARIABLES: [(&str, &str); 3] = [
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
];

impl TemplateSource {
    /// That of a GGUF file, whose header is not needed afterwards.
    pub fn of_gguf(gguf: &Gguf) -> Self {
        Self(read(gguf).map_or_else(Origin::Refused, Origin::Known))
    }
}

/// The texts of the templates, and their variables.
fn read(gguf: &Gguf) -> Result<Parts> {
    let refused = |why: String| Error::model(gguf.path(), why);
    let metadata = gguf.metadata();
    let source = metadata.text(TEMPLATE).map_err(refused)?;
    let tokens = metadata.strings(TOKENS).map_err(refused)?;
    let mut variables = vec![];
    for (name, key) in VARIABLES {
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
