//! Reads JSON files; every error names the file and the field.

use crate::error::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// One JSON value and the file it came from.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    pub file: &'a Path,
    pub value: &'a Value,
}

/// Parses a file.
pub fn read(file: &Path) -> Result<Value> {
    let text = std::fs::read_to_string(file).map_err(|e| Error::at(file, e))?;
    serde_json::from_str(&text).map_err(|e| Error::at(file, e))
}

impl<'a> Node<'a> {
    /// A field that must be there and not null.
    pub fn get(self, field: &str) -> Result<Node<'a>> {
        self.find(field).ok_or_else(|| self.missing(field))
    }

    /// A field that may be missing or null.
    pub fn find(self, field: &str) -> Option<Node<'a>> {
        let value = self.value.get(field).filter(|v| !v.is_null())?;
        Some(Node { value, ..self })
    }

    pub fn text(self, field: &str) -> Result<&'a str> {
        self.get(field)?.value.as_str().ok_or_else(|| self.wrong(field, "a string"))
    }

    pub fn size(self, field: &str) -> Result<usize> {
        let n = self.get(field)?.value.as_u64().and_then(|n| usize::try_from(n).ok());
        n.ok_or_else(|| self.wrong(field, "a whole number"))
    }

    pub fn float(self, field: &str) -> Result<f64> {
        self.get(field)?.value.as_f64().ok_or_else(|| self.wrong(field, "a number"))
    }

    /// The elements of this value, which is a list.
    pub fn list(self) -> Result<impl Iterator<Item = Node<'a>>> {
        let items = self.value.as_array().ok_or_else(|| Error::at(self.file, "a list was expected"))?;
        Ok(items.iter().map(move |value| Node { value, ..self }))
    }

    pub fn ids(self, field: &str) -> Result<Vec<u32>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let ids = self.get(field)?.value.as_array().and_then(|list| list.iter().map(id).collect());
        ids.ok_or_else(|| self.wrong(field, "a list of token ids"))
    }

    pub fn floats(self, field: &str) -> Result<Vec<f64>> {
        let list = self.get(field)?.value.as_array();
        let list = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        list.ok_or_else(|| self.wrong(field, "a list of numbers"))
    }

    fn missing(self, field: &str) -> Error {
        Error::at(self.file, format!("field `{field}` is missing"))
    }

    fn wrong(self, field: &str, wanted: &str) -> Error {
        Error::at(self.file, format!("field `{field}` is not {wanted}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_file_and_field() {
        let value = serde_json::json!({"a": null, "ids": [1, -1], "b": 1.5});
        let node = Node { file: Path::new("x.json"), value: &value };
        assert!(node.find("a").is_none());
        for e in [node.get("a").err(), node.ids("ids").err(), node.size("b").err(), node.text("b").err()] {
            let e = e.expect("an error").to_string();
            assert!(e.starts_with("x.json: field `"), "{e}");
        }
        assert_eq!(node.float("b").unwrap(), 1.5);
    }
}
