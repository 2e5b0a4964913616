//! Runs scripts and programs in a device's shell: quoting, exit codes, streams, Ctrl-C.

use super::Device;
use super::marker::{Mark, Marks, nonce};
use crate::command;
use crate::error::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::{Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A word that a POSIX shell reads as exactly this text.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// What a script printed, and its exit code.
#[derive(Debug)]
pub struct Answer {
    pub code: u32,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    /// stdout of a script that has succeeded.
    pub fn ok(self, device: &dyn Device) -> Result<String> {
        if self.code == 0 {
            return Ok(self.stdout);
        }
        let why = command::last_line(&self.stderr).unwrap_or(format!("exit code {}", self.code));
        Err(Error::Device(format!("{}: {why}", device.name())))
    }
}

/// A program on a device.
pub struct Program {
    /// Absolute; where it starts.
    pub dir: String,
    pub environment: Vec<(&'static str, String)>,
    /// Relative to `dir`, or absolute.
    pub path: String,
    pub args: Vec<String>,
}

impl Program {
    /// The program with its environment, as words of a shell.
    fn words(&self) -> String {
        let set = self.environment.iter().map(|(name, value)| quote(&format!("{name}={value}")));
        let words = [quote(&self.path)].into_iter().chain(self.args.iter().map(|a| quote(a)));
        let (set, words): (Vec<_>, Vec<_>) = (set.collect(), words.collect());
        format!("env {} $ANTIGRAVITY_EMULATOR {}", set.join(" "), words.join(" "))
    }

    /// Says its process id, then becomes the program. The program is not put in the background: a shell
    /// would make it deaf to Ctrl-C and take its stdin away.
    fn script(&self, nonce: &str, input: Input) -> Result<String> {
        let start = match input {
            Input::Nothing => LIFELINE,
            Input::Forward => "exec \"$@\"",
        };
        let (dir, words) = (quote(&self.dir), self.words());
        sendable(format!("cd {dir} && sh -c 'echo \"{nonce} pid $$\"; {start}' sh {words}"))
    }
}

/// A script that reaches a device whole.
fn sendable(script: String) -> Result<String> {
    if script.contains('\0') {
        return Err(Error::Usage("an argument holds a zero byte, which no program can take".into()));
    }
    // adb writes the length of a command in four hexadecimal digits.
    match script.len() {
        0..60_000 => Ok(script),
        n => Err(Error::Usage(format!("the arguments have {n} bytes, a device takes 60000; use a file"))),
    }
}

/// Runs a program at this terminal until it ends, as if it ran here: the terminal there does what a terminal does.
/// Returns its exit code.
pub fn talk(device: &dyn Device, program: &Program) -> Result<u32> {
    // Where the program runs here, Ctrl-C reaches us too, and is for the program.
    let ignored = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(SIGINT, ignored)
        .map_err(|e| Error::Failed(format!("cannot catch Ctrl-C: {e}")))?;
    let script = sendable(format!("cd {} && exec {}", quote(&program.dir), program.words()))?;
    let status = device.terminal(&script).status().map_err(|e| lost(device, &e.to_string()))?;
    let code = status.code().or(status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u32::try_from(code).ok()).ok_or_else(|| lost(device, ""))
}

/// Starts a program that reads nothing. Our end of the script's stdin stays open for as long as we live and
/// are connected; when it closes, nobody waits for the program any more, and it is ended, a second later killed.
const LIFELINE: &str = "exec 3<&0; { cat <&3; kill -TERM $$ && sleep 1 && kill -KILL $$; } >/dev/null 2>&1 & \
                        exec \"$@\" </dev/null 3<&-";

/// The script, its end said by itself.
fn with_end(script: &str, nonce: &str) -> String {
    format!("(\n{script}\n)\necho \"{nonce} exit $?\"")
}

/// Runs a script and returns what it printed.
pub fn capture(device: &dyn Device, script: &str) -> Result<Answer> {
    let nonce = nonce();
    captured(device, device.shell(&with_end(script, &nonce)), &nonce)
}

/// [`capture`], whose connection Ctrl-C in a terminal does not cut.
pub fn capture_apart(device: &dyn Device, script: &str) -> Result<Answer> {
    let nonce = nonce();
    let mut shell = device.shell(&with_end(script, &nonce));
    shell.process_group(0);
    captured(device, shell, &nonce)
}

fn captured(device: &dyn Device, mut shell: Command, nonce: &str) -> Result<Answer> {
    let out = shell.stdin(Stdio::null()).output();
    let out = out.map_err(|e| lost(device, &e.to_string()))?;
    let (mut stdout, mut marks, mut filter) = (Vec::new(), Vec::new(), Marks::new(nonce));
    filter.feed(&out.stdout, &mut stdout, &mut marks);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    let stdout = String::from_utf8_lossy(&stdout).into_owned();
    match marks.last() {
        Some(&Mark::Exit(code)) => Ok(Answer { code, stdout, stderr }),
        _ => Err(lost(device, &stderr)),
    }
}

/// A stream that ended before its script did.
fn lost(device: &dyn Device, stderr: &str) -> Error {
    let why = command::last_line(stderr).map_or(String::new(), |line| format!(" ({line})"));
    Error::Device(format!("{}: the connection broke{why}; check the cable, then do it again", device.name()))
}

/// Runs a program and returns what it printed.
pub fn capture_program(device: &dyn Device, program: &Program) -> Result<Answer> {
    // Of the marks only the end matters; the process id goes to a nonce that is then cut out.
    let inner = nonce();
    let mut answer = capture(device, &program.script(&inner, Input::Forward)?)?;
    let start = answer
        .stdout
        .find(&inner)
        .map_or(0, |at| answer.stdout[at..].find('\n').map_or(answer.stdout.len(), |end| at + end + 1));
    answer.stdout.drain(..start);
    Ok(answer)
}

/// Runs a program with this process's streams until it ends. Ctrl-C reaches it; a second one ends it.
/// Its exit code is the result, 128 and the signal's number where a signal ended it.
pub fn stream(device: &dyn Device, program: &Program, stdin: Input) -> Result<u32> {
    stream_to(device, program, stdin, ProgramOutput { text: &mut put, started: &mut |_| {} })
}

/// Receivers of a program's output in [`stream_to`].
pub struct ProgramOutput<'a> {
    /// Gets its stdout, piece by piece; an error means that nobody reads it any more, which ends it.
    pub text: &'a mut dyn FnMut(&[u8]) -> std::io::Result<()>,
    /// Gets its process id there.
    pub started: &'a mut dyn FnMut(u32),
}

/// [`stream`] with stdout going elsewhere.
pub fn stream_to(
    device: &dyn Device,
    program: &Program,
    stdin: Input,
    output: ProgramOutput<'_>,
) -> Result<u32> {
    let exit_by_signal = exit_by_signal()?;
    exit_by_signal.store(false, Ordering::SeqCst);
    let ended = stream_caught(device, program, stdin, output);
    exit_by_signal.store(true, Ordering::SeqCst);
    ended
}

/// Whether a signal that asks to end ends this process, as it does where nobody catches it: catching cannot
/// be undone.
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

fn stream_caught(
    device: &dyn Device,
    program: &Program,
    stdin: Input,
    output: ProgramOutput<'_>,
) -> Result<u32> {
    let nonce = nonce();
    let mut command = device.shell(&with_end(&program.script(&nonce, stdin)?, &nonce));
    // A process group of its own: Ctrl-C in a terminal must not cut the connection.
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command.stdin(Stdio::piped());
    let mut child = command.spawn().map_err(|e| lost(device, &e.to_string()))?;
    // Kept open to the end where nothing goes through it.
    let _lifeline = match stdin {
        Input::Forward => forward_stdin(child.stdin.take()),
        Input::Nothing => child.stdin.take(),
    };
    let (state, connection) = (&State::default(), child.id());
    let ended = std::thread::scope(|scope| {
        let signals = Signals::new([SIGINT, SIGTERM, SIGHUP]);
        let signals = signals.map_err(|e| Error::Failed(format!("cannot catch Ctrl-C: {e}")))?;
        let handle = signals.handle();
        let watcher = scope.spawn(move || watch(device, state, signals, connection));
        let ended = copy_out(&mut child, (&nonce, state), output, || kill(device, state, "KILL"));
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
            kill(device, state, "KILL");
            Err(lost(device, ""))
        }
    }
}

/// What a program reads.
#[derive(Clone, Copy, PartialEq)]
pub enum Input {
    Nothing,
    /// This process's stdin.
    Forward,
}

impl Input {
    /// Input from a pipe or a file goes along; a terminal only where the program talks with a person.
    pub fn for_program(talks: bool) -> Input {
        let piped = || std::fs::metadata("/dev/stdin").is_ok_and(|m| !m.file_type().is_char_device());
        if talks || piped() { Input::Forward } else { Input::Nothing }
    }
}

/// What the two sides of [`stream`] know.
#[derive(Default)]
struct State {
    /// The program's process id there; 0 until it is known.
    pid: AtomicU32,
    ended: AtomicBool,
    /// Whoever read our stdout has gone.
    closed: AtomicBool,
}

/// Copies the program's stdout, unbuffered, until its end mark or the end of the stream.
fn copy_out(
    child: &mut Child,
    (nonce, state): (&str, &State),
    output: ProgramOutput<'_>,
    stop: impl Fn(),
) -> Option<u32> {
    let (mut stdout, put) = (child.stdout.take().expect("stdout is piped"), output.text);
    let mut filter = Marks::new(nonce);
    let (mut piece, mut text, mut marks) = (vec![0; 64 << 10], Vec::new(), Vec::new());
    while let Some(n) = stdout.read(&mut piece).ok().filter(|&n| n > 0) {
        text.clear();
        filter.feed(&piece[..n], &mut text, &mut marks);
        for mark in marks.drain(..) {
            match mark {
                Mark::Pid(pid) => {
                    state.pid.store(pid, Ordering::SeqCst);
                    (output.started)(pid);
                }
                Mark::Exit(code) => {
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

/// Hands signals on: the first as an interrupt, the next to end the program, a third ends the connection.
fn watch(device: &dyn Device, state: &State, mut signals: Signals, connection: u32) {
    for (count, _) in signals.forever().enumerate() {
        // Right after the start the process id is still on its way.
        for _ in 0..100 {
            if state.pid.load(Ordering::SeqCst) != 0 || state.ended.load(Ordering::SeqCst) {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        match count {
            0 => kill(device, state, "INT"),
            1 => kill(device, state, "TERM"),
            _ => {
                let _ = Command::new("kill").arg(connection.to_string()).status();
            }
        }
    }
}

/// Sends the program a signal, if it has started. Process ids are reused, but not this soon.
fn kill(device: &dyn Device, state: &State, signal: &str) {
    let pid = state.pid.load(Ordering::SeqCst);
    if pid != 0 {
        let mut shell = device.shell(&format!("kill -{signal} {pid}"));
        let quiet = shell.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let _ = quiet.status();
    }
}

/// Copies our stdin in a thread that ends with this process, or closes what it writes to.
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

/// `killed by signal 9 (…)` for an exit code that stands for a signal.
pub fn signal_in(code: u32) -> Option<String> {
    let why = match code.checked_sub(128)? {
        2 | 13 => return None,
        4 => "SIGILL: an instruction this CPU does not have",
        6 => "SIGABRT: it panicked",
        7 => "SIGBUS: a file it had mapped changed, or the storage failed",
        9 => "SIGKILL: the system ended it, most likely for want of memory",
        11 => "SIGSEGV: a bug",
        15 => "SIGTERM",
        1..=64 => "a signal",
        _ => return None,
    };
    Some(format!("killed by signal {} ({why})", code - 128))
}

#[cfg(test)]
mod tests;
