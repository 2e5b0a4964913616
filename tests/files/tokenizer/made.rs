//! Small GGUF files with nothing but a tokenizer, each with something changed.

use crate::support::gguf::writer::{ARRAY, BOOL, F32, I32, Parts, STRING, U32, array, pair, text};
use crate::support::test_dir::TestDir;
use antigravity::{Error, Result};
use text::tokenizer::Tokenizer;

/// Types of tokens.
pub const TEXT: i32 = 1;
pub const UNKNOWN: i32 = 2;
pub const CONTROL: i32 = 3;
pub const USER: i32 = 4;
pub const UNUSED: i32 = 5;
pub const BYTE: i32 = 6;

/// Pairs of metadata by key, `tokenizer.ggml.` left out.
#[derive(Clone)]
pub struct Made(Vec<(&'static str, u32, Vec<u8>)>);

impl Made {
    /// The 256 bytes, three merges and a control token (259).
    pub fn byte_level() -> Self {
        let mut tokens: Vec<String> = bytes().map(String::from).collect();
        tokens.extend(["he", "ll", "hell", "<|end|>"].map(String::from));
        let types: Vec<i32> = (0..tokens.len()).map(|id| if id == 259 { CONTROL } else { TEXT }).collect();
        Self(vec![])
            .text("model", "gpt2")
            .text("pre", "gpt-2")
            .strings("tokens", &tokens)
            .integers("token_type", &types)
            .strings("merges", &["h e", "l l", "he ll"])
            .number("eos_token_id", 259)
    }

    /// These pieces with scores after `<unk>`, `<s>`, `</s>` and the bytes, which are the ids 0 to 258.
    pub fn sentence_piece(pieces: &[(String, f32)]) -> Self {
        let mut tokens = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
        tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
        let mut types = vec![UNKNOWN, CONTROL, CONTROL];
        types.resize(259, BYTE);
        let mut scores = vec![0.0; 259];
        for (piece, score) in pieces {
            tokens.push(piece.clone());
            types.push(TEXT);
            scores.push(*score);
        }
        Self(vec![])
            .text("model", "llama")
            .strings("tokens", &tokens)
            .integers("token_type", &types)
            .floats("scores", &scores)
            .number("bos_token_id", 1)
            .number("eos_token_id", 2)
    }

    pub fn with(mut self, key: &'static str, kind: u32, value: impl AsRef<[u8]>) -> Self {
        self = self.without(key);
        self.0.push((key, kind, value.as_ref().to_vec()));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.0.retain(|(other, ..)| *other != key);
        self
    }

    pub fn text(self, key: &'static str, value: &str) -> Self {
        self.with(key, STRING, text(value))
    }

    pub fn number(self, key: &'static str, value: u32) -> Self {
        self.with(key, U32, value.to_le_bytes())
    }

    pub fn truth(self, key: &'static str, value: u8) -> Self {
        self.with(key, BOOL, [value])
    }

    pub fn strings<S: AsRef<[u8]>>(self, key: &'static str, values: &[S]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(text).collect();
        self.with(key, ARRAY, array(STRING, values.len() as u64, elements))
    }

    pub fn integers(self, key: &'static str, values: &[i32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.with(key, ARRAY, array(I32, values.len() as u64, elements))
    }

    pub fn floats(self, key: &'static str, values: &[f32]) -> Self {
        let elements: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.with(key, ARRAY, array(F32, values.len() as u64, elements))
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut parts = Parts::default().pair(pair("general.architecture", STRING, text("llama")));
        for (key, kind, value) in &self.0 {
            parts = parts.pair(pair(&format!("tokenizer.ggml.{key}"), *kind, value));
        }
        parts.bytes()
    }

    /// Opens it, for a model with so many tokens.
    pub fn open(&self, limit: usize) -> Result<Tokenizer> {
        let temp = TestDir::new();
        Tokenizer::open(temp.write("made.gguf", self.bytes()).as_ref(), limit)
    }

    /// Why it is refused: one line that names the file.
    #[track_caller]
    pub fn refused(&self) -> String {
        match self.open(1 << 20) {
            Err(Error::Model(line)) => {
                assert!(line.contains("made.gguf: ") && !line.contains('\n') && line.len() < 700, "{line}");
                assert!(!line.contains("library failed"), "{line}");
                line
            }
            other => panic!("{other:?}"),
        }
    }
}

/// GPT-2's alphabet: printable Latin-1 as itself, the other bytes from U+0100 on.
fn bytes() -> impl Iterator<Item = char> {
    let plain = |b: &u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..);
    let others = (0..=255).filter(move |b| !plain(b)).zip('\u{100}'..);
    let others: std::collections::HashMap<u8, char> = others.collect();
    (0..=255u8).map(move |b| others.get(&b).copied().unwrap_or(b as char))
}
