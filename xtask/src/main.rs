//! `cargo xtask <task>`: the project's only tool. The table below is the list of tasks.
#![forbid(unsafe_code)]
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]

mod android;
mod args;
mod bench;
mod build;
mod cargo;
mod completions;
mod deploy;
mod device;
mod elf;
mod error;
mod fetch;
mod fuzz;
mod golden;
mod json;
mod parity;
mod profile;
mod quality;
mod run;
mod runner;
mod sensors;
mod sh;
mod size;
mod synth;
mod table;
mod targets;
mod test;
mod tidy;
mod toolchain;

use args::{Flags, likeliest};
use error::{Error, Result};
use std::process::ExitCode;

struct Task {
    name: &'static str,
    arguments: &'static str,
    about: &'static str,
    flags: Flags,
    run: fn(&[String]) -> Result<()>,
}

const NONE: Flags = &[];

#[rustfmt::skip]
const TASKS: &[Task] = &[
    Task { name: "help", arguments: "[TASK]", flags: NONE, run: help,
           about: "this table, or the flags of a task" },
    Task { name: "test", arguments: "[PART…]", flags: NONE, run: test::run,
           about: "what every change must keep; `test all` does everything, `test list` names the parts" },
    Task { name: "fetch", arguments: "MODEL", flags: fetch::FLAGS, run: fetch::run,
           about: "bring a real model here: smollm2-135m (chats), gemma3-270m (base), or org/name[:file] of the Hugging Face hub" },
    Task { name: "parity", arguments: "[MODEL…]", flags: NONE, run: parity::run,
           about: "compare logits and text with the reference results of transformers, model by model" },
    Task { name: "golden", arguments: "[--bless] [--device D]", flags: golden::FLAGS, run: golden::run,
           about: "run the golden tests in release, or the golden set on a device; --bless rewrites the files" },
    Task { name: "deploy", arguments: "[--device D] [--model M]", flags: deploy::FLAGS, run: deploy::run,
           about: "build for a phone (D: adb, qemu, local; --serial S), pack the model, bring both there; --bundle: one file" },
    Task { name: "run", arguments: "[--device D] [-- COMMAND…]", flags: run::FLAGS, run: run::run,
           about: "run what is deployed there; a story where no command is given" },
    Task { name: "bench", arguments: "[serve] [--device D] [-- FLAG…]", flags: bench::FLAGS, run: bench::run,
           about: "speeds, starts, clocks and temperatures there; PEER=LLAMA_BENCH: beside llama.cpp; --count; serve: under load" },
    Task { name: "profile", arguments: "[--device D] [-- FLAG…]", flags: profile::FLAGS, run: profile::run,
           about: "a generation there as a page of charts and a Perfetto trace; -n N or --seconds S, --open" },
    Task { name: "quality", arguments: "[--model M] [--quick]", flags: quality::FLAGS, run: quality::run,
           about: "what KV types and eviction policies cost: perplexity, KL, recall as Markdown; --program F measures F" },
    Task { name: "runner", arguments: "PROGRAM [ARG…]", flags: NONE, run: runner::run,
           about: "run a test binary on the device of $ANTIGRAVITY_DEVICE; `cargo test --target …` calls it" },
    Task { name: "cargo", arguments: "COMMAND… --target T", flags: NONE, run: cargo::run,
           about: "a cargo command with the linker that `build` would use: `xtask cargo test --target T`, no NDK needed" },
    Task { name: "synth", arguments: "MODEL [--out DIR] [--seed N]", flags: synth::FLAGS, run: synth::run,
           about: "write a model of the real shapes with random weights to target/synth/MODEL" },
    Task { name: "build", arguments: "[--target T] [--model M] [--bundle]", flags: build::FLAGS, run: build::run,
           about: "release build; prints its path, its size and what it is linked to; --bundle: with the model inside" },
    Task { name: "completions", arguments: "[--out DIR]", flags: completions::FLAGS, run: completions::run,
           about: "write completions for bash, fish and zsh, and manual pages" },
    Task { name: "fuzz", arguments: "[--seconds S] [TARGET…]", flags: fuzz::FLAGS, run: fuzz::run,
           about: "run the fuzz targets of tests/fuzz, five minutes each; needs cargo-fuzz and a nightly compiler" },
    Task { name: "tidy", arguments: "", flags: NONE, run: tidy::run,
           about: "check the rules of the source files" },
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            if !matches!(e, Error::Program(_)) {
                eprintln!("error: {e}");
            }
            ExitCode::from(e.exit_code())
        }
    }
}

fn dispatch(words: &[String]) -> Result<()> {
    let Some((name, rest)) = words.split_first() else {
        return help(&[]);
    };
    if ["--help", "-h"].contains(&name.as_str()) {
        return help(&[]);
    }
    let task = task(name)?;
    if asks_for_help(rest) {
        return help(std::slice::from_ref(name));
    }
    (task.run)(rest)
}

fn task(name: &str) -> Result<&'static Task> {
    TASKS.iter().find(|t| t.name == name).ok_or_else(|| {
        let meant = likeliest(name, TASKS.iter().map(|t| t.name));
        let meant = meant.map_or(String::new(), |meant| format!("did you mean {meant}? "));
        Error::Usage(format!("no task `{name}`; {meant}`cargo xtask help` lists them"))
    })
}

/// Words after `--` are not ours.
fn asks_for_help(words: &[String]) -> bool {
    words.iter().take_while(|w| *w != "--").any(|w| w == "--help" || w == "-h")
}

fn help(words: &[String]) -> Result<()> {
    match words.first() {
        Some(name) => print!("{}", about(task(name)?)),
        None => {
            println!("cargo xtask <task>\n");
            for task in TASKS {
                let call = format!("{} {}", task.name, task.arguments);
                println!("  {call:<42} {}", task.about);
            }
            println!("\n`cargo xtask TASK --help` lists a task's flags.");
        }
    }
    Ok(())
}

/// A task and its flags.
fn about(task: &Task) -> String {
    let mut text = format!("cargo xtask {} {}\n\n{}\n", task.name, task.arguments, task.about);
    let flags: Vec<_> = task.flags.iter().copied().flatten().collect();
    if !flags.is_empty() {
        text += "\nFlags:\n";
    }
    for flag in flags {
        text += &format!("  {:<18} {}\n", format!("{} {}", flag.name, flag.value), flag.about);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_tasks_are_usage_errors() {
        let e = dispatch(&["frobnicate".into()]).unwrap_err();
        assert_eq!(e.exit_code(), 2);
        assert!(e.to_string().contains("frobnicate"), "{e}");
        let e = dispatch(&["biuld".into()]).unwrap_err().to_string();
        assert!(e.contains("did you mean build?"), "{e}");
    }

    #[test]
    fn help_of_a_task_has_its_flags_in_short_lines() {
        for task in TASKS {
            let text = about(task);
            assert!(text.lines().skip(2).all(|l| l.chars().count() <= 120), "{text}");
            assert!(task.flags.iter().copied().flatten().all(|f| text.contains(f.name)), "{text}");
            dispatch(&[task.name.into(), "--help".into()]).unwrap();
        }
        assert!(about(task("run").unwrap()).contains("--serial S"));
    }

    #[test]
    fn task_names_are_unique() {
        for (i, a) in TASKS.iter().enumerate() {
            assert!(TASKS[..i].iter().all(|b| a.name != b.name), "{}", a.name);
        }
    }
}
