//! The tokens of a GGUF file and their types.

use super::{Check, TOKENS};
use crate::tokenizer::files::format_json_value;
use crate::tokenizer::stream::byte_of_token;
use files::source::gguf::metadata::Metadata;
use files::source::gguf::value::{Strings, Value};
use std::collections::HashMap;

const TYPES: &str = "tokenizer.ggml.token_type";
/// Maximum bytes of all tokens together; the largest vocabularies have 2 MB.
const MAX_TEXT: usize = 16 << 20;

/// The type of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenType {
    Text,
    /// The token for text that no other token covers.
    Unknown,
    /// A control token: matched in text only if control tokens are wanted.
    Control,
    /// A token that is always matched in text, before anything else.
    UserDefined,
    /// A filler of an id: it is never matched and has no text.
    Unused,
    /// One byte, written like `<0x0A>`.
    Byte,
}

impl TokenType {
    fn from_number(number: Option<u64>) -> Option<Self> {
        Some(match number? {
            1 => TokenType::Text,
            2 => TokenType::Unknown,
            3 => TokenType::Control,
            4 => TokenType::UserDefined,
            5 => TokenType::Unused,
            6 => TokenType::Byte,
            _ => return None,
        })
    }
}

/// Tokens by id and ids by token, without unused ones.
pub(super) struct GgufVocabulary<'a> {
    tokens: &'a Strings,
    /// `[id]`
    kinds: Vec<TokenType>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> GgufVocabulary<'a> {
    pub fn read_vocabulary(metadata: &'a Metadata) -> Check<Self> {
        let tokens = metadata.get_strings(TOKENS)?.filter(|tokens| !tokens.is_empty());
        let tokens = tokens.ok_or_else(|| {
            format!("metadata \"{TOKENS}\" is missing or empty; supported: at least one token")
        })?;
        let bytes: usize = tokens.iter().map(str::len).sum();
        if bytes > MAX_TEXT {
            return Err(format!("metadata \"{TOKENS}\" holds {bytes} bytes; supported: up to {MAX_TEXT}"));
        }
        let kinds = read_kinds(metadata, tokens)?;
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, (text, kind)) in tokens.iter().zip(&kinds).enumerate() {
            if *kind == TokenType::Byte && byte_of_token(text).is_none() {
                return Err(format!(
                    "metadata \"{TOKENS}\": element {id} is {}, but has type 6 (byte); supported: \
                     <0x00> to <0xFF>",
                    format_json_value(&text.into())
                ));
            }
            if *kind == TokenType::Unused {
                continue;
            }
            if let Some(other) = ids.insert(text, id as u32) {
                return Err(format!(
                    "metadata \"{TOKENS}\": elements {other} and {id} are both {}; supported: each token once",
                    format_json_value(&text.into())
                ));
            }
        }
        if ids.is_empty() {
            return Err(format!("metadata \"{TYPES}\" leaves no token in use; supported: at least one"));
        }
        Ok(Self { tokens, kinds, ids })
    }

    /// The number of tokens, unused ones included.
    pub fn len(&self) -> usize {
        self.kinds.len()
    }

    pub fn token_type(&self, id: u32) -> TokenType {
        self.kinds.get(id as usize).copied().unwrap_or(TokenType::Unused)
    }

    pub fn make_control(&mut self, id: u32) {
        self.kinds[id as usize] = TokenType::Control;
    }

    /// The token, unless it is unused.
    pub fn text(&self, id: u32) -> Option<&'a str> {
        self.tokens.get(id as usize).filter(|_| self.token_type(id) != TokenType::Unused)
    }

    /// Its id, unless it is unused.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// Ids and tokens by id, without unused ones.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &'a str)> {
        (0..self.len() as u32).filter_map(|id| Some((id, self.text(id)?)))
    }

    /// The highest id in use, and its token.
    pub fn last_token(&self) -> Option<(u32, &'a str)> {
        (0..self.len() as u32).rev().find_map(|id| Some((id, self.text(id)?)))
    }
}

/// The kind of every token; all are type 1 if the key is missing.
fn read_kinds(metadata: &Metadata, tokens: &Strings) -> Check<Vec<TokenType>> {
    let found = match metadata.get(TYPES) {
        None => vec![TokenType::Text; tokens.len()],
        Some(Value::Array(types)) if types.len() == tokens.len() && types.iter_int32().is_some() => {
            let mut kinds = Vec::with_capacity(types.len());
            for (id, value) in types.iter().enumerate() {
                kinds.push(TokenType::from_number(value.as_u64()).ok_or_else(|| {
                    format!("metadata \"{TYPES}\": element {id} is {value}; supported: 1 to 6")
                })?);
            }
            kinds
        }
        Some(value) => {
            let count = tokens.len();
            return Err(format!(
                "metadata \"{TYPES}\" is {value}; supported: an array of {count} integers of 32 bits, as many as \
                 \"{TOKENS}\" has"
            ));
        }
    };
    let kind = |(id, (text, kind)): (usize, (&str, TokenType))| match kind {
        // Converters pad the vocabulary to the rows of the embedding with `[PAD151646]`, of either type.
        TokenType::UserDefined if text.strip_prefix("[PAD").is_some_and(|t| t == format!("{id}]")) => {
            TokenType::Unused
        }
        _ if text.is_empty() => TokenType::Unused,
        kind => kind,
    };
    Ok(tokens.iter().zip(found).enumerate().map(kind).collect())
}
