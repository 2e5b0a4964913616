//! The draft program's process, with two threads that write to it and read from it, so that a caller never waits longer
//! than its time-out.

use super::protocol;
use files::{Error, Result};
use std::io::{BufReader, Write};
use std::path::Path;
use std::process::{Child as Process, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::thread;
use std::time::Duration;

/// Stack size of the threads that read and write, in bytes.
const STACK: usize = 128 << 10;
/// Maximum number of unread lines from the program, which sends one at a time.
const KEPT: usize = 2;

/// A running program, killed on drop.
pub struct DraftProcess {
    process: Process,
    requests: Sender<String>,
    lines: Receiver<Result<Vec<u8>>>,
}

/// Settings of the program.
#[derive(Debug, Clone, Copy)]
pub struct DraftSettings {
    /// Slots of each of its caches.
    pub slots: usize,
    /// Number of texts at once.
    pub sequences: usize,
    /// Number of its threads.
    pub threads: usize,
}

impl DraftProcess {
    /// Starts a program. Ctrl-C does not reach it; its input ends with this process.
    ///
    /// # Errors
    ///
    /// The system's.
    pub fn spawn(program: &Path, setting: DraftSettings) -> std::io::Result<Self> {
        let mut command = Command::new(program);
        let DraftSettings { slots, sequences, threads } = setting;
        command.arg("draft").args([format!("-c{slots}"), format!("-n{sequences}"), format!("-t{threads}")]);
        // The variable names this program's model, not the draft's.
        command.env_remove("ANTIGRAVITY_MODEL");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut process = command.spawn()?;
        let (mut stdin, stdout) =
            (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        let (requests, asked) = channel::<String>();
        let (hand, lines) = sync_channel(KEPT);
        // The reader notices when the pipe is closed.
        let write = move || {
            for request in asked {
                if stdin.write_all(request.as_bytes()).and_then(|()| stdin.flush()).is_err() {
                    break;
                }
            }
        };
        let read = move || {
            let mut input = BufReader::new(stdout);
            while let Some(line) = protocol::read_line(&mut input, protocol::MAX_ANSWER_BYTES).transpose() {
                let over = line.is_err();
                if hand.send(line).is_err() || over {
                    break;
                }
            }
        };
        let spawn = |name: &str| thread::Builder::new().name(name.into()).stack_size(STACK);
        let child = Self { process, requests, lines };
        spawn("to the draft").spawn(write)?;
        spawn("from the draft").spawn(read)?;
        Ok(child)
    }

    /// Sends a line.
    pub fn send_line(&self, line: String) {
        // If the thread is gone, so is the program, which `receive_line` reports.
        let _ = self.requests.send(line);
    }

    /// Receives its next line, if it comes in time.
    ///
    /// # Errors
    ///
    /// `Other`, with text that follows the program's name: it has ended, or sent something invalid.
    pub fn receive_line(&mut self, patience: Duration) -> Result<Option<Vec<u8>>> {
        match self.lines.recv_timeout(patience) {
            Ok(line) => line.map(Some).map_err(|e| Error::Other(format!("says {e}"))),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Error::Other(format!("has ended{}", self.exit_status())))
            }
        }
    }

    /// Describes how it ended, if that is known at once.
    fn exit_status(&mut self) -> String {
        // Its output closes a moment before the process ends.
        for _ in 0..20 {
            match self.process.try_wait() {
                Ok(Some(status)) => return format!(" ({status})"),
                Ok(None) => thread::sleep(Duration::from_millis(1)),
                Err(_) => break,
            }
        }
        String::new()
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Drop for DraftProcess {
    fn drop(&mut self) {
        // It writes no files that a kill could damage.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
