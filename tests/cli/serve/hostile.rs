//! Malicious bodies and connections: each gets an error or is closed, and the next request is answered.

use super::client::{Reply, Server, short};
use crate::support::random::Random;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicBool, Ordering};

/// Sends bytes, and no more.
fn sends(server: &Server, bytes: &[u8]) -> Reply {
    server.send(bytes).finish()
}

#[test]
fn bodies_that_are_huge_broken_or_deep_are_refused() {
    let server = Server::start(&[]);
    let post = |body: &[u8]| {
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        sends(&server, &[head.as_bytes(), body].concat())
    };
    let deep = format!("{{\"prompt\":{}", "[".repeat(1 << 20));
    let many = format!("{{\"prompt\":[{}1]}}", "1,".repeat(2 << 20));
    for body in
        [&b""[..], b"{", b"[]", b"null", b"{\"prompt\":\"\xff\"}", b"\0\0", deep.as_bytes(), many.as_bytes()]
    {
        assert_eq!(post(body).status, 400, "{} bytes", body.len());
    }
    // Longer than it may be, as it says or as it is.
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n\r\n";
    assert_eq!(sends(&server, head.as_bytes()).status, 413);
    let chunk = format!("100000\r\n{}\r\n", "x".repeat(1 << 20));
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(sends(&server, &[head, &chunk.repeat(9)].concat().into_bytes()).status, 413);
    // Two lengths, of which another server might take the other.
    for heads in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Content-Length: -4\r\n",
        "Transfer-Encoding: gzip, identity\r\n",
    ] {
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{heads}\r\n0\r\n\r\nGET /x"
        );
        let status = sends(&server, request.as_bytes()).status;
        assert!(status == 0 || (400..500).contains(&status), "{heads:?}: {status}");
    }
    assert_eq!(server.post("/v1/completions", &short()).status, 200);
}

/// Requests that are sound until they are changed: paths with bodies.
fn sound() -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Tom"}]}]);
    vec![
        (
            "/v1/completions",
            json!({
                "prompt": "Tom", "max_tokens": 2, "stop": ["a"], "stream": true, "logprobs": 1, "n": 1, "seed": 3, "top_k": 4,
                "logit_bias": {"5": 1.5}, "stream_options": {"include_usage": true}, "temperature": 0.5, "top_p": 0.9,
                "min_p": 0.1, "typical_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repeat_penalty": 1.1,
                "repeat_last_n": 8, "ignore_eos": true, "cache_prompt": false, "response_format": {"type": "text"},
            }),
        ),
        (
            "/v1/chat/completions",
            json!({
                "messages": messages, "max_completion_tokens": 2, "logprobs": true, "top_logprobs": 2, "tools": [],
                "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": false}, "stream": false, "user": "me",
            }),
        ),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "Tom"}], "system": "Be kind.", "max_tokens": 2, "stop_sequences": ["x"], "stream": true}),
        ),
        (
            "/v1/responses",
            json!({"input": "Tom", "instructions": "Be kind.", "max_output_tokens": 2, "stream": true, "text": {"format": {"type": "text"}}}),
        ),
        ("/tokenize", json!({"content": "Tom", "add_special": true, "with_pieces": true})),
        ("/detokenize", json!({"tokens": [5, 6, 7]})),
        ("/apply-template", json!({"messages": messages})),
    ]
}

/// Puts something else in the place of one value in it, or of all.
fn replaced(value: &mut Value, random: &mut Random) {
    let inner: Vec<&mut Value> = match value {
        Value::Object(fields) => fields.values_mut().collect(),
        Value::Array(all) => all.iter_mut().collect(),
        _ => Vec::new(),
    };
    let n = inner.len();
    match inner.into_iter().nth(random.below(n.max(1))) {
        Some(inner) if random.below(4) > 0 => replaced(inner, random),
        _ => {
            *value = match random.below(14) {
                0 => Value::Null,
                1 => json!(true),
                2 => json!(-1),
                3 => json!(1e300),
                4 => json!(u64::MAX),
                5 => json!(0.5),
                6 => json!(""),
                7 => json!("\u{0}\u{feff}<|im_end|>\u{1f600}"),
                8 => json!("x ".repeat(random.below(9000))),
                9 => json!([]),
                10 => json!({}),
                11 => json!([[[[[[[[[1]]]]]]]]]),
                12 => json!({"type": "function", "function": {"name": "f", "arguments": "{"}}),
                _ => json!(vec![value.clone(); 1 + random.below(9)]),
            }
        }
    }
}

