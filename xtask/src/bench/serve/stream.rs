//! A client of OpenAI-compatible servers that streams the events of an answer: HTTP/1.1 without TLS.

use crate::command;
use crate::error::{Error, Result};
use serde_json::Value;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Maximum time without data from a server.
const TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum bytes of an error that are read.
const MAX_ERROR: u64 = 1 << 16;

/// A server's address.
#[derive(Clone)]
pub struct Server {
    /// Its name in messages.
    pub name: String,
    /// Host and port.
    authority: String,
    /// The common prefix of its paths.
    prefix: String,
    key: Option<String>,
}

impl Server {
    /// Parses `http://HOST:PORT`; the prefix is `/v1` if the address has no path.
    pub fn parse(url: &str) -> std::result::Result<Server, String> {
        let rest = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
        let rest = rest.filter(|rest| !rest.is_empty() && !rest.contains(char::is_whitespace));
        let rest = rest.ok_or_else(|| format!("{url}: give http://HOST:PORT, without TLS"))?;
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, "v1"));
        let port = if authority.rsplit(']').next().is_some_and(|end| end.contains(':')) { "" } else { ":80" };
        let key = std::env::var("OPENAI_API_KEY").ok().filter(|key| !key.is_empty());
        Ok(Server {
            name: url.into(),
            authority: format!("{authority}{port}"),
            prefix: format!("/{prefix}"),
            key,
        })
    }

    /// Sets its name in messages.
    pub fn named(self, name: &str) -> Server {
        Server { name: name.into(), ..self }
    }

    /// Posts to a path and calls `event` with each event of the answer; an error status returns the server's message.
    pub fn post(&self, path: &str, body: &Value, event: &mut dyn FnMut(&Value)) -> Result<()> {
        let lost = |e: io::Error| Error::Failed(format!("{}: {e}", self.name));
        let mut stream = TcpStream::connect(&self.authority).map_err(lost)?;
        stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(TIMEOUT))).map_err(lost)?;
        stream.write_all(&self.request(path, &body.to_string())).map_err(lost)?;
        let mut reader = BufReader::new(stream);
        let (status, framing) = read_head(&mut reader).map_err(lost)?;
        let body: Box<dyn Read> = match framing {
            Framing::Chunks => Box::new(Chunks { inner: reader, left: 0, over: false }),
            Framing::Length(n) => Box::new(reader.take(n)),
            Framing::ToTheEnd => Box::new(reader),
        };
        if status != 200 {
            return Err(Error::Failed(format!("{}: {status}: {}", self.name, read_reason(body))));
        }
        for line in BufReader::new(body).lines() {
            let line = line.map_err(lost)?;
            let Some(data) = line.strip_prefix("data:") else { continue };
            let value: Value = match data.trim() {
                "[DONE]" => break,
                data => serde_json::from_str(data)
                    .map_err(|e| Error::Failed(format!("{}: an event: {e}", self.name)))?,
            };
            if let Some(error) = value.get("error").filter(|e| !e.is_null()) {
                let error = command::one_line(&error.to_string());
                return Err(Error::Failed(format!("{}: {error}", self.name)));
            }
            event(&value);
        }
        Ok(())
    }

    fn request(&self, path: &str, body: &str) -> Vec<u8> {
        let Server { authority, prefix, key, .. } = self;
        let key = key.as_ref().map_or(String::new(), |key| format!("Authorization: Bearer {key}\r\n"));
        let head = format!("POST {prefix}{path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n{key}");
        let length = body.len();
        let kind = "Content-Type: application/json\r\nAccept: text/event-stream";
        format!("{head}{kind}\r\nContent-Length: {length}\r\n\r\n{body}").into_bytes()
    }
}

/// The way in which the length of a body is given.
enum Framing {
    Chunks,
    Length(u64),
    ToTheEnd,
}

/// Reads the status and the headers.
fn read_head(reader: &mut impl BufRead) -> io::Result<(u16, Framing)> {
    let bad = |what: &str| io::Error::new(io::ErrorKind::InvalidData, format!("not HTTP: {what}"));
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let status = line.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
    let status = status.ok_or_else(|| bad(&command::one_line(&line)))?;
    let mut framing = Framing::ToTheEnd;
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Err(bad("it ends in its headers"));
        }
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        match (name.to_ascii_lowercase().as_str(), value.trim()) {
            ("transfer-encoding", value) if value.eq_ignore_ascii_case("chunked") => {
                framing = Framing::Chunks
            }
            ("content-length", value) if !matches!(framing, Framing::Chunks) => {
                framing = Framing::Length(value.parse().map_err(|_| bad("its length"))?);
            }
            _ => {}
        }
    }
    Ok((status, framing))
}

