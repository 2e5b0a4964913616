//! `/completion`, `/tokenize` and `/detokenize` of llama.cpp's server.

use super::completions::join_parts;
use super::openai::{logprobs_json, write_logprobs};
use crate::run::session::StopReason;
use crate::serve::body::{RequestBody, Strings, TokenIds, read_object};
use crate::serve::dialect::{Choice, Dialect, PromptProgress, TokenOutput, Usage, write_event};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::{JsonWriter, write_json};
use crate::serve::memory::check_longest_part;
use crate::serve::models::generation_settings;
use crate::serve::params::{LogprobCount, RequestParams, ResponseMode};
use crate::serve::prepare::{PreparedRequest, read_prompts, start_completion};
use crate::serve::state::ServerModel;
use crate::serve::unsupported::RequestKind;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::sync::Arc;
use text::tokenizer::{AddSpecial, SpecialText};

/// Fields of `/completion` only.
#[derive(Deserialize)]
struct LlamaCppFields {
    n_probs: Option<LogprobCount>,
    return_tokens: Option<bool>,
    response_fields: Option<Strings<64, 128>>,
}

/// `POST /completion`.
pub fn start_request(model: &Arc<ServerModel>, request: RequestBody) -> ApiResult<PreparedRequest> {
    let (body, mut params) = RequestParams::read_request(model, request, RequestKind::LlamaCppCompletion)?;
    let fields: LlamaCppFields = read_object(&body, "")?;
    if let Some(n @ 1..) = fields.n_probs.and_then(LogprobCount::to_count) {
        params.options.logprobs = Some(n);
    }
    params.apply_constraint()?;
    let prompts = read_prompts(&body, &params)?;
    let dialect = Box::new(LlamaCppDialect::new(fields, &params, &prompts));
    start_completion(prompts, params, dialect)
}

/// Responses of `/completion`.
struct LlamaCppDialect {
    model: Arc<ServerModel>,
    /// `generation_settings`, without the seed.
    settings: Value,
    seed: u64,
    stops: Vec<String>,
    mode: ResponseMode,
    /// Token ids of the prompts.
    prompts: Vec<Arc<[u32]>>,
    /// Texts per prompt.
    n: usize,
    /// Number of tokens of each text so far.
    tokens: Vec<usize>,
    return_tokens: bool,
    /// Fields to return, all if empty. `a/b` is the field `b` of the object `a`.
    response_fields: Vec<String>,
}

impl LlamaCppDialect {
    fn new(fields: LlamaCppFields, params: &RequestParams, prompts: &[Arc<[u32]>]) -> Self {
        let mut settings = generation_settings(&params.options);
        settings["stream"] = (params.mode != ResponseMode::Whole).into();
        settings["n_ctx"] = params.model.engine.options().max_seq_len.into();
        Self {
            model: Arc::clone(&params.model),
            settings,
            seed: params.options.sampler.seed,
            stops: params.options.stop.clone(),
            mode: params.mode,
            prompts: prompts.to_vec(),
            n: params.n,
            tokens: vec![0; prompts.len() * params.n],
            return_tokens: fields.return_tokens == Some(true),
            response_fields: fields.response_fields.map_or(Vec::new(), |names| names.0),
        }
    }

    fn prompt_of(&self, index: usize) -> &[u32] {
        &self.prompts[index / self.n]
    }

    /// All fields of a finished text, except for those that grow with its length.
    fn summarize_choice(&self, index: usize, choice: &Choice) -> Value {
        let Some(ending) = choice.ending else { return Value::Null };
        let n_ctx = self.model.engine.options().max_seq_len;
        let stop_type = match ending.reason {
            StopReason::Eos => "eos",
            StopReason::Stop => "word",
            _ => "limit",
        };
        let mut settings = self.settings.clone();
        settings["seed"] = self.seed.wrapping_add((index % self.n) as u64).into();
        json!({
            "index": index, "content": "", "tokens": [],
            "id_slot": ending.slot, "stop": true, "model": self.model.name,
            "tokens_predicted": ending.tokens, "tokens_evaluated": ending.prompt, "tokens_cached": ending.cached,
            "generation_settings": settings,
            "prompt": self.model.engine.tokenizer().decode_with_special(self.prompt_of(index)),
            "has_new_line": choice.text.contains('\n'),
            "truncated": ending.reason == StopReason::Context || ending.prompt + ending.tokens > n_ctx,
            "stop_type": stop_type, "stopping_word": choice.stop_string(&self.stops).unwrap_or(""),
            "timings": choice.count_usage().timings_json(),
        })
    }

