//! Protocol between a program and its draft program, version 1: one JSON object per line, requests on the draft's
//! stdin, answers on its stdout. The draft first sends [`Handshake`]; then each [`DraftRequest`] gets one
//! [`DraftAnswer`]. The draft ends when its stdin does. Neither trusts the other: lines have a maximum length, and ids,
//! numbers and fields are checked.

use files::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read};
use text::sampler::{Rng, SamplerOptions};

/// Version of the protocol; any other is rejected.
pub const VERSION: u32 = 1;
/// Maximum number of tokens of a draft.
pub const MAX_DRAFT: usize = 64;
/// Maximum bytes of an answer's line, more than [`MAX_DRAFT`] ids take.
pub const MAX_ANSWER_BYTES: u64 = 4 << 10;
/// Maximum bytes of a request: the ids of the longest possible context.
pub const MAX_REQUEST_BYTES: u64 = 256 << 20;

/// Handshake of a draft once its model is loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Handshake {
    /// [`VERSION`].
    pub antigravity_draft: u32,
    /// Digest of its tokenizer: [`TokenBytes::compute_checksum`](text::tokenizer::TokenBytes::compute_checksum).
    pub tokenizer: u32,
    /// Number of texts that it keeps a cache for.
    pub sequences: usize,
}

/// Request for the next tokens of a text.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftRequest {
    /// Id, repeated in the answer.
    pub id: u64,
    /// Index of the text, from 0.
    pub sequence: usize,
    /// Number of leading tokens of the text that stay.
    pub keep: usize,
    /// Tokens after these. Earlier drafts are not part of the text.
    pub tokens: Vec<u32>,
    /// Maximum number of tokens to draft.
    pub draft: usize,
    /// Minimum joint probability: a draft ends before it falls below this.
    pub least: f32,
    /// New sampler settings, if they have changed; initially greedy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampler: Option<SamplerOptions>,
    /// Random state of the next tokens: with the same random numbers, two similar models nearly always sample the same
    /// token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<Rng>,
}

/// The tokens that a draft expects.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DraftAnswer {
    /// Id of the request.
    pub id: u64,
    /// Drafted tokens, at most as many as asked for.
    pub tokens: Vec<u32>,
}

/// Serializes a message as a line.
pub fn to_line(message: &impl Serialize) -> String {
    let text = serde_json::to_string(message).expect("invariant: numbers, texts and lists of them are JSON");
    text + "\n"
}

/// Reads the next line of at most `most` bytes, without its end; `None` at the end of the input.
///
/// # Errors
///
/// `Other` for a longer line or a failed read.
pub fn read_line(input: &mut impl BufRead, most: u64) -> Result<Option<Vec<u8>>> {
    let mut line = Vec::new();
    let read = input.by_ref().take(most).read_until(b'\n', &mut line);
    read.map_err(|e| Error::Other(format!("cannot read: {e}")))?;
    match line.pop() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(line)),
        Some(_) if (line.len() as u64) + 1 < most => Ok(None),
        Some(_) => Err(Error::Other(format!("a line of more than {most} bytes"))),
    }
}

/// Parses a message from its line.
///
/// # Errors
///
/// `Other` if it is not such a message.
pub fn parse_message<T: DeserializeOwned>(line: &[u8]) -> Result<T> {
    serde_json::from_slice(line).map_err(|e| Error::Other(format!("not a message: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_back_unchanged() {
        let sampler = SamplerOptions { logit_bias: vec![(3, -0.3)], temperature: 0.1, ..Default::default() };
        let random = Some(Rng::new(u64::MAX));
        let sent = DraftRequest {
            id: 7,
            sequence: 1,
            keep: 2,
            tokens: vec![0, u32::MAX],
            draft: 4,
            least: 0.5,
            sampler: Some(sampler),
            random,
        };
        let text = to_line(&sent) + "{}\n\nrest";
        let mut input = text.as_bytes();
        let found: DraftRequest =
            parse_message(&read_line(&mut input, MAX_REQUEST_BYTES).unwrap().unwrap()).unwrap();
        assert_eq!(format!("{sent:?}"), format!("{found:?}"));
        assert!(
            parse_message::<DraftAnswer>(&read_line(&mut input, MAX_ANSWER_BYTES).unwrap().unwrap()).is_err()
        );
        assert_eq!(read_line(&mut input, MAX_ANSWER_BYTES), Ok(Some(vec![])));
        // What is cut off is no line.
        assert_eq!(read_line(&mut input, MAX_ANSWER_BYTES), Ok(None));
        assert!(
            to_line(&DraftAnswer { id: u64::MAX, tokens: vec![u32::MAX; MAX_DRAFT] }).len()
                < MAX_ANSWER_BYTES as usize
        );
    }

    #[test]
    fn long_lines_and_other_fields_are_refused() {
        assert!(read_line(&mut &[b'a'; 20][..], 10).unwrap_err().to_string().contains("10 bytes"));
        assert!(read_line(&mut &b"aaaaaaaaa\n"[..], 10).unwrap().is_some());
        for bad in
            ["", "{", "[]", "{\"id\":1}", "{\"id\":-1,\"tokens\":[]}", "{\"id\":1,\"tokens\":[1],\"x\":2}"]
        {
            assert!(parse_message::<DraftAnswer>(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
