//! Starts a server for a test, and a simple HTTP client.

use crate::support::command::antigravity;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The sampling defaults of `generate`, whose texts answers are compared with.
const AS_GENERATE: [&str; 4] = ["--temp", "0.8", "--repeat-penalty", "1.1"];

/// A running server.
pub struct Server {
    child: Child,
    address: String,
    /// Lines of its stderr behind the address.
    said: Arc<Mutex<Vec<String>>>,
}

/// Condition that a test waits for.
#[derive(Clone, Copy)]
pub enum Wait {
    Running(usize),
    Draining,
}

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    /// Of all that came over a connection.
    pub fn of(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((text, ""));
        let status = head.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
        let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let body = if chunked { unchunked(body) } else { body.to_owned() };
        Self { status, head: head.to_owned(), body }
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The `error` that it is.
    #[track_caller]
    pub fn error(&self) -> Value {
        assert!(self.status >= 400, "{self:?}");
        self.json()["error"].clone()
    }

    /// The data of a stream's events, without the mark at the end.
    #[track_caller]
    pub fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        let data = data.filter(|data| *data != "[DONE]");
        data.map(|data| serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"))).collect()
    }

    #[track_caller]
    pub fn header(&self, name: &str) -> &str {
        let value = |line: &'_ str| line.to_ascii_lowercase().starts_with(&format!("{name}: "));
        let line = self.head.lines().find(|line| value(line)).unwrap_or_else(|| panic!("{name}: {self:?}"));
        &line[name.len() + 2..]
    }
}

/// A request whose answer is not read yet.
pub struct Open(TcpStream);

impl Open {
    /// Reads all of it, to the end of the connection.
    pub fn finish(mut self) -> Reply {
        let mut bytes = Vec::new();
        // The other side may end without having read everything.
        let _ = self.0.read_to_end(&mut bytes);
        Reply::of(&String::from_utf8_lossy(&bytes))
    }

    /// Reads the reply to a request that may be cut off, and stops writing if nothing has come back for a while.
    pub fn finish_soon(mut self) -> Reply {
        let mut bytes = Vec::new();
        let _ = self.0.set_read_timeout(Some(Duration::from_millis(200)));
        if self.0.read_to_end(&mut bytes).is_err() {
            let _ = self.0.shutdown(std::net::Shutdown::Write);
            let _ = self.0.set_read_timeout(Some(Duration::from_secs(60)));
            let _ = self.0.read_to_end(&mut bytes);
        }
        Reply::of(&String::from_utf8_lossy(&bytes))
    }

    /// The connection.
    pub fn into_stream(self) -> TcpStream {
        self.0
    }

    /// Reads so many bytes.
    pub fn read(&mut self, bytes: usize) {
        self.0.read_exact(&mut vec![0; bytes]).expect("so much comes");
    }
}

fn unchunked(mut rest: &str) -> String {
    let mut body = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a size");
        if size == 0 {
            break;
        }
        // It may have been cut off.
        let Some(part) = after.get(..size) else { break };
        body += part;
        rest = after.get(size + 2..).unwrap_or_default();
    }
    body
}

impl Server {
    /// Samples as `generate` does.
    #[track_caller]
    pub fn start(args: &[&str]) -> Self {
        Self::begin("0", &[&AS_GENERATE, args].concat(), || ())
    }

    /// Starts a server and does something before it is ready.
    #[track_caller]
    pub fn begin(port: &str, args: &[&str], meanwhile: impl FnOnce()) -> Self {
        Self::run(antigravity(["serve", "--port", port, "-q"]).args(args).into_std(), meanwhile)
    }

