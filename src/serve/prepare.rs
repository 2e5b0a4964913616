//! Tokenizes prompts and submits them to the scheduler. Runs on worker threads.

use super::body::{TokenIds, read_object, read_value, type_name};
use super::constraint::Constraint;
use super::conversation::{ChatPrompt, ChatRequest};
use super::dialect::Dialect;
use super::error::{ApiError, ApiResult};
use super::memory::check_longest_part;
use super::output::{ParsedPrompt, RequestOutput};
use super::params::{MAX_TEXTS, RequestParams};
use super::state::ServerModel;
use super::tools::ToolChoice;
use super::unsupported::RequestKind;
use crate::run::eviction::Policy;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use text::chat::{OutputFormat, OutputParser};
use text::tokenizer::AddSpecial;

/// A request with tokenized prompts.
pub enum PreparedRequest {
    Running(RequestOutput),
    /// Starts once its grammar is compiled, which may take seconds.
    NeedsGrammar(Box<dyn FnOnce() -> ApiResult<RequestOutput> + Send>),
}

/// Checks prompts and submits them to the scheduler.
fn submit_prompts(
    prompts: Vec<ParsedPrompt>,
    params: RequestParams,
    dialect: Box<dyn Dialect>,
) -> ApiResult<PreparedRequest> {
    let has_grammar = grammar_field(&params).is_some();
    let start = move || {
        prompts.iter().try_for_each(|(ids, _)| check_prompt(ids, &params))?;
        RequestOutput::submit(prompts, params, dialect)
    };
    if has_grammar {
        Ok(PreparedRequest::NeedsGrammar(Box::new(start)))
    } else {
        start().map(PreparedRequest::Running)
    }
}

/// Field that the grammar comes from.
#[cfg(feature = "grammar")]
fn grammar_field(params: &RequestParams) -> Option<&str> {
    params.options.sampler.grammar.as_ref().map(text::sampler::Grammar::origin)
}

#[cfg(not(feature = "grammar"))]
fn grammar_field(_: &RequestParams) -> Option<&str> {
    None
}

fn check_prompt(ids: &[u32], params: &RequestParams) -> ApiResult<()> {
    params.model.engine.check_job(ids, &params.options).map_err(|e| {
        let error = ApiError::from_request(&e);
        let field = grammar_field(params).filter(|field| error.message.starts_with(field));
        let param = error.param.clone().unwrap_or_else(|| field.unwrap_or("prompt").to_owned());
        check_context("prompt", ids.len(), &params.model).err().unwrap_or(error).in_field(param)
    })
}

/// Refuses a prompt of `need` tokens that does not fit in the context.
pub fn check_context(field: &str, need: usize, model: &ServerModel) -> ApiResult<()> {
    let have = model.engine.options().max_seq_len;
    if need > have { Err(ApiError::prompt_too_long(field, need, have)) } else { Ok(()) }
}

/// Starts a chat request; `make_dialect` also gets the length of the prompt in tokens.
pub fn start_chat(
    chat: &ChatRequest,
    mut params: RequestParams,
    make_dialect: impl FnOnce(&RequestParams, usize) -> Box<dyn Dialect>,
) -> ApiResult<PreparedRequest> {
    let ChatPrompt { ids, output_format: form, parser: mut reader, stop_tokens, shown_tokens } =
        chat.build_prompt(&params.model)?;
    if !params.options.ignore_eos {
        params.options.stop_tokens.extend(stop_tokens);
    }
    match params.constraint.take() {
        Some(Constraint { field, .. })
            if matches!(chat.tool_choice, ToolChoice::Required | ToolChoice::Function(_)) =>
        {
            let why = format!("requires a tool call, and `{field}` another format; use only one of them");
            return Err(ApiError::for_field("tool_choice", why));
        }
        Some(constraint) => {
            constraint.apply_to_options(&mut params.options)?;
            reader = OutputParser::new(OutputFormat::default(), "");
        }
        None => {
            params.options.shown_tokens = shown_tokens;
            force_call(chat, (form, &reader), &mut params)?;
        }
    }
    let dialect = make_dialect(&params, ids.len());
    submit_prompts(vec![(Arc::from(ids), reader)], params, dialect)
}

/// Constrains the answer to a tool call if the request requires one.
#[cfg(feature = "grammar")]
fn force_call(
    chat: &ChatRequest,
    (form, reader): (OutputFormat, &OutputParser),
    params: &mut RequestParams,
) -> ApiResult<()> {
    let function = match &chat.tool_choice {
        ToolChoice::Auto | ToolChoice::None => return Ok(()),
        ToolChoice::Required => None,
        ToolChoice::Function(name) => Some(name.as_str()),
    };
    if let Some(tools) = &chat.template_kwargs.tools {
        let grammar = form.tool_grammar(tools, function, reader, params.model.engine.tokenizer());
        let refuse = |e| ApiError::from_request(&e).in_field("tool_choice");
        params.options.sampler.grammar = Some(grammar.map_err(refuse)?);
    }
    Ok(())
}

