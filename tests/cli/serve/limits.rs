//! Large requests: each is answered or refused, the server stays within its memory plan, and other requests do not
//! wait.

use super::client::{Reply, Server, endless, short, with};
use crate::support::command::*;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// A request: what it is, its path, its body, the statuses that it may have, and how many send it at once.
type Row = (&'static str, &'static str, String, &'static [u16], usize);

/// Limit of the server's address space in KiB, as an argument of `ulimit`.
const LIMIT: &str = "-v 2000000";
/// Longest that `/health` may take.
const HEALTH: Duration = Duration::from_millis(100);
/// Factor by which waits may exceed those of an idle server, which is slow too on a busy machine.
const BUSY: u32 = 3;
/// Longest that a neighbour's stream may stand still: passes of this model take a few milliseconds, and tests that run
/// beside this one some more.
const STILL: Duration = Duration::from_millis(400);
/// Number of tries, since a wait that other processes cause is not too long every time.
const TRIES: usize = 4;

/// As many items, told apart by their numbers.
fn many(n: usize, item: impl Fn(usize) -> Value) -> Value {
    (0..n).map(item).collect()
}

/// A completion with these fields.
fn completion(fields: Value) -> String {
    with(&json!({"prompt": "Once upon a time", "max_tokens": 4}), &fields).to_string()
}

/// A chat with these fields.
fn chat(fields: Value) -> String {
    with(&json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}), &fields).to_string()
}

/// Requests of much memory or time.
fn heavy() -> Vec<Row> {
    let text = |bytes: usize| "once upon a time ".repeat(bytes / 17);
    let long = || text(7 << 20);
    let numbers = |n: usize| many(n, |i| json!(i.to_string()));
    let (endless, repeated) = ("a".repeat(200_000), "the ".repeat(900));
    let kwargs = |n: usize| (0..n).map(|i| (format!("name{i}"), json!(i))).collect::<Value>();
    let most =
        json!({"max_tokens": 250, "ignore_eos": true, "n": 4, "logprobs": 20, "n_probs": 20, "seed": 1});
    let dry = json!({
        "prompt": repeated, "max_tokens": 60, "dry_multiplier": 1, "dry_base": 1, "dry_allowed_length": 1,
        "dry_penalty_last_n": -1, "repeat_last_n": 1_000_000, "presence_penalty": 1, "logprobs": 20,
        "dry_sequence_breakers": many(64, |i| json!(format!("{}{i}", "e t".repeat(20)))),
    });
    let breakers = json!({"dry_multiplier": 1, "dry_sequence_breakers": numbers(65)});
    let stops = many(16, |i| json!(format!("{}{i}", "the ".repeat(60))));
    let stops = json!({"stop": stops, "prompt": "the the", "max_tokens": 200});
    let biases = json!({"logit_bias": many(22_000, |i| json!([format!("text {i}"), 1]))});
    let (one_field, fields) = (many(200_000, |_| json!("prompt")), numbers(200_000));
    let (texts, values) = (many(129, |_| json!("a")), many(2_000_000, |_| json!(1)));
    let messages = json!([{"role": "user", "content": long()}]);
    let too_much: &[u16] = &[400, 413, 429];
    let mut rows: Vec<Row> = Vec::new();
    for (name, fields, statuses, times) in [
        ("log-probabilities of 100", json!({"logprobs": 100}), &[400][..], 1),
        ("long answers with log-probabilities", most.clone(), &[200], 2),
        ("more texts than slots", json!({"n": 6}), &[400], 1),
        ("many prompts", json!({"prompt": texts}), &[400], 1),
        ("many stop strings", json!({"stop": numbers(100_000)}), &[400], 2),
        ("a long stop string", json!({"stop": endless}), &[400], 2),
        ("long stop strings", stops, &[200], 2),
        ("far-reaching penalties", dry, &[200], 2),
        ("many breakers", breakers, &[400], 1),
        ("a long prompt", json!({"prompt": long()}), too_much, 4),
        ("many values", json!({"prompt": values}), too_much, 4),
    ] {
        rows.push((name, "/v1/completions", completion(fields), statuses, times));
    }
    for (name, fields, statuses, times) in [
        ("long answers in llama.cpp's form", most, &[200][..], 1),
        ("a field many times", json!({"response_fields": one_field}), &[200], 2),
        ("many fields", json!({"response_fields": fields}), &[400], 2),
        ("a long biased text", json!({"logit_bias": [[endless, 1]]}), &[400], 1),
        ("many biases", biases, &[400], 2),
    ] {
        rows.push((name, "/completion", completion(fields), statuses, times));
    }
    let chats = "/v1/chat/completions";
    let pieces = json!({"content": text(1_000_000), "with_pieces": true});
    for (name, path, body, statuses, times) in [
        ("log-probabilities of a chat", chats, json!({"logprobs": true, "top_logprobs": 100}), &[400][..], 1),
        ("many arguments of a template", chats, json!({"chat_template_kwargs": kwargs(100_000)}), &[400], 2),
        ("some arguments", "/apply-template", json!({"chat_template_kwargs": kwargs(250)}), &[200], 8),
        ("a long template", "/apply-template", json!({"messages": messages}), &[200, 400, 413, 429], 4),
        ("a long message", "/v1/messages", json!({"messages": messages, "max_tokens": 1}), too_much, 4),
        ("pieces of a long text", "/tokenize", pieces, &[200, 413, 429], 2),
        ("a text that cannot be cut", "/tokenize", json!({"content": "a".repeat(8_300_000)}), too_much, 4),
        ("a shorter one", "/tokenize", json!({"content": endless}), &[200], 4),
        (
            "many tokens",
            "/detokenize",
            json!({"tokens": many(250_000, |i| json!(i % 100))}),
            &[200, 413, 429],
            4,
        ),
    ] {
        rows.push((name, path, chat(body), statuses, times));
    }
    rows
}

