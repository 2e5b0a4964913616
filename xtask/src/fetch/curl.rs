//! Downloads through `curl`, from an endpoint that may be slow, broken or hostile.

use crate::command;
use std::io::{self, Read, Write};
use std::process::{Command, Stdio};

/// A user's way to an endpoint.
pub struct Client {
    pub token: Option<String>,
    /// Seconds until a connection stands, and that less than [`LEAST`] bytes a second may come for.
    pub timeout: u32,
}

/// Why something does not come.
#[derive(Debug)]
pub enum Failure {
    /// An answer without it.
    Status(u16),
    /// A connection that cannot be had, ended early, or took too long.
    Connection(String),
    /// The server sends no parts of files.
    NoRange,
    /// An answer that no hub gives.
    Invalid(String),
    /// This machine's disk.
    Disk(io::Error),
}

pub type Outcome<T> = Result<T, Failure>;

/// Bytes a second.
const LEAST: &str = "300";
/// curl's exit codes: the server has no such range, it says an error.
const NO_RANGE: i32 = 33;
const HTTP_ERROR: i32 = 22;

impl Client {
    /// Hands on a body from byte `from` on, if it has no more than `most` bytes. Redirects are followed, the token stays
    /// with the endpoint's own host, port and protocol.
    pub fn get(
        &self,
        url: &str,
        (from, most): (u64, u64),
        mut take: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Outcome<()> {
        let seconds = self.timeout.to_string();
        let mut curl = Command::new("curl");
        // Variables for proxies hold; a `.curlrc`, which may turn checks off, does not.
        curl.args(["--disable", "--config", "-", "--silent", "--show-error", "--fail", "--globoff"]);
        curl.args(["--location", "--max-redirs", "5", "--proto", "=http,https", "--proto-default", "https"]);
        curl.args(["--proto-redir", if url.starts_with("http:") { "=http,https" } else { "=https" }]);
        curl.args(["--connect-timeout", &seconds, "--speed-limit", LEAST, "--speed-time", &seconds]);
        curl.args(["--write-out", "%{stderr}%{http_code}"]);
        if from > 0 {
            curl.args(["--continue-at", &from.to_string()]);
        }
        curl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let cannot = |e: io::Error| Failure::Connection(format!("curl cannot be run: {e}"));
        let mut child = curl.spawn().map_err(cannot)?;
        if let Some(mut stdin) = child.stdin.take() {
            // Words of a command are seen by everyone on the machine, so secrets come on stdin. Where it cannot be
            // written, curl has ended and says why.
            let _ = stdin.write_all(self.config(url)?.as_bytes());
        }
        let copied = copy(child.stdout.take().expect("stdout is piped"), most, &mut take);
        if copied.is_err() {
            let _ = child.kill();
        }
        let out = child.wait_with_output().map_err(cannot)?;
        copied?;
        let said = String::from_utf8_lossy(&out.stderr);
        let status =
            said.trim_end().rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|s| s.parse().ok());
        match (out.status.code(), status) {
            (Some(0), _) => Ok(()),
            (Some(HTTP_ERROR), Some(status)) => Err(Failure::Status(status)),
            (Some(NO_RANGE), _) => Err(Failure::NoRange),
            _ => Err(Failure::Connection(command::one_line(
                said.lines().next().unwrap_or("curl does not say why"),
            ))),
        }
    }

    /// curl's configuration, in which a line more would be an option more.
    fn config(&self, url: &str) -> Outcome<String> {
        let token = self.token.iter().map(|token| ("header", format!("Authorization: Bearer {token}")));
        let lines = [("url", url.to_string())].into_iter().chain(token).map(|(name, value)| {
            let is_plain = value.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
            // It may be secret.
            let hidden = || Failure::Invalid("its address has characters that none has".into());
            let value = value.replace('\\', "\\\\").replace('"', "\\\"");
            is_plain.then(|| format!("{name} = \"{value}\"\n")).ok_or_else(hidden)
        });
        lines.collect()
    }
}

fn copy(mut from: impl Read, most: u64, take: &mut impl FnMut(&[u8]) -> io::Result<()>) -> Outcome<()> {
    let (mut left, mut piece) = (most, vec![0; 1 << 16]);
    loop {
        let come = from.read(&mut piece).map_err(|e| Failure::Connection(e.to_string()))?;
        if come == 0 {
            return Ok(());
        }
        let announced = || format!("more comes than the {most} bytes that were announced or may come");
        left = left.checked_sub(come as u64).ok_or_else(|| Failure::Invalid(announced()))?;
        take(&piece[..come]).map_err(Failure::Disk)?;
    }
}
