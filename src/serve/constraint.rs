//! Output constraints (JSON schema, regex, choice, GBNF), whichever API's field they are given in.

use super::body::{Object, Strings, find_value, read_object, read_value, type_name};
use super::error::{ApiError, ApiResult};
use crate::run::options::GenerateOptions;
use files::error::quote;
use serde::Deserialize;
use serde_json::Value;

/// A schema or grammar, and the field it comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Constraint {
    pub field: String,
    form: ConstraintKind,
}

#[derive(Debug, Clone, PartialEq)]
enum ConstraintKind {
    Schema(String),
    Regex(String),
    Choice(Vec<String>),
    Gbnf(String),
}

/// JSON schema of `json_object`.
const ANY_OBJECT: &str = "{\"type\":\"object\"}";

/// Reads the value of a field, whose path is given; `None` if it constrains nothing.
type ReadForm = fn(&Value, &str) -> ApiResult<Option<ConstraintKind>>;

/// Paths of the fields of OpenAI, Anthropic, llama.cpp, vLLM and SGLang.
const FIELDS: [(&str, ReadForm); 17] = [
    ("response_format", read_format),
    ("output_format", read_format),
    ("output_config.format", read_format),
    ("text.format", read_format),
    ("json_schema", read_schema),
    ("guided_json", read_schema),
    ("guided_json_object", read_any_object),
    ("grammar", read_gbnf),
    ("guided_grammar", read_gbnf),
    ("guided_regex", read_regex),
    ("regex", read_regex),
    ("guided_choice", read_choice),
    ("structured_outputs.json", read_schema),
    ("structured_outputs.json_object", read_any_object),
    ("structured_outputs.grammar", read_gbnf),
    ("structured_outputs.regex", read_regex),
    ("structured_outputs.choice", read_choice),
];

/// `response_format`: the schema is in `json_schema.schema` (chat completions) or `schema` (others).
#[derive(Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
    json_schema: Option<Object<NamedSchema>>,
}

#[derive(Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

fn read_format(value: &Value, place: &str) -> ApiResult<Option<ConstraintKind>> {
    let format: ResponseFormat = read_object(value, place)?;
    let schema = match format.kind.as_str() {
        "text" => return Ok(None),
        "json_object" => format.schema.map_or(ANY_OBJECT.into(), |schema| schema.to_string()),
        "json_schema" => {
            let nested = format.json_schema.and_then(|named| named.0.schema);
            let missing = || {
                let field = format!("{place}.json_schema.schema");
                ApiError::for_field(field, "is missing; add a JSON schema")
            };
            nested.or(format.schema).ok_or_else(missing)?.to_string()
        }
        other => {
            let why = format!("is {}; use text, json_object or json_schema", quote(other));
            return Err(ApiError::for_field(format!("{place}.type"), why));
        }
    };
    if cfg!(not(feature = "grammar")) {
        let why = "this server supports no grammars; use text";
        return Err(ApiError::for_field(format!("{place}.type"), why));
    }
    Ok(Some(ConstraintKind::Schema(schema)))
}

/// Reads a JSON schema, given as JSON or as a string.
fn read_schema(value: &Value, place: &str) -> ApiResult<Option<ConstraintKind>> {
    match value {
        Value::String(text) => Ok(Some(ConstraintKind::Schema(text.clone()))),
        Value::Object(_) | Value::Bool(_) => Ok(Some(ConstraintKind::Schema(value.to_string()))),
        other => Err(ApiError::for_field(place, format!("is {}; use a JSON schema", type_name(other)))),
    }
}

fn read_any_object(value: &Value, place: &str) -> ApiResult<Option<ConstraintKind>> {
    Ok(read_value::<bool>(value, place)?.then(|| ConstraintKind::Schema(ANY_OBJECT.into())))
}

/// Reads a string; `None` if it is empty.
fn read_text(value: &Value, place: &str) -> ApiResult<Option<String>> {
    Ok(Some(read_value::<String>(value, place)?).filter(|text| !text.is_empty()))
}