/// Schemas and grammars that take long to compile, or deep.
#[cfg(feature = "grammar")]
fn schemas() -> Vec<Row> {
    let chain = |depth: usize, wrap: fn(Value) -> Value| {
        let mut defs: serde_json::Map<_, _> = (0..depth)
            .map(|i| (format!("d{i}"), wrap(json!({"$ref": format!("#/$defs/d{}", i + 1)}))))
            .collect();
        defs.insert(format!("d{depth}"), json!({"type": "string"}));
        json!({"$ref": "#/$defs/d0", "$defs": defs})
    };
    let ask = |schema: &Value| {
        let schema = json!({"name": "s", "schema": schema});
        chat(json!({"max_tokens": 8, "response_format": {"type": "json_schema", "json_schema": schema}}))
    };
    let of_tool = |schema: &Value| {
        let parameters = json!({"properties": {"x": schema}, "$defs": schema["$defs"]});
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        chat(json!({"max_tokens": 8, "tools": [tool], "tool_choice": "required"}))
    };
    let items = |of: Value| json!({"type": "array", "items": of});
    let names = |n: usize| (0..n).map(|i| (format!("p {i}"), json!({"type": "integer"})));
    let rules: String = (0..20_000).map(|i| format!("r{i} ::= \"a\" r{}\n", i + 1)).collect();
    let deep = chain(400, items);
    let path = "/v1/chat/completions";
    let either: &[u16] = &[200, 400];
    let mut rows: Vec<Row> = Vec::new();
    for (name, schema) in [
        ("a chain of references", chain(800, |of| of)),
        ("one through items", deep.clone()),
        ("one through properties", chain(400, |of| json!({"type": "object", "properties": {"a": of}}))),
        ("one through anyOf", chain(400, |of| json!({"anyOf": [of, {"type": "null"}]}))),
        ("one through allOf", chain(400, |of| json!({"allOf": [of]}))),
        ("many items", json!({"type": "array", "items": {}, "minItems": 1_000_000_000})),
    ] {
        rows.push((name, path, ask(&schema), either, 1));
    }
    for (name, schema) in [
        ("a long pattern", json!({"type": "string", "pattern": "(a|b)?".repeat(10_000)})),
        ("a thousand properties", json!({"type": "object", "properties": names(1000).collect::<Value>()})),
    ] {
        rows.push((name, path, ask(&schema), either, 2));
    }
    for (name, field, text) in [
        ("a long regular expression", "guided_regex", "(a|b)?".repeat(20_000)),
        ("a rule that is long", "grammar", format!("root ::= {}\n", "(\"a\" | \"b\")? ".repeat(20_000))),
    ] {
        rows.push((name, "/v1/completions", completion(json!({field: text})), &[400], 2));
    }
    let many_rules = json!({"grammar": format!("root ::= r0\n{rules}r20000 ::= \"b\"\n")});
    let states = json!({"guided_regex": "(a|b)*a(a|b){400}"});
    rows.extend([
        ("a schema that is itself", path, ask(&json!({"$ref": "#"})), &[400][..], 1),
        ("a length that is none", path, ask(&json!({"type": "string", "minLength": "x"})), either, 1),
        ("a chain in a tool", path, of_tool(&deep), either, 1),
        ("a chain of rules", path, chat(many_rules), either, 1),
        ("an expression of many states", path, chat(states), either, 1),
    ]);
    rows
}

