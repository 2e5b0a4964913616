//! From logits to tokens, and from tokens to text that may be shown: the sampler, the detokenizer and the stop strings of
//! one generation.

use crate::dims::VOCAB;
use crate::run::options::{GenerateOptions, Progress};
use crate::run::session::{CancelToken, StopReason};
use files::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use text::sampler::{Logprobs, Sampler, SamplerOptions, TokenLogprobs};
use text::tokenizer::{Scan, StopStrings, TextState, TextStream, Tokenizer};

/// Text that was held back at a cut.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PendingText {
    /// Part of a character.
    bytes: TextState,
    /// Text that could become a stop string.
    stop: String,
}

/// What becomes of held-back text where a text is cut, not ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtCut {
    Show,
    Keep,
}

/// Options of one text of perhaps several that share them.
pub struct DecoderParams<'o> {
    pub options: &'o GenerateOptions,
    /// Takes the place of the seed in the options.
    pub seed: u64,
    /// The options' stop strings.
    pub stops: StopStrings,
}

impl<'o> DecoderParams<'o> {
    /// Those of the options.
    ///
    /// # Errors
    ///
    /// `Usage` for a stop string that is empty.
    pub fn new(options: &'o GenerateOptions) -> Result<Self> {
        Ok(Self { options, seed: options.sampler.seed, stops: StopStrings::new(&options.stop)? })
    }
}

/// Turns logits into tokens and tokens into text that may be shown.
pub struct TokenDecoder<'a> {
    tokenizer: &'a Tokenizer,
    sampler: Sampler,
    logprobs: Option<Logprobs>,
    text: TextStream<'a>,
    stops: StopStrings,
    at_cut: AtCut,
    stop_tokens: Vec<u32>,
    /// Tokens that may still come.
    left: Option<usize>,
    /// Tokens so far, of which the least are [`GenerateOptions::min_tokens`].
    made: usize,
    least: usize,
    bad_words: Vec<Vec<u32>>,
    /// Tokens that may not come next.
    banned: Vec<u32>,
    /// Tokens that come next, without being sampled.
    inserted: VecDeque<u32>,
    cancel: CancelToken,
    progress: Progress,
    /// `[VOCAB]`, for the sampler.
    logits: Vec<f32>,
}

