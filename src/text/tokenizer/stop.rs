//! Stop strings in streamed text: what could still become one is held back.

use crate::{Error, Result};
use memchr::memmem::Finder;

/// What a piece of text let through.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// Text that is certain not to be part of a stop string.
    pub text: String,
    /// A stop string was found: `text` ends before it, and nothing comes after.
    pub stopped: bool,
}

/// Finds the earliest stop string of a stream. The result depends on the text only, not on the
/// pieces in which it comes: where an earlier, longer stop string could still be completed, a match
/// is held back as well, until that is settled.
#[derive(Debug, Clone)]
pub struct StopStrings {
    finders: Vec<Finder<'static>>,
    /// Shorter than the longest stop string.
    held: String,
    /// The stop string that was found.
    found: Option<usize>,
}

impl StopStrings {
    /// Looks for `stops`; none is allowed, an empty one is not.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self> {
        let finder = |stop: &S| match stop.as_ref() {
            "" => {
                Err(Error::Usage("`GenerateOptions::stop` \"\": use a text of at least one character".into()))
            }
            stop => Ok(Finder::new(stop).into_owned()),
        };
        let finders = stops.iter().map(finder).collect::<Result<_>>()?;
        Ok(Self { finders, held: String::new(), found: None })
    }

    /// Takes the next piece of text.
    pub fn push(&mut self, piece: &str) -> Scan {
        if self.found.is_some() {
            return Scan { text: String::new(), stopped: true };
        }
        if self.finders.is_empty() && self.held.is_empty() {
            return Scan { text: piece.into(), stopped: false };
        }
        self.held.push_str(piece);
        let open = self.first_open();
        match self.first_match() {
            Some(first) if first.0 <= open => self.stop(first),
            _ => {
                let rest = self.held.split_off(open);
                Scan { text: std::mem::replace(&mut self.held, rest), stopped: false }
            }
        }
    }

    /// The text has ended: lets the held text go.
    pub fn finish(&mut self) -> Scan {
        match self.first_match() {
            Some(first) => self.stop(first),
            None => Scan { text: std::mem::take(&mut self.held), stopped: self.found.is_some() },
        }
    }

    /// Which of the stop strings ended the text: its number, once it has.
    pub fn found(&self) -> Option<usize> {
        self.found
    }

    /// Text that is held back.
    pub fn held(&self) -> &str {
        &self.held
    }

    /// Begins with text that another scan, perhaps for other stop strings, held back.
    pub fn hold(&mut self, text: &str) {
        self.held = text.into();
    }

    fn stop(&mut self, (start, found): (usize, usize)) -> Scan {
        let mut text = std::mem::take(&mut self.held);
        text.truncate(start);
        self.found = Some(found);
        Scan { text, stopped: true }
    }

    /// Where the first match begins, and of which stop string it is: the shortest, as it was complete first.
    fn first_match(&self) -> Option<(usize, usize)> {
        let find = |(i, f): (usize, &Finder<'_>)| Some((f.find(self.held.as_bytes())?, f.needle().len(), i));
        let (start, _, found) = self.finders.iter().enumerate().filter_map(find).min()?;
        Some((start, found))
    }

    /// Where the first unfinished stop string starts, or the end of the held text. A character
    /// boundary: stop strings start at one.
    fn first_open(&self) -> usize {
        let held = self.held.as_bytes();
        let longest = self.finders.iter().map(|f| f.needle().len()).max().unwrap_or(0);
        let from = held.len().saturating_sub(longest.saturating_sub(1));
        let open = |start: &usize| {
            let tail = &held[*start..];
            self.finders.iter().any(|f| f.needle().len() > tail.len() && f.needle().starts_with(tail))
        };
        (from..held.len()).find(open).unwrap_or(held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::Rng;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut scanner = StopStrings::new(stops).expect("no empty stop string");
        let mut text = String::new();
        for piece in pieces {
            let scan = scanner.push(piece);
            text.push_str(&scan.text);
            if scan.stopped {
                return (text, true);
            }
        }
        let last = scanner.finish();
        (text + &last.text, last.stopped)
    }

    fn naive(stops: &[&str], text: &str) -> (String, bool) {
        match stops.iter().filter_map(|s| text.find(s)).min() {
            Some(start) => (text[..start].into(), true),
            None => (text.into(), false),
        }
    }

    #[test]
    fn the_stop_string_that_was_found_has_its_number() {
        for (stops, found) in
            [(&["x", "cd"][..], 1), (&["cd", "bc"], 1), (&["bc", "b"], 1), (&["b", "bc"], 0)]
        {
            for pieces in [&["ab", "c", "d"][..], &["abcd"]] {
                let mut scanner = StopStrings::new(stops).expect("no empty stop string");
                assert!(scanner.found().is_none());
                pieces.iter().for_each(|piece| drop(scanner.push(piece)));
                assert_eq!(scanner.found(), Some(found), "{stops:?}");
            }
        }
    }

    #[test]
    fn agrees_with_a_search_of_the_whole_text() {
        let mut rng = Rng::new(9);
        let mut pick = |n: usize| (rng.next_u64() % n as u64) as usize;
        let letters = ["a", "b", "é", "\n", "한"];
        let mut stopped = 0;
        for round in 0..20_000 {
            let mut word = |max: usize| {
                let kinds = 2 + pick(4);
                (0..1 + pick(max)).map(|_| letters[pick(kinds)]).collect::<String>()
            };
            let (text, all) = (word(40), [word(5), word(3), word(8)]);
            let count = pick(4);
            let stops: Vec<&str> = all[..count].iter().map(String::as_str).collect();
            let mut pieces = vec![];
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let cut = rest.char_indices().nth(pick(4)).map_or(rest.len(), |(i, _)| i);
                pieces.push(&rest[..cut]);
                rest = &rest[cut..];
            }
            let want = naive(&stops, &text);
            stopped += usize::from(want.1);
            assert_eq!(run(&stops, &pieces), want, "{round}: {stops:?} in {pieces:?}");
        }
        assert!((2_000..18_000).contains(&stopped), "{stopped}");
    }

    #[test]
    fn holds_back_no_more_than_needed() {
        let mut scanner = StopStrings::new(&["\nUser:"]).expect("no empty stop string");
        let mut push = |piece: &str| scanner.push(piece);
        let open = |text: &str| Scan { text: text.into(), stopped: false };
        assert_eq!(push("Hello."), open("Hello."));
        assert_eq!(push(" A\nUs"), open(" A"));
        assert_eq!(push("ing it\n"), open("\nUsing it"));
        assert_eq!(push("User"), open(""));
        assert_eq!(push(": hi"), Scan { text: String::new(), stopped: true });
        assert_eq!(push("more"), Scan { text: String::new(), stopped: true });
        assert_eq!(scanner.finish(), Scan { text: String::new(), stopped: true });
        assert!(matches!(StopStrings::new(&["x", ""]), Err(Error::Usage(_))));
    }

    #[test]
    fn held_text_goes_on_in_another_scan() {
        let text = "one\nUser\nUser: two";
        for cut in 0..text.len() {
            let mut first = StopStrings::new(&["\nUser:"]).expect("no empty stop string");
            let before = first.push(&text[..cut]);
            let mut second = StopStrings::new(&["\nUser:"]).expect("no empty stop string");
            second.hold(first.held());
            let after = second.push(&text[cut..]);
            // Once it has stopped nobody goes on.
            let shown = if before.stopped { before.text } else { before.text + &after.text };
            assert_eq!(shown, "one\nUser");
            // Without stop strings, or with others, all of it comes.
            for stops in [&[][..], &["x"]] {
                let mut other = StopStrings::new(stops).expect("no empty stop string");
                other.hold(first.held());
                assert_eq!(other.push("y").text, format!("{}y", first.held()));
            }
        }
    }
}
