//! Arguments of a template besides the messages: tools, and the caller's own variables.

use crate::tokenizer::files::format_json_value;
use files::error::{escape, quote};
use files::json_depth::list_tokens;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;

/// Maximum bytes of the JSON of tools, of a call or of a variable.
pub(super) const MAX_JSON: usize = 1 << 20;
/// Maximum nesting of JSON: a template may not handle more.
pub(super) const MAX_NESTING: usize = 24;
/// Maximum number of values in JSON.
const MAX_VALUES: usize = 10_000;
/// Maximum number of the caller's variables: each is compared with the others.
const MAX_VARIABLES: usize = 256;
/// Names that [`TemplateKwargs::set_variable`] may not replace.
const RESERVED: [&str; 5] = ["messages", "tools", "tools_json", "add_generation_prompt", "bos_token"];

/// Arguments of a conversation's template.
///
/// ```
/// use text::chat::{Tools, TemplateKwargs};
/// let mut args = TemplateKwargs::default();
/// args.set_variable("enable_thinking", "false")?;
/// args.tools = Some(Tools::parse_json(r#"[{"type": "function", "function": {"name": "now"}}]"#)?);
/// assert_eq!(args.set_variable("messages", "[]").unwrap_err(), "`messages` is set by the conversation; use another name");
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TemplateKwargs {
    /// The functions that the model may call.
    pub tools: Option<Tools>,
    /// Names of the caller's variables, and their values as JSON.
    variables: Vec<(String, String)>,
}

impl TemplateKwargs {
    /// Arguments with only these tools.
    pub fn with_tools(tools: Tools) -> Self {
        Self { tools: Some(tools), variables: Vec::new() }
    }

    /// Sets a variable to `value` parsed as JSON, or to the text itself if it is not JSON.
    ///
    /// # Errors
    /// A message about the name or the value, with the remedy.
    pub fn set_variable(&mut self, name: &str, value: &str) -> Result<(), String> {
        let word = |c: char| c == '_' || c.is_ascii_alphanumeric();
        if name.is_empty() || !name.chars().all(word) || name.starts_with(|c: char| c.is_ascii_digit()) {
            let name = quote(name);
            return Err(format!("{name} is not a valid variable name; use letters, digits and _"));
        }
        if RESERVED.contains(&name) {
            return Err(format!("`{name}` is set by the conversation; use another name"));
        }
        if value.len() > MAX_JSON {
            return Err(format!("`{name}` has more than {MAX_JSON} bytes; use a shorter value"));
        }
        let json = match serde_json::from_str::<serde::de::IgnoredAny>(value) {
            Ok(_) => value.to_owned(),
            Err(_) => Value::from(value).to_string(),
        };
        check_json(&json).map_err(|why| format!("`{name}` {why}"))?;
        self.variables.retain(|(other, _)| other != name);
        if self.variables.len() >= MAX_VARIABLES {
            return Err(format!("`{name}` is one of more than {MAX_VARIABLES} variables; use fewer"));
        }
        self.variables.push((name.into(), json));
        Ok(())
    }

    /// Adds the variables of `others` that are not set here. The tools of `others` are ignored.
    pub fn with_defaults(mut self, others: &Self) -> Self {
        let more: Vec<_> =
            others.variables.iter().filter(|(name, _)| !self.has_variable(name)).cloned().collect();
        self.variables.extend(more);
        self
    }

    /// True if [`TemplateKwargs::set_variable`] has set this variable.
    pub fn has_variable(&self, name: &str) -> bool {
        self.variables.iter().any(|(own, _)| own == name)
    }

    /// Names of the caller's variables, and their values as JSON.
    pub(super) fn own_variables(&self) -> &[(String, String)] {
        &self.variables
    }
}

/// The functions that a model may call: a checked JSON array in the format of OpenAI's API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Tools {
    json: String,
    names: Vec<String>,
}

impl From<Tools> for String {
    fn from(tools: Tools) -> Self {
        tools.json
    }
}

impl TryFrom<String> for Tools {
    type Error = String;

    fn try_from(json: String) -> Result<Self, String> {
        Self::parse_json(&json)
    }
}

