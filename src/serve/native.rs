//! llama.cpp's own shape: `/completion`.

use super::answer::{Choice, Reading, Shape, Step, Usage, event};
use super::asked::{Asked, How};
use super::facts;
use super::fields::Fields;
use super::hub::Served;
use super::openai::{self, text, write_logprobs};
use super::refusal::Refusal;
use super::whole::Whole;
use crate::run::session::StopReason;
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields that an answer may be asked for, and bytes of each name.
const FIELDS: (usize, usize) = (64, 128);

/// `POST /completion`.
pub struct Native {
    served: Arc<Served>,
    /// `generation_settings`, without the seed.
    settings: Value,
    seed: u64,
    stops: Vec<String>,
    how: How,
    /// As ids; each has `n` texts.
    prompts: Vec<Arc<[u32]>>,
    n: usize,
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
        (asked, prompts): (&Asked, &[Arc<[u32]>]),
    ) -> Result<Self, Refusal> {
        let mut settings = facts::settings(&asked.options);
        settings["stream"] = (asked.how != How::Whole).into();
        settings["n_ctx"] = served.engine.options().max_seq_len.into();
        Ok(Self {
            served: Arc::clone(served),
            settings,
            seed: asked.options.sampler.seed,
            stops: asked.options.stop.clone(),
            how: asked.how,
            prompts: prompts.to_vec(),
            n: asked.n,
            tokens: vec![0; prompts.len() * asked.n],
            return_tokens: fields.flag("return_tokens")?.unwrap_or(false),
            wanted: fields.texts("response_fields", FIELDS)?.unwrap_or_default(),
        })
    }

    fn prompt(&self, index: usize) -> &[u32] {
        &self.prompts[index / self.n]
    }

    /// All about a text that has ended, but for what is as long as itself.
    fn facts(&self, index: usize, choice: &Choice) -> Value {
        let Some(ending) = choice.ending else { return Value::Null };
        let n_ctx = self.served.engine.options().max_seq_len;
        let stopped = ending.stop.filter(|_| ending.reason == StopReason::Stop);
        let word = stopped.and_then(|n| self.stops.get(n)).map_or("", String::as_str);
        let stop_type = match ending.reason {
            StopReason::Eos => "eos",
            StopReason::Stop => "word",
            _ => "limit",
        };
        let mut settings = self.settings.clone();
        settings["seed"] = self.seed.wrapping_add((index % self.n) as u64).into();
        json!({
            "index": index, "content": "", "tokens": [],
            "id_slot": ending.slot, "stop": true, "model": self.served.name,
            "tokens_predicted": ending.tokens, "tokens_evaluated": ending.prompt, "tokens_cached": ending.cached,
            "generation_settings": settings,
            "prompt": self.served.engine.tokenizer().decode_with_special(self.prompt(index)),
            "has_new_line": choice.text.contains('\n'),
            "truncated": ending.reason == StopReason::Context || ending.prompt + ending.tokens > n_ctx,
            "stop_type": stop_type, "stopping_word": word,
            "timings": choice.usage().timings(),
        })
    }

    /// Writes all about a text that has ended, or the fields that are wanted; `a/b` is the field `b` of the object `a`. What
    /// was streamed is not said again.
    fn write_ended(&self, index: usize, choice: &mut Choice, out: &mut Whole) {
        let facts = self.facts(index, choice);
        let tokens = if self.return_tokens { std::mem::take(&mut choice.tokens) } else { Vec::new() };
        let logprobs = std::mem::take(&mut choice.logprobs);
        let is_whole = self.how == How::Whole;
        out.begin(b'{');
        if !self.wanted.is_empty() {
            for name in &self.wanted {
                let (field, rest) = name.split_once('/').unwrap_or((name.as_str(), ""));
                match field {
                    "content" if rest.is_empty() && is_whole => out.field(name, &choice.text),
                    "tokens" if rest.is_empty() && is_whole => out.field(name, &tokens),
                    "completion_probabilities" if rest.is_empty() && !logprobs.is_empty() => {
                        out.key(name);
                        write_logprobs(&self.served, logprobs.clone(), out);
                    }
                    "completion_probabilities" => {
                        let (place, rest) = rest.split_once('/').unwrap_or((rest, ""));
                        let token = place.parse().ok().and_then(|at: usize| logprobs.get(at));
                        let all = token.map(|token| openai::logprobs(&self.served, token));
                        let path = if rest.is_empty() { "/0".into() } else { format!("/0/{rest}") };
                        if let Some(value) = all.as_ref().and_then(|all| all.pointer(&path)) {
                            out.field(name, value);
                        }
                    }
                    _ => facts
                        .pointer(&format!("/{name}"))
                        .into_iter()
                        .for_each(|value| out.field(name, value)),
                }
            }
            return out.end(b'}');
        }
        for (name, value) in facts.as_object().into_iter().flatten() {
            match name.as_str() {
                "content" if is_whole => out.field(name, &choice.text),
                "tokens" => out.field(name, &tokens),
                _ => out.field(name, value),
            }
        }
        if !logprobs.is_empty() {
            out.key("completion_probabilities");
            write_logprobs(&self.served, logprobs, out);
        }
        out.end(b'}');
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
            json["completion_probabilities"] = openai::logprobs(&self.served, token);
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
        // Only its text is looked at.
        let mut last = Choice { text: choice.text.clone(), ending: choice.ending, ..Choice::default() };
        let mut whole = Whole::default();
        self.write_ended(index, &mut last, &mut whole);
        *out += &format!("data: {}\n\n", whole.into_text());
    }

    fn over(&mut self, _: Usage, _: &mut String) {}

    fn failed(&mut self, refusal: &Refusal, out: &mut String) {
        event(&refusal.json(), out);
    }

    fn whole(&mut self, choices: &mut [Choice], _: Usage, out: &mut Whole) {
        if let [one] = choices {
            return self.write_ended(0, one, out);
        }
        out.begin(b'[');
        choices.iter_mut().enumerate().for_each(|(index, choice)| self.write_ended(index, choice, out));
        out.end(b']');
    }
}
