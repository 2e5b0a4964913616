//! Reads a `tokenizer.json`. Ids and sizes, which the library does not limit, are checked here; other damage makes the
//! library fail, which is contained. Messages name the field; the caller adds the file.

use super::files::check_nesting;
use super::pipeline;
use super::spec::{AddedEntry, TokenizerSpec, id_error};
use files::error::escape;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::models::bpe::Vocab;

/// Maximum bytes of the file; Llama 3's and Qwen's have 7 to 17 MB.
pub(super) const MAX_FILE: u64 = 64 << 20;
/// Maximum bytes of a step before or after the model: parsed, it takes up to thirty times the memory. Published files
/// have a few KB, for the special tokens of a post-processor.
const MAX_STEP: usize = 1 << 20;

/// The file. `truncation` and `padding` are ignored: a prompt is neither truncated nor padded.
#[derive(Deserialize)]
struct TokenizerJson<'a> {
    version: Option<String>,
    added_tokens: Option<Vec<AddedEntry>>,
    #[serde(borrow)]
    normalizer: Option<&'a RawValue>,
    #[serde(borrow)]
    pre_tokenizer: Option<&'a RawValue>,
    #[serde(borrow)]
    post_processor: Option<&'a RawValue>,
    #[serde(borrow)]
    decoder: Option<&'a RawValue>,
    model: BpeModel,
}

/// Only `model.type`: models of other types have other fields.
#[derive(Deserialize)]
struct TypeOnly {
    model: ModelType,
}

#[derive(Deserialize)]
struct ModelType {
    #[serde(rename = "type")]
    name: Option<String>,
}

#[derive(Deserialize)]
struct BpeModel {
    #[serde(rename = "type")]
    kind: Option<String>,
    dropout: Option<f64>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    vocab: Vocab,
    merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a merge is two tokens, as a list or with one space between them")]
enum Merge {
    Pair(String, String),
    Text(String),
}

impl Merge {
    fn into_pair(self) -> Result<(String, String), String> {
        let text = match self {
            Merge::Pair(a, b) => return Ok((a, b)),
            Merge::Text(text) => text,
        };
        let pair = text.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
        pair.ok_or_else(|| format!("field `model.merges` has {}, not two tokens", escape(&text)))
    }
}

/// Reads a file for a model with ids below `limit`.
pub(super) fn read_tokenizer_json(json: &[u8], limit: usize) -> Result<TokenizerSpec, String> {
    check_nesting(json)?;
    let broken = |e: serde_json::Error| format!("is not a valid tokenizer.json ({})", escape(&e.to_string()));
    let file: TokenizerJson<'_> = serde_json::from_slice(json).map_err(|e| {
        let head = serde_json::from_slice::<TypeOnly>(json);
        head.ok().and_then(|head| check_type(head.model.name.as_deref()).err()).unwrap_or_else(|| broken(e))
    })?;
    if let Some(version) = file.version.filter(|v| v != "1.0") {
        return Err(format!("field `version` is {}; supported: \"1.0\"", escape(&version)));
    }
    let model = file.model;
    check_model(&model)?;
    let added = file.added_tokens.unwrap_or_default();
    let tokens = tokens_by_id(&model.vocab, &added, limit)?;
    let with_id = |unk: String| match model.vocab.get(&unk) {
        Some(&id) => Ok((unk, id)),
        None => Err(format!("field `model.unk_token` is {}, not in `model.vocab`", escape(&unk))),
    };
    let unk = model.unk_token.map(with_id).transpose()?;
    let around = pipeline::read_post_processor(&parse_step("post_processor", file.post_processor)?)?;
    for &id in around.prefix.iter().chain(&around.suffix) {
        if tokens.get(id as usize).is_none_or(Option::is_none) {
            return Err(format!("field `post_processor` adds id {id}, which no token has"));
        }
    }
    let normalizer = parse_step("normalizer", file.normalizer)?;
    pipeline::check_steps("normalizer", &normalizer, &pipeline::NORMALIZERS)?;
    let pre_tokenizer = parse_step("pre_tokenizer", file.pre_tokenizer)?;
    pipeline::check_steps("pre_tokenizer", &pre_tokenizer, &pipeline::PRE_TOKENIZERS)?;
    Ok(TokenizerSpec {
        tokens,
        vocab: model.vocab,
        merges: model.merges.into_iter().map(Merge::into_pair).collect::<Result<_, _>>()?,
        unk,
        fuse_unk: model.fuse_unk.unwrap_or(false),
        byte_fallback: model.byte_fallback.unwrap_or(false),
        ignore_merges: model.ignore_merges.unwrap_or(false),
        added,
        normalizer: Some(normalizer).filter(|step| !step.is_null()),
        pre_tokenizer: Some(pre_tokenizer).filter(|step| !step.is_null()),
        decoder: pipeline::read_decoder(&parse_step("decoder", file.decoder)?)?,
        prefix: around.prefix,
        suffix: around.suffix,
    })
}

fn check_type(name: Option<&str>) -> Result<(), String> {
    match name.filter(|name| *name != "BPE") {
        Some(name) => Err(format!("field `model.type` is {}; supported: \"BPE\"", escape(name))),
        None => Ok(()),
    }
}

/// Refuses options of the model that are not supported.
fn check_model(model: &BpeModel) -> Result<(), String> {
    check_type(model.kind.as_deref())?;
    if let Some(p) = model.dropout.filter(|&p| p != 0.0) {
        return Err(format!("field `model.dropout` is {p}; supported: null (encoding must not be random)"));
    }
    for (name, value) in [
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(value) = value.as_ref().filter(|v| !v.is_empty()) {
            return Err(format!("field `model.{name}` is {}; supported: null or \"\"", escape(value)));
        }
    }
    Ok(())
}

/// Parses a step before or after the model; null if there is none.
fn parse_step(field: &str, json: Option<&RawValue>) -> Result<Value, String> {
    let json = json.map_or("null", RawValue::get);
    if json.len() > MAX_STEP {
        return Err(format!("field `{field}` has {} bytes; supported: up to {MAX_STEP}", json.len()));
    }
    serde_json::from_str(json).map_err(|e| format!("field `{field}`: {}", escape(&e.to_string())))
}

/// The tokens of vocabulary and added tokens, `[id]`. Each id must be below `limit` and stand for one token.
fn tokens_by_id(vocab: &Vocab, added: &[AddedEntry], limit: usize) -> Result<Vec<Option<String>>, String> {
    let all = || vocab.iter().map(|(t, id)| (t, *id)).chain(added.iter().map(|a| (&a.token.content, a.id)));
    let Some((last, highest)) = all().max_by_key(|(_, id)| *id) else {
        return Err("field `model.vocab` is empty; supported: at least one token".into());
    };
    if highest as usize >= limit {
        return Err(id_error(last, highest, limit));
    }
    let mut tokens: Vec<Option<String>> = vec![None; highest as usize + 1];
    for (token, id) in all() {
        if let Some(other) = tokens[id as usize].replace(token.clone()).filter(|other| other != token) {
            return Err(format!("gives id {id} to the tokens {} and {}", escape(&other), escape(token)));
        }
    }
    Ok(tokens)
}