fn read_gbnf(value: &Value, place: &str) -> ApiResult<Option<ConstraintKind>> {
    Ok(read_text(value, place)?.map(ConstraintKind::Gbnf))
}

fn read_regex(value: &Value, place: &str) -> ApiResult<Option<ConstraintKind>> {
    Ok(read_text(value, place)?.map(ConstraintKind::Regex))
}

fn read_choice(value: &Value, place: &str) -> ApiResult<Option<ConstraintKind>> {
    Ok(Some(ConstraintKind::Choice(read_value::<Strings<4096, 4096>>(value, place)?.0)))
}

/// Finds the constraint of a request; two are an error.
pub fn read_constraint(body: &Value) -> ApiResult<Option<Constraint>> {
    let mut found = Vec::new();
    for (field, read_form) in FIELDS {
        let value = find_value(body, field).filter(|value| !value.is_null());
        let form = value.map_or(Ok(None), |value| read_form(value, field))?;
        found.extend(form.map(|form| Constraint { field: field.into(), form }));
    }
    match (found.pop(), found.pop()) {
        (Some(second), Some(first)) => {
            let why = format!("constrains the output, and so does {}; use only one of them", first.field);
            Err(ApiError::for_field(second.field, why))
        }
        (Some(one), None) if cfg!(not(feature = "grammar")) => Err(ApiError::for_field(
            one.field,
            "this server supports no grammars; omit it, or build the program with --features grammar",
        )),
        (found, _) => Ok(found),
    }
}

impl Constraint {
    /// Compiles the constraint into the grammar of the options.
    #[cfg(feature = "grammar")]
    pub fn apply_to_options(self, options: &mut GenerateOptions) -> ApiResult<()> {
        use text::sampler::Grammar;
        let Self { field, form } = self;
        let grammar = match form {
            ConstraintKind::Schema(text) => Grammar::from_json_schema(&field, &text),
            ConstraintKind::Regex(text) => Grammar::from_regex(&field, &text),
            ConstraintKind::Choice(texts) => Grammar::from_choice(&field, &texts),
            ConstraintKind::Gbnf(text) => Grammar::from_gbnf(&field, &text),
        };
        let refuse = |e| ApiError::from_request(&e).in_field(&field);
        options.sampler.grammar = Some(grammar.map_err(refuse)?);
        Ok(())
    }

    /// Does nothing: [`read_constraint`] refuses constraints in this build.
    #[cfg(not(feature = "grammar"))]
    pub fn apply_to_options(self, _: &mut GenerateOptions) -> ApiResult<()> {
        Ok(())
    }
}

#[cfg(test)]
#[cfg(feature = "grammar")]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_field_is_found_and_two_are_one_too_many() {
        let schema = json!({"type": "integer"});
        for (field, body) in [
            (
                "",
                json!({"response_format": {"type": "text"}, "grammar": "", "guided_json_object": false, "text": "x"}),
            ),
            ("response_format", json!({"response_format": {"type": "json_object"}})),
            ("json_schema", json!({"json_schema": schema})),
            ("guided_json", json!({"guided_json": schema.to_string()})),
            ("structured_outputs.choice", json!({"structured_outputs": {"choice": ["a", "b"]}})),
            ("structured_outputs.json", json!({"structured_outputs": {"json": schema}})),
            (
                "output_config.format",
                json!({"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}}}),
            ),
            (
                "text.format",
                json!({"text": {"verbosity": "low", "format": {"type": "json_schema", "name": "x", "schema": schema}}}),
            ),
        ] {
            let found = read_constraint(&body).expect("is read");
            assert_eq!(found.map_or(String::new(), |c| c.field), field, "{body}");
        }
        for (param, body) in [
            ("guided_regex", json!({"json_schema": schema, "guided_regex": "a"})),
            ("guided_choice", json!({"guided_choice": [1]})),
            ("json_schema", json!({"json_schema": 7})),
            ("output_config.format.type", json!({"output_config": {"format": {"type": "xml"}}})),
        ] {
            let said = read_constraint(&body).expect_err("is refused");
            assert_eq!(said.param.as_deref(), Some(param), "{body}: {said:?}");
        }
    }
}
