//! The server on a device: the local port that is forwarded to it, its address, and its page in a browser.

use super::{check_exit, deployed_program};
use crate::command;
use crate::device::Device;
use crate::device::shell::{self, Input};
use crate::error::{Error, Result};
use clap::Args;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

#[derive(Args)]
pub struct ServeArgs {
    /// With `-- serve` on a phone: the local port that is forwarded to it [default: the server's own]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// With `-- serve`: open its page ($BROWSER, xdg-open, open)
    #[arg(long)]
    open: bool,
}

/// The server's default port.
const PORT: u16 = 8080;
/// Time between two polls, and the time-out of one.
const PAUSE: Duration = Duration::from_millis(100);
const TIMEOUT: Duration = Duration::from_secs(5);

impl ServeArgs {
    /// Refuses flags that need a server when none is started.
    pub fn check(&self, serves: bool) -> Result<()> {
        let flag = self.port.map(|_| "--port").or_else(|| self.open.then_some("--open"));
        match flag {
            Some(flag) if !serves => Err(Error::Usage(format!("{flag} requires `-- serve`"))),
            _ => Ok(()),
        }
    }
}

/// Runs the server that is deployed in `dir` until it ends, and prints its address once it answers.
pub fn run(device: &dyn Device, dir: &str, args: &ServeArgs, mut words: Vec<String>) -> Result<()> {
    let there = resolve_port(&mut words)?;
    let here = args.port.unwrap_or(there);
    let _forward = device.forward(here, there)?;
    let program = deployed_program(device, dir, words);
    let ended = AtomicBool::new(false);
    let code = std::thread::scope(|scope| {
        scope.spawn(|| announce(here, args.open, &ended));
        // The server ends when this process does: its stdin is then closed.
        let code = shell::run_streamed(device, &program, Input::Nothing);
        ended.store(true, Ordering::SeqCst);
        code
    })?;
    check_exit(device, code)
}

/// The port in the server's flags. Port 0, which means any, is replaced by one that is free here, as it must be known
/// now.
fn resolve_port(words: &mut [String]) -> Result<u16> {
    let Some(at) = words.iter().rposition(|word| word == "--port" || word.starts_with("--port=")) else {
        return Ok(PORT);
    };
    let (word, prefix) = if words[at] == "--port" { (at + 1, "") } else { (at, "--port=") };
    let number = words.get(word).and_then(|text| text.strip_prefix(prefix)?.parse().ok());
    match number {
        Some(0) => {
            let free = free_port()?;
            words[word] = format!("{prefix}{free}");
            Ok(free)
        }
        Some(port) => Ok(port),
        None => Err(Error::Usage("--port: use a number from 0 to 65535".into())),
    }
}

/// A port that is free on this machine now.
pub fn free_port() -> Result<u16> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    free.map(|address| address.port()).map_err(|e| Error::Failed(format!("no free port: {e}")))
}

/// Waits until the server answers, then prints its address and opens its page.
fn announce(port: u16, open: bool, ended: &AtomicBool) {
    while !ended.load(Ordering::SeqCst) {
        if check_health(port).is_some() {
            let address = format!("http://127.0.0.1:{port}/");
            println!("{address}");
            if open {
                open_page(&address);
            }
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Asks a server for its health: `Some` if it is ready.
fn check_health(port: u16) -> Option<()> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(TIMEOUT)).ok()?;
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").ok()?;
    let mut reply = Vec::new();
    stream.take(1 << 16).read_to_end(&mut reply).ok()?;
    reply.starts_with(b"HTTP/1.1 200").then_some(())
}

/// Opens a page in the user's browser without waiting for it.
fn open_page(address: &str) {
    let chosen = std::env::var("BROWSER").ok().filter(|name| !name.is_empty());
    let known = ["xdg-open", "open"].into_iter().find(|name| command::is_on_path(name)).map(String::from);
    let Some(browser) = chosen.or(known) else {
        eprintln!("no browser found: set BROWSER, or open {address} yourself");
        return;
    };
    let mut open = Command::new(&browser);
    open.arg(address).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Err(e) = open.spawn() {
        eprintln!("{browser} cannot be run: {e}; open {address} yourself");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_known_before_the_server_runs() {
        let resolved = |line: &str| {
            let mut words: Vec<String> = line.split_whitespace().map(String::from).collect();
            resolve_port(&mut words).map(|port| (port, words.join(" ")))
        };
        for (line, port) in [("serve", PORT), ("serve --port=98 -q", 98), ("serve --port 1 --port 2", 2)] {
            assert_eq!(resolved(line).unwrap(), (port, line.into()));
        }
        for line in ["serve --port 0 -q", "serve --port=0"] {
            let (free, words) = resolved(line).unwrap();
            assert!(free > 0 && words.contains(&free.to_string()), "{words}");
        }
        for line in ["serve --port", "serve --port x", "serve --port=70000"] {
            assert_eq!(resolved(line).unwrap_err().exit_code(), 2, "{line}");
        }
        let args: ServeArgs = crate::parse_args("--open").unwrap();
        assert!(args.check(true).is_ok() && args.check(false).is_err());
    }
}
