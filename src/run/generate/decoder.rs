//! Samples one generation's tokens and turns them into displayable text: sampler, detokenizer and stop strings.

use crate::dims::VOCAB;
use crate::run::options::{GenerateOptions, Progress};
use crate::run::session::{CancelToken, StopReason};
use files::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use text::sampler::{Logprobs, Sampler, SamplerOptions, TokenLogprobs};
use text::tokenizer::{StopScan, StopStrings, TextStream, TextStreamState, Tokenizer};

/// Text held back where a generation was interrupted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PendingText {
    /// Bytes of an incomplete character.
    bytes: TextStreamState,
    /// Text that could be the start of a stop string.
    stop: String,
}

/// Treatment of held-back text when a generation is interrupted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HeldBackText {
    Show,
    Keep,
}

/// Options of one generation; several may share [`GenerateOptions`].
pub struct DecoderParams<'o> {
    pub options: &'o GenerateOptions,
    /// Seed that replaces the one in the options.
    pub seed: u64,
    /// The options' stop strings.
    pub stops: StopStrings,
}

impl<'o> DecoderParams<'o> {
    /// Parameters from the options alone.
    ///
    /// # Errors
    ///
    /// `Usage` for an empty stop string.
    pub fn new(options: &'o GenerateOptions) -> Result<Self> {
        Ok(Self { options, seed: options.sampler.seed, stops: StopStrings::new(&options.stop)? })
    }
}

/// Turns logits into tokens, and tokens into displayable text.
pub struct TokenDecoder<'a> {
    tokenizer: &'a Tokenizer,
    sampler: Sampler,
    logprobs: Option<Logprobs>,
    pub(super) prompt_logprobs: Option<Logprobs>,
    text: TextStream<'a>,
    stops: StopStrings,
    at_cut: HeldBackText,
    stop_tokens: Vec<u32>,
    /// Remaining number of tokens; `None` without a maximum.
    left: Option<usize>,
    /// Number of tokens so far, and the minimum ([`GenerateOptions::min_tokens`]).
    generated: usize,
    min_tokens: usize,
    bad_words: Vec<Vec<u32>>,
    /// Tokens that must not come next.
    banned: Vec<u32>,
    /// Tokens that come next without being sampled.
    inserted: VecDeque<u32>,
    cancel: CancelToken,
    pub(super) progress: Progress,
    /// Copy of the logits for the sampler: `[VOCAB]`.
    logits: Vec<f32>,
}

