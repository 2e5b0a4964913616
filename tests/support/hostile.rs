//! Text that nobody should see as it is, in every place of a document.

use serde_json::Value;

/// A forged second line, what controls a terminal or reorders its text, and too much of it.
pub fn text() -> String {
    format!("{}{}", short(), "x".repeat(5000))
}

/// Hostile text in few bytes, for names.
pub fn short() -> &'static str {
    "\u{1b}[2J\r\nerror: forged\u{9b}31m\u{202e}\u{2028}\u{7f}"
}

/// Tells whether text is free of characters that control a terminal or reorder text.
pub fn is_tame(text: &str) -> bool {
    !text.chars().any(|c| c.is_control() || "\u{202e}\u{2028}".contains(c))
}

/// Checks what follows `error: ` on stderr: one line, escaped, at most 400 bytes.
#[track_caller]
pub fn assert_line(place: &str, line: &str) {
    assert!(is_tame(line), "{place}: {line:?}");
    assert!("error: ".len() + line.len() <= 400, "{place}: {} bytes: {line}", line.len());
}

/// `document` with `hostile` in place of each value, and of each field's name, in turn; and where. Of long lists the
/// first two and the last.
pub fn variants(document: &Value, hostile: &str) -> Vec<(String, Value)> {
    let mut places = Vec::new();
    walk(document, String::new(), &mut places);
    let mut variants = Vec::new();
    for place in places {
        let mut changed = document.clone();
        *changed.pointer_mut(&place).expect("a place in it") = hostile.into();
        variants.push((place.clone(), changed));
        let (parent, name) = place.rsplit_once('/').unwrap_or_default();
        let mut changed = document.clone();
        if let Some(Value::Object(fields)) = changed.pointer_mut(parent)
            && let Some(value) = fields.remove(&name.replace("~1", "/").replace("~0", "~"))
        {
            fields.insert(hostile.into(), value);
            variants.push((format!("the name of {place}"), changed));
        }
    }
    variants
}

fn walk(value: &Value, at: String, places: &mut Vec<String>) {
    let parts: Vec<(String, &Value)> = match value {
        Value::Object(fields) => {
            fields.iter().map(|(k, v)| (k.replace('~', "~0").replace('/', "~1"), v)).collect()
        }
        Value::Array(items) => items.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect(),
        _ => Vec::new(),
    };
    let (count, last) = (parts.len(), parts.len().saturating_sub(1));
    let shown = |i: usize| count <= 30 || i < 2 || i == last;
    for (_, (name, part)) in parts.into_iter().enumerate().filter(|(i, _)| shown(*i)) {
        let place = format!("{at}/{name}");
        places.push(place.clone());
        walk(part, place, places);
    }
}
