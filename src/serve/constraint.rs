//! What the text of an answer must be like, in whichever field a request says so.

use super::asked::Asked;
use super::conversation::schema;
use super::fields::{Fields, kind};
use super::refusal::Refusal;
use serde_json::Value;

type Result<T> = std::result::Result<T, Refusal>;

/// A schema or a grammar, and the field that it stands in.
#[derive(Debug, PartialEq)]
pub struct Constraint {
    pub field: String,
    form: Form,
}

#[derive(Debug, PartialEq)]
enum Form {
    Schema(String),
    Regex(String),
    Choice(Vec<String>),
    Gbnf(String),
}

/// Texts to choose from, and bytes of each, at most.
const CHOICES: (usize, usize) = (4096, 4096);

/// What brings the value of a field to a form.
type Reads = fn(&Fields<'_>, &str) -> Result<Option<Form>>;

/// Fields of a body: OpenAI's, Anthropic's, llama.cpp's, vLLM's and SGLang's.
const OF_BODY: [(&str, Reads); 10] = [
    ("response_format", format),
    ("output_format", format),
    ("json_schema", json),
    ("guided_json", json),
    ("guided_json_object", json_object),
    ("grammar", gbnf),
    ("guided_grammar", gbnf),
    ("guided_regex", regex),
    ("regex", regex),
    ("guided_choice", choice),
];

/// Fields of vLLM's `structured_outputs`.
const OF_OUTPUTS: [(&str, Reads); 8] = [
    ("json", json),
    ("json_object", json_object),
    ("grammar", gbnf),
    ("regex", regex),
    ("choice", choice),
    ("structural_tag", unknown),
    ("whitespace_pattern", unknown),
    ("disable_additional_properties", unknown_flag),
];

fn format(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    let Some(format) = of.object(field)? else { return Ok(None) };
    Ok(schema(&format)?.map(Form::Schema))
}

/// A schema, or its text.
fn json(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    match of.get(field) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(Form::Schema(text.clone()))),
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => Ok(Some(Form::Schema(schema.to_string()))),
        Some(other) => Err(of.refuse(field, format!("is {}; use a JSON schema", kind(other)))),
    }
}

fn json_object(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    let wanted = of.flag(field)?.unwrap_or(false);
    Ok(wanted.then(|| Form::Schema("{\"type\":\"object\"}".into())))
}

fn gbnf(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    Ok(of.text(field)?.filter(|text| !text.is_empty()).map(|text| Form::Gbnf(text.into())))
}

fn regex(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    Ok(of.text(field)?.filter(|text| !text.is_empty()).map(|text| Form::Regex(text.into())))
}

fn choice(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    Ok(of.texts(field, CHOICES)?.map(Form::Choice))
}

fn unknown(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    match of.get(field) {
        None => Ok(None),
        Some(_) => Err(of.refuse(field, "is not followed by this server; leave it out")),
    }
}

fn unknown_flag(of: &Fields<'_>, field: &str) -> Result<Option<Form>> {
    if of.flag(field)?.unwrap_or(false) { unknown(of, field) } else { Ok(None) }
}

/// Reads it from the fields of a body.
pub fn constraint(body: &Fields<'_>) -> Result<Option<Constraint>> {
    let mut found = Vec::new();
    let mut look = |of: &Fields<'_>, all: &[(&str, Reads)]| -> Result<()> {
        for (field, read) in all {
            let form = read(of, field)?;
            found.extend(form.map(|form| Constraint { field: of.name(field), form }));
        }
        Ok(())
    };
    look(body, &OF_BODY)?;
    if let Some(outputs) = body.object("structured_outputs")? {
        look(&outputs, &OF_OUTPUTS)?;
    }
    // Anthropic's, and that of `/v1/responses`.
    for field in ["output_config", "text"] {
        if let Some(of) = body.get(field).filter(|value| value.is_object()) {
            look(&Fields::of(of, field)?, &[("format", format)])?;
        }
    }
    match (found.pop(), found.pop()) {
        (Some(second), Some(first)) => {
            let why = format!("says how the text must be, and so does {}; leave one out", first.field);
            Err(Refusal::field(second.field, why))
        }
        (Some(one), None) if cfg!(not(feature = "grammar")) => Err(Refusal::field(
            one.field,
            "this program was built without grammars; build it with --features grammar, or leave it out",
        )),
        (found, _) => Ok(found),
    }
}

impl Constraint {
    /// Makes the texts of a request follow it.
    #[cfg(feature = "grammar")]
    pub fn hold(self, asked: &mut Asked) -> Result<()> {
        use text::sampler::Grammar;
        let Self { field, form } = self;
        let grammar = match form {
            Form::Schema(text) => Grammar::json_schema(&field, &text),
            Form::Regex(text) => Grammar::regex(&field, &text),
            Form::Choice(texts) => Grammar::choice(&field, &texts),
            Form::Gbnf(text) => Grammar::gbnf(&field, &text),
        };
        let wrong = |e| Refusal { param: Some(field.clone()), ..Refusal::of_input(&e) };
        asked.options.sampler.grammar = Some(grammar.map_err(wrong)?);
        Ok(())
    }

    /// Nothing: such a request was refused.
    #[cfg(not(feature = "grammar"))]
    pub fn hold(self, _: &mut Asked) -> Result<()> {
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
            let Value::Object(object) = &body else { unreachable!() };
            let found = constraint(&Fields::new(object)).expect("is read");
            assert_eq!(found.map_or(String::new(), |c| c.field), field, "{body}");
        }
        for (param, body) in [
            ("guided_regex", json!({"json_schema": schema, "guided_regex": "a"})),
            ("structured_outputs.structural_tag", json!({"structured_outputs": {"structural_tag": "{}"}})),
            ("structured_outputs", json!({"structured_outputs": 1})),
            ("guided_choice", json!({"guided_choice": [1]})),
            ("json_schema", json!({"json_schema": 7})),
            ("output_config.format.type", json!({"output_config": {"format": {"type": "xml"}}})),
        ] {
            let Value::Object(object) = &body else { unreachable!() };
            let said = constraint(&Fields::new(object)).expect_err("is refused");
            assert_eq!(said.param.as_deref(), Some(param), "{body}: {said:?}");
        }
    }
}
