//! Bodies and connections that nobody should send: an error or a closed connection, and the next one is answered.

use super::client::{Reply, Server};
use super::short;
use crate::bed::random::Random;

/// Sends bytes, and no more.
fn sends(server: &Server, bytes: &[u8]) -> Reply {
    server.send(bytes).finish()
}

#[test]
fn bodies_that_are_huge_broken_or_deep_are_refused() {
    let server = Server::start(&[]);
    let post = |body: &[u8]| {
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
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
    let head = "POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 9000000\r\n\r\n";
    assert_eq!(sends(&server, head.as_bytes()).status, 413);
    let chunk = format!("100000\r\n{}\r\n", "x".repeat(1 << 20));
    let head = "POST /v1/completions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(sends(&server, &[head, &chunk.repeat(9)].concat().into_bytes()).status, 413);
    // Two lengths, of which another server might take the other.
    for heads in [
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 4\r\nContent-Length: 5\r\n",
        "Content-Length: -4\r\n",
        "Transfer-Encoding: gzip, identity\r\n",
    ] {
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{heads}\r\n0\r\n\r\nGET /x"
        );
        let status = sends(&server, request.as_bytes()).status;
        assert!(status == 0 || (400..500).contains(&status), "{heads:?}: {status}");
    }
    assert_eq!(server.post("/v1/completions", &short()).status, 200);
}

#[test]
fn requests_changed_at_random_harm_nobody() {
    let server = Server::start(&["--slots", "2"]);
    let expected = server.post("/v1/completions", &short()).json()["choices"].clone();
    let mut random = Random(5);
    let body = "{\"prompt\":\"Tom\",\"max_tokens\":2,\"stop\":[\"a\"],\"stream\":true,\"logprobs\":1}";
    let paths = [
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/health",
        "/v1/messages",
        "/%ff",
        "*",
        "//",
    ];
    for i in 0..600 {
        let path = paths[random.below(paths.len())];
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let mut bytes = [head.as_bytes(), body.as_bytes()].concat();
        for _ in 0..1 + random.below(4) {
            let at = random.below(bytes.len());
            match random.below(3) {
                0 => bytes[at] = random.below(256) as u8,
                1 => bytes.truncate(at + 1),
                _ => bytes.insert(at, b"\r\n{}[]\",:\0 9-"[random.below(13)]),
            }
        }
        let open = server.send(&bytes);
        // One that waits for more is left alone.
        if i % 3 == 0 {
            open.shut();
            let status = open.finish().status;
            assert!(status == 0 || status == 200 || (400..500).contains(&status), "{status}: {bytes:?}");
        }
    }
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
    let one = "GET /health HTTP/1.1\r\nHost: h\r\n\r\n";
    let last = "GET /nothing HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n";
    let reply = sends(&server, [one, one, last].concat().as_bytes());
    let all = format!("{}{}", reply.head, reply.body);
    assert_eq!((all.matches("HTTP/1.1 200").count(), all.matches("HTTP/1.1 404").count()), (2, 1), "{all}");
    drop((idle, half));
}
