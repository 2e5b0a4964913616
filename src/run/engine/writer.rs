//! Of one text: logits to tokens, and tokens to text that may be shown.

use super::Engine;
use crate::dims::VOCAB;
use crate::run::options::{GenerateOptions, Progress};
use crate::run::session::{CancelToken, StopReason};
use files::{Error, Result};
use serde::{Deserialize, Serialize};
use text::sampler::{Logprobs, Sampler, SamplerOptions, TokenLogprobs};
use text::tokenizer::{Scan, StopStrings, TextState, TextStream, Tokenizer};

/// Text that was held back at a cut.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unshown {
    /// Part of a character.
    bytes: TextState,
    /// What could become a stop string.
    stop: String,
}

/// What becomes of held-back text where a text is cut, not ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtCut {
    Show,
    Keep,
}

/// Options of one text of perhaps several that share them.
pub(super) struct TextParams<'o> {
    pub options: &'o GenerateOptions,
    /// Takes the place of the seed in the options.
    pub seed: u64,
    /// The options' stop strings.
    pub stops: StopStrings,
}

impl<'o> TextParams<'o> {
    /// As the options say.
    ///
    /// # Errors
    ///
    /// `Usage` for a stop string that is empty.
    pub fn new(options: &'o GenerateOptions) -> Result<Self> {
        Ok(Self { options, seed: options.sampler.seed, stops: StopStrings::new(&options.stop)? })
    }
}

/// Turns logits into tokens and tokens into text that may be shown.
pub(super) struct Writer<'a> {
    tokenizer: &'a Tokenizer,
    sampler: Sampler,
    logprobs: Option<Logprobs>,
    text: TextStream<'a>,
    stops: StopStrings,
    at_cut: AtCut,
    ends: Vec<u32>,
    left: Option<usize>,
    /// Tokens so far, of which the least are [`GenerateOptions::min_tokens`].
    made: usize,
    least: usize,
    bad_words: Vec<Vec<u32>>,
    /// Tokens that may not come next.
    banned: Vec<u32>,
    cancel: CancelToken,
    progress: Progress,
    logits: Vec<f32>,
}