/// Reads a chunked body.
struct Chunks<R> {
    inner: R,
    /// Bytes left of this chunk.
    left: u64,
    over: bool,
}

impl<R: BufRead> Read for Chunks<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let bad = || io::Error::new(io::ErrorKind::InvalidData, "the connection broke within an answer");
        let mut line = String::new();
        while self.left == 0 && !self.over {
            line.clear();
            if self.inner.read_line(&mut line)? == 0 {
                return Err(bad());
            }
            // An empty line ends the previous chunk.
            let size = line.trim().split(';').next().unwrap_or("");
            if !size.is_empty() {
                self.left = u64::from_str_radix(size, 16).map_err(|_| bad())?;
                self.over = self.left == 0;
            }
        }
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(to.len());
        if most == 0 {
            return Ok(0);
        }
        match self.inner.read(&mut to[..most])? {
            0 => Err(bad()),
            n => {
                self.left -= n as u64;
                Ok(n)
            }
        }
    }
}

/// The message of an error: from its JSON, or the whole text.
fn read_reason(body: impl Read) -> String {
    let mut text = Vec::new();
    let _ = body.take(MAX_ERROR).read_to_end(&mut text);
    let json: Value = serde_json::from_slice(&text).unwrap_or_default();
    let message = json["error"]["message"].as_str().map(String::from);
    command::one_line(&message.unwrap_or_else(|| String::from_utf8_lossy(&text).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::net::TcpListener;

    /// The events of an answer that a server sends in these pieces.
    fn events(pieces: &'static [&'static str]) -> Result<Vec<Value>> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut asked, mut piece) = (Vec::new(), [0; 4096]);
            while !asked.ends_with(b"}") {
                let n = stream.read(&mut piece).unwrap();
                asked.extend_from_slice(&piece[..n]);
            }
            assert!(asked.starts_with(b"POST /v1/completions HTTP/1.1\r\n"));
            for piece in pieces {
                stream.write_all(piece.as_bytes()).unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let mut found = Vec::new();
        let server_at = Server::parse(&url).unwrap();
        let result = server_at.post("/completions", &json!({"a": 1}), &mut |e| found.push(e.clone()));
        server.join().unwrap();
        result.map(|()| found)
    }

    #[test]
    fn events_are_read_however_they_are_sent_and_errors_are_a_line() {
        let expected = [json!({"x": 1}), json!({"x": 2})];
        let chunks: &[&str] = &[
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            "5\r\ndata:",
            "\r\n9\r\n {\"x\":1}\n\r\n1\r\n\n\r\n",
            "19\r\n: x\n\ndata: {\"x\":2}\n\ndata:\r\n8\r\n [DONE]\n\r\n0\r\n\r\n",
        ];
        assert_eq!(events(chunks).unwrap(), expected);
        let plain: &[&str] = &["HTTP/1.0 200 OK\r\n\r\ndata: {\"x\":1}\r\n\r\n", "data: {\"x\":2}\n\n"];
        assert_eq!(events(plain).unwrap(), expected);
        for (pieces, why) in [
            (&["HTTP/1.1 429 No\r\n\r\n{\"error\":{\"message\":\"too many\"}}"][..], "429: too many"),
            (&["HTTP/1.1 500 No\r\nContent-Length: 4\r\n\r\noh\nno"], "500: oh"),
            (&["HTTP/1.1 200 OK\r\n\r\ndata: {\"error\":{\"message\":\"full\"}}\n\n"], "full"),
            (&["HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda"], "broke"),
            (&["SSH-2.0\r\n\r\n"], "not HTTP"),
        ] {
            let said = events(pieces).unwrap_err().to_string();
            assert!(said.contains(why) && said.lines().count() == 1, "{why}: {said}");
        }
        let parsed = |url: &str| Server::parse(url).map(|s| format!("{} {}", s.authority, s.prefix)).ok();
        assert_eq!(parsed("http://a:8080/").as_deref(), Some("a:8080 /v1"));
        assert_eq!(parsed("http://[::1]:80/openai/v1/").as_deref(), Some("[::1]:80 /openai/v1"));
        assert!(["a:8080", "https://a", "http://", "http://a b"].iter().all(|url| parsed(url).is_none()));
    }
}
