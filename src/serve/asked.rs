//! What a request asks for: settings of the sampler, limits, how many texts.

use super::access::Client;
use super::fields::{Fields, kind};
use super::hub::{Served, random};
use super::neutral::{self, Kind};
use super::refusal::Refusal;
use crate::run::generate::scheduler::{Realm, Reuse};
use crate::run::options::GenerateOptions;
use crate::run::session::CancelToken;
use serde_json::{Map, Value};
use std::sync::Arc;
use text::sampler::SamplerOptions;
use text::tokenizer::{AddSpecial, Tokenizer};

type Result<T> = std::result::Result<T, Refusal>;

/// Texts of one request, at most, or as many as run at once.
pub const MOST: usize = 128;

/// A number of tokens, at most.
const MOST_BACK: i64 = i32::MAX as i64;

/// Log-probabilities at each place of a text, at most: a whole answer is held in memory.
pub const MOST_LOGPROBS: i64 = 20;

/// Stop strings, and bytes of each.
const STOPS: (usize, usize) = (16, 256);

/// Sequence breakers of DRY.
const BREAKERS: (usize, usize) = (64, 64);

/// Biases, and bytes of a text that has one.
const BIASES: usize = 1024;
const BIASED: usize = 256;

/// Bytes of a `cache_salt`, at most.
const MOST_SALT: usize = 1024;

/// Words that may not come, and tokens that end a text, at most.
const MOST_TOKENS: usize = 1024;
/// Bytes of such a word, at most.
const MOST_BYTES: usize = 256;

/// Tokens of a completion that does not say how many: as `generate`'s.
const LIMIT: usize = 20;

/// What all texts of a request have in common.
#[derive(Clone)]
pub struct Asked {
    pub options: GenerateOptions,
    pub reuse: Reuse,
    /// Whether a stream tells how far the prompt is read.
    pub progress: bool,
    /// Texts for each prompt.
    pub n: usize,
    pub how: How,
    /// An answer has one call at most; what comes after it is left out.
    pub one_call: bool,
    /// Measures the tokens of the prompt, each with so many of the most probable ones.
    pub measures: Option<usize>,
    /// Whether the answer says how long it took, where its shape leaves the choice.
    pub timed: bool,
}

/// How the answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    Whole,
    /// As it comes.
    Stream,
    /// The same, with the numbers of tokens at the end.
    StreamWithUsage,
}

impl Asked {
    /// Reads what every kind of request may hold.
    pub fn read(fields: &Fields<'_>, (served, client): (&Served, Client), kind: Kind) -> Result<Self> {
        neutral::check(fields, kind)?;
        let mut options = GenerateOptions { cancel: CancelToken::default(), ..served.defaults.clone() };
        sampler(fields, &mut options)?;
        repetition(fields, &mut options.sampler, served.engine.options().max_seq_len)?;
        if let Some(bias) = fields.get("logit_bias") {
            let names = (kind == Kind::Native).then(|| served.engine.tokenizer());
            options.sampler.logit_bias = biases(bias, &fields.name("logit_bias"), names)?;
        }
        options.sampler.seed = match fields.seed("seed")? {
            Some(Some(given)) => given,
            None if served.seeded => options.sampler.seed,
            _ => random() >> 32,
        };
        options.max_tokens = (kind == Kind::Completion).then_some(LIMIT);
        for field in ["max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"] {
            options.max_tokens = tokens(fields, field)?.unwrap_or(options.max_tokens);
        }
        for field in ["stop", "stop_sequences"] {
            if let Some(stop) = fields.texts(field, STOPS)? {
                options.stop = stop.into_iter().filter(|text| !text.is_empty()).collect();
            }
        }
        options.ignore_eos = fields.flag("ignore_eos")?.unwrap_or(options.ignore_eos);
        ends(fields, &mut options)?;
        options.bad_words = bad_words(fields, served.engine.tokenizer())?;
        let usage = match fields.object("stream_options")? {
            Some(of) => of.flag("include_usage")?.unwrap_or(false),
            None => false,
        };
        let how = match (fields.flag("stream")?.unwrap_or(false), usage) {
            (false, _) => How::Whole,
            (true, false) => How::Stream,
            (true, true) => How::StreamWithUsage,
        };
        let realm = Realm { key: client.key, salt: salt(fields)? };
        let reuse = if fields.flag("cache_prompt")?.unwrap_or(true) { Reuse::In(realm) } else { Reuse::No };
        let (mut n, slots) = (1, served.engine.options().sequences() as i64);
        for field in ["n", "n_cmpl"] {
            n = fields.whole(field, 1..=slots)?.map_or(n, |n| n as usize);
        }
        if fields.whole("best_of", 1..=MOST as i64)?.is_some_and(|of| of != 1 && of != n as i64) {
            let why = "choosing from more texts than `n` is not followed by this server; leave it out, or ask for all";
            return Err(fields.refuse("best_of", why));
        }
        let one_call = fields.flag("parallel_tool_calls")? == Some(false) || calls_once(fields);
        let timed = fields.flag("timings_per_token")?.unwrap_or(false);
        options.sampler.validate_for(crate::dims::VOCAB).map_err(|e| Refusal::of_input(&e))?;
        let progress = fields.flag("return_progress")?.unwrap_or(false);
        Ok(Self { options, reuse, progress, n, how, one_call, measures: None, timed })
    }

