//! Cold and warm starts: from the start of the process to its first token, by the device's own clock.

use crate::deploy::PROGRAM;
use crate::device::Device;
use crate::device::shell::{self, quote};
use crate::error::{Error, Result};
use crate::{run, sh};
use serde_json::{Value, json};

/// One start, in milliseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Start {
    /// From the start of the process to the first token; `None` where the shell's clock counts seconds only.
    pub first_token: Option<f64>,
    /// Of that, by the program's own clock: loading, and prompt to token.
    pub load: f64,
    pub ttft: f64,
}

/// A start after the model's files were dropped from the page cache.
pub struct Cold {
    pub start: Option<Start>,
    /// What did not go as it should, in a sentence.
    pub note: Option<String>,
}

/// Prints `began TIME` and `first TIME` around the program's first line of output, then the rest of it.
const TIMED: &str = "\
now() { t=$EPOCHREALTIME; [ -n \"$t\" ] || t=$(date +%s.%N 2>/dev/null); echo \"$1 $t\"; }\n\
now began\nenv \"$@\" </dev/null | { read -r l; now first; cat; }";

const UNSEEN: &str =
    "The model's files were dropped from the page cache; whether they are gone, the system does not say.";

/// One token of a short prompt.
const GENERATE: &[&str] = &[
    "generate",
    "--prompt",
    "Once upon a time",
    "--num-tokens",
    "1",
    "--temperature",
    "0",
    "--ignore-eos",
    "--format",
    "jsonl",
    "--quiet",
];

pub fn warm(device: &dyn Device, dir: &str) -> Result<Start> {
    let set = run::environment(device, dir).into_iter().map(|(n, v)| quote(&format!("{n}={v}")));
    let set = set.collect::<Vec<_>>().join(" ");
    let words = GENERATE.iter().map(|w| quote(w)).collect::<Vec<_>>().join(" ");
    let dir = quote(dir);
    let script = format!("cd {dir} && set -- {set} $ANTIGRAVITY_EMULATOR ./{PROGRAM} {words}\n{TIMED}");
    let answer = shell::capture(device, &script)?;
    parse(&answer.stdout).ok_or_else(|| {
        let why = answer.stderr.lines().rfind(|l| !l.trim().is_empty()).unwrap_or("it printed no times");
        Error::Failed(format!("{}: `generate` did not start: {}", device.name(), sh::one_line(why)))
    })
}

pub fn cold(device: &dyn Device, dir: &str) -> Result<Cold> {
    let program = run::program(device, dir, ["bench", "--drop-cache"].map(String::from).into());
    let said = shell::capture_program(device, &program)?.stdout;
    let note = match serde_json::from_str::<Value>(&said).unwrap_or_default()["dropped"] {
        Value::Bool(true) => None,
        // A start from who knows which pages is no cold one.
        Value::Bool(false) => {
            let note = "The system keeps the model's files in its page cache, so no start was a cold one.";
            return Ok(Cold { start: None, note: Some(note.into()) });
        }
        _ => Some(UNSEEN.into()),
    };
    Ok(Cold { start: Some(warm(device, dir)?), note })
}

/// Reads what [`TIMED`] printed.
fn parse(text: &str) -> Option<Start> {
    // Some shells write the fraction with the comma of the user's language.
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

impl Start {
    pub fn json(&self) -> Value {
        json!({"first_token_ms": self.first_token, "load_ms": self.load, "ttft_ms": self.ttft})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATS: &str = "{\"t\":\"stats\",\"load_ms\":10.5,\"ttft_ms\":2.25}\n";

    #[test]
    fn times_are_read() {
        let start = parse(&format!("began 1700000000.100000\nfirst 1700000000.350000\n{STATS}")).unwrap();
        assert!(start.first_token.is_some_and(|ms| (ms - 250.0).abs() < 0.01));
        assert_eq!((start.load, start.ttft), (10.5, 2.25));
        assert!(parse(&format!("began 1,5\nfirst 2,0\n{STATS}")).unwrap().first_token == Some(500.0));
    }

    #[test]
    fn clocks_without_fractions_give_no_time() {
        for (a, b) in
            [("1.%N", "2.%N"), ("1.N", "2.5"), ("", ""), ("2.5", "1.5"), ("1.", "2."), ("-1.5", "2.0")]
        {
            let start = parse(&format!("began {a}\nfirst {b}\n{STATS}")).unwrap();
            assert_eq!(start.first_token, None, "{a} {b}");
        }
    }

    #[test]
    fn a_start_without_its_last_line_is_none() {
        for text in ["", "began 1.0\nfirst 2.0\n", "{\"t\":\"stats\"}\n", "{\"t\":\"token\"}\n", "\u{1b}[2J"]
        {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
