//! Text to token ids and back, with the `tokenizer.json` published with a model.
//!
//! The file may come from anywhere, so it is checked ([`check`]) before the `tokenizers` library
//! gets its parts, and every call into the library is contained ([`guard`]).

mod bounded;
mod check;
pub(crate) mod files;
mod guard;
#[cfg(test)]
mod hostile;
mod parts;
mod pattern;
mod settings;
mod stop;
mod stream;
#[cfg(test)]
mod tests;

pub use stop::{Scan, StopStrings};
pub use stream::{TextState, TextStream};

use crate::{Error, Result, dims};
use check::Checked;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};
use stream::{Pieces, Special};
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, Tokenizer as Library};

/// Encoding takes about 100 bytes of memory a byte of text.
const MAX_TEXT: usize = 64 << 20;
/// With a million blanks in a row the library's regular expressions run out of their stack, and it
/// silently leaves the rest of the text in one piece. (Line ends are matched another way.)
const MAX_BLANKS: usize = 900_000;
/// Encoded once while loading, so that a file that fails does so then.
const PROBE: &str = "Hello, wörld! It's 12345 \u{1f600}\n\n  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\t한국어 x\r\n\0";

/// Whether to put around a text what the model's file says, for Llama a begin-of-text token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddSpecial {
    Yes,
    No,
}

/// A model's tokenizer.
pub struct Tokenizer {
    /// Its file, for messages.
    file: PathBuf,
    /// Locked for writing only while special tokens are switched off.
    library: RwLock<Library>,
    pieces: Pieces,
    size: usize,
    unk: Option<u32>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bos: Option<(u32, String)>,
    eos: Vec<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} tokens)", self.file.display(), self.size)
    }
}

impl Tokenizer {
    /// Loads the tokenizer of the model in `dir`, to go with the baked model.
    pub fn load(dir: &Path) -> Result<Self> {
        Self::load_for(dir, dims::VOCAB)
    }

    /// Loads the tokenizer in `dir` for a model with `vocab_limit` tokens.
    pub fn load_for(dir: &Path, vocab_limit: usize) -> Result<Self> {
        let file = dir.join("tokenizer.json");
        let dir = dir.to_path_buf();
        guard::guarded_with_limit(&file, move || load(&dir, vocab_limit))
    }

    /// The ids of `text`, in which the text of a special token becomes that token.
    pub fn encode(&self, text: &str, special: AddSpecial) -> Result<Vec<u32>> {
        self.check_text(text)?;
        let library = self.library.read().unwrap_or_else(PoisonError::into_inner);
        let ids = self.run(&library, text)?;
        Ok(match special {
            AddSpecial::No => ids,
            AddSpecial::Yes => [&self.prefix, ids.as_slice(), &self.suffix].concat(),
        })
    }

    /// The ids of `text`, in which the text of a special token is text like any other: for what
    /// users and documents say. Adds nothing.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.check_text(text)?;
        let mut library = self.library.write().unwrap_or_else(PoisonError::into_inner);
        library.set_encode_special_tokens(true);
        let ids = self.plain(&library, text);
        library.set_encode_special_tokens(false);
        ids
    }

    fn plain(&self, library: &Library, text: &str) -> Result<Vec<u32>> {
        let ids = self.run(library, text)?;
        if !ids.iter().any(|&id| self.is_special(id) && Some(id) != self.unk) {
            return Ok(ids);
        }
        // The vocabulary has the special token as a word too. In two halves it is none.
        match text.char_indices().nth(text.chars().count() / 2) {
            Some((middle, _)) if middle > 0 => {
                let mut ids = self.plain(library, &text[..middle])?;
                ids.extend(self.plain(library, &text[middle..])?);
                Ok(ids)
            }
            _ => Err(Error::model(
                &self.file,
                format!("the character {text:?} is a special token, so it cannot be used as text"),
            )),
        }
    }

    fn run(&self, library: &Library, text: &str) -> Result<Vec<u32>> {
        // Without offsets: they take most of the time and are not needed.
        let encoding = guard::guarded(&self.file, || library.encode_fast(text, false))?;
        let encoding =
            encoding.map_err(|e| Error::model(&self.file, format!("cannot encode a text: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn check_text(&self, text: &str) -> Result<()> {
        if text.len() > MAX_TEXT {
            let message = format!("a text of {} bytes; use at most {MAX_TEXT} bytes at a time", text.len());
            return Err(Error::Usage(message));
        }
        let (mut run, mut longest) = (0, 0);
        for c in text.chars() {
            run = if c.is_whitespace() && c != '\n' && c != '\r' { run + 1 } else { 0 };
            longest = longest.max(run);
        }
        if longest > MAX_BLANKS {
            let message = format!("a text with {longest} blanks in a row; use at most {MAX_BLANKS}");
            return Err(Error::Usage(message));
        }
        Ok(())
    }

    /// The text of `ids` without special tokens. Bytes that are not UTF-8 become U+FFFD, ids that
    /// no token has become nothing.
    pub fn decode(&self, ids: &[u32]) -> String {
        decode(self.stream(), ids)
    }

    /// The text of `ids`, special tokens included.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        decode(self.pieces.stream(Special::Keep), ids)
    }

    /// Decodes ids one at a time, without special tokens.
    pub fn stream(&self) -> TextStream<'_> {
        self.pieces.stream(Special::Skip)
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.size
    }

    /// The ids that end a text.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The id that begins a text, if the model knows one.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos.as_ref().map(|b| b.0)
    }

    /// The text of [`bos_id`](Self::bos_id), for chat templates.
    pub fn bos_token(&self) -> Option<&str> {
        self.bos.as_ref().map(|b| b.1.as_str())
    }

    /// The id of exactly this token.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.library.read().unwrap_or_else(PoisonError::into_inner).token_to_id(token)
    }

    /// Whether `id` is a control token, which no text shows.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }
}