    /// Under a limit of `ulimit`, such as `-v 2000000`.
    #[track_caller]
    pub fn limited(limit: &str, args: &[&str]) -> Self {
        let plain = antigravity(["serve", "--port", "0", "-q"]).args(args).into_std();
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]);
        shell.arg(plain.get_program()).args(plain.get_args()).env_remove("HOME").stdin(Stdio::null());
        Self::run(shell, || ())
    }

    #[track_caller]
    fn run(mut command: Command, meanwhile: impl FnOnce()) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the server starts");
        let mut lines = BufReader::new(child.stderr.take().expect("piped")).lines();
        meanwhile();
        let address = loop {
            let line = lines.next().expect("it says where it is").expect("a line");
            match line.strip_prefix("http://") {
                Some(address) => break address.to_owned(),
                None => assert!(!line.starts_with("error"), "{line}"),
            }
        };
        let said = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&said);
        let tell = move |line: String| {
            eprintln!("server: {line}");
            told.lock().expect("lines").push(line);
        };
        std::thread::spawn(move || lines.map_while(Result::ok).for_each(tell));
        Self { child, address, said }
    }

    /// Lines of its stderr that have this text, as soon as there is one.
    #[track_caller]
    pub fn said(&self, text: &str) -> Vec<String> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let lines = self.said.lock().expect("lines").clone();
            let found: Vec<_> = lines.into_iter().filter(|line| line.contains(text)).collect();
            if !found.is_empty() {
                return found;
            }
            assert!(Instant::now() < end, "nothing is said of {text:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Sends bytes as they are.
    pub fn send(&self, bytes: &[u8]) -> Open {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a limit");
        // It may have answered already, and read no more.
        let _ = stream.write_all(bytes);
        Open(stream)
    }

    pub fn open(&self, path: &str, body: &Value) -> Open {
        self.send(&request("POST", path, (&body.to_string(), "")))
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.open(path, body).finish()
    }

    pub fn get(&self, path: &str) -> Reply {
        self.send(&request("GET", path, ("", ""))).finish()
    }

    /// A request with headers of its own: lines with their ends.
    pub fn ask(&self, method: &str, path: &str, with: (&str, &str)) -> Reply {
        self.send(&request(method, path, with)).finish()
    }

    /// Sends a request without the default `Host` header.
    pub fn alone(&self, method: &str, path: &str, with: (&str, &str)) -> Reply {
        let request = String::from_utf8(request(method, path, with)).expect("a text");
        self.send(request.replacen("Host: localhost\r\n", "", 1).as_bytes()).finish()
    }

    /// Address that the server listens on.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Waits up to a minute for a condition.
    #[track_caller]
    pub fn wait_for(&self, what: Wait) {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let so = match what {
                Wait::Running(n) => {
                    let line = format!("vllm:num_requests_running{{model_name=\"story\"}} {n}\n");
                    self.get("/metrics").body.contains(&line)
                }
                Wait::Draining => self.get("/health").status == 503,
            };
            if so {
                return;
            }
            assert!(Instant::now() < end, "it never comes to that");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Most bytes that it had in memory so far.
    pub fn peak(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }

    pub fn signal(&self, name: &str) {
        let kill = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(kill.expect("kill runs").success());
    }

    /// Its exit code, within a minute.
    #[track_caller]
    pub fn end(&mut self) -> Option<i32> {
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(Instant::now() < end, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A body with some fields more.
pub fn with(body: &Value, more: &Value) -> Value {
    let mut body = body.clone();
    for (field, value) in more.as_object().expect("fields") {
        body[field] = value.clone();
    }
    body
}

/// A completion of a few words that are always the same.
pub fn short() -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0})
}

/// A completion that continues until its client disconnects.
pub fn endless(stream: bool) -> Value {
    json!({"prompt": "Tom", "max_tokens": -1, "ignore_eos": true, "stream": stream})
}

pub fn request(method: &str, path: &str, (body, headers): (&str, &str)) -> Vec<u8> {
    let length = body.len();
    let head = "Host: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n";
    format!("{method} {path} HTTP/1.1\r\n{head}{headers}Content-Length: {length}\r\n\r\n{body}").into_bytes()
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
