//! Parses an answer, while it is generated, into thinking, text and tool calls.

use super::ToolCall;
use super::output_format::{LLAMA, Markers, OutputFormat};
use super::tool_calls;
use files::nesting::Nesting;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// Text of the answer.
    Text(String),
    /// Thinking before the answer.
    Thinking(String),
    /// The start of a tool call.
    ToolCallStart { id: String, name: String },
    /// The next piece of the arguments of the current call.
    ToolCallDelta(String),
    /// A complete call, whose pieces were returned before. The name may be unknown, and the arguments need not follow
    /// the schema of the tool.
    Call(ToolCall),
    /// A call that was cut off after its name: its arguments as far as they were returned, and all of it as the model
    /// wrote it. A call that was cut off earlier is text.
    Cut { call: ToolCall, written: String },
}

/// The state of the scan of an incomplete call. Each byte is scanned once, however many pieces the call comes in.
#[derive(Debug, Clone, Default)]
struct ScanState {
    /// Bytes of the pending text that were scanned.
    at: usize,
    nesting: Nesting,
    /// Number of objects opened so far: the call itself, then its arguments.
    objects: usize,
    /// The name of the call, and the start of its arguments.
    begun: Option<(String, usize)>,
    /// Number of open brackets around the arguments.
    around: usize,
    /// The end of the arguments.
    arguments: Option<usize>,
    /// The end of the first object.
    object: Option<usize>,
}

/// A call that is not complete yet.
#[derive(Debug, Clone)]
struct OpenCall {
    id: String,
    name: String,
    /// The start of the arguments in the pending text.
    from: usize,
    /// Bytes of the arguments that were returned.
    sent: usize,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum State {
    /// At the beginning, or after a call, with nothing but blanks since.
    #[default]
    Start,
    Thinking,
    Text,
    /// After the opening marker of a call.
    Call(Markers),
}

/// Parses the text of one answer piece by piece. Only text that may still become a marker or a call is held back; text
/// that begins like a call becomes one with its name and the `{` of its arguments.
///
/// ```
/// use text::chat::{OutputFormat, OutputParser, Part};
/// let mut parser = OutputParser::new(OutputFormat::default(), "");
/// assert_eq!(parser.push("Hello"), [Part::Text("Hello".into())]);
/// assert_eq!(parser.finish(), []);
/// ```
#[derive(Debug, Clone, Default)]
pub struct OutputParser {
    format: OutputFormat,
    state: State,
    /// The pending text, which was not returned yet.
    held: String,
    /// True after a marker: the line breaks that follow are dropped.
    skip_newlines: bool,
    /// The number of the next call.
    calls: usize,
    /// The number of the first call.
    first: usize,
    open: Option<OpenCall>,
    scan: ScanState,
}

impl OutputParser {
    /// A parser for the answer to `prompt`, of which only the end matters: thinking may begin there.
    pub fn new(format: OutputFormat, prompt: &str) -> Self {
        let thinks = format.thinking.is_some_and(|t| prompt.trim_end().ends_with(t.open));
        let state = if thinks { State::Thinking } else { State::Start };
        Self { format, state, skip_newlines: thinks, ..Self::default() }
    }

    /// The parser with calls numbered from `first` on, for a conversation that has had others.
    pub fn with_calls_from(self, first: usize) -> Self {
        Self { calls: first, first, ..self }
    }

