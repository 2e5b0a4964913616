//! Text to token ids and back, with the `tokenizer.json` published with a model or the metadata of its GGUF file.
//!
//! The file may come from anywhere, so its ids and sizes are checked ([`json`], [`gguf`]) before the `tokenizers`
//! library gets its parts, and every call into the library is contained ([`files::containment`]).

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

pub use stop::{Scan, StopStrings};
pub use stream::{Pieces, TextState, TextStream};

use crate::{Error, Result};
use ::files::containment::{self, Subject};
use ::files::folder::Folder;
use ::files::source::gguf::Gguf;
use spec::TokenizerSpec;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use stream::Special;
use tokenizers::Tokenizer as Library;

/// More than any context holds.
const MAX_TEXT: usize = 64 << 20;
/// Parts of more bytes are encoded one at a time.
const LONG_PART: usize = 4 * split::CHUNK_BYTES;
/// With a million blanks in a row the library's regular expressions exhaust their stack, and it silently leaves the
/// rest of the text in one piece. (Line ends match differently.)
const MAX_BLANKS: usize = 900_000;
/// Encoded once while loading, so that a bad file fails then.
const PROBE: &str = "Hello, wörld! It's 12345 \u{1f600}\n\n  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!\t한국어 x\r\n\0";

/// The choice to add the tokens that the model's file puts around a text, such as Llama's begin-of-text token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddSpecial {
    Yes,
    No,
}

/// The meaning of a text that spells a control token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Specials {
    /// It is that token: for prompts in a form that somebody wrote for the model.
    #[default]
    Tokens,
    /// It stays text: for what users and documents say.
    Text,
}

/// A model's tokenizer.
pub struct Tokenizer {
    /// Its file, for messages.
    file: PathBuf,
    /// Locked for writing only while special tokens are switched off.
    library: RwLock<Library>,
    /// Held while a long part of a text is encoded, which takes many times its memory.
    alone: Mutex<()>,
    pieces: Arc<Pieces>,
    size: usize,
    /// The most bytes of text that become one token, if there is a most.
    longest: Option<usize>,
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
    /// Opens the tokenizer of the model at `path`, for a model with `vocab_limit` tokens: a GGUF file, whose metadata
    /// hold it, or a directory with a `tokenizer.json`, or another file in such a directory, or a bundle.
    ///
    /// # Errors
    /// [`Error::Model`] for a file that is missing, damaged or of another kind or model.
    pub fn open(path: &Path, vocab_limit: usize) -> Result<Self> {
        match files::settings_of(path)? {
            files::SettingsSource::Gguf(gguf) => Self::from_gguf(&gguf, vocab_limit),
            files::SettingsSource::Files(folder) => {
                let subject = subject(&folder.path(files::TOKENIZER));
                containment::guarded_with_limit(&subject, move || load(&folder, vocab_limit))
            }
        }
    }

    /// The tokenizer that a GGUF file describes, for a model with `vocab_limit` tokens. The file may hold nothing
    /// else.
    ///
    /// # Errors
    /// [`Error::Model`] with the key that is missing, damaged or not supported.
    pub fn from_gguf(gguf: &Gguf, vocab_limit: usize) -> Result<Self> {
        let (file, metadata) = (gguf.path().to_path_buf(), gguf.metadata().clone());
        containment::guarded_with_limit(&subject(gguf.path()), move || {
            let refused = |why: String| refused(&file, &why, "use the GGUF file published with the model");
            let found = gguf::read(&metadata, vocab_limit).map_err(refused)?;
            let mut tokenizer = Self::new(file.clone(), found.spec).map_err(refused)?;
            tokenizer.set_bos(found.bos);
            tokenizer.eos = found.eos;
            tokenizer.probed()
        })
    }

    /// A tokenizer without begin-of-text and end-of-text tokens yet.
    fn new(file: PathBuf, spec: TokenizerSpec) -> std::result::Result<Self, String> {
        let special: Vec<u32> = spec.added.iter().filter(|a| a.token.special).map(|a| a.id).collect();
        let pieces = Arc::new(Pieces::new(spec.decoder.clone(), &spec.tokens, &special));
        let (unk, size) = (spec.unk.as_ref().map(|u| u.1), spec.tokens.len());
        let (prefix, suffix) = (spec.prefix.clone(), spec.suffix.clone());
        let longest = split::longest_token(&spec, &pieces);
        let library = RwLock::new(spec.build()?);
        let alone = Mutex::default();
        Ok(Self { file, library, alone, pieces, size, longest, unk, prefix, suffix, bos: None, eos: vec![] })
    }

    fn set_bos(&mut self, id: Option<u32>) {
        let library = self.library.read().unwrap_or_else(PoisonError::into_inner);
        let bos = id.and_then(|id| Some((id, library.id_to_token(id)?)));
        drop(library);
        self.bos = bos;
    }

    /// Encodes a probe, so that a file with which that fails is refused now.
    fn probed(self) -> Result<Self> {
        self.encode(PROBE, AddSpecial::Yes)?;
        self.encode_plain(PROBE)?;
        Ok(self)
    }

    /// The ids of `text`. The text of a special token becomes that token.
    pub fn encode(&self, text: &str, special: AddSpecial) -> Result<Vec<u32>> {
        self.encode_until(text, Specials::Tokens, special, &|| false)
    }

