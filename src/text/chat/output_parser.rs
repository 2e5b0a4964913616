//! Parses an answer, while it is generated, into thinking, text and tool calls.

use super::call_syntax::CallSyntax;
use super::output_format::{LLAMA, MESSAGE, MESSAGE_END, Markers, OutputFormat};
use super::tool_calls;
use super::{Message, ToolCall, Tools};
use crate::tokenizer::Tokenizer;
use files::json_depth::JsonDepth;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPart {
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
    ToolCall(ToolCall),
    /// A call that was cut off after its name: its arguments as far as they were returned, and all of it as the model
    /// wrote it. A call that was cut off earlier is text.
    ToolCallCut { call: ToolCall, written: String },
}

/// The state of the scan of an incomplete call. Each byte is scanned once, however many pieces the call comes in.
#[derive(Debug, Clone, Default)]
struct ScanState {
    /// Bytes of the pending text that were scanned.
    at: usize,
    nesting: JsonDepth,
    /// True within quotes, in a call whose syntax has quotes of its own.
    quoted: bool,
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
enum ParserState {
    /// At the beginning, or after a call, with nothing but whitespace since.
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
/// use text::chat::{OutputFormat, OutputParser, AnswerPart};
/// let mut parser = OutputParser::new(OutputFormat::default(), "");
/// assert_eq!(parser.push("Hello"), [AnswerPart::Text("Hello".into())]);
/// assert_eq!(parser.finish(), []);
/// ```
#[derive(Debug, Clone, Default)]
pub struct OutputParser {
    format: OutputFormat,
    state: ParserState,
    /// The pending text, which was not returned yet.
    pending: String,
    /// True after a marker: the line breaks that follow are dropped.
    skip_newlines: bool,
    /// The number of the next call.
    calls: usize,
    /// The number of the first call.
    first: usize,
    /// The parameters of the tools that are strings, by function.
    strings: Vec<(String, String)>,
    open: Option<OpenCall>,
    scan: ScanState,
}

impl OutputParser {
    /// A parser for the answer to `prompt`, of which only the end matters: thinking may begin there.
    pub fn new(format: OutputFormat, prompt: &str) -> Self {
        let thinks = format.thinking.is_some_and(|t| prompt.trim_end().ends_with(t.open));
        let state = if thinks { ParserState::Thinking } else { ParserState::Start };
        Self { format, state, skip_newlines: thinks, ..Self::default() }
    }

    /// A parser for the answer to these messages, whose prompt are `ids`: its calls are numbered after theirs.
    pub fn for_prompt(
        format: OutputFormat,
        tokenizer: &Tokenizer,
        ids: &[u32],
        messages: &[Message],
    ) -> Self {
        /// Ids at the end of a prompt in which thinking may begin.
        const END: usize = 16;
        let first = messages.iter().map(|m| m.tool_calls.len()).sum();
        let end = tokenizer.decode_with_special(&ids[ids.len().saturating_sub(END)..]);
        Self { calls: first, first, ..Self::new(format, &end) }
    }

    /// The parser for calls of these tools: arguments that a model writes without quotes get the types of its schemas.
    pub fn with_tools(self, tools: Option<&Tools>) -> Self {
        let unquoted = self.format.calls.is_some_and(|m| matches!(m.syntax, CallSyntax::Tagged(_)));
        let strings = tools.filter(|_| unquoted).map(Tools::string_parameters).unwrap_or_default();
        Self { strings, ..self }
    }

    /// True if the next text is thinking, as far as is known.
    pub fn is_thinking(&self) -> bool {
        self.state == ParserState::Thinking
    }

    /// Parses a piece of text; returns the parts that it completes.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        if self.format.thinking.is_none() && self.format.calls.is_none() {
            return Vec::from_iter((!piece.is_empty()).then(|| AnswerPart::Text(piece.into())));
        }
        self.pending.push_str(piece);
        let mut parts = Vec::new();
        while self.parse_next(&mut parts) {}
        parts
    }

