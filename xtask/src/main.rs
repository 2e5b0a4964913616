//! `cargo xtask <task>`: the project's only tool. The table below is the list of tasks.
#![forbid(unsafe_code)]

mod android;
mod args;
mod build;
mod elf;
mod error;
mod golden;
mod json;
mod parity;
mod sh;
mod size;
mod synth;
mod test;
mod tidy;
mod toolchain;

use error::{Error, Result};
use std::process::ExitCode;

struct Task {
    name: &'static str,
    arguments: &'static str,
    about: &'static str,
    run: fn(&[String]) -> Result<()>,
}

const TASKS: &[Task] = &[
    Task { name: "help", arguments: "", about: "this table", run: help },
    Task {
        name: "test",
        arguments: "[PART…]",
        about: "everything that must hold before a change goes in; `test list` names the parts",
        run: test::run,
    },
    Task {
        name: "parity",
        arguments: "[MODEL…]",
        about: "compare logits and text with the reference results of transformers, model by model",
        run: parity::run,
    },
    Task {
        name: "golden",
        arguments: "[--bless]",
        about: "run the golden tests in release; --bless rewrites the expected files",
        run: golden::run,
    },
    Task {
        name: "synth",
        arguments: "MODEL [--out DIR] [--seed N]",
        about: "write a model of the real shapes with random weights to target/synth/MODEL",
        run: synth::run,
    },
    Task {
        name: "build",
        arguments: "[--target T] [--model M] [--no-ndk]",
        about: "release build; prints its path, its size and what it is linked to",
        run: build::run,
    },
    Task { name: "tidy", arguments: "", about: "check the rules of the source files", run: tidy::run },
];

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::from(e.exit_code())
        }
    }
}

fn dispatch(words: &[String]) -> Result<()> {
    let Some((name, rest)) = words.split_first() else {
        return help(&[]);
    };
    if ["--help", "-h"].contains(&name.as_str()) || rest.iter().any(|w| w == "--help" || w == "-h") {
        return help(&[]);
    }
    let task = TASKS.iter().find(|t| t.name == name);
    let task =
        task.ok_or_else(|| Error::Usage(format!("no task `{name}`; `cargo xtask help` lists them")))?;
    (task.run)(rest)
}

fn help(_: &[String]) -> Result<()> {
    println!("cargo xtask <task>\n");
    for task in TASKS {
        let call = format!("{} {}", task.name, task.arguments);
        println!("  {call:<42} {}", task.about);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_tasks_are_usage_errors() {
        let e = dispatch(&["frobnicate".into()]).unwrap_err();
        assert_eq!(e.exit_code(), 2);
        assert!(e.to_string().contains("frobnicate"), "{e}");
    }

    #[test]
    fn task_names_are_unique() {
        for (i, a) in TASKS.iter().enumerate() {
            assert!(TASKS[..i].iter().all(|b| a.name != b.name), "{}", a.name);
        }
    }
}
