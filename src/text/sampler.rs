//! Chooses the next token from the logits, in these stages:
//!
//! | stage | on by default | |
//! |---|---|---|
//! | grammar: rule out tokens that it does not allow | | `Grammar`, with the feature `grammar` |
//! | rule out other tokens | | [`Sampler::sample_token_except`] |
//! | logit bias | | [`SamplerOptions::logit_bias`] |
//! | repetition penalty over the window | yes | [`apply_repetition_penalty`] |
//! | presence and frequency penalties over the window | | as in OpenAI's API |
//! | DRY | | [`DryOptions`] |
//! | temperature 0: take the largest logit and stop | | [`argmax`] |
//! | temperature | yes | [`softmax`] |
//! | softmax over the vocabulary | always | [`softmax`] |
//! | top-k | yes | |
//! | locally typical | | arXiv 2202.00666 |
//! | top-p | yes | |
//! | min-p | | |
//! | XTC | | [`XtcOptions`] |
//! | draw one of the remaining tokens by probability | always | |
//!
//! The stages on by default are the specification's, in its order; the others are placed as in llama.cpp. As in the
//! specification, no stage after the softmax renormalises: every threshold refers to the probabilities right after
//! temperature and softmax.
//!
//! Sampling is deterministic: equal logits, history and seed give the same token on every machine. `exp` is our own,
//! logarithms and powers come from `libm`, sums run in f64 in a fixed order, and ties go to the lower id. Each token
//! uses one random number, two with XTC, and none at temperature 0.

#[cfg(feature = "grammar")]
mod grammar;
mod logprobs;
mod options;
mod penalties;
mod rank;
mod recommended;
mod rng;
mod softmax;
#[cfg(test)]
mod tests;

#[cfg(feature = "grammar")]
pub use grammar::Grammar;
pub use logprobs::{Logprob, Logprobs, MAX_LOGPROBS, TokenLogprobs, sum_logprobs};
pub use options::{DryOptions, SamplerOptions, XtcOptions};
pub use penalties::apply_repetition_penalty;
pub use rng::Rng;
pub use softmax::{all_finite, argmax, softmax};

use crate::Result;
use crate::tokenizer::TokenBytes;
use penalties::{DryPenalty, add_bias, apply_occurrence_penalties, last_tokens};
use rank::{Ranking, TokenScore, TypicalCut, compute_entropy, count_xtc_excluded};
use std::ops::Range;
use std::sync::Arc;

/// The condition under which enough of the most probable tokens have been ranked.
#[derive(Clone, Copy)]
enum RankUntil {
    /// Typicality, top-p or min-p has cut, or all of top-k are ranked.
    FirstCut(Option<TypicalCut>),
    /// The running sum has reached this value: enough for a draw from the whole vocabulary.
    RunningSum(f64),
}

/// Samples tokens. All memory is allocated at construction.
#[derive(Debug, Clone)]
pub struct Sampler {
    options: SamplerOptions,
    vocab: usize,
    rng: Rng,
    /// The most probable tokens; its capacity is the whole vocabulary.
    ranking: Ranking,
    dry: Option<DryPenalty>,
    /// Number of occurrences of each token, `[vocab]`, all zero between calls; empty if no penalty needs it.
    counts: Vec<u32>,
    #[cfg(feature = "grammar")]
    guide: Option<grammar::GrammarState>,
}

impl Sampler {
    /// A sampler over `vocab` tokens. Refuses `options` out of range.
    pub fn new(options: SamplerOptions, vocab: usize) -> Result<Self> {
        options.validate_for(vocab)?;
        assert!(vocab > 0 && u32::try_from(vocab).is_ok(), "a vocabulary has 1 to 2^32 - 1 tokens");
        let rng = Rng::new(options.seed);
        let dry = options.dry.is_on().then(|| DryPenalty::new(&options.dry));
        let counted = dry.is_some() || options.presence_penalty != 0.0 || options.frequency_penalty != 0.0;
        let counts = vec![0; if counted { vocab } else { 0 }];
        Ok(Self {
            options,
            vocab,
            rng,
            ranking: Ranking::new(vocab, vocab),
            dry,
            counts,
            #[cfg(feature = "grammar")]
            guide: None,
        })
    }

