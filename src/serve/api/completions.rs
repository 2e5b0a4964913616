//! OpenAI's `/v1/completions`.

use super::openai::{ResponseHead, finite_logprob};
use crate::run::eviction::Policy;
use crate::serve::body::{RequestBody, read_object};
use crate::serve::dialect::{Choice, Dialect, PromptProgress, TokenOutput, Usage};
use crate::serve::error::{ApiError, ApiResult};
use crate::serve::json_writer::{JsonWriter, write_json};
use crate::serve::params::{LogprobCount, RequestParams};
use crate::serve::prepare::{PreparedRequest, read_prompts, start_completion};
use crate::serve::state::ServerModel;
use crate::serve::unsupported::RequestKind;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use text::chat::AnswerPart;
use text::sampler::{Logprob, TokenLogprobs};
use text::tokenizer::{TokenBytes, Tokenizer};

/// Fields of completions only.
#[derive(Deserialize)]
struct CompletionFields {
    logprobs: Option<LogprobCount>,
    echo: Option<bool>,
}

/// `POST /v1/completions`.
pub fn start_request(model: &Arc<ServerModel>, request: RequestBody) -> ApiResult<PreparedRequest> {
    let (body, mut params) = RequestParams::read_request(model, request, RequestKind::Completion)?;
    let fields: CompletionFields = read_object(&body, "")?;
    params.options.logprobs = fields.logprobs.map_or(params.options.logprobs, LogprobCount::to_count);
    params.apply_constraint()?;
    let prompts = read_prompts(&body, &params)?;
    let mut echoes = Vec::new();
    if fields.echo == Some(true) {
        params.options.prompt_logprobs = params.options.logprobs;
        let evicts = model.engine.options().eviction.policy != Policy::None;
        if params.options.prompt_logprobs.is_some() && evicts {
            let why = "log-probabilities of the prompt need a server without --evict";
            return Err(ApiError::for_field("echo", why));
        }
        let each = |(i, ids)| PromptEcho::new(&body["prompt"], i, ids, model.engine.tokenizer());
        echoes = prompts.iter().map(|ids| &ids[..]).enumerate().map(each).collect();
    }
    let dialect = Box::new(CompletionDialect {
        head: ResponseHead::new("cmpl-", ["text_completion"; 2], &params),
        texts: (0..prompts.len() * params.n).map(|_| TextState::default()).collect(),
        echoes,
        n: params.n,
        has_prompt_logprobs: params.options.prompt_logprobs.is_some(),
    });
    start_completion(prompts, params, dialect)
}

/// A prompt that the response repeats (`echo`).
struct PromptEcho {
    text: String,
    /// First token, which has no log-probability.
    first: Option<u32>,
    /// Characters of the first token if the tokenizer added it: they are not part of the given prompt.
    hidden: usize,
}

impl PromptEcho {
    fn new(given: &Value, index: usize, ids: &[u32], tokenizer: &Tokenizer) -> Self {
        let own = given.as_str().or_else(|| given.get(index)?.as_str());
        let text = own.map_or_else(|| tokenizer.decode_with_special(ids), str::to_owned);
        let first = ids.first().map(|&id| tokenizer.pieces().token_text(id));
        let hidden =
            first.filter(|first| !text.starts_with(&**first)).map_or(0, |first| first.chars().count());
        Self { text, first: ids.first().copied(), hidden }
    }
}

/// Computes a cell of the log-probabilities table.
type Column = fn(&TokenLogprobs, &TokenBytes) -> Value;

/// Columns, except for the offsets.
const COLUMNS: [(&str, Column); 3] = [
    ("tokens", |row, pieces| pieces.token_text(row.chosen.id).into()),
    ("token_logprobs", chosen_logprob),
    ("top_logprobs", top_logprobs),
];

fn chosen_logprob(row: &TokenLogprobs, _: &TokenBytes) -> Value {
    if row.chosen.logprob.is_nan() { Value::Null } else { finite_logprob(row.chosen.logprob).into() }
}

/// Log-probabilities by token text; of several tokens with the same text the last counts.
fn top_logprobs(row: &TokenLogprobs, pieces: &TokenBytes) -> Value {
    if row.chosen.logprob.is_nan() {
        return Value::Null;
    }
    let entry =
        |token: &Logprob| (pieces.token_text(token.id).into_owned(), finite_logprob(token.logprob).into());
    Value::Object(row.top.iter().map(entry).collect())
}

fn count_characters(row: &TokenLogprobs, pieces: &TokenBytes) -> usize {
    pieces.token_text(row.chosen.id).chars().count()
}

/// Progress of a choice.
#[derive(Default)]
struct TextState {
    /// Log-probabilities of the prompt, from its second token on.
    prompt: Vec<TokenLogprobs>,
    /// Number of characters so far.
    characters: usize,
    /// Set once the prompt has been repeated.
    echoed: bool,
}

/// Responses of `/v1/completions`.
struct CompletionDialect {
    head: ResponseHead,
    texts: Vec<TextState>,
    /// One per prompt with `echo`, otherwise empty.
    echoes: Vec<PromptEcho>,
    /// Texts per prompt.
    n: usize,
    has_prompt_logprobs: bool,
}

/// A choice, or a part of one in a stream.
fn choice_json(index: usize, text: &str, finish_reason: Option<&str>) -> Value {
    json!({"index": index, "text": text, "logprobs": null, "finish_reason": finish_reason})
}

