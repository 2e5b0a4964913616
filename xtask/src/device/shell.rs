//! Runs scripts and programs in a device's shell, with quoting, exit codes, streams and Ctrl-C.

use super::Device;
use super::marker::{Marker, MarkerFilter, make_nonce};
use crate::command;
use crate::error::{Error, Result};
use rustix::fs::fstat;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Quotes a word for a POSIX shell.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// A script's output, and its exit code.
#[derive(Debug)]
pub struct Answer {
    pub code: u32,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    /// The stdout of a script; an error if it failed.
    pub fn ok(self, device: &dyn Device) -> Result<String> {
        if self.code == 0 {
            return Ok(self.stdout);
        }
        let why = command::last_line(&self.stderr).unwrap_or(format!("exit code {}", self.code));
        Err(Error::Device(format!("{}: {why}", device.name())))
    }
}

/// A program on a device.
pub struct DeviceProgram {
    /// Absolute path of its working directory.
    pub dir: String,
    pub environment: Vec<(&'static str, String)>,
    /// Relative to `dir`, or absolute.
    pub path: String,
    pub args: Vec<String>,
}

impl DeviceProgram {
    /// The shell command that runs the program with its environment.
    fn words(&self) -> String {
        let set = self.environment.iter().map(|(name, value)| quote(&format!("{name}={value}")));
        let words = [quote(&self.path)].into_iter().chain(self.args.iter().map(|a| quote(a)));
        let (set, words): (Vec<_>, Vec<_>) = (set.collect(), words.collect());
        format!("env {} $ANTIGRAVITY_EMULATOR {}", set.join(" "), words.join(" "))
    }

    /// A script that prints its process id, then becomes the program. The program does not run in the background: a
    /// shell would make it ignore Ctrl-C and close its stdin.
    fn script(&self, nonce: &str, input: Input) -> Result<String> {
        let start = match input {
            Input::Nothing => LIFELINE,
            Input::Forward => "exec \"$@\"",
        };
        let (dir, words) = (quote(&self.dir), self.words());
        check_script(format!("cd {dir} && sh -c 'echo \"{nonce} pid $$\"; {start}' sh {words}"))
    }
}

/// Returns a script if adb can send it.
fn check_script(script: String) -> Result<String> {
    if script.contains('\0') {
        return Err(Error::Usage("an argument contains a zero byte".into()));
    }
    // adb writes the length of a command in four hexadecimal digits.
    match script.len() {
        0..60_000 => Ok(script),
        n => {
            Err(Error::Usage(format!("the arguments have {n} bytes, over the maximum of 60000; use a file")))
        }
    }
}

/// The exit code of a program that ended well at a terminal: adb's is 0 where the connection breaks, too.
const ENDED_WELL: i32 = 254;

/// Runs a program at this terminal until it ends, with a terminal on the device; returns its exit code.
pub fn run_at_terminal(device: &dyn Device, program: &DeviceProgram) -> Result<u32> {
    // Ctrl-C is meant for the program, and may reach this process too.
    let ignored = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, ignored)
        .map_err(|e| Error::Failed(format!("cannot catch Ctrl-C: {e}")))?;
    // The trap keeps the shell alive, and is not the program's.
    let (dir, words) = (quote(&program.dir), program.words());
    let script = check_script(format!("trap : INT; cd {dir} && {words} || exit $?; exit {ENDED_WELL}"))?;
    let status = device.terminal(&script).status().map_err(|e| lost(device, &e.to_string()))?;
    match status.code() {
        Some(ENDED_WELL) => Ok(0),
        Some(code @ 1..) => Ok(code.unsigned_abs()),
        _ => Err(lost(device, "")),
    }
}

/// Script: starts a program without stdin. Our end of the script's stdin stays open as long as this process lives and
/// is connected. When it closes, the program is terminated, and killed a second later.
const LIFELINE: &str = "exec 3<&0; { cat <&3; kill -TERM $$ && sleep 1 && kill -KILL $$; } >/dev/null 2>&1 & \
                        exec \"$@\" </dev/null 3<&-";

/// A script that also prints its exit code.
fn with_end(script: &str, nonce: &str) -> String {
    format!("(\n{script}\n)\necho \"{nonce} exit $?\"")
}

/// Runs a script and returns its output.
pub fn capture(device: &dyn Device, script: &str) -> Result<Answer> {
    let nonce = make_nonce();
    capture_shell(device, device.shell(&with_end(script, &nonce)), &nonce)
}

/// Runs a script like [`capture`]; Ctrl-C in the terminal does not break the connection.
pub fn capture_apart(device: &dyn Device, script: &str) -> Result<Answer> {
    let nonce = make_nonce();
    let mut shell = device.shell(&with_end(script, &nonce));
    shell.process_group(0);
    capture_shell(device, shell, &nonce)
}

