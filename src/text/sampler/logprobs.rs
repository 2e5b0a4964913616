//! Log probabilities of tokens: the log-softmax of the model's logits, before any sampling stage.

use super::rank::Ranking;
use super::softmax::log_sum_exp;
use crate::{Error, Result};

/// Maximum number of alternatives per token.
pub const MAX_LOGPROBS: usize = 1000;

/// A token and the natural logarithm of its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Logprob {
    pub id: u32,
    /// Negative infinity for a token that the model rules out.
    pub logprob: f64,
}

/// The log probabilities at one position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was chosen.
    pub chosen: Logprob,
    /// The most probable tokens, best first; ties go to the lower id. Then the tokens of [`Logprobs::with_tokens`].
    pub top: Vec<Logprob>,
}

/// The log probability of a text's tokens together; 0 without any.
pub fn sum_logprobs(tokens: &[TokenLogprobs]) -> f64 {
    tokens.iter().fold(0.0, |sum, token| sum + token.chosen.logprob)
}

/// Computes the log probabilities of one token after another. All memory is allocated at construction.
#[derive(Debug, Clone)]
pub struct Logprobs {
    count: usize,
    tokens: Vec<u32>,
    ranking: Ranking,
    last: TokenLogprobs,
}

impl Logprobs {
    /// Log probabilities of the `count` most probable of `vocab` tokens, or of all if there are fewer.
    ///
    /// # Errors
    ///
    /// [`Error::Usage`] above [`MAX_LOGPROBS`].
    pub fn new(count: usize, vocab: usize) -> Result<Self> {
        Self::check_count(count)?;
        let count = count.min(vocab);
        let chosen = Logprob { id: 0, logprob: f64::NEG_INFINITY };
        let last = TokenLogprobs { chosen, top: Vec::with_capacity(count) };
        Ok(Self { count, tokens: Vec::new(), ranking: Ranking::new(count, vocab), last })
    }

    /// Adds those of certain tokens.
    pub fn with_tokens(mut self, tokens: Vec<u32>) -> Self {
        self.last.top.reserve_exact(self.count + tokens.len());
        Self { tokens, ..self }
    }

    /// Refuses a count above [`MAX_LOGPROBS`].
    pub fn check_count(count: usize) -> Result<()> {
        if count > MAX_LOGPROBS {
            let message =
                format!("`GenerateOptions::logprobs` {count}: use a number from 0 to {MAX_LOGPROBS}");
            return Err(Error::Usage(message));
        }
        Ok(())
    }

    /// Computes the log probabilities from the logits that `chosen` was sampled from.
    pub fn compute_logprobs(&mut self, logits: &[f32], chosen: u32) {
        let total = log_sum_exp(logits);
        let of = |id: u32, logit: f32| {
            // As in softmax: NaN has no probability, infinity counts as the largest finite number.
            let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) };
            Logprob { id, logprob: f64::from(logit) - total }
        };
        let of_token = |id: u32| of(id, logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY));
        self.last.chosen = of_token(chosen);
        self.last.top.clear();
        if self.count > 0 {
            self.ranking.select_top(logits, self.count);
            self.last.top.extend(self.ranking.best.iter().map(|&(id, logit)| of(id, logit)));
        }
        self.last.top.extend(self.tokens.iter().map(|&id| of_token(id)));
    }

    /// The log probabilities of the last token.
    pub fn last(&self) -> &TokenLogprobs {
        &self.last
    }
}
