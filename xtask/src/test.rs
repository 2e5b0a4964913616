//! `cargo xtask test`: the parts that every change must pass; with `all`, all that CI runs. It ends with a table of the
//! seconds of parts and builds, and a line of counts.

mod aar;
pub mod arm;
mod cargo_test;
mod clients;
mod deps;
mod device;
mod larger;
mod library;
mod python;
mod real;
mod report;
pub mod runtimes;
mod same;
mod targets;
mod templates;
mod wheel;

use crate::error::{AtPath, Error, Result};
use crate::{build, command, json, parity, quality, tidy};
use cargo_test::{CargoTest, run_beside};
use clap::Args;
use report::{Report, Tally};
use std::fs;
use std::time::Instant;

#[derive(Args)]
pub struct TestArgs {
    /// Parts to run, `all` for those of CI, or `list` for their names [default: what every change needs]
    #[arg(value_name = "PART")]
    parts: Vec<String>,
}

/// Tests of a part that passed, failed and were skipped.
type Outcome = Result<Tally>;

/// When a part runs without being named.
#[derive(Clone, Copy, PartialEq)]
enum When {
    Always,
    /// Only with `all`, as in CI.
    All,
    /// Only by its name.
    Named,
}

struct Part {
    name: &'static str,
    about: &'static str,
    when: When,
    run: fn() -> Outcome,
}

use When::{All, Always, Named};

#[rustfmt::skip]
const PARTS: &[Part] = &[
    Part { name: "fmt", when: Always, about: "formatting", run: fmt },
    Part { name: "tidy", when: Always, about: "rules of the source files", run: || tidy::run().map(|()| Tally::ONE) },
    Part { name: "deps", when: Always, about: "dependencies: no C, licences that deny.toml allows, and each named in CRATES.md", run: deps::run },
    Part { name: "clippy", when: Always, about: "lints", run: clippy },
    Part { name: "cargo", when: Always, about: "unit and integration tests", run: cargo_tests },
    Part { name: "parity", when: Always, about: "logits and text equal to those of transformers", run: parity_with_reference },
    Part { name: "sliding", when: Always, about: "sliding-window layers and recurrent ones: caches and conversations of small models", run: sliding_window_layers },
    Part { name: "refusal", when: Always, about: "a model of an unsupported architecture is refused with a one-line error", run: another_architecture },
    Part { name: "assertions", when: Named, about: "this CPU's tests with Rust's pointer checks, as Arm's always are", run: with_pointer_checks },
    Part { name: "long", when: All, about: "a chat of 20,000 turns", run: long },
    Part { name: "kernels", when: Named, about: "every OpenCL kernel with every cache and format, which takes ten minutes to compile", run: every_kernel },
    Part { name: "larger", when: All, about: "a model of experts twice as large as memory writes the same text", run: larger::run },
    Part { name: "quality", when: All, about: "the cost of four-bit caches and eviction, as promised in the story model's README", run: quality_of_the_cache },
    Part { name: "library", when: All, about: "the C library: an example, 1,000 loads, threads, bad arguments, AddressSanitizer", run: library::run },
    Part { name: "wheel", when: All, about: "the Python package, installed by pip, gives the program's texts", run: wheel::run },
    Part { name: "aar", when: All, about: "the Android archive: its layout and libraries, and its class in a JVM", run: aar::run },
    Part { name: "clients", when: All, about: "the server with real clients: openai, anthropic, litellm, curl, its page in Chromium, and coding agents: Codex, qwen-code, opencode", run: clients::run },
    Part { name: "templates", when: All, about: "llama.cpp's chat templates render as in jinja2 with the settings of transformers", run: templates::run },
    Part { name: "real", when: All, about: "a real model: logits, text and perplexity as in transformers, and the same text on every path", run: real::run },
    Part { name: "oclgrind", when: All, about: "OpenCL kernels without accesses out of bounds, races and uninitialised reads", run: oclgrind },
    Part { name: "runtimes", when: All, about: "OpenCL with other runtimes: Intel's for CPUs, alone and beside PoCL, and rusticl if the distribution has it", run: runtimes::run },
    Part { name: "aarch64", when: All, about: "unit, golden and kernel tests on 64-bit Arm", run: arm::run },
    Part { name: "device", when: All, about: "deploy, run, chat and golden through adb, and a connection that breaks", run: device::run },
    Part { name: "static", when: All, about: "the static Arm binary writes the story on kernels of every page size", run: targets::on_arm },
    Part { name: "same", when: All, about: "builds are reproducible: two folders give the same bytes, and they run", run: same::run },
    Part { name: "size", when: All, about: "sizes of the binaries for Android with all features and with none, and it can load them", run: targets::sizes },
];