fn capture_shell(device: &dyn Device, mut shell: Command, nonce: &str) -> Result<Answer> {
    let out = shell.stdin(Stdio::null()).output();
    let out = out.map_err(|e| lost(device, &e.to_string()))?;
    let (mut stdout, mut marks, mut filter) = (Vec::new(), Vec::new(), MarkerFilter::new(nonce));
    filter.feed(&out.stdout, &mut stdout, &mut marks);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    match marks.last() {
        Some(&Marker::Exit(code)) => Ok(Answer { code, stdout, stderr }),
        _ => Err(lost(device, &stderr)),
    }
}

/// The error of a stream that ended before its script.
fn lost(device: &dyn Device, stderr: &str) -> Error {
    let why = command::last_line(stderr).map_or(String::new(), |line| format!(" ({line})"));
    Error::Device(format!("{}: the connection broke{why}; check the cable, then try again", device.name()))
}

/// Runs a program and returns its output.
pub fn capture_program(device: &dyn Device, program: &DeviceProgram) -> Result<Answer> {
    // The process id is not needed: it gets another nonce, whose line is then removed.
    let inner = make_nonce();
    let mut answer = capture(device, &program.script(&inner, Input::Forward)?)?;
    let start = answer
        .stdout
        .find(&inner)
        .map_or(0, |at| answer.stdout[at..].find('\n').map_or(answer.stdout.len(), |end| at + end + 1));
    answer.stdout.drain(..start);
    Ok(answer)
}

/// Runs a program with this process's streams until it ends. Ctrl-C interrupts it; a second one terminates it. Returns
/// its exit code, or 128 plus the number of the signal that ended it.
pub fn run_streamed(device: &dyn Device, program: &DeviceProgram, stdin: Input) -> Result<u32> {
    let stderr = if has_one_output() { Stderr::WithText } else { Stderr::Apart };
    stream_to(device, program, stdin, ProgramOutput { text: &mut put, stderr, started: &mut |_| {} })
}

/// True if this process's stdout and stderr are the same file, pipe or terminal.
pub fn has_one_output() -> bool {
    let facts = [fstat(std::io::stdout()), fstat(std::io::stderr())];
    matches!(facts, [Ok(out), Ok(err)] if (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino))
}

/// Receivers of a program's output in [`stream_to`].
pub struct ProgramOutput<'a> {
    /// Called with each piece of its stdout; an error ends the program.
    pub text: &'a mut dyn FnMut(&[u8]) -> std::io::Result<()>,
    pub stderr: Stderr,
    /// Called with its process id on the device.
    pub started: &'a mut dyn FnMut(u32),
}

/// Destination of a program's stderr.
#[derive(Clone, Copy)]
pub enum Stderr {
    /// To this process's stderr.
    Apart,
    /// Into the text, in order: two streams arrive in any order.
    WithText,
}

/// Runs a program like [`run_streamed`], with its output to callbacks.
pub fn stream_to(
    device: &dyn Device,
    program: &DeviceProgram,
    stdin: Input,
    output: ProgramOutput<'_>,
) -> Result<u32> {
    let exit_by_signal = exit_by_signal()?;
    exit_by_signal.store(false, Ordering::SeqCst);
    let ended = stream_with_signals(device, program, stdin, output);
    exit_by_signal.store(true, Ordering::SeqCst);
    ended
}

/// A flag: while it is set, SIGINT, SIGTERM and SIGHUP end this process, as by default. Handlers cannot be removed.
fn exit_by_signal() -> Result<&'static Arc<AtomicBool>> {
    static FLAG: OnceLock<Arc<AtomicBool>> = OnceLock::new();
    if let Some(flag) = FLAG.get() {
        return Ok(flag);
    }
    let flag = FLAG.get_or_init(|| Arc::new(AtomicBool::new(false)));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(flag))
            .map_err(|e| Error::Failed(format!("cannot catch Ctrl-C: {e}")))?;
    }
    Ok(flag)
}

fn stream_with_signals(
    device: &dyn Device,
    program: &DeviceProgram,
    stdin: Input,
    output: ProgramOutput<'_>,
) -> Result<u32> {
    let nonce = make_nonce();
    let script = program.script(&nonce, stdin)?;
    let script = match output.stderr {
        Stderr::Apart => script,
        Stderr::WithText => format!("exec 2>&1\n{script}"),
    };
    let mut command = device.shell(&with_end(&script, &nonce));
    // A process group of its own: Ctrl-C in a terminal must not cut the connection.
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command.stdin(Stdio::piped());
    let mut child = command.spawn().map_err(|e| lost(device, &e.to_string()))?;
    // Kept open to the end if the program has no stdin.
    let _lifeline = match stdin {
        Input::Forward => forward_stdin(child.stdin.take()),
        Input::Nothing => child.stdin.take(),
    };
    let (state, connection) = (&StreamState::default(), child.id());
    let ended = std::thread::scope(|scope| {
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]);
        let signals = signals.map_err(|e| Error::Failed(format!("cannot catch Ctrl-C: {e}")))?;
        let handle = signals.handle();
        let watcher = scope.spawn(move || forward_signals(device, state, signals, connection));
        let ended = copy_stdout(&mut child, (&nonce, state), output, || send_signal(device, state, "KILL"));
        state.ended.store(true, Ordering::SeqCst);
        handle.close();
        let _ = watcher.join();
        Ok(ended)
    })?;
    let _ = child.wait();
    match ended {
        Some(code) => Ok(code),
        None if state.closed.load(Ordering::SeqCst) => Ok(0),
        None => {
            // The program may still run where only the connection was lost.
            send_signal(device, state, "KILL");
            Err(lost(device, ""))
        }
    }
}

