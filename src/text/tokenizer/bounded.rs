//! JSON values of a bounded size: a file of 64 MB must not become gigabytes of small objects.

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;

/// Published files have a few thousand, for their added tokens.
const MAX_VALUES: usize = 100_000;

/// Reads an optional value, for `#[serde(deserialize_with)]`.
pub(super) fn value<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    let mut left = MAX_VALUES;
    let value = Bounded(&mut left).deserialize(deserializer)?;
    Ok(Some(value).filter(|v| !v.is_null()))
}

/// One value, which takes itself and all inside from what is left.
struct Bounded<'a>(&'a mut usize);

impl<'de> DeserializeSeed<'de> for Bounded<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.0.checked_sub(1) {
            Some(left) => *self.0 = left,
            None => return Err(D::Error::custom(format_args!("more than {MAX_VALUES} values"))),
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Bounded<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut list = vec![];
        while let Some(item) = seq.next_element_seed(Bounded(self.0))? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(Bounded(self.0))?;
            if object.insert(key, value).is_some() {
                return Err(A::Error::custom("a field named twice"));
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    fn read(json: &str) -> Result<Option<serde_json::Value>, serde_json::Error> {
        super::value(&mut serde_json::Deserializer::from_str(json))
    }

    #[test]
    fn small_values_come_as_they_are() {
        let json = r#"{"a":[1,-2,0.5,"x",true,null,{}],"b":{"c":[]}}"#;
        let value = read(json).expect("small").expect("not null");
        assert_eq!(value.to_string(), json);
        assert_eq!(read("null").expect("JSON"), None);
    }

    #[test]
    fn large_values_are_refused() {
        assert!(read(&format!("[{}1]", "1,".repeat(99_000))).is_ok());
        assert!(read(&format!("[{}1]", "1,".repeat(100_000))).is_err());
        assert!(read(&format!("[{}{{}}]", "{},".repeat(100_000))).is_err());
        assert!(read(r#"{"a":1,"a":2}"#).is_err());
    }
}
