//! Parameters that requests of all APIs share: settings of the sampler, limits, the number of texts.

use super::access::ApiClient;
use super::body::{Integer, Object, Seed, Strings, TokenIds, kind_of, read_object};
use super::constraint::{Constraint, read_constraint};
use super::error::{ApiError, ApiResult};
use super::state::{ServerModel, random_number};
use super::unsupported::{self, RequestKind};
use crate::run::generate::scheduler::{Realm, Reuse};
use crate::run::options::GenerateOptions;
use crate::run::session::CancelToken;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;
use text::tokenizer::{AddSpecial, Tokenizer};

/// Texts of one request, at most, or as many as run at once.
pub const MAX_TEXTS: usize = 128;
/// Biases, and bytes of a text that has one, at most.
const MAX_BIASES: usize = 1024;
const MAX_BIASED_BYTES: usize = 256;
/// Bytes of a `cache_salt`, at most.
const MAX_SALT: usize = 1024;
/// Ids in `stop_token_ids`, at most.
const MAX_STOP_TOKENS: usize = 1024;
/// Tokens of a completion that does not say how many: as `generate`'s.
const DEFAULT_MAX_TOKENS: usize = 20;

/// Log-probabilities at each place of a text, of which a whole answer is held in memory.
pub type LogprobCount = Integer<0, 20>;
/// A limit of tokens; -1 is none.
type MaxTokens = Integer<-1, 0xFFFF_FFFF>;
/// Tokens back from the end of a text; -1 is all.
type TokenWindow = Integer<-1, 0x7FFF_FFFF>;

/// Fields of a request.
#[derive(Deserialize)]
struct RequestFields {
    temperature: Option<f32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    typical_p: Option<f32>,
    top_k: Option<TokenWindow>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    /// vLLM's name, and llama.cpp's.
    repetition_penalty: Option<f32>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<TokenWindow>,
    dry_multiplier: Option<f32>,
    dry_base: Option<f32>,
    dry_allowed_length: Option<Integer<1, 0x7FFF_FFFF>>,
    dry_penalty_last_n: Option<TokenWindow>,
    dry_sequence_breakers: Option<Strings<64, 64>>,
    samplers: Option<Strings<64, 64>>,
    #[serde(rename = "structured_outputs")]
    _structured_outputs: Option<Map<String, Value>>,
    logit_bias: Option<Value>,
    seed: Option<Seed>,
    /// Names of several APIs, of which the last counts.
    max_tokens: Option<MaxTokens>,
    max_completion_tokens: Option<MaxTokens>,
    max_output_tokens: Option<MaxTokens>,
    n_predict: Option<MaxTokens>,
    min_tokens: Option<Integer<0, 0x7FFF_FFFF>>,
    stop: Option<Strings<16, 256>>,
    stop_sequences: Option<Strings<16, 256>>,
    stop_token_ids: Option<TokenIds>,
    bad_words: Option<Strings<1024, 256>>,
    ignore_eos: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<Object<StreamOptions>>,
    return_progress: Option<bool>,
    timings_per_token: Option<bool>,
    cache_prompt: Option<bool>,
    cache_salt: Option<String>,
    n: Option<Integer<1, 256>>,
    n_cmpl: Option<Integer<1, 256>>,
    best_of: Option<Integer<1, { MAX_TEXTS as i64 }>>,
    parallel_tool_calls: Option<bool>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Form in which an answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseMode {
    Whole,
    /// Events, as the texts come.
    Stream,
    /// Events, with the numbers of tokens at the end.
    StreamWithUsage,
}

/// Parameters that all texts of a request share.
#[derive(Clone)]
pub struct RequestParams {
    pub options: GenerateOptions,
    pub reuse: Reuse,
    /// Constraint on the texts, until it is in the options as a grammar.
    pub constraint: Option<Constraint>,
    /// Set where a stream reports how far the prompt is read.
    pub progress: bool,
    /// Texts for each prompt.
    pub n: usize,
    pub mode: ResponseMode,
    /// Set where an answer has one call at most; what comes after it is left out.
    pub one_call: bool,
    /// Log-probabilities at each token of the prompt, where these are wanted.
    pub prompt_logprobs: Option<usize>,
    /// Set where the answer has times, if its API leaves the choice.
    pub timings: bool,
}

impl RequestParams {
    /// Reads what every kind of request may hold.
    pub fn read(
        body: &Value,
        model: &ServerModel,
        (client, kind): (ApiClient, RequestKind),
    ) -> ApiResult<Self> {
        unsupported::check_fields(body, kind)?;
        let fields: RequestFields = read_object(body, "")?;
        if let Some(Strings(samplers)) = &fields.samplers {
            unsupported::check_samplers(samplers)?;
        }
        let tokenizer = model.engine.tokenizer();
        let mut options = GenerateOptions { cancel: CancelToken::default(), ..model.defaults.clone() };
        if let Some(bias) = &fields.logit_bias {
            let texts = (kind == RequestKind::LlamaCppCompletion).then_some(tokenizer);
            options.sampler.logit_bias = read_biases(bias, texts)?;
        }
        options.sampler.seed = match fields.seed {
            Some(Seed(Some(given))) => given,
            None if model.seeded => options.sampler.seed,
            _ => random_number() >> 32,
        };
        options.max_tokens = (kind == RequestKind::Completion).then_some(DEFAULT_MAX_TOKENS);
        options.bad_words = encode_bad_words(&fields, tokenizer)?;
        let calls_once = body.pointer("/tool_choice/disable_parallel_tool_use").and_then(Value::as_bool);
        let params = Self {
            reuse: read_reuse(&fields, client)?,
            constraint: read_constraint(body)?,
            progress: fields.return_progress.unwrap_or(false),
            n: read_text_count(&fields, model.engine.options().sequences())?,
            mode: read_mode(&fields),
            one_call: fields.parallel_tool_calls == Some(false) || calls_once == Some(true),
            prompt_logprobs: None,
            timings: fields.timings_per_token.unwrap_or(false),
            options: read_options(fields, options, model.engine.options().max_seq_len)?,
        };
        params.options.sampler.validate_for(crate::dims::VOCAB).map_err(|e| ApiError::from_request(&e))?;
        Ok(params)
    }

