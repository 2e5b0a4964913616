//! `tools` and `tool_choice` of a request. Only functions are supported; other tools are ignored.

use super::body::{read_field, read_object};
use super::error::{ApiError, ApiResult};
use files::error::quote;
use files::print_stderr;
use serde::Deserialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use text::chat::Tools;

/// Maximum number of unsupported tool types that are logged: clients can send any name.
const MAX_LOGGED_TYPES: usize = 64;

/// `tool_choice`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    Auto,
    None,
    Required,
    Function(String),
}

/// Converts a tool to the format of chat completions; `None` for an unsupported type.
pub type ConvertTool = fn(&Value) -> Option<Value>;

/// Converts a tool of chat completions: removes fields that mean nothing to a model.
pub fn convert_chat_tool(tool: &Value) -> Option<Value> {
    if !is_function(tool) {
        return None;
    }
    let mut tool = tool.clone();
    if let Some(fields) = tool.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
        if let Some(function) = fields.get_mut("function").and_then(Value::as_object_mut) {
            let known = ["name", "description", "parameters", "strict"];
            function.retain(|name, value| known.contains(&name.as_str()) && !value.is_null());
        }
    }
    Some(tool)
}

/// Converts a tool of `/v1/responses`.
pub fn convert_responses_tool(tool: &Value) -> Option<Value> {
    if tool.get("function").is_some() || !tool.is_object() {
        return convert_chat_tool(tool);
    }
    convert_chat_tool(&json!({"type": tool["type"], "function": tool}))
}

/// Converts a tool of `/v1/messages`; Anthropic's server tools have another type and no schema.
pub fn convert_anthropic_tool(tool: &Value) -> Option<Value> {
    let kind = tool["type"].as_str().filter(|kind| *kind != "custom");
    if kind.is_some() && tool["input_schema"].is_null() {
        return None;
    }
    let [name, description, schema] = ["name", "description", "input_schema"].map(|field| &tool[field]);
    let function = json!({"name": name, "description": description, "parameters": schema});
    convert_chat_tool(&json!({"type": "function", "function": function}))
}

fn is_function(tool: &Value) -> bool {
    tool["type"].as_str().is_none_or(|kind| kind == "function")
}

/// Function name of a tool or a tool choice, in the format of either OpenAI API.
fn function_name(tool: &Value) -> Option<&str> {
    tool.get("name").or_else(|| tool.get("function")?.get("name"))?.as_str()
}

/// Logs that a type of tool is ignored, once per type.
fn log_ignored_tool(tool: &Value) {
    static LOGGED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let kind = quote(tool["type"].as_str().unwrap_or_default());
    let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
    if logged.len() < MAX_LOGGED_TYPES && logged.insert(kind.clone()) {
        print_stderr!("ignoring tools of type {kind}: only functions are supported");
    }
}

/// Reads `tools` and `tool_choice`. The tools are `None` if the model may call none.
pub fn read_tools(body: &Value, convert: ConvertTool) -> ApiResult<(Option<Tools>, ToolChoice)> {
    let (mut tools, mut ignored) = (Vec::new(), Vec::new());
    for tool in read_field::<Vec<Value>>(body, "tools")?.unwrap_or_default() {
        match convert(&tool) {
            Some(converted) => tools.push(converted),
            None => ignored.push(tool),
        }
    }
    ignored.iter().for_each(log_ignored_tool);
    let choice = &body["tool_choice"];
    let choice = match choice.as_str().or(choice["type"].as_str()) {
        Some("allowed_tools") => keep_allowed_tools(choice, &mut tools)?,
        Some(kind) if ignored.iter().any(|tool| tool["type"] == kind) => ToolChoice::Auto,
        kind => read_choice(choice, kind)?,
    };
    // The choice of an ignored tool is ignored too.
    let is_ignored = match &choice {
        ToolChoice::Required => tools.is_empty() && !ignored.is_empty(),
        ToolChoice::Function(name) => ignored.iter().any(|tool| function_name(tool) == Some(name)),
        _ => false,
    };
    let choice = if is_ignored { ToolChoice::Auto } else { choice };
    let mut parsed = None;
    if !tools.is_empty() {
        let refuse = |why| ApiError::for_field("tools", why);
        parsed = Some(Tools::parse_json(&Value::from(tools).to_string()).map_err(refuse)?);
    }
    check_choice(&choice, parsed.as_ref())?;
    Ok((parsed.filter(|_| choice != ToolChoice::None), choice))
}

