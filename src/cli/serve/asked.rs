//! What a request asks for: settings of the sampler, limits, how many texts.

use super::fields::{Fields, kind};
use super::hub::{Served, random};
use super::refusal::Refusal;
use crate::run::engine::scheduler::Reuse;
use crate::run::options::GenerateOptions;
use crate::run::session::CancelToken;
use serde_json::Value;

type Result<T> = std::result::Result<T, Refusal>;

/// Texts of one request, at most.
pub(super) const MOST: usize = 128;

/// Log-probabilities at each place of a text, at most: a whole answer is held in memory.
pub(super) const MOST_LOGPROBS: i64 = 100;

/// What all texts of a request have in common.
#[derive(Clone)]
pub(super) struct Asked {
    pub options: GenerateOptions,
    pub reuse: Reuse,
    /// Texts for each prompt.
    pub n: usize,
    pub how: How,
}

/// How the answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Whole,
    /// As it comes.
    Stream,
    /// The same, with the numbers of tokens at the end.
    StreamWithUsage,
}

impl Asked {
    /// Reads what every kind of request may hold. `limit` is the most tokens where nobody says.
    pub fn read(fields: &Fields<'_>, served: &Served, limit: Option<usize>) -> Result<Self> {
        let mut options = GenerateOptions { cancel: CancelToken::default(), ..served.defaults.clone() };
        sampler(fields, &mut options)?;
        let seed = fields.whole("seed", -1..=i64::MAX)?;
        let drawn = (seed == Some(-1) || (seed.is_none() && !served.seeded)).then(|| random() >> 32);
        let given = seed.and_then(|n| u64::try_from(n).ok()).unwrap_or(options.sampler.seed);
        options.sampler.seed = drawn.unwrap_or(given);
        options.max_tokens = limit;
        for field in ["max_tokens", "max_completion_tokens", "max_output_tokens"] {
            options.max_tokens = tokens(fields, field)?.unwrap_or(options.max_tokens);
        }
        for field in ["stop", "stop_sequences"] {
            if let Some(stop) = fields.texts(field)? {
                options.stop = stop.into_iter().filter(|text| !text.is_empty()).collect();
            }
        }
        options.ignore_eos = fields.flag("ignore_eos")?.unwrap_or(options.ignore_eos);
        let usage = match fields.object("stream_options")? {
            Some(of) => of.flag("include_usage")?.unwrap_or(false),
            None => false,
        };
        let how = match (fields.flag("stream")?.unwrap_or(false), usage) {
            (false, _) => How::Whole,
            (true, false) => How::Stream,
            (true, true) => How::StreamWithUsage,
        };
        let reuse = if fields.flag("cache_prompt")?.unwrap_or(true) { Reuse::Yes } else { Reuse::No };
        let n = fields.whole("n", 1..=MOST as i64)?.unwrap_or(1) as usize;
        options.sampler.validate_for(crate::dims::VOCAB).map_err(|e| Refusal::of_input(&e))?;
        Ok(Self { options, reuse, n, how })
    }

    /// Asks for the log-probabilities of some tokens at each place, as many as a field says.
    pub fn want_logprobs(&mut self, count: i64) {
        self.options.logprobs = usize::try_from(count).ok();
    }
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
        ("presence_penalty", &mut s.presence_penalty),
        ("frequency_penalty", &mut s.frequency_penalty),
        ("repeat_penalty", &mut s.repetition_penalty),
    ];
    for (field, to) in numbers {
        *to = fields.number(field)?.unwrap_or(*to);
    }
    let most = i64::from(i32::MAX);
    if let Some(k) = fields.whole("top_k", -1..=most)? {
        s.top_k = usize::try_from(k).unwrap_or(0);
    }
    if let Some(n) = fields.whole("repeat_last_n", 0..=most)? {
        s.repetition_window = n as usize;
    }
    if let Some(bias) = fields.get("logit_bias") {
        s.logit_bias = biases(bias, &fields.name("logit_bias"))?;
    }
    Ok(())
}

/// `{"29": 1.5}`, or llama.cpp's `[[29, 1.5], [30, false]]`.
fn biases(value: &Value, name: &str) -> Result<Vec<(u32, f32)>> {
    let wrong =
        |what: String| Refusal::field(name, format!("{what}; use an object of token ids and numbers"));
    let bias = |value: &Value| match value {
        Value::Bool(false) => Some(f32::NEG_INFINITY),
        // OpenAI's range ends at 100, which rules a token in or out.
        other => Some(other.as_f64()? as f32).filter(|x| x.is_finite()),
    };
    let entry = |id: Option<u64>, value: &Value| match (id.and_then(|id| u32::try_from(id).ok()), bias(value))
    {
        (Some(id), Some(bias)) => Ok((id, bias)),
        (None, _) => Err(wrong("has a name that is no token id".into())),
        (_, None) => Err(wrong(format!("has {} as a bias", kind(value)))),
    };
    match value {
        Value::Object(all) => all.iter().map(|(id, value)| entry(id.parse().ok(), value)).collect(),
        Value::Array(all) => all
            .iter()
            .map(|pair| match pair.as_array().map(Vec::as_slice) {
                Some([id, value]) => entry(id.as_u64(), value),
                _ => Err(wrong("has something else than pairs".into())),
            })
            .collect(),
        other => Err(wrong(format!("is {}", kind(other)))),
    }
}
