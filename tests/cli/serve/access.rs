//! Web pages and holders of other keys cannot send requests that are not allowed, nor learn what others asked.

use super::client::{Reply, Server, short};
use serde_json::json;
use std::io::{Read, Write};

/// The flags that a refusal must name.
const FLAGS: [&str; 2] = ["--allowed-host", "--cors-origin"];

#[test]
fn pages_of_the_web_are_refused_without_a_key_and_told_by_which_flag_they_are_not() {
    let server = Server::start(&[]);
    let body = short().to_string();
    let text = "Content-Type: text/plain\r\nOrigin: http://evil.example\r\n".to_owned();
    let ask = |method: &str, path: &str, headers: &str| {
        let body = if method == "POST" { body.as_str() } else { "" };
        server.ask(method, path, (body, headers))
    };
    for (method, path, headers, flag) in [
        ("POST", "/v1/completions", text.as_str(), 1),
        ("POST", "/v1/completions", "Origin: null\r\n", 1),
        ("GET", "/props", "Origin: http://localhost:1\r\n", 1),
        ("GET", "/v1/models", "Host: evil.example\r\n", 0),
        ("GET", "/", "Host: evil.example:80\r\nOrigin: http://evil.example:80\r\n", 0),
        ("GET", "http://evil.example/props", "", 0),
        ("GET", "/props", "Sec-Fetch-Site: cross-site\r\nSec-Fetch-Mode: no-cors\r\n", 1),
        (
            "OPTIONS",
            "/v1/completions",
            "Origin: http://evil.example\r\nAccess-Control-Request-Method: POST\r\n",
            1,
        ),
    ] {
        let reply = ask(method, path, headers);
        assert_eq!(reply.status, 403, "{method} {path} {headers}: {reply:?}");
        let error = reply.json()["error"].clone();
        assert_eq!(error["type"], "permission_error");
        let message = error["message"].as_str().expect("a text");
        assert!(message.contains(FLAGS[flag]) && !message.contains('\n'), "{message}");
        assert!(!reply.head.to_ascii_lowercase().contains("access-control-"), "{}", reply.head);
    }
    // Routers and probes know a machine by any name; a page may not read what they do.
    for path in ["/health", "/metrics"] {
        let reply = ask("GET", path, "Host: pod-7.local\r\nOrigin: http://evil.example\r\n");
        assert_eq!(reply.status, 200);
        assert!(!reply.head.to_ascii_lowercase().contains("access-control-"), "{}", reply.head);
    }
    let own = server.address().to_owned();
    for headers in [
        format!("Host: {own}\r\nOrigin: http://{own}\r\n"),
        "Host: localhost:1\r\nOrigin: http://localhost:1\r\n".into(),
    ] {
        let reply = server.alone("POST", "/v1/completions", (&body, &headers));
        assert_eq!(reply.status, 200, "{headers}: {reply:?}");
        assert!(headers.contains(reply.header("access-control-allow-origin")));
    }
}

#[test]
fn flags_and_keys_let_other_pages_ask() {
    let asks = "Host: box.example:8080\r\nOrigin: http://page.example\r\n";
    let pre = format!(
        "{asks}Access-Control-Request-Private-Network: true\r\nAccess-Control-Request-Method: POST\r\n\
         Access-Control-Request-Headers: x-one\r\n"
    );
    for (args, key) in [
        (&["--cors-origin", "http://page.example", "--allowed-host", "box.example"][..], ""),
        (&["--cors-origin", "*", "--allowed-host", "*"], ""),
        (&["--api-key", "k"], "X-Api-Key: k\r\n"),
    ] {
        let server = Server::start(args);
        let reply = server.alone("POST", "/v1/completions", (&short().to_string(), &format!("{asks}{key}")));
        assert_eq!(reply.status, 200, "{args:?}: {reply:?}");
        let reply = server.alone("OPTIONS", "/v1/completions", ("", &pre));
        for (name, value) in [
            ("access-control-allow-origin", "http://page.example"),
            ("access-control-allow-private-network", "true"),
            ("access-control-allow-headers", "x-one"),
            ("vary", "origin"),
        ] {
            assert_eq!((reply.status, reply.header(name)), (200, value), "{args:?}");
        }
        assert_eq!(reply.body, "");
    }
    let server = Server::start(&["--cors-origin", "http://page.example"]);
    assert_eq!(server.alone("GET", "/props", ("", asks)).status, 403, "a host is no origin");
}

#[test]
fn rows_are_found_with_the_same_key_and_salt_alone() {
    let server = Server::start(&["--api-key", "one", "--api-key", "two", "--slots", "1"]);
    let prompt = "Once upon a time there was a little girl who had a small red ball. She";
    let ask = |key: &str, salt: Option<&str>, path: &str| {
        let mut body = json!({"prompt": prompt, "max_tokens": 1});
        if path.contains("chat") {
            body = json!({"messages": [{"role": "user", "content": prompt}], "max_tokens": 1});
        }
        if let Some(salt) = salt {
            body["cache_salt"] = salt.into();
        }
        let reply = server.ask("POST", path, (&body.to_string(), &format!("X-Api-Key: {key}\r\n"))).json();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a number")
    };
    for path in ["/v1/completions", "/v1/chat/completions"] {
        for (key, salt) in
            [("one", None), ("two", None), ("one", Some("a")), ("one", Some("b")), ("two", Some("a"))]
        {
            assert_eq!(ask(key, salt, path), 0, "{path} {key} {salt:?}");
        }
        for (key, salt) in [("one", None), ("two", None), ("one", Some("a")), ("one", Some("b"))] {
            assert!(ask(key, salt, path) >= 10, "{path} {key} {salt:?}");
        }
    }
}

/// Sends a head and twenty million bytes, and reads only then.
fn sends_first(server: &Server, head: &str) -> Reply {
    let chunked = head.contains("chunked");
    let part = if chunked { format!("100000\r\n{}\r\n", "x".repeat(1 << 20)) } else { "x".repeat(1 << 20) };
    let mut stream = server.send(head.as_bytes()).into_stream();
    for i in 0..20 {
        stream.write_all(part.as_bytes()).unwrap_or_else(|e| panic!("{head}: part {i}: {e}"));
    }
    if chunked {
        stream.write_all(b"0\r\n\r\n").expect("the end");
    }
    let mut said = Vec::new();
    stream.read_to_end(&mut said).unwrap_or_else(|e| panic!("{head}: {e}"));
    Reply::of(&String::from_utf8_lossy(&said))
}

#[test]
fn a_refusal_is_heard_by_a_client_that_reads_only_when_it_has_sent_all() {
    let [keyed, open] = [&["--api-key", "k"][..], &[]].map(Server::start);
    let length = format!("Content-Length: {}\r\n", 20 << 20);
    let chunked = "Transfer-Encoding: chunked\r\n".to_owned();
    for (server, start, headers, status) in [
        (&open, "POST /v1/completions", &length, 413),
        (&open, "POST /v1/completions", &chunked, 413),
        (&open, "POST /tokenize", &length, 413),
        (&keyed, "POST /v1/completions", &length, 401),
        (&keyed, "POST /v1/completions", &chunked, 401),
        (&open, "POST /nothing", &length, 404),
        (&open, "PUT /v1/completions", &length, 405),
        (&open, "POST /v1/messages", &format!("{length}Origin: http://evil.example\r\n"), 403),
    ] {
        let head = format!("{start} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
        assert_eq!(sends_first(server, &head).status, status, "{head}");
        assert_eq!(server.get("/health").status, 200);
    }
}
