//! Stop strings in streamed text: text that may still become one is held back.

use super::automaton::{Automaton, MatchState};
use crate::{Error, Result};
use std::sync::Arc;

/// The result of a scan of a piece of text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopScan {
    /// Text that cannot be part of a stop string.
    pub text: String,
    /// True if a stop string was found: `text` ends before it, and nothing follows.
    pub stopped: bool,
}

/// Finds the earliest stop string of a stream. The result depends only on the text, not on the pieces it comes in: if
/// an earlier, longer stop string could still be completed, a match is held back as well. The time per byte does not
/// depend on the number of stop strings; clones share the automaton.
#[derive(Debug, Clone)]
pub struct StopStrings {
    automaton: Arc<Automaton>,
    /// The state after the first `scanned` bytes of `pending`.
    state: MatchState,
    scanned: usize,
    /// Text that is held back; shorter than the longest stop string.
    pending: String,
    /// The first match in `pending`: its start, and the number of the stop string.
    first: Option<(usize, usize)>,
    /// The number of the stop string that was found.
    matched: Option<usize>,
}

impl StopStrings {
    /// A search for `stops`, which may be none. Refuses an empty stop string.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self> {
        if stops.iter().any(|stop| stop.as_ref().is_empty()) {
            return Err(Error::Usage("`GenerateOptions::stop` \"\": use a text that is not empty".into()));
        }
        let automaton = Arc::new(Automaton::new(stops.iter().map(|stop| stop.as_ref().as_bytes())));
        let (state, pending) = (MatchState::default(), String::new());
        Ok(Self { automaton, state, scanned: 0, pending, first: None, matched: None })
    }

    /// Scans the next piece of text.
    pub fn push(&mut self, piece: &str) -> StopScan {
        if self.matched.is_some() {
            return StopScan { text: String::new(), stopped: true };
        }
        if self.automaton.is_empty() && self.pending.is_empty() {
            return StopScan { text: piece.into(), stopped: false };
        }
        self.pending.push_str(piece);
        if let Some(first) = self.scan_pending() {
            return self.stop_at(first);
        }
        let open = self.scanned - self.automaton.open_bytes(self.state);
        let kept = self.first.map_or(open, |(start, _)| start.min(open));
        self.first = self.first.map(|(start, number)| (start - kept, number));
        self.scanned -= kept;
        let rest = self.pending.split_off(kept);
        StopScan { text: std::mem::replace(&mut self.pending, rest), stopped: false }
    }

    /// Ends the text and returns the rest of it.
    pub fn finish(&mut self) -> StopScan {
        match self.scan_pending().or(self.first) {
            Some(first) => self.stop_at(first),
            None => StopScan { text: self.take_pending(), stopped: self.matched.is_some() },
        }
    }

    /// Takes the pending text.
    fn take_pending(&mut self) -> String {
        (self.state, self.scanned, self.first) = (MatchState::default(), 0, None);
        std::mem::take(&mut self.pending)
    }

    /// The number of the stop string that ended the text.
    pub fn matched_index(&self) -> Option<usize> {
        self.matched
    }

    /// Text that is held back.
    pub fn pending_text(&self) -> &str {
        &self.pending
    }

    /// Starts with text that another search, perhaps for other stop strings, held back.
    pub fn restore_pending(&mut self, text: &str) {
        self.take_pending();
        self.pending = text.into();
    }

    fn stop_at(&mut self, (start, number): (usize, usize)) -> StopScan {
        let mut text = self.take_pending();
        text.truncate(start);
        self.matched = Some(number);
        StopScan { text, stopped: true }
    }

    /// Scans the new part of the pending text. Returns the first match, once no earlier one can come. Of matches with
    /// the same start the shortest counts, as it was complete first.
    fn scan_pending(&mut self) -> Option<(usize, usize)> {
        for &byte in &self.pending.as_bytes()[self.scanned..] {
            self.state = self.automaton.next_state(self.state, byte);
            self.scanned += 1;
            if let Some((length, number)) = self.automaton.longest_match(self.state) {
                let start = self.scanned - length;
                if self.first.is_none_or(|(first, _)| start < first) {
                    self.first = Some((start, number));
                }
            }
            let open = self.scanned - self.automaton.open_bytes(self.state);
            if let Some(first) = self.first.filter(|&(start, _)| start <= open) {
                return Some(first);
            }
        }
        None
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
                assert!(scanner.matched_index().is_none());
                pieces.iter().for_each(|piece| drop(scanner.push(piece)));
                assert_eq!(scanner.matched_index(), Some(found), "{stops:?}");
            }
        }
    }

    #[test]
    fn stop_strings_are_found_as_in_a_search_of_the_whole_text() {
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
    fn no_more_text_is_held_back_than_needed() {
        let mut scanner = StopStrings::new(&["\nUser:"]).expect("no empty stop string");
        let mut push = |piece: &str| scanner.push(piece);
        let open = |text: &str| StopScan { text: text.into(), stopped: false };
        assert_eq!(push("Hello."), open("Hello."));
        assert_eq!(push(" A\nUs"), open(" A"));
        assert_eq!(push("ing it\n"), open("\nUsing it"));
        assert_eq!(push("User"), open(""));
        assert_eq!(push(": hi"), StopScan { text: String::new(), stopped: true });
        assert_eq!(push("more"), StopScan { text: String::new(), stopped: true });
        assert_eq!(scanner.finish(), StopScan { text: String::new(), stopped: true });
        assert!(matches!(StopStrings::new(&["x", ""]), Err(Error::Usage(_))));
    }

    /// A regression test: each byte once took as many comparisons as all stop strings have bytes.
    #[test]
    fn many_long_stop_strings_take_no_longer_than_one() {
        let stops: Vec<String> = (0..16).map(|i| format!("{}{i}", "a".repeat(40_000))).collect();
        let mut scanner = StopStrings::new(&stops).expect("no empty stop string");
        let began = std::time::Instant::now();
        let shown: usize = (0..100_000).map(|_| scanner.push("aa").text.len()).sum();
        assert_eq!((shown, scanner.pending_text().len()), (160_000, 40_000));
        assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
        assert_eq!(scanner.clone().push("15").text, "");
        assert_eq!(scanner.push("x").text.len(), 40_001);
    }

    #[test]
    fn held_back_text_continues_in_another_scan() {
        let text = "one\nUser\nUser: two";
        for cut in 0..text.len() {
            let mut first = StopStrings::new(&["\nUser:"]).expect("no empty stop string");
            let before = first.push(&text[..cut]);
            let mut second = StopStrings::new(&["\nUser:"]).expect("no empty stop string");
            second.restore_pending(first.pending_text());
            let after = second.push(&text[cut..]);
            // Once it has stopped, nothing continues.
            let shown = if before.stopped { before.text } else { before.text + &after.text };
            assert_eq!(shown, "one\nUser");
            // Without stop strings, or with others, all of the text comes.
            for stops in [&[][..], &["x"]] {
                let mut other = StopStrings::new(stops).expect("no empty stop string");
                other.restore_pending(first.pending_text());
                assert_eq!(other.push("y").text, format!("{}y", first.pending_text()));
            }
        }
    }
}