    /// Makes the output follow the grammar in the options, if any. `ends` are the end-of-text tokens.
    ///
    /// # Errors
    ///
    /// `Usage` if there is a grammar and `ends` is empty.
    #[cfg(feature = "grammar")]
    pub fn with_grammar(mut self, pieces: &Arc<TokenBytes>, ends: &[u32]) -> Result<Self> {
        let begin = |grammar: &Grammar| grammar.start_matching(pieces, ends, self.vocab);
        self.guide = self.options.grammar.as_ref().map(begin).transpose()?;
        Ok(self)
    }

    /// Checks that the output has followed its grammar so far.
    ///
    /// # Errors
    ///
    /// `Usage` if the grammar has become too complex, or if other stages rule out every token that it allows.
    #[cfg(feature = "grammar")]
    pub fn check_grammar(&self) -> Result<()> {
        self.guide.as_ref().map_or(Ok(()), grammar::GrammarState::check_failure)
    }

    /// Sets the text of each token. Without them, DRY has no sequence breakers.
    pub fn with_pieces(mut self, pieces: &Arc<TokenBytes>) -> Self {
        if let Some(dry) = &mut self.dry {
            dry.set_pieces(Arc::clone(pieces));
        }
        self
    }

    pub fn options(&self) -> &SamplerOptions {
        &self.options
    }

    /// The random state, to be saved with a session. Apart from the position in a grammar, it is the only state kept
    /// between tokens.
    pub fn rng(&self) -> &Rng {
        &self.rng
    }

    /// Continues from a saved random state.
    pub fn set_rng(&mut self, rng: Rng) {
        self.rng = rng;
    }

    /// The token with the largest logit; `None` if sampling would change the logits or use a random number.
    pub fn greedy_token(&self, logits: &[f32]) -> Option<u32> {
        let changed = self.has_penalties();
        #[cfg(feature = "grammar")]
        let changed = changed || self.guide.is_some();
        (self.options.temperature == 0.0 && !changed).then(|| argmax(logits))
    }

    /// Samples the next token. Overwrites `logits`; `recent` is the history, oldest first.
    pub fn sample_token(&mut self, logits: &mut [f32], recent: &[u32]) -> u32 {
        self.sample_token_except(logits, recent, &[])
    }

    /// [`Sampler::sample_token`] without the tokens in `except`, unless the grammar allows only the end.
    pub fn sample_token_except(&mut self, logits: &mut [f32], recent: &[u32], except: &[u32]) -> u32 {
        assert_eq!(logits.len(), self.vocab, "one logit for each token");
        #[cfg(feature = "grammar")]
        let must_end = self.guide.as_mut().is_some_and(|guide| guide.mask_logits(logits));
        #[cfg(not(feature = "grammar"))]
        let must_end = false;
        if !must_end {
            except.iter().for_each(|&id| logits[id as usize] = f32::NEG_INFINITY);
        }
        let token = self.sample_unguided(logits, recent);
        #[cfg(feature = "grammar")]
        if let Some(guide) = &mut self.guide {
            guide.accept_token(token);
        }
        token
    }

    /// Runs all stages except the grammar.
    fn sample_unguided(&mut self, logits: &mut [f32], recent: &[u32]) -> u32 {
        self.apply_penalties(logits, recent);
        if self.options.temperature == 0.0 {
            return argmax(logits);
        }
        softmax(logits, self.options.temperature);
        self.draw_token(logits)
    }

    /// True if any stage of [`Sampler::apply_penalties`] is on.
    fn has_penalties(&self) -> bool {
        let o = &self.options;
        let penalties = o.presence_penalty != 0.0 || o.frequency_penalty != 0.0;
        !o.logit_bias.is_empty() || o.repetition_penalty != 1.0 || penalties || self.dry.is_some()
    }

