//! Shows one generation while it comes, and afterwards its times.

use super::args::Format;
use super::terminal::put;
use crate::model::trace::digest;
use crate::run::engine::{Timing, TokenStream};
use crate::run::session::{Drafts, Session, StopReason};
use files::Result;
use serde_json::{Value, json};
use std::time::Duration;
use text::sampler::{Logprob, TokenLogprobs};
use text::tokenizer::Tokenizer;

/// Prints the pieces as they come; `each` gets the token and its piece.
pub(super) fn show(
    stream: &mut TokenStream<'_>,
    format: Format,
    mut each: impl FnMut(Option<u32>, &str),
) -> Result<()> {
    while let Some(piece) = stream.next() {
        let piece = piece?;
        match format {
            Format::Text if piece.is_empty() => {}
            Format::Text => put(&piece)?,
            Format::Jsonl => put(&token_line(stream, &piece))?,
        }
        each(stream.last_token(), &piece);
    }
    Ok(())
}

/// The line of `--format jsonl` for one piece.
fn token_line(stream: &TokenStream<'_>, piece: &str) -> String {
    let mut line = json!({"t": "token", "id": stream.last_token(), "text": piece});
    if let Some(logprobs) = stream.logprobs() {
        line["logprobs"] = logprobs_json(stream.tokenizer(), logprobs);
    }
    format!("{line}\n")
}

/// What the model held of one token. Texts of single tokens have U+FFFD for parts of characters; the logarithm of no
/// probability at all is null.
pub(super) fn logprobs_json(tokenizer: &Tokenizer, of: &TokenLogprobs) -> Value {
    let entry =
        |p: &Logprob| json!({"id": p.id, "text": tokenizer.pieces().text(p.id), "logprob": p.logprob});
    json!({"chosen": entry(&of.chosen), "top": of.top.iter().map(entry).collect::<Vec<_>>()})
}

/// What one generation took.
#[derive(Clone, Copy)]
pub(super) struct Report {
    pub timing: Timing,
    pub reason: StopReason,
    pub loading: Duration,
    pub seed: u64,
}

impl Report {
    /// Average milliseconds between tokens, and tokens per second.
    fn pace(&self) -> (f64, f64) {
        let tbt = self.timing.tbt().unwrap_or(Duration::ZERO);
        (ms(tbt), if tbt.is_zero() { 0.0 } else { 1.0 / tbt.as_secs_f64() })
    }

    /// The last line of `--format jsonl`; `logits` is the digest of the last logits, as in the golden files.
    pub fn json(&self, session: &Session) -> String {
        let (timing, (tbt, speed)) = (&self.timing, self.pace());
        let mut line = json!({
            "t": "stats", "ttft_ms": ms(timing.ttft), "tbt_ms": tbt, "tokens_per_second": speed,
            "prompt_tokens": timing.prompt_tokens, "tokens": timing.tokens, "load_ms": ms(self.loading),
            "stop": self.reason.name(), "seed": self.seed,
            "logits": format!("{:016x}", digest(session.logits())),
        });
        if let Some(drafts) = session.drafts() {
            let Drafts { passes, drafted, accepted } = drafts;
            line["draft"] = json!({"passes": passes, "drafted": drafted, "accepted": accepted});
        }
        format!("{line}\n")
    }

    /// The lines on stderr, the first two in the specification's format.
    pub fn say(&self, session: &Session) {
        let (timing, (tbt, speed)) = (&self.timing, self.pace());
        eprintln!("TTFT: {:.2} ms", ms(timing.ttft));
        eprintln!("Avg TBT: {tbt:.2} ms ({speed:.1} tokens/sec)");
        eprintln!("stop: {}", self.reason.name());
        eprintln!(
            "prompt: {} tokens, generated: {} tokens, load: {:.2} ms, {}",
            timing.prompt_tokens,
            timing.tokens,
            ms(self.loading),
            session.backend().name()
        );
        if let Some(Drafts { passes, drafted, accepted }) = session.drafts() {
            let percent = 100.0 * accepted as f64 / drafted.max(1) as f64;
            let each = (passes + accepted) as f64 / passes.max(1) as f64;
            eprintln!(
                "draft: {accepted} of {drafted} tokens accepted ({percent:.1} %), {each:.2} tokens in each of {passes} \
                 passes"
            );
        }
    }
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}
