//! Prints evictions and device switches: a line on stderr with `-v`, a JSON line with `--format jsonl`.

use super::args::{Format, OutputArgs};
use super::generation_report::ms;
use super::terminal::{Verbosity, put};
use crate::run::session::{Event, Session};
use files::say;
use serde_json::{Value, json};

/// Prints the events of a session as the flags select.
pub fn watch(session: &mut Session, output: &OutputArgs) {
    let (format, verbosity) = (output.format, output.verbosity());
    session.watch(Box::new(move |event| {
        if verbosity == Verbosity::Verbose {
            say!("{}", line(event));
        }
        if format == Format::Jsonl {
            // If the reader is gone, the next token reports it.
            let _ = put(&format!("{}\n", json(event)));
        }
    }));
}

fn line(event: &Event) -> String {
    match event {
        Event::Evicted(e) => format!(
            "evicted {} tokens, {} left, at position {} ({}), {:.2} ms",
            e.removed,
            e.slots,
            e.position,
            e.why.name(),
            ms(e.took)
        ),
        Event::Switched(s) => format!(
            "switched from {} to {} at position {} ({}), {} tokens, {} bytes copied, {:.2} ms",
            s.from,
            s.to,
            s.position,
            s.why,
            s.slots,
            s.bytes,
            ms(s.took)
        ),
    }
}

fn json(event: &Event) -> Value {
    match event {
        Event::Evicted(e) => json!({
            "t": "evict", "removed": e.removed, "slots": e.slots, "position": e.position, "why": e.why.name(),
            "ms": ms(e.took),
        }),
        Event::Switched(s) => json!({
            "t": "switch", "from": s.from, "to": s.to, "position": s.position, "why": s.why, "slots": s.slots,
            "bytes": s.bytes, "ms": ms(s.took),
        }),
    }
}
