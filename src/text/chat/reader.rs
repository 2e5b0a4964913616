//! Reads an answer as it is generated: what is thought, what is said, and which functions are called.

use super::ToolCall;
use super::calls;
use super::form::{Form, Markers};
use files::nesting::Nesting;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Part {
    /// What the answer says.
    Text(String),
    /// What the model thinks before.
    Thinking(String),
    /// A function that it begins to call.
    Begun { id: String, name: String },
    /// What comes next of the arguments of the call that has begun.
    Arguments(String),
    /// All of a call whose parts were handed out; the name may be unknown, and the arguments need not follow the tool's
    /// schema.
    Call(ToolCall),
    /// A call that breaks off behind its name: its arguments as far as they were handed out, and all of it as the model
    /// wrote it. What breaks off before is handed out as text.
    Cut { call: ToolCall, written: String },
}

/// How far a call that has not ended was looked through: each byte is looked at once, however many pieces it comes in.
#[derive(Debug, Clone, Default)]
struct Seen {
    /// Bytes of what is held.
    at: usize,
    nesting: Nesting,
    /// Objects that have begun: the call itself, then its arguments.
    objects: usize,
    /// The call's name, and where its arguments begin.
    begun: Option<(String, usize)>,
    /// Brackets that are open around its arguments.
    around: usize,
    /// Where its arguments end,
    arguments: Option<usize>,
    /// and where the first object ends.
    object: Option<usize>,
}

/// A call of which all has not come yet.
#[derive(Debug, Clone)]
struct Open {
    id: String,
    name: String,
    /// Where its arguments begin in what is held.
    from: usize,
    /// How many bytes of them were handed out.
    sent: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing was said yet: blanks at most.
    Begin,
    Thinking,
    Text,
    /// After the opening marker of a call.
    Call(Markers),
}

/// Reads the text of one answer piece by piece. It holds back only what may still become a marker or a call; what only
/// begins like a call is text, up to the name and the object of arguments.
///
/// ```
/// use text::chat::{Form, Part, Reader};
/// let mut reader = Reader::new(Form::default(), "");
/// assert_eq!(reader.push("Hello"), [Part::Text("Hello".into())]);
/// assert_eq!(reader.finish(), []);
/// ```
#[derive(Debug, Clone)]
pub struct Reader {
    form: Form,
    state: State,
    /// What is not handed out yet.
    held: String,
    /// Line feeds that come next stand beside a marker and are dropped.
    skips: bool,
    /// The number of the next call, and of the first one.
    calls: usize,
    first: usize,
    open: Option<Open>,
    seen: Seen,
    /// Bytes that were looked at for calls.
    #[cfg(test)]
    looked: usize,
}

impl Reader {
    /// For the answer to `prompt`, of which the end is enough: thoughts may begin there.
    pub fn new(form: Form, prompt: &str) -> Self {
        let thinks = form.thinking.is_some_and(|t| prompt.trim_end().ends_with(t.open));
        let state = if thinks { State::Thinking } else { State::Begin };
        Self {
            form,
            state,
            held: String::new(),
            skips: thinks,
            calls: 0,
            first: 0,
            open: None,
            seen: Seen::default(),
            #[cfg(test)]
            looked: 0,
        }
    }

    /// Numbers the calls from `first` on, where the conversation has had others.
    pub fn with_calls_from(self, first: usize) -> Self {
        Self { calls: first, first, ..self }
    }

    /// Whether the next token is a thought, as far as is known.
    pub fn is_thinking(&self) -> bool {
        self.state == State::Thinking
    }

    /// Takes a piece of text; returns what it completes.
    pub fn push(&mut self, piece: &str) -> Vec<Part> {
        if self.form.thinking.is_none() && self.form.calls.is_none() {
            return Vec::from_iter((!piece.is_empty()).then(|| Part::Text(piece.into())));
        }
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        parts
    }