impl<'a> TokenDecoder<'a> {
    /// Refuses options that cannot be followed.
    #[cfg_attr(
        not(feature = "grammar"),
        expect(unused_variables, reason = "a grammar asks what ends a text")
    )]
    pub fn check(tokenizer: &Tokenizer, options: &GenerateOptions) -> Result<()> {
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

    /// A decoder for a text that begins.
    ///
    /// # Errors
    ///
    /// `Usage` for options that cannot be followed.
    pub fn new(tokenizer: &'a Tokenizer, params: DecoderParams<'_>) -> Result<Self> {
        let DecoderParams { options, seed, stops } = params;
        let stop_tokens = stop_tokens(tokenizer, options);
        let sampler = SamplerOptions { seed, ..options.sampler.clone() };
        Ok(Self {
            tokenizer,
            sampler: new_sampler(tokenizer, sampler, &stop_tokens)?,
            logprobs: options.logprobs.map(|count| Logprobs::new(count, VOCAB)).transpose()?,
            text: tokenizer.stream().showing(options.shown_tokens.clone()),
            stops,
            at_cut: AtCut::Show,
            left: options.max_tokens,
            made: 0,
            least: options.min_tokens,
            banned: Vec::with_capacity(stop_tokens.len() + options.bad_words.len()),
            bad_words: options.bad_words.clone(),
            stop_tokens,
            inserted: VecDeque::new(),
            cancel: options.cancel.clone(),
            progress: options.progress.clone(),
            logits: vec![0.0; VOCAB],
        })
    }

    /// Whether no token is left to be generated.
    pub fn reached_max_tokens(&self) -> bool {
        self.left == Some(0)
    }

    /// The token that asks it to stop.
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

    /// The tokenizer that makes the text.
    pub fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// Goes on with a text that was cut. Where it is cut again, held-back text is kept for
    /// [`TokenDecoder::pending_text`].
    pub fn resume(&mut self, pending: Option<&PendingText>) {
        self.at_cut = AtCut::Keep;
        if let Some(pending) = pending {
            self.text.resume(&pending.bytes);
            self.stops.restore(&pending.stop);
        }
    }

    /// The text that is held back.
    pub fn pending_text(&self) -> PendingText {
        PendingText { bytes: self.text.state(), stop: self.stops.pending().into() }
    }

    /// Tells how much of the prompt is done.
    pub fn tell_progress(&self, done: usize, all: usize) {
        self.progress.tell(done, all);
    }

    /// Goes on with these tokens, which are then not sampled.
    pub fn insert(&mut self, tokens: &[u32]) {
        self.inserted.extend(tokens);
    }

    /// Samples a token from the `logits` that follow the tokens of `history`, or takes one that was inserted.
    /// [`TokenDecoder::push`] adds it to the text.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        let token = match self.inserted.pop_front() {
            Some(token) => token,
            None => self.sample_from(logits, history)?,
        };
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.take(logits, token);
        }
        Ok(token)
    }

    fn sample_from(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        self.ban_tokens(history);
        let greedy = if self.banned.is_empty() { self.sampler.greedy(logits) } else { None };
        let token = greedy.unwrap_or_else(|| {
            self.logits.copy_from_slice(logits);
            self.sampler.sample_except(&mut self.logits, history, &self.banned)
        });
        #[cfg(feature = "grammar")]
        self.sampler.check_grammar()?;
        Ok(token)
    }

    /// Finds the tokens that may not come next.
    fn ban_tokens(&mut self, history: &[u32]) {
        self.banned.clear();
        if self.made < self.least {
            self.banned.extend_from_slice(&self.stop_tokens);
        }
        let own = &history[history.len().saturating_sub(self.made)..];
        let last = |word: &Vec<u32>| {
            let (&last, before) = word.split_last()?;
            own.ends_with(before).then_some(last)
        };
        self.banned.extend(self.bad_words.iter().filter_map(last));
    }

    /// The log-probabilities at the token that was sampled last, where the options ask for them.
    pub fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.logprobs.as_ref().map(Logprobs::last)
    }

    /// Adds a sampled token to the text: what may be shown, and why the text ends if it does. `is_full` says that no
    /// slot is left to compute the token in.
    pub fn push(&mut self, token: u32, is_full: impl FnOnce() -> bool) -> (String, Option<StopReason>) {
        if self.stop_tokens.contains(&token) {
            return (String::new(), Some(StopReason::Eos));
        }
        let text = self.text.push(token);
        self.made += 1;
        let scan =
            if self.made > self.least { self.stops.push(&text) } else { Scan { text, stopped: false } };
        if let Some(left) = &mut self.left {
            *left -= 1;
        }
        let reason = match () {
            () if scan.stopped => Some(StopReason::Stop),
            () if self.reached_max_tokens() => Some(StopReason::Length),
            () if self.cancel.is_cancelled() => Some(StopReason::Interrupt),
            () if is_full() => Some(StopReason::Context),
            () => None,
        };
        (scan.text, reason)
    }

    /// Which of [`GenerateOptions::stop`] has ended the text.
    #[cfg(feature = "serve")]
    pub fn stop_string(&self) -> Option<usize> {
        self.stops.matched()
    }

    /// The text that was held back, once the text is over.
    pub fn finish(&mut self, reason: StopReason) -> String {
        let is_cut = !matches!(reason, StopReason::Eos | StopReason::Stop);
        if reason == StopReason::Stop || is_cut && self.at_cut == AtCut::Keep {
            return String::new();
        }
        let text = self.text.finish();
        let text = self.stops.push(&text).text;
        text + &self.stops.finish().text
    }
}

/// The tokens that end a text.
fn stop_tokens(tokenizer: &Tokenizer, options: &GenerateOptions) -> Vec<u32> {
    let mut tokens = options.stop_tokens.clone();
    if !options.ignore_eos {
        tokens.extend_from_slice(tokenizer.eos_ids());
    }
    tokens
}

/// The sampler of a text that `stop_tokens` end.
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
