//! The C library with programs in C: the example, and `tests/ffi/check.c` with and without AddressSanitizer.

use super::Outcome;
use super::python::count_promises;
use super::report::{Tally, skip_missing};
use crate::build::library::{SHARED, STATIC, build_tested_library};
use crate::error::{AtPath, Error, Result};
use crate::{build, command, header};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Loads that must not need more memory; fewer with AddressSanitizer, which keeps what is freed for a while.
const LOADS: [u32; 2] = [1000, 20];
/// Bytes before the model in the file of which a part is loaded: not a multiple of any alignment that a model wants.
const BEFORE_ASSET: usize = 4100;
/// Text of the example, as the program writes it.
const TEXT: [&str; 6] = ["generate", "-p", "Once upon a time", "-n", "40", "--temperature=0"];
const ANSWER: [&str; 6] =
    ["chat", "-p", "Tell me of a dog.", "--single-turn", "--num-tokens=40", "--temperature=0"];

/// Program, library with a model inside, and asset, built for tests.
pub struct BuiltLibrary {
    pub program: PathBuf,
    pub model: PathBuf,
    pub dir: PathBuf,
    /// The model as an app's asset.
    pub bundle: PathBuf,
    /// A file with the same from a byte on that is not aligned.
    asset: PathBuf,
}

pub fn run() -> Outcome {
    if !command::is_on_path("cc") {
        return Ok(skip_missing(("cc", "sudo apt-get install gcc libc6-dev")));
    }
    let built = build_everything()?;
    let mut tally = run_example(&built)?;
    for (loads, flags) in LOADS.into_iter().zip([&[][..], &["-fsanitize=address,undefined", "-g"]]) {
        let check = compile(&built, "tests/ffi/check.c", &format!("check{loads}"), flags)?;
        let mut run = Command::new(check);
        run.arg(&built.model).arg(&built.asset).arg(built.dir.join("session")).arg(loads.to_string());
        tally += count_promises("the C API", run.env("LD_LIBRARY_PATH", &built.dir))?;
    }
    Ok(tally)
}

/// Builds program, library and asset for the story model, into `target/library`.
pub fn build_everything() -> Result<BuiltLibrary> {
    let model = build::model_dir("story")?;
    let from = build_tested_library(&model)?;
    let program = build::build_tested(&model)?;
    let dir = build::target_dir().join("library");
    fs::create_dir_all(&dir).at(&dir)?;
    build::bundle_with(&program, &model, Some(&from.join(SHARED)), &dir.join(SHARED))?;
    let (bundle, asset) = (dir.join("story.bundle"), dir.join("asset"));
    build::bundle_with(&program, &model, None, &bundle)?;
    let bytes = [&[0; BEFORE_ASSET][..], &fs::read(&bundle).at(&bundle)?].concat();
    fs::write(&asset, bytes).at(&asset)?;
    Ok(BuiltLibrary { program, model, dir, bundle, asset })
}

/// Compiles a C program against the shared library; warnings are errors.
fn compile(built: &BuiltLibrary, source: &str, name: &str, flags: &[&str]) -> Result<PathBuf> {
    let out = built.dir.join(name);
    let mut cc = compiler("c");
    cc.arg(command::root().join(source)).args(flags).arg("-o").arg(&out);
    command::run(cc.arg("-L").arg(&built.dir).args(["-lantigravity", "-lpthread"]))?;
    Ok(out)
}

fn compiler(language: &str) -> Command {
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-O1", "-x", language]).arg("-I");
    cc.arg(header::header_path().with_file_name(""));
    cc
}

/// The example gives the program's text with either library, and the header is also C++.
fn run_example(built: &BuiltLibrary) -> Outcome {
    let expected = [TEXT, ANSWER].map(|words| {
        let mut program = Command::new(&built.program);
        command::stdout(program.args(words).arg("-q").arg("--model-path").arg(&built.model))
    });
    let [text, answer] = expected;
    // The example writes no line feed after the text.
    let text = text?;
    let expected = [text.strip_suffix(b"\n").unwrap_or(&text), &answer?].concat();
    let mut tally = Tally::default();
    let shared = compile(built, "include/example.c", "example", &[])?;
    let linked = built.dir.join("example-static");
    let mut cc = compiler("c");
    cc.arg(command::root().join("include/example.c")).args(["-x", "none"]);
    cc.arg(build::target_dir().join("debug").join(STATIC)).arg("-o").arg(&linked);
    command::run(cc.args(["-lpthread", "-ldl", "-lm"]))?;
    for (program, model) in [(&shared, None), (&linked, Some(&built.model))] {
        let mut run = Command::new(program);
        let written = command::stdout(run.args(model).env("LD_LIBRARY_PATH", &built.dir))?;
        tally.count(&example_name(program), compare_texts(&expected, &written));
    }
    let mut cpp = compiler("c++");
    tally.count("C++ takes the header", command::run(cpp.arg("-fsyntax-only").arg(header::header_path())));
    Ok(tally)
}

fn example_name(program: &Path) -> String {
    format!("{} writes the program's text", program.file_name().unwrap_or_default().to_string_lossy())
}

fn compare_texts(expected: &[u8], written: &[u8]) -> Result<()> {
    if expected == written {
        return Ok(());
    }
    let [expected, written] = [expected, written].map(String::from_utf8_lossy);
    Err(Error::Failed(format!("{written:?} is not {expected:?}")))
}
