//! Other programs that `fetch` waits for: shown while they run, ended by Ctrl-C, summed up in one line.

use crate::error::{Error, Result};
use crate::sh;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::Read;
use std::os::fd::AsFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Set by a signal that asks to end, so that what is half done can be removed first.
#[derive(Default)]
pub struct Stop(pub Arc<AtomicBool>);

impl Stop {
    /// Catches the signals for as long as this lives: catching cannot be undone, but later ones, and a second one, end
    /// the process.
    pub fn on_signals() -> Result<Stop> {
        let stop = Stop::default();
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop.0))
                .and_then(|_| flag::register(signal, Arc::clone(&stop.0)))
                .map_err(|e| Error::Failed(format!("cannot catch Ctrl-C: {e}")))?;
        }
        Ok(stop)
    }

    /// An error once a signal has come.
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::SeqCst) { Err(Error::Program(130)) } else { Ok(()) }
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Between looks at whether it has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Runs a program to its end; what it prints on stdout, e.g. its progress, goes to our stderr. Returns the status and
/// what it said on its stderr.
pub fn run(command: &mut Command, stop: &Stop) -> Result<(ExitStatus, String)> {
    let stdout = std::io::stderr().as_fd().try_clone_to_owned().map_err(|e| sh::cannot_start(command, e))?;
    command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| sh::cannot_start(command, e))?;
    let mut stderr = child.stderr.take().expect("stderr is piped");
    let reader = std::thread::spawn(move || {
        let mut said = Vec::new();
        let _ = stderr.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    });
    let status = wait(&mut child, stop)?;
    Ok((status, reader.join().unwrap_or_default()))
}

/// Waits for its end, or ends it.
fn wait(child: &mut Child, stop: &Stop) -> Result<ExitStatus> {
    loop {
        if let Err(e) = stop.check() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(e);
        }
        match child.try_wait() {
            Ok(Some(status)) => return Ok(status),
            Ok(None) => std::thread::sleep(PAUSE),
            Err(e) => return Err(Error::Failed(format!("a program that fetches is lost: {e}"))),
        }
    }
}
