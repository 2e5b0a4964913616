//! Reads and checks a `tokenizer.json` before the `tokenizers` library sees it: the library panics, overflows its
//! stack or hangs on many malformed files.
//!
//! Messages name the field and the value; the caller adds the file.

use super::files::{check_nesting, shown};
use super::parts::{self, DecoderKind};
use files::error::unquoted;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;
use std::collections::{HashMap, HashSet};
use std::fmt;
use tokenizers::models::bpe::Merges;

/// Llama 3's and Qwen's files have 7 to 17 MB.
pub(super) const MAX_FILE: u64 = 64 << 20;
/// All added tokens together; Llama 3's have 8 KB.
pub(super) const MAX_ADDED: usize = 1 << 20;

/// Published files have a few kilobytes, for the special tokens of a post-processor.
const MAX_STEP: usize = 1 << 20;

/// The checked parts of a tokenizer, from any kind of file.
#[derive(Debug)]
pub(super) struct Checked {
    /// `[id]`, of model and added tokens.
    pub tokens: Vec<Option<String>>,
    pub vocab: Vec<(String, u32)>,
    pub merges: Merges,
    pub unk: Option<(String, u32)>,
    pub fuse_unk: bool,
    pub byte_fallback: bool,
    pub ignore_merges: bool,
    pub added: Vec<Added>,
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Option<Value>,
    pub decoder: DecoderKind,
    /// Added before a text when special tokens are asked for.
    pub prefix: Vec<u32>,
    /// Added after it.
    pub suffix: Vec<u32>,
}

/// One entry of `added_tokens`.
#[derive(Debug, Deserialize)]
pub(super) struct Added {
    pub id: u32,
    pub content: String,
    pub single_word: bool,
    pub lstrip: bool,
    pub rstrip: bool,
    pub normalized: bool,
    pub special: bool,
}

/// `model.type`, read first: models of other types have other fields.
#[derive(Deserialize)]
struct Head {
    model: HeadModel,
}

#[derive(Deserialize)]
struct HeadModel {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// The file. `truncation` and `padding` are ignored: a prompt is neither cut nor padded.
#[derive(Deserialize)]
struct File<'a> {
    version: Option<String>,
    added_tokens: Option<Vec<Added>>,
    #[serde(borrow)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow)]
    decoder: Option<&'a RawValue>,
    model: Bpe,
}

#[derive(Deserialize)]
struct Bpe {
    dropout: Option<f64>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    #[serde(deserialize_with = "vocab")]
    vocab: Vec<(String, u32)>,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a merge is two tokens, as a list or with one space between them")]
enum Merge {
    Pair(String, String),
    Text(String),
}

impl Merge {
    fn tokens(self) -> Result<(String, String), String> {
        let text = match self {
            Merge::Pair(a, b) => return Ok((a, b)),
            Merge::Text(text) => text,
        };
        match text.split_once(' ') {
            Some((a, b)) if !a.is_empty() && !b.is_empty() && !b.contains(' ') => Ok((a.into(), b.into())),
            _ => Err(format!(
                "field `model.merges` has {}, not two tokens with one space between them",
                unquoted(&text)
            )),
        }
    }
}

/// A map in file order. It keeps repeated keys, which are refused later.
fn vocab<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(String, u32)>, D::Error> {
    struct Pairs;
    impl<'de> Visitor<'de> for Pairs {
        type Value = Vec<(String, u32)>;
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("a map from tokens to ids")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut pairs = Vec::new();
            while let Some(pair) = map.next_entry()? {
                pairs.push(pair);
            }
            Ok(pairs)
        }
    }
    deserializer.deserialize_map(Pairs)
}

/// Reads and checks a file for a model with ids below `limit`.
pub(super) fn check(json: &[u8], limit: usize) -> Result<Checked, String> {
    check_nesting(json)?;
    let syntax =
        |e: serde_json::Error| format!("is not a valid tokenizer.json ({})", unquoted(&e.to_string()));
    let head: Head = serde_json::from_slice(json).map_err(syntax)?;
    if let Some(kind) = head.model.kind.filter(|k| k != "BPE") {
        return Err(format!("field `model.type` is {}; supported: \"BPE\"", unquoted(&kind)));
    }
    let file: File<'_> = serde_json::from_slice(json).map_err(syntax)?;
    if let Some(version) = file.version.filter(|v| v != "1.0") {
        return Err(format!("field `version` is {}; supported: \"1.0\"", unquoted(&version)));
    }
    let model = file.model;
    check_model(&model)?;
    let added = file.added_tokens.unwrap_or_default();
    let tokens = table(&model.vocab, &added, limit)?;
    let unk = match model.unk_token {
        None => None,
        Some(unk) => match model.vocab.iter().find(|(t, _)| *t == unk) {
            Some((_, id)) => Some((unk, *id)),
            None => {
                return Err(format!("field `model.unk_token` is {}, not in `model.vocab`", unquoted(&unk)));
            }
        },
    };
    let post = parts::post_processor(step("post_processor", file.post_processor)?.as_ref())?;
    for &id in post.prefix.iter().chain(&post.suffix) {
        if tokens.get(id as usize).is_none_or(Option::is_none) {
            return Err(format!("field `post_processor` adds id {id}, which no token has"));
        }
    }
    let normalizer = step("normalizer", file.normalizer)?;
    parts::normalizer(normalizer.as_ref())?;
    let pre_tokenizer = step("pre_tokenizer", file.pre_tokenizer)?;
    parts::pre_tokenizer(pre_tokenizer.as_ref())?;
    Ok(Checked {
        tokens,
        vocab: model.vocab,
        merges: model.merges.into_iter().map(Merge::tokens).collect::<Result<_, _>>()?,
        unk,
        fuse_unk: model.fuse_unk.unwrap_or(false),
        byte_fallback: model.byte_fallback.unwrap_or(false),
        ignore_merges: model.ignore_merges.unwrap_or(false),
        added,
        normalizer,
        pre_tokenizer,
        decoder: parts::decoder(step("decoder", file.decoder)?.as_ref())?,
        prefix: post.prefix,
        suffix: post.suffix,
    })
}

