//! Splits long texts into chunks: the library takes about 130 bytes of memory for each byte that it encodes at once.

use super::TokenBytes;
use super::spec::TokenizerSpec;
use serde_json::Value;
use std::collections::HashSet;

/// Minimum bytes of a chunk; a chunk has less than twice as many if the text can be split.
pub(super) const CHUNK_BYTES: usize = 16 << 10;
/// Bytes on either side of a split in which the ids are compared.
const CHECKED_BYTES: usize = 256;
/// Number of splits that are tried before the rest of a text is encoded at once.
const MAX_TRIES: usize = 16;

/// Finds the offset at which to split a text that is longer than two chunks; `None` for a shorter one and if no split
/// is found. Around it, `encode` must give the same ids for the two sides as for both together: the steps of a
/// tokenizer look no further.
pub(super) fn find_split<E>(
    text: &str,
    encode: impl Fn(&str) -> Result<Vec<u32>, E>,
) -> Result<Option<usize>, E> {
    if text.len() <= 2 * CHUNK_BYTES {
        return Ok(None);
    }
    let boundary = |at: usize| (0..=at).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    for at in (CHUNK_BYTES..2 * CHUNK_BYTES).filter(|&at| is_candidate(text.as_bytes(), at)).take(MAX_TRIES) {
        let (from, to) = (boundary(at - CHECKED_BYTES), boundary(at + CHECKED_BYTES));
        let (mut apart, right) = (encode(&text[from..at])?, encode(&text[at..to])?);
        apart.extend(right);
        if apart == encode(&text[from..to])? {
            return Ok(Some(at));
        }
    }
    Ok(None)
}

/// A lower bound of the longest chunk of a text, in bytes: the longest part without a candidate for a split.
pub(super) fn longest_chunk(text: &str) -> usize {
    let (mut rest, mut longest) = (text.as_bytes(), 0);
    while rest.len() > 2 * CHUNK_BYTES {
        let Some(at) = (CHUNK_BYTES..2 * CHUNK_BYTES).find(|&at| is_candidate(rest, at)) else { break };
        longest = longest.max(at);
        rest = &rest[at..];
    }
    longest.max(rest.len())
}

/// True if a text may be split at `at`: between two words, before the space, or at the beginning of a line.
fn is_candidate(text: &[u8], at: usize) -> bool {
    let word = |b: u8| b.is_ascii_alphanumeric();
    match text[at - 2..at + 2] {
        [_, a, b' ', b] if word(a) && word(b) => true,
        [a, b'\n', b, _] => a.is_ascii_graphic() && word(b),
        _ => false,
    }
}

/// Maximum bytes of text that become one token; `None` if unbounded.
pub(super) fn max_token_bytes(spec: &TokenizerSpec, pieces: &TokenBytes) -> Option<usize> {
    let tokens = || (0..spec.tokens.len()).map(|id| pieces.token_bytes(id as u32));
    let alone: HashSet<u8> =
        tokens().filter_map(|bytes| <[u8; 1]>::try_from(bytes).ok()).map(|[b]| b).collect();
    let unknown = spec.unk.is_some() && !spec.fuse_unk;
    let strips = spec.added.iter().any(|a| a.token.lstrip || a.token.rstrip);
    let shrinks = [&spec.normalizer, &spec.pre_tokenizer].into_iter().flatten().any(may_shrink);
    if strips || shrinks || !(alone.len() == 256 || unknown) {
        return None;
    }
    // An unknown token stands for one character, of up to four bytes.
    tokens().map(<[u8]>::len).max().map(|most| most.max(4))
}

/// True if a step, or one within it, may drop text.
fn may_shrink(step: &Value) -> bool {
    let within = |list: &str| step[list].as_array().is_some_and(|steps| steps.iter().any(may_shrink));
    let length = |text: &Value| text.as_str().map_or(0, str::len);
    let from = &step["pattern"]["String"];
    let replaced = step["type"] == "Replace" && (from.is_null() || length(&step["content"]) < length(from));
    replaced || step["behavior"] == "Removed" || within("normalizers") || within("pretokenizers")
}
