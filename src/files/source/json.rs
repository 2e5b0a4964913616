//! Parses JSON from untrusted files: bounded nesting, no duplicate keys, and errors that name the place.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Deserialize, DeserializeOwned, Deserializer, Error, MapAccess, Visitor};

use crate::error::{one_line, quote};
use crate::json_depth::list_tokens;

/// Maximum nesting: more than any file read here needs, and far below any stack limit.
const MAX_DEPTH: usize = 16;

/// Maximum bytes of a message, which may quote the file.
const LONGEST: usize = 240;

/// Parses a JSON object. Errors are one short line.
pub fn parse_object<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    // Copied first: the bytes of a mapped file could change after the check.
    let text = String::from_utf8(bytes.to_vec())
        .map_err(|e| format!("byte {} of the JSON is not UTF-8", e.utf8_error().valid_up_to()))?;
    match text.chars().next() {
        Some('{') => {}
        Some(first) => return Err(format!("the JSON starts with {first:?}, not '{{'")),
        None => return Err("the JSON is empty".into()),
    }
    check_depth(text.as_bytes())?;
    serde_json::from_str(&text).map_err(|e| one_line(&e.to_string(), LONGEST))
}

/// Rejects JSON with too many open brackets outside strings. The parser finds other errors later.
fn check_depth(bytes: &[u8]) -> Result<(), String> {
    match list_tokens(bytes).find(|mark| mark.depth > MAX_DEPTH) {
        None => Ok(()),
        Some(mark) => Err(format!("the JSON is nested more than {MAX_DEPTH} deep at byte {}", mark.at)),
    }
}

/// Adds the place in the file to an error.
pub fn add_context<E: Error>(place: impl fmt::Display) -> impl FnOnce(E) -> E {
    move |e| E::custom(format_args!("{place}: {e}"))
}

/// A struct written as an object. Derived code alone would also accept an array of its fields.
pub struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OnlyMap<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for OnlyMap<T> {
            type Value = T;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map))
            }
        }
        deserializer.deserialize_map(OnlyMap(PhantomData)).map(Object)
    }
}

/// An object with any keys, each at most once. Errors in a value name its key.
pub struct UniqueMap<T>(pub BTreeMap<String, T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for UniqueMap<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Unique<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Unique<T> {
            type Value = BTreeMap<String, T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut seen = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let value = map.next_value().map_err(add_context(quote(&key)))?;
                    insert_new(&mut seen, key, value)?;
                }
                Ok(seen)
            }
        }
        deserializer.deserialize_map(Unique(PhantomData)).map(UniqueMap)
    }
}

/// Inserts a value; its key must be new.
pub fn insert_new<T, E: Error>(map: &mut BTreeMap<String, T>, key: String, value: T) -> Result<(), E> {
    if map.contains_key(&key) {
        return Err(E::custom(format_args!("{} occurs twice", quote(&key))));
    }
    map.insert(key, value);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_strings_are_not_nesting() {
        assert_eq!(check_depth(br#"{"[[[[[[[[[[[[[[[[[[[[\"[[[[[[[[[[[[": {}, "\\": []}"#), Ok(()));
        assert!(check_depth(&[b'['; MAX_DEPTH]).is_ok());
        assert!(check_depth(&[b'['; MAX_DEPTH + 1]).is_err());
    }
}
