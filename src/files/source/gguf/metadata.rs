//! The metadata of a GGUF file: values by key, asked for by the type that they should have.

use std::collections::BTreeMap;

use super::super::quoted::quoted;
use super::value::{Array, Strings, Value};

/// Values by key.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata(BTreeMap<String, Value>);

impl Metadata {
    /// Adds a value, of which there can be only one.
    pub fn insert(&mut self, key: String, value: Value) -> Result<(), String> {
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
    /// The value is something else. The message names key, value and what is supported; so it is with the others.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, String> {
        self.typed(key, "an integer of 0 or more", Value::as_u64)
    }

    /// A floating-point number, if the key is there.
    ///
    /// # Errors
    ///
    /// The value is something else, or of 32 bits and not finite.
    pub fn float(&self, key: &str) -> Result<Option<f64>, String> {
        self.typed(key, "a floating-point number", Value::as_f64)
    }

    /// A string, if the key is there.
    ///
    /// # Errors
    ///
    /// The value is something else.
    pub fn text(&self, key: &str) -> Result<Option<&str>, String> {
        self.typed(key, "a string", Value::as_str)
    }

    /// A truth value, if the key is there.
    ///
    /// # Errors
    ///
    /// The value is something else.
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
    /// The value is something else.
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
        match self.0.get(key) {
            None => Ok(None),
            Some(value) => match read(value) {
                Some(found) => Ok(Some(found)),
                None => Err(format!("metadata {} is {value}; supported: {supported}", quoted(key))),
            },
        }
    }
}