    /// The rest, once the answer has ended.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        match self.state {
            State::Call(markers) => match calls::all(&self.held) {
                Some(found) => self.call(found, &mut parts),
                None => self.break_up(markers.open, &mut parts),
            },
            State::Begin if self.open.is_some() => self.cut("", &mut parts),
            State::Begin if self.has_called() && self.held.chars().all(calls::is_between) => {}
            _ => self.say(&self.held, &mut parts),
        }
        self.held.clear();
        parts
    }

    /// Ends what is held behind a marker where not all of it are calls: those that are whole, and one that breaks off.
    fn break_up(&mut self, mut marker: &str, parts: &mut Vec<Part>) {
        let (found, at) = calls::leading(&self.held);
        if !found.is_empty() {
            self.call(found, parts);
            self.held.drain(..at);
            self.look(0, None);
            marker = "";
        }
        if self.open.is_none() && self.seen.begun.is_none() && self.seen.object.is_none() {
            self.seen.begun = calls::name(&self.held).map(|name| (name, self.held.len()));
        }
        self.cut(marker, parts);
    }

    /// Ends what is held of a call that breaks off; without a name it is text.
    fn cut(&mut self, marker: &str, parts: &mut Vec<Part>) {
        self.go_on_calling(parts);
        let written = [marker, &self.held].concat();
        match self.open.take() {
            Some(Open { id, name, from, sent }) => {
                let arguments = self.held[from..from + sent].to_owned();
                parts.push(Part::Cut { call: ToolCall { id, name, arguments }, written });
            }
            None => self.say(&written, parts),
        }
    }

    /// Goes on by one part; whether there may be another.
    fn step(&mut self, parts: &mut Vec<Part>) -> bool {
        if self.skips {
            let text = self.held.trim_start_matches(['\n', '\r']).len();
            self.held.drain(..self.held.len() - text);
            self.skips = self.held.is_empty();
        }
        if self.held.is_empty() {
            return false;
        }
        match self.state {
            State::Begin => self.begin(parts),
            State::Thinking => {
                let close = self.form.thinking.and_then(|t| t.close);
                self.up_to_marker(close.as_slice(), parts).is_some_and(|_| self.go(State::Begin))
            }
            State::Text => {
                let Some(markers) = self.form.calls else { return self.hand_out(self.held.len(), parts) };
                self.up_to_marker(&[markers.open], parts).is_some_and(|_| self.go(State::Call(markers)))
            }
            State::Call(markers) => {
                let close = markers.close.unwrap_or_default();
                let Some(at) = self.look(0, markers.close) else {
                    self.go_on_calling(parts);
                    return false;
                };
                let rest = self.held.split_off(at + close.len());
                self.held.truncate(at);
                let next = match calls::all(&self.held) {
                    Some(found) => {
                        self.call(found, parts);
                        State::Begin
                    }
                    None if self.has_begun() => {
                        self.break_up(markers.open, parts);
                        State::Begin
                    }
                    None => {
                        self.say(&[markers.open, &self.held, close].concat(), parts);
                        State::Text
                    }
                };
                self.held = rest;
                self.skips = next == State::Begin;
                (self.state, self.seen) = (next, Seen::default());
                true
            }
        }
    }

    /// Nothing was said yet: thoughts or a call may begin.
    fn begin(&mut self, parts: &mut Vec<Part>) -> bool {
        // After calls, what stands between two of them.
        let blank = |c: char| if self.has_called() { calls::is_between(c) } else { c.is_whitespace() };
        let start = self.held.len() - self.held.trim_start_matches(blank).len();
        let text = &self.held[start..];
        let opening = self.form.thinking.iter().chain(&self.form.calls).map(|m| m.open);
        for open in opening {
            if let Some(rest) = text.strip_prefix(open) {
                self.held = rest.to_owned();
                let thinks = self.form.thinking.is_some_and(|t| t.open == open);
                let state = self.form.calls.filter(|_| !thinks).map_or(State::Thinking, State::Call);
                return self.go(state);
            }
            if open.starts_with(text) {
                return false;
            }
        }
        if self.form.calls.is_some_and(|m| m == super::form::LLAMA) && calls::may_be_call(text) {
            self.look(start, None);
            let Some(end) = self.seen.object else {
                self.go_on_calling(parts);
                return false;
            };
            if let Some(call) = calls::one(&self.held[start..end]) {
                self.held.drain(..end);
                self.call(vec![call], parts);
                return true;
            }
            if self.has_begun() {
                let rest = self.held.split_off(end);
                self.cut("", parts);
                (self.held, self.seen) = (rest, Seen::default());
                return true;
            }
        }
        (self.state, self.seen) = (State::Text, Seen::default());
        true
    }

    /// Whether the name of what is held is known, and an object of arguments begins behind it.
    fn has_begun(&self) -> bool {
        self.open.is_some() || self.seen.begun.is_some()
    }

    /// Looks through what is new of a call that begins at `start` of what is held. Returns where the marker stands that
    /// ends it: not in one of its strings.
    fn look(&mut self, start: usize, close: Option<&str>) -> Option<usize> {
        let (bytes, seen) = (self.held.as_bytes(), &mut self.seen);
        seen.at = seen.at.max(start);
        while let Some(&byte) = bytes.get(seen.at) {
            if let Some(close) = close.filter(|_| !seen.nesting.is_in_string()) {
                let rest = &bytes[seen.at..];
                if rest.starts_with(close.as_bytes()) {
                    return Some(seen.at);
                }
                if close.as_bytes().starts_with(rest) {
                    return None;
                }
            }
            seen.at += 1;
            #[cfg(test)]
            (self.looked += 1);
            match seen.nesting.pass(byte) {
                Some(depth) if byte == b'{' => {
                    seen.objects += 1;
                    // The second object is that of the arguments, or nothing is known before the end.
                    if seen.objects == 2 {
                        let begun = calls::begun(&self.held[start..seen.at]);
                        seen.begun = begun.map(|(name, at)| (name, start + at));
                        seen.around = depth - 1;
                    }
                }
                Some(depth) => {
                    if depth == seen.around && seen.objects > 1 {
                        seen.arguments.get_or_insert(seen.at);
                    }
                    if depth == 0 {
                        seen.object.get_or_insert(seen.at);
                    }
                }
                None => {}
            }
        }
        None
    }

    /// Hands out what has come of a call, as far as it was looked through.
    fn go_on_calling(&mut self, parts: &mut Vec<Part>) {
        if let Some((name, from)) = self.seen.begun.take() {
            let id = self.next_id();
            parts.push(Part::Begun { id: id.clone(), name: name.clone() });
            self.open = Some(Open { id, name, from, sent: 0 });
        }
        let Some(open) = &mut self.open else { return };
        let end = self.seen.arguments.unwrap_or(self.seen.at).max(open.from);
        let arguments = &self.held[open.from..end];
        if arguments.len() > open.sent {
            parts.push(Part::Arguments(arguments[open.sent..].into()));
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

    fn go(&mut self, state: State) -> bool {
        (self.state, self.skips, self.seen) = (state, true, Seen::default());
        true
    }

    /// Hands out what comes before the first of the markers, and drops that; or all that cannot be the beginning of one.
    fn up_to_marker(&mut self, markers: &[&str], parts: &mut Vec<Part>) -> Option<()> {
        let found = markers.iter().filter_map(|m| Some((self.held.find(m)?, m.len()))).min();
        if let Some((at, len)) = found {
            self.hand_out(at, parts);
            self.held.drain(..len);
            return Some(());
        }
        let begins = |from: &usize| markers.iter().any(|m| m.starts_with(&self.held[*from..]));
        let longest = markers.iter().map(|m| m.len()).max().unwrap_or(0);
        let from = (self.held.len().saturating_sub(longest)..self.held.len())
            .filter(|&from| self.held.is_char_boundary(from))
            .find(begins);
        self.hand_out(from.unwrap_or(self.held.len()), parts);
        None
    }

    /// Hands out so many bytes of what is held.
    fn hand_out(&mut self, len: usize, parts: &mut Vec<Part>) -> bool {
        let text: String = self.held.drain(..len).collect();
        self.say(&text, parts);
        false
    }

    fn say(&self, text: &str, parts: &mut Vec<Part>) {
        let thinks = self.is_thinking();
        match parts.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Thinking(before)) if thinks => before.push_str(text),
            Some(Part::Text(before)) if !thinks => before.push_str(text),
            _ => parts.push(if thinks { Part::Thinking(text.into()) } else { Part::Text(text.into()) }),
        }
    }

    fn call(&mut self, found: Vec<calls::Call>, parts: &mut Vec<Part>) {
        self.seen = Seen::default();
        for (name, arguments) in found {
            let open = self.open.take().unwrap_or_else(|| {
                let id = self.next_id();
                parts.push(Part::Begun { id: id.clone(), name: name.clone() });
                Open { id, name: name.clone(), from: 0, sent: 0 }
            });
            if open.sent < arguments.len() {
                parts.push(Part::Arguments(arguments[open.sent..].into()));
            }
            parts.push(Part::Call(ToolCall { id: open.id, name, arguments }));
        }
    }
}

#[cfg(test)]
mod tests;