/// The stdin of a program.
#[derive(Clone, Copy, PartialEq)]
pub enum Input {
    Nothing,
    /// This process's stdin.
    Forward,
}

impl Input {
    /// Forwards a pipe or a file, and a terminal only to a program that talks with a person.
    pub fn for_program(talks: bool) -> Input {
        let piped = || std::fs::metadata("/dev/stdin").is_ok_and(|m| !m.file_type().is_char_device());
        if talks || piped() { Input::Forward } else { Input::Nothing }
    }
}

/// The state that the threads of [`run_streamed`] share.
#[derive(Default)]
struct StreamState {
    /// The program's process id on the device; 0 until it is known.
    pid: AtomicU32,
    ended: AtomicBool,
    /// The reader of our stdout has closed it.
    closed: AtomicBool,
}

/// Copies the program's stdout, unbuffered, until its end marker, whose exit code it returns, or the end of the stream.
fn copy_stdout(
    child: &mut Child,
    (nonce, state): (&str, &StreamState),
    output: ProgramOutput<'_>,
    stop: impl Fn(),
) -> Option<u32> {
    let (mut stdout, put) = (child.stdout.take().expect("stdout is piped"), output.text);
    let mut filter = MarkerFilter::new(nonce);
    let (mut piece, mut text, mut marks) = (vec![0; 64 << 10], Vec::new(), Vec::new());
    while let Some(n) = stdout.read(&mut piece).ok().filter(|&n| n > 0) {
        text.clear();
        filter.feed(&piece[..n], &mut text, &mut marks);
        for mark in marks.drain(..) {
            match mark {
                Marker::Pid(pid) => {
                    state.pid.store(pid, Ordering::SeqCst);
                    (output.started)(pid);
                }
                Marker::Exit(code) => {
                    let _ = put(&text);
                    let closed = state.closed.load(Ordering::SeqCst);
                    return Some(if closed { 0 } else { code });
                }
            }
        }
        if put(&text).is_err() && !state.closed.swap(true, Ordering::SeqCst) {
            stop();
        }
    }
    let _ = put(&filter.rest());
    None
}

fn put(text: &[u8]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text)?;
    out.flush()
}

/// Passes signals on: the first interrupts the program, the second terminates it, the third ends the connection.
fn forward_signals(device: &dyn Device, state: &StreamState, mut signals: Signals, connection: u32) {
    for (count, _) in signals.forever().enumerate() {
        // Right after the start the process id may not have arrived yet.
        for _ in 0..100 {
            if state.pid.load(Ordering::SeqCst) != 0 || state.ended.load(Ordering::SeqCst) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        match count {
            0 => send_signal(device, state, "INT"),
            1 => send_signal(device, state, "TERM"),
            _ => {
                let _ = Command::new("kill").arg(connection.to_string()).status();
            }
        }
    }
}

/// Sends the program a signal, if it has started. Process ids are not reused this soon.
fn send_signal(device: &dyn Device, state: &StreamState, signal: &str) {
    let pid = state.pid.load(Ordering::SeqCst);
    if pid != 0 {
        let mut shell = device.shell(&format!("kill -{signal} {pid}"));
        let quiet = shell.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let _ = quiet.status();
    }
}

/// Copies our stdin to the program in a thread that ends with this process.
fn forward_stdin(to: Option<ChildStdin>) -> Option<ChildStdin> {
    let mut to = to?;
    std::thread::spawn(move || {
        let mut piece = [0; 16 << 10];
        while let Some(n) = std::io::stdin().read(&mut piece).ok().filter(|&n| n > 0) {
            if to.write_all(&piece[..n]).and_then(|()| to.flush()).is_err() {
                break;
            }
        }
    });
    None
}

/// The text `killed by signal 9 (…)` for an exit code that stands for a signal.
pub fn signal_in(code: u32) -> Option<String> {
    let why = match code.checked_sub(128)? {
        2 | 13 => return None,
        4 => "SIGILL: an instruction that this CPU does not have",
        6 => "SIGABRT: it panicked",
        7 => "SIGBUS: a mapped file changed, or the storage failed",
        9 => "SIGKILL: the system ended it, most likely out of memory",
        11 => "SIGSEGV: a bug",
        15 => "SIGTERM",
        1..=64 => "a signal",
        _ => return None,
    };
    Some(format!("killed by signal {} ({why})", code - 128))
}

#[cfg(test)]
mod tests;
