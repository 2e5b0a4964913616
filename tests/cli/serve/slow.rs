//! Slow clients and a slow model: other requests do not wait for them.

use super::client::{Server, Wait, short};
use crate::support::command::*;
use serde_json::json;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

/// Time that the servers here wait for a client.
const PATIENCE: Duration = Duration::from_secs(1);

/// Sends a blank every so often, until the other side has closed; what it said, and when.
fn drips(server: &Server, first: &str) -> (String, Duration) {
    let (began, mut stream) = (Instant::now(), server.send(first.as_bytes()).into_stream());
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("a limit");
    let (mut said, mut room) = (Vec::new(), [0; 4096]);
    while began.elapsed() < 20 * PATIENCE {
        // It may have closed between.
        let _ = stream.write_all(b" ");
        match stream.read(&mut room) {
            Ok(0) => break,
            Ok(n) => said.extend_from_slice(&room[..n]),
            Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {}
            Err(_) => break,
        }
    }
    (String::from_utf8_lossy(&said).into_owned(), began.elapsed())
}

#[test]
fn heads_and_bodies_that_trickle_in_are_given_up_and_hold_nobody_up() {
    let server = Server::start(&["--patience", "1", "--slots", "1"]);
    let expected = server.post("/v1/completions", &short()).json()["choices"].clone();
    let body = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n";
    std::thread::scope(|scope| {
        let slow = ["POST /v1/completions HTTP/1.1\r\nX: ", body, "POST /v1/comp"]
            .map(|first| scope.spawn(|| drips(&server, first)));
        for _ in 0..3 {
            assert_eq!(server.post("/v1/completions", &short()).json()["choices"], expected);
        }
        for (i, (said, took)) in slow.map(|slow| slow.join().expect("no panic")).into_iter().enumerate() {
            assert!((PATIENCE..10 * PATIENCE).contains(&took), "{i}: {took:?}: {said}");
            assert!(said.is_empty() || said.starts_with("HTTP/1.1 4"), "{i}: {said}");
            assert!(i != 1 || said.starts_with("HTTP/1.1 408"), "{said}");
        }
    });
}

#[test]
fn a_stream_that_nobody_reads_is_given_up_and_one_that_is_read_slowly_goes_on() {
    let server = Server::start(&["--patience", "1", "--slots", "2", "-c", "32768", "--cache-mib", "0"]);
    let expected = server.post("/v1/completions", &short()).json()["choices"].clone();
    let stream = |tokens: i32| {
        let body = json!({
            "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "ignore_eos": true, "stream": true,
            "logprobs": true, "top_logprobs": 20, "temperature": 0,
        });
        server.open("/v1/chat/completions", &body)
    };
    let unread = stream(-1);
    server.wait_for(Wait::Running(1));
    // A part at a time, and for longer than a client may read nothing.
    let (mut slow, mut said, mut part) = (stream(800).into_stream(), Vec::new(), vec![0; 1 << 16]);
    let began = Instant::now();
    loop {
        let n = slow.read(&mut part).expect("it goes on");
        if n == 0 {
            break;
        }
        said.extend_from_slice(&part[..n]);
        std::thread::sleep(PATIENCE / 20);
    }
    assert!(began.elapsed() > PATIENCE, "{} bytes are too few", said.len());
    assert!(String::from_utf8_lossy(&said).contains("data: [DONE]"), "{} bytes", said.len());
    assert_eq!(server.post("/v1/completions", &short()).json()["choices"], expected);
    server.wait_for(Wait::Running(0));
    let metrics = server.get("/metrics").body;
    let tokens = metrics.lines().find_map(|line| line.strip_prefix("llamacpp:tokens_predicted_total "));
    let tokens: usize = tokens.and_then(|n| n.parse().ok()).expect("a number");
    assert!(tokens < 30_000, "{tokens}: it was not given up");
    drop(unread);
}

#[test]
fn while_the_model_is_loaded_requests_are_told_to_come_again() {
    let temp = TestDir::new();
    let dir = temp.model_without("generation_config.json");
    let file = temp.path("generation_config.json");
    assert!(Command::new("mkfifo").arg(&file).status().expect("mkfifo runs").success());
    // Who reads it waits until this end is closed.
    let mut pipe = File::options().read(true).write(true).open(&file).expect("a pipe");
    // A port that is free: the server says which it has only when it is ready.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a port").port();
    let address = format!("127.0.0.1:{port}");
    let get = |path: &str| -> Option<String> {
        let mut stream = TcpStream::connect(&address).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut said = String::new();
        stream.read_to_string(&mut said).ok()?;
        Some(said)
    };
    let server = Server::begin(&port.to_string(), &["-m", &dir], || {
        let end = Instant::now() + Duration::from_secs(60);
        let said = loop {
            match get("/health") {
                Some(said) => break said,
                None => assert!(Instant::now() < end, "it does not listen"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        mentions(&said, &["HTTP/1.1 503", "Retry-After: ", "is being loaded"]);
        mentions(&get("/metrics").unwrap_or_default(), &["HTTP/1.1 503"]);
        mentions(&get("/").unwrap_or_default(), &["HTTP/1.1 200"]);
        let text = std::fs::read(model().join("generation_config.json")).expect("a file");
        pipe.write_all(&text).expect("room for it");
        std::fs::rename(temp.write("whole.json", text), &file).expect("the same for the next reader");
        drop(pipe);
    });
    assert_eq!(server.get("/health").status, 200);
}
