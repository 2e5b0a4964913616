//! JSON as Python's `json.dumps(…, ensure_ascii=False)` writes it, which is what transformers' `tojson` is.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Appends `value`; with `indent`, one item a line and that many blanks a level. The caller has checked how deep it is
/// nested.
pub(super) fn write(
    value: &Value,
    indent: Option<usize>,
    depth: usize,
    out: &mut String,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(width) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', width * depth));
        }
    };
    let (open, close) = match value.kind() {
        ValueKind::None => return text(out, "null"),
        ValueKind::Bool => return text(out, if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => return text(out, &value.to_string()),
        ValueKind::String => return text(out, &quoted(value.as_str().unwrap_or(""))),
        ValueKind::Map => ('{', '}'),
        ValueKind::Seq | ValueKind::Iterable => ('[', ']'),
        kind => {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson of a value that is {kind}")));
        }
    };
    out.push(open);
    let mut empty = true;
    for item in value.try_iter()? {
        if !empty {
            out.push_str(if indent.is_some() { "," } else { ", " });
        }
        empty = false;
        line(out, depth + 1);
        if open == '{' {
            out.push_str(&quoted(&item.to_string()));
            out.push_str(": ");
            write(&value.get_item(&item)?, indent, depth + 1, out)?;
        } else {
            write(&item, indent, depth + 1, out)?;
        }
    }
    if !empty {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn text(out: &mut String, text: &str) -> Result<(), Error> {
    out.push_str(text);
    Ok(())
}

fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
