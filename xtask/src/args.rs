//! Splits a task's arguments into flags and the rest.

use crate::error::{Error, Result};
use std::ops::RangeInclusive;

/// The arguments of one task.
#[derive(Debug, Default)]
pub struct Args {
    /// What is not a flag, in order.
    pub rest: Vec<String>,
    values: Vec<(String, String)>,
    switches: Vec<String>,
}

impl Args {
    /// `valued` flags take a value (`--out DIR` or `--out=DIR`), `switches` none.
    pub fn parse(words: &[String], valued: &[&str], switches: &[&str]) -> Result<Args> {
        let mut args = Args::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let (flag, inline) = match word.split_once('=') {
                Some((flag, value)) if word.starts_with("--") => (flag, Some(value.to_string())),
                _ => (word.as_str(), None),
            };
            if valued.contains(&flag) {
                let value = inline.or_else(|| words.next().cloned());
                let value = value.ok_or_else(|| Error::Usage(format!("{flag} needs a value")))?;
                args.values.push((flag.into(), value));
            } else if switches.contains(&flag) && inline.is_none() {
                args.switches.push(flag.into());
            } else if word.starts_with('-') {
                let known = [valued, switches].concat().join(", ");
                let known = if known.is_empty() { "this task has none" } else { &known };
                return Err(Error::Usage(format!("unknown flag {word}; known: {known}")));
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

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn flags_stand_anywhere_and_the_last_wins() {
        let a = Args::parse(
            &words("--seed 1 m --out=a/b=c --seed 2 --bless"),
            &["--seed", "--out"],
            &["--bless"],
        );
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
            let e = Args::parse(&words(line), &["--out"], &["--bless"]).unwrap_err();
            assert!(matches!(e, Error::Usage(_)), "{line}");
        }
    }
}
