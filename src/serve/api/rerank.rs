//! `/v1/rerank` of Jina, with the prompt and the two answers that Qwen3-Reranker is trained for.

use crate::run::options::GenerateOptions;
use crate::serve::body::{Integer, RequestBody, read_object};
use crate::serve::dialect::{Choice, Dialect, TokenOutput, Usage};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::{JsonWriter, write_json};
use crate::serve::params::{RequestParams, ResponseMode};
use crate::serve::prepare::{PreparedRequest, check_context, encode_text, start_completion};
use crate::serve::state::ServerModel;
use crate::serve::unsupported::RequestKind;
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use text::sampler::SamplerOptions;
use text::tokenizer::{AddSpecial, SpecialText, Tokenizer};

/// Maximum number of documents of a request.
const MAX_DOCUMENTS: usize = 1024;
/// Answers of the model, and the control tokens of its prompt.
const TOKENS: [&str; 4] = ["yes", "no", "<|im_start|>", "<|im_end|>"];
/// Text before the request's own, as published with the model.
const BEFORE: &str = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
                      Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
                      <|im_start|>user\n";
const BEHIND: &str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n";
const INSTRUCTION: &str = "Given a web search query, retrieve relevant passages that answer the query";

#[derive(Deserialize)]
struct RerankFields {
    query: String,
    documents: Vec<Document>,
    top_n: Option<Integer<1, 0x7FFF_FFFF>>,
    return_documents: Option<bool>,
    instruction: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "is no document; use a string, or an object with `text`")]
enum Document {
    Text(String),
    Object { text: String },
}

/// `POST /v1/rerank`.
pub fn start_request(model: &Arc<ServerModel>, request: RequestBody) -> ApiResult<PreparedRequest> {
    let (body, mut params) = RequestParams::read_request(model, request, RequestKind::Rerank)?;
    let RerankFields { query, documents, top_n, return_documents, instruction } = read_object(&body, "")?;
    if documents.is_empty() || documents.len() > MAX_DOCUMENTS {
        let why = format!("has {} texts; use 1 to {MAX_DOCUMENTS}", documents.len());
        return Err(ApiError::for_field("documents", why));
    }
    let [yes, no, ..] = find_tokens(model.engine.tokenizer())?;
    params.options = GenerateOptions {
        max_tokens: Some(1),
        specials: SpecialText::AsText,
        sampler: SamplerOptions { temperature: 0.0, ..SamplerOptions::default() },
        logprobs: Some(0),
        logprob_tokens: vec![yes, no],
        cancel: params.options.cancel.clone(),
        ..GenerateOptions::default()
    };
    (params.mode, params.n) = (ResponseMode::Whole, 1);
    let mut dialect = RerankDialect {
        model: Arc::clone(model),
        documents: Vec::new(),
        top_n: top_n.and_then(Integer::to_count).unwrap_or(documents.len()),
    };
    let encode_control = |text| {
        let ids = model.engine.tokenizer().encode(text, AddSpecial::No);
        ids.map_err(|e| ApiError::from_engine(&e))
    };
    let (before, behind) = (encode_control(BEFORE)?, encode_control(BEHIND)?);
    let start = format!("<Instruct>: {}\n<Query>: {query}\n", instruction.as_deref().unwrap_or(INSTRUCTION));
    let mut prompts = Vec::with_capacity(documents.len());
    for (i, document) in documents.into_iter().enumerate() {
        let (Document::Text(document) | Document::Object { text: document }) = document;
        let field = format!("documents[{i}]");
        let own = encode_text(&params, (&field, &format!("{start}<Document>: {document}")), AddSpecial::No)?;
        let prompt = [&before[..], &own, &behind].concat();
        check_context(&field, prompt.len(), model)?;
        prompts.push(Arc::from(prompt));
        dialect.documents.push(Some(document).filter(|_| return_documents != Some(false)));
    }
    start_completion(prompts, params, Box::new(dialect))
}

/// Ids of [`TOKENS`].
fn find_tokens(tokenizer: &Tokenizer) -> ApiResult<[u32; TOKENS.len()]> {
    let mut ids = [0; TOKENS.len()];
    for (id, token) in ids.iter_mut().zip(TOKENS) {
        *id = tokenizer.token_to_id(token).ok_or_else(|| {
            let why = "reranking needs a model that is made for it, such as Qwen3-Reranker";
            ApiError::new(501, format!("the model has no token {token:?}; {why}"))
        })?;
    }
    Ok(ids)
}

/// The probability of "yes" if only the two answers are possible.
fn relevance_score(choice: &Choice) -> Option<f64> {
    let [yes, no] = choice.logprobs.first()?.top[..] else { return None };
    Some(1.0 / (1.0 + libm::exp(no.logprob - yes.logprob)))
}

/// Responses of `/v1/rerank`, which are never streams.
struct RerankDialect {
    model: Arc<ServerModel>,
    /// The documents, if they are returned.
    documents: Vec<Option<String>>,
    /// Maximum number of results.
    top_n: usize,
}

impl Dialect for RerankDialect {
    fn held_bytes(&self) -> usize {
        self.documents.iter().flatten().map(String::len).sum()
    }

    fn on_token(&mut self, _choice: usize, _token: &TokenOutput, _out: &mut String) {}

    fn on_choice_end(&mut self, _index: usize, _choice: &Choice, _out: &mut String) {}

    fn to_json(&mut self, choices: &mut [Choice], usage: Usage, out: &mut JsonWriter) {
        let scores = choices.iter().map(relevance_score).enumerate();
        let mut results: Vec<_> = scores.filter_map(|(i, score)| Some((i, score?))).collect();
        results.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        results.truncate(self.top_n);
        let documents = std::mem::take(&mut self.documents);
        out.write_object(|out| {
            out.write_field("object", "list");
            out.write_field("model", &self.model.name);
            out.write_key("results");
            out.write_list(results.len(), move |place, to| {
                let (index, score) = results[place];
                let mut result = json!({"index": index, "relevance_score": score});
                if let Some(text) = &documents[index] {
                    result["document"] = json!({"text": text});
                }
                write_json(&result, to);
            });
            let tokens = usage.prompt_tokens;
            out.write_field("usage", &json!({"prompt_tokens": tokens, "total_tokens": tokens}));
        });
    }
}