/// All requests.
#[cfg(feature = "grammar")]
const ALL: &[fn() -> Vec<Row>] = &[heavy, schemas];
#[cfg(not(feature = "grammar"))]
const ALL: &[fn() -> Vec<Row>] = &[heavy];
#[cfg(feature = "grammar")]
const _: fn() -> Vec<Row> = schemas;

/// Longest waits of other clients.
#[derive(Default)]
struct Waits {
    over: AtomicBool,
    /// Longest of `/health`, between two parts of a neighbour's stream, and of `/health` of a server that does nothing,
    /// in microseconds.
    health: AtomicU64,
    stream: AtomicU64,
    idle: AtomicU64,
}

impl Waits {
    fn note(of: &AtomicU64, took: Duration) {
        of.fetch_max(took.as_micros() as u64, Ordering::Relaxed);
    }

    /// The waits since the last time.
    fn take(&self) -> [Duration; 3] {
        [&self.health, &self.stream, &self.idle]
            .map(|of| Duration::from_micros(of.swap(0, Ordering::Relaxed)))
    }

    fn watch_health(&self, server: &Server, of: &AtomicU64) {
        while !self.over.load(Ordering::Relaxed) {
            let began = Instant::now();
            assert_eq!(server.get("/health").status, 200);
            Self::note(of, began.elapsed());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn watch_stream(&self, server: &Server) {
        let body = endless(true);
        while !self.over.load(Ordering::Relaxed) {
            let (mut stream, mut part) = (server.open("/v1/completions", &body).into_stream(), [0; 1 << 14]);
            let (mut last, mut is_head) = (None, true);
            while !self.over.load(Ordering::Relaxed) && stream.read(&mut part).is_ok_and(|n| n > 0) {
                // Its own prompt comes after the head.
                let now = Some(Instant::now()).filter(|_| !std::mem::take(&mut is_head));
                let before = std::mem::replace(&mut last, now);
                before.zip(now).into_iter().for_each(|(before, now)| Self::note(&self.stream, now - before));
            }
        }
    }
}

/// Starts a thread, as tests may.
fn begin<'s, T: Send + 's>(
    scope: &'s Scope<'s, '_>,
    run: impl FnOnce() -> T + Send + 's,
) -> ScopedJoinHandle<'s, T> {
    std::thread::Builder::new().spawn_scoped(scope, run).expect("a thread")
}

/// Sends a request several times at once; what is wrong with the answers.
fn send(server: &Server, (_, path, body, statuses, times): &Row) -> Vec<String> {
    let ask = || server.ask("POST", path, (body, ""));
    let is_right = |reply: &Reply| {
        let again = reply.head.to_ascii_lowercase().contains("retry-after: ");
        // A message has one line.
        let is_line = reply.status == 200 || !reply.body.contains("\\n");
        statuses.contains(&reply.status) && again == (reply.status == 429) && is_line
    };
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..*times).map(|_| begin(scope, ask)).collect();
        let replies = asked.into_iter().map(|reply| reply.join().expect("no panic"));
        let wrong = replies.filter(|reply| !is_right(reply));
        wrong.map(|reply| format!("{} {:.200}", reply.head, reply.body)).collect()
    })
}

