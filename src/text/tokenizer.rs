//! Converts text to token ids and back, with the `tokenizer.json` published with a model or the metadata of its GGUF
//! file.
//!
//! The file is untrusted: its ids and sizes are checked ([`json`], [`gguf`]) before the `tokenizers` library gets its
//! parts, and every call into the library is contained ([`catch_panic`](::files::catch_panic)).

pub(crate) mod automaton;
pub mod files;
mod gguf;
#[cfg(test)]
mod hostile;
mod json;
mod pipeline;
mod settings;
mod spec;
mod split;
mod stop;
mod stream;
#[cfg(test)]
mod tests;

pub use stop::{StopScan, StopStrings};
pub use stream::{TextStream, TextStreamState, TokenBytes};

use crate::{Error, Result};
use ::files::catch_panic::{self, PanicContext};
use ::files::model_dir::ModelDir;
use ::files::source::gguf::Gguf;
use spec::TokenizerSpec;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use stream::SpecialTokenMode;
use tokenizers::Tokenizer as Library;

/// Maximum bytes of a text: more than any context holds.
const MAX_TEXT: usize = 64 << 20;
/// Longer chunks, in bytes, are encoded one at a time.
const LONG_CHUNK: usize = 4 * split::CHUNK_BYTES;
/// Maximum number of spaces in a row: with a million the library's regular expressions exhaust their stack, and it
/// silently leaves the rest of the text in one piece. (Line ends match differently.)
const MAX_SPACES: usize = 900_000;
/// A text encoded once while loading, so that a bad file fails then.
const PROBE: &str = "Hello, wörld! It's 12345 \u{1f600}\n\n  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\t한국어 x\r\n\0";

/// The choice to add the special tokens that the model's file puts around a text, such as Llama's begin-of-text token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddSpecial {
    Yes,
    No,
}

/// The treatment of text that spells a control token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SpecialText {
    /// It becomes that token: for prompts written in the model's format.
    #[default]
    AsTokens,
    /// It stays text: for messages of users and for documents.
    AsText,
}

/// A model's tokenizer.
pub struct Tokenizer {
    /// Its file, for messages.
    file: PathBuf,
    /// Write-locked only while special tokens are switched off.
    library: RwLock<Library>,
    /// Held while a long chunk is encoded, which takes many times its memory.
    long_chunk: Mutex<()>,
    pieces: Arc<TokenBytes>,
    vocab_size: usize,
    /// Maximum bytes of text that become one token; `None` if unbounded.
    max_token_bytes: Option<usize>,
    unk: Option<u32>,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    bos: Option<(u32, String)>,
    eos: Vec<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} tokens)", self.file.display(), self.vocab_size)
    }
}

impl Tokenizer {
    /// Opens the tokenizer of the model at `path`, for a model with `vocab_limit` tokens. The path is a GGUF file, a
    /// directory with a `tokenizer.json`, another file in such a directory, or a bundle.
    ///
    /// # Errors
    /// [`Error::Model`] for a file that is missing, damaged, not supported or of another model.
    pub fn open(path: &Path, vocab_limit: usize) -> Result<Self> {
        match files::find_settings(path)? {
            files::SettingsSource::Gguf(gguf) => Self::from_gguf(&gguf, vocab_limit),
            files::SettingsSource::Files(folder) => {
                let subject = library_subject(&folder.path(files::TOKENIZER_FILE));
                catch_panic::catch_panic_with_timeout(&subject, move || load_folder(&folder, vocab_limit))
            }
        }
    }

    /// The tokenizer that a GGUF file describes, for a model with `vocab_limit` tokens. The file need not have tensors.
    ///
    /// # Errors
    /// [`Error::Model`] with the key that is missing, damaged or not supported.
    pub fn from_gguf(gguf: &Gguf, vocab_limit: usize) -> Result<Self> {
        let (file, metadata) = (gguf.path().to_path_buf(), gguf.metadata().clone());
        catch_panic::catch_panic_with_timeout(&library_subject(gguf.path()), move || {
            let refused = |why: String| file_error(&file, &why, "use the GGUF file published with the model");
            let found = gguf::read_tokenizer(&metadata, vocab_limit).map_err(refused)?;
            let mut tokenizer = Self::new(file.clone(), found.spec).map_err(refused)?;
            tokenizer.set_bos(found.bos);
            tokenizer.eos = found.eos;
            tokenizer.check_probe()
        })
    }

