//! Messages and JSON as values of the interpreter. The fields of objects keep their order: a model was trained on it.

use crate::chat::{Message, Role, Variables};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// Any JSON.
struct Json(Value);

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyJson).map(Json)
    }
}

struct AnyJson;

impl<'de> Visitor<'de> for AnyJson {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        Ok(Value::from(()))
    }

    fn visit_bool<E: Error>(self, v: bool) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_i64<E: Error>(self, v: i64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_u64<E: Error>(self, v: u64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_f64<E: Error>(self, v: f64) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_str<E: Error>(self, v: &str) -> Result<Value, E> {
        Ok(Value::from(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Json(item)) = list.next_element()? {
            items.push(item);
        }
        Ok(Value::from(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut fields: Vec<(String, Value)> = Vec::new();
        while let Some((name, Json(value))) = map.next_entry::<String, Json>()? {
            fields.push((name, value));
        }
        Ok(Value::from_pairs(fields))
    }
}

/// What `json` says, or the text that it is.
fn json(json: &str) -> Value {
    serde_json::from_str(json).map_or_else(|_| Value::from(json), |Json(value)| value)
}

/// A message, with the fields that transformers gives it. A template may ask which there are.
fn message(m: &Message, tools: Option<&str>) -> Value {
    let mut fields = vec![("role", Value::from(m.role.name())), ("content", Value::from(m.content.as_str()))];
    if let Some(reasoning) = &m.reasoning {
        fields.push(("reasoning_content", Value::from(reasoning.as_str())));
    }
    if !m.tool_calls.is_empty() {
        let call = |call: &crate::chat::ToolCall| {
            let function = [("name", Value::from(call.name.as_str())), ("arguments", json(&call.arguments))];
            Value::from_pairs([
                ("id", Value::from(call.id.as_str())),
                ("type", Value::from("function")),
                ("function", Value::from_pairs(function)),
            ])
        };
        fields.push(("tool_calls", m.tool_calls.iter().map(call).collect::<Vec<_>>().into()));
    }
    for (name, value) in [("tool_call_id", &m.tool_call_id), ("name", &m.name)] {
        fields.extend(value.as_deref().map(|value| (name, Value::from(value))));
    }
    // Phi 4 mini looks for them there, as a text.
    fields.extend(tools.filter(|_| m.role == Role::System).map(|tools| ("tools", Value::from(tools))));
    Value::from_pairs(fields)
}

/// `messages`, `tools` and a caller's own variables.
pub(super) fn all(messages: &[Message], variables: Option<&Variables>) -> Vec<(String, Value)> {
    let tools = variables.and_then(|v| v.tools.as_ref()).map(|tools| tools.json());
    let list: Vec<Value> = messages.iter().map(|m| message(m, tools)).collect();
    let mut values =
        vec![("messages".into(), Value::from(list)), ("tools".into(), tools.map_or(Value::from(()), json))];
    let own = variables.map_or(&[][..], |v| v.own());
    values.extend(own.iter().map(|(name, value)| (name.clone(), json(value))));
    values
}

/// Hands every text in `value` to `each`; its nesting has a limit.
pub(super) fn texts(value: &Value, each: &mut dyn FnMut(&str)) {
    if let Some(text) = value.as_str() {
        return each(text);
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return;
    }
    for item in value.try_iter().into_iter().flatten() {
        if value.kind() == ValueKind::Map {
            value.get_item(&item).iter().for_each(|value| texts(value, each));
        }
        texts(&item, each);
    }
}