/// Joins text parts; completions are not parsed, so there are no tool calls.
pub fn join_parts(parts: &[AnswerPart]) -> String {
    let text = |part: &'_ AnswerPart| match part {
        AnswerPart::Text(text) | AnswerPart::Thinking(text) => text.clone(),
        AnswerPart::ToolCallStart { .. }
        | AnswerPart::ToolCallDelta(_)
        | AnswerPart::ToolCall(_)
        | AnswerPart::ToolCallCut { .. } => String::new(),
    };
    parts.iter().map(text).collect()
}

impl CompletionDialect {
    fn pieces(&self) -> &Arc<TokenBytes> {
        self.head.model.engine.tokenizer().pieces()
    }

    /// Log-probabilities of tokens as a table of columns. `start` is the character offset of the first token; `hidden`
    /// characters precede the prompt.
    fn logprobs_json(&self, rows: &[TokenLogprobs], (start, hidden): (usize, usize)) -> Value {
        let mut table = Map::new();
        for (name, cell) in COLUMNS {
            table.insert(name.into(), rows.iter().map(|row| cell(row, self.pieces())).collect());
        }
        let mut end = start;
        let offsets = rows.iter().map(|row| {
            let offset = end.saturating_sub(hidden);
            end += count_characters(row, self.pieces());
            offset
        });
        table.insert("text_offset".into(), offsets.collect());
        table.into()
    }

    /// Writes the table of a whole choice, serialized as it is sent.
    fn write_logprobs(&self, rows: Vec<TokenLogprobs>, hidden: usize, out: &mut JsonWriter) {
        let rows = Arc::new(rows);
        out.write_object(|out| {
            for (name, cell) in COLUMNS {
                let (rows, pieces) = (Arc::clone(&rows), Arc::clone(self.pieces()));
                out.write_key(name);
                out.write_list(rows.len(), move |i, to| write_json(&cell(&rows[i], &pieces), to));
            }
            let (pieces, mut end) = (Arc::clone(self.pieces()), 0_usize);
            out.write_key("text_offset");
            out.write_list(rows.len(), move |i, to| {
                write_json(&end.saturating_sub(hidden), to);
                end += count_characters(&rows[i], &pieces);
            });
        });
    }

    /// Takes the prompt to repeat with its log-probabilities and hidden characters; `None` if there is nothing to
    /// repeat.
    fn take_echo(&mut self, choice: usize) -> Option<(String, Vec<TokenLogprobs>, usize)> {
        let (echo, text) = (self.echoes.get(choice / self.n)?, &mut self.texts[choice]);
        if std::mem::replace(&mut text.echoed, true) {
            return None;
        }
        let unknown = |id| TokenLogprobs { chosen: Logprob { id, logprob: f64::NAN }, top: Vec::new() };
        let mut rows = Vec::from_iter(echo.first.map(unknown));
        rows.append(&mut text.prompt);
        let pieces = self.head.model.engine.tokenizer().pieces();
        text.characters = rows.iter().map(|row| count_characters(row, pieces)).sum::<usize>() - echo.hidden;
        Some((echo.text.clone(), rows, echo.hidden))
    }

    /// Repeats the prompt in a stream, unless done before.
    fn write_echo(&mut self, choice: usize, out: &mut String) {
        let Some((text, rows, hidden)) = self.take_echo(choice) else { return };
        let mut chunk = choice_json(choice, &text, None);
        if self.has_prompt_logprobs {
            chunk["logprobs"] = self.logprobs_json(&rows, (0, hidden));
        }
        self.head.write_chunk(chunk, None, out);
    }
}

impl Dialect for CompletionDialect {
    fn held_bytes(&self) -> usize {
        self.echoes.iter().map(|echo| echo.text.len()).sum()
    }

    fn on_prompt_logprobs(&mut self, choice: usize, tokens: Vec<TokenLogprobs>) {
        self.texts[choice].prompt.extend(tokens);
    }

    fn on_token(&mut self, choice: usize, token: &TokenOutput, out: &mut String) {
        self.write_echo(choice, out);
        let mut chunk = choice_json(choice, &join_parts(&token.parts), None);
        if let Some(row) = &token.logprobs {
            chunk["logprobs"] =
                self.logprobs_json(std::slice::from_ref(row), (self.texts[choice].characters, 0));
            self.texts[choice].characters += count_characters(row, self.pieces());
        }
        self.head.write_chunk(chunk, None, out);
    }

    fn on_prompt_progress(&mut self, choice: usize, progress: &PromptProgress, out: &mut String) {
        self.head.write_progress(choice_json(choice, "", None), progress, out);
    }

    fn on_choice_end(&mut self, index: usize, choice: &Choice, out: &mut String) {
        self.write_echo(index, out);
        let last = choice_json(index, "", Some(choice.finish_reason()));
        self.head.write_chunk(last, self.head.timings_field(choice.count_usage()), out);
    }

    fn on_end(&mut self, usage: Usage, out: &mut String) {
        self.head.write_end(usage, out);
    }

    fn to_json(&mut self, choices: &mut [Choice], usage: Usage, out: &mut JsonWriter) {
        let echoes: Vec<_> = (0..choices.len()).map(|i| self.take_echo(i).unwrap_or_default()).collect();
        let write_choices = |out: &mut JsonWriter| {
            for (index, (choice, (prompt, mut rows, hidden))) in choices.iter_mut().zip(echoes).enumerate() {
                let has_logprobs = self.has_prompt_logprobs || !choice.logprobs.is_empty();
                rows.append(&mut choice.logprobs);
                let object = choice_json(index, &(prompt + &choice.text), Some(choice.finish_reason()));
                out.write_object_with(&object, "logprobs", |out| {
                    if has_logprobs {
                        self.write_logprobs(rows, hidden, out);
                    } else {
                        out.write_value(&Value::Null);
                    }
                });
            }
        };
        self.head.write_whole(usage, out, write_choices);
    }
}
