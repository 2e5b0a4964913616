//! Log-probabilities of given texts.

use super::prompts::BatchItem;
use crate::run::engine::Engine;
use crate::run::eviction::Policy;
use crate::run::options::GenerateOptions;
use crate::run::session::StopReason;
use files::{Error, Result};
use text::sampler::TokenLogprobs;

impl Engine {
    /// Computes the log-probabilities of each text's tokens behind `prompt`, whose own tokens are left out. The first
    /// token of all has none. [`GenerateOptions::logprobs`] adds those of the most probable tokens.
    ///
    /// ```
    /// use antigravity::sampler::sum_logprobs;
    /// use antigravity::{Engine, EngineOptions, GenerateOptions};
    ///
    /// let engine = Engine::load(EngineOptions::new(antigravity::dims::MODEL_DIR))?;
    /// let texts = [" time".to_string(), " dog".to_string()];
    /// let scores = engine.score("Once upon a", &texts, &GenerateOptions::default())?;
    /// assert!(sum_logprobs(&scores[0]) > sum_logprobs(&scores[1]));
    /// # Ok::<(), antigravity::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// `Usage`: a text is empty or does not fit into the context behind the prompt, or slots are evicted. `Memory`.
    /// `Interrupted` by [`GenerateOptions::cancel`].
    pub fn score(
        &self,
        prompt: &str,
        texts: &[String],
        options: &GenerateOptions,
    ) -> Result<Vec<Vec<TokenLogprobs>>> {
        if self.options().eviction.policy != Policy::None {
            let why = "`Eviction::policy`: log-probabilities of a text need all of its tokens; give none";
            return Err(Error::Usage(why.into()));
        }
        let top = options.logprobs.or(Some(0));
        let options = GenerateOptions { max_tokens: Some(0), prompt_logprobs: top, ..options.clone() };
        let item = |text| BatchItem { prompt: [prompt, text].concat(), options: options.clone() };
        let items: Vec<BatchItem> = texts.iter().map(|text| item(text)).collect();
        let context = self.encode_cancellable(prompt, options.specials, &options.cancel)?;
        let mut scores = vec![Vec::new(); texts.len()];
        for answer in self.generate_batch(&items)? {
            let mut answer = answer?;
            if answer.stop == StopReason::Interrupt {
                return Err(Error::Interrupted);
            }
            let whole =
                self.encode_cancellable(&items[answer.index].prompt, options.specials, &options.cancel)?;
            // A token that spans the boundary is the text's.
            let held = context.iter().zip(&whole).take_while(|(a, b)| a == b).count();
            scores[answer.index] = answer.prompt_logprobs.split_off(held.saturating_sub(1));
        }
        Ok(scores)
    }
}