pub fn run(args: &TestArgs) -> Result<()> {
    if args.parts == ["list"] {
        for Part { name, about, when, .. } in PARTS {
            let note = match when {
                Always => "",
                All => " (with `all`, or by its name)",
                Named => " (by its name)",
            };
            println!("  {name:<10} {about}{note}");
        }
        return Ok(());
    }
    let all = args.parts == ["all"];
    if let Some(word) = args.parts.iter().find(|w| !all && PARTS.iter().all(|p| p.name != *w)) {
        return Err(Error::Usage(format!("no part `{word}`; `cargo xtask test list` lists them")));
    }
    let mut report = Report::new(std::env::var("CI").is_ok_and(|v| v == "true"));
    let is_wanted = |part: &&Part| {
        let by_default = if all { part.when != Named } else { args.parts.is_empty() && part.when == Always };
        by_default || args.parts.iter().any(|w| w == part.name)
    };
    if all {
        targets::build_early();
    }
    for part in PARTS.iter().filter(is_wanted) {
        eprintln!("\n== {}: {}", part.name, part.about);
        let began = Instant::now();
        report.add(part.name, (part.run)(), began.elapsed());
    }
    eprintln!("\n{}\n{}", report.times(&command::build_times()), report.failures());
    println!("{}", report.closing_line());
    if report.failed() { Err(Error::Failed("tests failed".into())) } else { Ok(()) }
}

/// `cargo …` for the bundled model, whatever model the user's shell is set to.
fn cargo(words: &[&str]) -> std::process::Command {
    let mut command = command::cargo(words);
    command.env("ANTIGRAVITY_MODEL", "story").env("ANTIGRAVITY_DRAFT", build::draft_program());
    command
}

fn fmt() -> Outcome {
    command::run(&mut cargo(&["fmt", "--all", "--check"])).map(|()| Tally::ONE)
}

fn clippy() -> Outcome {
    let deny = ["--", "--deny", "warnings"];
    let whole = ["clippy", "--workspace", "--all-targets"];
    // Together with xtask: then dependencies have the features of the whole workspace and are checked already.
    let least = [
        "clippy",
        "--package",
        "antigravity",
        "--package",
        "xtask",
        "--all-targets",
        "--no-default-features",
    ];
    command::build(cargo(&whole).args(deny))?;
    command::build(cargo(&least).args(deny))?;
    let library = ["clippy", "--package", "antigravity", "--lib", "--features", "ffi"];
    command::build(cargo(&library).args(deny)).map(|()| Tally::ONE)
}

/// Tests with many kernels to compile, one set for each cache type and format, which takes a device minutes.
const EVERY_KERNEL: [&str; 8] = [
    "gguf::all_formats_have_the_cpus_bits",
    "hybrid::device_switches_change_no_text_with_any_cache_and_policy",
    "kernels::attention::attention_has_the_cpus_bits_with_every_cache",
    "kernels::attention::heads_wider_than_a_work_group_have_the_cpus_bits",
    "kernels::formats::every_format_has_the_cpus_bits",
    "kernels::formats::variants_of_formats_have_the_cpus_bits",
    "model::a_long_context_has_the_cpus_bits",
    "variants::every_variant_gives_the_same_text",
];

/// Runs the device's tests and the others at the same time: the device's compiler uses only one core.
fn cargo_tests() -> Outcome {
    build::build_draft_program()?;
    CargoTest::new(&[]).build()?;
    let device = CargoTest::new(&["--test", "opencl"]).skip(&["oclgrind::"]).skip(&EVERY_KERNEL);
    run_beside(&device, || {
        let others = ["--lib", "--bins", "--test", "cli", "--test", "engine", "--test", "files"];
        let mut tally = CargoTest::new(&others).skip(&[LONG_CHAT]).skip(&real::STRINGS).run()?;
        tally += CargoTest::new(&["--doc"]).run()?;
        Ok(tally)
    })
}

/// A chat that takes minutes.
const LONG_CHAT: &str = "chat::twenty_thousand";

fn long() -> Outcome {
    let chat = CargoTest::new(&["--test", "cli"]).only(&["--ignored", "--nocapture", LONG_CHAT]);
    expect_tests(1, chat.run()?)
}

fn every_kernel() -> Outcome {
    let kernels = CargoTest::new(&["--test", "opencl"]).only(&["--exact"]).only(&EVERY_KERNEL);
    expect_tests(EVERY_KERNEL.len(), kernels.run()?)
}

