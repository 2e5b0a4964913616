//! Reads the tokenizer in the metadata of a GGUF file (`tokenizer.ggml.*`) into the spec that a `tokenizer.json`
//! gives, so that both encode alike.
//!
//! There are two kinds, `gpt2` (BPE with merges, nearly always byte-level) and `llama` (SentencePiece with scores).
//! The file only names how text is split into words, and does not mention normalisation: both are taken from the
//! published models ([`split`]). Keys, their meanings and defaults are llama.cpp's (`src/llama-vocab.cpp`). Everything
//! is untrusted; messages name the key, the caller adds the file.

mod control;
mod merges;
mod split;
mod vocabulary;

use super::files::format_json_value;
use super::pipeline::DecoderKind;
use super::spec::{AddedEntry, TokenizerSpec, id_error};
use files::source::gguf::metadata::Metadata;
use serde_json::{Value, json};
use split::{SPACE_MARK, replace_spaces};
use tokenizers::AddedToken;
use tokenizers::models::bpe::Merges;
use vocabulary::{GgufVocabulary, TokenType};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_SPACE: &str = "tokenizer.ggml.add_space_prefix";

type Check<T> = Result<T, String>;

/// A tokenizer's spec, and its begin-of-text and end-of-text tokens.
pub(super) struct GgufTokenizer {
    pub spec: TokenizerSpec,
    pub bos: Option<u32>,
    pub eos: Vec<u32>,
}

/// The parts in which the two kinds of tokenizers differ.
struct KindParts {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    decoder: DecoderKind,
    merges: Merges,
    ignore_merges: bool,
    /// The default if the file has no such key.
    add_bos: bool,
}

/// Reads and checks the metadata, for a model with ids below `limit`.
pub(super) fn read_tokenizer(metadata: &Metadata, limit: usize) -> Check<GgufTokenizer> {
    let model = metadata.get_str(MODEL)?;
    let mut vocabulary = match model {
        Some("gpt2" | "llama" | "gemma4" | "whitespace") => GgufVocabulary::read_vocabulary(metadata)?,
        other => {
            return Err(unsupported_value(MODEL, other, "\"gpt2\", \"llama\", \"gemma4\", \"whitespace\""));
        }
    };
    control::fix_token_types(metadata, &mut vocabulary)?;
    if let Some((id, token)) = vocabulary.last_token().filter(|(id, _)| *id as usize >= limit) {
        return Err(id_error(token, id, limit));
    }
    let steps = match model {
        Some("llama") => read_sentence_piece(metadata, &vocabulary)?,
        Some("gemma4") => read_bpe(metadata, &vocabulary, Some("gemma4"))?,
        _ => read_bpe(metadata, &vocabulary, metadata.get_str(PRE)?)?,
    };
    let ids = NamedTokens::read_ids(metadata, &vocabulary)?;
    build_spec(metadata, &vocabulary, steps, &ids)
}

fn unsupported_value(key: &str, value: Option<&str>, supported: &str) -> String {
    let value = value.map_or("missing".into(), |text| format_json_value(&text.into()));
    format!("metadata \"{key}\" is {value}; supported: {supported}")
}

/// BPE with merges, byte-level or of text, by the name of its pre-tokenizer.
fn read_bpe(metadata: &Metadata, vocabulary: &GgufVocabulary<'_>, name: Option<&str>) -> Check<KindParts> {
    let split = name.and_then(split::find_pre_tokenizer);
    let split = split.ok_or_else(|| unsupported_value(PRE, name, split::NAMES))?;
    if split.text {
        merges::check_byte_coverage(vocabulary)?;
    }
    Ok(KindParts {
        decoder: if split.text { piece_decoder(None) } else { DecoderKind::ByteLevel },
        normalizer: split.normalizer,
        pre_tokenizer: Some(split.pre_tokenizer),
        merges: merges::read_merges(metadata)?,
        ignore_merges: split.ignore_merges,
        add_bos: split.add_bos,
    })
}

/// The decoder of tokens that are text, with `strip` removed from the start.
fn piece_decoder(strip: Option<(char, usize)>) -> DecoderKind {
    DecoderKind::SentencePiece { replace: vec![(SPACE_MARK.into(), " ".into())], byte_fallback: true, strip }
}

fn read_sentence_piece(metadata: &Metadata, vocabulary: &GgufVocabulary<'_>) -> Check<KindParts> {
    let add_space = metadata.get_bool(ADD_SPACE)?.unwrap_or(true);
    let prepend = json!({"type": "Prepend", "prepend": SPACE_MARK});
    let steps = if add_space { json!([prepend, replace_spaces()]) } else { json!([replace_spaces()]) };
    Ok(KindParts {
        normalizer: Some(json!({"type": "Sequence", "normalizers": steps})),
        pre_tokenizer: None,
        decoder: piece_decoder(add_space.then_some((' ', 1))),
        merges: merges::derive_merges(metadata, vocabulary)?,
        ignore_merges: false,
        add_bos: true,
    })
}

