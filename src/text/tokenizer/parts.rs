//! The steps around the model in a `tokenizer.json`: which are supported, and their limits.

use super::files::shown;
use super::pattern;
use files::error::unquoted;
use serde_json::Value;

/// Steps within steps; published files have one level.
const MAX_NESTING: usize = 4;
const MAX_STEPS: usize = 32;
/// Texts that a step searches for or inserts.
const MAX_TEXT: usize = 64;
/// Ids that are added around a text.
const MAX_AROUND: usize = 64;

/// How tokens become text.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum DecoderKind {
    /// GPT-2's alphabet: 256 characters that stand for bytes.
    ByteLevel,
    /// Llama 2: replacements, bytes written as `<0x0A>`, and characters stripped from the start.
    SentencePiece { replace: Vec<(String, String)>, byte_fallback: bool, strip: Option<(char, usize)> },
}

/// What a post-processor adds around one text.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Around {
    pub prefix: Vec<u32>,
    pub suffix: Vec<u32>,
}

type Check<T = ()> = Result<T, String>;

fn kind(value: &Value) -> &str {
    value.get("type").and_then(Value::as_str).unwrap_or("")
}

fn unsupported<T>(field: &str, value: &Value, supported: &str) -> Check<T> {
    let what = match value.get("type") {
        Some(kind) => format!("of type {}", shown(kind)),
        None => shown(value),
    };
    Err(format!("field `{field}` is {what}; supported: {supported}"))
}

/// The steps of a (possibly nested) sequence, in order.
fn steps<'a>(field: &str, list: &str, value: Option<&'a Value>) -> Check<Vec<&'a Value>> {
    let mut flat = vec![];
    let mut todo: Vec<(&Value, usize)> = value.filter(|v| !v.is_null()).map(|v| (v, 0)).into_iter().collect();
    while let Some((step, depth)) = todo.pop() {
        if kind(step) == "Sequence" {
            let Some(inner) = step.get(list).and_then(Value::as_array) else {
                return Err(format!("field `{field}.{list}` is missing or no list"));
            };
            if depth >= MAX_NESTING || inner.len() > MAX_STEPS {
                return Err(format!(
                    "field `{field}` has more than {MAX_NESTING} levels or {MAX_STEPS} steps of sequences"
                ));
            }
            todo.extend(inner.iter().rev().map(|s| (s, depth + 1)));
        } else {
            flat.push(step);
        }
        if flat.len() > MAX_STEPS {
            return Err(format!("field `{field}` has more than {MAX_STEPS} steps"));
        }
    }
    Ok(flat)
}

fn text<'a>(field: &str, step: &'a Value, key: &str) -> Check<&'a str> {
    match step.get(key).and_then(Value::as_str) {
        Some(text) if text.len() <= MAX_TEXT => Ok(text),
        _ => Err(format!("field `{field}.{key}` is no text of up to {MAX_TEXT} bytes")),
    }
}

/// `{"String": …}` or `{"Regex": …}`.
fn check_pattern(field: &str, step: &Value) -> Check {
    let pattern = step.get("pattern");
    if let Some(regex) = pattern.and_then(|p| p.get("Regex")).and_then(Value::as_str) {
        return pattern::check(regex).map_err(|e| format!("field `{field}.pattern` has {e}"));
    }
    match pattern.and_then(|p| p.get("String")).and_then(Value::as_str) {
        Some(text) if !text.is_empty() && text.len() <= MAX_TEXT => Ok(()),
        _ => Err(format!(
            "field `{field}.pattern` is {}; supported: a Regex, or a String of 1 to {MAX_TEXT} bytes",
            pattern.map_or("missing".into(), shown)
        )),
    }
}

pub(super) fn normalizer(value: Option<&Value>) -> Check {
    let field = "normalizer";
    for step in steps(field, "normalizers", value)? {
        match kind(step) {
            "NFC" | "NFD" | "NFKC" | "NFKD" => {}
            "Prepend" if !text(field, step, "prepend")?.is_empty() => {}
            // The library panics where it replaces an empty match of a Regex.
            "Replace" if step["pattern"].get("String").is_some() => {
                check_pattern(field, step)?;
                text(field, step, "content")?;
            }
            _ => {
                let supported = "NFC, NFD, NFKC, NFKD, Prepend, Replace (of a String), Sequence";
                return unsupported(field, step, supported);
            }
        }
    }
    Ok(())
}

