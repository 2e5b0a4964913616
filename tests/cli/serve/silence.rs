//! Streams without text for a while, and clients that have closed their sending side: both continue.

use super::client::{Server, Wait, endless, short, with};
use super::events;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

#[test]
fn a_stream_that_waits_says_so_every_ten_seconds_in_the_form_of_its_api() {
    let server = Server::start(&["--slots", "1", "-c", "65536"]);
    let running = server.open("/v1/completions", &endless(true));
    server.wait_for(Wait::Running(1));
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": true});
    let asks = [
        ("/v1/completions", json!({"prompt": "Hi", "max_tokens": 1, "stream": true}), ": waiting\n\n"),
        ("/completion", json!({"prompt": "Hi", "max_tokens": 1, "stream": true}), ": waiting\n\n"),
        ("/v1/chat/completions", chat.clone(), ": waiting\n\n"),
        ("/v1/responses", json!({"input": "Hi", "stream": true}), ": waiting\n\n"),
        ("/v1/messages", chat, "event: ping\ndata: {\"type\": \"ping\"}\n\n"),
    ];
    let began = Instant::now();
    let mut all: Vec<_> = asks.iter().map(|(path, body, _)| server.open(path, body).into_stream()).collect();
    for (stream, (path, _, words)) in all.iter_mut().zip(&asks) {
        let (mut said, mut room) = (String::new(), [0; 4096]);
        while !said.contains(words) {
            let n = stream.read(&mut room).expect("something comes");
            assert!(n > 0, "{path}: {said}");
            if said.is_empty() {
                assert!(
                    began.elapsed() < Duration::from_secs(9) || *path != asks[0].0,
                    "headers come at once"
                );
            }
            said += std::str::from_utf8(&room[..n]).expect("a text");
            assert!(began.elapsed() < Duration::from_secs(30), "{path}: {said}");
        }
        assert!(said.starts_with("HTTP/1.1 200"), "{path}: {said}");
    }
    assert!(began.elapsed() >= Duration::from_secs(9), "{:?}", began.elapsed());
    drop((running, all));
    server.wait_for(Wait::Running(0));
}

#[test]
fn a_stream_tells_how_far_a_prompt_is_read_where_that_is_asked_for() {
    let server = Server::start(&["--slots", "1", "--prefill-chunk", "16"]);
    let prompt = "Once upon a time there was a little girl who had a small red ball. ".repeat(8);
    let body =
        json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": true, "return_progress": true});
    let said = events(&server.post("/v1/completions", &body));
    let progress: Vec<&Value> =
        said.iter().map(|e| &e["prompt_progress"]).filter(|p| p.is_object()).collect();
    let [first, .., last] = progress.as_slice() else { panic!("{said:?}") };
    assert_eq!((&first["processed"], &first["cache"]), (&json!(0), &json!(0)));
    assert_eq!(last["processed"], last["total"]);
    assert!(last["total"].as_u64() > Some(100) && last["time_ms"].is_u64(), "{last}");
    // What is copied counts as read.
    let part = server.post("/completion", &body).events().swap_remove(0);
    assert!(part["prompt_progress"]["cache"].as_u64() > Some(50), "{part}");
    assert_eq!(part["prompt_progress"]["cache"], part["prompt_progress"]["processed"]);
}

#[test]
fn a_client_that_closes_its_side_is_answered_and_one_that_has_gone_is_not_waited_for() {
    let server = Server::start(&["--slots", "1", "-c", "65536"]);
    let expected = server.post("/v1/completions", &short()).json()["choices"].clone();
    let running = server.open("/v1/completions", &endless(true));
    server.wait_for(Wait::Running(1));
    let halves = [short(), with(&short(), &json!({"stream": true}))].map(|body| {
        let open = server.open("/v1/completions", &body);
        let stream = open.into_stream();
        stream.shutdown(Shutdown::Write).expect("one side is closed");
        stream
    });
    // They wait for a while before there is anything to say.
    std::thread::sleep(Duration::from_millis(300));
    drop(running);
    let said = halves.map(|mut half| {
        let mut said = String::new();
        half.read_to_string(&mut said).expect("an answer");
        said
    });
    let body = said[0].rsplit("\r\n\r\n").next().expect("a body");
    assert_eq!(serde_json::from_str::<Value>(body).expect("JSON")["choices"], expected, "{}", said[0]);
    assert!(said[1].contains("HTTP/1.1 200") && said[1].contains("data: [DONE]"), "{}", said[1]);
    server.wait_for(Wait::Running(0));
    // Whoever closes both is gone, whether all was read or nothing was said.
    for stream in [false, true] {
        let mut gone = server.open("/v1/completions", &endless(stream)).into_stream();
        server.wait_for(Wait::Running(1));
        let _ = gone.flush();
        gone.shutdown(Shutdown::Write).expect("one side is closed");
        drop(gone);
        let began = Instant::now();
        server.wait_for(Wait::Running(0));
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    }
}
