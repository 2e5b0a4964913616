//! The results of a load, speeds, latencies and fairness, and their tables.

use super::load::{LoadResult, RequestTiming};
use crate::table::{Spread, UNKNOWN, format_fixed, format_short, format_table, to_cells};
use serde_json::{Value, json};

/// Percentiles with their names.
const PARTS: [(&str, f64); 3] = [("p50", 0.50), ("p95", 0.95), ("p99", 0.99)];

/// The figures of one load.
pub fn summarise_load(found: &LoadResult) -> Value {
    let quiet = (0.0, found.quiet);
    let shares: Vec<f64> =
        (0..found.clients).map(|client| tokens(&found.requests, Some(client), quiet)).collect();
    let (least, most) =
        (shares.iter().copied().fold(f64::MAX, f64::min), shares.iter().copied().fold(0.0, f64::max));
    let waits = found.requests.iter().filter(|a| a.sent < found.quiet).filter_map(time_to_first_token);
    let failed = found.requests.iter().chain(&found.long).filter_map(|a| a.error.as_ref());
    let mut figures = json!({
        "clients": found.clients, "seconds": found.quiet,
        "tokens_per_second": tokens(&found.requests, None, quiet) / found.quiet,
        "requests": found.requests.iter().filter(|a| a.error.is_none()).count(),
        "first_s": parts(waits.collect()), "between_s": parts(gaps(&found.requests, quiet)),
        "fairness": (most > 0.0).then(|| least / most),
        "errors": failed.clone().count(), "error": failed.clone().next(),
        "prompt_tokens": found.requests.iter().find_map(|a| a.prompt),
    });
    if let Some((long, wait)) = found.long.as_ref().and_then(|long| Some((long, time_to_first_token(long)?)))
    {
        let meanwhile = (long.sent, long.sent + wait);
        figures["long"] = json!({
            "prompt_tokens": long.prompt, "first_s": wait,
            "tokens_per_second": tokens(&found.requests, None, meanwhile) / wait,
            "between_s": parts(gaps(&found.requests, meanwhile)),
        });
    }
    figures
}

/// Seconds from the request to the first piece of its text.
fn time_to_first_token(asked: &RequestTiming) -> Option<f64> {
    Some(asked.pieces.first()? - asked.sent)
}

/// Number of tokens that arrived within a time, of one client or all. A piece of text may have several tokens, so all
/// pieces of an answer count the same share of its tokens.
fn tokens(asked: &[RequestTiming], client: Option<usize>, (from, to): (f64, f64)) -> f64 {
    let of = |asked: &RequestTiming| {
        let within = asked.pieces.iter().filter(|at| (from..to).contains(*at)).count() as f64;
        let whole = asked.pieces.len() as f64;
        asked.tokens.filter(|_| whole > 0.0).map_or(within, |tokens| within * tokens as f64 / whole)
    };
    asked.iter().filter(|a| client.is_none_or(|client| client == a.client)).map(of).sum()
}

/// Seconds between the pieces of answers, for gaps that overlap a time.
fn gaps(asked: &[RequestTiming], (from, to): (f64, f64)) -> Vec<f64> {
    let pairs = asked.iter().flat_map(|a| a.pieces.windows(2));
    pairs.filter(|pair| pair[1] > from && pair[0] < to).map(|pair| pair[1] - pair[0]).collect()
}

fn parts(mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    let part = |part: f64| {
        let at = (values.len() as f64 * part).ceil() as usize;
        values.get(at.saturating_sub(1)).copied()
    };
    PARTS.iter().map(|(name, of)| (name.to_string(), json!(part(*of)))).collect()
}

/// The tables of a record: each server and number of clients, and the effect of the long prompt.
pub fn tables(record: &Value) -> String {
    let rows = rows(record);
    let mut text = format_table(
        to_cells([
            "server",
            "clients",
            "tokens/s",
            "TTFT p50 (ms)",
            "p95",
            "p99",
            "between tokens p50 (ms)",
            "p95",
            "p99",
            "least / most",
            "errors",
        ]),
        rows.iter().map(|(server, clients, runs)| {
            let mut line =
                vec![server.clone(), clients.to_string(), format_short(median(runs, &["tokens_per_second"]))];
            line.extend(milliseconds(runs, &["first_s"]));
            line.extend(milliseconds(runs, &["between_s"]));
            line.push(format_fixed(median(runs, &["fairness"]), 2));
            line.push(runs.iter().filter_map(|run| run["errors"].as_u64()).sum::<u64>().to_string());
            line
        }),
    );
    text += &beside_long(&rows);
    text + &ratios(&rows)
}

/// The table of the other clients during a long prompt, if there was one.
fn beside_long(rows: &[Row<'_>]) -> String {
    let long = |(.., runs): &&Row<'_>| runs.iter().any(|run| run["long"].is_object());
    let mut long = rows.iter().filter(long).peekable();
    if long.peek().is_none() {
        return String::new();
    }
    let titles = [
        "server",
        "clients",
        "its tokens",
        "its TTFT (s)",
        "tokens/s of the others",
        "between tokens p50 (ms)",
        "p95",
        "p99",
        "p50 / quiet",
        "p95 / quiet",
    ];
    let line = |(server, clients, runs): &Row<'_>| {
        let of = |path: &[&str], digits| format_fixed(median(runs, path), digits);
        let mut line = vec![server.clone(), clients.to_string(), of(&["long", "prompt_tokens"], 0)];
        line.push(of(&["long", "first_s"], 2));
        line.push(format_short(median(runs, &["long", "tokens_per_second"])));
        line.extend(milliseconds(runs, &["long", "between_s"]));
        line.extend(["p50", "p95"].map(|part| {
            let with = median(runs, &["long", "between_s", part]);
            let ratio = with.zip(median(runs, &["between_s", part])).map(|(with, without)| with / without);
            format_fixed(ratio, 2)
        }));
        line
    };
    format!("\nDuring a long prompt\n\n{}", format_table(to_cells(titles), long.map(line)))
}

