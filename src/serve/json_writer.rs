//! JSON response bodies, written as bytes. Long lists are serialized only as they are sent.

use hyper::body::Bytes;
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;

/// Approximate size of a frame, in bytes.
pub const FRAME: usize = 16 << 10;

/// Writes one item of a list.
type WriteItem = Box<dyn FnMut(usize, &mut Vec<u8>) + Send>;

enum JsonPart {
    Bytes(Bytes),
    /// A list whose items are serialized as they are sent.
    List {
        items: usize,
        next: usize,
        write_item: WriteItem,
    },
}

/// JSON that is written, then sent frame by frame.
#[derive(Default)]
pub struct JsonWriter {
    parts: VecDeque<JsonPart>,
    /// Bytes after the last part.
    tail: Vec<u8>,
    /// Last byte so far, which decides if a comma comes next.
    last: u8,
}

/// Appends a value to other bytes.
pub fn write_json(value: &(impl Serialize + ?Sized), to: &mut Vec<u8>) {
    // Only a map with keys other than strings fails.
    let written = serde_json::to_writer(to, value);
    debug_assert!(written.is_ok(), "{written:?}");
}

impl JsonWriter {
    /// Bytes to be sent unchanged.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Self {
        Self { parts: [JsonPart::Bytes(bytes.into())].into(), ..Self::default() }
    }

    /// One value.
    pub fn from_value(value: &(impl Serialize + ?Sized)) -> Self {
        let mut writer = Self::default();
        writer.write_value(value);
        writer
    }

    fn write_comma(&mut self) {
        if !b"\0[{:".contains(&self.last) {
            self.tail.push(b',');
        }
    }

    fn write_delimiter(&mut self, byte: u8) {
        self.tail.push(byte);
        self.last = byte;
    }

    pub fn write_value(&mut self, value: &(impl Serialize + ?Sized)) {
        self.write_comma();
        write_json(value, &mut self.tail);
        self.last = b'"';
    }

    /// Writes the name of a field; its value comes next.
    pub fn write_key(&mut self, name: &str) {
        self.write_value(name);
        self.write_delimiter(b':');
    }

    pub fn write_field(&mut self, name: &str, value: &(impl Serialize + ?Sized)) {
        self.write_key(name);
        self.write_value(value);
    }

    /// Writes an array with the items that `write_items` writes.
    pub fn write_array(&mut self, write_items: impl FnOnce(&mut Self)) {
        self.write_comma();
        self.write_delimiter(b'[');
        write_items(self);
        self.write_delimiter(b']');
    }

    /// Writes an object with the fields that `write_fields` writes.
    pub fn write_object(&mut self, write_fields: impl FnOnce(&mut Self)) {
        self.write_comma();
        self.write_delimiter(b'{');
        write_fields(self);
        self.write_delimiter(b'}');
    }

    /// Writes an object; `write_value` replaces the value of one field.
    pub fn write_object_with(&mut self, object: &Value, field: &str, write_value: impl FnOnce(&mut Self)) {
        let mut write_value = Some(write_value);
        self.write_object(|out| {
            for (name, value) in object.as_object().into_iter().flatten() {
                match write_value.take_if(|_| name.as_str() == field) {
                    Some(write_value) => {
                        out.write_key(name);
                        write_value(out);
                    }
                    None => out.write_field(name, value),
                }
            }
        });
    }

    /// Writes a list of `items` items that are serialized as they are sent.
    pub fn write_list(&mut self, items: usize, write_item: impl FnMut(usize, &mut Vec<u8>) + Send + 'static) {
        self.write_array(|out| {
            out.parts.push_back(JsonPart::Bytes(std::mem::take(&mut out.tail).into()));
            out.parts.push_back(JsonPart::List { items, next: 0, write_item: Box::new(write_item) });
        });
    }

    /// Total length in bytes, if no list has to be serialized.
    pub fn len(&self) -> Option<usize> {
        self.parts.iter().try_fold(self.tail.len(), |sum, part| match part {
            JsonPart::Bytes(bytes) => Some(sum + bytes.len()),
            JsonPart::List { .. } => None,
        })
    }

    /// Takes the next bytes to send.
    pub fn next_frame(&mut self) -> Option<Bytes> {
        if self.parts.is_empty() && !self.tail.is_empty() {
            self.parts.push_back(JsonPart::Bytes(std::mem::take(&mut self.tail).into()));
        }
        let (frame, is_over) = match self.parts.front_mut()? {
            JsonPart::Bytes(bytes) => (bytes.split_to(bytes.len().min(FRAME)), bytes.is_empty()),
            JsonPart::List { items, next, write_item } => {
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

    /// Serializes everything.
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
            writer.write_object_with(&json!({"a": 1, "b": null, "c": "x"}), "b", |out| {
                out.write_array(|out| {
                    out.write_list(n, |i, to| write_json(&i, to));
                    out.write_value("y");
                    out.write_object(|_| ());
                    out.write_object(|out| out.write_field("d", &[1.5]));
                });
            });
            assert_eq!(writer.len(), None);
            let expected =
                json!({"a": 1, "b": [(0..n).collect::<Vec<_>>(), "y", {}, {"d": [1.5]}], "c": "x"});
            let text = writer.into_text();
            assert_eq!(serde_json::from_str::<Value>(&text).expect(&text), expected);
        }
        let long = "x".repeat(3 * FRAME);
        let mut writer = JsonWriter::from_value(&long);
        assert_eq!(writer.len(), Some(long.len() + 2));
        assert!(writer.next_frame().is_some_and(|first| first.len() == FRAME));
        assert_eq!(JsonWriter::from_bytes("abc").into_text(), "abc");
    }
}