fn decode(mut stream: TextStream<'_>, ids: &[u32]) -> String {
    let mut text = String::new();
    for &id in ids {
        stream.push_into(id, &mut text);
    }
    text + &stream.finish()
}

fn load(dir: &Path, limit: usize) -> Result<Tokenizer> {
    let file = dir.join("tokenizer.json");
    let broken =
        |why: String| Error::model(&file, format!("{why}; use the tokenizer.json published with the model"));
    let json = files::read(&file, check::MAX_FILE)?.ok_or_else(|| {
        Error::model(&file, "is missing; put the tokenizer.json published with the model there")
    })?;
    // The message about a vocabulary that does not fit has its own remedy.
    let checked = check::check(&json, limit).map_err(|why| match why.starts_with("token ") {
        true => Error::model(&file, why),
        false => broken(why),
    })?;
    drop(json);
    let special: Vec<u32> = checked.added.iter().filter(|a| a.special).map(|a| a.id).collect();
    let pieces = Pieces::new(checked.decoder.clone(), &checked.tokens, &special);
    let (unk, size) = (checked.unk.as_ref().map(|u| u.1), checked.tokens.len());
    let (mut prefix, suffix) = (checked.prefix.clone(), checked.suffix.clone());
    let library = build(checked).map_err(broken)?;
    let settings = settings::load(dir, limit, &|token| library.token_to_id(token))?;
    let bos = settings.bos.unwrap_or_else(|| prefix.first().copied());
    if let Some(id) = bos.filter(|id| settings.add_bos && !prefix.contains(id)) {
        prefix.insert(0, id);
    }
    let bos = bos.and_then(|id| Some((id, library.id_to_token(id)?)));
    let library = RwLock::new(library);
    let tokenizer = Tokenizer { file, library, pieces, size, unk, prefix, suffix, bos, eos: settings.eos };
    tokenizer.encode(PROBE, AddSpecial::Yes)?;
    tokenizer.encode_plain(PROBE)?;
    Ok(tokenizer)
}

/// The library's tokenizer, from checked parts. It gets no decoder, post-processor, truncation or
/// padding: those are ours, or not wanted.
fn build(checked: Checked) -> std::result::Result<Library, String> {
    let vocab: Vocab = checked.vocab.into_iter().collect();
    let mut model = BPE::builder()
        .vocab_and_merges(vocab, checked.merges)
        .fuse_unk(checked.fuse_unk)
        .byte_fallback(checked.byte_fallback)
        .ignore_merges(checked.ignore_merges);
    if let Some((unk, _)) = checked.unk {
        model = model.unk_token(unk);
    }
    let model = model.build().map_err(|e| format!("field `model.merges`: {}", files::cut(&e.to_string())))?;
    let mut library = Library::new(model);
    let step = |field: &str, e: serde_json::Error| format!("field `{field}`: {}", files::cut(&e.to_string()));
    let normalizer: Option<NormalizerWrapper> =
        checked.normalizer.map(serde_json::from_value).transpose().map_err(|e| step("normalizer", e))?;
    let pre_tokenizer: Option<PreTokenizerWrapper> = checked
        .pre_tokenizer
        .map(serde_json::from_value)
        .transpose()
        .map_err(|e| step("pre_tokenizer", e))?;
    library.with_normalizer(normalizer);
    library.with_pre_tokenizer(pre_tokenizer);
    let token = |a: &check::Added| {
        AddedToken::from(a.content.as_str(), a.special)
            .single_word(a.single_word)
            .lstrip(a.lstrip)
            .rstrip(a.rstrip)
            .normalized(a.normalized)
    };
    library.add_tokens(&checked.added.iter().map(token).collect::<Vec<_>>());
    // The library numbers added tokens itself, on from the size of the vocabulary.
    for a in &checked.added {
        let id = library.token_to_id(&a.content);
        if id != Some(a.id) {
            return Err(format!(
                "field `added_tokens` gives id {} to {}, but ids must follow the {} tokens of the vocabulary \
                 in order",
                a.id,
                files::cut(&a.content),
                library.get_vocab_size(false)
            ));
        }
    }
    Ok(library)
}
