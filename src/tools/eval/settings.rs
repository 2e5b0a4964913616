//! Settings that `eval` compares: `key=value,…` on top of the flags.

use crate::run::eviction::Policy;
use crate::run::options::{BackendKind, EngineOptions};
use clap::ValueEnum;
use files::{Error, Result};
use numeric::kv::{KvType, KvTypes};
use std::str::FromStr;

/// Number of slots that an eviction keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EvalWindow {
    Slots(usize),
    /// A percentage of the prompt or chunk, from 1 to 100.
    Percent(usize),
}

impl EvalWindow {
    /// The number of slots for this many tokens; at least one.
    pub fn to_slots(self, tokens: usize) -> usize {
        match self {
            EvalWindow::Slots(n) => n,
            EvalWindow::Percent(p) => (tokens.saturating_mul(p) / 100).max(1),
        }
    }
}

impl FromStr for EvalWindow {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        let parsed = match s.strip_suffix('%') {
            Some(share) => share.parse().ok().filter(|p| (1..=100).contains(p)).map(EvalWindow::Percent),
            None => s.parse().ok().map(EvalWindow::Slots),
        };
        parsed.ok_or_else(|| format!("window {s:?}: use a number of slots, or a share from 1% to 100%"))
    }
}

impl std::fmt::Display for EvalWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            EvalWindow::Slots(n) => write!(f, "{n}"),
            EvalWindow::Percent(p) => write!(f, "{p}%"),
        }
    }
}

/// Settings of one table row.
#[derive(Clone)]
pub struct EvalSettings {
    options: EngineOptions,
    window: EvalWindow,
}

impl EvalSettings {
    /// Settings from the flags. Low memory evicts nothing, because results must be reproducible.
    pub fn from_flags(mut options: EngineOptions) -> Self {
        options.eviction.memory_threshold = 0;
        let window = EvalWindow::Slots(options.eviction.window);
        Self { options, window }
    }

    /// These settings with those in `text` replaced; `flag` is named in errors.
    pub fn with_changes(&self, flag: &str, text: &str) -> Result<Self> {
        let mut changed = self.clone();
        for part in text.split(',') {
            changed.set_value(part).map_err(|what| Error::Usage(format!("{flag} {text}: {what}")))?;
        }
        Ok(changed)
    }

    fn set_value(&mut self, part: &str) -> std::result::Result<(), String> {
        let Some((key, value)) = part.split_once('=') else {
            return Err(format!("{part:?} is not of the form key=value"));
        };
        let o = &mut self.options;
        let said = |e: Error| e.to_string();
        let kv = || value.parse::<KvType>().map_err(said);
        match key.trim() {
            "kv" => o.kv_types = KvTypes::same(kv()?),
            "k" => o.kv_types.k = kv()?,
            "v" => o.kv_types.v = kv()?,
            "weights" => o.weight_type = value.parse().map_err(said)?,
            "policy" => o.eviction.policy = value.parse().map_err(said)?,
            "window" => self.window = value.parse()?,
            "prefix" => {
                let wrong = || format!("prefix {value:?}: use a number of tokens");
                o.eviction.prefix = Some(value.parse().map_err(|_| wrong())?);
            }
            "backend" => (o.backend, o.split) = (BackendKind::from_str(value, true)?, None),
            key => {
                let known = "kv, k, v, weights, policy, window, prefix or backend";
                return Err(format!("no setting {key:?}; use {known}"));
            }
        }
        Ok(())
    }

    /// The options of the model and the cache.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Options for a text of this many tokens: a policy evicts as soon as its window is full.
    pub fn for_text(&self, tokens: usize) -> Result<EngineOptions> {
        let mut o = self.with_window_for(tokens)?;
        o.max_seq_len = match o.eviction.policy {
            Policy::None => tokens,
            _ => tokens.min(o.eviction.eviction_limit()),
        };
        Ok(o)
    }

    /// Options for a prompt and an answer of these lengths: the cache holds the whole prompt before it is evicted down
    /// to the window.
    pub fn for_prompt(&self, prompt: usize, answer: usize) -> Result<EngineOptions> {
        let mut o = self.with_window_for(prompt)?;
        o.max_seq_len = prompt + answer;
        Ok(o)
    }