    /// A tokenizer whose begin-of-text and end-of-text tokens are not set yet.
    fn new(file: PathBuf, spec: TokenizerSpec) -> std::result::Result<Self, String> {
        let special: Vec<u32> = spec.added.iter().filter(|a| a.token.special).map(|a| a.id).collect();
        let pieces = Arc::new(TokenBytes::new(spec.decoder.clone(), &spec.tokens, &special));
        let (unk, size) = (spec.unk.as_ref().map(|u| u.1), spec.tokens.len());
        let (prefix, suffix) = (spec.prefix.clone(), spec.suffix.clone());
        let longest = split::max_token_bytes(&spec, &pieces);
        let library = RwLock::new(spec.build_library()?);
        let (long_chunk, bos, eos) = (Mutex::default(), None, Vec::new());
        Ok(Self {
            file,
            library,
            long_chunk,
            pieces,
            vocab_size: size,
            max_token_bytes: longest,
            unk,
            prefix,
            suffix,
            bos,
            eos,
        })
    }

    fn set_bos(&mut self, id: Option<u32>) {
        let library = self.library.read().unwrap_or_else(PoisonError::into_inner);
        let bos = id.and_then(|id| Some((id, library.id_to_token(id)?)));
        drop(library);
        self.bos = bos;
    }

    /// Encodes a probe, so that a broken file is refused now.
    fn check_probe(self) -> Result<Self> {
        self.encode(PROBE, AddSpecial::Yes)?;
        self.encode_plain(PROBE)?;
        Ok(self)
    }

    /// Encodes `text`. The text of a special token becomes that token.
    pub fn encode(&self, text: &str, special: AddSpecial) -> Result<Vec<u32>> {
        self.encode_until(text, SpecialText::AsTokens, special, &|| false)
    }

    /// Encodes `text`, with control tokens in it treated as `specials` says. May take seconds; ends early once `stop`
    /// returns true.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `stop` was true before the end.
    pub fn encode_until(
        &self,
        text: &str,
        specials: SpecialText,
        special: AddSpecial,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<u32>> {
        let ids = match specials {
            SpecialText::AsText => self.encode_plain_until(text, stop)?,
            SpecialText::AsTokens => {
                self.check_text(text)?;
                self.encode_chunks(specials, text, stop)?
            }
        };
        Ok(match special {
            AddSpecial::No => ids,
            AddSpecial::Yes => [&self.prefix, ids.as_slice(), &self.suffix].concat(),
        })
    }

    /// A lower bound of the number of tokens of `text`, found without encoding it.
    pub fn min_tokens(&self, text: &str) -> usize {
        let Some(longest) = self.max_token_bytes else { return 0 };
        // Unicode normalisation keeps ASCII, and shortens other text to a twelfth at most.
        text.len() / if text.is_ascii() { longest } else { 12 * longest }
    }

    /// Encodes `text` with special tokens in it as ordinary text, as [`SpecialText::AsText`] does. Adds no tokens.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_plain_until(text, &|| false)
    }

    pub(crate) fn encode_plain_until(&self, text: &str, stop: &dyn Fn() -> bool) -> Result<Vec<u32>> {
        self.check_text(text)?;
        self.encode_as_text(text, stop)
    }

    fn encode_as_text(&self, text: &str, stop: &dyn Fn() -> bool) -> Result<Vec<u32>> {
        let ids = self.encode_chunks(SpecialText::AsText, text, stop)?;
        if !ids.iter().any(|&id| self.is_special(id) && Some(id) != self.unk) {
            return Ok(ids);
        }
        // The vocabulary also has the special token as a word. Half of it is not one.
        match text.char_indices().nth(text.chars().count() / 2) {
            Some((middle, _)) if middle > 0 => {
                let mut ids = self.encode_as_text(&text[..middle], stop)?;
                ids.extend(self.encode_as_text(&text[middle..], stop)?);
                Ok(ids)
            }
            _ => {
                let why = format!("the character {text:?} is a special token, so it cannot be used as text");
                Err(Error::model(&self.file, why))
            }
        }
    }

    /// Encodes `text` chunk by chunk: other threads can encode in between.
    fn encode_chunks(&self, specials: SpecialText, text: &str, stop: &dyn Fn() -> bool) -> Result<Vec<u32>> {
        let (mut rest, mut ids) = (text, Vec::new());
        while let Some(at) = split::find_split(rest, |part| self.encode_chunk(specials, part))? {
            ids.extend(self.encode_chunk(specials, &rest[..at])?);
            rest = &rest[at..];
            if stop() {
                return Err(Error::Interrupted);
            }
        }
        let lock = || self.long_chunk.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = (rest.len() > LONG_CHUNK).then(lock);
        ids.extend(self.encode_chunk(specials, rest)?);
        Ok(ids)
    }

    /// A lower bound of the longest chunk, in bytes, that `text` is encoded in, found without encoding it.
    pub fn longest_chunk(&self, text: &str) -> usize {
        split::longest_chunk(text)
    }

