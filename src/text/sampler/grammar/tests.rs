//! Grammars that somebody wrote to do harm: each is refused in one line, or is compiled in bounded time.

use super::limits::CompileSlots;
use super::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The expected outcome of compiling a grammar.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Want {
    Refused(&'static str),
    Works,
    /// Either: a limit may be reached.
    Ends,
}
use Want::{Ends, Refused, Works};

/// A schema in which each reference leads to the next, through something.
fn chain(links: usize, through: fn(Value) -> Value) -> Value {
    let link = |i: usize| (format!("d{i}"), through(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
    let mut defs: serde_json::Map<_, _> = (0..links - 1).map(link).collect();
    defs.insert(format!("d{}", links - 1), json!({"type": "integer"}));
    json!({"$ref": "#/$defs/d0", "$defs": defs})
}

fn nested(levels: usize, around: fn(Value) -> Value) -> Value {
    (0..levels).fold(json!({"type": "null"}), |inner, _| around(inner))
}

fn pattern(text: String) -> Value {
    json!({"type": "string", "pattern": text})
}

fn items(of: Value) -> Value {
    json!({"type": "array", "items": of})
}

fn property(of: Value) -> Value {
    json!({"type": "object", "properties": {"x": of}, "required": ["x"], "additionalProperties": false})
}

fn any_of(of: Value) -> Value {
    json!({"anyOf": [of, {"type": "boolean"}]})
}

fn schemas() -> Vec<(&'static str, Want, Value)> {
    let tree =
        json!({"type": "object", "properties": {"children": {"type": "array", "items": {"$ref": "#"}}}});
    let pair =
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}});
    let list = json!({
        "$ref": "#/$defs/list",
        "$defs": {"list": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}]}},
    });
    let many = |n: usize| -> Value {
        let all = (0..n).map(|i| (format!("property_{i}"), json!({"type": ["string", "null"]})));
        json!({"type": "object", "properties": all.collect::<serde_json::Map<_, _>>()})
    };
    let names = |n: usize| -> Vec<_> { (0..n).map(|i| format!("name {i}")).collect() };
    let product = json!({"allOf": vec![json!({"anyOf": vec![json!({"type": "object"}); 40]}); 5]});
    let patterns: serde_json::Map<_, _> = (0..500).map(|i| (format!("^a{i}b*"), json!({}))).collect();
    vec![
        ("a tree", Works, tree),
        ("a list", Works, list),
        ("64 references", Works, chain(63, |of| of)),
        ("64 references through items", Works, chain(63, items)),
        ("400 references", Refused("references"), chain(400, |of| of)),
        ("20,000 references", Refused("references"), chain(20_000, |of| of)),
        ("400 through items", Refused("references"), chain(400, items)),
        ("400 through properties", Refused("references"), chain(400, property)),
        ("400 through anyOf", Refused("references"), chain(400, any_of)),
        ("400 through allOf", Refused("references"), chain(400, |of| json!({"allOf": [of]}))),
        (
            "400 with a neighbour",
            Refused("references"),
            chain(400, |of| json!({"type": "integer", "$ref": of["$ref"]})),
        ),
        (
            "400 through additionalProperties",
            Refused("references"),
            chain(400, |of| json!({"additionalProperties": of})),
        ),
        (
            "400 through patternProperties",
            Refused("references"),
            chain(400, |of| json!({"patternProperties": {"^a": of}})),
        ),
        ("400 through prefixItems", Refused("references"), chain(400, |of| json!({"prefixItems": [of]}))),
        ("itself", Refused("refers to itself"), json!({"$ref": "#"})),
        ("itself in anyOf", Refused("refers to itself"), json!({"anyOf": [{"$ref": "#"}, {"type": "null"}]})),
        ("two that are each other", Refused("refers to itself"), pair),
        ("nowhere", Refused("not found"), json!({"$ref": "#/$defs/x"})),
        ("elsewhere", Refused("use a path"), json!({"$ref": "http://example.com/x"})),
        ("a dynamic reference", Refused("dynamicRef"), json!({"$dynamicRef": "#x"})),
        ("60 arrays", Works, nested(60, items)),
        ("60 objects", Works, nested(60, property)),
        ("60 alternatives", Works, nested(60, any_of)),
        ("1,000 properties", Ends, many(1000)),
        ("2,000 properties", Ends, many(2000)),
        ("4,000 properties", Refused("`properties` has more than 2048"), many(4000)),
        ("an enum of 20,000", Ends, json!({"enum": names(20_000)})),
        ("an enum of 70,000", Refused("values"), json!({"enum": vec![7; 70_000]})),
        ("a product", Refused("parts"), product),
        ("500 patterns", Refused("`patternProperties`"), json!({"patternProperties": patterns})),
        ("30,000 that exclude each other", Refused("parts"), json!({"oneOf": vec![json!({}); 30_000]})),
        ("a pattern of 60 KB", Ends, pattern("(a|b)".repeat(12_000))),
        ("a pattern of 60 KB of letters", Ends, pattern("x".repeat(60_000))),
        ("a pattern of 60 KB of classes", Ends, pattern("\\w".repeat(30_000))),
        (
            "a pattern of 60 KB of brackets",
            Ends,
            pattern(format!("{}a{}", "(".repeat(30_000), ")".repeat(30_000))),
        ),
        ("repeats in repeats", Ends, pattern("((((a{1,99}){1,99}){1,99}){1,99}){1,99}".into())),
        ("a nested quantifier", Ends, pattern("^(([a-z]+)+)+$".into())),
        ("a state for each", Ends, pattern("(a|b)*a(a|b){40}".into())),
        ("very many items", Ends, json!({"type": "array", "items": {}, "minItems": 1_000_000_000})),
        ("very many items at most", Ends, json!({"type": "array", "items": {}, "maxItems": u64::MAX})),
        ("a very long string", Ends, json!({"type": "string", "minLength": 1_000_000_000})),
        (
            "at most a very long string",
            Refused("decimal literal"),
            json!({"type": "string", "maxLength": u64::MAX}),
        ),
        ("very many properties", Ends, json!({"type": "object", "minProperties": 1_000_000_000})),
        ("the smallest integer", Works, json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX})),
        (
            "below the smallest integer",
            Works,
            json!({"type": "integer", "minimum": -1e300, "maximum": 1e300}),
        ),
        (
            "between large numbers",
            Ends,
            json!({"type": "number", "minimum": -1e300, "exclusiveMaximum": 1e-300}),
        ),
        ("above large numbers", Refused("`minimum`"), json!({"type": "integer", "minimum": 1e300})),
        ("a multiple of little", Refused("multipleOf"), json!({"type": "number", "multipleOf": 1e-300})),
        (
            "multiples of both",
            Ends,
            json!({"allOf": [{"type": "integer", "multipleOf": 99_999_989}, {"multipleOf": 99_999_971}]}),
        ),
        ("a count that is a text", Refused("`minLength`"), json!({"minLength": "é".repeat(99)})),
        ("a count that is none", Refused("`maxItems`"), json!({"maxItems": -1})),
        (
            "a bound that is a text",
            Refused("`minimum`"),
            json!({"type": "number", "minimum": "é".repeat(99)}),
        ),
        ("an exclusive one", Refused("`exclusiveMinimum`"), json!({"exclusiveMinimum": ["é".repeat(99)]})),
        ("a reference that is none", Refused("`$ref`"), json!({"$ref": ["é".repeat(99)]})),
        ("a pattern that is none", Refused("`pattern`"), json!({"pattern": ["é".repeat(99)]})),
        ("properties that are none", Refused("`properties`"), json!({"properties": ["é".repeat(99)]})),
        ("names that are none", Refused("`required`"), json!({"required": [["é".repeat(99)]]})),
        ("prefixes that are none", Refused("`prefixItems`"), json!({"prefixItems": {"é": "é".repeat(99)}})),
        ("items of a text", Refused("schema must be"), json!({"items": "é".repeat(99)})),
        ("a format", Works, json!({"type": "string", "format": "date-time"})),
        ("an unknown format", Refused("format"), json!({"type": "string", "format": "é".repeat(99)})),
    ]
}

