//! Runs the program and keeps its output.

pub use super::paths::{binary, model};
pub use super::test_dir::TestDir;
use std::borrow::BorrowMut;
use std::ffi::OsStr;
use std::io::Write;
use std::process::{Command, Output, Stdio};

/// Settings of the tests' own environment that the program does not get. Without a home there is no place for state
/// either.
const UNSET: [&str; 5] =
    ["ANTIGRAVITY_MODEL", "ANTIGRAVITY_SIMD", "ANTIGRAVITY_MEMORY_MIB", "XDG_STATE_HOME", "HOME"];

/// One run of the program.
pub struct TestCommand {
    command: Command,
    input: Option<Vec<u8>>,
}

/// The program with these arguments.
pub fn antigravity<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> TestCommand {
    TestCommand::new(binary(), args)
}

/// Greedy text of a few words.
pub fn greedy() -> TestCommand {
    antigravity(["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12"])
}

impl TestCommand {
    /// A program, which may be a bundle, with these arguments.
    pub fn new<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, args: impl IntoIterator<Item = S>) -> Self {
        let mut command = Command::new(program);
        UNSET.iter().for_each(|name| _ = command.env_remove(name));
        command.args(args).stdin(Stdio::null());
        Self { command, input: None }
    }

    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Gives a text on stdin.
    pub fn stdin(mut self, input: impl AsRef<[u8]>) -> Self {
        self.input = Some(input.as_ref().to_vec());
        self
    }

    /// The command itself, for pipes and limits.
    pub fn into_std(self) -> Command {
        self.command
    }

    /// Runs it to its end.
    #[track_caller]
    pub fn run(mut self) -> RunOutput {
        let Some(input) = self.input.take() else { return run_command(&mut self.command) };
        let command = self.command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        child.stdin.take().expect("piped").write_all(&input).expect("it reads its input");
        RunOutput::new(child.wait_with_output().expect("it ends"))
    }

    /// Runs it, expects success, returns its stdout; of `generate` without the line feed that ends the text.
    #[track_caller]
    pub fn text(self) -> String {
        let args: Vec<_> = self.command.get_args().map(OsStr::to_owned).collect();
        let output = self.run();
        assert_eq!(output.code, Some(0), "{args:?}: {}", output.err);
        if args.first().is_some_and(|first| first == "generate") { output.text().into() } else { output.out }
    }

    /// Runs it, expects this exit code, nothing on stdout and one line on stderr; returns the line.
    #[track_caller]
    pub fn fails(self, code: i32) -> String {
        let args: Vec<_> = self.command.get_args().map(OsStr::to_owned).collect();
        let output = self.run();
        assert_eq!(output.code, Some(code), "{args:?}: {}", output.err);
        assert_eq!(output.out, "", "{args:?}");
        assert_eq!(output.err.lines().count(), 1, "{args:?}: {}", output.err);
        let line = output.err.strip_prefix("error: ").unwrap_or_else(|| panic!("{args:?}: {}", output.err));
        line.trim_end().to_string()
    }

    /// [`TestCommand::fails`] with a line that mentions these words.
    #[track_caller]
    pub fn fails_with(self, code: i32, words: &[&str]) {
        mentions(&self.fails(code), words);
    }
}

/// Runs a command, which may be a shell around the program, to its end.
#[track_caller]
pub fn run_command(mut command: impl BorrowMut<Command>) -> RunOutput {
    RunOutput::new(command.borrow_mut().output().expect("it starts"))
}

/// Exit code and output of a run.
pub struct RunOutput {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl RunOutput {
    #[track_caller]
    pub fn new(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
        let output = Self { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) };
        for text in [&output.out, &output.err] {
            assert!(!text.contains("Options::"), "names a field instead of its flag: {text}");
        }
        output
    }

    /// A generated text, without the line feed that ends it.
    #[track_caller]
    pub fn text(&self) -> &str {
        let end = "the text ends with a line feed";
        if self.out.is_empty() { "" } else { self.out.strip_suffix('\n').expect(end) }
    }
}

#[track_caller]
pub fn mentions(line: &str, words: &[&str]) {
    words.iter().for_each(|w| assert!(line.contains(w), "{line:?} does not mention {w:?}"));
}