type Row<'a> = (String, u64, Vec<&'a Value>);

/// The runs grouped by server and number of clients.
fn rows(record: &Value) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = Vec::new();
    for run in record["runs"].as_array().into_iter().flatten() {
        let (server, clients) =
            (run["server"].as_str().unwrap_or(UNKNOWN), run["clients"].as_u64().unwrap_or(0));
        match rows.iter_mut().find(|row| row.0 == server && row.1 == clients) {
            Some(row) => row.2.push(run),
            None => rows.push((server.into(), clients, vec![run])),
        }
    }
    rows
}

/// The median of a number over runs.
fn median(runs: &[&Value], path: &[&str]) -> Option<f64> {
    let of = |run: &&Value| path.iter().try_fold(*run, |value, key| value.get(key))?.as_f64();
    Spread::of(runs.iter().filter_map(of)).map(|spread| spread.median)
}

fn milliseconds(runs: &[&Value], path: &[&str]) -> Vec<String> {
    PARTS
        .iter()
        .map(|(part, _)| format_short(median(runs, &[path, &[part]].concat()).map(|s| s * 1000.0)))
        .collect()
}

/// The ratio of tokens/s of the first server to the second, if there are two.
fn ratios(rows: &[Row<'_>]) -> String {
    let Some((ours, theirs)) = rows.first().zip(rows.iter().find(|row| row.0 != rows[0].0)) else {
        return String::new();
    };
    let (ours, theirs) = (&ours.0, &theirs.0);
    let speed = |server: &str, clients| {
        let row = rows.iter().find(|row| row.0 == server && row.1 == clients);
        row.and_then(|row| median(&row.2, &["tokens_per_second"]))
    };
    let line = |(_, clients, _): &Row<'_>| {
        let both = speed(ours, *clients).zip(speed(theirs, *clients)).filter(|(_, theirs)| *theirs > 0.0);
        let ratio = both.map(|(ours, theirs)| ours / theirs);
        format!("{clients} clients: {} tokens/s of {ours} for one of {theirs}\n", format_fixed(ratio, 2))
    };
    let lines: String = rows.iter().filter(|row| row.0 == *ours).map(line).collect();
    format!("\n{lines}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_long_prompt_does_not_count_in_the_results_of_a_load() {
        let request = |client: usize, sent: f64, pieces: &[f64], tokens: u64| RequestTiming {
            client,
            sent,
            pieces: pieces.into(),
            tokens: Some(tokens),
            ..RequestTiming::default()
        };
        let pieces = [0.5, 1.0, 1.5, 4.5];
        let failed = RequestTiming { error: Some("no".into()), ..RequestTiming::default() };
        let found = LoadResult {
            clients: 2,
            // The second text has two tokens in each piece.
            requests: vec![request(0, 0.25, &pieces, 4), request(1, 0.0, &pieces, 8), failed],
            long: Some(request(usize::MAX, 2.0, &[5.0], 1)),
            quiet: 2.0,
        };
        let figures = summarise_load(&found);
        assert_eq!((&figures["tokens_per_second"], &figures["fairness"]), (&json!(4.5), &json!(0.5)));
        assert_eq!((&figures["errors"], &figures["error"]), (&json!(1), &json!("no")));
        assert_eq!((&figures["first_s"]["p50"], &figures["first_s"]["p99"]), (&json!(0.25), &json!(0.5)));
        // The gap in which the prompt came is one of both.
        assert_eq!(figures["between_s"], json!({"p50": 0.5, "p95": 3.0, "p99": 3.0}));
        assert_eq!(
            (&figures["long"]["first_s"], &figures["long"]["tokens_per_second"]),
            (&json!(3.0), &json!(1.0))
        );
    }

    #[test]
    fn tables_have_medians_and_a_ratio() {
        let run = |server: &str, speed: f64| {
            json!({"server": server, "clients": 8, "tokens_per_second": speed, "errors": 1,
            "between_s": {"p50": 0.05}, "long": {"between_s": {"p50": 0.075}}})
        };
        let text = tables(
            &json!({"runs": [run("a", 1.0), run("b", 2.0), run("a", 3.0), run("b", 2.0), run("a", 9.0)]}),
        );
        let line = |n: usize| -> Vec<String> {
            text.lines().nth(n).unwrap().split('|').map(|c| c.trim().into()).collect()
        };
        assert_eq!(line(2)[1..5], ["a", "8", "3.00", "–"]);
        assert_eq!((line(2)[7].as_str(), line(2)[11].as_str(), line(9)[9].as_str()), ("50.00", "3", "1.50"));
        assert!(text.ends_with("\n8 clients: 1.50 tokens/s of a for one of b\n"), "{text}");
        assert!(!tables(&json!({"runs": [run("a", 1.0)]})).contains("for one of"));
    }
}