/// `tool_choice` of type `allowed_tools`, in the format of either OpenAI API.
#[derive(Deserialize)]
struct AllowedTools {
    mode: Option<String>,
    tools: Option<Vec<Value>>,
}

/// Removes the tools that are not allowed.
fn keep_allowed_tools(choice: &Value, tools: &mut Vec<Value>) -> ApiResult<ToolChoice> {
    let (allowed, place) = match &choice["allowed_tools"] {
        Value::Null => (choice, "tool_choice"),
        nested => (nested, "tool_choice.allowed_tools"),
    };
    let allowed: AllowedTools = read_object(allowed, place)?;
    let choice = match allowed.mode.as_deref().unwrap_or("auto") {
        "auto" => ToolChoice::Auto,
        "required" => ToolChoice::Required,
        other => {
            let why = format!("is {}; use auto or required", quote(other));
            return Err(ApiError::for_field(format!("{place}.mode"), why));
        }
    };
    let allowed = allowed.tools.unwrap_or_default();
    let mut names = Vec::new();
    for (i, tool) in allowed.iter().enumerate().filter(|(_, tool)| is_function(tool)) {
        let refuse = |why| ApiError::for_field(format!("{place}.tools[{i}]"), why);
        let name = function_name(tool).ok_or_else(|| refuse("has no function name; add it".into()))?;
        if !tools.iter().any(|tool| function_name(tool) == Some(name)) {
            return Err(refuse(format!("is {}, which is not one of `tools`; add it", quote(name))));
        }
        names.push(name);
    }
    tools.retain(|tool| function_name(tool).is_some_and(|name| names.contains(&name)));
    Ok(choice)
}

/// Reads a choice given as a string, as Anthropic's object, or as the name of a function.
fn read_choice(choice: &Value, kind: Option<&str>) -> ApiResult<ToolChoice> {
    match (kind, function_name(choice)) {
        (None, _) if choice.is_null() => Ok(ToolChoice::Auto),
        (Some("auto"), _) => Ok(ToolChoice::Auto),
        (Some("none"), _) => Ok(ToolChoice::None),
        (Some("required" | "any"), _) => Ok(ToolChoice::Required),
        (Some("function" | "tool"), Some(name)) => Ok(ToolChoice::Function(name.into())),
        _ => {
            let why = "is unknown; use \"auto\", \"none\", \"required\" or the name of a function";
            Err(ApiError::for_field("tool_choice", why))
        }
    }
}

