//! Body of an answer: JSON that is written as bytes, and of which long lists become bytes only when they are sent.

use hyper::body::Bytes;
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;

/// Bytes that are sent at once, more or less.
pub const FRAME: usize = 16 << 10;

/// Writes one item of a list.
type WriteItem = Box<dyn FnMut(usize, &mut Vec<u8>) + Send>;

enum Part {
    Bytes(Bytes),
    /// A list whose items are written when they are sent.
    List {
        items: usize,
        next: usize,
        write_item: WriteItem,
    },
}

/// JSON that is being written, then sent.
#[derive(Default)]
pub struct JsonWriter {
    parts: VecDeque<Part>,
    /// Bytes behind the last part.
    tail: Vec<u8>,
    /// Last byte so far, which says whether a comma comes next.
    last: u8,
}

/// Writes a value behind other bytes.
pub fn write_json(value: &(impl Serialize + ?Sized), to: &mut Vec<u8>) {
    // Only a map whose keys are no texts fails.
    let written = serde_json::to_writer(to, value);
    debug_assert!(written.is_ok(), "{written:?}");
}

impl JsonWriter {
    /// Bytes that are sent as they are.
    pub fn raw(bytes: impl Into<Bytes>) -> Self {
        Self { parts: [Part::Bytes(bytes.into())].into(), ..Self::default() }
    }

    /// One value.
    pub fn of(value: &(impl Serialize + ?Sized)) -> Self {
        let mut writer = Self::default();
        writer.value(value);
        writer
    }

    fn separate(&mut self) {
        if !b"\0[{:".contains(&self.last) {
            self.tail.push(b',');
        }
    }

    fn mark(&mut self, byte: u8) {
        self.tail.push(byte);
        self.last = byte;
    }

    pub fn value(&mut self, value: &(impl Serialize + ?Sized)) {
        self.separate();
        write_json(value, &mut self.tail);
        self.last = b'"';
    }

    /// Writes the name of a field, whose value comes next.
    pub fn key(&mut self, name: &str) {
        self.value(name);
        self.mark(b':');
    }

    pub fn field(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        self.key(name);
        self.value(value);
    }

    /// Writes a list whose items a function writes.
    pub fn array(&mut self, write_items: impl FnOnce(&mut Self)) {
        self.separate();
        self.mark(b'[');
        write_items(self);
        self.mark(b']');
    }

    /// Writes an object whose fields a function writes.
    pub fn object(&mut self, write_fields: impl FnOnce(&mut Self)) {
        self.separate();
        self.mark(b'{');
        write_fields(self);
        self.mark(b'}');
    }

    /// Writes an object, in which a function writes the value of one field.
    pub fn object_with(&mut self, object: &Value, field: &str, write_value: impl FnOnce(&mut Self)) {
        let mut write_value = Some(write_value);
        self.object(|out| {
            for (name, value) in object.as_object().into_iter().flatten() {
                match write_value.take_if(|_| name.as_str() == field) {
                    Some(write_value) => {
                        out.key(name);
                        write_value(out);
                    }
                    None => out.field(name, value),
                }
            }
        });
    }

    /// Writes a list of so many items, which become bytes when they are sent.
    pub fn list(&mut self, items: usize, write_item: impl FnMut(usize, &mut Vec<u8>) + Send + 'static) {
        self.array(|out| {
            out.parts.push_back(Part::Bytes(std::mem::take(&mut out.tail).into()));
            out.parts.push_back(Part::List { items, next: 0, write_item: Box::new(write_item) });
        });
    }

    /// Bytes in all, where that is known.
    pub fn len(&self) -> Option<usize> {
        self.parts.iter().try_fold(self.tail.len(), |sum, part| match part {
            Part::Bytes(bytes) => Some(sum + bytes.len()),
            Part::List { .. } => None,
        })
    }

    /// Takes the next bytes to be sent.
    pub fn next_frame(&mut self) -> Option<Bytes> {
        if self.parts.is_empty() && !self.tail.is_empty() {
            self.parts.push_back(Part::Bytes(std::mem::take(&mut self.tail).into()));
        }
        let (frame, is_over) = match self.parts.front_mut()? {
            Part::Bytes(bytes) => (bytes.split_to(bytes.len().min(FRAME)), bytes.is_empty()),
            Part::List { items, next, write_item } => {
                let mut some = Vec::with_capacity(FRAME);
                while some.len() < FRAME && *next < *items {
                    if *next > 0 {
                        some.push(b',');
                    }
                    write_item(*next, &mut some);
                    *next += 1;
                }
                (some.into(), *next == *items)
            }
        };
        if is_over {
            self.parts.pop_front();
        }
        if frame.is_empty() { self.next_frame() } else { Some(frame) }
    }

    /// All of it.
    pub fn into_text(mut self) -> String {
        let all: Vec<u8> = std::iter::from_fn(|| self.next_frame()).flatten().collect();
        String::from_utf8_lossy(&all).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_the_same_however_long_its_lists_are() {
        for n in [0, 1, 2, 9000] {
            let mut writer = JsonWriter::default();
            writer.object_with(&json!({"a": 1, "b": null, "c": "x"}), "b", |out| {
                out.array(|out| {
                    out.list(n, |i, to| write_json(&i, to));
                    out.value("y");
                    out.object(|_| ());
                    out.object(|out| out.field("d", &[1.5]));
                });
            });
            assert_eq!(writer.len(), None);
            let expected =
                json!({"a": 1, "b": [(0..n).collect::<Vec<_>>(), "y", {}, {"d": [1.5]}], "c": "x"});
            let text = writer.into_text();
            assert_eq!(serde_json::from_str::<Value>(&text).expect(&text), expected);
        }
        let long = "x".repeat(3 * FRAME);
        let mut writer = JsonWriter::of(&long);
        assert_eq!(writer.len(), Some(long.len() + 2));
        assert!(writer.next_frame().is_some_and(|first| first.len() == FRAME));
        assert_eq!(JsonWriter::raw("abc").into_text(), "abc");
    }
}
