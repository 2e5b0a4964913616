//! Contents of messages as text. What this model cannot read is refused in the newest question, and else left out.

use super::fields::{Fields, kind};
use super::refusal::Refusal;
use files::error::{quoted, unquoted};
use serde_json::Value;
use std::ops::Range;
use text::chat::Role;

type Result<T> = std::result::Result<T, Refusal>;

/// Where a content stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// In what was said before, which is taken as it is.
    Earlier,
    /// In the newest question, which must be understood.
    Newest,
}

impl Turn {
    /// The turn of the `i`th message.
    pub fn of(newest: &Range<usize>, i: usize, role: Role) -> Self {
        if role == Role::User && newest.contains(&i) { Turn::Newest } else { Turn::Earlier }
    }
}

/// The places of the messages that the newest question consists of.
pub fn newest(roles: &[Role]) -> Range<usize> {
    let Some(last) = roles.iter().rposition(|role| *role == Role::User) else { return 0..0 };
    let asks = |role: &&Role| matches!(role, Role::User | Role::System);
    last - roles[..last].iter().rev().take_while(asks).count()..last + 1
}

/// What stands for something that cannot be read.
pub fn left_out(kind: &str) -> String {
    let name = ["input_", "output_"].iter().find_map(|before| kind.strip_prefix(before)).unwrap_or(kind);
    let name = ["_url", "_file"].iter().find_map(|after| name.strip_suffix(after)).unwrap_or(name);
    format!("[{} left out]", unquoted(name))
}

/// The text of a content: a string, or parts of text.
pub fn content(value: Option<&Value>, place: &str, turn: Turn) -> Result<String> {
    match value {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().enumerate().map(|(i, part)| match part {
                Value::String(text) => Ok(text.clone()),
                _ => text_of(&Fields::of(part, &format!("{place}[{i}]"))?, turn),
            });
            texts.collect()
        }
        Some(part @ Value::Object(_)) if turn == Turn::Earlier => text_of(&Fields::of(part, place)?, turn),
        Some(other) => {
            Err(Refusal::field(place, format!("is {}; use a string or an array of parts", kind(other))))
        }
    }
}

/// The text of a part of a content.
pub fn text_of(part: &Fields<'_>, turn: Turn) -> Result<String> {
    let kind = match turn {
        Turn::Newest => part.needed_text("type")?,
        Turn::Earlier => part.text("type")?.unwrap_or_default(),
    };
    Ok(match kind {
        "" => text_within(part).unwrap_or_else(|| part.json()),
        "text" | "input_text" | "output_text" if turn == Turn::Newest => part.needed_text("text")?.into(),
        "text" | "input_text" | "output_text" => part.text("text")?.unwrap_or_default().into(),
        "thinking" | "redacted_thinking" | "reasoning" => String::new(),
        other => match text_within(part) {
            Some(text) => text,
            None if turn == Turn::Earlier => left_out(other),
            None => {
                let why = format!("is {}; this model reads text alone", quoted(other));
                return Err(part.refuse("type", why));
            }
        },
    })
}

/// The text that a document, a result or a refusal has.
fn text_within(part: &Fields<'_>) -> Option<String> {
    let text = |field: &str| part.get(field)?.as_str().map(str::to_owned);
    let source = part.get("source");
    let data = || {
        let source = source.filter(|source| source["type"] == "text")?;
        source["data"].as_str().map(str::to_owned)
    };
    let within = |of: &Value| of.get("content").and_then(texts);
    text("text")
        .or_else(|| text("refusal"))
        .or_else(data)
        .or_else(|| source.and_then(within))
        .or_else(|| part.get("content").and_then(texts))
}

/// The texts of some parts, if there are any.
fn texts(parts: &Value) -> Option<String> {
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
            assert_eq!(newest(roles), range, "{roles:?}");
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
            assert_eq!(content(Some(&list), "c", Turn::Earlier), Ok(earlier.into()), "{list}");
            let said = content(Some(&list), "c", Turn::Newest);
            match newest {
                Some(text) => assert_eq!(said, Ok(text.into()), "{list}"),
                None => {
                    assert!(said.is_err_and(|e| e.param.is_some_and(|p| p.starts_with("c[0]."))), "{list}")
                }
            }
        }
    }
}