    fn with_window_for(&self, tokens: usize) -> Result<EngineOptions> {
        let mut o = self.options.clone();
        o.eviction.window = self.window.to_slots(tokens);
        if o.eviction.policy != Policy::None {
            o.eviction.validate().map_err(|e| Error::Usage(format!("{self}: {e}")))?;
        }
        Ok(o)
    }

    /// The policy with its numbers: `snapkv 25%`, `sliding 25% prefix 4`, `none`.
    pub fn describe_policy(&self) -> String {
        let e = &self.options.eviction;
        let sinks = e.policy.default_prefix();
        match (e.policy, e.prefix.unwrap_or(sinks)) {
            (Policy::None, _) => e.policy.name().into(),
            (policy, 0) => format!("{} {}", policy.name(), self.window),
            (policy, prefix) => format!("{} {} prefix {prefix}", policy.name(), self.window),
        }
    }
}

impl std::fmt::Display for EvalSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let o = &self.options;
        write!(f, "kv {}, weights {}", o.kv_types, o.weight_type)?;
        if o.eviction.policy != Policy::None {
            write!(f, ", policy {}", self.describe_policy())?;
        }
        match o.backend.to_possible_value() {
            Some(name) if o.backend != BackendKind::Cpu => write!(f, ", backend {}", name.get_name()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> EvalSettings {
        EvalSettings::from_flags(EngineOptions::new("nowhere"))
    }

    #[test]
    fn later_settings_replace_those_of_the_flags() {
        let all = "kv=f16,v=q8,weights=f32,policy=snapkv,window=25%,prefix=4,backend=auto";
        let s = flags().with_changes("--settings", all).expect("all keys are known");
        assert_eq!(s.to_string(), "kv f16/q8, weights f32, policy snapkv 25% prefix 4, backend auto");
        assert_eq!(flags().to_string(), "kv q4, weights auto");
        assert_eq!(
            (s.options.eviction.memory_threshold, s.describe_policy().as_str()),
            (0, "snapkv 25% prefix 4")
        );
        assert_eq!(
            flags().with_changes("--against", "policy=h2o,window=96").expect("known").describe_policy(),
            "h2o 96"
        );
    }

    #[test]
    fn wrong_settings_are_named() {
        for (text, words) in [
            ("", "\"\" is not of the form key=value"),
            ("speed=1", "no setting \"speed\"; use kv, k,"),
            ("window=0%", "window \"0%\": use a number of slots"),
            ("window=101%", "1% to 100%"),
            ("prefix=-1", "prefix \"-1\""),
            ("policy=lru", "eviction policy lru"),
            ("k=q3", "KV type q3"),
            ("backend=tpu", "tpu"),
        ] {
            let Err(e) = flags().with_changes("--against", text) else { panic!("{text}") };
            let e = e.to_string();
            assert!(e.starts_with(&format!("--against {text}: ")) && e.contains(words), "{e}");
        }
        let narrow = flags().with_changes("--settings", "policy=sliding,window=1%,prefix=4").expect("known");
        let e = narrow.for_prompt(300, 8).expect_err("3 slots and 4 of them protected").to_string();
        assert!(e.contains("sliding 1%") && e.contains("use a number from 6"), "{e}");
    }

    #[test]
    fn the_cache_is_as_large_as_the_policy_needs() {
        let none = flags();
        assert_eq!(none.for_text(512).expect("options").max_seq_len, 512);
        let quarter = none.with_changes("", "policy=sliding,window=25%").expect("known");
        let o = quarter.for_text(512).expect("options");
        assert_eq!((o.eviction.window, o.max_seq_len), (128, 144));
        let o = quarter.for_prompt(1403, 16).expect("options");
        assert_eq!((o.eviction.window, o.max_seq_len), (350, 1419));
        // A window that the text never fills evicts nothing.
        let wide = none.with_changes("", "policy=h2o,window=1024").expect("known");
        assert_eq!(wide.for_text(512).expect("options").max_seq_len, 512);
    }
}
