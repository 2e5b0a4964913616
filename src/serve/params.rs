//! Request parameters common to all APIs: sampling, limits, number of texts, streaming.

use super::access::ApiClient;
use super::body::{Integer, Object, RequestBody, Seed, Strings, TokenIds, read_object, type_name};
use super::constraint::{Constraint, read_constraint};
use super::error::{ApiError, ApiResult};
use super::memory::MemoryShare;
use super::state::{ServerModel, random_number};
use super::unsupported::{self, RequestKind};
use crate::run::generate::scheduler::{Realm, Reuse};
use crate::run::options::GenerateOptions;
use crate::run::session::CancelToken;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::sync::Arc;
use text::tokenizer::{AddSpecial, Tokenizer};

/// Maximum number of texts of one request, over all of its prompts.
pub const MAX_TEXTS: usize = 128;
/// Maximum number of logit biases.
const MAX_BIASES: usize = 1024;
/// Maximum length of a text with a logit bias, in bytes.
const MAX_BIASED_BYTES: usize = 256;
/// Maximum length of a `cache_salt`, in bytes.
const MAX_SALT: usize = 1024;
/// Maximum number of `stop_token_ids`.
const MAX_STOP_TOKENS: usize = 1024;
/// Default `max_tokens` of completions, as in `generate`.
const DEFAULT_MAX_TOKENS: usize = 20;

/// Number of most likely tokens with log-probabilities at each position. A whole response keeps all in memory.
pub type LogprobCount = Integer<0, 20>;
/// A token limit; -1 means none.
type MaxTokens = Integer<-1, 0xFFFF_FFFF>;
/// A number of last tokens; -1 means all.
type TokenWindow = Integer<-1, 0x7FFF_FFFF>;

/// Fields common to all APIs.
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
    /// Names of vLLM and llama.cpp; the second takes precedence.
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
    /// Names of several APIs; see [`read_options`] for their precedence.
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

/// Delivery of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseMode {
    Whole,
    /// Server-sent events.
    Stream,
    /// Server-sent events with token counts at the end.
    StreamWithUsage,
}

/// Parameters of a request, with everything else that generating its texts needs.
pub struct RequestParams {
    pub model: Arc<ServerModel>,
    /// Memory of the request, then of its response.
    pub share: MemoryShare,
    pub kind: RequestKind,
    pub options: GenerateOptions,
    pub prefix_cache_scope: Reuse,
    /// Output constraint, until it becomes a grammar in the options.
    pub constraint: Option<Constraint>,
    /// Reports prefill progress in a stream.
    pub reports_progress: bool,
    /// Texts per prompt.
    pub n: usize,
    pub mode: ResponseMode,
    /// Omits everything after the first tool call.
    pub single_tool_call: bool,
    /// Includes `timings`, in APIs where they are optional.
    pub has_timings: bool,
}

impl RequestParams {
    /// Parses a body, and reads the fields common to all APIs.
    pub fn read_request(
        model: &Arc<ServerModel>,
        mut request: RequestBody,
        kind: RequestKind,
    ) -> ApiResult<(Value, Self)> {
        let body = request.parse_json()?;
        unsupported::check_fields(&body, kind)?;
        let fields: RequestFields = read_object(&body, "")?;
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
            None if model.has_fixed_seed => options.sampler.seed,
            _ => random_number() >> 32,
        };
        options.max_tokens = (kind == RequestKind::Completion).then_some(DEFAULT_MAX_TOKENS);
        options.bad_words = encode_bad_words(&fields, tokenizer)?;
        let calls_once = body.pointer("/tool_choice/disable_parallel_tool_use").and_then(Value::as_bool);
        let params = Self {
            model: Arc::clone(model),
            share: request.share,
            kind,
            prefix_cache_scope: read_reuse(&fields, request.client)?,
            constraint: read_constraint(&body)?,
            reports_progress: fields.return_progress.unwrap_or(false),
            n: read_text_count(&fields, model.engine.options().sequence_count())?,
            mode: read_mode(&fields),
            single_tool_call: fields.parallel_tool_calls == Some(false) || calls_once == Some(true),
            has_timings: fields.timings_per_token.unwrap_or(false),
            options: read_options(fields, options, model.engine.options().max_seq_len)?,
        };
        params.options.sampler.validate_for(crate::dims::VOCAB).map_err(|e| ApiError::from_request(&e))?;
        Ok((body, params))
    }

    /// Compiles the output constraint of a completion into its options.
    pub fn apply_constraint(&mut self) -> ApiResult<()> {
        self.constraint.take().map_or(Ok(()), |constraint| constraint.apply_to_options(&mut self.options))
    }
}

