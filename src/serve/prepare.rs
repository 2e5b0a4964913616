//! Prompts as ids, and their way to the scheduler. Runs on the threads that prepare prompts.

use super::body::{TokenIds, kind_of, read, read_object};
use super::constraint::Constraint;
use super::conversation::{ChatPrompt, ChatRequest};
use super::dialect::Dialect;
use super::error::{ApiError, ApiResult};
use super::memory::{MemoryShare, check_longest_part};
use super::output::RequestOutput;
use super::params::{MAX_TEXTS, RequestParams};
use super::state::LoadedModel;
use super::tools::ToolChoice;
use crate::run::eviction::Policy;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use text::chat::{OutputFormat, OutputParser};
use text::tokenizer::AddSpecial;

/// A request whose prompts are there.
pub enum Prepared {
    Running(RequestOutput),
    /// Compiles a grammar first, which may take a while.
    NeedsGrammar(Box<dyn FnOnce() -> ApiResult<RequestOutput> + Send>),
}

/// Hands prompts to the scheduler, once there is nothing against them.
fn start_request(
    model: &Arc<LoadedModel>,
    prompts: Vec<(Arc<[u32]>, OutputParser)>,
    params: RequestParams,
    answer: (Box<dyn Dialect>, MemoryShare),
) -> ApiResult<Prepared> {
    let (model, has_grammar) = (Arc::clone(model), grammar_field(&params).is_some());
    let start = move || {
        prompts.iter().try_for_each(|(ids, _)| check_prompt(&model, ids, &params))?;
        RequestOutput::start(&model, prompts, &params, answer)
    };
    if has_grammar { Ok(Prepared::NeedsGrammar(Box::new(start))) } else { start().map(Prepared::Running) }
}

/// The field of the grammar that its texts follow.
#[cfg(feature = "grammar")]
fn grammar_field(params: &RequestParams) -> Option<&str> {
    params.options.sampler.grammar.as_ref().map(text::sampler::Grammar::place)
}

#[cfg(not(feature = "grammar"))]
fn grammar_field(_: &RequestParams) -> Option<&str> {
    None
}

fn check_prompt(model: &LoadedModel, ids: &[u32], params: &RequestParams) -> ApiResult<()> {
    model.engine.check_job(ids, &params.options).map_err(|e| {
        let error = ApiError::from_request(&e);
        let field = grammar_field(params).filter(|field| error.message.starts_with(field));
        let param = error.param.clone().unwrap_or_else(|| field.unwrap_or("prompt").to_owned());
        too_long(ids.len(), model).unwrap_or(error).in_field(param)
    })
}

/// An error where a prompt has more tokens than a slot.
fn too_long(need: usize, model: &LoadedModel) -> Option<ApiError> {
    let have = model.engine.options().max_seq_len;
    (need > have).then(|| ApiError::prompt_too_long("prompt", need, have))
}

/// Starts the answers to a conversation.
pub fn start_chat(
    model: &Arc<LoadedModel>,
    chat: &ChatRequest,
    mut params: RequestParams,
    (dialect, share): (impl FnOnce(&RequestParams, usize) -> Box<dyn Dialect>, MemoryShare),
) -> ApiResult<Prepared> {
    let ChatPrompt { ids, form, mut reader, stop_tokens, shown_tokens } = chat.to_prompt(model)?;
    if !params.options.ignore_eos {
        params.options.stop_tokens.extend(stop_tokens);
    }
    match params.constraint.take() {
        Some(Constraint { field, .. })
            if matches!(chat.tool_choice, ToolChoice::Required | ToolChoice::Function(_)) =>
        {
            let why = format!("asks for a call, and `{field}` for another form; leave one out");
            return Err(ApiError::for_field("tool_choice", why));
        }
        Some(constraint) => {
            constraint.apply(&mut params.options)?;
            reader = OutputParser::new(OutputFormat::default(), "");
        }
        None => {
            params.options.shown_tokens = shown_tokens;
            force_call(model, chat, (form, &reader), &mut params)?;
        }
    }
    let dialect = dialect(&params, ids.len());
    start_request(model, vec![(Arc::from(ids), reader)], params, (dialect, share))
}

/// Makes the answer a call, where a request asks for one.
#[cfg(feature = "grammar")]
fn force_call(
    model: &LoadedModel,
    chat: &ChatRequest,
    (form, reader): (OutputFormat, &OutputParser),
    params: &mut RequestParams,
) -> ApiResult<()> {
    let only = match &chat.tool_choice {
        ToolChoice::Auto | ToolChoice::None => return Ok(()),
        ToolChoice::Required => None,
        ToolChoice::Function(name) => Some(name.as_str()),
    };
    if let Some(tools) = &chat.variables.tools {
        let grammar = form.tool_grammar(tools, only, reader, model.engine.tokenizer());
        let refused = |e| ApiError::from_request(&e).in_field("tool_choice");
        params.options.sampler.grammar = Some(grammar.map_err(refused)?);
    }
    Ok(())
}

