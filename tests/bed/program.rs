//! Starts the program and keeps what it said.

pub use super::temp::Temp;
use std::ffi::OsStr;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Where the binary is: as the environment says, else where it was built.
pub fn binary() -> PathBuf {
    let built = || env!("CARGO_BIN_EXE_antigravity").into();
    std::env::var_os("CARGO_BIN_EXE_antigravity").unwrap_or_else(built).into()
}

/// The binary without settings from the environment of the tests.
pub fn command<S: AsRef<OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(binary());
    // Without a home there is no place for state either.
    for name in ["ANTIGRAVITY_MODEL", "ANTIGRAVITY_SIMD", "ANTIGRAVITY_MEMORY_MIB", "XDG_STATE_HOME", "HOME"]
    {
        command.env_remove(name);
    }
    command.args(args).stdin(Stdio::null());
    command
}

#[track_caller]
pub fn said(output: Output) -> Said {
    let said = Said {
        code: output.status.code(),
        out: String::from_utf8(output.stdout).expect("stdout is UTF-8"),
        err: String::from_utf8(output.stderr).expect("stderr is UTF-8"),
    };
    for text in [&said.out, &said.err] {
        assert!(!text.contains("Options::"), "names a field instead of its flag: {text}");
    }
    said
}

pub fn run<S: AsRef<OsStr>>(args: &[S]) -> Said {
    said(command(args).output().expect("the binary starts"))
}

/// Runs with `input` on stdin.
pub fn run_with(args: &[&str], input: &str) -> Said {
    let mut command = command(args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    child.stdin.take().expect("piped").write_all(input.as_bytes()).expect("it reads its input");
    said(child.wait_with_output().expect("it ends"))
}

impl Said {
    /// A generated text, without the line feed that ends it.
    #[track_caller]
    pub fn text(&self) -> &str {
        let end = "the text ends with a line feed";
        if self.out.is_empty() { "" } else { self.out.strip_suffix('\n').expect(end) }
    }
}

/// Runs, expects success, returns what it printed; a generated text without the line feed that ends it.
#[track_caller]
pub fn text(args: &[&str]) -> String {
    let said = run(args);
    assert_eq!(said.code, Some(0), "{args:?}: {}", said.err);
    if args[0] == "generate" { said.text().into() } else { said.out }
}

/// Greedy text of a few words.
#[track_caller]
pub fn greedy(more: &[&str]) -> String {
    let mut args = vec!["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12"];
    args.extend(more);
    text(&args)
}

/// Runs, expects this exit code, nothing on stdout and one line on stderr; returns the line.
#[track_caller]
pub fn fails<S: AsRef<OsStr> + std::fmt::Debug>(args: &[S], code: i32) -> String {
    let said = run(args);
    assert_eq!(said.code, Some(code), "{args:?}: {}", said.err);
    assert_eq!(said.out, "", "{args:?}");
    assert_eq!(said.err.lines().count(), 1, "{args:?}: {}", said.err);
    let line = said.err.strip_prefix("error: ").unwrap_or_else(|| panic!("{args:?}: {}", said.err));
    line.trim_end().to_string()
}

#[track_caller]
pub fn mentions(line: &str, words: &[&str]) {
    words.iter().for_each(|w| assert!(line.contains(w), "{line:?} does not mention {w:?}"));
}

/// The bundled model's directory.
pub fn model() -> PathBuf {
    super::place::model()
}

impl Temp {
    /// Puts the bundled model's files here, but for `except`.
    pub fn model_without(&self, except: &str) -> String {
        for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
            if name != except {
                std::fs::copy(model().join(name), self.0.join(name)).expect("a copy");
            }
        }
        if except != "model.safetensors" {
            let weights = "model.safetensors";
            std::os::unix::fs::symlink(model().join(weights), self.0.join(weights)).expect("a link");
        }
        self.0.to_str().expect("UTF-8").to_string()
    }
}