    /// Writes a finished text, with all or the requested fields.
    fn write_choice(&self, index: usize, choice: &mut Choice, out: &mut JsonWriter) {
        let mut summary = self.summarize_choice(index, choice);
        let tokens = if self.return_tokens { std::mem::take(&mut choice.tokens) } else { Vec::new() };
        if self.mode == ResponseMode::Whole {
            summary["content"] = std::mem::take(&mut choice.text).into();
        }
        let mut names = self.response_fields.clone();
        if names.is_empty() {
            names = summary.as_object().map_or(Vec::new(), |fields| fields.keys().cloned().collect());
            names.push("completion_probabilities".into());
        }
        out.write_object(|out| {
            for name in &names {
                match name.as_str() {
                    "tokens" => out.write_field(name, &tokens),
                    "completion_probabilities" if choice.logprobs.is_empty() => {}
                    "completion_probabilities" => {
                        out.write_key(name);
                        write_logprobs(&self.model, std::mem::take(&mut choice.logprobs), out);
                    }
                    _ => {
                        let value = summary.pointer(&format!("/{name}"));
                        value.into_iter().for_each(|value| out.write_field(name, value));
                    }
                }
            }
        });
    }
}

impl Dialect for LlamaCppDialect {
    fn on_token(&mut self, choice: usize, token: &TokenOutput, out: &mut String) {
        self.tokens[choice] += token.tokens.len();
        let mut json = json!({
            "index": choice, "content": join_parts(&token.parts), "tokens": token.tokens, "stop": false,
            "tokens_predicted": self.tokens[choice], "tokens_evaluated": self.prompt_of(choice).len(),
        });
        if let Some(logprobs) = &token.logprobs {
            json["completion_probabilities"] = logprobs_json(&self.model, logprobs);
        }
        write_event(&json, out);
    }

    fn on_prompt_progress(&mut self, index: usize, progress: &PromptProgress, out: &mut String) {
        let json = json!({
            "index": index, "content": "", "tokens": [], "stop": false, "tokens_predicted": 0,
            "tokens_evaluated": self.prompt_of(index).len(), "prompt_progress": progress.to_json(),
        });
        write_event(&json, out);
    }

    fn on_choice_end(&mut self, index: usize, choice: &Choice, out: &mut String) {
        // The text has been sent, but `has_new_line` needs it.
        let mut last = Choice { text: choice.text.clone(), ending: choice.ending, ..Choice::default() };
        let mut writer = JsonWriter::default();
        self.write_choice(index, &mut last, &mut writer);
        write_event(writer.into_text(), out);
    }

    fn to_json(&mut self, choices: &mut [Choice], _: Usage, out: &mut JsonWriter) {
        if let [one] = choices {
            return self.write_choice(0, one, out);
        }
        out.write_array(|out| {
            choices.iter_mut().enumerate().for_each(|(index, choice)| self.write_choice(index, choice, out));
        });
    }
}

#[derive(Deserialize)]
struct TokenizeRequest {
    content: String,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
}

#[derive(Deserialize)]
struct DetokenizeRequest {
    tokens: TokenIds,
}

/// A token and its text.
#[derive(Serialize)]
struct TokenPiece<'a> {
    id: u32,
    piece: PieceText<'a>,
}

/// The text of a token; bytes that are not UTF-8 become an array of numbers.
#[derive(Serialize)]
#[serde(untagged)]
enum PieceText<'a> {
    Text(&'a str),
    Bytes(&'a [u8]),
}

/// `POST /tokenize`.
pub fn tokenize_text(model: &Arc<ServerModel>, request: &mut RequestBody) -> ApiResult<JsonWriter> {
    let fields: TokenizeRequest = read_object(&request.parse_json()?, "")?;
    let special = if fields.add_special == Some(true) { AddSpecial::Yes } else { AddSpecial::No };
    let specials =
        if fields.parse_special == Some(false) { SpecialText::AsText } else { SpecialText::AsTokens };
    let tokenizer = model.engine.tokenizer();
    check_longest_part(tokenizer, &fields.content, "content")?;
    let stop = || request.cancel.is_cancelled();
    let ids = tokenizer.encode_until(&fields.content, specials, special, &stop);
    let ids = ids.map_err(|e| ApiError::from_request(&e))?;
    request.share.resize(size_of_val(ids.as_slice()) as u64)?;
    let pieces = (fields.with_pieces == Some(true)).then(|| Arc::clone(tokenizer.pieces()));
    let mut writer = JsonWriter::default();
    writer.write_object(|out| {
        out.write_key("tokens");
        out.write_list(ids.len(), move |i, to| match &pieces {
            None => write_json(&ids[i], to),
            Some(pieces) => {
                let bytes = pieces.token_bytes(ids[i]);
                let piece = std::str::from_utf8(bytes).map_or(PieceText::Bytes(bytes), PieceText::Text);
                write_json(&TokenPiece { id: ids[i], piece }, to);
            }
        });
    });
    Ok(writer)
}

/// `POST /detokenize`.
pub fn detokenize_ids(model: &Arc<ServerModel>, request: &mut RequestBody) -> ApiResult<JsonWriter> {
    let fields: DetokenizeRequest = read_object(&request.parse_json()?, "")?;
    let (TokenIds(ids), tokenizer) = (fields.tokens, model.engine.tokenizer());
    let bytes: usize = ids.iter().map(|&id| tokenizer.pieces().token_bytes(id).len()).sum();
    // The text and its JSON.
    request.share.grow(3 * bytes as u64)?;
    Ok(JsonWriter::from_value(&json!({"content": tokenizer.decode_with_special(&ids)})))
}