/// Does nothing: `read_tools` refuses required calls in this build.
#[cfg(not(feature = "grammar"))]
fn force_call(_: &ChatRequest, _: (OutputFormat, &OutputParser), _: &mut RequestParams) -> ApiResult<()> {
    Ok(())
}

/// Starts a completion request.
pub fn start_completion(
    prompts: Vec<Arc<[u32]>>,
    params: RequestParams,
    dialect: Box<dyn Dialect>,
) -> ApiResult<PreparedRequest> {
    let with_parser = |ids| (ids, OutputParser::new(OutputFormat::default(), ""));
    submit_prompts(prompts.into_iter().map(with_parser).collect(), params, dialect)
}

/// A prompt given as an object, as llama.cpp allows.
#[derive(Deserialize)]
struct PromptObject {
    prompt_string: String,
    multimodal_data: Option<Vec<Value>>,
}

/// Error for a prompt of the wrong type.
fn wrong_prompt(what: impl std::fmt::Display) -> ApiError {
    ApiError::for_field("prompt", format!("{what}; use a string, token ids, or an array of either"))
}

/// Reads and tokenizes one prompt or a list of prompts.
pub fn read_prompts(body: &Value, params: &RequestParams) -> ApiResult<Vec<Arc<[u32]>>> {
    let one = |value: &Value| encode_prompt(params, value).map(Arc::from);
    match &body["prompt"] {
        Value::Null => Err(ApiError::for_field("prompt", "is missing; add a string")),
        Value::Array(all) if all.is_empty() => Err(wrong_prompt("is empty")),
        Value::Array(all) if !all.iter().any(Value::is_number) => {
            let texts = all.len() * params.n;
            if texts > MAX_TEXTS {
                let what = format!("asks for {texts} texts instead of at most {MAX_TEXTS}");
                return Err(wrong_prompt(what));
            }
            all.iter().map(one).collect()
        }
        value => Ok(vec![one(value)?]),
    }
}

fn encode_prompt(params: &RequestParams, value: &Value) -> ApiResult<Vec<u32>> {
    // llama.cpp allows text mixed with ids, and objects.
    let is_llama_cpp = params.kind == RequestKind::LlamaCppCompletion;
    match value {
        Value::String(text) => encode_text(params, ("prompt", text), AddSpecial::Yes),
        Value::Array(parts) if is_llama_cpp && parts.iter().any(Value::is_string) => {
            let mut prompt = Vec::new();
            for (i, part) in parts.iter().enumerate() {
                prompt.extend(match part {
                    Value::String(text) if i > 0 => encode_text(params, ("prompt", text), AddSpecial::No)?,
                    Value::String(text) => encode_text(params, ("prompt", text), AddSpecial::Yes)?,
                    id => encode_prompt(params, &json!([id]))?,
                });
            }
            Ok(prompt)
        }
        Value::Array(_) => {
            let ids =
                read_value::<TokenIds>(value, "prompt").map_err(|_| wrong_prompt("has an invalid token id"));
            Ok(ids?.0)
        }
        Value::Object(_) if is_llama_cpp => {
            let object: PromptObject = read_object(value, "prompt")?;
            if object.multimodal_data.is_some_and(|data| !data.is_empty()) {
                let why = "is not text; this model reads only text";
                return Err(ApiError::for_field("prompt.multimodal_data", why));
            }
            encode_text(params, ("prompt", &object.prompt_string), AddSpecial::Yes)
        }
        other => Err(wrong_prompt(format!("is {}", type_name(other)))),
    }
}

/// Tokenizes the text of a field; only the first part of a prompt gets the tokens that begin one.
pub fn encode_text(
    params: &RequestParams,
    (field, text): (&str, &str),
    special: AddSpecial,
) -> ApiResult<Vec<u32>> {
    let RequestParams { model, options, .. } = params;
    let tokenizer = model.engine.tokenizer();
    // Refuses text that is far too long before it is tokenized.
    if model.engine.options().eviction.policy == Policy::None {
        check_context(field, tokenizer.min_tokens(text), model)?;
    }
    check_longest_part(tokenizer, text, field)?;
    let ids = tokenizer.encode_until(text, options.specials, special, &|| options.cancel.is_cancelled());
    ids.map_err(|e| ApiError::from_request(&e).in_field(field))
}
