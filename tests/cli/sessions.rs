//! Session files: texts and conversations that continue as if never interrupted, refused files, killed saves.

mod commands;
mod conversations;
mod cuts;
mod killed;
mod refused;

use crate::support::paths;
use antigravity::{Engine, EngineOptions};
use numeric::kv::KvTypes;
use serde_json::Value;

/// The bundled model with a cache of `slots` slots.
fn engine(kv_types: KvTypes, slots: usize) -> Engine {
    let options =
        EngineOptions { kv_types, max_seq_len: slots, threads: 2, ..EngineOptions::new(paths::model()) };
    Engine::load(options).expect("the bundled model")
}

/// Output of a command that ran with `--format jsonl`.
#[derive(Debug, Default, PartialEq)]
struct Lines {
    ids: Vec<u64>,
    text: String,
    /// The last line of each answer.
    stats: Vec<Value>,
    evictions: usize,
}

impl Lines {
    fn parse(out: &str) -> Self {
        let mut lines = Self::default();
        for line in out.lines().map(|l| serde_json::from_str::<Value>(l).expect("JSON")) {
            match line["t"].as_str() {
                Some("token") => {
                    lines.ids.extend(line["id"].as_u64());
                    lines.text += line["text"].as_str().expect("a text");
                }
                Some("stats") => lines.stats.push(line),
                Some("evict") => lines.evictions += 1,
                other => panic!("{other:?}"),
            }
        }
        lines
    }

    /// Of each answer.
    fn stat(&self, name: &str) -> Vec<&Value> {
        self.stats.iter().map(|s| &s[name]).collect()
    }

    /// The tokens that were computed before the first answer.
    fn computed(&self) -> u64 {
        self.stats[0]["prompt_tokens"].as_u64().expect("a number")
    }

    fn then(mut self, more: Self) -> Self {
        self.ids.extend(more.ids);
        self.text += &more.text;
        self.stats.extend(more.stats);
        self.evictions += more.evictions;
        self
    }
}