impl Tools {
    /// Reads `[{"type": "function", "function": {"name": …, "description": …, "parameters": …}}, …]`.
    ///
    /// # Errors
    /// A message with the tool, the field and the remedy.
    pub fn parse_json(json: &str) -> Result<Self, String> {
        check_json(json)?;
        let all: Value = serde_json::from_str(json).map_err(|e| format!("is not valid JSON ({e})"))?;
        let Value::Array(list) = &all else {
            return Err(format!("is {}; use a JSON array of tools", format_json_value(&all)));
        };
        let (mut names, mut seen): (Vec<String>, _) = (Vec::new(), HashSet::new());
        for (i, tool) in list.iter().enumerate() {
            let name = check_tool(tool).map_err(|why| format!("tool {}: {why}", i + 1))?;
            if !seen.insert(name) {
                return Err(format!("tool {}: a second {}; give each its own name", i + 1, quote(name)));
            }
            names.push(name.into());
        }
        if names.is_empty() {
            return Err("is empty; give at least one tool, or leave it out".into());
        }
        Ok(Self { json: json.trim().into(), names })
    }

    /// The JSON text.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Functions and their parameters that are strings.
    pub(super) fn string_parameters(&self) -> Vec<(String, String)> {
        let tools: Vec<Value> = serde_json::from_str(&self.json).unwrap_or_default();
        let mut found = Vec::new();
        for (tool, name) in tools.iter().zip(&self.names) {
            let parameters = tool["function"]["parameters"]["properties"].as_object();
            let strings = parameters.into_iter().flatten().filter(|(_, schema)| schema["type"] == "string");
            found.extend(strings.map(|(parameter, _)| (name.clone(), parameter.clone())));
        }
        found
    }

    /// The names of the functions.
    pub fn function_names(&self) -> &[String] {
        &self.names
    }
}

/// A field of a tool: its place, the test for its value, and the value that it should have.
type Field = (&'static str, fn(&Value) -> bool, &'static str);

const FIELDS: [Field; 6] = [
    ("", Value::is_object, "an object"),
    ("/type", |kind| kind == "function", "\"function\""),
    ("/function", Value::is_object, "an object"),
    (
        "/function/name",
        |name| name.as_str().is_some_and(is_function_name),
        "1 to 128 letters, digits, dots, _ and -",
    ),
    ("/function/description", Value::is_string, "a text"),
    ("/function/parameters", Value::is_object, "a JSON schema, which is an object"),
];

/// Checks the fields of a tool; returns its name.
fn check_tool(tool: &Value) -> Result<&str, String> {
    for (place, fits, wanted) in FIELDS {
        let name = place.trim_start_matches('/').replace('/', ".");
        match tool.pointer(place) {
            Some(value) if !fits(value) => {
                let name = if name.is_empty() { name } else { format!("field `{name}` ") };
                return Err(format!("{name}is {}; use {wanted}", format_json_value(value)));
            }
            None if ["function", "function.name"].contains(&name.as_str()) => {
                return Err(format!("field `{name}` is missing"));
            }
            _ => {}
        }
    }
    let known = ["name", "description", "parameters", "strict"];
    let mut fields = tool["function"].as_object().into_iter().flat_map(|fields| fields.keys());
    match fields.find(|field| !known.contains(&field.as_str())) {
        Some(other) => {
            Err(format!("unknown field `function.{}`; known: {}", escape(other), known.join(", ")))
        }
        None => Ok(tool["function"]["name"].as_str().unwrap_or_default()),
    }
}

/// True if a function may have this name.
pub(super) fn is_function_name(text: &str) -> bool {
    let may = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    (1..=128).contains(&text.len()) && text.chars().all(may)
}

