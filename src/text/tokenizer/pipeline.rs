//! Steps before and after the model in a `tokenizer.json`. The library runs normalizers and pre-tokenizers; decoders
//! and post-processors are our own.

use super::files::format_json_value;
use files::error::escape;
use serde_json::Value;

pub(super) const NORMALIZERS: [&str; 6] = ["NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace"];
pub(super) const PRE_TOKENIZERS: [&str; 4] = ["ByteLevel", "Split", "Digits", "Metaspace"];
const MAX_STEPS: usize = 32;
/// Maximum bytes of a text that a step searches for or inserts: each byte of a prompt may become one.
const MAX_TEXT: usize = 64;
/// Maximum bytes of a regular expression; published ones have a few hundred.
const MAX_PATTERN: usize = 2048;
/// Maximum number of ids added around a text.
const MAX_SPECIAL: usize = 64;

/// The decoder: the way from tokens to text.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum DecoderKind {
    /// GPT-2's alphabet: 256 characters that stand for bytes.
    ByteLevel,
    /// Llama 2: replacements, bytes written as `<0x0A>`, and characters stripped from the start.
    SentencePiece { replace: Vec<(String, String)>, byte_fallback: bool, strip: Option<(char, usize)> },
}

/// The tokens that a post-processor adds around a text.
#[derive(Debug, Default, PartialEq)]
pub(super) struct SpecialTokens {
    pub prefix: Vec<u32>,
    pub suffix: Vec<u32>,
}

fn step_type(step: &Value) -> &str {
    step["type"].as_str().unwrap_or("")
}

fn unsupported_step<T>(field: &str, step: &Value, supported: &str) -> Result<T, String> {
    let what = step
        .get("type")
        .map_or_else(|| format_json_value(step), |kind| format!("of type {}", format_json_value(kind)));
    Err(format!("field `{field}` is {what}; supported: {supported}"))
}

/// Appends the steps of a sequence, which may be nested, in order.
fn flatten_sequence<'a>(field: &str, step: &'a Value, flat: &mut Vec<&'a Value>) -> Result<(), String> {
    let lists = ["normalizers", "pretokenizers", "decoders", "processors"];
    let inner =
        lists.iter().find_map(|list| step[*list].as_array()).filter(|_| step_type(step) == "Sequence");
    if let Some(steps) = inner {
        return steps.iter().try_for_each(|step| flatten_sequence(field, step, flat));
    }
    flat.extend((!step.is_null()).then_some(step));
    if flat.len() > MAX_STEPS {
        return Err(format!("field `{field}` has more than {MAX_STEPS} steps"));
    }
    Ok(())
}

fn list_steps<'a>(field: &str, step: &'a Value) -> Result<Vec<&'a Value>, String> {
    let mut flat = vec![];
    flatten_sequence(field, step, &mut flat)?;
    Ok(flat)
}

/// Refuses steps that are not `supported`, and texts in them so long that they would multiply the memory of a prompt.
pub(super) fn check_steps(field: &str, step: &Value, supported: &[&str]) -> Result<(), String> {
    for step in list_steps(field, step)? {
        if !supported.contains(&step_type(step)) {
            return unsupported_step(field, step, &format!("{}, Sequence", supported.join(", ")));
        }
        let pattern = &step["pattern"];
        for (text, most) in [
            (&step["prepend"], MAX_TEXT),
            (&step["content"], MAX_TEXT),
            (&pattern["String"], MAX_TEXT),
            (&pattern["Regex"], MAX_PATTERN),
        ] {
            if text.as_str().is_some_and(|text| text.len() > most) {
                return Err(format!("field `{field}` has a text of more than {most} bytes"));
            }
        }
    }
    Ok(())
}

pub(super) fn read_decoder(step: &Value) -> Result<DecoderKind, String> {
    const SUPPORTED: &str =
        "ByteLevel, or a Sequence of Replace (of a String), ByteFallback, Fuse, Strip (at the start)";
    let field = "decoder";
    let steps = list_steps(field, step)?;
    if steps.len() == 1 && step_type(steps[0]) == "ByteLevel" {
        return Ok(DecoderKind::ByteLevel);
    }
    let text = |value: &Value| value.as_str().filter(|text| text.len() <= MAX_TEXT).map(str::to_owned);
    let (mut replace, mut byte_fallback, mut fuse, mut strip) = (vec![], false, false, None);
    for step in steps {
        let known = match step_type(step) {
            "Replace" if !byte_fallback && !fuse => {
                let texts = text(&step["pattern"]["String"])
                    .filter(|from| !from.is_empty())
                    .zip(text(&step["content"]));
                replace.extend(texts.clone());
                texts.is_some()
            }
            "ByteFallback" if !fuse => !std::mem::replace(&mut byte_fallback, true),
            "Fuse" => !std::mem::replace(&mut fuse, true),
            "Strip" if fuse && strip.is_none() => {
                strip = read_strip(step);
                strip.is_some()
            }
            _ => false,
        };
        if !known {
            return unsupported_step(field, step, SUPPORTED);
        }
    }
    if !fuse {
        return unsupported_step(field, step, SUPPORTED);
    }
    Ok(DecoderKind::SentencePiece { replace, byte_fallback, strip })
}

/// The character that is stripped from the start of a text, and the maximum number of times.
fn read_strip(step: &Value) -> Option<(char, usize)> {
    let mut content = step["content"].as_str()?.chars();
    let (c, None) = (content.next()?, content.next()) else { return None };
    let start = step["start"].as_u64().filter(|&n| n <= 16 && step["stop"] == 0)?;
    Some((c, start as usize))
}

pub(super) fn read_post_processor(step: &Value) -> Result<SpecialTokens, String> {
    let field = "post_processor";
    let mut around = SpecialTokens::default();
    for step in list_steps(field, step)? {
        match step_type(step) {
            // Changes only offsets, which are not used.
            "ByteLevel" => {}
            "TemplateProcessing" => {
                let inner = read_template(step)?;
                around.prefix.splice(0..0, inner.prefix);
                around.suffix.extend(inner.suffix);
            }
            _ => return unsupported_step(field, step, "ByteLevel, TemplateProcessing, Sequence"),
        }
    }
    Ok(around)
}

/// Reads the `single` template: special tokens, the text (once), special tokens.
fn read_template(step: &Value) -> Result<SpecialTokens, String> {
    let field = "post_processor.single";
    let mut around = SpecialTokens::default();
    let mut texts = 0;
    for piece in step["single"].as_array().into_iter().flatten() {
        let side = if texts == 0 { &mut around.prefix } else { &mut around.suffix };
        if let Some(name) = piece["SpecialToken"]["id"].as_str() {
            let ids = step["special_tokens"][name]["ids"].as_array().filter(|ids| ids.len() <= MAX_SPECIAL);
            let ids = ids.and_then(|ids| {
                ids.iter().map(|id| u32::try_from(id.as_u64()?).ok()).collect::<Option<Vec<_>>>()
            });
            let Some(ids) = ids else {
                return Err(format!("field `{field}` names {}, which has no ids or too many", escape(name)));
            };
            side.extend(ids);
        } else if piece["Sequence"]["id"] == "A" {
            texts += 1;
        } else {
            let piece = format_json_value(piece);
            return Err(format!(
                "field `{field}` has the piece {piece}; supported: SpecialToken, Sequence A"
            ));
        }
        if around.prefix.len() + around.suffix.len() > MAX_SPECIAL {
            return Err(format!("field `{field}` adds more than {MAX_SPECIAL} tokens"));
        }
    }
    if texts == 1 { Ok(around) } else { Err(format!("field `{field}` has the text {texts} times, not once")) }
}
