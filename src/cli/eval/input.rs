//! What `eval` predicts: a text, token ids, questions about facts.

use crate::dims::VOCAB;
use files::{Error, Result};
use serde::Deserialize;
use std::path::Path;
use text::tokenizer::{AddSpecial, Tokenizer};

/// What to predict.
pub(super) enum Input {
    Text(String),
    Tokens(TokenFile),
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum TokenFile {
    Plain(Vec<u32>),
    Chunked { chunk: usize, tokens: Vec<u32> },
}

impl Input {
    pub fn read(tokens: Option<&Path>, text: Option<&Path>) -> Result<Option<Self>> {
        match (tokens, text) {
            (Some(file), _) => Ok(Some(Input::Tokens(read_tokens(file)?))),
            (None, Some(file)) => Ok(Some(Input::Text(read(file, "--file")?))),
            (None, None) => Ok(None),
        }
    }

    pub fn chunk(&self) -> Option<usize> {
        match self {
            Input::Tokens(TokenFile::Chunked { chunk, .. }) => Some(*chunk),
            _ => None,
        }
    }

    /// Chunks without overlap. Those of a text each begin with the token that the model expects first.
    pub fn chunks(&self, size: usize, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
        if size < 2 {
            return Err(Error::Usage(format!("--tokens: chunk {size}; use at least 2")));
        }
        let (first, tokens) = match self {
            Input::Tokens(TokenFile::Plain(tokens) | TokenFile::Chunked { tokens, .. }) => {
                (None, tokens.clone())
            }
            Input::Text(text) => {
                let added = tokenizer.encode("", AddSpecial::Yes)?;
                let first = tokenizer.bos_id().filter(|id| added.first() == Some(id));
                (first, tokenizer.encode_plain(text)?)
            }
        };
        let step = size - usize::from(first.is_some());
        let chunks = tokens.chunks(step).map(|c| first.into_iter().chain(c.iter().copied()).collect());
        let chunks: Vec<Vec<u32>> = chunks.filter(|c: &Vec<u32>| c.len() > 1).collect();
        match chunks.is_empty() {
            true => Err(Error::Usage("nothing to predict: give a file of at least two tokens".into())),
            false => Ok(chunks),
        }
    }
}

/// A text file of sensible size.
fn read(file: &Path, flag: &str) -> Result<String> {
    const LIMIT: u64 = 64 << 20;
    let bad = |e: String| Error::Usage(format!("{flag} {}: {e}", file.display()));
    let meta = std::fs::metadata(file).map_err(|e| bad(e.to_string()))?;
    if !meta.is_file() || meta.len() > LIMIT {
        return Err(bad("is not a file of at most 64 MiB; give a smaller one".into()));
    }
    std::fs::read_to_string(file).map_err(|e| bad(e.to_string()))
}

fn read_tokens(file: &Path) -> Result<TokenFile> {
    serde_json::from_str(&read(file, "--tokens")?).map_err(|_| {
        Error::Usage(format!(
            "--tokens {}: give a JSON array of token ids, or {{\"chunk\": 512, \"tokens\": [...]}}",
            file.display()
        ))
    })
}

/// A fact stated early in a prompt that ends with the question about it.
#[derive(Deserialize)]
pub(super) struct Question {
    /// `plain` text, or `chat`.
    pub form: String,
    /// Tokens between the fact and the question, about.
    pub distance: usize,
    /// Without the tokens that the tokenizer adds.
    pub prompt: String,
    /// What a right answer begins with.
    pub answer_ids: Vec<u32>,
    /// Whether the model answers it in single precision, with all of the cache.
    pub correct_f32: bool,
}

#[derive(Deserialize)]
struct Questions {
    items: Vec<Question>,
}

/// The questions of a file, at least one.
pub(super) fn read_questions(file: &Path) -> Result<Vec<Question>> {
    let bad = |e: String| Error::Usage(format!("--recall {}: {e}", file.display()));
    let questions: Questions = serde_json::from_str(&read(file, "--recall")?).map_err(|e| {
        bad(format!(
            "{e}; give {{\"items\": [{{\"form\": \"plain\", \"distance\": 300, \"prompt\": \"...\", \
             \"answer_ids\": [...], \"correct_f32\": true}}, ...]}}"
        ))
    })?;
    if questions.items.is_empty() {
        return Err(bad("`items` is empty; give at least one question".into()));
    }
    for (i, q) in questions.items.iter().enumerate() {
        if q.answer_ids.is_empty() {
            return Err(bad(format!("item {i}: `answer_ids` is empty; give the ids of the answer")));
        }
        if let Some(id) = q.answer_ids.iter().find(|&&id| id as usize >= VOCAB) {
            let last = VOCAB - 1;
            return Err(bad(format!("item {i}: `answer_ids` has {id}, but the vocabulary ends at {last}")));
        }
    }
    Ok(questions.items)
}
