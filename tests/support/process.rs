//! Tests that need a process of their own: one that dies, loads another library, or has memory that no other test
//! touches. They run a test of their binary as a child.

use std::process::{Command, Output};

/// Set in a child to what it is to do.
const JOB: &str = "ANTIGRAVITY_TEST_CHILD";

/// This binary, to run only the test `name`, which does its work because it has a [`job`].
pub fn child(name: &str, job: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a running test has a path"));
    command.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(JOB, job);
    command
}

/// Job of the child; `None` in an ordinary run.
pub fn job() -> Option<String> {
    std::env::var(JOB).ok()
}

/// Runs a child; its code, and what it said on both streams.
pub fn ended(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = command.output().expect("the child starts");
    (status.code(), String::from_utf8_lossy(&[stdout, stderr].concat()).into())
}

/// Runs `body`, the whole of the test `name`, in a process where nothing else runs.
#[track_caller]
pub fn run_alone(name: &str, body: impl FnOnce()) {
    if job().is_some() {
        return body();
    }
    let (code, said) = ended(&mut child(name, "alone"));
    assert!(code == Some(0) && said.contains("1 passed"), "{said}");
    eprintln!("{said}");
}