    /// True if the next text is thinking, as far as is known.
    pub fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    /// Parses a piece of text; returns the parts that it completes.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        if self.format.thinking.is_none() && self.format.calls.is_none() {
            return Vec::from_iter((!piece.is_empty()).then(|| Part::Text(piece.into())));
        }
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// Ends the answer; returns the remaining parts.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        match self.state {
            State::Call(markers) => match tool_calls::parse_all(&self.held) {
                Some(found) => self.push_calls(found, &mut parts),
                None => self.break_up(markers.open, &mut parts),
            },
            State::Start if self.open.is_some() => self.end_cut_call("", &mut parts),
            State::Start if self.has_called() && self.held.chars().all(tool_calls::is_between) => {}
            _ => self.push_text(&self.held, &mut parts),
        }
        self.held.clear();
        parts
    }

    /// Ends pending text after a marker that is not only complete calls: returns the complete ones, and the one cut
    /// off.
    fn break_up(&mut self, mut marker: &str, parts: &mut Vec<Part>) {
        let (found, at) = tool_calls::parse_leading(&self.held);
        if !found.is_empty() {
            self.push_calls(found, parts);
            self.held.drain(..at);
            self.scan_call(0, None);
            marker = "";
        }
        if self.open.is_none() && self.scan.begun.is_none() && self.scan.object.is_none() {
            self.scan.begun = tool_calls::parse_name(&self.held).map(|name| (name, self.held.len()));
        }
        self.end_cut_call(marker, parts);
    }

    /// Ends a pending call that was cut off; without a name it is text.
    fn end_cut_call(&mut self, marker: &str, parts: &mut Vec<Part>) {
        self.emit_call_progress(parts);
        let written = [marker, &self.held].concat();
        match self.open.take() {
            Some(OpenCall { id, name, from, sent }) => {
                let arguments = self.held[from..from + sent].to_owned();
                parts.push(Part::Cut { call: ToolCall { id, name, arguments }, written });
            }
            None => self.push_text(&written, parts),
        }
    }

    /// Parses one more part; returns true if there may be another.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.skip_newlines {
            let text = self.held.trim_start_matches(['\n', '\r']).len();
            self.held.drain(..self.held.len() - text);
            self.skip_newlines = self.held.is_empty();
        }
        if self.held.is_empty() {
            return false;
        }
        match self.state {
            State::Start => self.parse_start(parts),
            State::Thinking => {
                let close = self.format.thinking.and_then(|t| t.close);
                self.emit_up_to_marker(close.as_slice(), parts).is_some_and(|_| self.enter(State::Start))
            }
            State::Text => {
                let Some(markers) = self.format.calls else { return self.emit_text(self.held.len(), parts) };
                self.emit_up_to_marker(&[markers.open], parts)
                    .is_some_and(|_| self.enter(State::Call(markers)))
            }
            State::Call(markers) => {
                let close = markers.close.unwrap_or_default();
                let Some(at) = self.scan_call(0, markers.close) else {
                    self.emit_call_progress(parts);
                    return false;
                };
                let rest = self.held.split_off(at + close.len());
                self.held.truncate(at);
                let next = match tool_calls::parse_all(&self.held) {
                    Some(found) => {
                        self.push_calls(found, parts);
                        State::Start
                    }
                    None if self.has_begun() => {
                        self.break_up(markers.open, parts);
                        State::Start
                    }
                    None => {
                        self.push_text(&[markers.open, &self.held, close].concat(), parts);
                        State::Text
                    }
                };
                self.held = rest;
                self.skip_newlines = next == State::Start;
                (self.state, self.scan) = (next, ScanState::default());
                true
            }
        }
    }

    /// Parses the beginning, or the text after a call: thinking or a call may begin.
    fn parse_start(&mut self, parts: &mut Vec<Part>) -> bool {
        // After a call, separators of calls are skipped too.
        let blank = |c: char| if self.has_called() { tool_calls::is_between(c) } else { c.is_whitespace() };
        let start = self.held.len() - self.held.trim_start_matches(blank).len();
        let text = &self.held[start..];
        let opening = self.format.thinking.iter().chain(&self.format.calls).map(|m| m.open);
        for open in opening {
            if let Some(rest) = text.strip_prefix(open) {
                self.held = rest.to_owned();
                let thinks = self.format.thinking.is_some_and(|t| t.open == open);
                let state = self.format.calls.filter(|_| !thinks).map_or(State::Thinking, State::Call);
                return self.enter(state);
            }
            if open.starts_with(text) {
                return false;
            }
        }
        if self.format.calls.is_some_and(|m| m == LLAMA) && tool_calls::may_be_call(text) {
            self.scan_call(start, None);
            let Some(end) = self.scan.object else {
                self.emit_call_progress(parts);
                return false;
            };
            if let Some(call) = tool_calls::parse_call(&self.held[start..end]) {
                self.held.drain(..end);
                self.push_calls(vec![call], parts);
                return true;
            }
            if self.has_begun() {
                let rest = self.held.split_off(end);
                self.end_cut_call("", parts);
                (self.held, self.scan) = (rest, ScanState::default());
                return true;
            }
        }
        (self.state, self.scan) = (State::Text, ScanState::default());
        true
    }

    /// True if the name of the pending call is known, and the object of its arguments has begun.
    fn has_begun(&self) -> bool {
        self.open.is_some() || self.scan.begun.is_some()
    }

    /// Scans the new bytes of a call that begins at `start` of the pending text. Returns the offset of its closing
    /// marker, outside of strings.
    fn scan_call(&mut self, start: usize, close: Option<&str>) -> Option<usize> {
        let (bytes, scan) = (self.held.as_bytes(), &mut self.scan);
        scan.at = scan.at.max(start);
        while let Some(&byte) = bytes.get(scan.at) {
            if let Some(close) = close.filter(|_| !scan.nesting.is_in_string()) {
                let rest = &bytes[scan.at..];
                if rest.starts_with(close.as_bytes()) {
                    return Some(scan.at);
                }
                if close.as_bytes().starts_with(rest) {
                    return None;
                }
            }
            scan.at += 1;
            match scan.nesting.pass(byte) {
                Some(depth) if byte == b'{' => {
                    scan.objects += 1;
                    // The second object is the arguments; otherwise nothing is known before the end.
                    if scan.objects == 2 {
                        let begun = tool_calls::parse_start(&self.held[start..scan.at]);
                        scan.begun = begun.map(|(name, at)| (name, start + at));
                        scan.around = depth - 1;
                    }
                }
                Some(depth) => {
                    if depth == scan.around && scan.objects > 1 {
                        scan.arguments.get_or_insert(scan.at);
                    }
                    if depth == 0 {
                        scan.object.get_or_insert(scan.at);
                    }
                }
                None => {}
            }
        }
        None
    }

    /// Returns the scanned part of a call.
    fn emit_call_progress(&mut self, parts: &mut Vec<Part>) {
        if let Some((name, from)) = self.scan.begun.take() {
            let id = self.next_id();
            parts.push(Part::ToolCallStart { id: id.clone(), name: name.clone() });
            self.open = Some(OpenCall { id, name, from, sent: 0 });
        }
        let Some(open) = &mut self.open else { return };
        let end = self.scan.arguments.unwrap_or(self.scan.at).max(open.from);
        let arguments = &self.held[open.from..end];
        if arguments.len() > open.sent {
            parts.push(Part::ToolCallDelta(arguments[open.sent..].into()));
            open.sent = arguments.len();
        }
    }

    fn next_id(&mut self) -> String {
        self.calls += 1;
        format!("call_{}", self.calls - 1)
    }

    fn has_called(&self) -> bool {
        self.calls > self.first
    }

    fn enter(&mut self, state: State) -> bool {
        (self.state, self.skip_newlines, self.scan) = (state, true, ScanState::default());
        true
    }

    /// Returns the text before the first of the markers, and drops the marker. Without one, returns all text that
    /// cannot be the beginning of a marker.
    fn emit_up_to_marker(&mut self, markers: &[&str], parts: &mut Vec<Part>) -> Option<()> {
        let found = markers.iter().filter_map(|m| Some((self.held.find(m)?, m.len()))).min();
        if let Some((at, len)) = found {
            self.emit_text(at, parts);
            self.held.drain(..len);
            return Some(());
        }
        let begins = |from: &usize| markers.iter().any(|m| m.starts_with(&self.held[*from..]));
        let longest = markers.iter().map(|m| m.len()).max().unwrap_or(0);
        let from = (self.held.len().saturating_sub(longest)..self.held.len())
            .filter(|&from| self.held.is_char_boundary(from))
            .find(begins);
        self.emit_text(from.unwrap_or(self.held.len()), parts);
        None
    }

    /// Returns `len` bytes of the pending text as a part.
    fn emit_text(&mut self, len: usize, parts: &mut Vec<Part>) -> bool {
        let text: String = self.held.drain(..len).collect();
        self.push_text(&text, parts);
        false
    }

    fn push_text(&self, text: &str, parts: &mut Vec<Part>) {
        let thinks = self.is_thinking();
        match parts.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Thinking(before)) if thinks => before.push_str(text),
            Some(Part::Text(before)) if !thinks => before.push_str(text),
            _ => parts.push(if thinks { Part::Thinking(text.into()) } else { Part::Text(text.into()) }),
        }
    }

    fn push_calls(&mut self, found: Vec<tool_calls::Call>, parts: &mut Vec<Part>) {
        self.scan = ScanState::default();
        for (name, arguments) in found {
            let open = self.open.take().unwrap_or_else(|| {
                let id = self.next_id();
                parts.push(Part::ToolCallStart { id: id.clone(), name: name.clone() });
                OpenCall { id, name: name.clone(), from: 0, sent: 0 }
            });
            if open.sent < arguments.len() {
                parts.push(Part::ToolCallDelta(arguments[open.sent..].into()));
            }
            parts.push(Part::Call(ToolCall { id: open.id, name, arguments }));
        }
    }
}

#[cfg(test)]
mod tests;
