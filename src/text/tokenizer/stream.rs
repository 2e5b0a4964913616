//! Decodes token ids to text, all at once or one at a time: never half a character, never a lost space.
//!
//! The two decoders of the supported families are implemented here, so that every token of a stream costs the same and
//! the pieces add up to exactly the text of all ids.

use super::pipeline::DecoderKind;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// The bytes that each id stands for.
#[derive(Debug, Clone)]
pub struct TokenBytes {
    kind: DecoderKind,
    /// Bytes of all ids, concatenated; ids without a token have none.
    bytes: Vec<u8>,
    /// End of the bytes of each id, `[id]`.
    ends: Vec<u32>,
    /// `[id]`
    flags: Vec<TokenFlag>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenFlag {
    Text,
    /// A token for one byte of UTF-8 (`<0xE2>`).
    Byte,
    Special,
}

/// The treatment of special tokens when decoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpecialTokenMode {
    Skip,
    Keep,
}

impl TokenBytes {
    /// The bytes of the tokens `[id]`, with these special ids.
    pub(super) fn new(kind: DecoderKind, tokens: &[Option<String>], special: &[u32]) -> Self {
        let mut pieces = Self { kind, bytes: vec![], ends: vec![], flags: vec![] };
        for token in tokens {
            let token = token.as_deref().unwrap_or("");
            let flag = pieces.append_token(token);
            pieces.flags.push(flag);
            pieces.ends.push(pieces.bytes.len() as u32);
        }
        for &id in special {
            pieces.flags[id as usize] = TokenFlag::Special;
        }
        pieces
    }

    /// A checksum of the bytes and special ids of a vocabulary. Ids without a token at the end, which files are padded
    /// with, do not count.
    pub fn compute_checksum(&self) -> u32 {
        let used = self.ends.partition_point(|&end| (end as usize) < self.bytes.len());
        let mut hash = crc32fast::Hasher::new();
        hash.update(&self.bytes);
        for (end, flag) in self.ends.iter().zip(&self.flags).take(used + 1) {
            hash.update(&end.to_le_bytes());
            hash.update(&[*flag as u8]);
        }
        hash.finalize()
    }

    fn append_token(&mut self, token: &str) -> TokenFlag {
        match &self.kind {
            DecoderKind::ByteLevel => {
                let start = self.bytes.len();
                for c in token.chars() {
                    match byte_of(c) {
                        Some(byte) => self.bytes.push(byte),
                        None => {
                            // A character outside the alphabet: the token stands for itself.
                            self.bytes.truncate(start);
                            self.bytes.extend_from_slice(token.as_bytes());
                            break;
                        }
                    }
                }
                TokenFlag::Text
            }
            DecoderKind::SentencePiece { replace, byte_fallback, .. } => {
                let mut text = token.to_string();
                for (from, to) in replace {
                    text = text.replace(from, to);
                }
                match byte_of_token(&text) {
                    Some(byte) if *byte_fallback => {
                        self.bytes.push(byte);
                        TokenFlag::Byte
                    }
                    _ => {
                        self.bytes.extend_from_slice(text.as_bytes());
                        TokenFlag::Text
                    }
                }
            }
        }
    }

    fn get(&self, id: u32) -> Option<(&[u8], TokenFlag)> {
        let id = id as usize;
        let end = *self.ends.get(id)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id - 1] as usize };
        Some((&self.bytes[start..end], self.flags[id]))
    }

    /// True if `id` is a control token, which is not shown as text.
    pub fn is_special(&self, id: u32) -> bool {
        self.flags.get(id as usize) == Some(&TokenFlag::Special)
    }

    /// The bytes of one token, control tokens included; empty for an unknown id.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.get(id).map_or(&[], |(bytes, _)| bytes)
    }

    /// The text of one token by itself, control tokens included. Bytes that are only part of a character become U+FFFD.
    pub fn token_text(&self, id: u32) -> Cow<'_, str> {
        String::from_utf8_lossy(self.token_bytes(id))
    }

    /// Tokens with these texts (ASCII); those in `special` are control tokens.
    #[cfg(test)]
    pub fn of_texts(texts: &[&str], special: &[u32]) -> Self {
        let tokens: Vec<_> = texts.iter().map(|t| Some(t.to_string())).collect();
        Self::new(DecoderKind::ByteLevel, &tokens, special)
    }

    pub(super) fn decode_stream(&self, special: SpecialTokenMode) -> TextStream<'_> {
        TextStream { pieces: self, special, shown: vec![], pending: vec![], strip: self.strip_start() }
    }

    /// The character that is stripped from the start of a text, and the maximum number of times.
    fn strip_start(&self) -> Option<(char, usize)> {
        match self.kind {
            DecoderKind::ByteLevel => None,
            DecoderKind::SentencePiece { strip, .. } => strip,
        }
    }
}

/// The byte of a token like `<0x0A>`.
pub(super) fn byte_of_token(text: &str) -> Option<u8> {
    let hex = text.strip_prefix("<0x")?.strip_suffix('>').filter(|hex| hex.len() == 2)?;
    u8::from_str_radix(hex, 16).ok()
}

/// The byte that GPT-2's byte-level alphabet writes as `c`: printable Latin-1 as itself, the other 68 bytes, in order,
/// from U+0100 on.
pub(super) fn byte_of(c: char) -> Option<u8> {
    match c {
        '!'..='~' | '\u{a1}'..='\u{ac}' | '\u{ae}'..='\u{ff}' => Some(c as u8),
        '\u{100}'..='\u{120}' => Some((c as u32 - 0x100) as u8),
        '\u{121}'..='\u{142}' => Some((c as u32 - 0x121 + 0x7f) as u8),
        '\u{143}' => Some(0xad),
        _ => None,
    }
}

