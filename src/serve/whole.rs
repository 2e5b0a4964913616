//! A whole answer: JSON that is written as bytes, and of which long lists become bytes only when they are sent.

use hyper::body::Bytes;
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;
use std::task::Context;

/// Bytes that are sent at once, more or less.
pub const FRAME: usize = 16 << 10;

/// Whose turn it is between two parts of an answer: that of other connections, or of this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Turn {
    #[default]
    Own,
    Others,
}

impl Turn {
    /// Whether it is another's turn now; then it is the own one next.
    pub fn is_others(&mut self, context: &Context<'_>) -> bool {
        let others = std::mem::take(self) == Turn::Others;
        if others {
            context.waker().wake_by_ref();
        }
        others
    }
}

/// Writes one item of a list.
type WriteItem = Box<dyn FnMut(usize, &mut Vec<u8>) + Send>;

enum Part {
    Text(Bytes),
    /// How many items there are, the next one, and what writes them.
    List(usize, usize, WriteItem),
}

/// JSON that is being written, then sent.
#[derive(Default)]
pub struct Whole {
    parts: VecDeque<Part>,
    /// Text behind the last part.
    text: Vec<u8>,
    /// The last byte so far, which says whether a comma comes next.
    last: u8,
}

/// Writes a value behind other text.
pub fn write(value: &(impl Serialize + ?Sized), to: &mut Vec<u8>) {
    // Only a map whose keys are no texts fails.
    let written = serde_json::to_writer(to, value);
    debug_assert!(written.is_ok(), "{written:?}");
}

impl Whole {
    /// One value.
    pub fn of(value: &impl Serialize) -> Self {
        let mut whole = Self::default();
        whole.value(value);
        whole
    }

    fn separate(&mut self) {
        if !b"\0[{:".contains(&self.last) {
            self.text.push(b',');
        }
    }

    fn mark(&mut self, byte: u8) {
        self.text.push(byte);
        self.last = byte;
    }

    /// Begins an object or a list.
    pub fn begin(&mut self, bracket: u8) {
        self.separate();
        self.mark(bracket);
    }

    /// Ends one.
    pub fn end(&mut self, bracket: u8) {
        self.mark(bracket);
    }

    /// The name of a field, whose value comes next.
    pub fn key(&mut self, name: &str) {
        self.value(name);
        self.mark(b':');
    }

    /// A value.
    pub fn value(&mut self, value: &(impl Serialize + ?Sized)) {
        self.separate();
        write(value, &mut self.text);
        self.last = b'"';
    }

    /// A field.
    pub fn field(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        self.key(name);
        self.value(value);
    }

    /// An object, in which something else is written in place of one field.
    pub fn object_with(&mut self, object: &Value, field: &str, write: impl FnOnce(&mut Self)) {
        let mut write = Some(write);
        self.begin(b'{');
        for (name, value) in object.as_object().into_iter().flatten() {
            match write.take_if(|_| name.as_str() == field) {
                Some(write) => {
                    self.key(name);
                    write(self);
                }
                None => self.field(name, value),
            }
        }
        self.end(b'}');
    }

    /// A list of so many items, which are written when they are sent.
    pub fn list(&mut self, items: usize, item: impl FnMut(usize, &mut Vec<u8>) + Send + 'static) {
        self.begin(b'[');
        self.parts.push_back(Part::Text(std::mem::take(&mut self.text).into()));
        self.parts.push_back(Part::List(items, 0, Box::new(item)));
        self.end(b']');
    }

    /// How many bytes it has, where that is known.
    pub fn len(&self) -> Option<usize> {
        let sum = |sum: usize, part: &Part| match part {
            Part::Text(text) => Some(sum + text.len()),
            Part::List(..) => None,
        };
        self.parts.iter().try_fold(self.text.len(), sum)
    }

    /// The next bytes to be sent.
    pub fn next(&mut self) -> Option<Bytes> {
        if self.parts.is_empty() && !self.text.is_empty() {
            self.parts.push_back(Part::Text(std::mem::take(&mut self.text).into()));
        }
        let (bytes, over) = match self.parts.front_mut()? {
            Part::Text(text) => (text.split_to(text.len().min(FRAME)), text.is_empty()),
            Part::List(items, next, item) => {
                let mut some = Vec::with_capacity(FRAME);
                while some.len() < FRAME && *next < *items {
                    if *next > 0 {
                        some.push(b',');
                    }
                    item(*next, &mut some);
                    *next += 1;
                }
                (some.into(), *next == *items)
            }
        };
        if over {
            self.parts.pop_front();
        }
        if bytes.is_empty() { self.next() } else { Some(bytes) }
    }

    /// All of it.
    pub fn into_text(mut self) -> String {
        let mut all = Vec::new();
        while let Some(bytes) = self.next() {
            all.extend_from_slice(&bytes);
        }
        String::from_utf8_lossy(&all).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_written_is_the_same_json_however_long() {
        for n in [0, 1, 2, 9000] {
            let mut whole = Whole::default();
            whole.object_with(&json!({"a": 1, "b": null, "c": "x"}), "b", |whole| {
                whole.begin(b'[');
                whole.list(n, |i, to| write(&i, to));
                whole.value("y");
                whole.begin(b'{');
                whole.end(b'}');
                whole.begin(b'{');
                whole.field("d", &[1.5]);
                whole.end(b'}');
                whole.end(b']');
            });
            assert_eq!(whole.len(), None);
            let expected =
                json!({"a": 1, "b": [(0..n).collect::<Vec<_>>(), "y", {}, {"d": [1.5]}], "c": "x"});
            let text = whole.into_text();
            assert_eq!(serde_json::from_str::<Value>(&text).expect(&text), expected);
        }
        let long = "x".repeat(3 * FRAME);
        let mut whole = Whole::of(&long);
        assert_eq!(whole.len(), Some(long.len() + 2));
        assert!(whole.next().is_some_and(|first| first.len() == FRAME));
    }
}