/// Refuses JSON that a template may not handle. It need not be valid.
pub(super) fn check_json(json: &str) -> Result<(), String> {
    if json.len() > MAX_JSON {
        return Err(format!("has more than {MAX_JSON} bytes; use less"));
    }
    let mut values = 1usize;
    for mark in list_tokens(json.as_bytes()) {
        values += usize::from(!b"]}".contains(&mark.byte));
        if mark.depth > MAX_NESTING {
            return Err(format!("is nested more than {MAX_NESTING} levels deep; use less"));
        }
    }
    if values > MAX_VALUES {
        return Err(format!("holds more than {MAX_VALUES} values; use less"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_are_checked() {
        let good = r#" [{"type": "function", "function": {"name": "get_weather", "description": "d",
                       "parameters": {"type": "object", "properties": {}}}}, {"function": {"name": "a.b-c"}}] "#;
        let tools = Tools::parse_json(good).expect("tools");
        assert_eq!(
            (tools.function_names(), tools.json()),
            (&["get_weather".to_string(), "a.b-c".into()][..], good.trim())
        );
        let again: Tools =
            serde_json::from_str(&serde_json::to_string(&tools).expect("JSON")).expect("the same");
        assert_eq!(again, tools);
        let many = format!("[{}]", vec![r#"{"function":{"name":"x"}}"#; 4000].join(","));
        for (json, part) in [
            ("", "is not valid JSON"),
            ("[", "is not valid JSON"),
            ("{}", "use a JSON array of tools"),
            ("[]", "is empty"),
            ("[5]", "tool 1: is 5; use an object"),
            (r#"[{"type": "retrieval"}]"#, "field `type` is \"retrieval\"; use \"function\""),
            (r#"[{"type": "function"}]"#, "field `function` is missing"),
            (r#"[{"function": "x"}]"#, "field `function` is \"x\"; use an object"),
            (r#"[{"function": {}}]"#, "field `function.name` is missing"),
            (r#"[{"function": {"name": "a b"}}]"#, "use 1 to 128 letters"),
            (r#"[{"function": {"name": "a"}}, {"function": {"name": "a"}}]"#, "tool 2: a second \"a\""),
            (r#"[{"function": {"name": "a", "description": 1}}]"#, "`function.description` is 1; use a text"),
            (r#"[{"function": {"name": "a", "parameters": []}}]"#, "`function.parameters` is []"),
            (r#"[{"function": {"name": "a", "parms": {}}}]"#, "unknown field `function.parms`"),
            (&"[".repeat(100_000), "nested more than 24 levels"),
            (&many, "more than 10000 values"),
            (&"x".repeat(MAX_JSON + 1), "more than 1048576 bytes"),
        ] {
            let said = Tools::parse_json(json).expect_err(part);
            assert!(said.contains(part) && !said.contains('\n') && said.len() < 300, "{said}");
        }
    }

    #[test]
    fn values_are_json_or_texts() {
        let mut args = TemplateKwargs::default();
        for (name, value, json) in [
            ("enable_thinking", "false", "false"),
            ("n", "[1, {\"b\": 2}]", "[1, {\"b\": 2}]"),
            ("date_string", "26 Jul 2024", "\"26 Jul 2024\""),
            ("empty", "", "\"\""),
            ("quoted", "\"a\"", "\"a\""),
        ] {
            assert_eq!(args.set_variable(name, value), Ok(()));
            assert_eq!(args.own_variables().last(), Some(&(name.to_string(), json.to_string())));
        }
        args.set_variable("n", "2").expect("replaced");
        assert_eq!(
            (args.own_variables().len(), args.has_variable("n"), args.has_variable("m")),
            (5, true, false)
        );
        for (name, value) in [("", "1"), ("1a", "1"), ("a-b", "1"), ("tools", "[]"), ("a", &"[".repeat(30))] {
            let said = args.set_variable(name, value).map_err(|e| e.len() < 200);
            // Open brackets are a text, and texts are not nested.
            assert_eq!(said, if name == "a" { Ok(()) } else { Err(true) }, "{name}");
        }
        let mut many = TemplateKwargs::default();
        let set = (0..=MAX_VARIABLES).map(|i| many.set_variable(&format!("v{i}"), "1")).collect::<Vec<_>>();
        assert!(set[..MAX_VARIABLES].iter().all(Result::is_ok) && set[MAX_VARIABLES].is_err());
        assert_eq!(many.set_variable("v0", "2"), Ok(()), "replaced");
        let deep = format!("{}{}", "[".repeat(30), "]".repeat(30));
        assert!(args.set_variable("a", &deep).is_err_and(|e| e.contains("24 levels")));
    }
}