/// Decodes ids one at a time. The pieces add up to the text of all ids.
#[derive(Debug, Clone)]
pub struct TextStream<'a> {
    pieces: &'a TokenBytes,
    special: SpecialTokenMode,
    /// Special tokens that are shown as text.
    shown: Vec<u32>,
    /// Bytes that are not shown yet. Byte level: the start of one character. SentencePiece: the current run of byte
    /// tokens.
    pending: Vec<u8>,
    /// The character to strip from the start of the text, and the remaining number of times.
    strip: Option<(char, usize)>,
}

/// The state of a stream between two ids.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextStreamState {
    /// Bytes that do not form a character yet.
    pending: Vec<u8>,
    /// Number of characters that may still be stripped from the start; `None` once the text has begun.
    strip: Option<usize>,
}

impl TextStream<'_> {
    /// A stream that shows these special tokens as text.
    pub fn with_shown_tokens(self, shown: Vec<u32>) -> Self {
        Self { shown, ..self }
    }

    /// Its state, to be saved.
    pub fn state(&self) -> TextStreamState {
        TextStreamState { pending: self.pending.clone(), strip: self.strip.map(|(_, left)| left) }
    }

    /// Continues from the state of another stream of the same tokenizer.
    pub fn restore_state(&mut self, state: &TextStreamState) {
        self.pending.clone_from(&state.pending);
        self.strip = self.pieces.strip_start().zip(state.strip).map(|((c, most), left)| (c, left.min(most)));
    }

    /// Decodes all of `ids` and ends the stream.
    pub(crate) fn decode_all(mut self, ids: &[u32]) -> String {
        let mut text = String::new();
        ids.iter().for_each(|&id| self.push_into(id, &mut text));
        text + &self.finish()
    }

    /// Decodes one id; returns the characters that it completes.
    pub fn push(&mut self, id: u32) -> String {
        let mut out = String::new();
        self.push_into(id, &mut out);
        out
    }

    /// [`push`](Self::push) that appends to `out`.
    pub fn push_into(&mut self, id: u32, out: &mut String) {
        let Some((bytes, flag)) = self.pieces.get(id) else { return };
        if flag == TokenFlag::Special && self.special == SpecialTokenMode::Skip && !self.shown.contains(&id) {
            return;
        }
        match self.pieces.kind {
            DecoderKind::ByteLevel => {
                self.pending.extend_from_slice(bytes);
                self.take_complete_chars(out);
            }
            DecoderKind::SentencePiece { .. } if flag == TokenFlag::Byte => {
                self.pending.extend_from_slice(bytes)
            }
            DecoderKind::SentencePiece { .. } => {
                self.end_run(out);
                // Tokens are whole strings.
                self.push_text(&String::from_utf8_lossy(bytes), out);
            }
        }
    }

    /// Ends the stream and returns the rest; an incomplete character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let mut out = String::new();
        match self.pieces.kind {
            DecoderKind::ByteLevel => {
                out.push_str(&String::from_utf8_lossy(&self.pending));
                self.pending.clear();
            }
            DecoderKind::SentencePiece { .. } => self.end_run(&mut out),
        }
        out
    }

    /// Moves complete characters to `out`, with U+FFFD for invalid bytes.
    fn take_complete_chars(&mut self, out: &mut String) {
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(e) => {
                    let (valid, after) = rest.split_at(e.valid_up_to());
                    out.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(length) = e.error_len() else { break };
                    out.push('\u{fffd}');
                    rest = &rest[length..];
                }
            }
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
    }

    /// Ends a run of byte tokens: it becomes text if the whole run is UTF-8, otherwise one U+FFFD for each byte.
    fn end_run(&mut self, out: &mut String) {
        if self.pending.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.pending);
        let text = String::from_utf8(run).unwrap_or_else(|e| "\u{fffd}".repeat(e.as_bytes().len()));
        self.push_text(&text, out);
    }

    fn push_text(&mut self, text: &str, out: &mut String) {
        let mut text = text;
        while let Some((c, left)) = self.strip {
            match text.chars().next() {
                None => return,
                Some(first) if first == c && left > 0 => {
                    text = &text[c.len_utf8()..];
                    self.strip = Some((c, left - 1));
                }
                Some(_) => self.strip = None,
            }
        }
        out.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_stream_continues_in_a_new_one() {
        let strip = Some((' ', 2));
        let kind = DecoderKind::SentencePiece {
            replace: vec![("▁".into(), " ".into())],
            byte_fallback: true,
            strip,
        };
        let tokens = ["▁", "▁a", "<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "b"].map(|t| Some(t.to_string()));
        for kind in [kind, DecoderKind::ByteLevel] {
            let pieces = TokenBytes::new(kind, &tokens, &[]);
            let ids = [0, 2, 3, 4, 0, 0, 1, 5, 2, 3, 6, 2];
            let mut whole = pieces.decode_stream(SpecialTokenMode::Skip);
            let text: String = ids.iter().map(|&id| whole.push(id)).collect::<String>() + &whole.finish();
            for cut in 0..=ids.len() {
                let mut stream = pieces.decode_stream(SpecialTokenMode::Skip);
                let mut parts: String = ids[..cut].iter().map(|&id| stream.push(id)).collect();
                let state = serde_json::to_string(&stream.state()).expect("JSON");
                let mut other = pieces.decode_stream(SpecialTokenMode::Skip);
                other.restore_state(&serde_json::from_str(&state).expect("a state"));
                parts.extend(ids[cut..].iter().map(|&id| other.push(id)));
                assert_eq!(parts + &other.finish(), text, "cut at {cut}");
            }
        }
    }
}
