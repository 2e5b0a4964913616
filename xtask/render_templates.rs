//! Renders chat templates for `tests/templates.py`, which `cargo xtask test templates` runs. Each line of stdin is an
//! object with a template and a conversation, each line of stdout the result: `text`, or `refused` with the error.
#![allow(clippy::disallowed_macros, reason = "not the program that users run")]

use serde::Deserialize;
use serde_json::json;
use std::error::Error;
use std::io::BufRead;
use text::chat::{
    Jinja, Message, PromptEnding, RenderContext, TemplateKwargs, Tools, UtcTime, join_segments,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TemplateCase {
    name: String,
    source: String,
    /// Special tokens by name, without `bos_token`.
    tokens: Vec<(String, String)>,
    bos: String,
    unix: u64,
    add_generation_prompt: bool,
    messages: Vec<Message>,
    tools: Option<Tools>,
    /// Names, and values as JSON.
    kwargs: Vec<(String, String)>,
}

fn main() -> Result<(), Box<dyn Error>> {
    for line in std::io::stdin().lock().lines() {
        let case: TemplateCase = serde_json::from_str(&line?)?;
        println!("{}", render(case).map_or_else(|why| json!({"refused": why}), |text| json!({"text": text})));
    }
    Ok(())
}

fn render(case: TemplateCase) -> Result<String, String> {
    let mut variables = case.tools.map_or_else(TemplateKwargs::default, TemplateKwargs::with_tools);
    for (name, value) in &case.kwargs {
        variables.set_variable(name, value)?;
    }
    let context = RenderContext {
        bos: Some(&case.bos),
        now: UtcTime::from_unix(case.unix),
        ending: if case.add_generation_prompt { PromptEnding::Prompt } else { PromptEnding::Message },
        variables: Some(&variables),
    };
    let template = Jinja::new(case.name, case.source, case.tokens).map_err(|e| e.to_string())?;
    Ok(join_segments(&template.render_messages(&case.messages, &context).map_err(|e| e.to_string())?))
}
