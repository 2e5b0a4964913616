//! Texts that follow a JSON schema or a grammar, through the real binary.

use crate::support::command::*;
use serde_json::Value;

const SCHEMA: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kinds": {"type": "array", "items": {"enum": ["cat", "fox", "é\""]}, "minItems": 1, "maxItems": 3}
    },
    "required": ["name", "age", "kinds"],
    "additionalProperties": false
}"#;

/// Checks that a text is JSON that fits [`SCHEMA`].
#[track_caller]
fn assert_fits_schema(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{text:?}: {e}"));
    let fields = value.as_object().expect("an object");
    assert_eq!(fields.keys().map(String::as_str).collect::<Vec<_>>(), ["name", "age", "kinds"], "{text}");
    let length = fields["name"].as_str().expect("a text").chars().count();
    assert!((1..=12).contains(&length), "{text}");
    assert!(fields["age"].as_u64().expect("a number") <= 120, "{text}");
    let kinds = fields["kinds"].as_array().expect("a list");
    assert!((1..=3).contains(&kinds.len()), "{text}");
    assert!(kinds.iter().all(|k| ["cat", "fox", "é\""].contains(&k.as_str().unwrap_or(""))), "{text}");
}

/// Generates a text that ends by itself, and returns it.
#[track_caller]
fn whole(args: &[&str]) -> String {
    let said = antigravity(["generate", "-n", "-1", "-p", "Once upon a time there was"]).args(args).run();
    assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
    mentions(&said.err, &["stop: eos"]);
    said.text().into()
}

#[test]
fn json_fits_its_schema_under_a_grammar() {
    let temp = TestDir::new();
    let file = temp.write("schema.json", SCHEMA);
    let mut texts = Vec::new();
    for seed in ["1", "2", "3", "4"] {
        let text = whole(&["--json-schema", SCHEMA, "--seed", seed, "--temp", "1.5", "--top-k", "0"]);
        assert_fits_schema(&text);
        assert_eq!(text, whole(&["--json-schema", &file, "--seed", seed, "--temp", "1.5", "--top-k", "0"]));
        texts.push(text);
    }
    texts.dedup();
    assert!(texts.len() > 1, "{texts:?}");
    assert_fits_schema(&whole(&["--json-schema", SCHEMA, "--temp", "0"]));
}

#[test]
fn generated_text_follows_the_grammar() {
    let temp = TestDir::new();
    let regular = temp.write(
        "regular.gbnf",
        "root ::= \"The \" animal \" has \" [1-9] [0-9]{0,2} \" \" (\"legs\" | \"tails\")? \".\" # end\n\
         animal ::= [b-f] [aeiou]{1,3} [^a-z ]{0,4} [\\x6e-z]\n",
    );
    for seed in ["1", "2", "3"] {
        let text = whole(&["--grammar", &regular, "--seed", seed]);
        let rest = text.strip_prefix("The ").and_then(|t| t.strip_suffix('.')).expect(&text);
        let (animal, count) = rest.split_once(" has ").expect(&text);
        assert!(animal.starts_with(['b', 'c', 'd', 'e', 'f']) && animal.ends_with(|c| c >= 'n'), "{text}");
        let (number, what) = count.split_once(' ').expect(&text);
        assert!((1..=999).contains(&number.parse::<u32>().expect(&text)), "{text}");
        assert!(["", "legs", "tails"].contains(&what), "{text}");
    }
    // A list of lists, which no regular expression describes.
    let nested = temp.write(
        "nested.gbnf",
        "root ::= list\nlist ::= \"[\" (item (\",\" item){0,2})? \"]\"\nitem ::= [0-9] | list\n",
    );
    for seed in ["1", "2", "3", "4"] {
        let said = antigravity([
            "generate",
            "-n",
            "60",
            "-p",
            "Once",
            "--grammar",
            &nested,
            "--seed",
            seed,
            "--temp",
            "2",
        ])
        .run();
        assert_eq!(said.code, Some(0), "{}", said.err);
        if said.err.contains("stop: eos") {
            let value: Value =
                serde_json::from_str(said.text()).unwrap_or_else(|_| panic!("{}", said.text()));
            assert!(value.is_array());
        } else {
            assert!(
                said.text().starts_with('[')
                    && said.text().chars().all(|c| "[],".contains(c) || c.is_ascii_digit())
            );
        }
    }
}

#[test]
fn every_answer_of_a_chat_follows_the_grammar() {
    let said = antigravity(["chat", "--seed", "4", "--json-schema", SCHEMA])
        .stdin("Who are you?\nGo on.\n/retry\n")
        .run();
    assert_eq!(said.code, Some(0), "{}", said.err);
    assert_eq!(said.out.lines().count(), 3);
    said.out.lines().for_each(assert_fits_schema);
}

#[test]
fn errors_in_a_grammar_have_a_place() {
    let temp = TestDir::new();
    let file = temp.write("bad.gbnf", "root ::= word+\nword ::= [a-z\n");
    let with = |flag: &str, value: &str| antigravity(["generate", "-p", "x", flag, value]).fails(2);
    mentions(&with("--grammar", &file), &["--grammar", "bad.gbnf", "line 2 column 10"]);
    mentions(&with("--grammar", &temp.path("none")), &["--grammar", "none"]);
    mentions(&with("--json-schema", &temp.path("none")), &["--json-schema", "none"]);
    mentions(&with("--json-schema", "{\"type\": }"), &["--json-schema", "line 1 column 10"]);
    mentions(&with("--json-schema", "{\"type\": \"strin\"}"), &["--json-schema", "strin"]);
    let file = temp.write("good.gbnf", "root ::= [a-z]+");
    let more = |args: &[&str]| antigravity(["generate", "-p", "x", "--grammar", &file]).args(args).fails(2);
    mentions(&more(&["--ignore-eos"]), &["--grammar", "--ignore-eos"]);
    mentions(&more(&["--session", &temp.path("state")]), &["--grammar", "--session"]);
    mentions(&more(&["--json-schema", "{}"]), &["--grammar", "--json-schema"]);
    // What would take the compiler too deep.
    let rules: String = (0..20_000).map(|i| format!("r{i} ::= \"a\" r{}\n", i + 1)).collect();
    let file = temp.write("deep.gbnf", format!("root ::= r0\n{rules}r20000 ::= \"b\"\n"));
    mentions(&with("--grammar", &file), &["--grammar", "deep.gbnf", "levels deep"]);
    let links: String = (0..800).map(|i| format!("\"d{i}\":{{\"$ref\":\"#/$defs/d{}\"}},", i + 1)).collect();
    let schema = format!("{{\"$ref\":\"#/$defs/d0\",\"$defs\":{{{links}\"d800\":{{}}}}}}");
    mentions(&with("--json-schema", &schema), &["--json-schema", "more than 64 references"]);
    mentions(&with("--json-schema", "{\"$ref\":\"#\"}"), &["--json-schema", "refers to itself"]);
    // Nothing is left where the only token that the grammar wants next is ruled out.
    let said =
        antigravity(["generate", "-p", "x", "--json-schema", "{\"const\": 7}", "--logit-bias", "0+1"]).run();
    assert_eq!((said.code, said.text()), (Some(0), "7"), "{}", said.err);
}
