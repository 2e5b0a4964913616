//! `eval`: perplexity of a text, and how far two settings of the engine are apart.

use super::args::{Format, ModelArgs};
use super::start::{self, Voice};
use super::terminal::{Progress, put};
use crate::dims::VOCAB;
use crate::engine::{Engine, EngineOptions};
use crate::error::{Error, Result};
use crate::kv::{KvType, KvTypes};
use crate::plan::{self, Context, Plan};
use crate::sampler::argmax;
use crate::session::{ROWS, Session};
use crate::system::marker::Marker;
use crate::tokenizer::{AddSpecial, Tokenizer};
use clap::Args;
use serde::Deserialize;
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Perplexity, or a comparison.
#[derive(Args, Clone)]
pub(super) struct EvalArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Text to predict
    #[arg(short, long, value_name = "FILE", required_unless_present = "tokens", conflicts_with = "tokens")]
    pub file: Option<PathBuf>,
    /// Token ids to predict: a JSON array, or an object with `tokens` and `chunk`
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
    /// Tokens of one chunk; each begins with an empty cache [default: the token file's, else 512]
    #[arg(long, value_name = "N")]
    pub chunk: Option<usize>,
    /// Most chunks
    #[arg(long, value_name = "N")]
    pub limit: Option<usize>,
    /// Also run these settings and compare, e.g. kv=f32,weights=f32 (keys: kv, k, v, weights)
    #[arg(long, value_name = "SETTINGS")]
    pub against: Option<String>,
    /// Text, or one JSON object
    #[arg(long, value_enum, default_value = "text")]
    pub format: Format,
    /// Say nothing but errors on stderr
    #[arg(short, long)]
    pub quiet: bool,
}

const DEFAULT_CHUNK: usize = 512;

pub(super) fn run(args: &EvalArgs) -> Result<()> {
    let mut settings = args.model.resolve()?;
    let mut base = args.against.as_deref().map(|text| against(text, &settings)).transpose()?;
    for (flag, n, least) in [("--chunk", args.chunk, 2), ("--limit", args.limit, 1)] {
        if let Some(n) = n.filter(|&n| n < least) {
            return Err(Error::Usage(format!("{flag} {n}: use a number from {least}")));
        }
    }
    let input = match (&args.tokens, &args.file) {
        (Some(file), _) => Input::Tokens(read_tokens(file)?),
        (None, file) => Input::Text(read(file.as_deref().unwrap_or(Path::new("")), "--file")?),
    };
    let chunk = args.chunk.or(input.chunk()).unwrap_or(DEFAULT_CHUNK);
    for o in [Some(&mut settings), base.as_mut()].into_iter().flatten() {
        o.max_seq_len = chunk;
    }
    let began = Instant::now();
    let _marker = prepare(args, [Some(&settings), base.as_ref()])?;
    let engine = Engine::load(settings.clone())?;
    let mut chunks = input.chunks(chunk, engine.tokenizer())?;
    chunks.truncate(args.limit.unwrap_or(usize::MAX));
    let base_engine = base.clone().map(Engine::load).transpose()?;

    let mut session = engine.session()?;
    let mut base_session = base_engine.as_ref().map(Engine::session).transpose()?;
    let mut totals = Totals::default();
    let progress = Progress::new("chunk", args.quiet);
    for (i, tokens) in chunks.iter().enumerate() {
        progress.show(i, chunks.len());
        session.clear();
        base_session.iter_mut().for_each(Session::clear);
        totals.chunk(&mut session, base_session.as_mut(), tokens)?;
    }
    progress.show(chunks.len(), chunks.len());
    let names = (describe(&settings), base.as_ref().map(describe));
    put(&match args.format {
        Format::Jsonl => totals.json(&names.0, names.1.as_deref(), chunk),
        Format::Text => totals.text(&names.0, names.1.as_deref()),
    })?;
    if !args.quiet {
        eprintln!("{} chunks of {chunk} tokens, {:.1} s", chunks.len(), began.elapsed().as_secs_f64());
    }
    Ok(())
}

