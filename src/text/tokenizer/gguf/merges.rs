//! The merges of a GGUF file's tokenizer: listed in the file, or derived from SentencePiece's scores.

use super::vocabulary::{GgufVocabulary, TokenType};
use super::{Check, TOKENS};
use crate::tokenizer::files::format_json_value;
use files::source::gguf::metadata::Metadata;
use files::source::gguf::value::Value;
use std::cmp::Reverse;
use std::collections::HashSet;
use tokenizers::models::bpe::Merges;

pub(super) const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
/// Maximum bytes of a token built by merges, each of whose splits is looked up; real ones have up to 48.
const MAX_PIECE: usize = 256;
/// Maximum number of merges derived from scores; a vocabulary of 256,000 has half a million.
const MAX_DERIVED: usize = 1 << 20;

/// Reads the merges of the file, `"a b"` each. The library checks that they join tokens of the vocabulary.
pub(super) fn read_merges(metadata: &Metadata) -> Check<Merges> {
    let lines = metadata.get_strings(MERGES)?;
    let lines =
        lines.ok_or_else(|| format!("metadata \"{MERGES}\" is missing; supported: an array of strings"))?;
    let pair = |(i, line): (usize, &str)| match line.split_once(' ') {
        Some((a, b)) => Ok((a.to_owned(), b.to_owned())),
        None => Err(format!(
            "metadata \"{MERGES}\": element {i} is {}, not two tokens",
            format_json_value(&line.into())
        )),
    };
    lines.iter().enumerate().map(pair).collect()
}

/// Derives the merges that do what SentencePiece does with scores: of all neighbours that form a piece together, join
/// those with the highest score, the leftmost first, until there are none.
///
/// A piece gets a merge for every pair of pieces that it consists of. These merges share its score, but need an order:
/// if two of them overlap, in symbols x y z with xy = yz, the left one comes first, and then x is a period of the
/// piece. (In a run of one character all splits are at periods. There greedy merging leaves the longer symbols on the
/// left, so the longer left part comes first.) Pieces of the same score are ordered by id.
pub(super) fn derive_merges(metadata: &Metadata, vocabulary: &GgufVocabulary<'_>) -> Check<Merges> {
    check_byte_coverage(vocabulary)?;
    let scores = read_scores(metadata, vocabulary)?;
    let merged = |id: u32| matches!(vocabulary.token_type(id), TokenType::Text | TokenType::UserDefined);
    let pieces: HashSet<&str> =
        vocabulary.iter().filter(|&(id, _)| merged(id)).map(|(_, text)| text).collect();
    let mut found = Vec::new(); // (id, bytes of the left part)
    for (id, text) in vocabulary.iter().filter(|&(id, _)| merged(id)) {
        if text.len() > MAX_PIECE {
            return Err(format!(
                "metadata \"{TOKENS}\": element {id} has {} bytes; supported: up to {MAX_PIECE}",
                text.len()
            ));
        }
        let has_both = |&at: &usize| pieces.contains(&text[..at]) && pieces.contains(&text[at..]);
        found.extend(text.char_indices().skip(1).map(|(at, _)| at).filter(has_both).map(|at| (id, at)));
        if found.len() > MAX_DERIVED {
            return Err(format!("metadata \"{TOKENS}\" gives more than {MAX_DERIVED} merges"));
        }
    }
    let text = |id: u32| vocabulary.text(id).unwrap_or_default();
    found.sort_by(|&(a, left), &(b, other)| {
        let by_score = scores[b as usize].total_cmp(&scores[a as usize]);
        let key = |id, at| (id, !is_period(text(id), at), Reverse(at));
        by_score.then_with(|| key(a, left).cmp(&key(b, other)))
    });
    let parts = |(id, at): (u32, usize)| (text(id)[..at].to_owned(), text(id)[at..].to_owned());
    Ok(found.into_iter().map(parts).collect())
}

/// True if the text from byte `at` on equals its beginning.
fn is_period(text: &str, at: usize) -> bool {
    text.as_bytes().starts_with(&text.as_bytes()[at..])
}

/// Checks that every character can be encoded.
pub(super) fn check_byte_coverage(vocabulary: &GgufVocabulary<'_>) -> Check<()> {
    let byte = |b: u8| {
        let id = vocabulary.id(&format!("<0x{b:02X}>"));
        id.is_some_and(|id| vocabulary.token_type(id) == TokenType::Byte)
    };
    let unknown = vocabulary.iter().any(|(id, _)| vocabulary.token_type(id) == TokenType::Unknown);
    if unknown || (0..=u8::MAX).all(byte) {
        return Ok(());
    }
    Err(format!(
        "metadata \"{TOKENS}\" has neither an unknown token (type 2) nor all bytes <0x00> to <0xFF> (type 6); \
         supported: either"
    ))
}

/// The score of every token.
fn read_scores(metadata: &Metadata, vocabulary: &GgufVocabulary<'_>) -> Check<Vec<f32>> {
    let count = vocabulary.len();
    let array = match metadata.get(SCORES) {
        Some(Value::Array(array)) if array.len() == count => array,
        other => {
            let value = other.map_or("missing".into(), Value::to_string);
            return Err(format!(
                "metadata \"{SCORES}\" is {value}; supported: an array of {count} numbers of type Float32, as many \
                 as \"{TOKENS}\" has"
            ));
        }
    };
    let score = |(id, value)| match value {
        Value::F32(score) if !f32::is_nan(score) => Ok(score),
        other => Err(format!("metadata \"{SCORES}\": element {id} is {other}; supported: a Float32")),
    };
    array.iter().enumerate().map(score).collect()
}
