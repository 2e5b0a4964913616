//! One generation: its session, its streamed text, and its report.

use super::args::{Format, OutputArgs};
use super::jsonl_events;
use super::terminal::{Style, style_text, write_stdout};
use crate::model::trace::{Trace, fnv1a_digest};
use crate::run::engine::Engine;
use crate::run::generate::stream::{Timing, TokenStream};
use crate::run::session::{DraftCounts, Session, StopReason};
use files::{Error, Result, print_stderr};
use serde_json::{Value, json};
use std::time::Duration;
use text::sampler::{Logprob, TokenLogprobs};
use text::tokenizer::Tokenizer;

/// Opens an empty session, with events and trace as the flags select.
pub fn open_session(engine: &Engine, output: &OutputArgs) -> Result<Session> {
    let mut session = engine.session()?;
    jsonl_events::print_events(&mut session, output);
    if output.trace.is_some() {
        session.set_trace(Some(Trace::default()));
    }
    Ok(session)
}

/// Writes the trace to the file of `--trace`, with the stop reason of the last text if there is one.
pub fn write_trace(session: &mut Session, output: &OutputArgs, reason: Option<StopReason>) -> Result<()> {
    let (Some(file), Some(mut trace)) = (&output.trace, session.set_trace(None)) else { return Ok(()) };
    if let Some(reason) = reason {
        trace.add_mark(&format!("stop: {}", reason.name()));
    }
    trace.write_chrome(file)
}

/// Prints the pieces as they are generated, as text each as `render` returns it. Returns the error if stdout could not be
/// written; the text then ends as after an interrupt, and can be saved.
pub fn print_stream(
    stream: &mut TokenStream<'_>,
    format: Format,
    mut render: impl FnMut(&str) -> String,
) -> Result<Option<Error>> {
    let mut lost = None;
    while let Some(piece) = stream.next() {
        let piece = piece?;
        let text = render(&piece);
        if lost.is_none() {
            lost = match format {
                Format::Text => write_stdout(&text).err(),
                Format::Jsonl => write_stdout(&token_line(Some(stream), "token", &piece)).err(),
            };
            if lost.is_some() {
                stream.cancel();
            }
        }
    }
    Ok(lost)
}

/// The line of `--format jsonl` for one piece, with the stream's last token if there is a stream.
pub fn token_line(stream: Option<&TokenStream<'_>>, kind: &str, piece: &str) -> String {
    let mut line = json!({"t": kind, "id": stream.and_then(TokenStream::last_token), "text": piece});
    if let Some((logprobs, stream)) = stream.and_then(|stream| Some((stream.logprobs()?, stream))) {
        line["logprobs"] = logprobs_json(stream.tokenizer(), logprobs);
    }
    format!("{line}\n")
}

/// The log probabilities of one token and of the most probable ones, as JSON. An incomplete character is U+FFFD in a
/// token's text; the logarithm of zero is null.
pub fn logprobs_json(tokenizer: &Tokenizer, of: &TokenLogprobs) -> Value {
    let entry =
        |p: &Logprob| json!({"id": p.id, "text": tokenizer.pieces().token_text(p.id), "logprob": p.logprob});
    json!({"chosen": entry(&of.chosen), "top": of.top.iter().map(entry).collect::<Vec<_>>()})
}

/// Times and stop reason of one generation.
#[derive(Clone, Copy)]
pub struct GenerationReport {
    pub timing: Timing,
    pub reason: StopReason,
    pub loading: Duration,
    pub seed: u64,
}

impl GenerationReport {
    /// The report of a stream that has ended.
    pub fn new(stream: &TokenStream<'_>, loading: Duration, seed: u64) -> Self {
        let reason = stream.stop_reason().unwrap_or(StopReason::Interrupt);
        Self { timing: stream.timing(), reason, loading, seed }
    }

    /// Average milliseconds between tokens, and tokens per second.
    fn decode_speed(&self) -> (f64, f64) {
        let tbt = self.timing.mean_token_time().unwrap_or(Duration::ZERO);
        (milliseconds(tbt), if tbt.is_zero() { 0.0 } else { 1.0 / tbt.as_secs_f64() })
    }

    /// Computed prompt tokens per second, up to the first generated token.
    fn prompt_speed(&self) -> f64 {
        self.timing.prompt_tokens as f64 / self.timing.ttft.as_secs_f64().max(1e-9)
    }

    /// The last line of `--format jsonl`; `logits` is the digest of the last logits, as in the golden files.
    pub fn stats_line(&self, session: &Session) -> String {
        let (timing, (tbt, speed)) = (&self.timing, self.decode_speed());
        let mut line = json!({
            "t": "stats", "ttft_ms": milliseconds(timing.ttft), "tbt_ms": tbt, "tokens_per_second": speed,
            "prompt_tokens": timing.prompt_tokens, "prompt_tokens_per_second": self.prompt_speed(),
            "tokens": timing.tokens, "load_ms": milliseconds(self.loading), "stop": self.reason.name(), "seed": self.seed,
            "logits": format!("{:016x}", fnv1a_digest(session.logits())),
        });
        if let Some(drafts) = session.drafts() {
            line["draft"] = drafts_json(drafts);
        }
        format!("{line}\n")
    }

    /// Prints the report on stderr; the first two lines have the specification's format.
    pub fn print_stats(&self, session: &Session) {
        let (timing, (tbt, speed)) = (&self.timing, self.decode_speed());
        let text = format!(
            "TTFT: {:.2} ms\nAvg TBT: {tbt:.2} ms ({speed:.1} tokens/sec)\nstop: {}\nprompt: {} tokens ({:.1} tokens/sec), \
             generated: {} tokens, load: {:.2} ms, {}",
            milliseconds(timing.ttft),
            self.reason.name(),
            timing.prompt_tokens,
            self.prompt_speed(),
            timing.tokens,
            milliseconds(self.loading),
            session.device_name()
        );
        print_stderr!("{}", style_text(Style::Dim, &text));
        session.drafts().into_iter().for_each(print_drafts);
    }
}

/// Statistics of drafts as JSON. Each accepted token saved a pass, so (`passes` + `accepted`) / `passes` is the number
/// of tokens per pass.
fn drafts_json(drafts: DraftCounts) -> Value {
    let DraftCounts { passes, drafted, accepted, model_drafted, model_accepted } = drafts;
    let mut json = json!({"passes": passes, "drafted": drafted, "accepted": accepted});
    if model_drafted > 0 {
        json["model_drafted"] = model_drafted.into();
        json["model_accepted"] = model_accepted.into();
    }
    json
}

/// Prints the statistics of drafts on stderr.
pub fn print_drafts(drafts: DraftCounts) {
    let DraftCounts { passes, drafted, accepted, model_drafted, model_accepted } = drafts;
    let percent = |some: usize, all: usize| 100.0 * some as f64 / all.max(1) as f64;
    let each = (passes + accepted) as f64 / passes.max(1) as f64;
    let model = match model_drafted {
        0 => String::new(),
        n => format!("; draft model: {model_accepted} of {n} ({:.1} %)", percent(model_accepted, n)),
    };
    print_stderr!(
        "draft: {accepted} of {drafted} tokens accepted ({:.1} %), {each:.2} tokens per pass in {passes} passes{model}",
        percent(accepted, drafted)
    );
}

/// Milliseconds.
pub fn milliseconds(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}