    fn encode_chunk(&self, specials: SpecialText, text: &str) -> Result<Vec<u32>> {
        if specials == SpecialText::AsTokens {
            return self.encode_with(&self.library.read().unwrap_or_else(PoisonError::into_inner), text);
        }
        let mut library = self.library.write().unwrap_or_else(PoisonError::into_inner);
        library.set_encode_special_tokens(true);
        let ids = self.encode_with(&library, text);
        library.set_encode_special_tokens(false);
        ids
    }

    fn encode_with(&self, library: &Library, text: &str) -> Result<Vec<u32>> {
        // Without offsets, which would take most of the time.
        // After a panic the library's caches are sound: they are locked per call and hold whole entries only.
        match catch_panic::catch_panic(&library_subject(&self.file), || library.encode_fast(text, false))? {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(Error::model(&self.file, format!("cannot encode a text: {e}"))),
        }
    }

    fn check_text(&self, text: &str) -> Result<()> {
        if text.len() > MAX_TEXT {
            let message = format!("the text has {} bytes; use at most {MAX_TEXT}", text.len());
            return Err(Error::Usage(message));
        }
        let (mut run, mut longest) = (0, 0);
        for c in text.chars() {
            run = if c.is_whitespace() && c != '\n' && c != '\r' { run + 1 } else { 0 };
            longest = longest.max(run);
        }
        if longest > MAX_SPACES {
            let message = format!("the text has {longest} spaces in a row; use at most {MAX_SPACES}");
            return Err(Error::Usage(message));
        }
        Ok(())
    }

    /// Decodes `ids` without special tokens. Bytes that are not UTF-8 become U+FFFD; unknown ids are skipped.
    pub fn decode(&self, ids: &[u32]) -> String {
        self.decode_stream().decode_all(ids)
    }

    /// Decodes `ids`, special tokens included.
    pub fn decode_with_special(&self, ids: &[u32]) -> String {
        self.pieces.decode_stream(SpecialTokenMode::Keep).decode_all(ids)
    }

    /// A stream that decodes ids one at a time, without special tokens.
    pub fn decode_stream(&self) -> TextStream<'_> {
        self.pieces.decode_stream(SpecialTokenMode::Skip)
    }

    /// The bytes of every token.
    pub fn pieces(&self) -> &Arc<TokenBytes> {
        &self.pieces
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The end-of-text ids.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The begin-of-text id, if the model has one.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos.as_ref().map(|b| b.0)
    }

    /// The text of the begin-of-text token, for chat templates.
    pub fn bos_token(&self) -> Option<&str> {
        self.bos.as_ref().map(|b| b.1.as_str())
    }

    /// The id of the token with exactly this text.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.library.read().unwrap_or_else(PoisonError::into_inner).token_to_id(token)
    }

    /// The texts of all control tokens, by id.
    pub fn special_tokens(&self) -> Vec<String> {
        let library = self.library.read().unwrap_or_else(PoisonError::into_inner);
        let ids = (0..self.vocab_size as u32).filter(|&id| self.is_special(id));
        ids.filter_map(|id| library.id_to_token(id)).collect()
    }

    /// True if `id` is a control token, which is not shown as text.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }
}

/// An error about a tokenizer's file, with its remedy.
fn file_error(file: &Path, why: &str, remedy: &str) -> Error {
    // The message about a token beyond the model has its own remedy.
    if why.starts_with("token ") {
        Error::model(file, why)
    } else {
        Error::model(file, format!("{why}; {remedy}"))
    }
}

fn load_folder(folder: &ModelDir, limit: usize) -> Result<Tokenizer> {
    let file = folder.path(files::TOKENIZER_FILE);
    let refused = |why: String| file_error(&file, &why, "use the tokenizer.json published with the model");
    let bytes = folder.read_file(files::TOKENIZER_FILE, json::MAX_FILE)?.ok_or_else(|| {
        Error::model(&file, "is missing; put the tokenizer.json published with the model there")
    })?;
    let spec = json::read_tokenizer_json(&bytes, limit).map_err(refused)?;
    drop(bytes);
    let mut tokenizer = Tokenizer::new(file.clone(), spec).map_err(refused)?;
    let settings = settings::load_boundary_tokens(folder, limit, &tokenizer)?;
    let bos = settings.bos.unwrap_or_else(|| tokenizer.prefix.first().copied());
    if let Some(id) = bos.filter(|id| settings.add_bos && !tokenizer.prefix.contains(id)) {
        tokenizer.prefix.insert(0, id);
    }
    tokenizer.set_bos(bos);
    tokenizer.eos = settings.eos;
    tokenizer.check_probe()
}

/// The context for messages about a failure of the library on `file`.
fn library_subject(file: &Path) -> PanicContext {
    PanicContext {
        place: file.display().to_string(),
        panic_message: "the tokenizer library failed on this file",
        timeout_message: "not loaded",
        remedy: "use the file published with the model",
    }
}
