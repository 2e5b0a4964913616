//! The check of a server there that answers here.

use super::checks::{PASSED, expect, phone};
use super::stand::{Bench, Checked, Running, here, said};
use super::{Check, Verdict};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

#[rustfmt::skip]
pub const ALL: &[Check] = &[
    Check { name: "a server there answers here, and Ctrl-C ends it", run: answers },
    Check { name: "a server there is measured under load", run: measured },
];

fn answers(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let (port, there) = (free()?, free()?.to_string());
    let (browser, opened) = browser(bench)?;
    let words = ["--open", "--", "serve", "--port", &there, "-q"];
    let mut task = phone.task("run", &[&["--port", &port.to_string()], &words[..]].concat());
    let mut run = Running::start(task.env("BROWSER", browser))?;
    let address = format!("http://127.0.0.1:{port}/");
    let line = run.read(address.len() + 1)?;
    expect(line.strip_suffix(b"\n") == Some(address.as_bytes()), || format!("it says {line:?}"))?;
    let expected = said(&mut here(&["generate", "-p", "Once", "-n", "6", "--temp", "0", "-q"]))?;
    let text = completion(port)?;
    expect(text.trim_end() == expected.out.trim_end(), || {
        format!("there {text:?}, here {:?}", expected.out)
    })?;
    run.signal("INT")?;
    run.end()?.ended(0)?;
    phone.idle()?;
    expect(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err(), || {
        format!("port {port} is still taken")
    })?;
    let seen = fs::read_to_string(&opened).unwrap_or_default();
    expect(seen.trim() == address, || format!("opened was {seen:?}"))?;
    let other = said(&mut phone.task("run", &["--open"]))?;
    other.refused(2, &["--open", "serve"])?;
    PASSED
}

fn measured(bench: &Bench) -> Checked<Verdict> {
    let phone = phone(bench)?;
    let file = bench.dir.join("load.json");
    let file = file.to_str().ok_or("a path that is no text")?;
    let load =
        ["serve", "--clients", "1,2", "--seconds", "1", "--prompt", "8", "--generate", "4", "--long", "40"];
    let said = said(&mut phone.task("bench", &[&load[..], &["--json", file]].concat()))?;
    said.ended(0)?;
    expect(said.out.lines().count() == 11, || said.out.clone())?;
    let text = fs::read_to_string(file).map_err(|e| e.to_string())?;
    let record: Value = serde_json::from_str(&text).map_err(|e| e.to_string())?;
    let runs = record["runs"].as_array().ok_or("no runs")?;
    let good = |run: &Value| run["errors"] == 0 && run["requests"] != 0 && run["long"]["first_s"].is_number();
    expect(runs.len() == 2 && runs.iter().all(good), || text.clone())?;
    phone.idle()?;
    PASSED
}

/// A port that nobody has now.
fn free() -> Checked<u16> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    free.map(|address| address.port()).map_err(|e| e.to_string())
}

/// A browser that notes what it is given, and its notes.
fn browser(bench: &Bench) -> Checked<(PathBuf, PathBuf)> {
    let (browser, notes) = (bench.dir.join("browser"), bench.dir.join("opened"));
    let script = format!("#!/bin/sh\necho \"$@\" >>'{}'\n", notes.display());
    let executable = fs::Permissions::from_mode(0o755);
    let made = fs::write(&browser, script).and_then(|()| fs::set_permissions(&browser, executable));
    made.map_err(|e| e.to_string())?;
    Ok((browser, notes))
}

/// What the server at a port here completes.
fn completion(port: u16) -> Checked<String> {
    let body = r#"{"prompt": "Once", "max_tokens": 6, "temperature": 0}"#;
    let head = format!("Host: localhost\r\nConnection: close\r\nContent-Length: {}", body.len());
    let mut reply = String::new();
    let mut ask = || {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        write!(stream, "POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{body}")?;
        stream.read_to_string(&mut reply)
    };
    ask().map_err(|e| format!("port {port}: {e}"))?;
    let json: Value = reply
        .split_once("\r\n\r\n")
        .and_then(|(_, body)| serde_json::from_str(body).ok())
        .unwrap_or_default();
    json["choices"][0]["text"].as_str().map(String::from).ok_or_else(|| format!("no text: {reply}"))
}