    /// Runs the stages that work on logits: bias and penalties.
    fn apply_penalties(&mut self, logits: &mut [f32], recent: &[u32]) {
        let o = &self.options;
        add_bias(logits, &o.logit_bias);
        if o.repetition_penalty != 1.0 {
            apply_repetition_penalty(logits, recent, o.repetition_penalty, o.repetition_window);
        }
        let (presence, frequency) = (o.presence_penalty, o.frequency_penalty);
        if presence != 0.0 || frequency != 0.0 {
            let window = last_tokens(recent, o.repetition_window);
            apply_occurrence_penalties(logits, window, presence, frequency, &mut self.counts);
        }
        if let Some(dry) = &mut self.dry {
            dry.apply_penalty(logits, recent, &mut self.counts);
        }
    }

    /// Runs the stages that work on probabilities, and draws a token.
    fn draw_token(&mut self, probs: &[f32]) -> u32 {
        let uniform = f64::from(self.rng.next_f32());
        let (kept, total) = if self.is_uncut() {
            // No token is cut: rank only as far as the draw needs.
            let total: f64 = probs.iter().map(|&p| f64::from(p)).sum();
            (self.rank_tokens(probs, RankUntil::RunningSum(uniform * total)), total)
        } else {
            let mut kept = self.rank_tokens(probs, self.cut_rule(probs));
            let xtc = self.options.xtc;
            if xtc.is_on() && self.rng.next_f32() < xtc.probability {
                kept.start += count_xtc_excluded(&self.ranking.best[kept.clone()], xtc.threshold);
            }
            let total = self.ranking.best[kept.clone()].iter().map(|r| f64::from(r.1)).sum();
            (kept, total)
        };
        let kept = &self.ranking.best[kept];
        let mut rest = uniform * total;
        for &(id, p) in kept {
            rest -= f64::from(p);
            if rest <= 0.0 {
                return id;
            }
        }
        // Only rounding errors lead here. Never a token that was ruled out.
        let possible = kept.iter().rfind(|r| r.1 > 0.0);
        possible.or(kept.last()).map_or(0, |r| r.0)
    }

    /// True if no stage removes tokens.
    fn is_uncut(&self) -> bool {
        let o = &self.options;
        let cuts = o.typical_p < 1.0 || o.top_p < 1.0 || o.min_p != 0.0 || o.xtc.is_on();
        self.top_k_limit() == self.vocab && !cuts
    }

    /// Number of tokens that top-k keeps.
    fn top_k_limit(&self) -> usize {
        if self.options.top_k == 0 { self.vocab } else { self.options.top_k.min(self.vocab) }
    }

    fn cut_rule(&self, probs: &[f32]) -> RankUntil {
        let p = self.options.typical_p;
        RankUntil::FirstCut((p < 1.0).then(|| TypicalCut { entropy: compute_entropy(probs), mass: p.into() }))
    }

    /// Ranks the most probable tokens and returns the range that stays. It starts with a few and ranks more only until
    /// the cut is found, so a vocabulary of 128k tokens is hardly ever sorted as a whole.
    fn rank_tokens(&mut self, probs: &[f32], until: RankUntil) -> Range<usize> {
        let limit = self.top_k_limit();
        let mut count = limit.min(256);
        loop {
            self.ranking.select_top(probs, count);
            if let Some(kept) = self.find_cut(until, limit - count) {
                return kept;
            }
            count = (count * 8).min(limit);
        }
    }

    /// The range of the ranked tokens that stays; `None` if it depends on the `behind` tokens not ranked yet.
    fn find_cut(&self, until: RankUntil, behind: usize) -> Option<Range<usize>> {
        let best: &[TokenScore] = &self.ranking.best;
        let (range, open) = match until {
            RankUntil::FirstCut(Some(typical)) => (typical.select_range(best, behind)?, false),
            _ => (0..best.len(), behind > 0),
        };
        let floor = self.options.min_p * best.get(range.start).map_or(0.0, |r| r.1);
        let mut sum = 0.0f64;
        for i in range.clone() {
            let p = best[i].1;
            // The most probable token always stays.
            if p < floor && i > range.start {
                return Some(range.start..i);
            }
            sum += f64::from(p);
            let full = match until {
                RankUntil::FirstCut(_) => self.options.top_p < 1.0 && sum > f64::from(self.options.top_p),
                RankUntil::RunningSum(target) => sum >= target,
            };
            if full {
                return Some(range.start..i + 1);
            }
        }
        (!open).then_some(range)
    }
}
