//! The templates of 2026, with thinking and tools, byte for byte as transformers renders them.

use super::*;
use serde::Deserialize;
use serde_json::Map;
use serde_json::value::RawValue;
use std::collections::BTreeMap;

#[derive(Deserialize)]
struct Fixtures<'a> {
    tokens: BTreeMap<String, BTreeMap<String, String>>,
    #[serde(borrow)]
    cases: Vec<TemplateCase<'a>>,
}

/// Objects are kept as text: templates see the order of their fields.
#[derive(Deserialize)]
struct TemplateCase<'a> {
    name: String,
    #[serde(borrow)]
    messages: Vec<CaseMessage<'a>>,
    #[serde(borrow)]
    tools: Option<&'a RawValue>,
    template_arguments: Map<String, Value>,
    rendered: BTreeMap<String, BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct CaseMessage<'a> {
    role: Role,
    content: String,
    reasoning_content: Option<String>,
    #[serde(borrow, default)]
    tool_calls: Vec<CaseCall<'a>>,
    tool_call_id: Option<String>,
    name: Option<String>,
}

#[derive(Deserialize)]
struct CaseCall<'a> {
    id: String,
    #[serde(borrow)]
    function: CaseFunction<'a>,
}

#[derive(Deserialize)]
struct CaseFunction<'a> {
    name: String,
    #[serde(borrow)]
    arguments: &'a RawValue,
}

impl CaseMessage<'_> {
    fn message(&self) -> Message {
        let call = |call: &CaseCall<'_>| ToolCall {
            id: call.id.clone(),
            name: call.function.name.clone(),
            arguments: call.function.arguments.get().into(),
        };
        Message {
            reasoning: self.reasoning_content.clone(),
            tool_calls: self.tool_calls.iter().map(call).collect(),
            tool_call_id: self.tool_call_id.clone(),
            name: self.name.clone(),
            ..Message::new(self.role, self.content.as_str())
        }
    }
}

#[test]
fn templates_of_2026_are_rendered_byte_for_byte() {
    let dir = crate::project().join("tests/fixtures/chat/2026");
    let text = std::fs::read_to_string(dir.join("cases.json")).expect("a fixture");
    let fixtures: Fixtures<'_> = serde_json::from_str(&text).expect("JSON");
    let mut seen = 0;
    for (name, tokens) in &fixtures.tokens {
        let source = std::fs::read_to_string(dir.join(format!("{name}.jinja"))).expect("a template");
        let others = tokens.iter().filter(|(name, _)| *name != "bos_token");
        let others = others.map(|(name, text)| (name.clone(), text.clone())).collect();
        let template = Template::Jinja(Jinja::new(name.as_str(), source, others).expect("compiles"));
        for case in &fixtures.cases {
            let mut variables = TemplateKwargs::default();
            variables.tools = case.tools.map(|tools| Tools::parse_json(tools.get()).expect("tools"));
            for (name, value) in &case.template_arguments {
                variables.set_variable(name, &value.to_string()).expect("a name");
            }
            let messages: Vec<Message> = case.messages.iter().map(CaseMessage::message).collect();
            for (key, ending) in [
                ("with_generation_prompt", PromptEnding::Prompt),
                ("without_generation_prompt", PromptEnding::Message),
            ] {
                let context = RenderContext {
                    bos: tokens.get("bos_token").map(String::as_str),
                    // 2026-11-28 09:30
                    now: UtcTime::from_unix(1_795_858_200),
                    ending,
                    variables: Some(&variables),
                };
                let rendered = template.render_messages(&messages, &context).map(|s| join_segments(&s));
                assert_eq!(rendered.as_ref(), Ok(&case.rendered[name][key]), "{} {name} {key}", case.name);
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 140);
}