    /// Asks for the log-probabilities of some tokens at each place, as many as a field says.
    pub fn want_logprobs(&mut self, count: i64) {
        self.options.logprobs = usize::try_from(count).ok();
    }
}

/// What parts the rows that are kept of a client's texts, so that the times of one do not tell of another.
fn salt(fields: &Fields<'_>) -> Result<Option<Arc<str>>> {
    match fields.text("cache_salt")? {
        Some("") => Err(fields.refuse("cache_salt", "is empty; give a text, or leave it out")),
        Some(salt) if salt.len() > MOST_SALT => {
            let why = format!("has {} bytes; {MOST_SALT} are the most", salt.len());
            Err(fields.refuse("cache_salt", why))
        }
        salt => Ok(salt.map(Arc::from)),
    }
}

/// Anthropic's way to ask for one call at most.
fn calls_once(fields: &Fields<'_>) -> bool {
    let flag = fields.get("tool_choice").and_then(|choice| choice.get("disable_parallel_tool_use"));
    flag.and_then(Value::as_bool).unwrap_or(false)
}

/// What else ends a text, and how soon.
fn ends(fields: &Fields<'_>, options: &mut GenerateOptions) -> Result<()> {
    if let Some(n) = fields.whole("min_tokens", 0..=MOST_BACK)? {
        options.min_tokens = n as usize;
    }
    if options.max_tokens.is_some_and(|most| most < options.min_tokens) {
        return Err(fields.refuse("min_tokens", "is more than `max_tokens`; use fewer"));
    }
    let Some(all) = fields.list("stop_token_ids")? else { return Ok(()) };
    if all.len() > MOST_TOKENS {
        return Err(fields.refuse("stop_token_ids", format!("has more than {MOST_TOKENS} ids; use fewer")));
    }
    let wrong = || fields.refuse("stop_token_ids", "holds what is no token id; use ids of the vocabulary");
    options.stop_tokens = ids(all).ok_or_else(wrong)?;
    Ok(())
}

/// Ids of the vocabulary.
pub fn ids(all: &[Value]) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().filter(|&id| id < crate::dims::VOCAB as u64);
    all.iter().map(|value| id(value).map(|id| id as u32)).collect()
}