impl<'a> Writer<'a> {
    /// Whether there can be one with these options.
    #[cfg_attr(
        not(feature = "grammar"),
        expect(unused_variables, reason = "a grammar asks what ends a text")
    )]
    pub(super) fn check(engine: &Engine, options: &GenerateOptions) -> Result<()> {
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
            sampler(engine, options.sampler.clone(), &ends(engine, options))?;
        }
        StopStrings::new(&options.stop).map(|_| ())
    }

    pub(super) fn new(engine: &'a Engine, options: &GenerateOptions) -> Result<Self> {
        Self::with(engine, TextParams::new(options)?)
    }

    pub(super) fn with(engine: &'a Engine, params: TextParams<'_>) -> Result<Self> {
        let TextParams { options, seed, stops } = params;
        let ends = ends(engine, options);
        let sampler = sampler(engine, SamplerOptions { seed, ..options.sampler.clone() }, &ends)?;
        Ok(Self {
            tokenizer: &engine.tokenizer,
            sampler,
            logprobs: options.logprobs.map(|count| Logprobs::new(count, VOCAB)).transpose()?,
            text: engine.tokenizer.stream().showing(options.shown_tokens.clone()),
            stops,
            at_cut: AtCut::Show,
            left: options.max_tokens,
            made: 0,
            least: options.min_tokens,
            banned: Vec::with_capacity(ends.len() + options.bad_words.len()),
            bad_words: options.bad_words.clone(),
            ends,
            cancel: options.cancel.clone(),
            progress: options.progress.clone(),
            logits: vec![0.0; VOCAB],
        })
    }

    /// Whether no token is left to be generated.
    pub(super) fn is_spent(&self) -> bool {
        self.left == Some(0)
    }

    /// What asks it to stop.
    pub(super) fn cancel(&self) -> &CancelToken {
        &self.cancel
    }

    /// What chooses the tokens.
    pub(super) fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// The same, to restore a saved random state.
    pub(super) fn sampler_mut(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// What makes the text.
    pub(super) fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// Goes on with a text that was cut. Where it is cut again, held-back text is kept for [`Writer::unshown`].
    pub(super) fn resume(&mut self, unshown: Option<&Unshown>) {
        self.at_cut = AtCut::Keep;
        if let Some(unshown) = unshown {
            self.text.resume(&unshown.bytes);
            self.stops.restore(&unshown.stop);
        }
    }

    /// Whether held-back text is kept at a cut.
    pub(super) fn keeps_at_cut(&self) -> bool {
        self.at_cut == AtCut::Keep
    }

    /// The text that is held back.
    pub(super) fn unshown(&self) -> Unshown {
        Unshown { bytes: self.text.state(), stop: self.stops.pending().into() }
    }

    /// Tells how much of the prompt is done.
    pub(super) fn progress(&self, done: usize, all: usize) {
        self.progress.tell(done, all);
    }

    /// Samples a token from the `logits` that follow the tokens of `history`. [`Writer::push`] adds it to the text.
    pub(super) fn sample(&mut self, logits: &[f32], history: &[u32]) -> Result<u32> {
        self.ban(history);
        let greedy = if self.banned.is_empty() { self.sampler.greedy(logits) } else { None };
        let token = greedy.unwrap_or_else(|| {
            self.logits.copy_from_slice(logits);
            self.sampler.sample_except(&mut self.logits, history, &self.banned)
        });
        #[cfg(feature = "grammar")]
        self.sampler.check_grammar()?;
        self.take(logits, token);
        Ok(token)
    }

    /// Finds the tokens that may not come next.
    fn ban(&mut self, history: &[u32]) {
        self.banned.clear();
        if self.made < self.least {
            self.banned.extend_from_slice(&self.ends);
        }
        let own = &history[history.len().saturating_sub(self.made)..];
        let last = |word: &Vec<u32>| {
            let (&last, before) = word.split_last()?;
            own.ends_with(before).then_some(last)
        };
        self.banned.extend(self.bad_words.iter().filter_map(last));
    }

    /// Takes the log-probabilities of a token.
    pub(super) fn take(&mut self, logits: &[f32], token: u32) {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.take(logits, token);
        }
    }

    /// The log-probabilities at the token that was sampled last, where the options ask for them.
    pub(super) fn logprobs(&self) -> Option<&TokenLogprobs> {
        self.logprobs.as_ref().map(Logprobs::last)
    }

    /// Adds a sampled token to the text: what may be shown, and how the text ends if it does. `is_full` says that no
    /// slot is left to compute the token in.
    pub(super) fn push(&mut self, token: u32, is_full: impl FnOnce() -> bool) -> (String, Option<End>) {
        if self.ends.contains(&token) {
            return (String::new(), Some(End::Flush(StopReason::Eos)));
        }
        let text = self.text.push(token);
        self.made += 1;
        let scan = match self.made > self.least {
            true => self.stops.push(&text),
            false => Scan { text, stopped: false },
        };
        if let Some(left) = &mut self.left {
            *left -= 1;
        }
        let end = match () {
            () if scan.stopped => Some(End::Done(StopReason::Stop)),
            () if self.is_spent() => Some(End::Flush(StopReason::Length)),
            () if self.cancel.is_cancelled() => Some(End::Flush(StopReason::Interrupt)),
            () if is_full() => Some(End::Flush(StopReason::Context)),
            () => None,
        };
        (scan.text, end)
    }

    /// Which of [`GenerateOptions::stop`] has ended the text.
    #[cfg(feature = "serve")]
    pub(super) fn stopped_by(&self) -> Option<usize> {
        self.stops.matched()
    }

    /// The text that was held back, once it is over.
    pub(super) fn finish(&mut self) -> String {
        let text = self.text.finish();
        let text = self.stops.push(&text).text;
        text + &self.stops.finish().text
    }
}

/// The tokens that end a text.
fn ends(engine: &Engine, options: &GenerateOptions) -> Vec<u32> {
    let mut ends = options.stop_tokens.clone();
    if !options.ignore_eos {
        ends.extend_from_slice(engine.tokenizer.eos_ids());
    }
    ends
}

/// What chooses the tokens of a text that `ends` end.
#[cfg_attr(not(feature = "grammar"), expect(unused_variables, reason = "only a grammar looks at the ends"))]
fn sampler(engine: &Engine, options: SamplerOptions, ends: &[u32]) -> Result<Sampler> {
    let pieces = engine.tokenizer.pieces();
    let sampler = Sampler::new(options, VOCAB)?.with_pieces(pieces);
    #[cfg(feature = "grammar")]
    let sampler = sampler.with_grammar(pieces, ends)?;
    Ok(sampler)
}

/// How a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// Held-back text is still to come.
    Flush(StopReason),
    /// Nothing is.
    Done(StopReason),
}
