//! Writes JSON like Python's `json.dumps`, with the options of transformers' `tojson`.

use super::TemplateException;
use super::limits::{consume_fuel, template_error};
use super::python::{is_given, named_args};
use super::repr;
use minijinja::value::ValueKind;
use minijinja::{Error, State, Value};

/// Maximum bytes of an indentation and of a separator.
const MAX_BETWEEN: usize = 64;

/// The options of `tojson`.
struct JsonStyle {
    /// The indentation of a level; `None` for one line.
    indent: Option<String>,
    /// The separator of items, and the one between a key and its value.
    separators: [String; 2],
    ascii: bool,
    sorted: bool,
}

/// Writes `value`, whose size the caller has checked, as JSON; `args` are `ensure_ascii`, `indent`, `separators` and
/// `sort_keys`.
pub(super) fn dump_json(state: &State<'_, '_>, value: &Value, args: &[Value]) -> Result<Value, Error> {
    let style = JsonStyle::from_args(args)?;
    let mut out = String::new();
    style.write_value(state, value, 0, &mut out)?;
    consume_fuel(state, out.len())?;
    Ok(Value::from(out))
}

impl JsonStyle {
    fn from_args(args: &[Value]) -> Result<Self, Error> {
        let [ascii, indent, separators, sorted] =
            named_args(args, ["ensure_ascii", "indent", "separators", "sort_keys"])?;
        let [ascii, sorted] = [ascii, sorted].map(|flag| flag.is_some_and(|flag| flag.is_true()));
        let (indent, separators) = (indent.filter(is_given), separators.filter(is_given));
        let indent = match indent {
            Some(text) if text.as_str().is_some() => Some(text.to_string()),
            Some(number) => {
                Some(" ".repeat(usize::try_from(i64::try_from(number)?).unwrap_or(0).min(MAX_BETWEEN + 1)))
            }
            None => None,
        };
        let separators = match separators {
            Some(pair) => {
                let pair: Vec<String> = pair.try_iter()?.map(|part| part.to_string()).collect();
                pair.try_into().map_err(|_| template_error("tojson: separators are not two texts"))?
            }
            None => [if indent.is_some() { "," } else { ", " }.into(), ": ".into()],
        };
        if indent.iter().chain(&separators).any(|text| text.len() > MAX_BETWEEN) {
            return Err(template_error(format!("indents or separates by more than {MAX_BETWEEN}")));
        }
        Ok(Self { indent, separators, ascii, sorted })
    }

    fn write_value(
        &self,
        state: &State<'_, '_>,
        value: &Value,
        depth: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        let (open, close) = match value.kind() {
            ValueKind::Map => ('{', '}'),
            ValueKind::Seq | ValueKind::Iterable => ('[', ']'),
            _ => return self.write_scalar(value, out),
        };
        let mut items: Vec<Value> = value.try_iter()?.collect();
        if self.sorted && open == '{' {
            items.sort();
        }
        out.push(open);
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                out.push_str(&self.separators[0]);
            }
            self.write_line(state, depth + 1, out)?;
            if open == '{' {
                let quote = if item.as_str().is_some() { "" } else { "\"" };
                out.push_str(quote);
                self.write_scalar(item, out)?;
                out.push_str(quote);
                out.push_str(&self.separators[1]);
                self.write_value(state, &value.get_item(item)?, depth + 1, out)?;
            } else {
                self.write_value(state, item, depth + 1, out)?;
            }
        }
        if !items.is_empty() {
            self.write_line(state, depth, out)?;
        }
        out.push(close);
        Ok(())
    }

    fn write_line(&self, state: &State<'_, '_>, depth: usize, out: &mut String) -> Result<(), Error> {
        if let Some(indent) = &self.indent {
            consume_fuel(state, indent.len() * depth)?;
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
        Ok(())
    }

    fn write_scalar(&self, value: &Value, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => {
                out.push_str(&repr::number_to_str(value).replace("inf", "Infinity").replace("nan", "NaN"));
            }
            ValueKind::String => self.write_text(value.as_str().unwrap_or(""), out),
            // A value that the request leaves out.
            ValueKind::Undefined => {
                let why = "tojson of a value that is undefined";
                return Err(template_error(why).with_source(TemplateException(why.to_owned())));
            }
            kind => return Err(template_error(format!("tojson of a value that is {kind}"))),
        }
        Ok(())
    }

    fn write_text(&self, text: &str, out: &mut String) {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.ascii {
            return out.push_str(&quoted);
        }
        for c in quoted.chars() {
            match c {
                // Private-use characters stand for control tokens.
                ' '..='~' | '\u{F0000}'.. => out.push(c),
                _ => c
                    .encode_utf16(&mut [0; 2])
                    .iter()
                    .for_each(|unit| out.push_str(&format!("\\u{unit:04x}"))),
            }
        }
    }
}
