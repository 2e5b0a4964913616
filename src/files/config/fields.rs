//! Fields of a JSON object by the type that they should have, and the error for those that are not.

use crate::error::unquoted;
use serde_json::{Map, Value};

/// One unusable field. Its message is one line.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("field `{field}` is {value}; supported: {supported}")]
pub struct ConfigError {
    /// The field's name in the file.
    pub field: String,
    /// Its value, as JSON.
    pub value: String,
    /// What would be accepted.
    pub supported: String,
}

impl ConfigError {
    pub fn new(field: impl Into<String>, value: impl Into<String>, supported: impl Into<String>) -> Self {
        Self { field: field.into(), value: value.into(), supported: supported.into() }
    }
}

/// An object's fields. `null` counts as missing.
pub(super) struct Fields<'a>(pub &'a Map<String, Value>);

impl Fields<'_> {
    pub fn present(&self, field: &str) -> Option<&Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    pub fn err<T>(&self, field: &str, supported: &str) -> Result<T, ConfigError> {
        let found = self.0.get(field).map_or("missing".into(), Value::to_string);
        Err(ConfigError::new(field, unquoted(&found), supported))
    }

    pub fn size(&self, field: &str, default: Option<usize>, max: usize) -> Result<usize, ConfigError> {
        let found = match self.present(field) {
            None => default,
            Some(v) => v.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (1..=max).contains(n)),
        };
        found.map_or_else(|| self.err(field, &format!("an integer from 1 to {max}")), Ok)
    }

    /// A number that is positive and finite in f32 too.
    pub fn float(&self, field: &str, default: Option<f64>) -> Result<f64, ConfigError> {
        let found = match self.present(field) {
            None => default,
            Some(v) => v.as_f64().filter(|&x| (x as f32).is_finite() && x as f32 > 0.0),
        };
        found.map_or_else(|| self.err(field, "a positive number"), Ok)
    }

    pub fn flag(&self, field: &str, default: bool) -> Result<bool, ConfigError> {
        match self.present(field) {
            None => Ok(default),
            Some(Value::Bool(b)) => Ok(*b),
            Some(_) => self.err(field, "true or false"),
        }
    }
}
