//! Quoting, exit codes and broken streams of a shell.

use super::super::local::Local;
use super::*;

/// Words with characters that shells or terminals interpret.
const HOSTILE: &[&str] = &[
    "",
    " ",
    "two words",
    "it's",
    "'",
    "''\\''",
    "$HOME `id` $(id) ${x:-y}",
    "a;b&c|d>e<f",
    "line\nbreak\r\ttab",
    "*?[a]~!#",
    "\\",
    "\\n\\0",
    "-n",
    "--",
    "\"",
    "é 日本語 🦊",
    "\u{1b}[2J",
    "%s%n",
];

fn program(path: &str, args: Vec<String>) -> DeviceProgram {
    DeviceProgram { dir: "/".into(), environment: Vec::new(), path: path.into(), args }
}

#[test]
fn hostile_words_directories_and_settings_arrive_unchanged() {
    let device = Local::open();
    let args: Vec<String> = HOSTILE.iter().map(|w| w.to_string()).collect();
    let mut all = vec!["%s\\0".to_string()];
    all.extend(args);
    let answer = capture_program(&device, &program("/usr/bin/printf", all)).unwrap();
    let words: Vec<&str> = answer.stdout.split_terminator('\0').collect();
    assert_eq!(words, HOSTILE);
    for word in HOSTILE.iter().filter(|w| !w.is_empty()) {
        let dir = std::env::temp_dir().join(format!("xtask-shell-{}-{word}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let dir_text = dir.to_str().unwrap();
        let program = DeviceProgram {
            dir: dir_text.into(),
            environment: vec![("WORD", word.to_string())],
            ..program("/bin/sh", vec!["-c".into(), "printf '%s' \"$PWD|$WORD\"".into()])
        };
        let answer = capture_program(&device, &program).unwrap();
        std::fs::remove_dir(&dir).unwrap();
        assert_eq!(answer.stdout, format!("{dir_text}|{word}"));
    }
}

#[test]
fn exit_codes_and_signals_are_returned_and_a_broken_stream_is_an_error() {
    let device = Local::open();
    for (script, code) in [("true", 0), ("exit 3", 3), ("exit 255", 255), ("sh -c 'kill -9 $$'", 137)] {
        assert_eq!(capture(&device, script).unwrap().code, code, "{script}");
    }
    let at_terminal =
        |script: &str| run_at_terminal(&device, &program("/bin/sh", ["-c", script].map(String::from).into()));
    for (script, code) in [("true", 0), ("exit 3", 3), ("kill -9 $$", 137)] {
        assert_eq!(at_terminal(script).unwrap(), code, "{script}");
    }
    assert_eq!(at_terminal("kill -9 $PPID").unwrap_err().exit_code(), 5);
    let answer = capture(&device, "echo out; echo err >&2; exit 7").unwrap();
    assert_eq!((answer.stdout.as_str(), answer.stderr.as_str()), ("out\n", "err\n"));
    assert!(answer.ok(&device).unwrap_err().to_string().ends_with(": err"));
    let e = capture(&device, "kill -9 $$").unwrap_err();
    assert_eq!(e.exit_code(), 5);
    assert!(e.to_string().contains("connection broke"), "{e}");
}

#[test]
fn unsendable_arguments_are_refused_and_signals_are_explained() {
    for arg in ["a\0b".to_string(), "x".repeat(70_000)] {
        assert_eq!(program("x", vec![arg]).script("@", Input::Nothing).unwrap_err().exit_code(), 2);
    }
    assert!(signal_in(137).unwrap().contains("memory"));
    assert!(signal_in(132).unwrap().contains("instruction"));
    for code in [0, 1, 101, 130, 141, 255] {
        assert_eq!(signal_in(code), None, "{code}");
    }
}
