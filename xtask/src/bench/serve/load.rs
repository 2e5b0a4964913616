//! Clients that ask a server again and again for a while, and one that comes in the middle with a long prompt.

use super::stream::Server;
use crate::error::{Error, Result};
use serde_json::json;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Characters of the text whose length in tokens is asked first, for a token of the prompts that will come.
const PROBE: u64 = 4;

/// What clients ask for.
pub struct Plan<'a> {
    /// What prompts are cut from.
    pub text: &'a str,
    pub seconds: u64,
    /// Tokens of a prompt, about.
    pub prompt: u64,
    /// Tokens of an answer.
    pub generate: u64,
    /// Tokens of the long prompt, about; 0 is none.
    pub long: u64,
}

/// One request; times are seconds since the start.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Asked {
    pub client: usize,
    pub at: f64,
    /// When each piece of text came.
    pub pieces: Vec<f64>,
    /// What the server says of their number.
    pub tokens: Option<u64>,
    pub prompt: Option<u64>,
    pub failed: Option<String>,
}

/// All that was asked of one server at once.
#[derive(Debug, Default)]
pub struct Found {
    pub clients: usize,
    pub asked: Vec<Asked>,
    pub long: Option<Asked>,
    /// When the load was quiet until: the arrival of the long prompt, or the end.
    pub quiet: f64,
}

/// How many characters of the text this server's model takes for a token. The server has answered then.
pub fn characters_a_token(server: &Server, plan: &Plan<'_>) -> Result<f64> {
    let prompt =
        cut(plan.text, 0, usize::try_from(plan.prompt.clamp(32, 1024) * PROBE).unwrap_or(usize::MAX));
    let chars = prompt.chars().count();
    let probe = Request { server, prompt, tokens: 1, client: 0 };
    let asked = probe.ask(Instant::now());
    match (asked.failed, asked.prompt) {
        (Some(why), _) => Err(Error::Failed(why)),
        (None, Some(tokens)) if tokens > 0 => Ok(chars as f64 / tokens as f64),
        // Common for English.
        (None, _) => Ok(4.0),
    }
}

/// Puts the load of so many clients on a server. `turn` makes the prompts others than those of another turn.
pub fn put(server: &Server, plan: &Plan<'_>, clients: usize, (turn, chars): (usize, f64)) -> Found {
    let began = Instant::now();
    let over = &AtomicBool::new(false);
    let characters = |tokens: u64| (tokens as f64 * chars) as usize;
    let mut found = Found { clients, quiet: plan.seconds as f64, ..Found::default() };
    std::thread::scope(|scope| {
        let client = |client: usize| {
            scope.spawn(move || {
                let mut all = Vec::new();
                while !over.load(Ordering::SeqCst) {
                    let nth = all.len();
                    // No prompt begins like another, so that nothing of it is kept from an earlier one.
                    let start = format!("{turn}.{client}.{nth}: ");
                    let prompt = start
                        + &cut(plan.text, (client * 31 + nth * 7 + turn) * 211, characters(plan.prompt));
                    all.push(Request { server, prompt, tokens: plan.generate, client }.ask(began));
                    if all.last().is_some_and(|asked| asked.failed.is_some()) {
                        std::thread::sleep(Duration::from_millis(100));
                    }
                }
                all
            })
        };
        let clients: Vec<_> = (0..clients).map(client).collect();
        let whole = Duration::from_secs(plan.seconds);
        if plan.long > 0 {
            std::thread::sleep(whole / 2);
            found.quiet = began.elapsed().as_secs_f64();
            let prompt = format!("{turn}.long: ") + &cut(plan.text, turn * 17, characters(plan.long));
            // It may take longer than the load was to last; the others go on until it is answered.
            found.long = Some(Request { server, prompt, tokens: 1, client: usize::MAX }.ask(began));
        }
        std::thread::sleep(whole.saturating_sub(began.elapsed()));
        over.store(true, Ordering::SeqCst);
        found.asked =
            clients.into_iter().flat_map(|c| c.join().expect("invariant: a client does not panic")).collect();
    });
    found
}

/// So many characters of a text that goes round, from a place in it.
fn cut(text: &str, from: usize, characters: usize) -> String {
    let length = text.chars().count().max(1);
    text.chars().cycle().skip(from % length).take(characters).collect()
}

struct Request<'a> {
    server: &'a Server,
    prompt: String,
    tokens: u64,
    client: usize,
}

impl Request<'_> {
    fn ask(self, began: Instant) -> Asked {
        let now = || began.elapsed().as_secs_f64();
        // `ignore_eos` is no field of OpenAI's, but most servers know it.
        let body = json!({
            "model": "any", "prompt": self.prompt, "max_tokens": self.tokens, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true}, "ignore_eos": true,
        });
        let mut asked = Asked { client: self.client, at: now(), ..Asked::default() };
        let answered = self.server.ask("/completions", &body, &mut |event| {
            if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
                asked.pieces.push(now());
            }
            asked.tokens = event["usage"]["completion_tokens"].as_u64().or(asked.tokens);
            asked.prompt = event["usage"]["prompt_tokens"].as_u64().or(asked.prompt);
        });
        asked.failed = answered.err().map(|e| e.to_string());
        asked
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_go_round() {
        assert_eq!(cut("aébc", 1, 6), "ébcaéb");
        assert_eq!(cut("ab", 5, 3), "bab");
        assert_eq!(cut("", 5, 3), "");
    }
}
