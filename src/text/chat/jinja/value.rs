//! Converts messages and JSON to values of the interpreter. Objects keep the order of their fields, which models were
//! trained on.

use crate::chat::{Message, TemplateKwargs};
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;

/// The fields of an object, in order.
struct Fields<'a>(Vec<(String, &'a RawValue)>);

impl<'a, 'de: 'a> Deserialize<'de> for Fields<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyFields;

        impl<'de> Visitor<'de> for AnyFields {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(AnyFields)
    }
}

/// Parses `json`; text that is not JSON becomes a string.
fn parse_json(json: &str) -> Value {
    serde_json::from_str(json).and_then(convert_json).unwrap_or_else(|_| Value::from(json))
}

/// Converts a value like Python's `json.loads`; the caller has limited its nesting.
fn convert_json(raw: &RawValue) -> serde_json::Result<Value> {
    let json = raw.get();
    Ok(match json.as_bytes()[0] {
        b'{' => {
            let Fields(fields) = serde_json::from_str(json)?;
            let fields: serde_json::Result<Vec<_>> =
                fields.into_iter().map(|(name, value)| Ok((name, convert_json(value)?))).collect();
            Value::from_pairs(fields?)
        }
        b'[' => {
            let items: Vec<&RawValue> = serde_json::from_str(json)?;
            Value::from(items.into_iter().map(convert_json).collect::<serde_json::Result<Vec<_>>>()?)
        }
        b'"' => Value::from(serde_json::from_str::<String>(json)?),
        b't' | b'f' => Value::from(json == "true"),
        b'n' => Value::from(()),
        _ => parse_number(json),
    })
}

/// Parses a number of JSON.
fn parse_number(json: &str) -> Value {
    if let Ok(number) = json.parse::<i64>() {
        return Value::from(number);
    }
    match json.parse::<i128>() {
        Ok(number) => Value::from(number),
        Err(_) => json.parse::<f64>().map_or_else(|_| Value::from(json), Value::from),
    }
}

/// Converts a message, with the fields that transformers gives it. A template may test which fields there are.
fn convert_message(m: &Message) -> Value {
    let mut fields = vec![("role", Value::from(m.role.name())), ("content", Value::from(m.content.as_str()))];
    if let Some(reasoning) = &m.reasoning {
        fields.push(("reasoning_content", Value::from(reasoning.as_str())));
        // Read by gpt-oss alone, which refuses both.
        if m.content.is_empty() && !m.tool_calls.is_empty() {
            fields.push(("thinking", Value::from(reasoning.as_str())));
        }
    }
    if !m.tool_calls.is_empty() {
        let call = |call: &crate::chat::ToolCall| {
            let function =
                [("name", Value::from(call.name.as_str())), ("arguments", parse_json(&call.arguments))];
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
    Value::from_pairs(fields)
}

/// The variables `messages`, `tools` (a list), `tools_json` (a text), and the caller's own.
pub(super) fn template_variables(
    messages: &[Message],
    variables: Option<&TemplateKwargs>,
) -> Vec<(String, Value)> {
    let tools = variables.and_then(|v| v.tools.as_ref()).map(|tools| tools.json());
    let list: Vec<Value> = messages.iter().map(convert_message).collect();
    let mut values = vec![
        ("messages".into(), Value::from(list)),
        ("tools".into(), tools.map_or(Value::from(()), parse_json)),
        ("tools_json".into(), tools.map_or(Value::from(()), Value::from)),
    ];
    let own = variables.map_or(&[][..], |v| v.own_variables());
    values.extend(own.iter().map(|(name, value)| (name.clone(), parse_json(value))));
    values
}

/// Calls `each` with every text in `value`, whose nesting is limited.
pub(super) fn visit_texts(value: &Value, each: &mut dyn FnMut(&str)) {
    if let Some(text) = value.as_str() {
        return each(text);
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Map) {
        return;
    }
    for item in value.try_iter().into_iter().flatten() {
        if value.kind() == ValueKind::Map {
            value.get_item(&item).iter().for_each(|value| visit_texts(value, each));
        }
        visit_texts(&item, each);
    }
}
