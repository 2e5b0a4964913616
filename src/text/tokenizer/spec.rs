//! The spec of a tokenizer, read from any kind of file, from which the library's tokenizer is built.

use super::files::format_json_value;
use super::pipeline::DecoderKind;
use files::error::escape;
use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, Tokenizer as Library};

/// Maximum bytes of all added tokens together; Llama 3's have 8 KB. The library builds one search automaton for all.
const MAX_ADDED: usize = 1 << 20;

/// The parts of a tokenizer.
#[derive(Debug)]
pub(super) struct TokenizerSpec {
    /// Model and added tokens, `[id]`.
    pub tokens: Vec<Option<String>>,
    pub vocab: Vocab,
    pub merges: Merges,
    pub unk: Option<(String, u32)>,
    pub fuse_unk: bool,
    pub byte_fallback: bool,
    pub ignore_merges: bool,
    pub added: Vec<AddedEntry>,
    pub normalizer: Option<Value>,
    pub pre_tokenizer: Option<Value>,
    pub decoder: DecoderKind,
    /// Ids added before a text if special tokens are wanted.
    pub prefix: Vec<u32>,
    /// Ids added after a text if special tokens are wanted.
    pub suffix: Vec<u32>,
}

/// One entry of `added_tokens`.
#[derive(Debug, Deserialize)]
pub(super) struct AddedEntry {
    pub id: u32,
    #[serde(flatten)]
    pub token: AddedToken,
}

impl TokenizerSpec {
    /// Builds the library's tokenizer, without decoder and post-processor, which are our own, and without truncation
    /// and padding.
    pub fn build_library(self) -> Result<Library, String> {
        if self.added.iter().map(|a| a.token.content.len()).sum::<usize>() > MAX_ADDED {
            return Err(format!("has more than {MAX_ADDED} bytes of control and user-defined tokens"));
        }
        let mut model = BPE::builder()
            .vocab_and_merges(self.vocab, self.merges)
            .fuse_unk(self.fuse_unk)
            .byte_fallback(self.byte_fallback)
            .ignore_merges(self.ignore_merges);
        if let Some((unk, _)) = self.unk {
            model = model.unk_token(unk);
        }
        let failed = |field: &str, why: &dyn ToString| format!("`{field}`: {}", escape(&why.to_string()));
        let mut library = Library::new(model.build().map_err(|e| failed("merges", &e))?);
        let normalizer = self.normalizer.map(serde_json::from_value::<NormalizerWrapper>).transpose();
        library.with_normalizer(normalizer.map_err(|e| failed("normalizer", &e))?);
        let pre_tokenizer = self.pre_tokenizer.map(serde_json::from_value::<PreTokenizerWrapper>).transpose();
        library.with_pre_tokenizer(pre_tokenizer.map_err(|e| failed("pre_tokenizer", &e))?);
        library.add_tokens(&self.added.iter().map(|a| a.token.clone()).collect::<Vec<_>>());
        // The library numbers added tokens itself, from the size of the vocabulary on; it skips empty and existing
        // ones.
        match self.added.iter().find(|a| library.token_to_id(&a.token.content) != Some(a.id)) {
            None => Ok(library),
            Some(AddedEntry { id, token }) => Err(format!(
                "field `added_tokens` gives id {id} to {}; supported: texts that are not empty, each once, with the id \
                 that the vocabulary has for them or the next one after its {} tokens",
                format_json_value(&token.content.as_str().into()),
                library.get_vocab_size(false)
            )),
        }
    }
}

/// The message for a token with an id of `limit` or more.
pub(super) fn id_error(token: &str, id: u32, limit: usize) -> String {
    format!(
        "token {} has id {id}, but the model this program was built for has {limit} tokens (ids up to {}); use that \
         model's tokenizer, or rebuild for this model: ANTIGRAVITY_MODEL=<its directory or GGUF file> \
         cargo build --release",
        format_json_value(&Value::from(token)),
        limit.saturating_sub(1),
    )
}
