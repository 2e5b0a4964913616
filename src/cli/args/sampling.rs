//! Flags of the sampler and of the grammar.

use crate::dims::VOCAB;
use clap::Args;
use files::{Error, Result, print_stderr};
use std::path::PathBuf;
use text::sampler::{DryOptions, SamplerOptions, XtcOptions};
#[cfg(feature = "grammar")]
use {std::path::Path, text::sampler::Grammar};

/// The sampler, and the grammar of the text.
#[derive(Args, Clone)]
pub struct SamplerArgs {
    /// Sampling temperature: higher is more varied; 0 always takes the most probable token [default: 0.8; the
    /// model's own in chat and serve]
    #[arg(long, visible_alias = "temp", value_name = "T")]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most probable tokens that together reach this probability [default: 0.9;
    /// the model's own in chat and serve]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep the K most probable tokens; 0 and -1 are off [default: 40; the model's own in chat and serve]
    #[arg(long, value_name = "K")]
    pub top_k: Option<i64>,
    /// Keep tokens at least this probable, relative to the most probable one; 0 is off [default: 0; the
    /// model's own in chat and serve]
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Locally typical sampling: keep the most typical tokens that together reach this probability; 1 is off
    /// [default: 1]
    #[arg(long, visible_alias = "typical-p", value_name = "P")]
    pub typical: Option<f32>,
    /// Divide the logits of recent tokens by this; 1 is off [default: 1.1; in chat and serve the model's own, else 1]
    #[arg(long, visible_alias = "repeat-penalty", value_name = "X")]
    pub repetition_penalty: Option<f32>,
    /// Number of recent tokens that the penalties look at [default: 64]
    #[arg(long, visible_alias = "repeat-last-n", value_name = "N")]
    pub repetition_window: Option<usize>,
    /// Subtract this from the logits of recent tokens; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "X")]
    pub presence_penalty: f32,
    /// Subtract this from the logits of recent tokens, once for each time they occur; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "X")]
    pub frequency_penalty: f32,
    /// Add to the logit of a token: 29+1.5, 29-2, or 29-inf to ban it; may be repeated
    #[arg(long, short_alias = 'l', value_name = "ID(+|-)VALUE", value_parser = parse_logit_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    #[command(flatten)]
    pub dry: DryArgs,
    /// XTC: probability of removing the most probable tokens; 0 is off [default: 0]
    #[arg(long, value_name = "P")]
    pub xtc_probability: Option<f32>,
    /// XTC: of the tokens at least this probable, keep only the least probable one; above 0.5 is off
    /// [default: 0.1]
    #[arg(long, value_name = "P")]
    pub xtc_threshold: Option<f32>,
    #[command(flatten)]
    pub grammar: GrammarArgs,
    /// Random seed: the same seed gives the same text on any machine; -1 is random [default: random, printed on stderr]
    #[arg(short, long, value_name = "N", value_parser = parse_seed)]
    seed: Option<i128>,
}

/// A penalty on repeating what the text already contains.
#[derive(Args, Clone)]
pub struct DryArgs {
    /// DRY: penalty on a token that would continue a repetition; 0 is off
    #[arg(long, default_value_t = 0.0, value_name = "X")]
    pub dry_multiplier: f32,
    /// DRY: factor by which the penalty grows with each further token
    #[arg(long, default_value_t = 1.75, value_name = "X")]
    pub dry_base: f32,
    /// DRY: longest repetition without a penalty, in tokens
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub dry_allowed_length: usize,
    /// DRY: tokens to search for repetitions; -1 is all, 0 is off
    #[arg(long, default_value_t = -1, value_name = "N")]
    pub dry_penalty_last_n: i64,
    /// DRY: text that interrupts a repetition, or none; may be repeated [default: line feed, colon, quotation mark,
    /// asterisk]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub dry_sequence_breaker: Vec<String>,
}

/// The grammar that the text must match.
#[derive(Args, Clone)]
pub struct GrammarArgs {
    /// Generate only JSON that matches this schema, given as a file or as text
    #[arg(long, short_alias = 'j', value_name = "FILE|JSON", conflicts_with = "grammar", hide = !cfg!(feature = "grammar"))]
    pub json_schema: Option<String>,
    /// Generate only text that matches the rule root of this GBNF file
    #[arg(long, value_name = "FILE", hide = !cfg!(feature = "grammar"))]
    pub grammar: Option<PathBuf>,
}

/// Parses a token id and the value added to its logit.
fn parse_logit_bias(text: &str) -> std::result::Result<(u32, f32), String> {
    let parts = text.find(['+', '-']).map(|at| text.split_at(at));
    let parsed = parts.and_then(|(id, value)| Some((id.parse().ok()?, value.parse().ok()?)));
    parsed.ok_or_else(|| "use a token id, a sign and a number, e.g. 29+1.5 or 29-inf".into())
}

