//! Questions to an endpoint that may be slow, broken or hostile, through `curl`. Redirects are followed here, so that the
//! token goes to its own server only. Nobody sends more than was announced, or takes for ever.

use crate::sh;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdout, Command, Stdio};

/// A user's way to an endpoint.
pub struct Client {
    pub token: Option<String>,
    /// Seconds until a connection stands, and how long less than [`LEAST`] may come.
    pub patience: u32,
}

/// Why something does not come.
#[derive(Debug)]
pub enum Failure {
    /// An answer without it.
    Status(u16),
    /// A connection that cannot be had, ended early, or took too long.
    Connection(String),
    /// Something that no hub says.
    Lie(String),
    /// This machine's disk.
    Disk(io::Error),
}

/// An answer, or why there is none.
pub type Outcome<T> = Result<T, Failure>;

#[derive(Clone, Copy, PartialEq)]
pub enum Ask {
    /// Of what kind and how long it is.
    Head,
    /// For its bytes from here on.
    From(u64),
}

/// An answer whose body has not been read.
pub struct Answer {
    pub status: u16,
    /// Names are in small letters.
    headers: Vec<(String, String)>,
    curl: Curl,
}

/// A process that ends with this.
struct Curl {
    child: Child,
    out: BufReader<ChildStdout>,
}

/// A large file's hash, which the hub gives with the redirect to where the file is.
pub const LINKED_ETAG: &str = "x-linked-etag";
/// Bytes a second.
const LEAST: &str = "300";
const HOPS: usize = 5;
/// Bytes of status and headers.
const MOST_HEAD: u64 = 1 << 16;

impl Client {
    pub fn ask(&self, url: &str, ask: Ask) -> Outcome<Answer> {
        let (mut url, mut token) = (url.to_string(), self.token.as_deref());
        for _ in 0..HOPS {
            let answer = self.send(&url, ask, token)?;
            let described = ask == Ask::Head && answer.header(LINKED_ETAG).is_some();
            if described || !matches!(answer.status, 301 | 302 | 303 | 307 | 308) {
                return Ok(answer);
            }
            let next = resolve_redirect(&url, answer.header("location").unwrap_or_default())?;
            token = token.filter(|_| parse_origin(&next) == parse_origin(&url));
            url = next;
        }
        Err(Failure::Lie(format!("it redirects more than {HOPS} times")))
    }

    fn send(&self, url: &str, ask: Ask, token: Option<&str>) -> Outcome<Answer> {
        let seconds = self.patience.to_string();
        let mut curl = Command::new("curl");
        // Variables for proxies hold; a `.curlrc`, which may turn checks off, does not.
        curl.args(["--disable", "--config", "-", "--silent", "--show-error", "--suppress-connect-headers"]);
        curl.args(["--proto", "=http,https", "--proto-default", "https", "--globoff"]);
        curl.args(["--connect-timeout", &seconds]);
        curl.args(["--speed-limit", LEAST, "--speed-time", &seconds]);
        // Words of a command are seen by everyone on the machine, so what is secret comes on stdin.
        let mut config = format!("url = {}\n", quote(url)?);
        if let Some(token) = token {
            config += &format!("header = {}\n", quote(&format!("Authorization: Bearer {token}"))?);
        }
        match ask {
            Ask::Head => curl.arg("--head"),
            Ask::From(0) => curl.arg("--include"),
            Ask::From(first) => curl.args(["--include", "--range", &format!("{first}-")]),
        };
        curl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let cannot = |e| Failure::Connection(sh::cannot_start(&Command::new("curl"), e).to_string());
        let mut child = curl.spawn().map_err(cannot)?;
        if let Some(mut stdin) = child.stdin.take() {
            // Where it cannot be written, curl has ended and says why.
            let _ = stdin.write_all(config.as_bytes());
        }
        let out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut curl = Curl { child, out };
        match read_head(&mut curl.out) {
            Some((status, headers)) => Ok(Answer { status, headers, curl }),
            None if curl.out.fill_buf().is_ok_and(<[u8]>::is_empty) => {
                curl.ended()?;
                Err(Failure::Lie("it does not speak HTTP".into()))
            }
            None => {
                Err(Failure::Lie("its answer begins as none of HTTP does, or has endless headers".into()))
            }
        }
    }
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find_map(|(there, value)| (there == name).then_some(value.as_str()))
    }

    /// Hands the body on, piece by piece, if it has no more than `most` bytes.
    pub fn body(mut self, most: u64, mut take: impl FnMut(&[u8]) -> io::Result<()>) -> Outcome<()> {
        let (mut left, mut piece) = (most, vec![0; 1 << 16]);
        loop {
            let come = self.curl.out.read(&mut piece).map_err(|e| Failure::Connection(e.to_string()))?;
            if come == 0 {
                return self.curl.ended();
            }
            left = left.checked_sub(come as u64).ok_or_else(|| {
                Failure::Lie(format!("more comes than the {most} bytes that were announced or may come"))
            })?;
            take(&piece[..come]).map_err(Failure::Disk)?;
        }
    }
}

