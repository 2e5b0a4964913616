//! The options of a sampler and their valid ranges.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// Sampling options. The defaults are the specification's; stages that it does not have are off.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SamplerOptions {
    /// Divisor of the logits; 0 always takes the largest (greedy).
    pub temperature: f32,
    /// Top-p: the cumulative probability after which the tail is cut.
    pub top_p: f32,
    /// Number of most probable tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Minimum probability, relative to the largest; 0 is off.
    pub min_p: f32,
    /// Total probability of the most typical tokens to keep; 1 is off.
    pub typical_p: f32,
    /// Divisor of the logit of a recent token (factor if the logit is negative), once for every occurrence in the
    /// window.
    pub repetition_penalty: f32,
    /// Window of the penalties: the number of last tokens that they look at.
    pub repetition_window: usize,
    /// Amount subtracted from the logit of every token that occurs in the window; 0 is off.
    pub presence_penalty: f32,
    /// Amount subtracted from the logit of a token for each of its occurrences in the window; 0 is off.
    pub frequency_penalty: f32,
    /// Token ids, and the amount added to their logits; negative infinity rules a token out.
    pub logit_bias: Vec<(u32, f32)>,
    /// Penalty on repeating earlier sequences.
    pub dry: DryOptions,
    /// Exclusion of the most probable tokens.
    pub xtc: XtcOptions,
    pub seed: u64,
    /// The grammar that the output must follow.
    #[cfg(feature = "grammar")]
    #[serde(skip)]
    pub grammar: Option<super::Grammar>,
}

/// DRY, "don't repeat yourself": see [`SamplerOptions::dry`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DryOptions {
    /// The penalty on the first token beyond the allowed length; 0 is off.
    pub multiplier: f32,
    /// The factor by which it grows with every further token.
    pub base: f32,
    /// Number of tokens that may be repeated before the next one is penalised.
    pub allowed_length: usize,
    /// Number of last tokens that are searched; `None` searches all.
    pub window: Option<usize>,
    /// Sequence breakers: texts that a repetition never reaches across.
    pub breakers: Vec<String>,
}

/// XTC, "exclude top choices": see [`SamplerOptions::xtc`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XtcOptions {
    /// The probability that it acts on a token; 0 is off.
    pub probability: f32,
    /// Of the tokens at least this probable, all but the least probable are removed. Two tokens cannot both be above
    /// 0.5, so larger values are off too.
    pub threshold: f32,
}

impl Default for SamplerOptions {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_p: 0.9,
            top_k: 40,
            min_p: 0.0,
            typical_p: 1.0,
            repetition_penalty: 1.1,
            repetition_window: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            dry: DryOptions::default(),
            xtc: XtcOptions::default(),
            seed: 0,
            #[cfg(feature = "grammar")]
            grammar: None,
        }
    }
}

impl Default for DryOptions {
    /// Off, with the values that its author recommends.
    fn default() -> Self {
        let breakers = ["\n", ":", "\"", "*"].map(String::from).into();
        Self { multiplier: 0.0, base: 1.75, allowed_length: 2, window: None, breakers }
    }
}

impl Default for XtcOptions {
    /// Off, with the threshold that its author recommends.
    fn default() -> Self {
        Self { probability: 0.0, threshold: 0.1 }
    }
}

impl DryOptions {
    /// True if it can penalise anything.
    pub(super) fn is_on(&self) -> bool {
        self.multiplier != 0.0 && self.window != Some(0)
    }
}

impl XtcOptions {
    /// True if it can exclude anything.
    pub(super) fn is_on(&self) -> bool {
        self.probability > 0.0 && self.threshold <= 0.5
    }
}

/// A field, its value, true if the value is in range, and the range for the message.
type Check = (&'static str, f32, bool, &'static str);

/// Refuses the first value that is out of range.
fn check_all(options: &str, checks: &[Check]) -> Result<()> {
    match checks.iter().find(|check| !check.2) {
        Some((field, x, _, range)) => {
            Err(Error::Usage(format!("`{options}::{field}` {x}: use a number {range}")))
        }
        None => Ok(()),
    }
}

impl SamplerOptions {
    /// Refuses values out of range, naming the field.
    pub fn validate(&self) -> Result<()> {
        let unit = |x: f32| (0.0..=1.0).contains(&x);
        let (t, p, typical, penalty) =
            (self.temperature, self.top_p, self.typical_p, self.repetition_penalty);
        let (presence, frequency) = (self.presence_penalty, self.frequency_penalty);
        let finite = "(0 is off), usually 0 to 2";
        let above = "above 0 (1 is off), usually 1 to 1.5";
        check_all(
            "SamplerOptions",
            &[
                ("temperature", t, t.is_finite() && t >= 0.0, "from 0 (greedy), usually below 2"),
                ("top_p", p, unit(p), "from 0 to 1 (1 is off)"),
                ("min_p", self.min_p, unit(self.min_p), "from 0 (off) to 1"),
                ("typical_p", typical, unit(typical) && typical > 0.0, "above 0, up to 1 (off)"),
                ("repetition_penalty", penalty, penalty.is_finite() && penalty > 0.0, above),
                ("presence_penalty", presence, presence.is_finite(), finite),
                ("frequency_penalty", frequency, frequency.is_finite(), finite),
            ],
        )?;
        if let Some((id, x)) = self.logit_bias.iter().find(|(_, x)| !x.is_finite() && *x != f32::NEG_INFINITY)
        {
            return Err(Error::Usage(format!(
                "`SamplerOptions::logit_bias` for token {id}: {x}: use a finite number, or -inf to rule the token out"
            )));
        }
        let XtcOptions { probability, threshold } = self.xtc;
        check_all(
            "XtcOptions",
            &[
                ("probability", probability, unit(probability), "from 0 (off) to 1"),
                ("threshold", threshold, unit(threshold), "from 0 to 1 (above 0.5 is off)"),
            ],
        )?;
        self.dry.validate()
    }

    /// [`validate`](Self::validate), and refuses token ids beyond a vocabulary of `vocab` tokens.
    pub fn validate_for(&self, vocab: usize) -> Result<()> {
        self.validate()?;
        match self.logit_bias.iter().find(|(id, _)| *id as usize >= vocab) {
            Some((id, _)) => Err(Error::Usage(format!(
                "`SamplerOptions::logit_bias` {id}: no such token; use an id from 0 to {}",
                vocab.saturating_sub(1)
            ))),
            None => Ok(()),
        }
    }
}

impl DryOptions {
    fn validate(&self) -> Result<()> {
        let (m, b) = (self.multiplier, self.base);
        check_all(
            "DryOptions",
            &[
                ("multiplier", m, m.is_finite() && m >= 0.0, "from 0 (off), usually 0.8"),
                ("base", b, b.is_finite() && b >= 1.0, "from 1, usually 1.75"),
            ],
        )?;
        if self.allowed_length == 0 {
            return Err(Error::Usage("`DryOptions::allowed_length` 0: use 1 or more, usually 2".into()));
        }
        if self.breakers.iter().any(String::is_empty) {
            return Err(Error::Usage("`DryOptions::breakers` \"\": use a text that is not empty".into()));
        }
        Ok(())
    }
}
