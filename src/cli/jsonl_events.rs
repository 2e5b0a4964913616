//! Prints evictions and device switches: a line on stderr with `-v`, a JSON line with `--format jsonl`.

use super::args::{Format, OutputArgs};
use super::generation_report::milliseconds;
use super::terminal::{Verbosity, write_stdout};
use crate::run::session::{Session, SessionEvent};
use files::print_stderr;
use serde_json::{Value, json};

/// Prints the events of a session as the flags select.
pub fn print_events(session: &mut Session, output: &OutputArgs) {
    let (format, verbosity) = (output.format, output.verbosity());
    session.set_observer(Box::new(move |event| {
        if verbosity == Verbosity::Verbose {
            print_stderr!("{}", event_text(event));
        }
        if format == Format::Jsonl {
            // If the reader is gone, the next token reports it.
            let _ = write_stdout(&format!("{}\n", event_json(event)));
        }
    }));
}

fn event_text(event: &SessionEvent) -> String {
    match event {
        SessionEvent::Evicted(e) => format!(
            "evicted {} tokens, {} left, at position {} ({}), {:.2} ms",
            e.removed,
            e.slots,
            e.position,
            e.why.name(),
            milliseconds(e.took)
        ),
        SessionEvent::Switched(s) => format!(
            "switched from {} to {} at position {} ({}), {} tokens, {} bytes copied, {:.2} ms",
            s.from,
            s.to,
            s.position,
            s.why,
            s.slots,
            s.bytes,
            milliseconds(s.took)
        ),
    }
}

fn event_json(event: &SessionEvent) -> Value {
    match event {
        SessionEvent::Evicted(e) => json!({
            "t": "evict", "removed": e.removed, "slots": e.slots, "position": e.position, "why": e.why.name(),
            "ms": milliseconds(e.took),
        }),
        SessionEvent::Switched(s) => json!({
            "t": "switch", "from": s.from, "to": s.to, "position": s.position, "why": s.why, "slots": s.slots,
            "bytes": s.bytes, "ms": milliseconds(s.took),
        }),
    }
}
