//! What bodies ask for: prompts as ids, and settings. Runs on the threads that prepare prompts.

use super::answer::{Answer, Shape};
use super::asked::{Asked, How, MOST, MOST_LOGPROBS, ids};
use super::budget::{Share, check_part};
use super::constraint::{Constraint, constraint};
use super::conversation::{Conversation, Prompt};
use super::fields::{self, Body, Fields, kind};
use super::hub::Served;
use super::messages::{self, Messages};
use super::native::Native;
use super::neutral::Kind;
use super::openai::{Chat, Completion, Echo};
use super::refusal::Refusal;
use super::responses::{self, Responses};
use super::tools::Wanted;
use super::whole::Whole;
use crate::run::eviction::Policy;
use serde_json::{Value, json};
use std::sync::Arc;
use text::chat::{OutputFormat, OutputParser};
use text::tokenizer::{AddSpecial, Tokenizer};

type Result<T> = std::result::Result<T, Refusal>;

/// A request that waits for its texts.
pub struct Begun {
    pub answer: Answer,
    pub how: How,
}

/// A request whose prompts are there.
pub enum Prepared {
    Begun(Begun),
    /// Compiles a grammar for it first, which may take a while.
    Compiles(Box<dyn FnOnce() -> Result<Begun> + Send>),
}

/// Hands prompts to the scheduler, once there is nothing against them.
fn begin(
    served: &Arc<Served>,
    prompts: Vec<(Arc<[u32]>, OutputParser)>,
    asked: Asked,
    into: (Box<dyn Shape>, Share),
) -> Result<Prepared> {
    let (served, compiles) = (Arc::clone(served), place(&asked).is_some());
    let begin = move || {
        prompts.iter().try_for_each(|(ids, _)| check(&served, ids, &asked))?;
        Ok(Begun { answer: Answer::begin(&served, prompts, &asked, into)?, how: asked.how })
    };
    if compiles { Ok(Prepared::Compiles(Box::new(begin))) } else { begin().map(Prepared::Begun) }
}

/// The field of the grammar that its texts follow.
#[cfg(feature = "grammar")]
fn place(asked: &Asked) -> Option<&str> {
    asked.options.sampler.grammar.as_ref().map(text::sampler::Grammar::place)
}

#[cfg(not(feature = "grammar"))]
fn place(_: &Asked) -> Option<&str> {
    None
}

/// A conversation's prompt with the settings that go with it.
pub fn chat_prompt(
    served: &Served,
    of: &Conversation,
    (asked, constraint): (&mut Asked, Option<Constraint>),
) -> Result<(Arc<[u32]>, OutputParser)> {
    let Prompt { ids, form, reader, stop_tokens, shown_tokens } = of.prompt(served)?;
    if !asked.options.ignore_eos {
        asked.options.stop_tokens.extend(stop_tokens);
    }
    let reader = match constraint {
        Some(Constraint { field, .. }) if matches!(of.wanted, Wanted::Any | Wanted::One(_)) => {
            let why = format!("asks for a call, and `{field}` for another form; leave one out");
            return Err(Refusal::field("tool_choice", why));
        }
        Some(constraint) => {
            constraint.hold(asked)?;
            OutputParser::new(OutputFormat::default(), "")
        }
        None => {
            asked.options.shown_tokens = shown_tokens;
            must_call(served, of, (form, &reader), asked)?;
            reader
        }
    };
    Ok((Arc::from(ids), reader))
}

/// Where a request asks for a call, the answer is one.
#[cfg(feature = "grammar")]
fn must_call(
    served: &Served,
    of: &Conversation,
    (form, reader): (OutputFormat, &OutputParser),
    asked: &mut Asked,
) -> Result<()> {
    let only = match &of.wanted {
        Wanted::Auto | Wanted::Never => return Ok(()),
        Wanted::Any => None,
        Wanted::One(name) => Some(name.as_str()),
    };
    if let Some(tools) = &of.variables.tools {
        let grammar = form.tool_grammar(tools, only, reader, served.engine.tokenizer());
        let refused = |e| Refusal { param: Some("tool_choice".into()), ..Refusal::of_input(&e) };
        asked.options.sampler.grammar = Some(grammar.map_err(refused)?);
    }
    Ok(())
}

/// Such a request was refused.
#[cfg(not(feature = "grammar"))]
fn must_call(_: &Served, _: &Conversation, _: (OutputFormat, &OutputParser), _: &mut Asked) -> Result<()> {
    Ok(())
}

fn check(served: &Served, ids: &[u32], asked: &Asked) -> Result<()> {
    let checked = served.engine.check_job(ids, &asked.options);
    checked.map_err(|e| {
        let refusal = Refusal::of_input(&e);
        let field = place(asked).filter(|field| refusal.message.starts_with(field)).unwrap_or("prompt");
        let param = refusal.param.clone().or_else(|| Some(field.to_owned()));
        Refusal { param, ..too_long(ids.len(), served).unwrap_or(refusal) }
    })
}