pub(super) fn pre_tokenizer(value: Option<&Value>) -> Check {
    let field = "pre_tokenizer";
    for step in steps(field, "pretokenizers", value)? {
        match kind(step) {
            "ByteLevel" | "Digits" | "Metaspace" => {}
            "Split" => check_pattern(field, step)?,
            _ => return unsupported(field, step, "ByteLevel, Split, Digits, Metaspace, Sequence"),
        }
    }
    Ok(())
}

pub(super) fn decoder(value: Option<&Value>) -> Check<DecoderKind> {
    let field = "decoder";
    let supported =
        "ByteLevel, or a Sequence of Replace (of a String), ByteFallback, Fuse, Strip (at the start)";
    let steps = steps(field, "decoders", value)?;
    if let [only] = steps[..]
        && kind(only) == "ByteLevel"
    {
        return Ok(DecoderKind::ByteLevel);
    }
    let mut replace = vec![];
    let mut rest = steps.as_slice();
    while let Some((step, after)) = rest.split_first().filter(|(s, _)| kind(s) == "Replace") {
        check_pattern(field, step)?;
        let Some(from) = step["pattern"]["String"].as_str() else {
            return unsupported(field, step, supported);
        };
        replace.push((from.to_string(), text(field, step, "content")?.to_string()));
        rest = after;
    }
    let mut next_is = |name: &str| {
        let step = rest.first().copied().filter(|s| kind(s) == name);
        rest = if step.is_some() { &rest[1..] } else { rest };
        step
    };
    let byte_fallback = next_is("ByteFallback").is_some();
    let fuse = next_is("Fuse");
    let strip = match next_is("Strip") {
        None => None,
        Some(step) => {
            let mut content = text(field, step, "content")?.chars();
            let (c, more) = (content.next(), content.next());
            let counts = [step["start"].as_u64(), step["stop"].as_u64()];
            match (c, more, counts) {
                (Some(c), None, [Some(n @ 0..=16), Some(0)]) => Some((c, n as usize)),
                _ => return unsupported(field, step, supported),
            }
        }
    };
    match (rest, fuse) {
        ([], Some(_)) => Ok(DecoderKind::SentencePiece { replace, byte_fallback, strip }),
        ([step, ..], _) => unsupported(field, step, supported),
        ([], None) => unsupported(field, value.unwrap_or(&Value::Null), supported),
    }
}

pub(super) fn post_processor(value: Option<&Value>) -> Check<Around> {
    let field = "post_processor";
    let mut around = Around::default();
    for step in steps(field, "processors", value)? {
        match kind(step) {
            // Only moves offsets, which are not used.
            "ByteLevel" => {}
            "TemplateProcessing" => {
                let inner = template(step)?;
                around.prefix.splice(0..0, inner.prefix);
                around.suffix.extend(inner.suffix);
            }
            _ => return unsupported(field, step, "ByteLevel, TemplateProcessing, Sequence"),
        }
        if around.prefix.len() + around.suffix.len() > MAX_AROUND {
            return Err(format!("field `{field}` adds more than {MAX_AROUND} tokens"));
        }
    }
    Ok(around)
}

/// The `single` template: special tokens, the text (once), special tokens.
fn template(step: &Value) -> Check<Around> {
    let field = "post_processor.single";
    let Some(pieces) = step.get("single").and_then(Value::as_array).filter(|p| p.len() <= MAX_AROUND) else {
        return Err(format!("field `{field}` is missing, no list, or longer than {MAX_AROUND} pieces"));
    };
    let mut around = Around::default();
    let mut texts = 0;
    for piece in pieces {
        let name = piece.get("SpecialToken").and_then(|t| t.get("id")).and_then(Value::as_str);
        if let Some(name) = name {
            let ids = step.get("special_tokens").and_then(|t| t.get(name)).and_then(|t| t.get("ids"));
            let Some(ids) = ids.and_then(Value::as_array).filter(|ids| ids.len() <= MAX_AROUND) else {
                return Err(format!(
                    "field `{field}` names {}, which `post_processor.special_tokens` gives no ids",
                    unquoted(name)
                ));
            };
            for id in ids {
                let Some(id) = id.as_u64().and_then(|id| u32::try_from(id).ok()) else {
                    return Err(format!("field `post_processor.special_tokens` has id {}", shown(id)));
                };
                let side = if texts == 0 { &mut around.prefix } else { &mut around.suffix };
                side.push(id);
            }
        } else if piece.get("Sequence").and_then(|s| s.get("id")).and_then(Value::as_str) == Some("A") {
            texts += 1;
        } else {
            return Err(format!(
                "field `{field}` has the piece {}; supported: SpecialToken, Sequence A",
                shown(piece)
            ));
        }
    }
    if texts == 1 { Ok(around) } else { Err(format!("field `{field}` has the text {texts} times, not once")) }
}