/// Refuses a required call that cannot be made.
fn check_choice(choice: &ToolChoice, tools: Option<&Tools>) -> ApiResult<()> {
    let why = match (choice, tools) {
        (ToolChoice::Auto | ToolChoice::None, _) => return Ok(()),
        _ if cfg!(not(feature = "grammar")) => {
            "this server supports no grammars, so it cannot force a call; use \"auto\" or \"none\"".into()
        }
        (_, None) => "requires a call, but there are no `tools`; add them".into(),
        (ToolChoice::Function(name), Some(tools)) if !tools.function_names().contains(name) => {
            format!("requires {}, which is not one of `tools`; add it", quote(name))
        }
        _ => return Ok(()),
    };
    Err(ApiError::for_field("tool_choice", why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(body: &Value, convert: ConvertTool) -> Result<(Vec<String>, ToolChoice), String> {
        let (tools, choice) = read_tools(body, convert).map_err(|e| e.message)?;
        Ok((tools.map_or(Vec::new(), |tools| tools.function_names().to_vec()), choice))
    }

    #[test]
    fn functions_of_each_api_are_served_and_other_tools_left_out() {
        let parameters = json!({"type": "object"});
        let function = json!({"name": "f", "description": null, "parameters": parameters, "strict": null, "defer_loading": true});
        let mut typed = function.clone();
        typed["type"] = "function".into();
        let others: Vec<Value> =
            ["namespace", "web_search", "local_shell", "image_generation", "mcp", "\u{1b}[2J"]
                .iter()
                .map(|kind| json!({"type": kind, "name": "other", "tools": [typed.clone()]}))
                .collect();
        let server = |kind: &str| json!({"type": kind, "name": "server"});
        for (tools, convert) in [
            (json!([{"type": "function", "function": function}]), convert_chat_tool as ConvertTool),
            (
                json!([{"function": function, "type": null}, {"type": "custom", "custom": {"name": "x"}}]),
                convert_chat_tool,
            ),
            (json!([typed, {"type": "custom", "name": "x"}]), convert_responses_tool),
            (json!([{"type": "function", "function": function}]), convert_responses_tool),
            (
                json!([{"name": "f", "input_schema": parameters, "description": null, "cache_control": {}}]),
                convert_anthropic_tool,
            ),
            (
                json!([{"name": "f", "input_schema": parameters, "type": "custom"}, server("web_search_20250305"), server("bash_20250124")]),
                convert_anthropic_tool,
            ),
        ] {
            let mut all = tools.as_array().expect("a list").clone();
            all.extend(others.clone());
            assert_eq!(
                names(&json!({"tools": all}), convert),
                Ok((vec!["f".into()], ToolChoice::Auto)),
                "{tools}"
            );
        }
        assert_eq!(names(&json!({"tools": others}), convert_responses_tool), Ok((vec![], ToolChoice::Auto)));
        for choice in [
            json!("required"),
            json!({"type": "mcp"}),
            json!({"type": "tool", "name": "other"}),
            json!("auto"),
        ] {
            let body = json!({"tools": others, "tool_choice": choice});
            assert_eq!(names(&body, convert_responses_tool), Ok((vec![], ToolChoice::Auto)), "{choice}");
        }
        assert!(
            names(&json!({"tools": others, "tool_choice": {"type": "file_search"}}), convert_responses_tool)
                .is_err()
        );
        assert!(names(&json!({"tools": [{"type": "function", "function": 1}]}), convert_chat_tool).is_err());
    }

    #[test]
    fn tools_that_are_allowed_are_those_that_are_left() {
        let tools: Vec<_> =
            ["f", "g", "h"].iter().map(|name| json!({"type": "function", "name": name})).collect();
        let ask =
            |choice: Value| names(&json!({"tools": tools, "tool_choice": choice}), convert_responses_tool);
        let list = json!([{"type": "function", "name": "g"}, {"type": "mcp", "server_label": "x"}]);
        let nested = json!([{"type": "function", "function": {"name": "g"}}]);
        for choice in [
            json!({"type": "allowed_tools", "mode": "auto", "tools": list}),
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": nested}}),
        ] {
            assert_eq!(ask(choice), Ok((vec!["g".into()], ToolChoice::Auto)));
        }
        let required = ask(json!({"type": "allowed_tools", "mode": "required", "tools": list}));
        match cfg!(feature = "grammar") {
            true => assert_eq!(required, Ok((vec!["g".into()], ToolChoice::Required))),
            false => assert!(required.is_err_and(|why| why.contains("no grammars"))),
        }
        let missing = ask(json!({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}));
        assert!(missing.is_err_and(|why| why.starts_with("tool_choice.tools[0]: is \"x\"")));
        let mode = ask(json!({"type": "allowed_tools", "mode": "some", "tools": []}));
        assert!(mode.is_err_and(|why| why.starts_with("tool_choice.mode: is \"some\"")));
        assert_eq!(ask(json!("none")), Ok((vec![], ToolChoice::None)));
    }
}