/// Where a prompt has more tokens than a slot.
fn too_long(need: usize, served: &Served) -> Option<Refusal> {
    let have = served.engine.options().max_seq_len;
    (need > have).then(|| Refusal::too_long("prompt", need, have))
}

/// `POST /v1/chat/completions`.
pub fn chat(served: &Arc<Served>, mut body: Body) -> Result<Prepared> {
    let object = fields::object(&mut body)?;
    let fields = Fields::new(&object);
    let mut asked = Asked::read(&fields, (served, body.client), Kind::Chat)?;
    let top = fields.whole("top_logprobs", 0..=MOST_LOGPROBS)?;
    match (fields.flag("logprobs")?.unwrap_or(false), top) {
        (true, n) => asked.want_logprobs(n.unwrap_or(0)),
        (false, Some(1..)) => return Err(fields.refuse("top_logprobs", "needs `logprobs` to be true")),
        (false, _) => {}
    }
    let constraint = constraint(&fields)?;
    let of = Conversation::of_chat(&fields)?;
    let prompt = chat_prompt(served, &of, (&mut asked, constraint))?;
    let shape = Box::new(Chat::new(served, &asked));
    begin(served, vec![prompt], asked, (shape, body.share))
}

/// One text in answer to a conversation, in some shape.
fn one(
    served: &Arc<Served>,
    of: &Conversation,
    (mut asked, constraint, share): (Asked, Option<Constraint>, Share),
    shape: impl FnOnce(&Asked, usize) -> Box<dyn Shape>,
) -> Result<Prepared> {
    asked.n = 1;
    let prompt = chat_prompt(served, of, (&mut asked, constraint))?;
    let shape = shape(&asked, prompt.0.len());
    begin(served, vec![prompt], asked, (shape, share))
}

/// `POST /v1/responses`.
pub fn responses(served: &Arc<Served>, mut body: Body) -> Result<Prepared> {
    let object = fields::object(&mut body)?;
    let fields = Fields::new(&object);
    let asked = Asked::read(&fields, (served, body.client), Kind::Chat)?;
    let of = responses::conversation(&fields)?;
    let shape = |asked: &Asked, _| Box::new(Responses::new(served, asked, &fields)) as _;
    one(served, &of, (asked, constraint(&fields)?, body.share), shape)
}

/// `POST /v1/messages`.
pub fn messages(served: &Arc<Served>, mut body: Body) -> Result<Prepared> {
    let object = fields::object(&mut body)?;
    let fields = Fields::new(&object);
    let asked = Asked::read(&fields, (served, body.client), Kind::Chat)?;
    let of = messages::conversation(&fields)?;
    let shape = |asked: &Asked, prompt| Box::new(Messages::new(served, &asked.options.stop, prompt)) as _;
    one(served, &of, (asked, constraint(&fields)?, body.share), shape)
}

/// `POST /v1/messages/count_tokens`.
pub fn count_tokens(served: &Arc<Served>, body: &mut Body) -> Result<Whole> {
    let object = fields::object(body)?;
    let of = messages::conversation(&Fields::new(&object))?;
    Ok(Whole::of(&json!({"input_tokens": of.prompt(served)?.ids.len()})))
}

/// `POST /v1/completions`.
pub fn completions(served: &Arc<Served>, mut body: Body) -> Result<Prepared> {
    let object = fields::object(&mut body)?;
    let fields = Fields::new(&object);
    let mut asked = Asked::read(&fields, (served, body.client), Kind::Completion)?;
    if let Some(n) = fields.whole("logprobs", 0..=MOST_LOGPROBS)? {
        asked.want_logprobs(n);
    }
    if let Some(constraint) = constraint(&fields)? {
        constraint.hold(&mut asked)?;
    }
    let prompts = prompts(&fields, served, &asked, plain)?;
    let mut echoes = Vec::new();
    if fields.flag("echo")?.unwrap_or(false) {
        asked.measures = asked.options.logprobs;
        if asked.measures.is_some() && served.engine.options().eviction.policy != Policy::None {
            return Err(
                fields.refuse("echo", "needs a server without --evict to say how probable the prompt is")
            );
        }
        echoes = echoed(&fields, &prompts, served.engine.tokenizer());
    }
    let shape = Box::new(Completion::new(served, &asked, (prompts.len(), echoes)));
    complete(served, asked, prompts, (shape, body.share))
}

/// Prompts as an answer repeats them.
fn echoed(fields: &Fields<'_>, prompts: &[Arc<[u32]>], tokenizer: &Tokenizer) -> Vec<Echo> {
    let given = fields.get("prompt");
    let each = |(i, ids): (usize, &Arc<[u32]>)| {
        let own = given.and_then(|given| given.as_str().or_else(|| given.get(i)?.as_str()));
        let text = own.map_or_else(|| tokenizer.decode_with_special(ids), str::to_owned);
        Echo { text, first: ids.first().copied() }
    };
    prompts.iter().enumerate().map(each).collect()
}

