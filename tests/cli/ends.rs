//! Tests of failed writes and of signals: no crash, no lost output, no files left behind.

use crate::support::command::*;
use std::fs::File;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const ENDLESS: [&str; 6] = ["generate", "-n", "-1", "--ignore-eos", "-p", "Once"];

/// A device that is always full.
fn full() -> File {
    File::options().write(true).open("/dev/full").expect("a device")
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill").args([name, &child.id().to_string()]).status();
    assert!(status.expect("a kill program").success());
}

/// `ulimit`'s letter and value, then the program.
fn limited(limit: &str, args: &[&str]) -> Command {
    let words: Vec<String> =
        antigravity(args).into_std().get_args().map(|a| a.to_string_lossy().into_owned()).collect();
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("ulimit {limit} && exec \"$0\" \"$@\"")]).arg(binary()).args(words);
    shell.env_remove("HOME").stdin(Stdio::null());
    shell
}

/// Lists the names of a directory's entries, sorted.
fn names(temp: &TestDir) -> Vec<String> {
    let entries = std::fs::read_dir(&temp.0).expect("the folder");
    let mut names: Vec<String> =
        entries.map(|e| e.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn stderr_that_cannot_be_written_changes_nothing() {
    let reference = greedy().text();
    let ends = |args: &[&str]| {
        let output = antigravity(args).into_std().stderr(full()).output().expect("the binary starts");
        (output.status.code(), String::from_utf8(output.stdout).expect("UTF-8"))
    };
    let args = ["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12", "-v"];
    assert_eq!(ends(&args), (Some(0), reference + "\n"));
    assert_eq!(ends(&["generate", "--nonsense"]).0, Some(2));
    assert_eq!(ends(&["generate", "-m", "/no/such"]).0, Some(3));
    assert_eq!(ends(&["chat", "-st", "-n", "2", "-p", "Hi"]).0, Some(0));
    assert_eq!(ends(&["plan"]).0, Some(0));
}

#[test]
fn stdout_that_cannot_be_written_is_an_error_in_one_line() {
    for args in [&["--help"][..], &["--version"], &["generate", "--help"], &["plan"], &["inspect"]] {
        let said = run_command(antigravity(args).into_std().stdout(full()));
        assert_eq!(said.code, Some(1), "{args:?}: {}", said.err);
        assert_eq!(said.err, "error: cannot write to stdout: No space left on device (os error 28)\n");
    }
}

#[test]
fn a_pipe_that_does_not_wait_is_waited_for() {
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let flags = rustix::fs::fcntl_getfl(&writer).expect("flags");
    rustix::fs::fcntl_setfl(&writer, flags | rustix::fs::OFlags::NONBLOCK).expect("set");
    let temp = TestDir::new();
    let file = temp.write("text", "Once upon a time. ".repeat(12_000));
    let args = ["tokenize", "-f", &file];
    let expected = antigravity(args).text();
    assert!(expected.len() > 1 << 16, "more than a pipe holds");
    let mut child = antigravity(args).into_std().stdout(writer).spawn().expect("the binary starts");
    std::thread::sleep(Duration::from_millis(300));
    let mut found = String::new();
    reader.read_to_string(&mut found).expect("read");
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
    assert!(found == expected, "{} bytes of {}", found.len(), expected.len());
}

#[test]
fn a_session_is_saved_whatever_ends_the_text() {
    for signals in [None, Some(("-TERM", 15)), Some(("-HUP", 1))] {
        let temp = TestDir::new();
        let state = temp.path("state");
        let mut run = antigravity(ENDLESS).args(["--temp", "0", "--session", &state]).into_std();
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
        let mut out = child.stdout.take().expect("piped");
        let mut shown = vec![0; 40];
        out.read_exact(&mut shown).expect("some text");
        match signals {
            None => drop(out),
            Some((name, _)) => {
                signal(&child, name);
                out.read_to_end(&mut shown).expect("the rest");
            }
        }
        let status = child.wait().expect("it ends");
        let expected = signals.map_or((Some(0), None), |(_, number)| (None, Some(number)));
        assert_eq!((status.code(), status.signal()), expected);
        assert_eq!(names(&temp), ["state"]);
        // It continues after the shown text, as if it had not stopped.
        let rest =
            antigravity(["generate", "--temp", "0", "--ignore-eos", "-n", "20", "--session", &state]).text();
        let whole =
            antigravity(["generate", "-p", "Once", "--temp", "0", "--ignore-eos", "-n", "900"]).text();
        let (shown, whole) = (String::from_utf8(shown).expect("UTF-8"), whole.trim_end());
        assert!(whole.starts_with(&shown));
        let after = rest.trim_end();
        assert!(whole.find(after).is_some_and(|at| at + 1 >= shown.len()), "{shown:?} then {after:?}");
    }
}

#[test]
fn a_chat_is_saved_when_its_terminal_or_reader_goes() {
    for name in [None, Some("-TERM")] {
        let temp = TestDir::new();
        let state = temp.path("state");
        let args = ["chat", "--ignore-eos", "-n", "-1", "-p", "Hello", "--session", &state];
        let mut run = antigravity(args).into_std();
        let mut child = run.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary starts");
        let mut out = child.stdout.take().expect("piped");
        out.read_exact(&mut [0; 40]).expect("some text");
        if let Some(name) = name {
            signal(&child, name);
        }
        drop(out);
        let status = child.wait().expect("it ends");
        assert_eq!(status.code(), if name.is_some() { None } else { Some(0) });
        let saved = antigravity(["chat", "--session", &state]).stdin("/stats\n").run();
        mentions(&saved.err, &["messages: 1, tokens: "]);
    }
}

#[test]
fn a_reader_that_stopped_reading_does_not_keep_a_session_from_being_saved() {
    let temp = TestDir::new();
    let state = temp.path("state");
    let mut run =
        antigravity(ENDLESS).args(["-c", "2048", "--format", "jsonl", "--session", &state]).into_std();
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the binary starts");
    let mut out = child.stdout.take().expect("piped");
    out.read_exact(&mut [0; 40]).expect("some text");
    // The pipe fills up meanwhile.
    std::thread::sleep(Duration::from_millis(800));
    let began = Instant::now();
    signal(&child, "-TERM");
    assert_eq!(child.wait().expect("it ends").signal(), Some(15));
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(names(&temp), ["state"]);
}

#[test]
fn a_file_limit_is_an_error_and_keeps_the_old_file() {
    let temp = TestDir::new();
    let tokens = temp.write("tokens.json", format!("{:?}", [5; 40]));
    let out = temp.write("logits", "old");
    let args = ["logits", "--tokens", &tokens, "--out", &out];
    // In blocks of 512 bytes.
    let said = run_command(limited("-f 64", &args));
    assert_eq!(said.code, Some(1), "{}", said.err);
    mentions(&said.err, &["error: ", "logits: cannot write: File too large"]);
    assert_eq!(std::fs::read_to_string(&out).expect("the old file"), "old");
    assert_eq!(names(&temp), ["logits", "tokens.json"]);
    assert_eq!(antigravity(args).run().code, Some(0));
    assert!(std::fs::metadata(&out).expect("the new file").len() > 1000);
}

#[test]
fn what_cannot_be_written_is_said_before_anything_is_generated() {
    let temp = TestDir::new();
    let tokens = temp.write("tokens.json", "[5]");
    std::os::unix::fs::symlink(temp.file("nowhere"), temp.file("dangling")).expect("a link");
    let dangling = temp.path("dangling");
    let line = antigravity(["generate", "-p", "x", "--session", &dangling]).fails(2);
    mentions(&line, &["--session", "dangling", "dangling link"]);
    for command in [&["generate", "-p", "x"][..], &["chat", "-st", "-p", "x"]] {
        let line = antigravity(command).args(["--trace", "/no/such/folder/trace"]).fails(1);
        mentions(&line, &["/no/such/folder/trace: cannot write the trace: "]);
    }
    let line = antigravity(["logits", "--tokens", &tokens, "--out", "/no/such/folder/logits"]).fails(1);
    mentions(&line, &["/no/such/folder/logits: cannot write: "]);
    assert_eq!(names(&temp), ["dangling", "tokens.json"]);
}

#[test]
fn a_text_that_a_signal_ends_has_the_code_of_the_signal() {
    for (signals, code) in
        [(&["-INT"][..], Some(130)), (&["-INT", "-INT"], Some(130)), (&["-TERM"], None), (&["-HUP"], None)]
    {
        let mut child =
            antigravity(ENDLESS).into_std().stdout(Stdio::piped()).spawn().expect("the binary starts");
        let mut out = child.stdout.take().expect("piped");
        out.read_exact(&mut [0]).expect("some text");
        signals.iter().for_each(|name| signal(&child, name));
        let _ = out.read_to_end(&mut Vec::new());
        assert_eq!(child.wait().expect("it ends").code(), code, "{signals:?}");
    }
}

#[test]
fn a_pack_that_is_ended_leaves_nothing() {
    for name in ["-INT", "-TERM", "-HUP"] {
        let temp = TestDir::new();
        let out = temp.path("packed");
        let mut run = antigravity(["pack", "-q", "-t", "1", "--out", &out]).into_std();
        let mut child = run.stderr(Stdio::null()).spawn().expect("the binary starts");
        while names(&temp).is_empty() && child.try_wait().expect("a child").is_none() {
            std::thread::yield_now();
        }
        signal(&child, name);
        child.wait().expect("it ends");
        let left = names(&temp);
        assert!(left.is_empty() || left == ["packed"], "{name}: {left:?}");
    }
    // A disk that is full.
    let temp = TestDir::new();
    let said = run_command(limited("-f 64", &["pack", "-q", "--out", &temp.path("packed")]));
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert!(names(&temp).is_empty());
}

/// Runs in a process limited to one thread. The limit does not apply to root, so root becomes the user nobody.
fn alone(args: &[&str]) -> RunOutput {
    use std::os::unix::process::CommandExt;
    let mut run = antigravity(args).into_std();
    if rustix::process::getuid().is_root() {
        run.uid(65534).gid(65534);
    }
    let limit = || {
        let one = rustix::process::Rlimit { current: Some(1), maximum: Some(1) };
        rustix::process::setrlimit(rustix::process::Resource::Nproc, one).map_err(Into::into)
    };
    // SAFETY: the closure makes one system call, and takes no memory or lock.
    unsafe { run.pre_exec(limit) };
    run_command(run)
}

#[test]
fn where_no_thread_can_be_made_one_does_the_work_with_the_same_bits() {
    let args = ["generate", "--temp", "0", "-p", "Once upon a time", "-n", "12", "-t", "4"];
    let (reference, one) = (antigravity(args).run(), alone(&args));
    assert_eq!((one.code, one.out), (Some(0), reference.out), "{}", one.err);
    mentions(&one.err, &["1 threads"]);
    let chat = alone(&["chat", "-st", "-n", "2", "-p", "Hi"]);
    assert_eq!(chat.code, Some(0), "{}", chat.err);
    let bench = alone(&["bench", "-p", "4", "-n", "2", "-r", "1", "-t", "2"]);
    assert_eq!(bench.code, Some(0), "{}", bench.err);
}

/// Ten megabytes of words.
fn endless_prompt(temp: &TestDir) -> String {
    temp.write("prompt", "The dog ran to the park and saw a red ball. ".repeat(10_000_000 / 44))
}

#[test]
fn a_prompt_of_megabytes_is_refused_before_it_is_tokenised() {
    let temp = TestDir::new();
    let file = endless_prompt(&temp);
    for args in [&["generate", "-f", &file][..], &["generate", "-f", &file, "--session", &temp.path("state")]]
    {
        let line = antigravity(args).fails(2);
        mentions(
            &line,
            &["the prompt needs at least ", " tokens but the context has 2048; raise --max-seq-len"],
        );
    }
    assert_eq!(names(&temp), ["prompt"]);
}

#[test]
fn ctrl_c_ends_tokenising() {
    let temp = TestDir::new();
    let args = ["generate", "-q", "-n", "1", "--eviction-policy", "sliding", "-f", &endless_prompt(&temp)];
    let mut run = antigravity(args).into_std();
    let child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary starts");
    // It has loaded by then, and has not tokenised all.
    std::thread::sleep(Duration::from_millis(2500));
    signal(&child, "-INT");
    let said = RunOutput::new(child.wait_with_output().expect("it ends"));
    // Nothing of it was computed yet.
    assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(130), "", ""));
}