impl Curl {
    /// Waits for its end, once all that it says has been read.
    fn ended(&mut self) -> Outcome<()> {
        let mut said = Vec::new();
        if let Some(stderr) = self.child.stderr.take() {
            let _ = stderr.take(MOST_HEAD).read_to_end(&mut said);
        }
        if self.child.wait().is_ok_and(|status| status.success()) {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&said);
        Err(Failure::Connection(sh::one_line(said.lines().last().unwrap_or("curl does not say why"))))
    }
}

impl Drop for Curl {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Status and headers; answers that announce another one are passed over.
fn read_head(out: &mut impl BufRead) -> Option<(u16, Vec<(String, String)>)> {
    let mut out = out.take(MOST_HEAD);
    let mut line = || {
        let mut line = Vec::new();
        out.read_until(b'\n', &mut line).ok()?;
        Some(String::from_utf8_lossy(line.strip_suffix(b"\n")?).trim_end().to_string())
    };
    loop {
        let status: u16 = line()?.strip_prefix("HTTP/")?.split(' ').nth(1)?.parse().ok()?;
        let mut headers = Vec::new();
        loop {
            let line = line()?;
            if line.is_empty() {
                break;
            }
            let header = line.split_once(':');
            headers.extend(header.map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_string())));
        }
        if !(100..200).contains(&status) {
            return Some((status, headers));
        }
    }
}

/// A text of curl's configuration, in which a line more would be an option more.
fn quote(text: &str) -> Outcome<String> {
    if text.bytes().all(|b| b.is_ascii_graphic() || b == b' ') {
        return Ok(format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"")));
    }
    // It may be secret.
    Err(Failure::Lie("its address has characters that none has".into()))
}

/// Resolves where a redirect leads: to no other protocol, and never from a connection that nobody reads to one that everyone does.
fn resolve_redirect(from: &str, location: &str) -> Outcome<String> {
    let (scheme, rest) = from.split_once("://").unwrap_or(("https", from));
    let host = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let to = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{host}{location}"),
        _ => location.into(),
    };
    let plain = to.bytes().all(|b| b.is_ascii_graphic());
    let down = scheme.eq_ignore_ascii_case("https") && !to.to_ascii_lowercase().starts_with("https://");
    if plain && !down && parse_origin(&to).is_some() {
        return Ok(to);
    }
    Err(Failure::Lie(format!("it redirects to `{}`", sh::one_line(location))))
}

/// Protocol, host and port of an address; `None` where programs might read them in different ways.
fn parse_origin(url: &str) -> Option<(String, String)> {
    let (scheme, rest) = url.split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?.to_ascii_lowercase();
    let scheme = scheme.to_ascii_lowercase();
    let plain = !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._:[]".contains(&b));
    (plain && ["http", "https"].contains(&scheme.as_str())).then_some((scheme, host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_stay_with_http_and_leave_the_token_behind() {
        let from = "https://hub.example/a/b";
        for (location, to, same) in [
            ("/c?d=https://x", "https://hub.example/c?d=https://x", true),
            ("https://HUB.example/c", "https://HUB.example/c", true),
            ("//cdn.example/c", "https://cdn.example/c", false),
            ("https://hub.example:444/c", "https://hub.example:444/c", false),
            ("https://hub.example.evil.example/c", "https://hub.example.evil.example/c", false),
        ] {
            assert_eq!(resolve_redirect(from, location).unwrap(), to);
            assert_eq!(parse_origin(from) == parse_origin(to), same, "{to}");
        }
        for location in [
            "",
            "c",
            "//",
            "http://hub.example/c",
            "file:///etc/passwd",
            "ftp://hub.example/c",
            "https://",
            "https://hub.example@evil.example/",
            "https://hub.example\\@evil.example/",
            "/a b",
            "/\u{e9}",
            "mailto:a",
        ] {
            assert!(resolve_redirect(from, location).is_err(), "{location}");
        }
        assert_eq!(resolve_redirect("http://hub.example", "/c").unwrap(), "http://hub.example/c");
    }
}
