//! What a program and its draft say to each other, version 1: one JSON object a line, requests on the draft's stdin, its
//! answers on its stdout. The draft begins with [`Hello`]; then each [`Request`] has one [`Answer`]. The draft ends when
//! its stdin does. Neither believes the other: lines have a greatest length, and ids, numbers and fields are checked.

use files::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read};
use text::sampler::{Rng, SamplerOptions};

/// Of these messages. Another one is refused.
pub const VERSION: u32 = 1;
/// Most tokens of a draft.
pub const MOST: usize = 64;
/// Most bytes of a draft's line, more than [`MOST`] ids take.
pub const ANSWER: u64 = 4 << 10;
/// Most bytes of a request: the ids of the longest context there can be.
pub const REQUEST: u64 = 256 << 20;

/// What a draft says first, once its model is loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`].
    pub antigravity_draft: u32,
    /// What the ids mean: [`Pieces::digest`](text::tokenizer::Pieces::digest).
    pub tokenizer: u32,
    /// Texts that it keeps a cache for.
    pub sequences: usize,
}

/// Asks for the tokens that a text goes on with.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// Its answer has it too.
    pub id: u64,
    /// Which of the texts, from 0.
    pub sequence: usize,
    /// So many of the text's tokens stay, and
    pub keep: usize,
    /// these come after them. A draft before is none of the text.
    pub tokens: Vec<u32>,
    /// Most tokens to draft.
    pub draft: usize,
    /// A draft ends where all of it is less probable.
    pub least: f32,
    /// How the text's tokens are chosen from now on, where that has changed; at first by the largest logit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampler: Option<SamplerOptions>,
    /// The random numbers that the next tokens will be drawn with: with the same ones, two models that agree nearly draw
    /// the same token nearly always.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub random: Option<Rng>,
}

/// The tokens that a draft expects.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// The request's.
    pub id: u64,
    /// At most as many as asked for.
    pub tokens: Vec<u32>,
}

/// A message as its line.
pub fn line(message: &impl Serialize) -> String {
    let text = serde_json::to_string(message).expect("invariant: numbers, texts and lists of them are JSON");
    text + "\n"
}

/// Reads the next line of at most `most` bytes, without its end; `None` at the end of the input.
///
/// # Errors
///
/// `Other` for a longer line, and for what cannot be read.
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

/// A message of its line.
///
/// # Errors
///
/// `Other` for anything else.
pub fn parse<T: DeserializeOwned>(line: &[u8]) -> Result<T> {
    serde_json::from_slice(line).map_err(|e| Error::Other(format!("not a message: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_through_as_they_are() {
        let sampler = SamplerOptions { logit_bias: vec![(3, -0.3)], temperature: 0.1, ..Default::default() };
        let random = Some(Rng::new(u64::MAX));
        let sent = Request {
            id: 7,
            sequence: 1,
            keep: 2,
            tokens: vec![0, u32::MAX],
            draft: 4,
            least: 0.5,
            sampler: Some(sampler),
            random,
        };
        let text = line(&sent) + "{}\n\nrest";
        let mut input = text.as_bytes();
        let found: Request = parse(&read_line(&mut input, REQUEST).unwrap().unwrap()).unwrap();
        assert_eq!(format!("{sent:?}"), format!("{found:?}"));
        assert!(parse::<Answer>(&read_line(&mut input, ANSWER).unwrap().unwrap()).is_err());
        assert_eq!(read_line(&mut input, ANSWER), Ok(Some(vec![])));
        // What is cut off is no line.
        assert_eq!(read_line(&mut input, ANSWER), Ok(None));
        assert!(line(&Answer { id: u64::MAX, tokens: vec![u32::MAX; MOST] }).len() < ANSWER as usize);
    }

    #[test]
    fn long_lines_and_other_fields_are_refused() {
        assert!(read_line(&mut &[b'a'; 20][..], 10).unwrap_err().to_string().contains("10 bytes"));
        assert!(read_line(&mut &b"aaaaaaaaa\n"[..], 10).unwrap().is_some());
        for bad in
            ["", "{", "[]", "{\"id\":1}", "{\"id\":-1,\"tokens\":[]}", "{\"id\":1,\"tokens\":[1],\"x\":2}"]
        {
            assert!(parse::<Answer>(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