/// Does something until nobody waits for it too long; what is wrong with it.
fn hold_up_nobody(waits: &Waits, name: &str, act: impl Fn() -> Vec<String>) -> Vec<String> {
    let (mut wrong, mut held_up) = (Vec::new(), String::new());
    for _ in 0..TRIES {
        waits.take();
        let began = Instant::now();
        wrong = act();
        // So that both were looked at meanwhile.
        std::thread::sleep(Duration::from_millis(60));
        let [health, stream, idle] = waits.take();
        let took = began.elapsed();
        eprintln!("{name}: {took:?}, /health {health:?}, a stream {stream:?}, idle {idle:?}, {wrong:?}");
        if !wrong.is_empty() {
            break;
        }
        if health < HEALTH.max(BUSY * idle) && stream < STILL.max(4 * BUSY * idle) {
            return wrong;
        }
        held_up = format!("/health waits {health:?}, and a stream stands still for {stream:?}");
    }
    if wrong.is_empty() {
        wrong.push(held_up);
    }
    wrong.into_iter().map(|what| format!("{name}: {what}")).collect()
}

/// A hundred bodies that are nearly there.
fn unfinished(server: &Server) -> Vec<String> {
    let text = "x".repeat(8_000_000);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
        text.len() + 9
    );
    let half = [head.as_bytes(), b"{\"prompt\":\"", text.as_bytes()].concat();
    let open = |_| {
        let mut stream = server.send(b"").into_stream();
        stream.set_write_timeout(Some(Duration::from_millis(500))).expect("a limit");
        // What it does not want it does not read.
        let _ = stream.write_all(&half);
        stream
    };
    let held: Vec<_> = (0..100).map(open).collect();
    let other = server.post("/v1/completions", &short());
    let told = |mut stream: std::net::TcpStream| {
        let mut said = [0; 12];
        let _ = stream.set_read_timeout(Some(Duration::from_millis(10)));
        stream.read_exact(&mut said).is_ok() && said.ends_with(b" 429")
    };
    let refused = held.iter().filter(|stream| told(stream.try_clone().expect("a stream"))).count();
    let right = refused > 10 && other.status == 200;
    Vec::from_iter((!right).then(|| format!("{refused} are refused, and another one gets {other:?}")))
}

#[test]
fn no_request_ends_the_server_leaves_its_plan_or_holds_up_others() {
    let flags = ["--slots", "5", "-c", "4096"];
    let plan: Value =
        serde_json::from_str(&antigravity(["plan", "--format", "json"]).args(flags).text()).expect("JSON");
    let flags = [&flags[..], &["--patience", "20"]].concat();
    let server = Server::limited(LIMIT, &flags);
    let (idle, waits) = (Server::start(&["--slots", "1"]), Waits::default());
    let wrong = std::thread::scope(|scope| {
        begin(scope, || waits.watch_health(&server, &waits.health));
        begin(scope, || waits.watch_health(&idle, &waits.idle));
        begin(scope, || waits.watch_stream(&server));
        let over = Over(&waits);
        let rows = ALL.iter().flat_map(|rows| rows());
        let sent = rows.flat_map(|row| hold_up_nobody(over.0, row.0, || send(&server, &row)));
        let mut wrong: Vec<String> = sent.collect();
        wrong.extend(hold_up_nobody(over.0, "unfinished bodies", || unfinished(&server)));
        wrong
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let (peak, planned) = (server.peak(), plan["peak_bytes"].as_u64().expect("a number"));
    eprintln!("{} MiB in memory, {} MiB planned", peak >> 20, planned >> 20);
    assert!(peak <= planned, "{peak} bytes in memory, {planned} planned");
    assert_eq!(server.post("/v1/completions", &short()).status, 200);
}

/// Ends what watches, also after a panic.
struct Over<'a>(&'a Waits);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Relaxed);
    }
}
