//! Flags that say how tokens are chosen.

use super::grammar::GrammarArgs;
use crate::dims::VOCAB;
use clap::Args;
use files::{Error, Result};
use text::sampler::{DryOptions, SamplerOptions, XtcOptions};

/// How tokens are chosen.
#[derive(Args, Clone)]
pub(in crate::cli) struct SamplerArgs {
    /// 0 is greedy
    #[arg(
        long,
        visible_alias = "temp",
        default_value_t = 0.8,
        value_name = "T",
        allow_negative_numbers = true
    )]
    pub temperature: f32,
    /// Nucleus: running probability after which the tail is cut
    #[arg(long, default_value_t = 0.9, value_name = "P", allow_negative_numbers = true)]
    pub top_p: f32,
    /// Most probable tokens that stay; 0 is off
    #[arg(long, default_value_t = 40, value_name = "K")]
    pub top_k: usize,
    /// Smallest probability that stays, relative to the largest; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    pub min_p: f32,
    /// Divides the logits of recent tokens; 1 is off
    #[arg(
        long,
        visible_alias = "repeat-penalty",
        default_value_t = 1.1,
        value_name = "X",
        allow_negative_numbers = true
    )]
    pub repetition_penalty: f32,
    /// Tokens that count as recent
    #[arg(long, visible_alias = "repeat-last-n", default_value_t = 64, value_name = "N")]
    pub repetition_window: usize,
    /// Taken from the logits of recent tokens; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Taken from the logits of recent tokens for every time that they occur; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Added to the logit of a token, e.g. 29+1.5, 29-2 or, to rule it out, 29-inf; may be given more than once
    #[arg(long, value_name = "ID(+|-)VALUE", value_parser = bias)]
    pub logit_bias: Vec<(u32, f32)>,
    #[command(flatten)]
    pub dry: DryArgs,
    /// Locally typical: probability that the most typical tokens add up to, of which the others are cut; 1 is off
    #[arg(
        long,
        visible_alias = "typical-p",
        default_value_t = 1.0,
        value_name = "P",
        allow_negative_numbers = true
    )]
    pub typical: f32,
    /// How often XTC leaves the most probable tokens out; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "P", allow_negative_numbers = true)]
    pub xtc_probability: f32,
    /// XTC: of the tokens at least this probable, only the least probable one stays; above 0.5 is off
    #[arg(long, default_value_t = 0.1, value_name = "P", allow_negative_numbers = true)]
    pub xtc_threshold: f32,
    #[command(flatten)]
    pub grammar: GrammarArgs,
    /// Same seed, same text, on any machine [default: random, printed on stderr]
    #[arg(short, long, value_name = "N")]
    pub seed: Option<u64>,
}

/// A penalty on going on with what was there before.
#[derive(Args, Clone)]
pub(in crate::cli) struct DryArgs {
    /// DRY: penalty on the token that goes on with a repetition longer than is allowed; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "X", allow_negative_numbers = true)]
    pub dry_multiplier: f32,
    /// DRY: what the penalty grows by with every further token
    #[arg(long, default_value_t = 1.75, value_name = "X", allow_negative_numbers = true)]
    pub dry_base: f32,
    /// DRY: tokens that may be there again without a penalty
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub dry_allowed_length: usize,
    /// DRY: tokens in which repetitions are looked for; -1 is all, 0 is off
    #[arg(long, default_value_t = -1, value_name = "N", allow_negative_numbers = true)]
    pub dry_penalty_last_n: i64,
    /// DRY: a text that no repetition reaches across, or none; may be given more than once [default: line feed, colon,
    /// quotation mark and asterisk]
    #[arg(long = "dry-sequence-breaker", value_name = "TEXT", allow_hyphen_values = true)]
    pub dry_breakers: Vec<String>,
}

/// A token id and what is added to its logit.
fn bias(text: &str) -> std::result::Result<(u32, f32), String> {
    let parts = text.find(['+', '-']).map(|at| text.split_at(at));
    let parsed = parts.and_then(|(id, value)| Some((id.parse().ok()?, value.parse().ok()?)));
    parsed.ok_or_else(|| "use a token id, a sign and a number, e.g. 29+1.5 or 29-inf".into())
}

/// A seed nobody chose.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() & 0xffff_ffff
}

impl SamplerArgs {
    /// Checks the flags; a missing seed is drawn.
    pub fn resolve(&self) -> Result<SamplerOptions> {
        #[cfg(not(feature = "grammar"))]
        self.grammar.refuse("this program was built without grammars; build it with --features grammar")?;
        let options = SamplerOptions {
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            typical_p: self.typical,
            repetition_penalty: self.repetition_penalty,
            repetition_window: self.repetition_window,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            dry: self.dry.resolve()?,
            xtc: XtcOptions { probability: self.xtc_probability, threshold: self.xtc_threshold },
            seed: self.seed.unwrap_or_else(random_seed),
            #[cfg(feature = "grammar")]
            grammar: self.grammar.resolve()?,
        };
        options.validate_for(VOCAB)?;
        Ok(options)
    }
}

impl DryArgs {
    fn resolve(&self) -> Result<DryOptions> {
        let n = self.dry_penalty_last_n;
        let window = match n {
            -1 => None,
            n => Some(usize::try_from(n).map_err(|_| {
                Error::Usage(format!("--dry-penalty-last-n {n}: use a number from 0 (off), or -1 for all"))
            })?),
        };
        let breakers = match self.dry_breakers.as_slice() {
            [] => DryOptions::default().breakers,
            given => given.iter().filter(|b| *b != "none").cloned().collect(),
        };
        Ok(DryOptions {
            multiplier: self.dry_multiplier,
            base: self.dry_base,
            allowed_length: self.dry_allowed_length,
            window,
            breakers,
        })
    }
}