/// Reads the number of texts per prompt.
fn read_text_count(fields: &RequestFields, slots: usize) -> ApiResult<usize> {
    let mut n = 1;
    for (name, given) in [("n", fields.n), ("n_cmpl", fields.n_cmpl)] {
        n = given.and_then(Integer::to_count).unwrap_or(n);
        if n > slots {
            let why = format!("is {n}; use an integer from 1 to {slots}");
            return Err(ApiError::for_field(name, why));
        }
    }
    if fields.best_of.and_then(Integer::to_count).is_some_and(|count| count != 1 && count != n) {
        let why = "must equal `n`: this server does not select the best texts; omit it, or set `n`";
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

/// Prefix-cache entries that the request may use. A salt separates the users of one client, so that response times do
/// not reveal the prompts of another.
fn read_reuse(fields: &RequestFields, client: ApiClient) -> ApiResult<Reuse> {
    let wrong = |why: String| ApiError::for_field("cache_salt", why);
    match fields.cache_salt.as_deref() {
        Some("") => Err(wrong("is empty; give a string, or omit it".into())),
        Some(salt) if salt.len() > MAX_SALT => {
            Err(wrong(format!("has {} bytes; use at most {MAX_SALT}", salt.len())))
        }
        _ if fields.cache_prompt == Some(false) => Ok(Reuse::No),
        salt => Ok(Reuse::In(Realm { key: client.key_index, salt: salt.map(Arc::from) })),
    }
}

/// Forbidden token sequences: each bad word, at the start of a text and after a space.
fn encode_bad_words(fields: &RequestFields, tokenizer: &Tokenizer) -> ApiResult<Vec<Vec<u32>>> {
    let Some(Strings(words)) = &fields.bad_words else { return Ok(Vec::new()) };
    if words.iter().any(String::is_empty) {
        return Err(ApiError::for_field("bad_words", "contains an empty word; remove it"));
    }
    let mut found = Vec::new();
    for word in words.iter().flat_map(|word| [word.clone(), format!(" {}", word.trim_start())]) {
        found.push(tokenizer.encode(&word, AddSpecial::No).map_err(|e| ApiError::from_request(&e))?);
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Replaces the server's options by those of the request.
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
    s.top_k = fields.top_k.map_or(s.top_k, |k| k.to_count().unwrap_or(0));
    s.repetition_window =
        fields.repeat_last_n.map_or(s.repetition_window, |n| n.to_count().unwrap_or(context));
    s.dry.allowed_length =
        fields.dry_allowed_length.and_then(Integer::to_count).unwrap_or(s.dry.allowed_length);
    s.dry.window = fields.dry_penalty_last_n.map_or(s.dry.window, Integer::to_count);
    if let Some(Strings(breakers)) = fields.dry_sequence_breakers {
        s.dry.breakers = breakers;
    }
    let limits =
        [fields.n_predict, fields.max_output_tokens, fields.max_completion_tokens, fields.max_tokens];
    options.max_tokens = limits.into_iter().flatten().next().map_or(options.max_tokens, Integer::to_count);
    options.min_tokens = fields.min_tokens.and_then(Integer::to_count).unwrap_or(options.min_tokens);
    if options.max_tokens.is_some_and(|max| max < options.min_tokens) {
        return Err(ApiError::for_field("min_tokens", "is more than `max_tokens`; use a smaller value"));
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

/// Reads `{"29": 1.5}`, or llama.cpp's `[[29, 1.5], [30, false]]`. With a tokenizer a text biases each of its tokens.
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
                _ => Err(wrong("has an item that is not a pair".into())),
            });
            pairs.take(MAX_BIASES + 1).collect::<ApiResult<_>>()?
        }
        other => return Err(wrong(format!("is {}", type_name(other)))),
    };
    let mut biases = Vec::new();
    for (name, bias) in pairs.iter().take(MAX_BIASES + 1) {
        let text = name.as_str().unwrap_or_default();
        let id = name.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = match (id, texts) {
            (Some(id), _) => vec![id],
            (None, Some(_)) if text.len() > MAX_BIASED_BYTES => {
                let why = format!("has a text of {} bytes instead of at most {MAX_BIASED_BYTES}", text.len());
                return Err(wrong(why));
            }
            (None, Some(tokenizer)) => {
                tokenizer.encode(text, AddSpecial::No).map_err(|e| ApiError::from_request(&e))?
            }
            (None, None) => Vec::new(),
        };
        if ids.is_empty() {
            return Err(wrong("has a key that is not a token id".into()));
        }
        // OpenAI's range is -100 to 100; more is accepted.
        let number = match bias {
            Value::Bool(false) => Some(f32::NEG_INFINITY),
            other => other.as_f64().map(|x| x as f32).filter(|x| x.is_finite()),
        };
        let number = number.ok_or_else(|| wrong(format!("has {} as a bias", type_name(bias))))?;
        biases.extend(ids.into_iter().map(|id| (id, number)));
        if biases.len() > MAX_BIASES {
            let why = format!("has more than {MAX_BIASES} biases; use at most {MAX_BIASES}");
            return Err(ApiError::for_field("logit_bias", why));
        }
    }
    Ok(biases)
}
