//! Tools of a request: those that are served, and how freely they may be called.

use super::fields::Fields;
use super::refusal::Refusal;
use files::error::quoted;
use files::say;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use text::chat::Tools;

type Result<T> = std::result::Result<T, Refusal>;

/// Kinds of tools that are said to be left out, at most: clients may name any.
const MOST_NOTED: usize = 64;

/// Whether functions may be called, or must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    Auto,
    Never,
    Any,
    One(String),
}

/// Brings a tool to the form of chat completions; `None` for a kind that is not served.
pub type ReadsTool = fn(&Value) -> Option<Value>;

/// A tool of chat completions, without fields that say nothing to a model.
pub fn nested(of: &Value) -> Option<Value> {
    if of.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "function") {
        return None;
    }
    let mut tool = of.clone();
    if let Some(fields) = tool.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
        if let Some(function) = fields.get_mut("function").and_then(Value::as_object_mut) {
            let known = ["name", "description", "parameters", "strict"];
            function.retain(|name, value| known.contains(&name.as_str()) && !value.is_null());
        }
    }
    Some(tool)
}

/// A tool of `/v1/responses`.
pub fn flat(of: &Value) -> Option<Value> {
    if of.get("function").is_some() || !of.is_object() {
        return nested(of);
    }
    nested(&json!({"type": of["type"], "function": of}))
}

/// A tool of Anthropic's: a server tool has a type of its own and no schema.
pub fn with_input_schema(of: &Value) -> Option<Value> {
    let kind = of.get("type").and_then(Value::as_str).filter(|kind| *kind != "custom");
    if kind.is_some() && of["input_schema"].is_null() {
        return None;
    }
    let [name, description, schema] = ["name", "description", "input_schema"].map(|field| &of[field]);
    let function = json!({"name": name, "description": description, "parameters": schema});
    nested(&json!({"type": "function", "function": function}))
}

/// Says on stderr, once for each kind, that tools of it are left out.
fn note_left_out(tool: &Value) {
    static NOTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let kind = quoted(tool["type"].as_str().unwrap_or_default());
    let mut noted = NOTED.lock().unwrap_or_else(PoisonError::into_inner);
    if noted.len() < MOST_NOTED && noted.insert(kind.clone()) {
        say!("tools of type {kind} are left out of requests: functions alone are served");
    }
}

/// The name of the function that a tool, or what chooses one, is about; in either form.
fn name_of(tool: &Value) -> Option<&str> {
    tool.get("name").or_else(|| tool.get("function")?.get("name"))?.as_str()
}

/// The tools of a request that may be called, and how freely.
pub fn read(fields: &Fields<'_>, tool: ReadsTool) -> Result<(Option<Tools>, Wanted)> {
    let (mut all, mut left_out) = (Vec::new(), Vec::new());
    for of in fields.list("tools")?.unwrap_or_default() {
        match tool(of) {
            Some(tool) => all.push(tool),
            None => left_out.push(of),
        }
    }
    left_out.iter().for_each(|of| note_left_out(of));
    let wanted = match choice_type(fields) {
        Some("allowed_tools") => allowed(fields, &mut all)?,
        Some(kind) if left_out.iter().any(|of| of["type"] == kind) => Wanted::Auto,
        _ => wanted(fields)?,
    };
    // What asks for a tool that is left out is so too.
    let wanted = match wanted {
        Wanted::Any if all.is_empty() && !left_out.is_empty() => Wanted::Auto,
        Wanted::One(name) if left_out.iter().any(|of| name_of(of) == Some(name.as_str())) => Wanted::Auto,
        wanted => wanted,
    };
    let parsed = match all.is_empty() {
        true => None,
        false => {
            Some(Tools::parse(&Value::from(all).to_string()).map_err(|why| fields.refuse("tools", why))?)
        }
    };
    check(fields, &wanted, parsed.as_ref())?;
    Ok((parsed.filter(|_| wanted != Wanted::Never), wanted))
}

/// A choice that is a word, or the word of one that is an object.
fn choice_type<'a>(fields: &Fields<'a>) -> Option<&'a str> {
    let choice = fields.get("tool_choice")?;
    choice.as_str().or_else(|| choice.get("type")?.as_str())
}

/// Leaves the tools that are allowed, in the form of either of OpenAI's APIs.
fn allowed(fields: &Fields<'_>, all: &mut Vec<Value>) -> Result<Wanted> {
    let Some(choice) = fields.object("tool_choice")? else { return Ok(Wanted::Auto) };
    let choice = choice.object("allowed_tools")?.unwrap_or(choice);
    let wanted = match choice.text("mode")?.unwrap_or("auto") {
        "auto" => Wanted::Auto,
        "required" => Wanted::Any,
        other => return Err(choice.refuse("mode", format!("is {}; use auto or required", quoted(other)))),
    };
    let mut names = Vec::new();
    for (i, tool) in choice.list("tools")?.unwrap_or_default().iter().enumerate() {
        if tool.get("type").and_then(Value::as_str).is_some_and(|kind| kind != "function") {
            continue;
        }
        let field = format!("tools[{i}]");
        let name = name_of(tool).ok_or_else(|| choice.refuse(&field, "names no function; give its name"))?;
        if !all.iter().any(|tool| name_of(tool) == Some(name)) {
            let why = format!("is {}, which is not one of `tools`; add it", quoted(name));
            return Err(choice.refuse(&field, why));
        }
        names.push(name);
    }
    all.retain(|tool| name_of(tool).is_some_and(|name| names.contains(&name)));
    Ok(wanted)
}