/// `POST /completion`: llama.cpp's own.
pub fn native(served: &Arc<Served>, mut body: Body) -> Result<Prepared> {
    let object = fields::object(&mut body)?;
    let fields = Fields::new(&object);
    let mut asked = Asked::read(&fields, (served, body.client), Kind::Native)?;
    if let Some(n @ 1..) = fields.whole("n_probs", 0..=MOST_LOGPROBS)? {
        asked.want_logprobs(n);
    }
    if let Some(constraint) = constraint(&fields)? {
        constraint.hold(&mut asked)?;
    }
    let prompts = prompts(&fields, served, &asked, mixed)?;
    let shape = Box::new(Native::new(served, &fields, (&asked, &prompts))?);
    complete(served, asked, prompts, (shape, body.share))
}

/// Texts that go on after prompts.
fn complete(
    served: &Arc<Served>,
    asked: Asked,
    prompts: Vec<Arc<[u32]>>,
    into: (Box<dyn Shape>, Share),
) -> Result<Prepared> {
    let prompts =
        prompts.into_iter().map(|ids| (ids, OutputParser::new(OutputFormat::default(), ""))).collect();
    begin(served, prompts, asked, into)
}

/// Reads one prompt.
type ReadsPrompt = fn(&Served, &Asked, &Value) -> Result<Vec<u32>>;

/// Why a prompt is none.
fn wrong(what: impl std::fmt::Display) -> Refusal {
    Refusal::field("prompt", format!("{what}; use a string, token ids, or an array of either"))
}

/// One prompt, or a list.
fn prompts(
    fields: &Fields<'_>,
    served: &Served,
    asked: &Asked,
    read: ReadsPrompt,
) -> Result<Vec<Arc<[u32]>>> {
    let one = |value: &Value| read(served, asked, value).map(Arc::from);
    match fields.get("prompt") {
        None => Err(fields.refuse("prompt", "is missing; give a string")),
        Some(Value::Array(all)) if all.is_empty() => Err(wrong("is empty")),
        Some(Value::Array(all)) if !all.iter().any(Value::is_number) => {
            let texts = all.len() * asked.n;
            if texts > MOST {
                return Err(wrong(format!("asks for {texts} texts in all, and {MOST} are the most")));
            }
            all.iter().map(one).collect()
        }
        Some(value) => Ok(vec![one(value)?]),
    }
}

/// A text, or ids.
fn plain(served: &Served, asked: &Asked, value: &Value) -> Result<Vec<u32>> {
    match value {
        Value::String(text) => encode(served, text, asked),
        Value::Array(all) => ids(all).ok_or_else(|| wrong("holds what is no token id")),
        other => Err(wrong(format!("is {}", kind(other)))),
    }
}

/// The same, or both in turn, or an object with a text, as llama.cpp has them.
fn mixed(served: &Served, asked: &Asked, value: &Value) -> Result<Vec<u32>> {
    match value {
        Value::Array(all) if all.iter().any(Value::is_string) => {
            let mut prompt = Vec::new();
            for (i, part) in all.iter().enumerate() {
                prompt.extend(match part {
                    Value::String(text) if i > 0 => more(served, text, asked)?,
                    Value::String(_) => plain(served, asked, part)?,
                    id => plain(served, asked, &Value::Array(vec![id.clone()]))?,
                });
            }
            Ok(prompt)
        }
        Value::Object(_) => {
            let of = Fields::of(value, "prompt")?;
            match of.list("multimodal_data")? {
                Some([_, ..]) => Err(of.refuse("multimodal_data", "is no text; this model reads text alone")),
                _ => encode(served, of.needed_text("prompt_string")?, asked),
            }
        }
        other => plain(served, asked, other),
    }
}

/// A text that is not the first part of its prompt.
fn more(served: &Served, text: &str, asked: &Asked) -> Result<Vec<u32>> {
    let (tokenizer, options) = (served.engine.tokenizer(), &asked.options);
    check_part(tokenizer, text, "prompt")?;
    let stop = || options.cancel.is_cancelled();
    let ids = tokenizer.encode_until(text, options.specials, AddSpecial::No, &stop);
    ids.map_err(|e| Refusal { param: Some("prompt".into()), ..Refusal::of_input(&e) })
}

fn encode(served: &Served, text: &str, asked: &Asked) -> Result<Vec<u32>> {
    if served.engine.tokenizer().least_tokens(text) <= served.engine.options().max_seq_len {
        check_part(served.engine.tokenizer(), text, "prompt")?;
    }
    let encoded = served.engine.encode_until(text, asked.options.specials, &asked.options.cancel);
    encoded.map_err(|e| {
        // A text that is far too long is refused before it becomes tokens.
        let least = served.engine.tokenizer().least_tokens(text);
        let refusal = too_long(least, served).unwrap_or_else(|| Refusal::of_input(&e));
        Refusal { param: Some("prompt".into()), ..refusal }
    })
}
