//! The grammar of an answer that must call a tool, in the format of the model.

use super::call_literal::GEMMA_QUOTE;
use super::call_syntax::{CallSyntax, Tags};
use super::output_format::{LLAMA, Markers, OutputFormat};
use super::output_parser::OutputParser;
use super::template_kwargs::Tools;
use crate::sampler::Grammar;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::fmt::Write;

/// Longer strings are not counted: each character is a state.
const MAX_COUNTED: u64 = 1000;

impl OutputFormat {
    /// The grammar of one call of a function of `tools`, or of the function `only`, with arguments that follow its
    /// schema. Thinking may come first, and may have begun in the prompt; `parser` is one for the answer.
    ///
    /// # Errors
    ///
    /// `Usage` if the model has no format for tool calls, or if the grammar is too long.
    pub fn tool_grammar(
        &self,
        tools: &Tools,
        only: Option<&str>,
        parser: &OutputParser,
        tokenizer: &Tokenizer,
    ) -> Result<Grammar> {
        let Some(markers) = self.calls else {
            return Err(Error::Usage(
                "this model has no format for tool calls; use \"auto\" or \"none\"".into(),
            ));
        };
        let mut rules = String::new();
        let thoughts = match self.thinking.map(|thinking| (thinking.open, thinking.close.unwrap_or_default()))
        {
            Some((open, close)) => {
                // Between two messages, each with a header.
                let next = if self.headers.is_empty() { r"/\n*/" } else { r#""<|start|>assistant""# };
                let _ = writeln!(rules, "after: {next}\nthoughts[suffix={}]: /(.|\\n)*/", json!(close));
                if parser.is_thinking() {
                    "thoughts after".to_owned()
                } else {
                    format!("({} thoughts after)?", json!(open))
                }
            }
            None => String::new(),
        };
        let functions = list_functions(tools).filter(|(name, _)| only.is_none_or(|only| only == name));
        let (mut names, mut schemas) = (Vec::new(), Vec::new());
        for (i, (name, schema)) in functions.enumerate() {
            let (before, after) = wrap_arguments(markers, &name);
            names.push(format!("call_{i}"));
            let _ = writeln!(rules, "call_{i}: {} args_{i} {}", json!(before), json!(after));
            match markers.syntax {
                CallSyntax::Json | CallSyntax::Named(_) => {
                    let _ = writeln!(rules, "args_{i}: %json {schema}");
                }
                syntax => write_parameters(syntax, i, &schema, &mut rules)?,
            }
            Grammar::check_length("tools", &rules)?;
            schemas.push(schema);
        }
        let lark = format!("start: {thoughts} ({})\n{rules}", names.join(" | "));
        Ok(Grammar::from_lark("tools", &lark, schemas).with_shown_tokens(self.marker_token_ids(tokenizer)))
    }
}

/// The texts before and after the arguments of a call.
fn wrap_arguments(markers: Markers, name: &str) -> (String, String) {
    let Markers { open, close, syntax, .. } = markers;
    let end = close.unwrap_or("");
    match syntax {
        CallSyntax::Json => {
            let (open, close, arguments) = match markers {
                LLAMA => (String::new(), String::new(), "parameters"),
                _ if end == "</tool_call>" => (format!("{open}\n"), format!("\n{end}"), "arguments"),
                // A list.
                _ => (format!("{open}["), format!("]{end}"), "arguments"),
            };
            (format!("{open}{{\"name\": {}, \"{arguments}\": ", json!(name)), format!("}}{close}"))
        }
        CallSyntax::Named("[ARGS]") => (format!("{open}{name}[ARGS]"), String::new()),
        CallSyntax::Named(message) => {
            (format!("<|channel|>commentary {open}{name} <|constrain|>json{message}"), String::new())
        }
        CallSyntax::Tagged(Tags { newline, function: (before, after), function_end, .. }) => {
            (format!("{open}{newline}{before}{name}{after}{newline}"), format!("{function_end}{end}"))
        }
        CallSyntax::Braces => (format!("{open}call:{name}{{"), format!("}}{end}")),
        CallSyntax::Python => (format!("{open}[{name}("), format!(")]{end}")),
    }
}

/// Appends the rules of the arguments of function `i`, each parameter in its form: those of the schema in their order,
/// without those that are not required where the model leaves them out.
fn write_parameters(syntax: CallSyntax, i: usize, schema: &Value, rules: &mut String) -> Result<()> {
    let none = Map::new();
    let all = schema["properties"].as_object().unwrap_or(&none);
    let required: HashSet<_> =
        schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let separator = match syntax {
        CallSyntax::Tagged(_) => "",
        CallSyntax::Python => ", ",
        _ => ",",
    };
    let _ = writeln!(rules, "args_{i}: first_{i}_0");
    for (n, (name, own)) in all.iter().enumerate() {
        let mut own = own.clone();
        for shared in ["$defs", "definitions"].into_iter().filter(|_| has_reference(&all[name])) {
            if let (Some(definitions), Some(own)) = (schema.get(shared), own.as_object_mut()) {
                own.insert(shared.into(), definitions.clone());
            }
        }
        write_parameter(syntax, &format!("{i}_{n}"), (name, own), rules);
        // Each may contain all definitions.
        Grammar::check_length("tools", rules)?;
        // Before the first parameter nothing separates.
        for (kind, before) in [("first", ""), ("next", separator)] {
            let skip = if required.contains(name.as_str()) {
                String::new()
            } else {
                format!(" | {kind}_{i}_{}", n + 1)
            };
            let _ = writeln!(
                rules,
                "{kind}_{i}_{n}: {} parameter_{i}_{n} next_{i}_{}{skip}",
                json!(before),
                n + 1
            );
        }
    }
    let _ = writeln!(rules, "first_{i}_{0}: \"\"\nnext_{i}_{0}: \"\"", all.len());
    Ok(())
}

/// True if a schema refers to another one.
fn has_reference(schema: &Value) -> bool {
    match schema {
        Value::Array(all) => all.iter().any(has_reference),
        Value::Object(fields) => fields.contains_key("$ref") || fields.values().any(has_reference),
        _ => false,
    }
}

/// Appends the rules of one parameter and its value. Strings stand as they are, up to what ends them.
fn write_parameter(syntax: CallSyntax, id: &str, (name, mut schema): (&str, Value), rules: &mut String) {
    let (before, open, end) = match syntax {
        CallSyntax::Tagged(Tags { newline, parameter, end, .. }) => {
            (format!("{}{name}{}{newline}", parameter.0, parameter.1), "", format!("{newline}{end}{newline}"))
        }
        CallSyntax::Python => (format!("{name}="), "", String::new()),
        _ => (format!("{name}:"), GEMMA_QUOTE, String::new()),
    };
    let choices: Vec<_> = schema["enum"]
        .as_array()
        .into_iter()
        .flatten()
        .chain(schema.get("const"))
        .filter_map(Value::as_str)
        .collect();
    let close = if open.is_empty() { &end } else { open };
    let text = if schema["type"] != "string" || close.is_empty() {
        Grammar::restrict_whitespace(&mut schema);
        format!("%json {schema}")
    } else if choices.is_empty() {
        let count = |field: &str| schema[field].as_u64().filter(|n| *n <= MAX_COUNTED);
        let most = count("maxLength").map_or(String::new(), |n| n.to_string());
        let text = schema["pattern"].as_str().map_or_else(
            || format!("(.|\\n){{{},{most}}}", count("minLength").unwrap_or(0)),
            Grammar::pattern_to_lark,
        );
        let _ = writeln!(rules, "text_{id}[suffix={}]: /{text}/", json!(close));
        let _ = writeln!(rules, "parameter_{id}: {} text_{id}", json!([&before, open].concat()));
        return;
    } else {
        let choices = choices.iter().map(|choice| json!([open, choice, open].concat()).to_string());
        choices.collect::<Vec<_>>().join(" | ")
    };
    let _ =
        writeln!(rules, "value_{id}: {text}\nparameter_{id}: {} value_{id} {}", json!(before), json!(end));
}

/// The names of the functions, and the schemas of their arguments.
fn list_functions(tools: &Tools) -> impl Iterator<Item = (String, Value)> {
    let all: Vec<Value> = serde_json::from_str(tools.json()).unwrap_or_default();
    all.into_iter().map(|mut tool| {
        let function = tool["function"].take();
        let mut schema = function.get("parameters").cloned().unwrap_or_else(|| json!({}));
        schema["type"] = "object".into();
        Grammar::restrict_whitespace(&mut schema);
        (function["name"].as_str().unwrap_or_default().to_owned(), schema)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{AnswerPart, Jinja, Template};
    use crate::sampler::{Sampler, SamplerOptions};

    /// The story model's.
    const END: u32 = 1;
    const TOOLS: &str = r##"[
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties":
            {"at": {"enum": ["fox", "</tool_call>"]}, "n": {"$ref": "#/$defs/few"}}, "required": ["at", "n"],
            "additionalProperties": false, "$defs": {"few": {"type": "integer", "minimum": 0, "maximum": 9}}}}},
        {"type": "function", "function": {"name": "a.b-c", "parameters": {"properties":
            {"s": {"type": "string", "maxLength": 4}}, "required": ["s"], "additionalProperties": false}}},
        {"type": "function", "function": {"name": "find", "parameters": {"properties": {"id": {"type": "string",
            "pattern": "^[a-c]/[0-9]+$", "maxLength": 9}, "kind": {"type": "string", "enum": ["x", "<y>"]}},
            "required": ["id", "kind"], "additionalProperties": false}}}
    ]"##;

    fn sampler(grammar: Grammar, tokenizer: &Tokenizer, seed: u64) -> Sampler {
        let options = SamplerOptions {
            seed,
            top_k: 0,
            top_p: 1.0,
            grammar: Some(grammar),
            ..SamplerOptions::default()
        };
        let sampler = Sampler::new(options, 4096).expect("a sampler");
        sampler.with_grammar(tokenizer.pieces(), &[END]).expect("a grammar")
    }

    /// Any text of a grammar, as a model draws it for which all tokens are alike.
    fn drawn(grammar: Grammar, tokenizer: &Tokenizer, seed: u64) -> String {
        let (mut sampler, mut ids) = (sampler(grammar, tokenizer, seed), Vec::new());
        while ids.len() < 2000 {
            let id = sampler.sample_token(&mut [0.0; 4096], &ids);
            sampler.check_grammar().expect("it goes on");
            if id == END {
                break;
            }
            ids.push(id);
        }
        tokenizer.decode_with_special(&ids)
    }

    /// Returns true if a grammar allows a text.
    fn may_be(grammar: Grammar, tokenizer: &Tokenizer, text: &str) -> bool {
        let (mut sampler, ids) = (sampler(grammar, tokenizer, 0), tokenizer.encode_plain(text).expect("ids"));
        ids.iter().chain([&END]).all(|&id| {
            let mut logits = [0.0; 4096];
            logits[id as usize] = 1e4;
            sampler.sample_token(&mut logits, &[]) == id
        })
    }

    fn form(source: &str, tokenizer: &Tokenizer) -> OutputFormat {
        let jinja = Jinja::new("t", format!("{{# {source} #}}"), vec![]).expect("compiles");
        OutputFormat::for_template(&Template::Jinja(jinja), tokenizer)
    }

    #[test]
    fn thoughts_come_before_a_call_and_may_have_begun() {
        let tokenizer = Tokenizer::open(&crate::project().join("models/story"), 4096).expect("loads");
        let (form, tools) =
            (form("<think> <tool_call>", &tokenizer), Tools::parse_json(TOOLS).expect("tools"));
        let call = "<tool_call>\n{\"name\": \"a.b-c\", \"arguments\": {\"s\": \"x\"}}\n</tool_call>";
        for (prompt, answer, may) in [
            ("", "", true),
            ("", "<think>\na < b <</think>\n\n", true),
            ("", "a</think>", false),
            ("", "Yes. ", false),
            ("<think>\n", "a</think>\n", true),
            ("<think>\n", "", false),
        ] {
            let reader = OutputParser::new(form, prompt);
            let grammar = form.tool_grammar(&tools, None, &reader, &tokenizer).expect("a grammar");
            assert_eq!(may_be(grammar, &tokenizer, &format!("{answer}{call}")), may, "{prompt:?} {answer:?}");
        }
        for (source, answer, may) in [
            (
                "<|channel|>",
                "<|channel|>commentary to=functions.a.b-c <|constrain|>json<|message|>{\"s\": \"x\"}",
                true,
            ),
            (
                "<|channel|>",
                "<|channel|>analysis<|message|>a <|end|><|start|>assistant<|channel|>commentary to=functions.a.b-c \
                 <|constrain|>json<|message|>{\"s\": \"x\"}",
                true,
            ),
            ("<|channel|>", "<|channel|>final<|message|>Yes.", false),
            (
                "[THINK] [TOOL_CALLS] [ARGS]",
                "[THINK]a [b] [/THINK][TOOL_CALLS]a.b-c[ARGS]{\"s\": \"x\"}",
                true,
            ),
            (
                "<|channel> <|tool_call>call:",
                "<|channel>thought\na<channel|><|tool_call>call:a.b-c{s:<|\"|>\"\n<|\"|>}<tool_call|>",
                true,
            ),
            ("<|tool_call>call:", "<|tool_call>call:a.b-c{}<tool_call|>", false),
            ("<|tool_call_start|>", "<|tool_call_start|>[look(at=\"fox\", n=1)]<|tool_call_end|>", true),
            ("<|tool_call_start|>", "<|tool_call_start|>[look(at=\"fox\")]<|tool_call_end|>", false),
        ] {
            let form = self::form(source, &tokenizer);
            let grammar =
                form.tool_grammar(&tools, None, &OutputParser::new(form, ""), &tokenizer).expect("a grammar");
            assert_eq!(may_be(grammar, &tokenizer, answer), may, "{answer}");
        }
    }

    #[test]
    fn definitions_are_copied_to_parameters_that_use_them_up_to_a_limit() {
        let tokenizer = Tokenizer::open(&crate::project().join("models/story"), 4096).expect("loads");
        let form = form("<function name= <param name=", &tokenizer);
        let build = |parameter: Value| {
            let properties: Map<_, _> = (0..400).map(|i| (format!("p{i}"), parameter.clone())).collect();
            let schema = json!({"properties": properties, "$defs": {"a": {"description": "x".repeat(9000)}}});
            let tools = json!([{"function": {"name": "f", "parameters": schema}}]).to_string();
            let tools = Tools::parse_json(&tools).expect("tools");
            form.tool_grammar(&tools, None, &OutputParser::new(form, ""), &tokenizer)
        };
        build(json!({"type": "integer"})).expect("a grammar without the definition");
        let said = build(json!({"items": {"$ref": "#/$defs/a"}})).expect_err("a grammar of 3.6 MB");
        assert_eq!(said.to_string(), "tools: exceeds 1 MiB; use a smaller grammar");
    }

    #[test]
    fn whatever_a_model_draws_is_a_call_that_is_read() {
        let tokenizer = Tokenizer::open(&crate::project().join("models/story"), 4096).expect("loads");
        let tools = Tools::parse_json(TOOLS).expect("tools");
        let mut called = Vec::new();
        for source in [
            "<tool_call>",
            "<|tool_call|>",
            "\"parameters\" <|eot_id|>",
            "<tool_call> <function= <parameter=",
            "<function name= <param name=",
            "<|tool_call>call:",
            "<|tool_call_start|>",
            "[TOOL_CALLS] [ARGS]",
            "<|channel|>",
        ] {
            // Drawn thoughts would not end.
            let form = OutputFormat { thinking: None, ..form(source, &tokenizer) };
            for seed in 0..12 {
                let only = (seed % 2 == 0).then_some("look");
                let mut reader = OutputParser::new(form, "").with_tools(Some(&tools));
                let grammar = form.tool_grammar(&tools, only, &reader, &tokenizer).expect("a grammar");
                let text = drawn(grammar, &tokenizer, seed);
                let parts: Vec<_> = reader.push(&text).into_iter().chain(reader.finish()).collect();
                let calls: Vec<_> = parts
                    .iter()
                    .filter_map(|p| if let AnswerPart::ToolCall(c) = p { Some(c) } else { None })
                    .collect();
                let [call] = calls[..] else { panic!("{source}: {text:?}: {parts:?}") };
                assert!(!parts.iter().any(|part| matches!(part, AnswerPart::Text(_))), "{text:?}: {parts:?}");
                let arguments: Value = serde_json::from_str(&call.arguments).expect("JSON");
                match call.name.as_str() {
                    "look" => assert!(arguments["n"].as_u64().is_some_and(|n| n < 10), "{text:?}"),
                    "find" => {
                        let (id, kind) = (arguments["id"].as_str().expect("a text"), &arguments["kind"]);
                        assert!(id.starts_with(['a', 'b', 'c']) && &id[1..2] == "/", "{text:?}");
                        assert!(kind == "x" || kind == "<y>", "{text:?}");
                    }
                    _ => assert!(arguments["s"].as_str().is_some_and(|s| s.chars().count() < 5), "{text:?}"),
                }
                assert!(only.is_none_or(|only| only == call.name), "{text:?}");
                called.push(call.name.clone());
            }
        }
        assert!(called.contains(&"a.b-c".to_owned()), "{called:?}");
        let none = OutputFormat::default();
        let said =
            none.tool_grammar(&tools, None, &OutputParser::new(none, ""), &tokenizer).expect_err("no form");
        assert!(said.to_string().contains("no format for tool calls"), "{said}");
    }
}