/// Does nothing: such a request was refused.
#[cfg(not(feature = "grammar"))]
fn force_call(
    _: &LoadedModel,
    _: &ChatRequest,
    _: (OutputFormat, &OutputParser),
    _: &mut RequestParams,
) -> ApiResult<()> {
    Ok(())
}

/// Starts texts that go on after prompts.
pub fn start_completion(
    model: &Arc<LoadedModel>,
    prompts: Vec<Arc<[u32]>>,
    params: RequestParams,
    answer: (Box<dyn Dialect>, MemoryShare),
) -> ApiResult<Prepared> {
    let prompts =
        prompts.into_iter().map(|ids| (ids, OutputParser::new(OutputFormat::default(), ""))).collect();
    start_request(model, prompts, params, answer)
}

/// Forms that a prompt may have beside a text, or ids.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum PromptForms {
    None,
    /// Both in turn, and an object with a text, as llama.cpp has them.
    LlamaCpp,
}

/// A prompt of llama.cpp's as an object.
#[derive(Deserialize)]
struct PromptObject {
    prompt_string: String,
    multimodal_data: Option<Vec<Value>>,
}

/// An error of a prompt that is none.
fn wrong_prompt(what: impl std::fmt::Display) -> ApiError {
    ApiError::for_field("prompt", format!("{what}; use a string, token ids, or an array of either"))
}

/// Reads one prompt, or a list of them.
pub fn read_prompts(
    body: &Value,
    model: &LoadedModel,
    params: &RequestParams,
    forms: PromptForms,
) -> ApiResult<Vec<Arc<[u32]>>> {
    let one = |value: &Value| encode_prompt(model, params, value, forms).map(Arc::from);
    match &body["prompt"] {
        Value::Null => Err(ApiError::for_field("prompt", "is missing; give a string")),
        Value::Array(all) if all.is_empty() => Err(wrong_prompt("is empty")),
        Value::Array(all) if !all.iter().any(Value::is_number) => {
            let texts = all.len() * params.n;
            if texts > MAX_TEXTS {
                let what = format!("asks for {texts} texts in all, and {MAX_TEXTS} are the most");
                return Err(wrong_prompt(what));
            }
            all.iter().map(one).collect()
        }
        value => Ok(vec![one(value)?]),
    }
}

fn encode_prompt(
    model: &LoadedModel,
    params: &RequestParams,
    value: &Value,
    forms: PromptForms,
) -> ApiResult<Vec<u32>> {
    match value {
        Value::String(text) => encode_text(model, params, text, AddSpecial::Yes),
        Value::Array(parts) if forms == PromptForms::LlamaCpp && parts.iter().any(Value::is_string) => {
            let mut prompt = Vec::new();
            for (i, part) in parts.iter().enumerate() {
                prompt.extend(match part {
                    Value::String(text) if i > 0 => encode_text(model, params, text, AddSpecial::No)?,
                    Value::String(_) => encode_prompt(model, params, part, PromptForms::None)?,
                    id => encode_prompt(model, params, &json!([id]), PromptForms::None)?,
                });
            }
            Ok(prompt)
        }
        Value::Array(_) => {
            let ids =
                read::<TokenIds>(value, "prompt").map_err(|_| wrong_prompt("holds what is no token id"));
            Ok(ids?.0)
        }
        Value::Object(_) if forms == PromptForms::LlamaCpp => {
            let object: PromptObject = read_object(value, "prompt")?;
            if object.multimodal_data.is_some_and(|data| !data.is_empty()) {
                let why = "is no text; this model reads text alone";
                return Err(ApiError::for_field("prompt.multimodal_data", why));
            }
            encode_text(model, params, &object.prompt_string, AddSpecial::Yes)
        }
        other => Err(wrong_prompt(format!("is {}", kind_of(other)))),
    }
}

/// Encodes a text; only the first part of a prompt has the tokens that begin one.
fn encode_text(
    model: &LoadedModel,
    params: &RequestParams,
    text: &str,
    special: AddSpecial,
) -> ApiResult<Vec<u32>> {
    let (tokenizer, options) = (model.engine.tokenizer(), &params.options);
    // A text that is far too long is refused before it becomes tokens.
    let least = tokenizer.least_tokens(text);
    let evicts = model.engine.options().eviction.policy != Policy::None;
    if let Some(error) = too_long(least, model).filter(|_| !evicts) {
        return Err(error);
    }
    check_longest_part(tokenizer, text, "prompt")?;
    let ids = tokenizer.encode_until(text, options.specials, special, &|| options.cancel.is_cancelled());
    ids.map_err(|e| ApiError::from_request(&e).in_field("prompt"))
}
