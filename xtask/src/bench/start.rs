//! Cold and warm starts: the time from the start of the process to its first token, by the device's clock.

use crate::deploy::PROGRAM;
use crate::device::Device;
use crate::device::shell::{self, quote};
use crate::error::{Error, Result};
use crate::{command, run};
use serde::Serialize;
use serde_json::Value;

/// One start, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Start {
    /// Time from the start of the process to the first token; `None` if the shell's clock has only seconds.
    #[serde(rename = "first_token_ms")]
    pub first_token: Option<f64>,
    /// By the program's clock: loading, and below from the prompt to the first token.
    #[serde(rename = "load_ms")]
    pub load: f64,
    #[serde(rename = "ttft_ms")]
    pub ttft: f64,
}

/// A start after the model's files were dropped from the page cache.
pub struct ColdStart {
    pub start: Option<Start>,
    /// A sentence about a start that was perhaps not cold.
    pub note: Option<String>,
}

/// Script: prints `began TIME`, and `first TIME` after the program's first line of output, then the rest of the output.
const TIMED: &str = "\
now() { t=$EPOCHREALTIME; [ -n \"$t\" ] || t=$(date +%s.%N 2>/dev/null); echo \"$1 $t\"; }\n\
now began\nenv \"$@\" </dev/null | { read -r l; now first; cat; }";

const UNSEEN: &str =
    "The model's files were dropped from the page cache; the system does not report whether they are gone.";

/// One token of a short prompt.
const GENERATE: &str = "generate --num-tokens 1 --temperature 0 --ignore-eos --format jsonl --quiet";

pub fn measure_warm(device: &dyn Device, dir: &str) -> Result<Start> {
    let set = run::program_environment(device, dir).into_iter().map(|(n, v)| quote(&format!("{n}={v}")));
    let set = set.collect::<Vec<_>>().join(" ");
    let words =
        GENERATE.split(' ').chain(["--prompt", "Once upon a time"]).map(quote).collect::<Vec<_>>().join(" ");
    let dir = quote(dir);
    let script = format!("cd {dir} && set -- {set} $ANTIGRAVITY_EMULATOR ./{PROGRAM} {words}\n{TIMED}");
    let answer = shell::capture(device, &script)?;
    parse_start(&answer.stdout).ok_or_else(|| {
        let why = command::last_line(&answer.stderr).unwrap_or("it printed no time".into());
        Error::Failed(format!("{}: `generate` did not start: {why}", device.name()))
    })
}

pub fn measure_cold(device: &dyn Device, dir: &str) -> Result<ColdStart> {
    let program = run::deployed_program(device, dir, ["bench", "--drop-cache"].map(String::from).into());
    let answer = shell::capture_program(device, &program)?;
    if answer.code != 0 {
        let note = "No start was cold: this program cannot drop the model's files from the page cache.";
        return Ok(ColdStart { start: None, note: Some(note.into()) });
    }
    let note = match serde_json::from_str::<Value>(&answer.stdout).unwrap_or_default()["dropped"] {
        Value::Bool(true) => None,
        // Some pages may still be cached, so the start would not be cold.
        Value::Bool(false) => {
            let note = "The system keeps the model's files in its page cache, so no start was cold.";
            return Ok(ColdStart { start: None, note: Some(note.into()) });
        }
        _ => Some(UNSEEN.into()),
    };
    Ok(ColdStart { start: Some(measure_warm(device, dir)?), note })
}

/// Parses the output of [`TIMED`].
fn parse_start(text: &str) -> Option<Start> {
    // Some shells write a decimal comma.
    let time = |key: &str| {
        let word = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(' '))?.trim();
        let (whole, part) = word.split_once(['.', ','])?;
        let digits = !part.is_empty() && [whole, part].iter().all(|p| p.bytes().all(|b| b.is_ascii_digit()));
        digits.then(|| format!("{whole}.{part}").parse::<f64>().ok())?
    };
    let stats = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let stats = stats.into_iter().find(|v| v["t"] == "stats")?;
    let first_token = time("first").zip(time("began")).map(|(b, a)| (b - a) * 1e3);
    Some(Start {
        first_token: first_token.filter(|ms| (0.0..1e9).contains(ms)),
        load: stats["load_ms"].as_f64()?,
        ttft: stats["ttft_ms"].as_f64()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATS: &str = "{\"t\":\"stats\",\"load_ms\":10.5,\"ttft_ms\":2.25}\n";

    #[test]
    fn times_are_read_where_clocks_have_fractions() {
        let start =
            parse_start(&format!("began 1700000000.100000\nfirst 1700000000.350000\n{STATS}")).unwrap();
        assert!(start.first_token.is_some_and(|ms| (ms - 250.0).abs() < 0.01));
        assert_eq!((start.load, start.ttft), (10.5, 2.25));
        assert!(parse_start(&format!("began 1,5\nfirst 2,0\n{STATS}")).unwrap().first_token == Some(500.0));
        for (a, b) in [("1.%N", "2.%N"), ("1.N", "2.5"), ("", ""), ("2.5", "1.5"), ("-1.5", "2.0")] {
            let start = parse_start(&format!("began {a}\nfirst {b}\n{STATS}")).unwrap();
            assert_eq!(start.first_token, None, "{a} {b}");
        }
        for text in ["began 1.0\nfirst 2.0\n", "{\"t\":\"stats\"}\n", "\u{1b}[2J"] {
            assert_eq!(parse_start(text), None, "{text:?}");
        }
    }
}