/// A step around the model. It must be short: values take up to thirty times the memory of their text.
fn step(field: &str, json: Option<&RawValue>) -> Result<Option<Value>, String> {
    let json = json.map_or("null", RawValue::get);
    if json.len() > MAX_STEP {
        return Err(format!("field `{field}` has {} bytes; supported: up to {MAX_STEP}", json.len()));
    }
    let value =
        serde_json::from_str(json).map_err(|e| format!("field `{field}`: {}", unquoted(&e.to_string())))?;
    Ok(Some(value).filter(|value: &Value| !value.is_null()))
}

fn check_model(model: &Bpe) -> Result<(), String> {
    if let Some(p) = model.dropout.filter(|&p| p != 0.0) {
        return Err(format!("field `model.dropout` is {p}; supported: null (encoding must not be random)"));
    }
    for (name, value) in [
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(value) = value.as_ref().filter(|v| !v.is_empty()) {
            return Err(format!("field `model.{name}` is {}; supported: null or \"\"", unquoted(value)));
        }
    }
    if model.vocab.is_empty() {
        return Err("field `model.vocab` is empty; supported: at least one token".into());
    }
    Ok(())
}

/// The message for a token with an id of `limit` or more.
pub(super) fn beyond(token: &str, id: u32, limit: usize) -> String {
    format!(
        "token {} has id {id}, but the model this program was built for has {limit} tokens (ids up to {}); use that \
         model's tokenizer, or rebuild for this model: ANTIGRAVITY_MODEL=<its directory or GGUF file> \
         cargo build --release",
        shown(&Value::from(token)),
        limit.saturating_sub(1),
    )
}

/// `[id]` -> token, of vocabulary and added tokens; ids and tokens must be unique and fit.
fn table(vocab: &[(String, u32)], added: &[Added], limit: usize) -> Result<Vec<Option<String>>, String> {
    let all = || vocab.iter().map(|(t, id)| (t, *id)).chain(added.iter().map(|a| (&a.content, a.id)));
    if let Some((token, id)) = all().max_by_key(|(_, id)| *id).filter(|(_, id)| *id as usize >= limit) {
        return Err(beyond(token, id, limit));
    }
    let mut tokens: Vec<Option<String>> =
        vec![None; all().map(|(_, id)| id as usize + 1).max().unwrap_or_default()];
    let mut ids: HashMap<&str, u32> = HashMap::with_capacity(vocab.len());
    for (token, id) in vocab {
        if ids.insert(token, *id).is_some() {
            return Err(format!("field `model.vocab` has the token {} twice", unquoted(token)));
        }
        if let Some(other) = tokens[*id as usize].replace(token.clone()) {
            return Err(format!(
                "field `model.vocab` gives id {id} to {} and {}",
                unquoted(&other),
                unquoted(token)
            ));
        }
    }
    if added.iter().map(|a| a.content.len()).sum::<usize>() > MAX_ADDED {
        return Err(format!("field `added_tokens` holds more than {MAX_ADDED} bytes of text"));
    }
    let mut seen = HashSet::new();
    for Added { content, id, .. } in added {
        if content.is_empty() || !seen.insert(content.as_str()) {
            return Err(format!(
                "field `added_tokens` has {} empty or twice",
                shown(&content.as_str().into())
            ));
        }
        // An added token may also be in the vocabulary, under the same id.
        let in_vocab = ids.get(content.as_str());
        let taken = tokens[*id as usize].as_ref().filter(|t| *t != content);
        if taken.is_some() || in_vocab.is_some_and(|other| other != id) {
            return Err(format!(
                "field `added_tokens` gives id {id} to {}, which is taken",
                unquoted(content)
            ));
        }
        tokens[*id as usize] = Some(content.clone());
    }
    Ok(tokens)
}
