//! The server on a device: the local port that is forwarded to it, its address, and its page in a browser.

use super::{check_exit, deployed_program};
use crate::command;
use crate::device::Device;
use crate::device::shell::{self, Input, ProgramOutput, Stderr};
use crate::error::{Error, Result};
use clap::Args;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};

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

/// Runs the server that is deployed in `dir` until it ends. Its address there becomes the one here.
pub fn run(device: &dyn Device, dir: &str, args: &ServeArgs, mut words: Vec<String>) -> Result<()> {
    let there = resolve_port(&mut words)?;
    let here = args.port.unwrap_or(there);
    let _forward = device.forward(here, there)?;
    let program = deployed_program(device, dir, words);
    let (mut rest, mut announced) = (Vec::new(), false);
    let mut text = |piece: &[u8]| {
        rest.extend_from_slice(piece);
        while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = rest.drain(..=end).collect();
            let line = String::from_utf8_lossy(&line);
            let ready = if announced { None } else { rewrite_address(line.trim_end(), (there, here)) };
            announced |= ready.is_some();
            eprintln!("{}", ready.as_deref().unwrap_or(line.trim_end()));
            if ready.is_some() {
                announce(&format!("http://127.0.0.1:{here}/"), args.open)?;
            }
        }
        Ok(())
    };
    let output = ProgramOutput { text: &mut text, stderr: Stderr::WithText, started: &mut |_| {} };
    // The server ends when this process does: its stdin is then closed.
    let code = shell::stream_to(device, &program, Input::Nothing, output)?;
    eprint!("{}", String::from_utf8_lossy(&rest));
    check_exit(device, code)
}

/// The line with which the server says that it is ready, with its address here; `None` for any other line.
fn rewrite_address(line: &str, (there, here): (u16, u16)) -> Option<String> {
    let (before, address) = line.split_once("http://")?;
    let (_, after) = address.split_once(&format!(":{there}"))?;
    let after = after.trim_start_matches('/');
    Some(format!("{before}http://127.0.0.1:{here}/{after}"))
}

/// Prints the address on stdout, unless that is where the server's own line has just been printed; opens the page.
fn announce(address: &str, open: bool) -> std::io::Result<()> {
    if !shell::has_one_output() {
        writeln!(std::io::stdout(), "{address}")?;
    }
    if open {
        open_page(address);
    }
    Ok(())
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
        let ready = |line: &str| rewrite_address(line, (80, 8081));
        let line = "story at http://0.0.0.0:80: 4 slots of 4096 tokens";
        assert_eq!(ready(line).unwrap(), "story at http://127.0.0.1:8081/: 4 slots of 4096 tokens");
        assert_eq!(ready("http://127.0.0.1:80/").unwrap(), "http://127.0.0.1:8081/");
        assert_eq!(ready("see http://example.org"), None);
        let args: ServeArgs = crate::parse_args("--open").unwrap();
        assert!(args.check(true).is_ok() && args.check(false).is_err());
    }
}
