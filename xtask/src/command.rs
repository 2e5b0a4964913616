//! Other programs: each command is shown before it runs, and an error says which one failed and how.

use crate::device::shell::quote;
use crate::error::{Error, Result};
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The project's directory.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the project").into()
}

/// `cargo <words>` in the project's directory.
pub fn cargo(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words).current_dir(root());
    command
}

/// A word as one would type it in a shell.
pub fn quote_word(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.into() } else { quote(word) }
}

/// The path of a file as one would type it: short in the project's directory, absolute elsewhere.
pub fn quote_path(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or(path.into());
    let here = std::env::current_dir().ok().filter(|here| *here == root());
    let short = here.and_then(|here| path.strip_prefix(here).ok()).unwrap_or(&path);
    quote_word(&short.to_string_lossy())
}

/// Prints a command to type after a task, and what it is for.
pub fn print_next_step(what: &str, command: &str) {
    eprintln!("{:<14} {command}", format!("{what}:"));
}

/// Formats the command as one would type it, without the settings that only a linker needs.
pub fn show(command: &Command) -> String {
    let word = |w: &OsStr| quote_word(&w.to_string_lossy());
    let is_shown = |name: &str| !name.starts_with("CARGO_") && name != "ANTIGRAVITY_SHIPPED";
    let set = command.get_envs().filter_map(|(name, value)| {
        let (name, value) = (name.to_string_lossy(), word(value?));
        is_shown(&name).then(|| format!("{name}={value}"))
    });
    let program = Path::new(command.get_program());
    let name = match program.file_name() {
        Some(name) if name == "cargo" => "cargo".into(),
        _ => word(program.as_os_str()),
    };
    set.chain([name]).chain(command.get_args().map(word)).collect::<Vec<_>>().join(" ")
}

/// Runs with this process's stdout and stderr.
pub fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", show(command));
    let status = command.stdin(Stdio::null()).status().map_err(|e| cannot_start(command, e))?;
    check(command, status, "")
}

/// Commands of [`build`] with their times, in the order in which they ended.
static BUILDS: Mutex<Vec<(String, Duration)>> = Mutex::new(Vec::new());

/// Runs a command that builds, and notes how long it takes. In a log, failure is an error that carries the end of its
/// stderr; at a terminal, cargo shows its progress.
pub fn build(command: &mut Command) -> Result<()> {
    let began = Instant::now();
    let ended = if std::io::stderr().is_terminal() { run(command) } else { run_in_log(command) };
    BUILDS.lock().unwrap_or_else(PoisonError::into_inner).push((describe_build(command), began.elapsed()));
    ended
}

/// The words for cargo, and the model that is built.
fn describe_build(command: &Command) -> String {
    let model =
        command.get_envs().find(|(name, _)| *name == "ANTIGRAVITY_MODEL").and_then(|(_, value)| value);
    let model = model.and_then(|model| Path::new(model).file_name());
    let words = command.get_args().chain(model).map(|word| word.to_string_lossy().into_owned());
    words.filter(|word| word != "--config").collect::<Vec<_>>().join(" ").replace("profile.dev.package.", "")
}

/// Commands that have built so far, with their times.
pub fn build_times() -> Vec<(String, Duration)> {
    BUILDS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Runs and returns what it printed, whatever the exit status.
pub fn output(command: &mut Command) -> Result<Output> {
    command.stdin(Stdio::null()).output().map_err(|e| cannot_start(command, e))
}

/// Runs and returns its stdout; failure is an error that carries the end of its stderr.
pub fn stdout(command: &mut Command) -> Result<Vec<u8>> {
    let out = output(command)?;
    check(command, out.status, &last_lines(&String::from_utf8_lossy(&out.stderr), 12))?;
    Ok(out.stdout)
}

/// Runs, passing stdout through and showing each line of it to `look`.
pub fn stream(command: &mut Command, look: impl FnMut(&str)) -> Result<()> {
    eprintln!("$ {}", show(command));
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(|e| cannot_start(command, e))?;
    pass_lines(child.stdout.take().expect("stdout is piped"), std::io::stdout(), look);
    let status = child.wait().map_err(|e| cannot_start(command, e))?;
    check(command, status, "")
}

/// Runs, passing stderr through; failure is an error that carries its end.
fn run_in_log(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", show(command));
    let child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|e| cannot_start(command, e))?;
    let mut printed = String::new();
    pass_lines(child.stderr.take().expect("stderr is piped"), std::io::stderr(), |line| {
        printed.push_str(line);
        printed.push('\n');
    });
    let status = child.wait().map_err(|e| cannot_start(command, e))?;
    check(command, status, &last_lines(&printed, 12))
}

/// Writes the lines of `from` to `to` and shows each of them to `look`.
fn pass_lines(from: impl Read, mut to: impl Write, mut look: impl FnMut(&str)) {
    let mut lines = BufReader::new(from);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
        // A reader that has gone away must not stop the tests.
        let _ = to.write_all(&line);
        look(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
}

pub fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(program).is_file())
}

fn check(command: &Command, status: ExitStatus, stderr: &str) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let stderr = if stderr.is_empty() { String::new() } else { format!(":\n{stderr}") };
    Err(Error::Failed(format!("`{}` ended with {status}{stderr}", show(command))))
}

pub fn cannot_start(command: &Command, e: std::io::Error) -> Error {
    Error::Failed(format!("`{}` cannot be run: {e}", show(command)))
}

/// A line of another program that cannot steer a terminal, its end cut off where it is long.
pub fn one_line(line: &str) -> String {
    line.trim().chars().take(300).flat_map(char::escape_debug).collect::<String>().replace("\\'", "'")
}

/// The last line that says something, as [`one_line`].
pub fn last_line(text: &str) -> Option<String> {
    text.lines().rfind(|line| !line.trim().is_empty()).map(one_line)
}

/// The last `count` lines, indented.
pub fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(count);
    lines[from..].iter().map(|l| format!("    {l}")).collect::<Vec<_>>().join("\n")
}

/// Keeps this process's settings of the program from a command.
pub fn remove_settings(command: &mut Command) {
    for (key, _) in std::env::vars_os().filter(|(k, _)| k.to_string_lossy().starts_with("ANTIGRAVITY_")) {
        command.env_remove(key);
    }
}

/// Writes a program that only the system's shell understands. Another process does it: a program that this one has open
/// for writing could not be started as long as a child that another test has just forked has it open, too.
#[cfg(test)]
pub fn write_script(path: &std::path::Path, body: &str) {
    let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" > \"$0\" && chmod +x \"$0\"";
    run(Command::new("sh").args(["-c", write]).arg(path).arg(body)).unwrap();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_shown_as_typed_and_failures_name_them() {
        let mut c = Command::new("/opt/x/bin/cargo");
        c.args(["test", "two words"]).env("A", "max,sve=off").env("CARGO_ENCODED_RUSTFLAGS", "-L\x1fa");
        assert_eq!(show(&c), "A=max,sve=off cargo test 'two words'");
        let e = stdout(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(e.contains("exit status: 3") && e.contains("    why"), "{e}");
        let e = run(&mut Command::new("/nonexistent/program")).unwrap_err().to_string();
        assert!(e.contains("/nonexistent/program") && e.contains("cannot be run"), "{e}");
        let mut seen = Vec::new();
        stream(Command::new("sh").args(["-c", "echo a; echo b"]), |l| seen.push(l.to_string())).unwrap();
        assert_eq!(seen, ["a", "b"]);
    }
}
