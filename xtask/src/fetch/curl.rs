//! Downloads through `curl` from an endpoint that may be slow, broken or hostile.

use crate::command;
use std::io::{self, Read, Write};
use std::process::{Command, Stdio};

/// The token and time-out of requests to an endpoint.
pub struct Client {
    pub token: Option<String>,
    /// Seconds that connecting may take, and that the speed may be below [`MIN_SPEED`].
    pub timeout: u32,
}

/// The reason why a download failed.
#[derive(Debug)]
pub enum Failure {
    /// An HTTP error status.
    Status(u16),
    /// A connection that failed, ended early or took too long.
    Connection(String),
    /// A server that does not send parts of files.
    NoRange,
    /// An answer that a hub would not give.
    Invalid(String),
    /// An error of this machine's disk.
    Disk(io::Error),
}

pub type Outcome<T> = Result<T, Failure>;

/// Minimum speed in bytes per second.
const MIN_SPEED: &str = "300";
/// Exit codes of curl: the server does not support ranges, it answers with an error.
const NO_RANGE: i32 = 33;
const HTTP_ERROR: i32 = 22;

impl Client {
    /// Passes a body from byte `from` on to `take`; an error if more than `most` bytes come. Redirects are followed;
    /// the token is sent only to the endpoint's own host, port and protocol.
    pub fn get(
        &self,
        url: &str,
        (from, most): (u64, u64),
        mut take: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> Outcome<()> {
        let seconds = self.timeout.to_string();
        let mut curl = Command::new("curl");
        // Proxy variables count; a `.curlrc`, which may turn checks off, does not.
        curl.args(["--disable", "--config", "-", "--silent", "--show-error", "--fail", "--globoff"]);
        curl.args(["--location", "--max-redirs", "5", "--proto", "=http,https", "--proto-default", "https"]);
        curl.args(["--proto-redir", if url.starts_with("http:") { "=http,https" } else { "=https" }]);
        curl.args(["--connect-timeout", &seconds, "--speed-limit", MIN_SPEED, "--speed-time", &seconds]);
        curl.args(["--write-out", "%{stderr}%{http_code}"]);
        if from > 0 {
            curl.args(["--continue-at", &from.to_string()]);
        }
        curl.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let cannot = |e: io::Error| Failure::Connection(format!("curl cannot be run: {e}"));
        let mut child = curl.spawn().map_err(cannot)?;
        if let Some(mut stdin) = child.stdin.take() {
            // Everyone on the machine can see a command's arguments, so secrets go through stdin. If writing fails,
            // curl has ended with an error.
            let _ = stdin.write_all(self.config(url)?.as_bytes());
        }
        let copied = copy_body(child.stdout.take().expect("stdout is piped"), most, &mut take);
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
                said.lines().next().unwrap_or("curl gave no reason"),
            ))),
        }
    }

    /// The configuration for curl. A value must not add a line, which would be another option.
    fn config(&self, url: &str) -> Outcome<String> {
        let token = self.token.iter().map(|token| ("header", format!("Authorization: Bearer {token}")));
        let lines = [("url", url.to_string())].into_iter().chain(token).map(|(name, value)| {
            let is_plain = value.bytes().all(|b| b.is_ascii_graphic() || b == b' ');
            // Without the value, which may be secret.
            let hidden = || Failure::Invalid("the address has invalid characters".into());
            let value = value.replace('\\', "\\\\").replace('"', "\\\"");
            is_plain.then(|| format!("{name} = \"{value}\"\n")).ok_or_else(hidden)
        });
        lines.collect()
    }
}

fn copy_body(mut from: impl Read, most: u64, take: &mut impl FnMut(&[u8]) -> io::Result<()>) -> Outcome<()> {
    let (mut left, mut piece) = (most, vec![0; 1 << 16]);
    loop {
        let come = from.read(&mut piece).map_err(|e| Failure::Connection(e.to_string()))?;
        if come == 0 {
            return Ok(());
        }
        let announced = || format!("more than the {most} bytes that were announced or are allowed");
        left = left.checked_sub(come as u64).ok_or_else(|| Failure::Invalid(announced()))?;
        take(&piece[..come]).map_err(Failure::Disk)?;
    }
}