impl<'a> TokenDecoder<'a> {
    /// Checks the options.
    #[cfg_attr(
        not(feature = "grammar"),
        expect(unused_variables, reason = "only a grammar needs the stop tokens")
    )]
    pub fn check_options(tokenizer: &Tokenizer, options: &GenerateOptions) -> Result<()> {
        options.sampler.validate_for(VOCAB)?;
        let ids = || options.bad_words.iter().flatten().chain(&options.stop_tokens);
        if let Some(id) = ids().find(|&&id| id as usize >= VOCAB) {
            let last = VOCAB - 1;
            return Err(Error::Usage(format!(
                "token id {id}: the vocabulary ends at {last}; use a smaller one"
            )));
        }
        #[cfg(feature = "grammar")]
        if options.sampler.grammar.is_some() {
            new_sampler(tokenizer, options.sampler.clone(), &stop_tokens(tokenizer, options))?;
        }
        StopStrings::new(&options.stop).map(|_| ())
    }

    /// A decoder for a new text.
    ///
    /// # Errors
    ///
    /// `Usage` for invalid options.
    pub fn new(tokenizer: &'a Tokenizer, params: DecoderParams<'_>) -> Result<Self> {
        let DecoderParams { options, seed, stops } = params;
        let stop_tokens = stop_tokens(tokenizer, options);
        let sampler = SamplerOptions { seed, ..options.sampler.clone() };
        let new_logprobs = |count: Option<usize>| count.map(|count| Logprobs::new(count, VOCAB)).transpose();
        let logprobs = new_logprobs(options.logprobs)?;
        Ok(Self {
            tokenizer,
            sampler: new_sampler(tokenizer, sampler, &stop_tokens)?,
            logprobs: logprobs.map(|logprobs| logprobs.with_tokens(options.logprob_tokens.clone())),
            prompt_logprobs: new_logprobs(options.prompt_logprobs)?,
            text: tokenizer.decode_stream().with_shown_tokens(options.shown_tokens.clone()),
            stops,
            at_cut: HeldBackText::Show,
            left: options.max_tokens,
            generated: 0,
            min_tokens: options.min_tokens,
            banned: Vec::with_capacity(stop_tokens.len() + options.bad_words.len()),
            bad_words: options.bad_words.clone(),
            stop_tokens,
            inserted: VecDeque::new(),
            cancel: options.cancel.clone(),
            progress: options.progress.clone(),
            logits: vec![0.0; VOCAB],
        })
    }

    /// True if the maximum number of tokens is reached.
    pub fn reached_max_tokens(&self) -> bool {
        self.left == Some(0)
    }

    /// The token that cancels the generation.
    pub fn cancel(&self) -> &CancelToken {
        &self.cancel
    }

    /// The sampler.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// The sampler, to restore a saved random state.
    pub fn sampler_mut(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// Continues an interrupted text. If it is interrupted again, held-back text stays in
    /// [`TokenDecoder::pending_text`] instead of being shown.
    pub fn resume_from(&mut self, pending: Option<&PendingText>) {
        self.at_cut = HeldBackText::Keep;
        if let Some(pending) = pending {
            self.text.restore_state(&pending.bytes);
            self.stops.restore_pending(&pending.stop);
        }
    }

    /// The text held back so far.
    pub fn pending_text(&self) -> PendingText {
        PendingText { bytes: self.text.state(), stop: self.stops.pending_text().into() }
    }

    /// Continues with these tokens instead of sampled ones.
    pub fn insert_tokens(&mut self, tokens: &[u32]) {
        self.inserted.extend(tokens);
    }

    /// Samples a token from the `logits` after `history`, or takes an inserted one. [`TokenDecoder::push_token`] adds
    /// it to the text.
    pub fn sample_token(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        let token = match self.inserted.pop_front() {
            Some(token) => token,
            None => self.sample_from(logits, history)?,
        };
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.compute_logprobs(logits, token);
        }
        Ok(token)
    }

    fn sample_from(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        self.ban_tokens(history);
        let greedy = if self.banned.is_empty() { self.sampler.greedy_token(logits) } else { None };
        let token = greedy.unwrap_or_else(|| {
            self.logits.copy_from_slice(logits);
            self.sampler.sample_token_except(&mut self.logits, history, &self.banned)
        });
        #[cfg(feature = "grammar")]
        self.sampler.check_grammar()?;
        Ok(token)
    }

    /// Lists the tokens that must not come next.
    fn ban_tokens(&mut self, history: &[u32]) {
        self.banned.clear();
        if self.generated < self.min_tokens {
            self.banned.extend_from_slice(&self.stop_tokens);
        }
        let own = &history[history.len().saturating_sub(self.generated)..];
        let last = |word: &Vec<u32>| {
            let (&last, before) = word.split_last()?;
            own.ends_with(before).then_some(last)
        };
        self.banned.extend(self.bad_words.iter().filter_map(last));
    }

    /// Log-probabilities at the last sampled token, if the options ask for them.
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.logprobs.as_ref().map(Logprobs::last)
    }

    /// Adds a sampled token to the text. Returns the displayable text, and the stop reason if the text ends. `is_full`
    /// tells whether no slot is left to compute the token in.
    pub fn push_token(&mut self, token: u32, is_full: impl FnOnce() -> bool) -> (String, Option<StopReason>) {
        if self.stop_tokens.contains(&token) {
            return (String::new(), Some(StopReason::Eos));
        }
        let text = self.text.push(token);
        self.generated += 1;
        let scan = if self.generated > self.min_tokens {
            self.stops.push(&text)
        } else {
            StopScan { text, stopped: false }
        };
        if let Some(left) = &mut self.left {
            *left -= 1;
        }
        let reason = if scan.stopped {
            Some(StopReason::Stop)
        } else if self.reached_max_tokens() {
            Some(StopReason::Length)
        } else if self.cancel.is_cancelled() {
            Some(StopReason::Interrupt)
        } else {
            is_full().then_some(StopReason::Context)
        };
        (scan.text, reason)
    }

    /// Index in [`GenerateOptions::stop`] of the string that ended the text.
    #[cfg(feature = "serve")]
    pub fn stop_string(&self) -> Option<usize> {
        self.stops.matched_index()
    }

    /// Returns the held-back text at the end of the generation.
    pub fn finish_text(&mut self, reason: StopReason) -> String {
        let is_cut = !matches!(reason, StopReason::Eos | StopReason::Stop);
        if reason == StopReason::Stop || is_cut && self.at_cut == HeldBackText::Keep {
            return String::new();
        }
        let text = self.text.finish();
        let text = self.stops.push(&text).text;
        text + &self.stops.finish().text
    }
}

/// Tokens that end a text.
fn stop_tokens(tokenizer: &Tokenizer, options: &GenerateOptions) -> Vec<u32> {
    let mut tokens = options.stop_tokens.clone();
    if !options.ignore_eos {
        tokens.extend_from_slice(tokenizer.eos_ids());
    }
    tokens
}

/// Makes the sampler of a text that `stop_tokens` end.
#[cfg_attr(
    not(feature = "grammar"),
    expect(unused_variables, reason = "only a grammar looks at the stop tokens")
)]
fn new_sampler(tokenizer: &Tokenizer, options: SamplerOptions, stop_tokens: &[u32]) -> Result<Sampler> {
    let pieces = tokenizer.pieces();
    let sampler = Sampler::new(options, VOCAB)?.with_pieces(pieces);
    #[cfg(feature = "grammar")]
    let sampler = sampler.with_grammar(pieces, stop_tokens)?;
    Ok(sampler)
}
