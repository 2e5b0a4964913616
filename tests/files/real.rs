//! A real model's file: strings become the ids that its own tokenizer gives, conversations what its own template
//! makes of them. The expected values are those of transformers.

use crate::support::paths;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use text::chat::{Message, PromptEnding, RenderContext, Role, Template, UtcTime, join_segments};
use text::tokenizer::{AddSpecial, Tokenizer};

/// Names the model's file, in a folder with the model's name; set by `cargo xtask test real`.
const FILE: &str = "ANTIGRAVITY_REAL_MODEL";
/// Folders of expected values, and the sizes of the models' vocabularies.
const MODELS: [(&str, usize); 2] = [("smollm2-135m", 49_152), ("gemma3-270m", 262_144)];

fn file() -> PathBuf {
    std::env::var_os(FILE).unwrap_or_else(|| panic!("{FILE} is not set; run `cargo xtask test real`")).into()
}

fn tokenizer() -> Tokenizer {
    let vocabulary = MODELS.iter().find(|(name, _)| *name == model()).map(|(_, size)| *size);
    Tokenizer::open(&file(), vocabulary.unwrap_or_else(|| panic!("no expected values of {}", model())))
        .unwrap()
}

fn model() -> String {
    file().parent().unwrap().file_name().unwrap().to_string_lossy().into_owned()
}

fn expected(name: &str) -> Vec<Value> {
    let file = paths::root().join("tests/fixtures/real").join(model()).join(name);
    serde_json::from_slice(&fs::read(file).unwrap()).unwrap()
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or_else(|| panic!("no text `{field}` in {value}"))
}

#[test]
#[ignore = "needs a real model: `cargo xtask test real`"]
fn strings_become_its_own_ids_and_strings_again() {
    let tokenizer = tokenizer();
    let cases = expected("tokens.json");
    assert!(cases.len() > 200, "{} strings", cases.len());
    for case in cases {
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        let string = text(&case, "text");
        assert_eq!(tokenizer.encode(string, AddSpecial::No).unwrap(), ids, "{string:?}");
        assert_eq!(tokenizer.decode_with_special(&ids), string);
    }
}

#[test]
#[ignore = "needs a real model: `cargo xtask test real`"]
fn conversations_are_rendered_as_its_own_template_says() {
    let tokenizer = tokenizer();
    let template = Template::load_from_path(&file()).unwrap().for_tokenizer(&tokenizer).unwrap();
    let context = RenderContext {
        bos: None,
        now: UtcTime::from_unix(0),
        ending: PromptEnding::Prompt,
        variables: None,
    };
    for case in expected("chat.json") {
        let message = |m: &Value| {
            let role =
                [Role::System, Role::User, Role::Assistant].into_iter().find(|r| r.name() == m["role"]);
            Message::new(role.unwrap(), text(m, "content"))
        };
        let messages: Vec<Message> = case["messages"].as_array().unwrap().iter().map(message).collect();
        assert_eq!(
            join_segments(&template.render_messages(&messages, &context).unwrap()),
            text(&case, "text")
        );
    }
}