/// A request with random changes.
fn mutated(sound: &[(&str, Value)], random: &mut Random) -> Vec<u8> {
    let (path, mut body) = sound[random.below(sound.len())].clone();
    for _ in 0..random.below(3) {
        replaced(&mut body, random);
    }
    let mut body = body.to_string().into_bytes();
    if random.below(4) == 0 {
        let at = random.below(body.len());
        match random.below(4) {
            0 => body.truncate(at),
            1 => body[at] = random.below(256) as u8,
            2 => drop(body.splice(at..at, std::iter::repeat_n(b'[', random.below(90_000)))),
            _ => body.push(b'}'),
        }
    }
    let path = match random.below(8) {
        0 => ["/", "*", "//", "/%ff", "/v1/../props", "http://x/health", "/v1/models/x", "/v1/nothing?a=b"]
            [random.below(8)],
        _ => path,
    };
    let method = match random.below(10) {
        0 => ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "PRI", "post", "\u{e9}"]
            [random.below(10)],
        _ => "POST",
    };
    let version = if random.below(30) == 0 { "HTTP/1.0" } else { "HTTP/1.1" };
    let length = body.len();
    let lengths = match random.below(24) {
        0 => String::new(),
        1 => format!("Content-Length: {length}\r\nTransfer-Encoding: chunked\r\n"),
        2 => format!("Content-Length: {length}\r\nContent-Length: {}\r\n", length + 1),
        3 => format!("Content-Length: {}\r\n", random.below(2 * length + 9)),
        4 => {
            ["Content-Length: 1e3\r\n", "Content-Length: 99999999999999999999\r\n", "Content-Length: +5\r\n"]
                [random.below(3)]
            .into()
        }
        5 => "Transfer-Encoding: chunked\r\n".into(),
        6 => format!("Transfer-Encoding: \u{b}chunked\r\nContent-Length: {length}\r\n"),
        _ => format!("Content-Length: {length}\r\n"),
    };
    let more = match random.below(16) {
        0 => format!("X-Long: {}\r\n", "x".repeat(random.below(90_000))),
        1 => "X: y\r\n".repeat(random.below(300)),
        2 => "Expect: 100-continue\r\n".into(),
        3 => "Upgrade: websocket\r\nConnection: upgrade\r\n".into(),
        4 => "No colon\r\n".into(),
        5 => "Host: a\r\nHost: b\r\n".into(),
        6 => "X-Request-Id: \u{e9}\r\n".into(),
        _ => String::new(),
    };
    let head =
        format!("{method} {path} {version}\r\nHost: localhost\r\nConnection: close\r\n{lengths}{more}\r\n");
    let mut bytes = [head.as_bytes(), &body].concat();
    match random.below(20) {
        // Several at once, of which the last may be cut off.
        0 => bytes = [&b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"[..], &bytes, &bytes].concat(),
        1 => bytes.truncate(random.below(bytes.len())),
        2 => {
            let at = random.below(bytes.len());
            bytes[at] = random.below(256) as u8;
        }
        _ => {}
    }
    bytes
}

/// Ten thousand, unless `ANTIGRAVITY_REQUESTS` says how many.
#[test]
fn requests_changed_at_random_harm_nobody() {
    const TOGETHER: usize = 12;
    let server = Server::start(&["--slots", "3", "-c", "256"]);
    let expected = server.post("/v1/completions", &short()).json()["choices"].clone();
    let count = std::env::var("ANTIGRAVITY_REQUESTS").map_or(10_000, |n| n.parse().expect("a number"));
    let (sound, over) = (sound(), AtomicBool::new(false));
    let send = |seed: usize| {
        let mut random = Random(seed as u64);
        for _ in 0..count / TOGETHER {
            let bytes = mutated(&sound, &mut random);
            let status = server.send(&bytes).finish_soon().status;
            let allowed = [0, 100, 200, 204].contains(&status) || (400..500).contains(&status);
            assert!(allowed, "{status}: {:?}", String::from_utf8_lossy(&bytes));
        }
    };
    std::thread::scope(|scope| {
        // Meanwhile another request is answered as usual.
        let asks = || {
            while !over.load(Ordering::Relaxed) {
                let reply = server.post("/v1/completions", &short());
                assert!(reply.status == 429 || reply.json()["choices"] == expected, "{reply:?}");
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
        };
        let other = scope.spawn(asks);
        let senders: Vec<_> = (0..TOGETHER).map(|seed| scope.spawn(move || send(seed))).collect();
        let sent: Vec<_> = senders.into_iter().map(|sender| sender.join()).collect();
        over.store(true, Ordering::Relaxed);
        other.join().expect("nobody else's answer changes");
        assert!(sent.iter().all(Result::is_ok), "an answer that is no refusal");
    });
    assert_eq!(server.post("/v1/completions", &short()).json()["choices"], expected);
}

#[test]
fn many_idle_connections_and_half_requests_hold_nobody_up() {
    let server = Server::start(&[]);
    let idle: Vec<_> = (0..250).map(|_| server.send(b"")).collect();
    let half: Vec<_> =
        (0..250).map(|_| server.send(b"POST /v1/completions HTTP/1.1\r\nContent-Le")).collect();
    assert_eq!(server.post("/v1/completions", &short()).status, 200);
    // Requests that do not wait for each other's answers are answered in order.
    let one = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let last = "GET /nothing HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let reply = sends(&server, [one, one, last].concat().as_bytes());
    let all = format!("{}{}", reply.head, reply.body);
    assert_eq!((all.matches("HTTP/1.1 200").count(), all.matches("HTTP/1.1 404").count()), (2, 1), "{all}");
    drop((idle, half));
}