/// Parses a seed, or -1.
fn parse_seed(text: &str) -> std::result::Result<i128, String> {
    let number: Option<i128> = text.parse().ok().filter(|n| (-1..=u64::MAX.into()).contains(n));
    number.ok_or_else(|| format!("use a number from 0 to {}, or -1 for a random one", u64::MAX))
}

/// A seed for a run without `--seed`.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() & 0xffff_ffff
}

impl SamplerArgs {
    /// The given seed; `None` if it is to be random.
    pub fn parse_seed(&self) -> Option<u64> {
        self.seed.and_then(|n| u64::try_from(n).ok())
    }

    /// Prints the seed if it was random and has an effect.
    pub fn print_random_seed(&self, used: &SamplerOptions) {
        if self.parse_seed().is_none() && used.temperature != 0.0 {
            print_stderr!("seed: {}", used.seed);
        }
    }

    /// Checks and resolves the flags; a missing seed is random.
    pub fn resolve_options(&self) -> Result<SamplerOptions> {
        #[cfg(not(feature = "grammar"))]
        self.grammar
            .fail_if_given("this program was built without grammars; build it with --features grammar")?;
        let options = SamplerOptions {
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            dry: self.dry.resolve_options()?,
            seed: self.parse_seed().unwrap_or_else(random_seed),
            #[cfg(feature = "grammar")]
            grammar: self.grammar.resolve_grammar()?,
            ..SamplerOptions::default()
        };
        self.with_recommended(options, &SamplerOptions::default())
    }

    /// Fills in a model's recommended values wherever no flag was given.
    pub fn with_recommended(
        &self,
        options: SamplerOptions,
        recommended: &SamplerOptions,
    ) -> Result<SamplerOptions> {
        let top_k = match self.top_k {
            None => recommended.top_k,
            Some(-1) => 0,
            Some(k) => usize::try_from(k)
                .map_err(|_| Error::Usage(format!("--top-k {k}: use 1 or more, or 0 to turn it off")))?,
        };
        let options = SamplerOptions {
            temperature: self.temperature.unwrap_or(recommended.temperature),
            top_p: self.top_p.unwrap_or(recommended.top_p),
            top_k,
            min_p: self.min_p.unwrap_or(recommended.min_p),
            typical_p: self.typical.unwrap_or(recommended.typical_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(recommended.repetition_penalty),
            repetition_window: self.repetition_window.unwrap_or(recommended.repetition_window),
            xtc: XtcOptions {
                probability: self.xtc_probability.unwrap_or(recommended.xtc.probability),
                threshold: self.xtc_threshold.unwrap_or(recommended.xtc.threshold),
            },
            ..options
        };
        options.validate_for(VOCAB)?;
        Ok(options)
    }
}

impl DryArgs {
    fn resolve_options(&self) -> Result<DryOptions> {
        let n = self.dry_penalty_last_n;
        let window = match n {
            -1 => None,
            n => Some(usize::try_from(n).map_err(|_| {
                Error::Usage(format!(
                    "--dry-penalty-last-n {n}: use 1 or more, 0 to turn it off, or -1 for all tokens"
                ))
            })?),
        };
        let breakers = match self.dry_sequence_breaker.as_slice() {
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

impl GrammarArgs {
    /// Fails with `why` if a grammar is given.
    pub fn fail_if_given(&self, why: &str) -> Result<()> {
        let flag = match (&self.json_schema, &self.grammar) {
            (None, None) => return Ok(()),
            (Some(_), _) => "--json-schema",
            _ => "--grammar",
        };
        Err(Error::Usage(format!("{flag}: {why}")))
    }

    /// Reads and checks the grammar.
    #[cfg(feature = "grammar")]
    fn resolve_grammar(&self) -> Result<Option<Grammar>> {
        let grammar = match (&self.json_schema, &self.grammar) {
            (Some(text), _) if text.trim_start().starts_with('{') => {
                Grammar::from_json_schema("--json-schema", text)?
            }
            (Some(file), _) => {
                let (place, text) = read_grammar("--json-schema", Path::new(file))?;
                Grammar::from_json_schema(&place, &text)?
            }
            (None, Some(file)) => {
                let (place, text) = read_grammar("--grammar", file)?;
                Grammar::from_gbnf(&place, &text)?
            }
            (None, None) => return Ok(None),
        };
        grammar.compile_for_bytes().map(Some)
    }
}

/// Reads a file of at most 1 MiB; also returns its flag and path, for errors.
#[cfg(feature = "grammar")]
fn read_grammar(flag: &str, file: &Path) -> Result<(String, String)> {
    const LIMIT: u64 = 1 << 20;
    let place = format!("{flag} {}", file.display());
    let opened = std::fs::File::open(file).map_err(|e| e.to_string());
    let read = opened.and_then(|f| files::text_file::read_text(f, LIMIT));
    let text = read.map_err(|why| Error::Usage(format!("{place}: {why}")))?;
    Ok((place, text))
}
