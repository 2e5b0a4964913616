//! The generation loop and its users: streams, lists of prompts, a server's scheduler.

pub mod batch;
pub mod decoder;
#[cfg(feature = "serve")]
mod prefill_budget;
#[cfg(feature = "serve")]
mod prefix_cache;
pub mod prompts;
#[cfg(feature = "serve")]
pub mod scheduler;
mod score;
#[cfg(feature = "serve")]
mod stats;
pub mod stream;

use crate::run::engine::Engine;
use crate::run::options::GenerateOptions;
use crate::run::session::{CancelToken, Session};
use batch::{Batch, SessionRef};
use decoder::{DecoderParams, TokenDecoder};
use files::Result;
use std::time::Instant;
use stream::TokenStream;

impl Engine {
    /// Completes a prompt. After [`GenerateOptions::cancel`], the text so far is the result, not an error.
    pub fn generate(&self, prompt: &str, options: &GenerateOptions) -> Result<String> {
        self.generate_stream(prompt, options)?.collect()
    }

    /// Completes a prompt in a new sequence as a stream of pieces, one per token, of whole characters.
    ///
    /// ```
    /// use antigravity::session::{CancelToken, StopReason};
    /// use antigravity::{Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let cancel = CancelToken::default();
    /// let options = GenerateOptions { max_tokens: None, cancel: cancel.clone(), ..Default::default() };
    /// let mut stream = engine.generate_stream("Once upon a time", &options)?;
    /// let mut pieces = 0;
    /// while let Some(piece) = stream.next() {
    ///     piece?;
    ///     pieces += 1;
    ///     if pieces == 3 {
    ///         // Any thread may cancel.
    ///         cancel.cancel();
    ///     }
    /// }
    /// assert_eq!(stream.stop_reason(), Some(StopReason::Interrupt));
    /// assert_eq!(stream.timing().tokens, 3);
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    pub fn generate_stream(&self, prompt: &str, options: &GenerateOptions) -> Result<TokenStream<'_>> {
        let start = Instant::now();
        let session = SessionRef::Own(Box::new(self.session()?));
        let tokens = self.encode_cancellable(prompt, options.specials, &CancelToken::default())?;
        TokenStream::begin(session, self.new_decoder(options)?, &tokens, start)
    }

    /// Completes `prompt` in `session`, reusing the prefix that it already holds.
    pub fn stream<'a>(
        &'a self,
        session: &'a mut Session,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<TokenStream<'a>> {
        TokenStream::begin(SessionRef::Borrowed(session), self.new_decoder(options)?, prompt, Instant::now())
    }

    fn new_decoder(&self, options: &GenerateOptions) -> Result<TokenDecoder<'_>> {
        TokenDecoder::new(self.tokenizer(), DecoderParams::new(options)?)
    }

    /// Makes an empty batch for the number of generations in the options.
    pub(crate) fn new_batch<'a>(&self) -> Batch<'a> {
        let o = self.options();
        Batch::new(if self.device().is_some() { o.threads.min(o.sequence_count()) } else { 1 })
    }
}
