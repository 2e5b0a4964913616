//! A tokenizer for a synthetic model: byte-level BPE without merges, so any text is encoded byte by
//! byte; ids that no text encodes to decode to made-up words.

use crate::error::{Error, Result};
use crate::json::Node;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Special tokens of the families whose vocabulary size gives them away.
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

/// `generation_config.json`: the ids that begin and end a text.
pub fn generation_config(config: Node<'_>) -> Value {
    let id = |field: &str| config.find(field).map_or(Value::Null, |n| n.value.clone());
    json!({"bos_token_id": id("bos_token_id"), "eos_token_id": id("eos_token_id")})
}

/// `tokenizer_config.json`.
pub fn tokenizer_config(config: Node<'_>) -> Result<Value> {
    let special = special_tokens(config)?;
    let name = |field: &str| Ok(ids(config, field)?.first().map(|id| special[id].clone()));
    Ok(json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name("bos_token_id")?,
        "eos_token": name("eos_token_id")?,
        "clean_up_tokenization_spaces": false,
    }))
}

/// The same as a list, for a GGUF file.
pub struct Listed {
    /// By id: the token, and whether it is special.
    pub tokens: Vec<(String, bool)>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
}

/// The tokens in order of their ids.
pub fn listed(config: Node<'_>) -> Result<Listed> {
    let special = special_tokens(config)?;
    let tokens: Vec<(String, bool)> = vocabulary(config, &special)?
        .into_iter()
        .map(|(id, token)| (token, special.contains_key(&id)))
        .collect();
    let first = |field: &str| Ok::<_, Error>(ids(config, field)?.first().copied());
    Ok(Listed { tokens, bos: first("bos_token_id")?, eos: first("eos_token_id")? })
}

/// `tokenizer.json`.
pub fn tokenizer(config: Node<'_>) -> Result<Value> {
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
        "post_processor": post_processor(config, &special)?,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    }))
}

/// Every id's token.
fn vocabulary(config: Node<'_>, special: &BTreeMap<u32, String>) -> Result<BTreeMap<u32, String>> {
    let vocab_size = config.size("vocab_size")?;
    if vocab_size < 256 + special.len() {
        let text = format!(
            "field `vocab_size` is {vocab_size}; 256 bytes and {} special tokens need more",
            special.len()
        );
        return Err(Error::at(config.file, text));
    }
    let mut bytes = (0..=255).map(byte_char);
    let mut vocab = BTreeMap::new();
    for id in 0..vocab_size as u32 {
        let token = match special.get(&id) {
            Some(name) => name.clone(),
            None => bytes.next().map_or_else(|| word(id), String::from),
        };
        vocab.insert(id, token);
    }
    Ok(vocab)
}

/// Llama 3 puts its first token in front of every text; Qwen and SmolLM2 do not.
fn post_processor(config: Node<'_>, special: &BTreeMap<u32, String>) -> Result<Value> {
    let bos = ids(config, "bos_token_id")?.first().copied();
    let llama = config.text("model_type")? == "llama";
    let Some(bos) = bos.filter(|id| llama && special[id] != "<|im_start|>") else {
        return Ok(
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}),
        );
    };
    let name = &special[&bos];
    let begin = json!({"SpecialToken": {"id": name, "type_id": 0}});
    let text = |which: &str, type_id: u32| json!({"Sequence": {"id": which, "type_id": type_id}});
    let mut tokens = Map::new();
    tokens.insert(name.clone(), json!({"id": name, "ids": [bos], "tokens": [name]}));
    Ok(json!({
        "type": "TemplateProcessing",
        "single": [begin, text("A", 0)],
        "pair": [begin, text("A", 0), begin, text("B", 1)],
        "special_tokens": tokens,
    }))
}

/// The ids that the config or the family gives a meaning, and their names.
fn special_tokens(config: Node<'_>) -> Result<BTreeMap<u32, String>> {
    let vocab = config.size("vocab_size")?;
    let known = KNOWN.iter().filter(|(size, _)| *size == vocab).flat_map(|(_, tokens)| *tokens);
    let mut special: BTreeMap<u32, String> = known.map(|&(id, name)| (id, name.to_string())).collect();
    for field in ["bos_token_id", "eos_token_id", "pad_token_id"] {
        for id in ids(config, field)? {
            if id as usize >= vocab {
                return Err(Error::at(
                    config.file,
                    format!("field `{field}`: {id} is not below vocab_size ({vocab})"),
                ));
            }
            let name = field.trim_end_matches("_token_id");
            special.entry(id).or_insert_with(|| format!("<|{name}_{id}|>"));
        }
    }
    Ok(special)
}

/// A field that is an id, a list of ids, or absent.
fn ids(config: Node<'_>, field: &str) -> Result<Vec<u32>> {
    match config.find(field) {
        None => Ok(Vec::new()),
        Some(node) if node.value.is_array() => config.ids(field),
        Some(_) => Ok(vec![config.size(field)? as u32]),
    }
}

/// GPT-2's printable character for a byte: itself where it is printable Latin-1, else U+0100 and on.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return byte.into();
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(256 + before).expect("far below the surrogates")
}

/// ` abcde`-like, another for each id; `Ġ` is the space of byte-level BPE.
fn word(mut id: u32) -> String {
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
    fn byte_characters_are_gpt2s() {
        assert_eq!([b'A', b' ', b'\n', 0, 0x7f, 0xad].map(byte_char), ['A', 'Ġ', 'Ċ', 'Ā', 'ġ', 'Ń']);
        assert_eq!((0..=255).map(byte_char).collect::<BTreeSet<_>>().len(), 256);
    }

    #[test]
    fn every_id_has_one_token_and_special_ones_keep_their_ids() {
        for (name, id, token) in [
            ("llama3.2-1b", 128_009, "<|eot_id|>"),
            ("qwen2.5-0.5b", 151_645, "<|im_end|>"),
            ("smollm2-135m", 2, "<|im_end|>"),
            ("m7-qwen3-bf16", 337, "<|eos_337|>"),
        ] {
            let file = build::model_dir(name).unwrap().join("config.json");
            let value = json::read(&file).unwrap();
            let config = Node { file: &file, value: &value };
            let made = tokenizer(config).unwrap();
            let vocab = made["model"]["vocab"].as_object().unwrap();
            let ids: BTreeSet<u64> = vocab.values().map(|v| v.as_u64().unwrap()).collect();
            assert_eq!((vocab.len(), ids.len()), (config.size("vocab_size").unwrap(), vocab.len()), "{name}");
            assert_eq!(vocab[token], id, "{name}");
            assert!((0..=255).all(|b| vocab.contains_key(&byte_char(b).to_string())), "{name}");
            assert!(made["added_tokens"].as_array().unwrap().iter().any(|t| t["content"] == token), "{name}");
        }
    }
}
