//! llama.cpp's own shape: `/completion`.

use super::answer::{Choice, Reading, Shape, Step, Usage, event};
use super::asked::{Asked, How};
use super::facts;
use super::fields::Fields;
use super::hub::Served;
use super::openai::{logprobs, text};
use super::refusal::Refusal;
use crate::run::session::StopReason;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `POST /completion`.
pub(super) struct Native {
    served: Arc<Served>,
    asked: Asked,
    /// `generation_settings`, without the seed.
    settings: Value,
    /// As ids; each has as many texts.
    prompts: Vec<Vec<u32>>,
    /// Tokens of each text so far.
    tokens: Vec<usize>,
    return_tokens: bool,
    /// Names of the fields that an answer is to have; none are all.
    wanted: Vec<String>,
}

impl Native {
    /// Of a request for texts that go on after these prompts.
    pub fn new(
        served: &Arc<Served>,
        fields: &Fields<'_>,
        (asked, prompts): (&Asked, &[Vec<u32>]),
    ) -> Result<Self, Refusal> {
        let mut settings = facts::settings(&asked.options);
        settings["stream"] = (asked.how != How::Whole).into();
        settings["n_ctx"] = served.engine.options().max_seq_len.into();
        Ok(Self {
            served: Arc::clone(served),
            asked: asked.clone(),
            settings,
            prompts: prompts.to_vec(),
            tokens: vec![0; prompts.len() * asked.n],
            return_tokens: fields.flag("return_tokens")?.unwrap_or(false),
            wanted: fields.texts("response_fields")?.unwrap_or_default(),
        })
    }

    fn prompt(&self, index: usize) -> &[u32] {
        &self.prompts[index / self.asked.n]
    }

    /// All about a text that has ended. What was streamed is not said again.
    fn ended_json(&self, index: usize, choice: &Choice) -> Value {
        let Some(ending) = choice.ending else { return Value::Null };
        let (whole, n_ctx) = (self.asked.how == How::Whole, self.served.engine.options().max_seq_len);
        let stopped = ending.stop.filter(|_| ending.reason == StopReason::Stop);
        let word = stopped.and_then(|n| self.asked.options.stop.get(n)).map_or("", String::as_str);
        let stop_type = match ending.reason {
            StopReason::Eos => "eos",
            StopReason::Stop => "word",
            _ => "limit",
        };
        let mut settings = self.settings.clone();
        let seed = self.asked.options.sampler.seed.wrapping_add((index % self.asked.n) as u64);
        settings["seed"] = seed.into();
        let mut json = json!({
            "index": index, "content": if whole { choice.text.as_str() } else { "" },
            "tokens": if whole && self.return_tokens { choice.tokens.as_slice() } else { &[] },
            "id_slot": ending.slot, "stop": true, "model": self.served.name,
            "tokens_predicted": ending.tokens, "tokens_evaluated": ending.prompt, "tokens_cached": ending.cached,
            "generation_settings": settings,
            "prompt": self.served.engine.tokenizer().decode_with_special(self.prompt(index)),
            "has_new_line": choice.text.contains('\n'),
            "truncated": ending.reason == StopReason::Context || ending.prompt + ending.tokens > n_ctx,
            "stop_type": stop_type, "stopping_word": word,
            "timings": choice.usage().timings(),
        });
        if whole && !choice.logprobs.is_empty() {
            json["completion_probabilities"] = logprobs(&self.served, &choice.logprobs);
        }
        self.only_wanted(json)
    }

    /// The fields that are wanted; `a/b` is the field `b` of the object `a`.
    fn only_wanted(&self, json: Value) -> Value {
        if self.wanted.is_empty() {
            return json;
        }
        let field = |name: &String| Some((name.clone(), json.pointer(&format!("/{name}"))?.clone()));
        Value::Object(self.wanted.iter().filter_map(field).collect::<Map<_, _>>())
    }
}

impl Shape for Native {
    fn begin(&mut self, _: &mut String) {}

    fn step(&mut self, choice: usize, step: &Step, out: &mut String) {
        self.tokens[choice] += step.tokens.len();
        let mut json = json!({
            "index": choice, "content": text(&step.parts), "tokens": step.tokens, "stop": false,
            "tokens_predicted": self.tokens[choice], "tokens_evaluated": self.prompt(choice).len(),
        });
        if let Some(token) = &step.logprobs {
            json["completion_probabilities"] = logprobs(&self.served, [token]);
        }
        event(&json, out);
    }

    fn reading(&mut self, index: usize, reading: &Reading, out: &mut String) {
        let json = json!({
            "index": index, "content": "", "tokens": [], "stop": false, "tokens_predicted": 0,
            "tokens_evaluated": self.prompt(index).len(), "prompt_progress": reading.json(),
        });
        event(&json, out);
    }

    fn ended(&mut self, index: usize, choice: &Choice, out: &mut String) {
        event(&self.ended_json(index, choice), out);
    }

    fn over(&mut self, _: Usage, _: &mut String) {}

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        event(&refusal.json(), out);
    }

    fn whole(&mut self, choices: &[Choice], _: Usage) -> Value {
        match choices {
            [one] => self.ended_json(0, one),
            all => all.iter().enumerate().map(|(index, choice)| self.ended_json(index, choice)).collect(),
        }
    }
}
