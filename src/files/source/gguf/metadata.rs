//! The metadata of a GGUF file: values by key, read as the type that they should have.

use std::collections::BTreeMap;

use super::value::{Array, Strings, Value};
use crate::error::quoted;

/// Values by key.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata(BTreeMap<String, Value>);

impl Metadata {
    /// Adds a value; its key must be new.
    pub(super) fn insert(&mut self, key: String, value: Value) -> Result<(), String> {
        if self.0.contains_key(&key) {
            return Err(format!("metadata {} is there twice", quoted(&key)));
        }
        self.0.insert(key, value);
        Ok(())
    }

    /// The value of `key`, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// An integer of 0 or more, if the key is there.
    ///
    /// # Errors
    ///
    /// The value is of another type. The message names key, value and what is supported. (So do the other methods.)
    pub fn integer(&self, key: &str) -> Result<Option<u64>, String> {
        self.typed(key, "an integer of 0 or more", Value::as_u64)
    }

    /// A string, if the key is there.
    ///
    /// # Errors
    ///
    /// The value is of another type.
    pub fn text(&self, key: &str) -> Result<Option<&str>, String> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A truth value, if the key is there.
    ///
    /// # Errors
    ///
    /// The value is of another type.
    pub fn truth(&self, key: &str) -> Result<Option<bool>, String> {
        self.typed(key, "a truth value", |value| match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// An array of strings, if the key is there.
    ///
    /// # Errors
    ///
    /// The value is of another type.
    pub fn strings(&self, key: &str) -> Result<Option<&Strings>, String> {
        self.typed(key, "an array of strings", |value| match value {
            Value::Array(Array::Strings(strings)) => Some(strings),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        supported: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let refused = || format!("metadata {} is {value}; supported: {supported}", quoted(key));
        read(value).map(Some).ok_or_else(refused)
    }
}