    /// The ids of `text`, whose control tokens become what `specials` says. That may take seconds, until `stop` is true.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if `stop` was true before the end.
    pub fn encode_until(
        &self,
        text: &str,
        specials: Specials,
        special: AddSpecial,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<u32>> {
        let ids = match specials {
            Specials::Text => self.encode_plain_until(text, stop)?,
            Specials::Tokens => {
                self.check_text(text)?;
                self.run(specials, text, stop)?
            }
        };
        Ok(match special {
            AddSpecial::No => ids,
            AddSpecial::Yes => [&self.prefix, ids.as_slice(), &self.suffix].concat(),
        })
    }

    /// A number of tokens that `text` surely has, known without encoding it.
    pub fn least_tokens(&self, text: &str) -> usize {
        let Some(longest) = self.longest else { return 0 };
        // Normal forms leave ASCII as it is, and make at most a twelfth of other text.
        text.len() / if text.is_ascii() { longest } else { 12 * longest }
    }

    /// The ids of `text`, with special tokens as ordinary text: for what users and documents say. Adds no tokens.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_plain_until(text, &|| false)
    }

    pub(crate) fn encode_plain_until(&self, text: &str, stop: &dyn Fn() -> bool) -> Result<Vec<u32>> {
        self.check_text(text)?;
        self.plain(text, stop)
    }

    fn plain(&self, text: &str, stop: &dyn Fn() -> bool) -> Result<Vec<u32>> {
        let ids = self.run(Specials::Text, text, stop)?;
        if !ids.iter().any(|&id| self.is_special(id) && Some(id) != self.unk) {
            return Ok(ids);
        }
        // The vocabulary also has the special token as a word. Cut in half, it is not one.
        match text.char_indices().nth(text.chars().count() / 2) {
            Some((middle, _)) if middle > 0 => {
                let mut ids = self.plain(&text[..middle], stop)?;
                ids.extend(self.plain(&text[middle..], stop)?);
                Ok(ids)
            }
            _ => Err(Error::model(
                &self.file,
                format!("the character {text:?} is a special token, so it cannot be used as text"),
            )),
        }
    }

    /// The ids of `text`, part by part: another text has its turn in between.
    fn run(&self, specials: Specials, text: &str, stop: &dyn Fn() -> bool) -> Result<Vec<u32>> {
        let (mut rest, mut ids) = (text, Vec::new());
        while let Some(at) = split::find_split(rest, |part| self.run_part(specials, part))? {
            ids.extend(self.run_part(specials, &rest[..at])?);
            rest = &rest[at..];
            if stop() {
                return Err(Error::Interrupted);
            }
        }
        let _alone =
            (rest.len() > LONG_PART).then(|| self.alone.lock().unwrap_or_else(PoisonError::into_inner));
        ids.extend(self.run_part(specials, rest)?);
        Ok(ids)
    }

    /// Bytes of `text` that are encoded at once, as far as that is known without encoding it.
    pub fn longest_part(&self, text: &str) -> usize {
        split::longest_chunk(text)
    }

    fn run_part(&self, specials: Specials, text: &str) -> Result<Vec<u32>> {
        if specials == Specials::Tokens {
            return self.run_in(&self.library.read().unwrap_or_else(PoisonError::into_inner), text);
        }
        let mut library = self.library.write().unwrap_or_else(PoisonError::into_inner);
        library.set_encode_special_tokens(true);
        let ids = self.run_in(&library, text);
        library.set_encode_special_tokens(false);
        ids
    }

    fn run_in(&self, library: &Library, text: &str) -> Result<Vec<u32>> {
        // Without offsets, which would take most of the time.
        // After a panic the library's caches are sound: they are locked per call and hold whole entries only.
        let encoding = containment::guarded(&subject(&self.file), || library.encode_fast(text, false))?;
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

    /// The text of `ids` without special tokens. Bytes that are not UTF-8 become U+FFFD; unknown ids are skipped.
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

    /// The bytes of every token.
    pub fn pieces(&self) -> &Arc<Pieces> {
        &self.pieces
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        self.size
    }

    /// The ids that end a text.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos
    }

    /// The id that begins a text, if the model has one.
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

    /// The texts of all control tokens, in the order of their ids.
    pub fn special_tokens(&self) -> Vec<String> {
        let library = self.library.read().unwrap_or_else(PoisonError::into_inner);
        (0..self.size as u32)
            .filter(|&id| self.is_special(id))
            .filter_map(|id| library.id_to_token(id))
            .collect()
    }

    /// True if `id` is a control token, which is not shown as text.
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

/// An error about a tokenizer's file, with its remedy.
fn refused(file: &Path, why: &str, remedy: &str) -> Error {
    // The message about a vocabulary that does not fit has its own.
    if why.starts_with("token ") {
        Error::model(file, why)
    } else {
        Error::model(file, format!("{why}; {remedy}"))
    }
}

fn load(folder: &Folder, limit: usize) -> Result<Tokenizer> {
    let file = folder.path(files::TOKENIZER);
    let refused = |why: String| refused(&file, &why, "use the tokenizer.json published with the model");
    let bytes = folder.read(files::TOKENIZER, json::MAX_FILE)?.ok_or_else(|| {
        Error::model(&file, "is missing; put the tokenizer.json published with the model there")
    })?;
    let spec = json::read(&bytes, limit).map_err(refused)?;
    drop(bytes);
    let mut tokenizer = Tokenizer::new(file.clone(), spec).map_err(refused)?;
    let settings = settings::load(folder, limit, &tokenizer)?;
    let bos = settings.bos.unwrap_or_else(|| tokenizer.prefix.first().copied());
    if let Some(id) = bos.filter(|id| settings.add_bos && !tokenizer.prefix.contains(id)) {
        tokenizer.prefix.insert(0, id);
    }
    tokenizer.set_bos(bos);
    tokenizer.eos = settings.eos;
    tokenizer.probed()
}

/// The context of failures of the library on `file`.
fn subject(file: &Path) -> Subject {
    Subject {
        place: file.display().to_string(),
        panicked: "the tokenizer library failed on this file",
        hung: "not loaded",
        remedy: "use the file published with the model",
    }
}