/// Fails if another number of tests ran: one that was renamed must not be left out in silence.
fn expect_tests(named: usize, tally: Tally) -> Outcome {
    let ran = tally.total();
    if ran == named as u64 {
        return Ok(tally);
    }
    Err(Error::Failed(format!("{ran} tests ran, not {named}: see EVERY_KERNEL and LONG_CHAT")))
}

fn oclgrind() -> Outcome {
    CargoTest::new(&["--test", "opencl"]).only(&["oclgrind::"]).run()
}

fn parity_with_reference() -> Outcome {
    parity::check(&[])
}

/// Runs the tests of sliding-window layers, built for models that have them.
fn sliding_window_layers() -> Outcome {
    let mut tally = Tally::default();
    for (model, filters) in [
        ("m9-gemma3-270m-bf16", &["sliding_window::"][..]),
        ("m22-gemma4-e2b-bf16", &["sliding_window::", "batch::logits", "conversation::", "assistant::"]),
        ("m22b-gemma4-moe-bf16", &["batch::logits", "batch::five_hundred"]),
        ("m20n-qwen35-nested", &["conversation::", "draft::", "mtp::"]),
        ("m34-falconh1-bf16", &["batch::logits", "conversation::", "draft::"]),
    ] {
        let tests = CargoTest::new(&["--test", "engine"]).for_model(&build::model_dir(model)?);
        // Its reference is a forward pass of Gemma 3.
        let other = ["sliding_window::eviction_leaves"];
        let skipped: &[&str] = if model.contains("gemma4") { &other } else { &[] };
        tally += tests.only(filters).skip(skipped).run()?;
    }
    Ok(tally)
}

fn quality_of_the_cache() -> Outcome {
    let mut tally = Tally::default();
    for (promise, holds) in quality::promises()? {
        let broken = || Error::Failed("it does not hold".into());
        tally.count(&promise, if holds { Ok(()) } else { Err(broken()) });
    }
    Ok(tally)
}

/// Slow tests whose kernels are covered by others.
const WITHOUT_KERNELS_OF_THEIR_OWN: [&str; 3] = ["allocations::", "draft", "eviction::six_thousand_tokens"];

/// Runs the kernels' tests with checks that pointers stay within their allocation; the tests on Arm do so too.
fn with_pointer_checks() -> Outcome {
    let numeric = CargoTest::of_package("antigravity-numeric", &["--lib"]).with_pointer_checks();
    let engine = CargoTest::new(&["--test", "engine"]).with_pointer_checks();
    let mut tally = numeric.run()?;
    tally += engine.skip(&WITHOUT_KERNELS_OF_THEIR_OWN).run()?;
    Ok(tally)
}

/// Checks that the build refuses a model of an unsupported architecture.
fn another_architecture() -> Outcome {
    let dir = build::target_dir().join("unsupported");
    fs::create_dir_all(&dir).at(&dir)?;
    json::write(&dir.join("config.json"), &serde_json::json!({ "model_type": "rwkv", "hidden_size": 64 }))?;
    let mut build = build::unoptimised_command(&dir);
    eprintln!("$ {}", command::show(&build));
    let out = command::output(&mut build)?;
    let stderr = String::from_utf8_lossy(&out.stderr);
    match find_refusal(out.status.success(), &stderr) {
        Ok(line) => {
            eprintln!("refused as expected: {line}");
            Ok(Tally::ONE)
        }
        Err(problem) => {
            let stderr = command::last_lines(&stderr, 20);
            Err(Error::Failed(format!("`{}` {problem}:\n{stderr}", command::show(&build))))
        }
    }
}

/// The line with the reason why a build was refused.
fn find_refusal(success: bool, stderr: &str) -> std::result::Result<&str, &'static str> {
    if success {
        return Err("should have been refused");
    }
    if stderr.contains("panicked") {
        return Err("panicked instead of refusing");
    }
    let lines: Vec<&str> = stderr.lines().filter(|l| l.contains("model_type")).collect();
    match lines.as_slice() {
        [line] if line.starts_with("error: ") && line.contains("\"rwkv\"") => Ok(line),
        [] => Err("failed without naming `model_type`"),
        _ => Err("does not say in one `error: ` line that `model_type` is rwkv"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_one_line() {
        let good = "   Compiling x\nerror: x@0.1.0: field `model_type` is \"rwkv\"; supported: \"llama\"\nerror: build script logged errors";
        assert!(find_refusal(false, good).unwrap().starts_with("error: x@"));
        assert!(find_refusal(true, good).is_err());
        assert!(find_refusal(false, "error: no").is_err());
        assert!(find_refusal(false, &format!("{good}\n{good}")).is_err());
        assert!(find_refusal(false, &format!("thread 'main' panicked\n{good}")).is_err());
    }
}