/// Refuses what will not fit, for both settings at once, and prepares the process.
fn prepare(args: &EvalArgs, settings: [Option<&EngineOptions>; 2]) -> Result<Marker> {
    // The session holds a block of logits; those compared with are held beside it.
    let plans: Vec<Plan> = settings
        .into_iter()
        .flatten()
        .enumerate()
        .map(|(i, o)| Ok(Plan::new(o)?.with_rows(1 + i)))
        .collect::<Result<_>>()?;
    plan::check_apart(&plans, Context::Chunk)?;
    let need = plans.iter().fold(0u64, |sum, p| sum.saturating_add(p.need()));
    let (first, voice) = (&plans[0], Voice::of(args.quiet));
    start::planned(first, need, (&args.model.cores.mask, first.options.threads), (Context::Chunk, voice))
}

/// The settings of `--against`: those of the other flags, with some replaced.
fn against(text: &str, other: &EngineOptions) -> Result<EngineOptions> {
    let mut options = other.clone();
    let bad = |what: String| Error::Usage(format!("--against {text}: {what}"));
    for part in text.split(',') {
        let (key, value) =
            part.split_once('=').ok_or_else(|| bad(format!("{part:?} is not of the form key=value")))?;
        let kv = || value.parse::<KvType>().map_err(|e| bad(e.to_string()));
        match key.trim() {
            "kv" => options.kv_types = KvTypes::both(kv()?),
            "k" => options.kv_types.k = kv()?,
            "v" => options.kv_types.v = kv()?,
            "weights" => options.weight_type = value.parse().map_err(|e: Error| bad(e.to_string()))?,
            key => return Err(bad(format!("no setting {key:?}; use kv, k, v or weights"))),
        }
    }
    Ok(options)
}

fn describe(o: &EngineOptions) -> String {
    format!("kv {}, weights {}", o.kv_types, o.weight_type)
}

/// What to predict.
enum Input {
    Text(String),
    Tokens(TokenFile),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenFile {
    Plain(Vec<u32>),
    Chunked { chunk: usize, tokens: Vec<u32> },
}

impl Input {
    fn chunk(&self) -> Option<usize> {
        match self {
            Input::Tokens(TokenFile::Chunked { chunk, .. }) => Some(*chunk),
            _ => None,
        }
    }

    /// Chunks without overlap. Those of a text each begin with the token that the model expects first.
    fn chunks(self, size: usize, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
        if size < 2 {
            return Err(Error::Usage(format!("--tokens: chunk {size}; use at least 2")));
        }
        let (first, tokens) = match self {
            Input::Tokens(TokenFile::Plain(tokens) | TokenFile::Chunked { tokens, .. }) => (None, tokens),
            Input::Text(text) => {
                let added = tokenizer.encode("", AddSpecial::Yes)?;
                let first = tokenizer.bos_id().filter(|id| added.first() == Some(id));
                (first, tokenizer.encode_plain(&text)?)
            }
        };
        let step = size - usize::from(first.is_some());
        let chunks = tokens.chunks(step).map(|c| first.into_iter().chain(c.iter().copied()).collect());
        let chunks: Vec<Vec<u32>> = chunks.filter(|c: &Vec<u32>| c.len() > 1).collect();
        match chunks.is_empty() {
            true => Err(Error::Usage("nothing to predict: give a file of at least two tokens".into())),
            false => Ok(chunks),
        }
    }
}

/// A text file of sensible size.
fn read(file: &Path, flag: &str) -> Result<String> {
    const LIMIT: u64 = 64 << 20;
    let bad = |e: String| Error::Usage(format!("{flag} {}: {e}", file.display()));
    let meta = std::fs::metadata(file).map_err(|e| bad(e.to_string()))?;
    if !meta.is_file() || meta.len() > LIMIT {
        return Err(bad("is not a file of at most 64 MiB; give a smaller one".into()));
    }
    std::fs::read_to_string(file).map_err(|e| bad(e.to_string()))
}

fn read_tokens(file: &Path) -> Result<TokenFile> {
    serde_json::from_str(&read(file, "--tokens")?).map_err(|_| {
        Error::Usage(format!(
            "--tokens {}: give a JSON array of token ids, or {{\"chunk\": 512, \"tokens\": [...]}}",
            file.display()
        ))
    })
}

/// Sums over all predictions.
#[derive(Default)]
struct Totals {
    predictions: usize,
    /// Negative log likelihoods in nats, of the settings and of those compared with.
    nll: f64,
    base_nll: f64,
    /// Of the settings from those compared with.
    kl: f64,
    same_top: usize,
}

impl Totals {
    /// Adds one chunk; both sessions are empty.
    fn chunk(&mut self, session: &mut Session, mut base: Option<&mut Session>, tokens: &[u32]) -> Result<()> {
        let mut base_rows = Vec::new();
        for (block, part) in tokens.chunks(ROWS).enumerate() {
            base_rows.clear();
            if let Some(base) = &mut base {
                base.logits_of_all(part, |_, row| base_rows.extend_from_slice(row))?;
            }
            session.logits_of_all(part, |i, row| {
                if let Some(&next) = tokens.get(block * ROWS + i + 1) {
                    let base = (!base_rows.is_empty()).then(|| &base_rows[i * VOCAB..][..VOCAB]);
                    self.prediction(row, base, next as usize);
                }
            })?;
        }
        match (self.nll + self.base_nll + self.kl).is_finite() {
            true => Ok(()),
            false => Err(Error::Model("the model computes NaN or infinity; its weights are broken".into())),
        }
    }

