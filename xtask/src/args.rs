//! Splits a task's arguments into flags and the rest.

use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// A flag of a task.
#[derive(Debug, Clone, Copy)]
pub struct Flag {
    pub name: &'static str,
    /// What help calls its value; empty where it takes none.
    pub value: &'static str,
    pub about: &'static str,
}

impl Flag {
    /// `--out DIR` or `--out=DIR`.
    pub const fn valued(name: &'static str, value: &'static str, about: &'static str) -> Flag {
        Flag { name, value, about }
    }

    /// Given or not.
    pub const fn switch(name: &'static str, about: &'static str) -> Flag {
        Flag { name, value: "", about }
    }
}

/// The flags of a task, in groups that tasks share.
pub type Flags = &'static [&'static [Flag]];

/// The arguments of one task.
#[derive(Debug, Default)]
pub struct Args {
    /// What is not a flag, in order.
    pub rest: Vec<String>,
    values: Vec<(String, String)>,
    switches: Vec<String>,
}

impl Args {
    /// Sorts the words of a task that has these flags.
    pub fn parse(words: &[String], flags: &[&[Flag]]) -> Result<Args> {
        let mut args = Args::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let (flag, inline) = match word.split_once('=') {
                Some((flag, value)) if word.starts_with("--") => (flag, Some(value.to_string())),
                _ => (word.as_str(), None),
            };
            let known = flags.iter().copied().flatten().find(|known| known.name == flag);
            if known.is_some_and(|known| !known.value.is_empty()) {
                let value = inline.or_else(|| words.next().cloned());
                let value = value.ok_or_else(|| Error::Usage(format!("{flag} needs a value")))?;
                args.values.push((flag.into(), value));
            } else if known.is_some() && inline.is_none() {
                args.switches.push(flag.into());
            } else if word.starts_with('-') {
                let names = flags.iter().copied().flatten().map(|known| known.name);
                let hint = match likeliest(flag, names.clone()) {
                    Some(name) => format!("did you mean {name}? --help lists all"),
                    None if names.clone().next().is_none() => "this task has none".into(),
                    None => format!("known: {}", names.collect::<Vec<_>>().join(", ")),
                };
                return Err(Error::Usage(format!("unknown flag {word}; {hint}")));
            } else {
                args.rest.push(word.clone());
            }
        }
        Ok(args)
    }

    /// The last value given for a flag.
    pub fn value(&self, flag: &str) -> Option<&str> {
        self.values.iter().rev().find(|(f, _)| f == flag).map(|(_, v)| v.as_str())
    }

    pub fn has(&self, switch: &str) -> bool {
        self.switches.iter().any(|s| s == switch)
    }

    /// The number given for a flag.
    pub fn number(&self, flag: &str, range: RangeInclusive<u64>) -> Result<Option<u64>> {
        let Some(text) = self.value(flag) else { return Ok(None) };
        let number = text.parse().ok().filter(|n| range.contains(n));
        let wrong = || format!("{flag} {text}: use a number from {} to {}", range.start(), range.end());
        number.map(Some).ok_or_else(|| Error::Usage(wrong()))
    }

    /// For tasks that take flags only.
    pub fn no_rest(&self) -> Result<()> {
        self.no_rest_but("this task takes flags only")
    }

    /// [`Args::no_rest`] with a hint where other words belong.
    pub fn no_rest_but(&self, hint: &str) -> Result<()> {
        match self.rest.first() {
            None => Ok(()),
            Some(word) => Err(Error::Usage(format!("unexpected argument `{word}`; {hint}"))),
        }
    }
}

/// The name that was probably meant by a mistyped word.
pub fn likeliest(word: &str, names: impl Iterator<Item = &'static str>) -> Option<&'static str> {
    let most = word.len().div_ceil(3).min(3);
    names
        .map(|name| (strsim::levenshtein(word, name), name))
        .min()
        .filter(|&(edits, _)| edits <= most)
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLAGS: Flags = &[
        &[Flag::valued("--seed", "N", "a number"), Flag::valued("--out", "DIR", "a place")],
        &[Flag::switch("--bless", "writes")],
    ];

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn flags_stand_anywhere_and_the_last_wins() {
        let a = Args::parse(&words("--seed 1 m --out=a/b=c --seed 2 --bless"), FLAGS);
        let a = a.unwrap();
        assert_eq!(a.rest, ["m"]);
        assert_eq!(a.value("--seed"), Some("2"));
        assert_eq!(a.value("--out"), Some("a/b=c"));
        assert!(a.has("--bless") && !a.has("--quiet"));
        assert!(a.no_rest().is_err());
        assert_eq!(a.number("--seed", 0..=5).unwrap(), Some(2));
        assert_eq!(a.number("--seeds", 0..=5).unwrap(), None);
        assert!(a.number("--seed", 3..=5).is_err() && a.number("--out", 0..=5).is_err());
    }

    #[test]
    fn unknown_and_unfinished_flags_are_usage_errors() {
        for line in ["--nope", "--out", "--bless=1", "-x"] {
            let e = Args::parse(&words(line), FLAGS).unwrap_err();
            assert!(matches!(e, Error::Usage(_)), "{line}");
        }
        let hint = |line| Args::parse(&words(line), FLAGS).unwrap_err().to_string();
        assert!(hint("--blessed").contains("did you mean --bless?"), "{}", hint("--blessed"));
        assert!(hint("--nothing").contains("known: --seed, --out, --bless"), "{}", hint("--nothing"));
    }
}
