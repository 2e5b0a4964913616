//! Python's two ways to format: `%` and `.format`.

use super::super::limits::{checked, failed, pay_for, size};
use super::super::written;
use minijinja::formatting::{FormatStyle, format};
use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

/// Widest field, and most digits.
const MAX_WIDTH: usize = 4096;

/// `text % value`.
pub(in super::super) fn percent(state: &State<'_, '_>, text: &str, value: Value) -> Result<Value, Error> {
    let args = match value.kind() {
        ValueKind::Seq if value.is_tuple() => value.try_iter()?.collect(),
        _ => vec![value],
    };
    formatted(state, text, &args, FormatStyle::Printf)
}

/// A text with `args` in its fields. Fields may be wide, and one argument may stand in many: all is paid for before.
pub(in super::super) fn formatted(
    state: &State<'_, '_>,
    text: &str,
    args: &[Value],
    style: FormatStyle,
) -> Result<Value, Error> {
    let fields = fields(text, style);
    let numbers = fields.iter().flat_map(|field| field.split(|c: char| !c.is_ascii_digit()));
    let widest = numbers.filter(|n| !n.is_empty()).map(|n| n.parse().unwrap_or(usize::MAX)).max();
    let widest = widest.unwrap_or(0);
    if widest > MAX_WIDTH || fields.iter().any(|field| field.contains(['*', '{'])) {
        return Err(failed(format!("formats with a width of more than {MAX_WIDTH} or one that is computed")));
    }
    // The interpreter counts bytes.
    if widest > 0 && args.iter().any(|arg| arg.as_str().is_some_and(|text| !text.is_ascii())) {
        return Err(failed("formats a text that is not ASCII with a width, which is not supported"));
    }
    let mut largest = widest;
    for arg in args {
        largest = largest.max(size(arg)?);
    }
    pay_for(state, fields.len().saturating_mul(largest).saturating_add(text.len()))?;
    let args: Result<Vec<Value>, Error> = args.iter().map(|arg| argument(arg, text)).collect();
    Ok(Value::from(format(style, text, &args?)?))
}

/// The parts of a text that say how wide its fields are.
fn fields(text: &str, style: FormatStyle) -> Vec<&str> {
    let is_spec = |c: char| "-+ #.*".contains(c) || c.is_ascii_digit();
    let of = |part| match style {
        FormatStyle::Printf => {
            let spec = str::strip_prefix(part, "(")
                .and_then(|named| named.split_once(')'))
                .map_or(part, |(_, spec)| spec);
            &spec[..spec.find(|c| !is_spec(c)).unwrap_or(spec.len())]
        }
        FormatStyle::StrFormat => {
            let field = part.split_once('}').map_or(part, |(field, _)| field);
            field.split_once(':').map_or("", |(_, spec)| spec)
        }
    };
    let sign = match style {
        FormatStyle::Printf => '%',
        FormatStyle::StrFormat => '{',
    };
    text.split(sign).skip(1).map(of).collect()
}

/// A list as its text, and a dictionary unless the fields of `text` look into it.
fn argument(arg: &Value, text: &str) -> Result<Value, Error> {
    let arg = checked(arg.clone())?;
    let looks = || arg.is_kwargs() || text.contains("%(") || text.contains('[');
    Ok(match arg.kind() {
        ValueKind::Map if looks() => arg,
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable => {
            Value::from(written::text(&arg).into_owned())
        }
        _ => arg,
    })
}
