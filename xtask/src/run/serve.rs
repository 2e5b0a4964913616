//! The server on a device: the port here that leads to it, its address, and a page that opens it.

use super::{finished, program};
use crate::args::{Args, Flag};
use crate::device::Device;
use crate::device::shell::{self, Input};
use crate::error::{Error, Result};
use crate::sh;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub const FLAGS: &[Flag] = &[
    Flag::valued(
        "--port",
        "N",
        "of `-- serve` on a phone: the port here that leads to it [the server's own]",
    ),
    Flag::switch("--open", "of `-- serve`: open its page ($BROWSER, xdg-open, open)"),
];
/// The server's port, where its flags name none.
const PORT: u16 = 8080;
/// Between looks whether it is there, and how long a look may take.
const PAUSE: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(5);

/// Whether the words start the server; what only it takes means nothing otherwise.
pub fn asked(args: &Args, theirs: &[String]) -> Result<bool> {
    let asked = theirs.first().is_some_and(|word| word == "serve");
    let flag = args.value("--port").map(|_| "--port").or_else(|| args.has("--open").then_some("--open"));
    match flag {
        Some(flag) if !asked => {
            Err(Error::Usage(format!("{flag}: belongs to `-- serve`, which is not there")))
        }
        _ => Ok(asked),
    }
}

/// Runs the server that is deployed in `dir` until it ends, and says on stdout where it is, once it answers.
pub fn run(device: &dyn Device, dir: &str, args: &Args, mut theirs: Vec<String>) -> Result<()> {
    let there = port(&mut theirs)?;
    let here = args.number("--port", 1..=65_535)?.and_then(|n| u16::try_from(n).ok()).unwrap_or(there);
    let _forward = device.forward(here, there)?;
    let program = program(device, dir, theirs);
    let over = AtomicBool::new(false);
    let code = std::thread::scope(|scope| {
        scope.spawn(|| announce(here, args.has("--open"), &over));
        // It ends with this process, whatever ends that: its stdin is a lifeline.
        let code = shell::stream(device, &program, Input::Nothing);
        over.store(true, Ordering::SeqCst);
        code
    })?;
    finished(device, code)
}

/// The port that the server's flags name. 0, which is any, becomes one that is free here: it has to be known before.
fn port(theirs: &mut [String]) -> Result<u16> {
    let Some(at) = theirs.iter().rposition(|word| word == "--port" || word.starts_with("--port=")) else {
        return Ok(PORT);
    };
    let (word, prefix) = if theirs[at] == "--port" { (at + 1, "") } else { (at, "--port=") };
    let number = theirs.get(word).and_then(|text| text.strip_prefix(prefix)?.parse().ok());
    match number {
        Some(0) => {
            let free = free_port()?;
            theirs[word] = format!("{prefix}{free}");
            Ok(free)
        }
        Some(port) => Ok(port),
        None => Err(Error::Usage("--port: use a number from 0 to 65535".into())),
    }
}

/// A port that nobody has here now.
pub fn free_port() -> Result<u16> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    free.map(|address| address.port()).map_err(|e| Error::Failed(format!("no free port: {e}")))
}

/// Waits until the server answers, then says where, and opens its page. A server that ended is not waited for.
fn announce(port: u16, open: bool, over: &AtomicBool) {
    while !over.load(Ordering::SeqCst) {
        if healthy(port).is_some() {
            let address = format!("http://127.0.0.1:{port}/");
            println!("{address}");
            if open {
                show(&address);
            }
            return;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether a server answers that it is ready.
fn healthy(port: u16) -> Option<()> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").ok()?;
    let mut reply = Vec::new();
    stream.take(1 << 16).read_to_end(&mut reply).ok()?;
    reply.starts_with(b"HTTP/1.1 200").then_some(())
}

/// Opens a page in the user's browser, which is not waited for.
fn show(address: &str) {
    let chosen = std::env::var("BROWSER").ok().filter(|name| !name.is_empty());
    let known = ["xdg-open", "open"].into_iter().find(|name| sh::on_path(name)).map(String::from);
    let Some(browser) = chosen.or(known) else {
        eprintln!("no program opens pages here: set BROWSER, or open {address} yourself");
        return;
    };
    let mut command = Command::new(&browser);
    command.arg(address).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if let Err(e) = command.spawn() {
        eprintln!("{browser} cannot be run: {e}; open {address} yourself");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<String> {
        line.split_whitespace().map(String::from).collect()
    }

    #[test]
    fn the_port_is_known_before_the_server_runs() {
        for (line, expected) in [
            ("serve", PORT),
            ("serve --port 99", 99),
            ("serve --port=98 -q", 98),
            ("serve --port 1 --port 2", 2),
        ] {
            let mut line = words(line);
            let before = line.clone();
            assert_eq!(port(&mut line).unwrap(), expected);
            assert_eq!(line, before);
        }
        for line in ["serve --port 0 -q", "serve --port=0"] {
            let mut line = words(line);
            let free = port(&mut line).unwrap();
            assert!(free > 0 && line.join(" ").contains(&free.to_string()), "{line:?}");
        }
        for line in ["serve --port", "serve --port x", "serve --port=70000"] {
            assert_eq!(port(&mut words(line)).unwrap_err().exit_code(), 2, "{line}");
        }
    }

    #[test]
    fn flags_of_the_server_belong_to_it() {
        let args = |line: &str| Args::parse(&words(line), &[FLAGS]).unwrap();
        for line in ["--open", "--port 9"] {
            assert!(asked(&args(line), &words("serve -q")).unwrap());
            assert_eq!(asked(&args(line), &words("chat")).unwrap_err().exit_code(), 2);
        }
        assert!(!asked(&args(""), &words("generate serve")).unwrap() && !asked(&args(""), &[]).unwrap());
    }
}
