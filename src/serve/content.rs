//! Contents of messages as text. What this model cannot read is refused in the newest question, and else left out.

use super::body::kind_of;
use super::error::{ApiError, ApiResult};
use files::error::{quoted, unquoted};
use serde_json::Value;
use std::ops::Range;
use text::chat::Role;

/// Place of a content in its conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// In what was said before, which is taken as it is.
    Earlier,
    /// In the newest question, which must be understood.
    Newest,
}

/// The turn of each message, by who speaks. The newest question consists of the last messages of the user, and of system
/// messages among them.
pub fn turns_of(roles: &[Role]) -> Vec<Turn> {
    let newest = newest_question(roles);
    let turn = |(i, role): (usize, &Role)| match role {
        Role::User if newest.contains(&i) => Turn::Newest,
        _ => Turn::Earlier,
    };
    roles.iter().enumerate().map(turn).collect()
}

fn newest_question(roles: &[Role]) -> Range<usize> {
    let Some(last) = roles.iter().rposition(|role| *role == Role::User) else { return 0..0 };
    let asks = |role: &&Role| matches!(role, Role::User | Role::System);
    last - roles[..last].iter().rev().take_while(asks).count()..last + 1
}

/// Text in the place of something that cannot be read.
pub fn left_out(kind: &str) -> String {
    let name = ["input_", "output_"].iter().find_map(|before| kind.strip_prefix(before)).unwrap_or(kind);
    let name = ["_url", "_file"].iter().find_map(|after| name.strip_suffix(after)).unwrap_or(name);
    format!("[{} left out]", unquoted(name))
}

/// The text of a content: a string, or parts of text.
pub fn text_of_content(value: Option<Value>, place: &str, turn: Turn) -> ApiResult<String> {
    match value {
        None | Some(Value::Null) if turn == Turn::Earlier => Ok(String::new()),
        None | Some(Value::Null) => Err(ApiError::for_field(place, "is missing; give a string")),
        Some(Value::String(text)) => Ok(text),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().enumerate().map(|(i, part)| match part {
                Value::String(text) => Ok(text.clone()),
                _ => text_of_part(part, &format!("{place}[{i}]"), turn),
            });
            texts.collect()
        }
        Some(part @ Value::Object(_)) if turn == Turn::Earlier => text_of_part(&part, place, turn),
        Some(other) => {
            let why = format!("is {}; use a string or an array of parts", kind_of(&other));
            Err(ApiError::for_field(place, why))
        }
    }
}

/// The text of a part of a content.
pub fn text_of_part(part: &Value, place: &str, turn: Turn) -> ApiResult<String> {
    let wrong = |field: &str, why: String| ApiError::for_field(format!("{place}{field}"), why);
    if !part.is_object() {
        return Err(wrong("", format!("is {}; use an object", kind_of(part))));
    }
    let string = |field: &str| match &part[field] {
        Value::String(text) => Ok(text.as_str()),
        Value::Null if turn == Turn::Earlier => Ok(""),
        Value::Null => Err(wrong(&format!(".{field}"), "is missing; give a string".into())),
        other => Err(wrong(&format!(".{field}"), format!("is {}; use a string", kind_of(other)))),
    };
    match string("type")? {
        "" => Ok(find_text(part).unwrap_or_else(|| part.to_string())),
        "text" | "input_text" | "output_text" => Ok(string("text")?.into()),
        "thinking" | "redacted_thinking" | "reasoning" => Ok(String::new()),
        other => match find_text(part) {
            Some(text) => Ok(text),
            None if turn == Turn::Earlier => Ok(left_out(other)),
            None => Err(wrong(".type", format!("is {}; this model reads text alone", quoted(other)))),
        },
    }
}

/// The text that a document, a result or a refusal has.
fn find_text(part: &Value) -> Option<String> {
    let string = |value: &Value| value.as_str().map(str::to_owned);
    let source = &part["source"];
    let data = Some(&source["data"]).filter(|_| source["type"] == "text");
    string(&part["text"])
        .or_else(|| string(&part["refusal"]))
        .or_else(|| data.and_then(string))
        .or_else(|| join_texts(&source["content"]))
        .or_else(|| join_texts(&part["content"]))
}

/// The texts of some parts, if there are any.
fn join_texts(parts: &Value) -> Option<String> {
    let text = |part: &Value| part.as_str().or_else(|| part.get("text")?.as_str()).map(str::to_owned);
    match parts {
        Value::Array(all) => Some(all.iter().filter_map(text).collect::<String>()).filter(|t| !t.is_empty()),
        one => text(one),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_cannot_be_read_is_refused_in_the_newest_question_and_else_left_out() {
        use Role::{Assistant, System, Tool, User};
        for (roles, range) in [
            (&[System, User][..], 0..2),
            (&[User, Assistant, User, System, User], 2..5),
            (&[User, Assistant, User, Assistant, Tool], 2..3),
            (&[Assistant], 0..0),
        ] {
            assert_eq!(newest_question(roles), range, "{roles:?}");
        }
        let document = |source: Value| json!({"type": "document", "source": source});
        let found = json!({"type": "search_result", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]});
        for (part, earlier, newest) in [
            (json!({"type": "text", "text": "a"}), "a", Some("a")),
            (json!("a"), "a", Some("a")),
            (json!({"type": "text", "text": null}), "", None),
            (json!({"text": "a"}), "a", None),
            (json!({"stdout": "a"}), r#"{"stdout":"a"}"#, None),
            (json!({"type": "image_url", "image_url": {"url": "data:"}}), "[image left out]", None),
            (json!({"type": "input_image", "file_id": "x"}), "[image left out]", None),
            (json!({"type": "input_audio"}), "[audio left out]", None),
            (document(json!({"type": "base64", "data": "AA"})), "[document left out]", None),
            (document(json!({"type": "text", "data": "a"})), "a", Some("a")),
            (document(json!({"type": "content", "content": "a"})), "a", Some("a")),
            (found, "ab", Some("ab")),
            (json!({"type": "refusal", "refusal": "no"}), "no", Some("no")),
            (
                json!({"type": "web_search_tool_result", "content": [{"url": "x"}]}),
                "[web_search_tool_result left out]",
                None,
            ),
            (json!({"type": "\u{1b}[2J"}), "[\\u{1b}[2J left out]", None),
        ] {
            let list = json!([part]);
            assert_eq!(text_of_content(Some(list.clone()), "c", Turn::Earlier), Ok(earlier.into()), "{list}");
            let said = text_of_content(Some(list.clone()), "c", Turn::Newest);
            match newest {
                Some(text) => assert_eq!(said, Ok(text.into()), "{list}"),
                None => {
                    assert!(said.is_err_and(|e| e.param.is_some_and(|p| p.starts_with("c[0]."))), "{list}")
                }
            }
        }
    }
}
