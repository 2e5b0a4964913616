//! A tokenizer for a synthetic model: byte-level BPE without merges, which encodes any text byte by byte. Other ids
//! decode to made-up words.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Special tokens of model families, by the size of their vocabulary.
const KNOWN: &[(usize, &[(u32, &str)])] = &[
    (
        128_256,
        &[
            (128_000, "<|begin_of_text|>"),
            (128_001, "<|end_of_text|>"),
            (128_006, "<|start_header_id|>"),
            (128_007, "<|end_header_id|>"),
            (128_008, "<|eom_id|>"),
            (128_009, "<|eot_id|>"),
        ],
    ),
    (151_936, &[(151_643, "<|endoftext|>"), (151_644, "<|im_start|>"), (151_645, "<|im_end|>")]),
    (49_152, &[(0, "<|endoftext|>"), (1, "<|im_start|>"), (2, "<|im_end|>")]),
];

/// The fields of `config.json` that a tokenizer depends on.
#[derive(Deserialize)]
pub struct TokenConfig {
    vocab_size: usize,
    model_type: String,
    bos_token_id: Option<TokenIds>,
    eos_token_id: Option<TokenIds>,
    pad_token_id: Option<TokenIds>,
}

#[derive(Clone, Deserialize, Serialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Several(Vec<u32>),
}

fn list_ids(ids: &Option<TokenIds>) -> Vec<u32> {
    match ids {
        None => Vec::new(),
        Some(TokenIds::One(id)) => vec![*id],
        Some(TokenIds::Several(ids)) => ids.clone(),
    }
}

/// The content of `generation_config.json`: the ids that begin and end a text.
pub fn generation_config(config: &TokenConfig) -> Value {
    json!({"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id})
}

/// The content of `tokenizer_config.json`.
pub fn tokenizer_config(config: &TokenConfig) -> Result<Value> {
    let special = special_tokens(config)?;
    let name = |ids: &Option<TokenIds>| list_ids(ids).first().map(|id| special[id].clone());
    Ok(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name(&config.bos_token_id),
        "eos_token": name(&config.eos_token_id),
        "clean_up_tokenization_spaces": false,
    }))
}

/// A vocabulary as a list, for a GGUF file.
pub struct TokenList {
    /// By id: the token, and true if it is special.
    pub tokens: Vec<(String, bool)>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
}

/// The tokens in order of their ids.
pub fn list_tokens(config: &TokenConfig) -> Result<TokenList> {
    let special = special_tokens(config)?;
    let tokens: Vec<(String, bool)> = vocabulary(config, &special)?
        .into_iter()
        .map(|(id, token)| (token, special.contains_key(&id)))
        .collect();
    let first = |ids: &Option<TokenIds>| list_ids(ids).first().copied();
    Ok(TokenList { tokens, bos: first(&config.bos_token_id), eos: first(&config.eos_token_id) })
}

/// The content of `tokenizer.json`.
pub fn tokenizer(config: &TokenConfig) -> Result<Value> {
    let special = special_tokens(config)?;
    let vocab: Map<String, Value> =
        vocabulary(config, &special)?.into_iter().map(|(id, token)| (token, id.into())).collect();
    let added: Vec<Value> = special
        .iter()
        .map(|(id, name)| {
            json!({
                "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            })
        })
        .collect();
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": post_processor(config, &special),
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    }))
}

/// The tokens by id.
fn vocabulary(config: &TokenConfig, special: &BTreeMap<u32, String>) -> Result<BTreeMap<u32, String>> {
    let vocab_size = config.vocab_size;
    if vocab_size < 256 + special.len() {
        let text = format!(
            "field `vocab_size` is {vocab_size}; 256 bytes and {} special tokens need more",
            special.len()
        );
        return Err(Error::Failed(text));
    }
    let mut bytes = (0..=255).map(byte_char);
    let mut vocab = BTreeMap::new();
    for id in 0..vocab_size as u32 {
        let token = match special.get(&id) {
            Some(name) => name.clone(),
            None => bytes.next().map_or_else(|| make_word(id), String::from),
        };
        vocab.insert(id, token);
    }
    Ok(vocab)
}