    /// Makes the texts of a completion follow what the request says of their form.
    pub fn apply_constraint(&mut self) -> ApiResult<()> {
        self.constraint.take().map_or(Ok(()), |constraint| constraint.apply(&mut self.options))
    }
}

/// Texts for each prompt.
fn read_text_count(fields: &RequestFields, slots: usize) -> ApiResult<usize> {
    let mut n = 1;
    for (name, given) in [("n", fields.n), ("n_cmpl", fields.n_cmpl)] {
        n = given.and_then(Integer::count).unwrap_or(n);
        if n > slots {
            let why = format!("is {n}; use a whole number from 1 to {slots}");
            return Err(ApiError::for_field(name, why));
        }
    }
    if fields.best_of.and_then(Integer::count).is_some_and(|of| of != 1 && of != n) {
        let why =
            "choosing from more texts than `n` is not followed by this server; leave it out, or ask for all";
        return Err(ApiError::for_field("best_of", why));
    }
    Ok(n)
}

fn read_mode(fields: &RequestFields) -> ResponseMode {
    let usage = fields.stream_options.as_ref().and_then(|options| options.0.include_usage);
    match (fields.stream, usage) {
        (Some(true), Some(true)) => ResponseMode::StreamWithUsage,
        (Some(true), _) => ResponseMode::Stream,
        _ => ResponseMode::Whole,
    }
}

/// Rows of which earlier texts may be copied. The salt parts a client's texts, so that the times of one do not tell of
/// another.
fn read_reuse(fields: &RequestFields, client: ApiClient) -> ApiResult<Reuse> {
    let wrong = |why: String| ApiError::for_field("cache_salt", why);
    match fields.cache_salt.as_deref() {
        Some("") => Err(wrong("is empty; give a text, or leave it out".into())),
        Some(salt) if salt.len() > MAX_SALT => {
            Err(wrong(format!("has {} bytes; {MAX_SALT} are the most", salt.len())))
        }
        _ if fields.cache_prompt == Some(false) => Ok(Reuse::No),
        salt => Ok(Reuse::In(Realm { key: client.key, salt: salt.map(Arc::from) })),
    }
}

/// Tokens in a row that may not come: those of each word, as it stands at the beginning of a text and behind a blank.
fn encode_bad_words(fields: &RequestFields, tokenizer: &Tokenizer) -> ApiResult<Vec<Vec<u32>>> {
    let Some(Strings(words)) = &fields.bad_words else { return Ok(Vec::new()) };
    if words.iter().any(String::is_empty) {
        return Err(ApiError::for_field("bad_words", "holds an empty word; leave it out"));
    }
    let mut found = Vec::new();
    for word in words.iter().flat_map(|word| [word.clone(), format!(" {}", word.trim_start())]) {
        found.push(tokenizer.encode(&word, AddSpecial::No).map_err(|e| ApiError::from_request(&e))?);
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Options with what some fields say in the place of the server's.
fn read_options(
    fields: RequestFields,
    mut options: GenerateOptions,
    context: usize,
) -> ApiResult<GenerateOptions> {
    let s = &mut options.sampler;
    for (given, to) in [
        (fields.temperature, &mut s.temperature),
        (fields.top_p, &mut s.top_p),
        (fields.min_p, &mut s.min_p),
        (fields.typical_p, &mut s.typical_p),
        (fields.xtc_probability, &mut s.xtc.probability),
        (fields.xtc_threshold, &mut s.xtc.threshold),
        (fields.presence_penalty, &mut s.presence_penalty),
        (fields.frequency_penalty, &mut s.frequency_penalty),
        (fields.repeat_penalty.or(fields.repetition_penalty), &mut s.repetition_penalty),
        (fields.dry_multiplier, &mut s.dry.multiplier),
        (fields.dry_base, &mut s.dry.base),
    ] {
        *to = given.unwrap_or(*to);
    }
    s.top_k = fields.top_k.map_or(s.top_k, |k| k.count().unwrap_or(0));
    s.repetition_window = fields.repeat_last_n.map_or(s.repetition_window, |n| n.count().unwrap_or(context));
    s.dry.allowed_length = fields.dry_allowed_length.and_then(Integer::count).unwrap_or(s.dry.allowed_length);
    s.dry.window = fields.dry_penalty_last_n.map_or(s.dry.window, Integer::count);
    if let Some(Strings(breakers)) = fields.dry_sequence_breakers {
        s.dry.breakers = breakers;
    }
    let limits =
        [fields.n_predict, fields.max_output_tokens, fields.max_completion_tokens, fields.max_tokens];
    options.max_tokens = limits.into_iter().flatten().next().map_or(options.max_tokens, Integer::count);
    options.min_tokens = fields.min_tokens.and_then(Integer::count).unwrap_or(options.min_tokens);
    if options.max_tokens.is_some_and(|most| most < options.min_tokens) {
        return Err(ApiError::for_field("min_tokens", "is more than `max_tokens`; use fewer"));
    }
    if let Some(Strings(stop)) = fields.stop_sequences.or(fields.stop) {
        options.stop = stop.into_iter().filter(|text| !text.is_empty()).collect();
    }
    if let Some(TokenIds(ids)) = fields.stop_token_ids {
        if ids.len() > MAX_STOP_TOKENS {
            let why = format!("has more than {MAX_STOP_TOKENS} ids; use fewer");
            return Err(ApiError::for_field("stop_token_ids", why));
        }
        options.stop_tokens = ids;
    }
    options.ignore_eos = fields.ignore_eos.unwrap_or(options.ignore_eos);
    Ok(options)
}

/// Reads `{"29": 1.5}`, or llama.cpp's `[[29, 1.5], [30, false]]`. With a tokenizer texts stand for all of their tokens.
fn read_biases(value: &Value, texts: Option<&Tokenizer>) -> ApiResult<Vec<(u32, f32)>> {
    let wrong = |what: String| {
        ApiError::for_field("logit_bias", format!("{what}; use an object of token ids and numbers"))
    };
    let pairs: Vec<(Value, &Value)> = match value {
        Value::Object(all) => {
            let id = |name: &str| name.parse::<u32>().map_or(name.into(), Value::from);
            all.iter().map(|(name, bias)| (id(name), bias)).collect()
        }
        Value::Array(all) => {
            let pairs = all.iter().map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([id, bias]) => Ok((id.clone(), bias)),
                _ => Err(wrong("has something else than pairs".into())),
            });
            pairs.take(MAX_BIASES + 1).collect::<ApiResult<_>>()?
        }
        other => return Err(wrong(format!("is {}", kind_of(other)))),
    };
    let mut biases = Vec::new();
    for (name, bias) in pairs.iter().take(MAX_BIASES + 1) {
        let text = name.as_str().unwrap_or_default();
        let id = name.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match (id, texts) {
            (Some(id), _) => vec![id],
            (None, Some(_)) if text.len() > MAX_BIASED_BYTES => {
                let why = format!("has a text of {} bytes, and {MAX_BIASED_BYTES} are the most", text.len());
                return Err(wrong(why));
            }
            (None, Some(tokenizer)) => {
                tokenizer.encode(text, AddSpecial::No).map_err(|e| ApiError::from_request(&e))?
            }
            (None, None) => Vec::new(),
        };
        if ids.is_empty() {
            return Err(wrong("has a name that is no token id".into()));
        }
        // OpenAI's range ends at 100, which rules a token in or out.
        let number = match bias {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            other => other.as_f64().map(|x| x as f32).filter(|x| x.is_finite()),
        };
        let number = number.ok_or_else(|| wrong(format!("has {} as a bias", kind_of(bias))))?;
        biases.extend(ids.into_iter().map(|id| (id, number)));
        if biases.len() > MAX_BIASES {
            let why = format!("has more than {MAX_BIASES} biases; use at most {MAX_BIASES}");
            return Err(ApiError::for_field("logit_bias", why));
        }
    }
    Ok(biases)
}
