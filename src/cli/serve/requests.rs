//! What bodies ask for: prompts as ids, and settings. Runs on the thread that prepares prompts.

use super::answer::{Answer, Shape};
use super::asked::{Asked, How, MOST, MOST_LOGPROBS};
use super::conversation::{self, Conversation, Prompt, Wanted, response_format};
use super::fields::{self, Fields, kind};
use super::hub::Served;
use super::messages::{self, Messages};
use super::openai::{Chat, Completion};
use super::refusal::Refusal;
use super::responses::{self, Responses};
use serde_json::{Value, json};
use std::sync::Arc;
use text::chat::{Form, Reader};

type Result<T> = std::result::Result<T, Refusal>;

/// Texts where a completion does not say how long they are: as `generate`'s.
const LIMIT: usize = 20;

/// A request that waits for its texts.
pub(super) struct Begun {
    pub answer: Answer,
    pub how: How,
}

/// A conversation's prompt with the settings that go with it; `schema` is what the text must be like.
pub(super) fn chat_prompt(
    served: &Served,
    of: &Conversation,
    (asked, schema): (&mut Asked, Option<String>),
) -> Result<(Vec<u32>, Reader)> {
    let Prompt { ids, form, reader, stop_tokens, shown_tokens } = of.prompt(&served.engine)?;
    if !asked.options.ignore_eos {
        asked.options.stop_tokens = stop_tokens;
    }
    let reader = match schema {
        Some(_) if matches!(of.wanted, Wanted::Any | Wanted::One(_)) => {
            let why = "asks for a call, and `response_format` for another form; leave one out";
            return Err(Refusal::field("tool_choice", why));
        }
        Some(schema) => {
            follow(&schema, asked)?;
            Reader::new(Form::default(), "")
        }
        None => {
            asked.options.shown_tokens = shown_tokens;
            must_call(served, of, (form, &reader), asked)?;
            reader
        }
    };
    check(served, &ids, asked)?;
    Ok((ids, reader))
}

#[cfg(feature = "grammar")]
fn follow(schema: &str, asked: &mut Asked) -> Result<()> {
    let grammar = text::sampler::Grammar::json_schema("response_format", schema);
    asked.options.sampler.grammar = Some(
        grammar.map_err(|e| Refusal { param: Some("response_format".into()), ..Refusal::of_input(&e) })?,
    );
    Ok(())
}

/// Where a request asks for a call, the answer is one.
#[cfg(feature = "grammar")]
fn must_call(
    served: &Served,
    of: &Conversation,
    (form, reader): (Form, &Reader),
    asked: &mut Asked,
) -> Result<()> {
    let only = match &of.wanted {
        Wanted::Auto | Wanted::Never => return Ok(()),
        Wanted::Any => None,
        Wanted::One(name) => Some(name.as_str()),
    };
    if let Some(tools) = &of.variables.tools {
        let grammar = form.forced(tools, only, (reader, served.engine.tokenizer()));
        let refused = |e| Refusal { param: Some("tool_choice".into()), ..Refusal::of_input(&e) };
        asked.options.sampler.grammar = Some(grammar.map_err(refused)?);
    }
    Ok(())
}

/// Such a request was refused.
#[cfg(not(feature = "grammar"))]
fn must_call(_: &Served, _: &Conversation, _: (Form, &Reader), _: &mut Asked) -> Result<()> {
    Ok(())
}

#[cfg(not(feature = "grammar"))]
fn follow(_: &str, _: &mut Asked) -> Result<()> {
    Ok(())
}

fn check(served: &Served, ids: &[u32], asked: &Asked) -> Result<()> {
    let checked = served.engine.check_job(ids, &asked.options);
    checked.map_err(|e| {
        let refusal = Refusal::of_input(&e);
        let param = refusal.param.clone().or_else(|| Some("prompt".into()));
        let (need, have) = (ids.len(), served.engine.options().max_seq_len);
        Refusal { param, sizes: (need > have).then_some((need, have)), ..refusal }
    })
}

/// `POST /v1/chat/completions`.
pub(super) fn chat(served: &Arc<Served>, body: &[u8]) -> Result<Begun> {
    let body = fields::object(body)?;
    let fields = Fields::new(&body);
    let mut asked = Asked::read(&fields, served, None)?;
    let top = fields.whole("top_logprobs", 0..=MOST_LOGPROBS)?;
    match (fields.flag("logprobs")?.unwrap_or(false), top) {
        (true, n) => asked.want_logprobs(n.unwrap_or(0)),
        (false, Some(1..)) => return Err(fields.refuse("top_logprobs", "needs `logprobs` to be true")),
        (false, _) => {}
    }
    let schema = response_format(&fields)?;
    let messages = conversation::messages(&fields)?;
    let of = Conversation::new(messages, &fields, Clone::clone)?;
    let prompt = chat_prompt(served, &of, (&mut asked, schema))?;
    let shape = Box::new(Chat::new(served, asked.how, asked.n));
    let answer = Answer::begin(served, vec![prompt], &asked, shape)?;
    Ok(Begun { answer, how: asked.how })
}

