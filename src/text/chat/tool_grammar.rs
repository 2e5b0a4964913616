//! The grammar of an answer that must call a tool, in the format of the model.

use super::output_format::{LLAMA, Markers, OutputFormat};
use super::output_parser::OutputParser;
use super::template_kwargs::Tools;
use crate::sampler::Grammar;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::fmt::Write;

/// Thinking after its opening marker, up to the first closing one.
const THINKING: &str = r"/([^<]|<+[^<\/])*<+\/think>[\n]*/";

impl OutputFormat {
    /// The grammar of one call of a function of `tools`, or of the function `only`, with arguments that follow its
    /// schema. Thinking may come first, and may have begun in the prompt; `parser` is one for the answer.
    ///
    /// # Errors
    ///
    /// `Usage` if the model has no format for tool calls.
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
        let thoughts = match self.thinking {
            Some(_) if parser.is_thinking() => "THOUGHTS",
            Some(_) => "(\"<think>\" THOUGHTS)?",
            None => "",
        };
        let functions = list_functions(tools).filter(|(name, _)| only.is_none_or(|only| only == name));
        let (mut names, mut rules, mut schemas) = (Vec::new(), String::new(), Vec::new());
        for (i, (name, schema)) in functions.enumerate() {
            let (before, after) = wrap_arguments(markers, &name);
            names.push(format!("call_{i}"));
            let _ = write!(rules, "call_{i}: {before} args_{i} {after}\nargs_{i}: %json {schema}\n");
            schemas.push(schema);
        }
        let lark = format!("start: {thoughts} ({})\nTHOUGHTS: {THINKING}\n{rules}", names.join(" | "));
        Ok(Grammar::from_lark("tools", &lark, schemas).with_shown_tokens(self.marker_token_ids(tokenizer)))
    }
}

/// The texts before and after the arguments of a call.
fn wrap_arguments(markers: Markers, name: &str) -> (Value, Value) {
    let (open, close, arguments) = match markers {
        LLAMA => (String::new(), String::new(), "parameters"),
        Markers { open, close: Some(close) } if close == "</tool_call>" => {
            (format!("{open}\n"), format!("\n{close}"), "arguments")
        }
        // A list.
        Markers { open, close } => (format!("{open}["), format!("]{}", close.unwrap_or("")), "arguments"),
    };
    let head = format!("{open}{{\"name\": {}, \"{arguments}\": ", json!(name));
    (head.into(), format!("}}{close}").into())
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
            {"s": {"type": "string", "maxLength": 4}}, "required": ["s"], "additionalProperties": false}}}
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
    }

    #[test]
    fn whatever_a_model_draws_is_a_call_that_is_read() {
        let tokenizer = Tokenizer::open(&crate::project().join("models/story"), 4096).expect("loads");
        let tools = Tools::parse_json(TOOLS).expect("tools");
        let mut called = Vec::new();
        for source in ["<tool_call>", "<|tool_call|>", "\"parameters\" <|eot_id|>"] {
            let form = form(source, &tokenizer);
            for seed in 0..6 {
                let only = (seed % 2 == 0).then_some("look");
                let mut reader = OutputParser::new(form, "");
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