/// A word, Anthropic's object with one, or what names a function in either API.
fn wanted(fields: &Fields<'_>) -> Result<Wanted> {
    let Some(choice) = fields.get("tool_choice") else { return Ok(Wanted::Auto) };
    Ok(match (choice_type(fields), name_of(choice)) {
        (Some("auto"), _) => Wanted::Auto,
        (Some("none"), _) => Wanted::Never,
        (Some("required" | "any"), _) => Wanted::Any,
        (Some("function" | "tool"), Some(name)) => Wanted::One(name.into()),
        _ => {
            let why = "is none that is known; use \"auto\", \"none\", \"required\" or the name of a function";
            return Err(fields.refuse("tool_choice", why));
        }
    })
}

/// Refuses to ask for a call that cannot be made.
fn check(fields: &Fields<'_>, wanted: &Wanted, tools: Option<&Tools>) -> Result<()> {
    let why = match (tools, wanted) {
        (_, Wanted::Auto | Wanted::Never) => return Ok(()),
        _ if cfg!(not(feature = "grammar")) => {
            "this server follows no grammars, so the model itself decides what it calls; use \"auto\" or \"none\""
                .into()
        }
        (None, _) => "asks for a call, and there are no `tools`; give them".into(),
        (Some(tools), Wanted::One(name)) if !tools.names().contains(name) => {
            format!("asks for {}, which is not one of `tools`; add it", quoted(name))
        }
        _ => return Ok(()),
    };
    Err(fields.refuse("tool_choice", why))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(body: &Value, tool: ReadsTool) -> std::result::Result<(Vec<String>, Wanted), String> {
        let body = body.as_object().expect("an object");
        let (tools, wanted) = read(&Fields::new(body), tool).map_err(|refusal| refusal.message)?;
        Ok((tools.map_or(Vec::new(), |tools| tools.names().to_vec()), wanted))
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
        for (tools, tool) in [
            (json!([{"type": "function", "function": function}]), nested as ReadsTool),
            (
                json!([{"function": function, "type": null}, {"type": "custom", "custom": {"name": "x"}}]),
                nested,
            ),
            (json!([typed, {"type": "custom", "name": "x"}]), flat),
            (json!([{"type": "function", "function": function}]), flat),
            (
                json!([{"name": "f", "input_schema": parameters, "description": null, "cache_control": {}}]),
                with_input_schema,
            ),
            (
                json!([{"name": "f", "input_schema": parameters, "type": "custom"}, server("web_search_20250305"), server("bash_20250124")]),
                with_input_schema,
            ),
        ] {
            let mut all = tools.as_array().expect("a list").clone();
            all.extend(others.clone());
            assert_eq!(names(&json!({"tools": all}), tool), Ok((vec!["f".into()], Wanted::Auto)), "{tools}");
        }
        assert_eq!(names(&json!({"tools": others}), flat), Ok((vec![], Wanted::Auto)));
        for choice in [
            json!("required"),
            json!({"type": "mcp"}),
            json!({"type": "tool", "name": "other"}),
            json!("auto"),
        ] {
            let body = json!({"tools": others, "tool_choice": choice});
            assert_eq!(names(&body, flat), Ok((vec![], Wanted::Auto)), "{choice}");
        }
        assert!(names(&json!({"tools": others, "tool_choice": {"type": "file_search"}}), flat).is_err());
        assert!(names(&json!({"tools": [{"type": "function", "function": 1}]}), nested).is_err());
    }

    #[test]
    fn tools_that_are_allowed_are_those_that_are_left() {
        let tools: Vec<_> =
            ["f", "g", "h"].iter().map(|name| json!({"type": "function", "name": name})).collect();
        let ask = |choice: Value| names(&json!({"tools": tools, "tool_choice": choice}), flat);
        let list = json!([{"type": "function", "name": "g"}, {"type": "mcp", "server_label": "x"}]);
        let nested = json!([{"type": "function", "function": {"name": "g"}}]);
        for choice in [
            json!({"type": "allowed_tools", "mode": "auto", "tools": list}),
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": nested}}),
        ] {
            assert_eq!(ask(choice), Ok((vec!["g".into()], Wanted::Auto)));
        }
        let required = ask(json!({"type": "allowed_tools", "mode": "required", "tools": list}));
        match cfg!(feature = "grammar") {
            true => assert_eq!(required, Ok((vec!["g".into()], Wanted::Any))),
            false => assert!(required.is_err_and(|why| why.contains("no grammars"))),
        }
        let missing = ask(json!({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "x"}]}));
        assert!(missing.is_err_and(|why| why.starts_with("tool_choice.tools[0]: is \"x\"")));
        let mode = ask(json!({"type": "allowed_tools", "mode": "some", "tools": []}));
        assert!(mode.is_err_and(|why| why.starts_with("tool_choice.mode: is \"some\"")));
        assert_eq!(ask(json!("none")), Ok((vec![], Wanted::Never)));
    }
}