/// The tokens that the metadata name.
struct NamedTokens {
    bos: Option<u32>,
    /// End of text, of turn, of message.
    ends: [Option<u32>; 3],
    unk: Option<u32>,
    pad: Option<u32>,
}

impl NamedTokens {
    fn read_ids(metadata: &Metadata, vocabulary: &GgufVocabulary<'_>) -> Check<Self> {
        let id = |name: &str| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            let Some(n) = metadata.get_u64(&key)? else { return Ok(None) };
            match u32::try_from(n).ok().filter(|&id| vocabulary.text(id).is_some()) {
                Some(id) => Ok(Some(id)),
                // llama.cpp writes the largest number for "none". Padding is never used.
                None if n == u64::from(u32::MAX) || name == "padding" => Ok(None),
                _ => Err(format!(
                    "metadata \"{key}\" is {n}; supported: the id of one of the {} tokens in \"{TOKENS}\", \
                     unused ones excepted",
                    vocabulary.len()
                )),
            }
        };
        // SentencePiece's names, if no key names the token.
        let named =
            |name: &str| vocabulary.id(name).filter(|&id| vocabulary.token_type(id) != TokenType::Text);
        let unknown =
            || (0..vocabulary.len() as u32).find(|&id| vocabulary.token_type(id) == TokenType::Unknown);
        Ok(Self {
            bos: id("bos")?.or_else(|| named("<s>")),
            ends: [id("eos")?.or_else(|| named("</s>")), id("eot")?, id("eom")?],
            unk: id("unknown")?.or_else(unknown),
            pad: id("padding")?,
        })
    }

    /// Every end-of-text id, each once.
    fn eos_ids(&self, vocabulary: &GgufVocabulary<'_>) -> Vec<u32> {
        let known = control::known_end_tokens(vocabulary);
        // Padding only comes after the end.
        let pad =
            self.pad.filter(|&id| self.pad != self.unk && vocabulary.token_type(id) == TokenType::Control);
        let mut eos = Vec::new();
        for id in self.ends.into_iter().flatten().chain(pad).chain(known) {
            if !eos.contains(&id) {
                eos.push(id);
            }
        }
        eos
    }
}

fn build_spec(
    metadata: &Metadata,
    vocabulary: &GgufVocabulary<'_>,
    steps: KindParts,
    ids: &NamedTokens,
) -> Check<GgufTokenizer> {
    let sentence_piece = steps.decoder != DecoderKind::ByteLevel;
    let around = |key: &str, default: bool, id: Option<u32>, name: &str| match metadata.get_bool(key)? {
        Some(true) if id.is_none() => Err(format!(
            "metadata \"{key}\" is true, but \"tokenizer.ggml.{name}_token_id\" is missing; supported: both \
             or none"
        )),
        said => Ok(id.filter(|_| said.unwrap_or(default)).into_iter().collect()),
    };
    let prefix = around(ADD_BOS, steps.add_bos, ids.bos, "bos")?;
    let suffix = around(ADD_EOS, false, ids.ends[0], "eos")?;
    let count = vocabulary.last_token().map_or(0, |(id, _)| id + 1);
    let spec = TokenizerSpec {
        tokens: (0..count).map(|id| vocabulary.text(id).map(str::to_owned)).collect(),
        // Includes the added tokens: the library would number those that its vocabulary lacks itself.
        vocab: vocabulary.iter().map(|(id, text)| (text.to_owned(), id)).collect(),
        merges: steps.merges,
        unk: ids.unk.filter(|_| sentence_piece).and_then(|id| Some((vocabulary.text(id)?.to_owned(), id))),
        fuse_unk: sentence_piece,
        byte_fallback: sentence_piece,
        ignore_merges: steps.ignore_merges,
        added: added_tokens(metadata, vocabulary, ids),
        normalizer: steps.normalizer,
        pre_tokenizer: steps.pre_tokenizer,
        decoder: steps.decoder,
        prefix,
        suffix,
    };
    Ok(GgufTokenizer { spec, bos: ids.bos, eos: ids.eos_ids(vocabulary) })
}

/// The tokens that are matched in a text before anything else. Begin-of-text and end-of-text tokens are special
/// whatever their type.
fn added_tokens(metadata: &Metadata, vocabulary: &GgufVocabulary<'_>, ids: &NamedTokens) -> Vec<AddedEntry> {
    let strips = control::strips_spaces(metadata);
    let entry = |(id, text)| {
        let kind = vocabulary.token_type(id);
        let named = ids.bos == Some(id) || ids.ends.contains(&Some(id));
        let special = named || matches!(kind, TokenType::Control | TokenType::Unknown);
        let rstrip = special && strips && !control::KEEP_SPACES.contains(&text);
        let token = AddedToken::from(text, special).rstrip(rstrip).normalized(false);
        (special || kind == TokenType::UserDefined).then_some(AddedEntry { id, token })
    };
    vocabulary.iter().filter_map(entry).collect()
}
