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

/// A published template, and a tokenizer that has its control tokens besides those of the story model.
fn with_controls(name: &str, controls: &[&str]) -> (Tokenizer, Template) {
    let text = std::fs::read_to_string(crate::project().join("models/story/tokenizer.json")).expect("a file");
    let mut json: Value = serde_json::from_str(&text).expect("JSON");
    for (id, token) in (4096..).zip(controls) {
        let added = serde_json::json!({"id": id, "content": token, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true});
        json["added_tokens"].as_array_mut().expect("tokens").push(added);
    }
    let dir = std::env::temp_dir().join(format!("antigravity-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    std::fs::write(dir.join("tokenizer.json"), json.to_string()).expect("writable");
    let tokenizer = Tokenizer::open(&dir, 8192).expect("loads");
    std::fs::remove_dir_all(&dir).expect("removable");
    let file = crate::project().join("tests/fixtures/chat/2026").join(format!("{name}.jinja"));
    let source = std::fs::read_to_string(file).expect("a template");
    let template = Jinja::new(name, source, vec![("eos_token".into(), "<|im_end|>".into())]);
    let template = template.and_then(|t| t.for_tokenizer(&tokenizer)).expect("loads");
    (tokenizer, Template::Jinja(template))
}

#[test]
fn a_call_and_its_result_are_told_in_the_form_of_the_family() {
    let tools = r#"[{"type": "function", "function": {"name": "f", "description": "d", "parameters":
        {"type": "object", "properties": {"a": {"type": "string"}}}}}]"#;
    for (name, controls, ends, answer, prompt) in [
        (
            "gpt-oss",
            &[
                "<|start|>",
                "<|end|>",
                "<|message|>",
                "<|channel|>",
                "<|constrain|>",
                "<|return|>",
                "<|call|>",
            ][..],
            &["<|return|>", "<|call|>"][..],
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f \
             <|constrain|>json<|message|>{\"a\": \"b\"}",
            "<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant \
             to=functions.f<|channel|>commentary json<|message|>{\"a\": \"b\"}<|call|><|start|>functions.f to=assistant\
             <|channel|>commentary<|message|>\"r\"<|end|><|start|>assistant",
        ),
        (
            "gemma4",
            &[
                "<|turn>",
                "<turn|>",
                "<|tool_call>",
                "<tool_call|>",
                "<|tool_response>",
                "<|channel>",
                "<|\"|>",
            ],
            &["<turn|>", "<|tool_response>"],
            "<|tool_call>call:f{a:<|\"|>b<|\"|>}<tool_call|>",
            "<|turn>user\nq<turn|>\n<|turn>model\n<|tool_call>call:f{a:<|\"|>b<|\"|>}\
             <tool_call|><|tool_response>response:f{value:<|\"|>r<|\"|>}<tool_response|>",
        ),
        (
            "lfm2.5",
            &["<|tool_call_start|>", "<|tool_call_end|>"],
            &["<|im_end|>"],
            "<|tool_call_start|>[f(a='b')]<|tool_call_end|>",
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<|tool_call_start|>[f(a='b')]<|tool_call_end|>\
             <|im_end|>\n<|im_start|>tool\nr<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "ministral3",
            &["[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[TOOL_RESULTS]"],
            &["<|im_end|>"],
            "[TOOL_CALLS]f[ARGS]{\"a\": \"b\"}",
            "[INST]q[/INST][TOOL_CALLS]f[ARGS]{\"a\": \"b\"}<|im_end|>[TOOL_RESULTS]r[/TOOL_RESULTS]",
        ),
        (
            "qwen3.5",
            &[],
            &["<|im_end|>"],
            "Hm.\n</think>\n\n<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>\n</function>\n</tool_call>",
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n<function=f>\n\
             <parameter=a>\nb\n</parameter>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\nr\n\
             </tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
    ] {
        let (tokenizer, template) = with_controls(name, controls);
        let ids: Vec<u32> = ends.iter().filter_map(|token| tokenizer.token_to_id(token)).collect();
        assert_eq!(template.stop_tokens(&tokenizer), ids, "{name}");
        let form = OutputFormat::for_template(&template, &tokenizer);
        let variables = TemplateKwargs::with_tools(Tools::parse_json(tools).expect("tools"));
        let mut chat = Conversation::new(template, None).with_format(variables, form);
        chat.add_question(&tokenizer, "q").expect("asks");
        chat.add_answer(&tokenizer, &tokenizer.encode(answer, AddSpecial::No).expect("encodes"));
        let [call] = chat.last_tool_calls() else { panic!("{name}: {:?}", chat.state().messages) };
        assert_eq!((call.name.as_str(), call.arguments.as_str()), ("f", r#"{"a": "b"}"#), "{name}");
        let result = Message::tool_result(&call.clone(), "r");
        chat.add_messages_until(&tokenizer, &[result], &|| false).expect("asks");
        let text = tokenizer.decode_with_special(chat.ids());
        assert!(text.ends_with(prompt), "{name}: {text}");
    }
}
