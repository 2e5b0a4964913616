//! A set of cores, given as a mask or a list.

use files::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// Core numbers must be below this, the limit of the kernel's call.
const MAX_CORES: usize = 1024;

/// The cores chosen by the user, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuMask {
    text: String,
    /// Ascending, each once.
    cores: Vec<usize>,
}

impl FromStr for CpuMask {
    type Err = String;

    /// Parses a list, which has a comma or a dash (`4-7`, `4,5,7`, `0,4-7`), or a hexadecimal mask, with or without
    /// `0x`, whose lowest bit is core 0: `f0` is `4-7`, and `7` is `0-2`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let list = text.contains([',', '-']);
        let cores = if list { parse_list(text) } else { parse_hex(text) };
        let mut cores = cores.ok_or_else(|| {
            format!(
                "use a hexadecimal mask such as f0, or a list such as 4-7 or 4,5,7, of cores below {MAX_CORES}"
            )
        })?;
        cores.sort_unstable();
        cores.dedup();
        if cores.is_empty() { Err("it names no core".into()) } else { Ok(Self { text: text.into(), cores }) }
    }
}

impl fmt::Display for CpuMask {
    /// Formats the mask as the user typed it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn parse_list(text: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in text.split(',') {
        let (a, b) = part.split_once('-').unwrap_or((part, part));
        // `parse` would accept a sign.
        let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
        let (a, b): (usize, usize) =
            (a.parse().ok().filter(|_| digits(a))?, b.parse().ok().filter(|_| digits(b))?);
        if a > b || b >= MAX_CORES {
            return None;
        }
        cores.extend(a..=b);
    }
    Some(cores)
}

fn parse_hex(text: &str) -> Option<Vec<usize>> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")).unwrap_or(text);
    let mut cores = Vec::new();
    for (i, c) in digits.chars().rev().enumerate() {
        let digit = c.to_digit(16)?;
        cores.extend((0..4).filter(|bit| digit >> bit & 1 == 1).map(|bit| 4 * i + bit));
    }
    (!digits.is_empty() && cores.last().is_none_or(|&last| last < MAX_CORES)).then_some(cores)
}

impl CpuMask {
    /// The cores, ascending.
    pub fn cores(&self) -> &[usize] {
        &self.cores
    }

    /// Rejects cores that are not among `available`. An empty list means unknown and rejects none.
    pub fn check_available(&self, available: &[usize]) -> Result<()> {
        let missing: Vec<usize> = self.cores.iter().copied().filter(|c| !available.contains(c)).collect();
        if available.is_empty() || missing.is_empty() {
            return Ok(());
        }
        let (text, plural) = (&self.text, if missing.len() == 1 { " is" } else { "s are" });
        Err(Error::Usage(format!(
            "`CpuMask` {text}: core{plural} not available: {}; this process may use {}",
            format_ranges(&missing),
            format_ranges(available)
        )))
    }
}

/// Formats ascending core numbers as ranges, e.g. `0-3,7`.
pub fn format_ranges(cores: &[usize]) -> String {
    let runs = cores.chunk_by(|a, b| a + 1 == *b);
    let run = |r: &[usize]| match r {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    };
    runs.map(run).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_lists_of_cores_are_parsed() {
        let cores = |text: &str| text.parse::<CpuMask>().map(|m| m.cores);
        for text in ["f0", "F0", "0xf0", "0XF0", "00f0", "4-7", "4,5,6,7", "7,4-6,5", "6-7,4-5"] {
            assert_eq!(cores(text), Ok(vec![4, 5, 6, 7]), "{text}");
        }
        assert_eq!(cores("7"), Ok(vec![0, 1, 2]));
        assert_eq!(cores("7-7"), Ok(vec![7]));
        assert_eq!(cores("0,2"), Ok(vec![0, 2]));
        assert_eq!(cores("1000000000000000"), Ok(vec![60]));
        assert_eq!(cores(&format!("8{}", "0".repeat(255))), Ok(vec![1023]));
        let bad = [
            "",
            "0x",
            "g",
            "4-",
            "-4",
            "7-4",
            "4,,5",
            ",",
            "-",
            "4;5",
            "+4,5",
            "0-1024",
            "4 ,5",
            "0-99999999999999999999",
        ];
        for text in bad.map(String::from).into_iter().chain([format!("1{}", "0".repeat(256))]) {
            assert!(cores(&text).is_err_and(|e| e.contains("4-7")), "{text}");
        }
        for text in ["0", "0x0", "000"] {
            assert_eq!(cores(text), Err("it names no core".into()));
        }
    }

    #[test]
    fn cores_that_are_not_there_are_named() {
        let check = |text: &str, available: &[usize]| {
            text.parse::<CpuMask>().expect("a mask").check_available(available)
        };
        assert_eq!(check("f0", &[0, 4, 5, 6, 7]), Ok(()));
        assert_eq!(check("f0", &[]), Ok(()));
        let line = |text, available| check(text, available).expect_err("not available").to_string();
        let said = line("0xff", &[0, 1, 2, 3, 6]);
        assert_eq!(said, "`CpuMask` 0xff: cores are not available: 4-5,7; this process may use 0-3,6");
        assert!(line("2-3", &[3]).contains("core is not available: 2;"));
    }
}
