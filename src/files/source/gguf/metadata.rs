//! The metadata of a GGUF file: values by key, with typed access.

use std::collections::BTreeMap;

use super::value::{Array, Strings, Value};
use crate::error::quote;

/// Values by key.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Metadata(BTreeMap<String, Value>);

impl Metadata {
    /// Adds a value; its key must be new.
    pub(super) fn insert(&mut self, key: String, value: Value) -> Result<(), String> {
        if self.0.contains_key(&key) {
            return Err(format!("metadata {} occurs twice", quote(&key)));
        }
        self.0.insert(key, value);
        Ok(())
    }

    /// Value of `key`, of any type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0.get(key)
    }

    /// Keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Reads an integer of 0 or more; `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// The value has another type. The message names key, value and the supported type, as in the other methods.
    pub fn get_u64(&self, key: &str) -> Result<Option<u64>, String> {
        self.read_typed(key, "an integer of 0 or more", Value::as_u64)
    }

    /// Reads a string; `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// The value has another type.
    pub fn get_str(&self, key: &str) -> Result<Option<&str>, String> {
        self.read_typed(key, "a string", Value::as_str)
    }

    /// Reads a boolean; `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// The value has another type.
    pub fn get_bool(&self, key: &str) -> Result<Option<bool>, String> {
        self.read_typed(key, "a boolean", |value| match value {
            Value::Bool(truth) => Some(*truth),
            _ => None,
        })
    }

    /// Reads an array of strings; `None` if the key is missing.
    ///
    /// # Errors
    ///
    /// The value has another type.
    pub fn get_strings(&self, key: &str) -> Result<Option<&Strings>, String> {
        self.read_typed(key, "an array of strings", |value| match value {
            Value::Array(Array::Strings(strings)) => Some(strings),
            _ => None,
        })
    }

    fn read_typed<'a, T>(
        &'a self,
        key: &str,
        supported: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, String> {
        let Some(value) = self.0.get(key) else { return Ok(None) };
        let refused = || format!("metadata {} is {value}; supported: {supported}", quote(key));
        read(value).map(Some).ok_or_else(refused)
    }
}
