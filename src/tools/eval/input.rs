//! Input of `eval`: a text, token ids, questions about facts.

use crate::cli::args::read_text;
use crate::dims::VOCAB;
use files::{Error, Result};
use serde::Deserialize;
use std::path::Path;
use text::tokenizer::{AddSpecial, Tokenizer};

/// Text or tokens to predict.
pub enum EvalInput {
    Text(String),
    Tokens(TokenFile),
}

#[derive(Deserialize)]
#[serde(untagged)]
pub enum TokenFile {
    Plain(Vec<u32>),
    Chunked { chunk: usize, tokens: Vec<u32> },
}

impl EvalInput {
    pub fn read_input(tokens: Option<&Path>, text: Option<&Path>) -> Result<Option<Self>> {
        match (tokens, text) {
            (Some(file), _) => Ok(Some(EvalInput::Tokens(read_tokens(file)?))),
            (None, Some(file)) => Ok(Some(EvalInput::Text(read_text("--file", file)?))),
            (None, None) => Ok(None),
        }
    }

    pub fn chunk_size(&self) -> Option<usize> {
        match self {
            EvalInput::Tokens(TokenFile::Chunked { chunk, .. }) => Some(*chunk),
            _ => None,
        }
    }

    /// Splits the tokens into chunks without overlap. Each chunk of a text begins with the model's BOS token, if any.
    pub fn split_chunks(&self, size: usize, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
        if size < 2 {
            return Err(Error::Usage(format!("--tokens: chunk {size}; use at least 2")));
        }
        let (first, tokens) = match self {
            EvalInput::Tokens(TokenFile::Plain(tokens) | TokenFile::Chunked { tokens, .. }) => {
                (None, tokens.clone())
            }
            EvalInput::Text(text) => {
                let added = tokenizer.encode("", AddSpecial::Yes)?;
                let first = tokenizer.bos_id().filter(|id| added.first() == Some(id));
                (first, tokenizer.encode_plain(text)?)
            }
        };
        let step = size - usize::from(first.is_some());
        let chunks = tokens.chunks(step).map(|c| first.into_iter().chain(c.iter().copied()).collect());
        let chunks: Vec<Vec<u32>> = chunks.filter(|c: &Vec<u32>| c.len() > 1).collect();
        if chunks.is_empty() {
            return Err(Error::Usage("nothing to predict; use a file of at least two tokens".into()));
        }
        Ok(chunks)
    }
}

fn read_tokens(file: &Path) -> Result<TokenFile> {
    serde_json::from_str(&read_text("--tokens", file)?).map_err(|_| {
        Error::Usage(format!(
            "--tokens {}: give a JSON array of token ids, or {{\"chunk\": 512, \"tokens\": [...]}}",
            file.display()
        ))
    })
}

/// A prompt that states a fact and ends with a question about it.
#[derive(Deserialize)]
pub struct RecallQuestion {
    /// `plain` text, or `chat`.
    pub form: String,
    /// Approximate number of tokens between the fact and the question.
    pub distance: usize,
    /// The prompt, without the tokens that the tokenizer adds.
    pub prompt: String,
    /// Token ids that a correct answer begins with.
    pub answer_ids: Vec<u32>,
    /// True if the model answers correctly with an f32 cache and no eviction.
    pub correct_f32: bool,
}

/// A question with the token ids of its prompt.
pub struct EncodedQuestion {
    pub question: RecallQuestion,
    pub prompt: Vec<u32>,
}

#[derive(Deserialize)]
struct Questions {
    items: Vec<RecallQuestion>,
}

/// Reads the questions of a file, at least one.
pub fn read_questions(file: &Path) -> Result<Vec<RecallQuestion>> {
    let bad = |e: String| Error::Usage(format!("--recall {}: {e}", file.display()));
    let questions: Questions = serde_json::from_str(&read_text("--recall", file)?).map_err(|e| {
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