/// The post-processor: Llama 3 prepends its BOS token to every text; Qwen and SmolLM2 do not.
fn post_processor(config: &TokenConfig, special: &BTreeMap<u32, String>) -> Value {
    let bos = list_ids(&config.bos_token_id).first().copied();
    let llama = config.model_type == "llama";
    let Some(bos) = bos.filter(|id| llama && special[id] != "<|im_start|>") else {
        return json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true});
    };
    let name = &special[&bos];
    let begin = json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = |which: &str, type_id: u32| json!({"Sequence": {"id": which, "type_id": type_id}});
    let mut tokens = Map::new();
    tokens.insert(name.clone(), json!({"id": name, "ids": [bos], "tokens": [name]}));
    json!({
        "type": "TemplateProcessing",
        "single": [begin, text("A", 0)],
        "pair": [begin, text("A", 0), begin, text("B", 1)],
        "special_tokens": tokens,
    })
}

/// The ids of special tokens in the config or of the family, and their names.
fn special_tokens(config: &TokenConfig) -> Result<BTreeMap<u32, String>> {
    let vocab = config.vocab_size;
    let known = KNOWN.iter().filter(|(size, _)| *size == vocab).flat_map(|(_, tokens)| *tokens);
    let mut special: BTreeMap<u32, String> = known.map(|&(id, name)| (id, name.to_string())).collect();
    let named = [("bos", &config.bos_token_id), ("eos", &config.eos_token_id), ("pad", &config.pad_token_id)];
    for (name, ids) in named {
        for id in list_ids(ids) {
            if id as usize >= vocab {
                let why = format!("field `{name}_token_id`: {id} is not below vocab_size ({vocab})");
                return Err(Error::Failed(why));
            }
            special.entry(id).or_insert_with(|| format!("<|{name}_{id}|>"));
        }
    }
    Ok(special)
}

/// GPT-2's printable character for a byte: printable Latin-1 stays, others are U+0100 and up.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return byte.into();
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).expect("far below the surrogates")
}

/// A made-up word like ` abcde`, different for each id; `Ġ` is the space of byte-level BPE.
fn make_word(mut id: u32) -> String {
    let mut letters = ['a'; 5];
    for letter in letters.iter_mut().rev() {
        *letter = char::from(b'a' + (id % 26) as u8);
        id /= 26;
    }
    format!("Ġ{}", String::from_iter(letters))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{build, json};
    use std::collections::BTreeSet;

    #[test]
    fn every_id_has_one_token_and_special_ones_keep_their_ids() {
        assert_eq!([b'A', b' ', b'\n', 0, 0x7f, 0xad].map(byte_char), ['A', 'Ġ', 'Ċ', 'Ā', 'ġ', 'Ń']);
        for (name, id, token) in [
            ("llama3.2-1b", 128_009, "<|eot_id|>"),
            ("qwen2.5-0.5b", 151_645, "<|im_end|>"),
            ("smollm2-135m", 2, "<|im_end|>"),
            ("m7-qwen3-bf16", 337, "<|eos_337|>"),
        ] {
            let config: TokenConfig =
                json::read(&build::model_dir(name).unwrap().join("config.json")).unwrap();
            let made = tokenizer(&config).unwrap();
            let vocab = made["model"]["vocab"].as_object().unwrap();
            let ids: BTreeSet<u64> = vocab.values().map(|v| v.as_u64().unwrap()).collect();
            assert_eq!((vocab.len(), ids.len()), (config.vocab_size, vocab.len()), "{name}");
            assert_eq!(vocab[token], id, "{name}");
            assert!((0..=255).all(|b| vocab.contains_key(&byte_char(b).to_string())), "{name}");
            assert!(made["added_tokens"].as_array().unwrap().iter().any(|t| t["content"] == token), "{name}");
        }
    }
}