#[track_caller]
fn compiled(name: &str, want: Want, grammar: Result<Grammar>) {
    let began = Instant::now();
    let said = grammar.and_then(Grammar::compile_for_bytes);
    let took = began.elapsed();
    assert!(took < Duration::from_secs(15), "{name}: {took:?}");
    match (&said, want) {
        (Ok(_), Works | Ends) => {}
        (Err(Error::Usage(why)), Ends) => {
            assert!(why.starts_with("it: ") && !why.contains('\n'), "{name}: {why}")
        }
        (Err(Error::Usage(why)), Refused(words)) => {
            assert!(why.starts_with("it: ") && why.contains(words) && !why.contains('\n'), "{name}: {why}");
        }
        _ => panic!("{name}: {said:?}"),
    }
}

#[test]
fn schemas_that_do_harm_end_in_bounded_time() {
    for (name, want, schema) in schemas() {
        compiled(name, want, Grammar::from_json_schema("it", &schema.to_string()));
    }
    compiled("a long text", Refused("exceeds 1 MiB"), Grammar::from_json_schema("it", &" ".repeat(2 << 20)));
    compiled("no schema", Refused("use an object"), Grammar::from_json_schema("it", "7"));
}

#[test]
fn grammars_that_do_harm_end_in_bounded_time() {
    let chain: String = (0..400).map(|i| format!("r{i} ::= \"a\" r{}\n", i + 1)).collect();
    let circle = chain.clone() + "r400 ::= \"b\" | root\nroot ::= r0\n";
    let links: String = (0..900).map(|i| format!("r{i} ::= \"a\" r{}\n", i + 1)).collect();
    let long_circle = links + "r900 ::= \"b\" | root\nroot ::= r0\n";
    let groups = |n: usize| format!("root ::= {}\"a\"{}\n", "(\"b\" ".repeat(n), ")?".repeat(n));
    for (name, want, text) in [
        ("400 rules", Ends, chain + "r400 ::= \"b\"\nroot ::= r0\n"),
        ("400 rules in a circle", Ends, circle),
        ("900 rules in a circle", Ends, long_circle),
        ("groups", Works, groups(20)),
        ("many groups", Ends, groups(60)),
        ("itself", Refused("no text matches it"), "root ::= root\n".into()),
        ("nothing", Ends, "root ::= \"\"\n".into()),
        ("two that are each other", Ends, "root ::= a\na ::= root | a\n".into()),
        ("itself and more", Ends, "root ::= root root | \"\"\n".into()),
        ("repeats", Ends, "root ::= (((\"a\"{1,9999}){1,9999}){1,9999}){1,9999}\n".into()),
        ("repeats of a circle", Ends, "root ::= (((\"a\" root?){1,9999}){1,9999}){1,9999}\n".into()),
        ("20,000 alternatives", Ends, format!("root ::= \"a\"{}\n", " | \"b\" [a-z]".repeat(20_000))),
        ("20,000 rules", Ends, {
            let rules = (0..20_000).map(|i| format!("r{i} ::= \"a{i}\"\n")).collect::<String>();
            let names = (0..20_000).map(|i| format!(" | r{i}")).collect::<String>();
            format!("root ::= \"x\"{names}\n{rules}")
        }),
    ] {
        compiled(name, want, Grammar::from_gbnf("it", &text));
    }
    for (name, want, text) in [
        ("a word", Works, "^ab+$".to_owned()),
        ("a dollar", Works, "^ab\\$".to_owned()),
        ("a slash", Works, "a/b".to_owned()),
        ("a backslash", Refused("not a valid regular expression"), "a\\".to_owned()),
        ("a bracket", Refused("not a valid regular expression"), "(a".to_owned()),
        ("many brackets", Refused("not a valid regular expression"), "(".repeat(10_000)),
        ("a long one", Refused("exceeds 16384 bytes"), "(a|b)?".repeat(10_000)),
        ("a look ahead", Refused("not a valid regular expression"), "(?=a)b".to_owned()),
    ] {
        compiled(name, want, Grammar::from_regex("it", &text));
    }
    compiled("no choice", Refused("is empty"), Grammar::from_choice("it", &[]));
    compiled(
        "choices",
        Works,
        Grammar::from_choice("it", &["a\"\\/\n".to_owned(), String::new(), "é".to_owned()]),
    );
}

#[test]
fn no_more_than_some_are_compiled_at_once_and_a_panic_is_an_error() {
    static SLOTS: CompileSlots = CompileSlots::new(2);
    let taken = [(); 2].map(|()| SLOTS.acquire_slot(Duration::ZERO).expect("a place"));
    assert!(matches!(SLOTS.acquire_slot(Duration::from_millis(5)), Err(Error::Memory(_))));
    std::thread::scope(|scope| {
        let take = || SLOTS.acquire_slot(Duration::from_secs(60)).map(drop);
        let waits = std::thread::Builder::new().spawn_scoped(scope, take).expect("a thread");
        drop(taken);
        assert_eq!(waits.join().expect("no panic"), Ok(()));
    });
    let panicked = compile_contained("it", || -> std::result::Result<(), String> { panic!("é") });
    assert!(matches!(panicked, Err(Error::Usage(why)) if why.contains("cannot be compiled: é")));
}