/// One text in answer to a conversation, in some shape.
fn one(
    served: &Arc<Served>,
    of: &Conversation,
    (mut asked, schema): (Asked, Option<String>),
    shape: impl FnOnce(&Asked, usize) -> Box<dyn Shape>,
) -> Result<Begun> {
    asked.n = 1;
    let prompt = chat_prompt(served, of, (&mut asked, schema))?;
    let shape = shape(&asked, prompt.0.len());
    let answer = Answer::begin(served, vec![prompt], &asked, shape)?;
    Ok(Begun { answer, how: asked.how })
}

/// `POST /v1/responses`.
pub(super) fn responses(served: &Arc<Served>, body: &[u8]) -> Result<Begun> {
    let body = fields::object(body)?;
    let fields = Fields::new(&body);
    let asked = Asked::read(&fields, served, None)?;
    let (of, schema) = responses::conversation(&fields)?;
    one(served, &of, (asked, schema), |asked, _| Box::new(Responses::new(served, asked)))
}

/// `POST /v1/messages`.
pub(super) fn messages(served: &Arc<Served>, body: &[u8]) -> Result<Begun> {
    let body = fields::object(body)?;
    let fields = Fields::new(&body);
    let asked = Asked::read(&fields, served, None)?;
    let of = messages::conversation(&fields)?;
    one(served, &of, (asked, None), |asked, prompt| Box::new(Messages::new(&asked.options.stop, prompt)))
}

/// `POST /v1/messages/count_tokens`.
pub(super) fn count_tokens(served: &Served, body: &[u8]) -> Result<Value> {
    let body = fields::object(body)?;
    let of = messages::conversation(&Fields::new(&body))?;
    Ok(json!({"input_tokens": of.prompt(&served.engine)?.ids.len()}))
}

/// `POST /v1/completions`.
pub(super) fn completions(served: &Arc<Served>, body: &[u8]) -> Result<Begun> {
    let body = fields::object(body)?;
    let fields = Fields::new(&body);
    let mut asked = Asked::read(&fields, served, Some(LIMIT))?;
    if let Some(n) = fields.whole("logprobs", 0..=MOST_LOGPROBS)? {
        asked.want_logprobs(n);
    }
    if let Some(schema) = response_format(&fields)? {
        follow(&schema, &mut asked)?;
    }
    let prompts = prompts(&fields, served, &asked)?;
    let texts = prompts.len() * asked.n;
    if texts > MOST {
        return Err(fields.refuse("n", format!("{texts} texts in all; ask for {MOST} at most")));
    }
    let shape = Box::new(Completion::new(served, asked.how, texts));
    let prompts = prompts.into_iter().map(|ids| (ids, Reader::new(Form::default(), ""))).collect();
    let answer = Answer::begin(served, prompts, &asked, shape)?;
    Ok(Begun { answer, how: asked.how })
}

/// A text, ids, or a list of either.
fn prompts(fields: &Fields<'_>, served: &Served, asked: &Asked) -> Result<Vec<Vec<u32>>> {
    let wrong = |what: String| {
        fields.refuse("prompt", format!("{what}; use a string, token ids, or an array of either"))
    };
    let one = |value: &Value| {
        let ids = match value {
            Value::String(text) => encode(served, text, asked)?,
            Value::Array(all) => ids(all).ok_or_else(|| wrong("holds what is no token id".into()))?,
            other => return Err(wrong(format!("is {}", kind(other)))),
        };
        check(served, &ids, asked)?;
        Ok(ids)
    };
    match fields.get("prompt") {
        None => Err(fields.refuse("prompt", "is missing; give a string")),
        Some(Value::Array(all)) if all.is_empty() => Err(wrong("is empty".into())),
        Some(Value::Array(all)) if all.iter().all(|each| each.is_string() || each.is_array()) => {
            if all.len() > MOST {
                return Err(wrong(format!("has {} prompts, and {MOST} are the most", all.len())));
            }
            all.iter().map(one).collect()
        }
        Some(value) => Ok(vec![one(value)?]),
    }
}

fn encode(served: &Served, text: &str, asked: &Asked) -> Result<Vec<u32>> {
    let encoded = served.engine.encode_until(text, asked.options.specials, &asked.options.cancel);
    encoded.map_err(|e| {
        // A text that is far too long is refused before it becomes tokens.
        let need = served.engine.tokenizer().least_tokens(text);
        let have = served.engine.options().max_seq_len;
        let sizes = (need > have).then_some((need, have));
        Refusal { param: Some("prompt".into()), sizes, ..Refusal::of_input(&e) }
    })
}

/// Ids of the vocabulary.
pub(super) fn ids(all: &[Value]) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().filter(|&id| id < crate::dims::VOCAB as u64);
    all.iter().map(|value| id(value).map(|id| id as u32)).collect()
}