    fn prediction(&mut self, row: &[f32], base: Option<&[f32]>, next: usize) {
        // An id beyond the vocabulary is refused by the session when its turn comes.
        let logit = |row: &[f32]| row.get(next).map_or(f64::NAN, |&x| f64::from(x));
        let total = log_sum_exp(row);
        self.predictions += 1;
        self.nll += total - logit(row);
        let Some(base) = base else { return };
        let base_total = log_sum_exp(base);
        self.base_nll += base_total - logit(base);
        self.same_top += usize::from(argmax(row) == argmax(base));
        // sum p (ln p - ln q)
        let pairs = base.iter().zip(row).map(|(&p, &q)| (f64::from(p) - base_total, f64::from(q) - total));
        self.kl += pairs.map(|(p, q)| libm::exp(p) * (p - q)).sum::<f64>();
    }

    fn mean(&self, sum: f64) -> f64 {
        sum / self.predictions as f64
    }

    fn perplexity(&self, nll: f64) -> f64 {
        libm::exp(self.mean(nll))
    }

    fn text(&self, name: &str, base: Option<&str>) -> String {
        let row = |name: &str, nll: f64| {
            format!(
                "{:>12.6} {:>12.6} {:>8}  {name}\n",
                self.perplexity(nll),
                self.mean(nll),
                self.predictions
            )
        };
        let head = format!("{:>12} {:>12} {:>8}\n", "perplexity", "nats/token", "tokens");
        let Some(base) = base else { return head + &row(name, self.nll) };
        let worse = 100.0 * (self.perplexity(self.nll) / self.perplexity(self.base_nll) - 1.0);
        let (kl, top) = (self.mean(self.kl), 100.0 * self.mean(self.same_top as f64));
        head + &row(base, self.base_nll)
            + &row(name, self.nll)
            + &format!("perplexity {worse:+.3} %, KL divergence {kl:.6} nats, same top token {top:.3} %\n")
    }

    fn json(&self, name: &str, base: Option<&str>, chunk: usize) -> String {
        let mut line = json!({
            "t": "eval", "settings": name, "chunk": chunk, "tokens": self.predictions,
            "perplexity": self.perplexity(self.nll), "nats_per_token": self.mean(self.nll),
        });
        if let Some(base) = base {
            line["against"] = json!({
                "settings": base, "perplexity": self.perplexity(self.base_nll),
                "nats_per_token": self.mean(self.base_nll), "kl_divergence": self.mean(self.kl),
                "same_top": self.mean(self.same_top as f64),
            });
        }
        format!("{line}\n")
    }
}

/// `ln sum exp x`, about the largest, in f64.
fn log_sum_exp(row: &[f32]) -> f64 {
    let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    most + row.iter().map(|&x| libm::exp(f64::from(x) - most)).sum::<f64>().ln()
}