/// Tokens in a row that may not come: those of each word, as it stands at the beginning of a text and behind a blank.
fn bad_words(fields: &Fields<'_>, tokenizer: &Tokenizer) -> Result<Vec<Vec<u32>>> {
    let words = fields.texts("bad_words", (MOST_TOKENS, MOST_BYTES))?.unwrap_or_default();
    if words.iter().any(String::is_empty) {
        return Err(fields.refuse("bad_words", "holds an empty word; leave it out"));
    }
    let mut found = Vec::new();
    for word in words.iter().flat_map(|word| [word.clone(), format!(" {}", word.trim_start())]) {
        found.push(tokenizer.encode(&word, AddSpecial::No).map_err(|e| Refusal::of_input(&e))?);
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// A limit of tokens; -1 is none.
fn tokens(fields: &Fields<'_>, field: &str) -> Result<Option<Option<usize>>> {
    let n = fields.whole(field, -1..=i64::from(u32::MAX))?;
    Ok(n.map(|n| usize::try_from(n).ok()))
}

fn sampler(fields: &Fields<'_>, options: &mut GenerateOptions) -> Result<()> {
    let s = &mut options.sampler;
    let numbers = [
        ("temperature", &mut s.temperature),
        ("top_p", &mut s.top_p),
        ("min_p", &mut s.min_p),
        ("typical_p", &mut s.typical_p),
        ("xtc_probability", &mut s.xtc.probability),
        ("xtc_threshold", &mut s.xtc.threshold),
        ("presence_penalty", &mut s.presence_penalty),
        ("frequency_penalty", &mut s.frequency_penalty),
        ("dry_multiplier", &mut s.dry.multiplier),
        ("dry_base", &mut s.dry.base),
    ];
    for (field, to) in numbers {
        *to = fields.number(field)?.unwrap_or(*to);
    }
    // vLLM's name, and llama.cpp's.
    for field in ["repetition_penalty", "repeat_penalty"] {
        s.repetition_penalty = fields.number(field)?.unwrap_or(s.repetition_penalty);
    }
    if let Some(k) = fields.whole("top_k", -1..=MOST_BACK)? {
        s.top_k = usize::try_from(k).unwrap_or(0);
    }
    Ok(())
}

/// How far back penalties look, and at what.
fn repetition(fields: &Fields<'_>, s: &mut SamplerOptions, context: usize) -> Result<()> {
    if let Some(n) = fields.whole("repeat_last_n", -1..=MOST_BACK)? {
        s.repetition_window = usize::try_from(n).unwrap_or(context);
    }
    if let Some(n) = fields.whole("dry_allowed_length", 1..=MOST_BACK)? {
        s.dry.allowed_length = n as usize;
    }
    if let Some(n) = fields.whole("dry_penalty_last_n", -1..=MOST_BACK)? {
        s.dry.window = usize::try_from(n).ok();
    }
    s.dry.breakers =
        fields.texts("dry_sequence_breakers", BREAKERS)?.unwrap_or(std::mem::take(&mut s.dry.breakers));
    Ok(())
}

/// `{"29": 1.5}`, or llama.cpp's `[[29, 1.5], [30, false]]`. With a tokenizer texts stand for all of their tokens.
fn biases(value: &Value, name: &str, texts: Option<&Tokenizer>) -> Result<Vec<(u32, f32)>> {
    let wrong =
        |what: String| Refusal::field(name, format!("{what}; use an object of token ids and numbers"));
    let bias = |value: &Value| match value {
        Value::Bool(false) => Some(f32::NEG_INFINITY),
        // OpenAI's range ends at 100, which rules a token in or out.
        other => Some(other.as_f64()? as f32).filter(|x| x.is_finite()),
    };
    let ids = |name: std::result::Result<u64, &str>| match (name, texts) {
        (Ok(id), _) => Ok(u32::try_from(id).ok().into_iter().collect()),
        (Err(text), Some(_)) if text.len() > BIASED => {
            Err(wrong(format!("has a text of {} bytes, and {BIASED} are the most", text.len())))
        }
        (Err(text), Some(texts)) => texts.encode(text, AddSpecial::No).map_err(|e| Refusal::of_input(&e)),
        (Err(_), None) => Ok(Vec::new()),
    };
    let many = || Refusal::field(name, format!("has more than {BIASES} biases; use at most {BIASES}"));
    if value.as_object().map_or(0, Map::len).max(value.as_array().map_or(0, Vec::len)) > BIASES {
        return Err(many());
    }
    let mut found = Vec::new();
    let mut add = |ids: Vec<u32>, value: &Value| match bias(value) {
        _ if found.len() + ids.len() > BIASES => Err(many()),
        _ if ids.is_empty() => Err(wrong("has a name that is no token id".into())),
        Some(bias) => {
            found.extend(ids.into_iter().map(|id| (id, bias)));
            Ok(())
        }
        None => Err(wrong(format!("has {} as a bias", kind(value)))),
    };
    match value {
        Value::Object(all) => {
            all.iter().try_for_each(|(id, value)| add(ids(id.parse().map_err(|_| id.as_str()))?, value))
        }
        Value::Array(all) => all.iter().try_for_each(|pair| match pair.as_array().map(Vec::as_slice) {
            Some([id, value]) => add(ids(id.as_u64().ok_or(id.as_str().unwrap_or("")))?, value),
            _ => Err(wrong("has something else than pairs".into())),
        }),
        other => Err(wrong(format!("is {}", kind(other)))),
    }?;
    Ok(found)
}