    /// Ends the answer; returns the remaining parts.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        match self.state {
            ParserState::Call(markers) => match markers.syntax.parse_all(&self.pending, &self.strings) {
                Some(found) => self.push_calls(found, &mut parts),
                None => self.break_up(markers, &mut parts),
            },
            ParserState::Start if self.open.is_some() => self.end_cut_call("", &mut parts),
            ParserState::Start
                if self.has_tool_calls() && self.pending.chars().all(tool_calls::is_between) => {}
            _ => self.push_text(&self.pending, &mut parts),
        }
        self.pending.clear();
        parts
    }

    /// Ends pending text after a marker that is not only complete calls: returns the complete ones, and the one cut
    /// off.
    fn break_up(&mut self, markers: Markers, parts: &mut Vec<AnswerPart>) {
        let mut marker = markers.open;
        if markers.syntax == CallSyntax::Json {
            let (found, at) = tool_calls::parse_leading(&self.pending);
            if !found.is_empty() {
                self.push_calls(found, parts);
                self.pending.drain(..at);
                self.scan_call(0, Markers { close: None, ..markers });
                marker = "";
            }
        }
        if self.open.is_none() && self.scan.begun.is_none() && self.scan.object.is_none() {
            let name = markers.syntax.parse_name(&self.pending);
            self.scan.begun = name.map(|name| (name, self.pending.len()));
        }
        self.end_cut_call(marker, parts);
    }

    /// Ends a pending call that was cut off; without a name it is text.
    fn end_cut_call(&mut self, marker: &str, parts: &mut Vec<AnswerPart>) {
        self.emit_call_progress(parts);
        let written = [marker, &self.pending].concat();
        match self.open.take() {
            Some(OpenCall { id, name, from, sent }) => {
                let arguments = self.pending[from..from + sent].to_owned();
                parts.push(AnswerPart::ToolCallCut { call: ToolCall { id, name, arguments }, written });
            }
            None => self.push_text(&written, parts),
        }
    }

    /// Parses one more part; returns true if there may be another.
    fn parse_next(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        if self.skip_newlines {
            let text = self.pending.trim_start_matches(['\n', '\r']).len();
            self.pending.drain(..self.pending.len() - text);
            self.skip_newlines = self.pending.is_empty();
        }
        if self.pending.is_empty() {
            return false;
        }
        match self.state {
            ParserState::Start => self.parse_start(parts),
            ParserState::Thinking => {
                let close = self.format.thinking.and_then(|t| t.close);
                self.emit_up_to_marker(close.as_slice(), parts)
                    .is_some_and(|_| self.enter_state(ParserState::Start))
            }
            ParserState::Text if !self.format.headers.is_empty() => self
                .emit_up_to_marker(&[MESSAGE_END], parts)
                .is_some_and(|_| self.enter_state(ParserState::Start)),
            ParserState::Text => {
                let Some(markers) = self.format.calls else {
                    return self.emit_text(self.pending.len(), parts);
                };
                self.emit_up_to_marker(&[markers.open], parts)
                    .is_some_and(|_| self.enter_state(ParserState::Call(markers)))
            }
            ParserState::Call(markers) => {
                let close = markers.close.unwrap_or_default();
                let Some(at) = self.scan_call(0, markers) else {
                    self.emit_call_progress(parts);
                    return false;
                };
                let rest = self.pending.split_off(at + close.len());
                self.pending.truncate(at);
                let next = match markers.syntax.parse_all(&self.pending, &self.strings) {
                    Some(found) => {
                        self.push_calls(found, parts);
                        ParserState::Start
                    }
                    None if self.has_begun() => {
                        self.break_up(markers, parts);
                        ParserState::Start
                    }
                    None => {
                        self.push_text(&[markers.open, &self.pending, close].concat(), parts);
                        ParserState::Text
                    }
                };
                self.pending = rest;
                self.skip_newlines = next == ParserState::Start;
                (self.state, self.scan) = (next, ScanState::default());
                true
            }
        }
    }

    /// Parses the beginning, or the text after a call: thinking or a call may begin.
    fn parse_start(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        // After a call, separators of calls are skipped too.
        let blank =
            |c: char| if self.has_tool_calls() { tool_calls::is_between(c) } else { c.is_whitespace() };
        let start = self.pending.len() - self.pending.trim_start_matches(blank).len();
        let text = &self.pending[start..];
        let opening = self.format.thinking.iter().chain(&self.format.calls).map(|m| m.open);
        for open in opening {
            if let Some(rest) = text.strip_prefix(open) {
                self.pending = rest.to_owned();
                let thinks = self.format.thinking.is_some_and(|t| t.open == open);
                let state =
                    self.format.calls.filter(|_| !thinks).map_or(ParserState::Thinking, ParserState::Call);
                return self.enter_state(state);
            }
            if open.starts_with(text) {
                return false;
            }
        }
        for header in self.format.headers {
            if let Some(rest) = text.strip_prefix(header) {
                let next = if *header == MESSAGE { ParserState::Text } else { ParserState::Start };
                self.pending = rest.to_owned();
                return self.enter_state(next);
            }
            if header.starts_with(text) {
                return false;
            }
        }
        if self.format.calls.is_some_and(|m| m == LLAMA) && tool_calls::may_be_call(text) {
            self.scan_call(start, LLAMA);
            let Some(end) = self.scan.object else {
                self.emit_call_progress(parts);
                return false;
            };
            if let Some(call) = tool_calls::parse_call(&self.pending[start..end]) {
                self.pending.drain(..end);
                self.push_calls(vec![call], parts);
                return true;
            }
            if self.has_begun() {
                let rest = self.pending.split_off(end);
                self.end_cut_call("", parts);
                (self.pending, self.scan) = (rest, ScanState::default());
                return true;
            }
        }
        (self.state, self.scan) = (ParserState::Text, ScanState::default());
        true
    }

    /// True if the name of the pending call is known, and the object of its arguments has begun.
    fn has_begun(&self) -> bool {
        self.open.is_some() || self.scan.begun.is_some()
    }

    /// Scans the new bytes of a call that begins at `start` of the pending text. Returns the offset of its closing
    /// marker, outside of strings; of the end of its arguments if that ends the call.
    fn scan_call(&mut self, start: usize, markers: Markers) -> Option<usize> {
        self.scan.at = self.scan.at.max(start);
        match markers.syntax {
            CallSyntax::Json => self.scan_json(start, markers),
            CallSyntax::Named(_) => {
                let head = &self.pending.as_bytes()[start..];
                if self.scan.at == start {
                    self.scan.at += markers.syntax.find_head_end(head)?;
                }
                self.scan_json(start, markers);
                self.scan.object
            }
            CallSyntax::Tagged(tags) => self.scan_to_close(Some(tags.quotes), markers.close?),
            CallSyntax::Braces | CallSyntax::Python => self.scan_to_close(None, markers.close?),
        }
    }

    /// Scans up to the closing marker, outside of quotes.
    fn scan_to_close(&mut self, quotes: Option<(&str, &str)>, close: &str) -> Option<usize> {
        let (bytes, scan) = (self.pending.as_bytes(), &mut self.scan);
        while scan.at < bytes.len() {
            let rest = &bytes[scan.at..];
            let quote = quotes.map(|(open, close)| if scan.quoted { close } else { open });
            let close = Some(close).filter(|_| !scan.quoted);
            let next = quote.into_iter().chain(close).find(|text| {
                let text = text.as_bytes();
                rest.starts_with(text) || text.starts_with(rest)
            });
            match next {
                Some(text) if rest.len() < text.len() => return None,
                Some(_) if next == close => return Some(scan.at),
                Some(text) => {
                    scan.at += text.len();
                    scan.quoted = !scan.quoted;
                }
                None => scan.at += 1,
            }
        }
        None
    }

    fn scan_json(&mut self, start: usize, markers: Markers) -> Option<usize> {
        // The second object is the arguments; otherwise nothing is known before the end.
        let inner = if markers.syntax == CallSyntax::Json { 2 } else { 1 };
        let (bytes, scan) = (self.pending.as_bytes(), &mut self.scan);
        while let Some(&byte) = bytes.get(scan.at).filter(|_| inner == 2 || scan.object.is_none()) {
            if let Some(close) = markers.close.filter(|_| !scan.nesting.is_in_string()) {
                let rest = &bytes[scan.at..];
                if rest.starts_with(close.as_bytes()) {
                    return Some(scan.at);
                }
                if close.as_bytes().starts_with(rest) {
                    return None;
                }
            }
            scan.at += 1;
            match scan.nesting.push_byte(byte) {
                Some(depth) if byte == b'{' => {
                    scan.objects += 1;
                    if scan.objects == inner {
                        let call = &self.pending[start..scan.at];
                        let begun = match markers.syntax {
                            CallSyntax::Json => tool_calls::parse_start(call),
                            other => other.parse_name(call).map(|name| (name, call.len() - 1)),
                        };
                        scan.begun = begun.map(|(name, at)| (name, start + at));
                        scan.around = depth - 1;
                    }
                }
                Some(depth) => {
                    if depth == scan.around && scan.objects >= inner {
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
    fn emit_call_progress(&mut self, parts: &mut Vec<AnswerPart>) {
        if let Some((name, from)) = self.scan.begun.take() {
            let id = self.next_id();
            parts.push(AnswerPart::ToolCallStart { id: id.clone(), name: name.clone() });
            self.open = Some(OpenCall { id, name, from, sent: 0 });
        }
        let Some(open) = &mut self.open else { return };
        let end = self.scan.arguments.unwrap_or(self.scan.at).max(open.from);
        let arguments = &self.pending[open.from..end];
        if arguments.len() > open.sent {
            parts.push(AnswerPart::ToolCallDelta(arguments[open.sent..].into()));
            open.sent = arguments.len();
        }
    }

    fn next_id(&mut self) -> String {
        self.calls += 1;
        format!("call_{}", self.calls - 1)
    }

    fn has_tool_calls(&self) -> bool {
        self.calls > self.first
    }

    fn enter_state(&mut self, state: ParserState) -> bool {
        (self.state, self.skip_newlines, self.scan) = (state, true, ScanState::default());
        true
    }

    /// Returns the text before the first of the markers, and drops the marker. Without one, returns all text that
    /// cannot be the beginning of a marker.
    fn emit_up_to_marker(&mut self, markers: &[&str], parts: &mut Vec<AnswerPart>) -> Option<()> {
        let found = markers.iter().filter_map(|m| Some((self.pending.find(m)?, m.len()))).min();
        if let Some((at, len)) = found {
            self.emit_text(at, parts);
            self.pending.drain(..len);
            return Some(());
        }
        let begins = |from: &usize| markers.iter().any(|m| m.starts_with(&self.pending[*from..]));
        let longest = markers.iter().map(|m| m.len()).max().unwrap_or(0);
        let from = (self.pending.len().saturating_sub(longest)..self.pending.len())
            .filter(|&from| self.pending.is_char_boundary(from))
            .find(begins);
        self.emit_text(from.unwrap_or(self.pending.len()), parts);
        None
    }

    /// Returns `len` bytes of the pending text as a part.
    fn emit_text(&mut self, len: usize, parts: &mut Vec<AnswerPart>) -> bool {
        let text: String = self.pending.drain(..len).collect();
        self.push_text(&text, parts);
        false
    }

    fn push_text(&self, text: &str, parts: &mut Vec<AnswerPart>) {
        let thinks = self.is_thinking();
        match parts.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerPart::Thinking(before)) if thinks => before.push_str(text),
            Some(AnswerPart::Text(before)) if !thinks => before.push_str(text),
            _ => parts.push(if thinks {
                AnswerPart::Thinking(text.into())
            } else {
                AnswerPart::Text(text.into())
            }),
        }
    }

    fn push_calls(&mut self, found: Vec<tool_calls::ParsedCall>, parts: &mut Vec<AnswerPart>) {
        self.scan = ScanState::default();
        for (name, arguments) in found {
            let open = self.open.take().unwrap_or_else(|| {
                let id = self.next_id();
                parts.push(AnswerPart::ToolCallStart { id: id.clone(), name: name.clone() });
                OpenCall { id, name: name.clone(), from: 0, sent: 0 }
            });
            if open.sent < arguments.len() {
                parts.push(AnswerPart::ToolCallDelta(arguments[open.sent..].into()));
            }
            parts.push(AnswerPart::ToolCall(ToolCall { id: open.id, name, arguments }));
        }
    }
}

#[cfg(test)]
mod tests;
