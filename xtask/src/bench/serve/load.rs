//! Clients that send requests to a server for a while, and one with a long prompt in the middle.

use super::stream::Server;
use crate::error::{Error, Result};
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Characters per prompt token of the first request, which measures characters per token.
const PROBE: u64 = 4;

/// The settings of a load.
pub struct Load<'a> {
    /// The text that prompts are cut from.
    pub text: &'a str,
    pub seconds: u64,
    /// Approximate tokens of a prompt.
    pub prompt: u64,
    /// Tokens of an answer.
    pub generate: u64,
    /// Approximate tokens of the long prompt; 0 for none.
    pub long: u64,
}

/// The times of a request, in seconds since the start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestTiming {
    pub client: usize,
    pub sent: f64,
    /// Arrival of each piece of text.
    pub pieces: Vec<f64>,
    /// Tokens of the answer and of the prompt, as reported by the server.
    pub tokens: Option<u64>,
    pub prompt: Option<u64>,
    pub error: Option<String>,
}

/// All requests of a load.
#[derive(Debug, Default)]
pub struct LoadResult {
    pub clients: usize,
    pub requests: Vec<RequestTiming>,
    pub long: Option<RequestTiming>,
    /// Seconds until the long prompt, or until the end.
    pub quiet: f64,
}

impl Load<'_> {
    /// Measures the characters per token of the server's model, which also waits until the server answers.
    pub fn characters_per_token(&self, server: &Server) -> Result<f64> {
        let prompt = self.excerpt(0, (self.prompt.clamp(32, 1024) * PROBE) as usize);
        let characters = prompt.chars().count();
        let probe = Request { server, prompt, tokens: 1, client: 0 }.send(Instant::now());
        match (probe.error, probe.prompt) {
            (Some(why), _) => Err(Error::Failed(why)),
            (None, Some(tokens)) if tokens > 0 => Ok(characters as f64 / tokens as f64),
            // Usual for English.
            (None, _) => Ok(4.0),
        }
    }

    /// Runs the load with a number of clients. Each `turn` has different prompts.
    pub fn run_clients(
        &self,
        server: &Server,
        clients: usize,
        (turn, per_token): (usize, f64),
    ) -> LoadResult {
        let began = Instant::now();
        let ended = &AtomicBool::new(false);
        let characters = |tokens: u64| (tokens as f64 * per_token) as usize;
        let mut result = LoadResult { clients, quiet: self.seconds as f64, ..LoadResult::default() };
        std::thread::scope(|scope| {
            let client = |client: usize| {
                scope.spawn(move || {
                    let mut all: Vec<RequestTiming> = Vec::new();
                    while !ended.load(Ordering::SeqCst) {
                        let nth = all.len();
                        // No two prompts begin alike, so that no prefix is cached.
                        let from = (client * 31 + nth * 7 + turn) * 211;
                        let prompt = self.excerpt(from, characters(self.prompt));
                        let prompt = format!("{turn}.{client}.{nth}: {prompt}");
                        all.push(Request { server, prompt, tokens: self.generate, client }.send(began));
                        if all[nth].error.is_some() {
                            std::thread::sleep(Duration::from_millis(100));
                        }
                    }
                    all
                })
            };
            let clients: Vec<_> = (0..clients).map(client).collect();
            let whole = Duration::from_secs(self.seconds);
            if self.long > 0 {
                std::thread::sleep(whole / 2);
                result.quiet = began.elapsed().as_secs_f64();
                let prompt = format!("{turn}.long: {}", self.excerpt(turn * 17, characters(self.long)));
                // It may take longer than the load lasts; the others continue until it is answered.
                result.long = Some(Request { server, prompt, tokens: 1, client: usize::MAX }.send(began));
            }
            std::thread::sleep(whole.saturating_sub(began.elapsed()));
            ended.store(true, Ordering::SeqCst);
            let joined = clients.into_iter().map(|c| c.join().expect("invariant: a client does not panic"));
            result.requests = joined.flatten().collect();
        });
        result
    }

    /// Some characters of the text from a position on, wrapping around at the end.
    fn excerpt(&self, from: usize, characters: usize) -> String {
        let length = self.text.chars().count().max(1);
        self.text.chars().cycle().skip(from % length).take(characters).collect()
    }
}

struct Request<'a> {
    server: &'a Server,
    prompt: String,
    tokens: u64,
    client: usize,
}

impl Request<'_> {
    fn send(self, began: Instant) -> RequestTiming {
        let now = || began.elapsed().as_secs_f64();
        // `ignore_eos` is not a field of OpenAI's API, but most servers support it.
        let body = json!({
            "model": "any", "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true}, "ignore_eos": true,
        });
        let mut timing = RequestTiming { client: self.client, sent: now(), ..RequestTiming::default() };
        let answered = self.server.post("/completions", &body, &mut |event| {
            if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                timing.pieces.push(now());
            }
            timing.tokens = event["usage"]["completion_tokens"].as_u64().or(timing.tokens);
            timing.prompt = event["usage"]["prompt_tokens"].as_u64().or(timing.prompt);
        });
        timing.error = answered.err().map(|e| e.to_string());
        timing
    }
}
