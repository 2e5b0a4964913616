//! `cargo xtask build`, and the builds for other models and targets that other tasks need.

use crate::args::{Args, Flag, Flags};
use crate::elf::{Elf, check};
use crate::error::{Error, Result};
use crate::targets::{ANDROID, TARGETS, is_static};
use crate::{android, cargo, sh, size, toolchain};
use files::hub;
use files::source::gguf::only_gguf;
use object::elf::PT_LOAD;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use crate::targets::{Features, host, target_dir};

/// Which model a task is about.
pub const MODEL: &[Flag] =
    &[Flag::valued("--model", "M", "a name under models/, a directory or a .gguf file [story]")];

pub const FLAGS: Flags = &[
    MODEL,
    &[
        Flag::valued("--target", "T", "the target triple to build for [this machine's]"),
        Flag::switch("--no-ndk", "link for Android without an NDK, also where there is one"),
        Flag::switch(
            "--bundle",
            "one file, too: the program with packed model, tokenizer and template inside",
        ),
    ],
];

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, FLAGS)?;
    args.no_rest()?;
    let model = args.value("--model").map(model_dir).transpose()?;
    let ndk = if args.has("--no-ndk") { android::Ndk::Never } else { android::Ndk::IfFound };
    let target = args.value("--target");
    let built = match target {
        Some(target) => release_for(target, model.as_deref(), ndk)?,
        None => shipped_for_host(model.as_deref())?,
    };
    let chosen = chosen_model(&args)?;
    let mut binary = place(&chosen, target);
    fs::create_dir_all(binary.parent().expect("a file in a folder")).map_err(|e| Error::at(&binary, e))?;
    fs::copy(&built, &binary).map_err(|e| Error::at(&binary, e))?;
    if args.has("--bundle") {
        let (host, program) = (host(), binary);
        binary = program.with_file_name(model_name(&chosen));
        bundle(target.unwrap_or(&host), &chosen, &program, &binary)?;
    }
    let file = fs::read(&binary).map_err(|e| Error::at(&binary, e))?;
    println!("{} {}", binary.display(), size::megabytes(file.len() as u64));
    if let Ok(elf) = Elf::parse(&file) {
        println!("{}", linked(&elf));
    }
    Ok(())
}

/// Where `build` leaves the program of a model, so that those of two models lie side by side.
fn place(model: &Path, target: Option<&str>) -> PathBuf {
    target_dir().join("models").join(model_name(model)).join(target.unwrap_or_default()).join("antigravity")
}

/// A model's name, without the ending of a file.
fn model_name(model: &Path) -> &OsStr {
    let gguf = model.extension().is_some_and(|e| e == "gguf");
    if gguf { model.file_stem() } else { model.file_name() }.unwrap_or_default()
}

/// Writes `out`: a program for a target with the model inside. A program of this machine makes it.
pub fn bundle(target: &str, model: &Path, program: &Path, out: &Path) -> Result<()> {
    let maker = if target == host() { program.into() } else { for_host(Some(model))? };
    bundle_by(&maker, model, program, out)?;
    fit_for(target, out.into()).map(|_| ())
}

/// [`bundle`], unchecked, by a program that runs here.
pub fn bundle_by(maker: &Path, model: &Path, program: &Path, out: &Path) -> Result<()> {
    let mut command = Command::new(maker);
    command.arg("bundle").arg("--model-path").arg(model).arg("--program").arg(program);
    sh::run(command.arg("--out").arg(out))
}

/// Set by tests that run the tasks of users: the program as tests have it suffices them, and is there already.
pub const TESTED: &str = "ANTIGRAVITY_TESTED";

/// A release build for a target and a model (without one: the one the user's shell is set to), linked as well
/// as this machine can. Returns the stripped binary, which is what a loader of that target expects.
pub fn for_target(target: &str, model: Option<&Path>) -> Result<PathBuf> {
    if target == host() {
        shipped_for_host(model)
    } else if std::env::var_os(TESTED).is_some() {
        tested_for(target, &model.map_or_else(|| model_dir("story"), |model| Ok(model.into()))?)
    } else {
        release_for(target, model, android::Ndk::IfFound)
    }
}

/// [`for_target`], saying whether an NDK may be used.
fn release_for(target: &str, model: Option<&Path>, ndk: android::Ndk) -> Result<PathBuf> {
    let build = build_command("dist", Features::Default, model);
    release_linked_for(shipped(build, &sh::root(), &target_dir())?, target, ndk)?;
    fit_for(target, target_dir().join(target).join("dist/antigravity"))
}

/// A release build with these features, without an NDK, in a folder of its own: others may run beside it.
pub fn release_aside(features: Features, target: &str, model: &Path) -> Result<PathBuf> {
    let aside = target_dir().join("aside");
    let mut cargo = build_command("dist", features, Some(model));
    cargo.env("CARGO_TARGET_DIR", &aside);
    release_linked_for(shipped(cargo, &sh::root(), &aside)?, target, android::Ndk::Never)?;
    fit_for(target, aside.join(target).join("dist/antigravity"))
}

/// Runs a build for a target.
fn linked_for(mut cargo: Command, target: &str, ndk: android::Ndk) -> Result<()> {
    cargo.args(["--target", target]);
    if let Some(note) = cargo::prepare(&mut cargo, target, ndk)? {
        eprintln!("{target}: {note}");
    }
    sh::run(&mut cargo)
}

/// [`linked_for`] of a release: one that panics ends at once, so nothing reads the tables of how to go on.
fn release_linked_for(mut cargo: Command, target: &str, ndk: android::Ndk) -> Result<()> {
    if target == ANDROID || is_static(target) {
        let script = sh::root().join("xtask/src/no_unwind.ld");
        let flags = ["-Clink-arg=-T".into(), format!("-Clink-arg={}", script.display())];
        toolchain::add_flags(&mut cargo, &flags);
    }
    linked_for(cargo, target, ndk)
}

/// The binary, if it is what a loader of the target expects.
pub fn fit_for(target: &str, binary: PathBuf) -> Result<PathBuf> {
    if TARGETS.contains(&target) {
        let file = fs::read(&binary).map_err(|e| Error::at(&binary, e))?;
        let elf = Elf::parse(&file).map_err(|e| Error::at(&binary, e))?;
        let problems = check::problems(target, &elf);
        if !problems.is_empty() {
            return Err(Error::at(&binary, format!("not fit for {target}: it {}", problems.join("; it "))));
        }
    }
    Ok(binary)
}

/// The release program for this machine.
pub fn for_host(model: Option<&Path>) -> Result<PathBuf> {
    if let (Some(_), Some(model)) = (std::env::var_os(TESTED), model) {
        return tested(model);
    }
    sh::run(&mut build_command("release", Features::Default, model))?;
    Ok(target_dir().join("release/antigravity"))
}

/// [`for_host`], for other machines like this.
fn shipped_for_host(model: Option<&Path>) -> Result<PathBuf> {
    if std::env::var_os(TESTED).is_some() {
        return for_host(model);
    }
    sh::run(&mut shipped(build_command("dist", Features::Default, model), &sh::root(), &target_dir())?)?;
    Ok(target_dir().join("dist/antigravity"))
}

/// Makes a build of the clone in `root`, with its results in `target`, the same bytes in every folder and for every
/// user: no path of this machine is left in it, and the program looks for its model beside itself.
pub fn shipped(mut cargo: Command, root: &Path, target: &Path) -> Result<Command> {
    let set = cargo.get_envs().find(|(name, _)| *name == "CARGO_HOME").and_then(|(_, home)| home);
    let home = set.map_or_else(cargo_home, PathBuf::from);
    let sysroot = sh::stdout(toolchain::rustc().args(["--print", "sysroot"]))?;
    let sysroot = String::from_utf8_lossy(&sysroot);
    // Where several fit, the last one counts.
    let paths = [
        (home.as_path(), "/cargo"),
        (Path::new(sysroot.trim()), "/rust"),
        (root, "/antigravity"),
        (target, "/target"),
    ];
    let flags = paths.map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
    toolchain::add_flags(&mut cargo, &flags);
    cargo.env("ANTIGRAVITY_SHIPPED", commit());
    Ok(cargo)
}

/// Where cargo keeps what it has downloaded.
pub fn cargo_home() -> PathBuf {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    home.unwrap_or_else(|| std::env::home_dir().unwrap_or_default().join(".cargo"))
}

/// The commit, with a plus where files differ from it; `unknown` outside of a repository.
fn commit() -> String {
    let git = |words: &[&str]| sh::stdout(Command::new("git").args(words).current_dir(sh::root()));
    let Ok(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_ok_and(|out| !out.is_empty());
    format!("{}{}", String::from_utf8_lossy(&commit).trim(), if changed { "+" } else { "" })
}

/// With a profile of Cargo.toml: `release`, which is fast to build, or `dist`, which is small.
fn build_command(profile: &str, features: Features, model: Option<&Path>) -> Command {
    let mut cargo = sh::cargo(&["build", "--profile", profile, "--package", "antigravity"]);
    if features == Features::None {
        cargo.arg(features.words());
    }
    if let Some(model) = model {
        cargo.env("ANTIGRAVITY_MODEL", bundled_name(model));
    }
    cargo
}

/// A bundled model by its name: the same build as without xtask, not another one.
fn bundled_name(model: &Path) -> &Path {
    model.strip_prefix(sh::root().join("models")).unwrap_or(model)
}

/// What a program is linked to, in a line.
fn linked(elf: &Elf) -> String {
    let loader = match &elf.interpreter {
        Some(loader) => format!("loaded by {loader}"),
        None => "static".into(),
    };
    let needs = match elf.needed.as_slice() {
        [] => "needs no library".into(),
        names => format!("needs {} ({} symbols)", names.join(" "), elf.imports.len()),
    };
    let align = elf.segments.iter().filter(|s| s.kind == PT_LOAD).map(|s| s.align).min().unwrap_or(0);
    format!("  {loader}; {needs}; segments aligned to {} KiB", align >> 10)
}

/// The model that the flags, else the environment, name.
pub fn chosen_model(args: &Args) -> Result<PathBuf> {
    let default = std::env::var("ANTIGRAVITY_MODEL").unwrap_or_else(|_| "story".into());
    model_dir(args.value("--model").unwrap_or(&default))
}

/// The absolute directory (or `.gguf` file) of a model: a name under `models/` or `tests/fixtures/models/`, a path, or
/// `org/name` of the Hugging Face cache.
pub fn model_dir(name: &str) -> Result<PathBuf> {
    let root = sh::root();
    let here = std::env::current_dir().unwrap_or_else(|_| root.clone());
    let given = hub::find(Path::new(name)).map_err(|e| Error::Usage(e.to_string()))?;
    let places = [
        root.join("models").join(name),
        root.join("tests/fixtures/models").join(name),
        hub::snapshot(&here.join(given)),
    ];
    let usable = |path: &PathBuf| {
        let whole = path.join("config.json").is_file() || (path.is_file() && path.extension().is_some());
        let only = || only_gguf(path).ok().flatten().filter(|_| path.is_dir());
        if whole { Some(path.clone()) } else { only() }
    };
    let found = places.iter().find_map(usable).ok_or_else(|| {
        Error::Usage(format!(
            "no model `{name}`: neither a directory with a config.json nor one of {}",
            bundled(&root.join("models")).join(", ")
        ))
    })?;
    fs::canonicalize(&found).map_err(|e| Error::at(&found, e))
}

fn bundled(models: &Path) -> Vec<String> {
    let entries = fs::read_dir(models).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The program of a model as tests have it: optimised but not whole, so that it is built soon.
pub fn tested(model: &Path) -> Result<PathBuf> {
    sh::run(&mut debug_build(model))?;
    Ok(debug_binary(&[]))
}

/// Where the program is that drafts for the story model in tests.
pub fn draft() -> PathBuf {
    place(Path::new("story-draft"), Some("tested"))
}

/// Builds it: a copy, as the next build replaces what this one makes.
pub fn build_draft() -> Result<()> {
    let (built, draft) = (checked(&model_dir("story-draft")?)?, draft());
    fs::create_dir_all(draft.parent().expect("a file in a folder")).map_err(|e| Error::at(&draft, e))?;
    // Not over one that may be running.
    let new = draft.with_extension("new");
    fs::copy(&built, &new).and_then(|_| fs::rename(&new, &draft)).map_err(|e| Error::at(&draft, e))
}

/// [`tested`] for another machine than this.
pub fn tested_for(target: &str, model: &Path) -> Result<PathBuf> {
    linked_for(debug_build(model), target, android::Ndk::IfFound)?;
    fit_for(target, debug_binary(&[target]))
}

/// The program of a model for checks that compute little: not optimised, and what does not know the model is that of
/// the tests. The story model's is the tests' own.
pub fn checked(model: &Path) -> Result<PathBuf> {
    if is_story(model) {
        return tested(model);
    }
    sh::run(&mut unoptimised(model))?;
    Ok(debug_binary(&[]))
}

/// Runs the example of the package that compares a model's cache with that of transformers.
pub fn compare_past(model: &Path) -> Result<()> {
    let mut build = unoptimised(model);
    sh::run(build.args(["--example", "past_key_values"]))?;
    let example = target_dir().join("debug/examples/past_key_values");
    sh::run(Command::new(example).arg(model))
}

/// [`checked`] for another machine than this.
pub fn checked_for(target: &str, model: &Path) -> Result<PathBuf> {
    linked_for(unoptimised(model), target, android::Ndk::IfFound)?;
    Ok(debug_binary(&[target]))
}

/// A build that is not optimised.
pub fn unoptimised(model: &Path) -> Command {
    let mut cargo = debug_build(model);
    not_optimised(&mut cargo);
    cargo
}

/// The package's tests for a model, built in a fifth of the time of optimised ones.
pub fn unoptimised_tests(mut tests: Command, model: &Path) -> Command {
    of_model(&mut tests, model);
    not_optimised(&mut tests);
    tests
}

fn not_optimised(cargo: &mut Command) {
    for package in MODEL_PACKAGES {
        cargo.args(["--config", &format!("profile.dev.package.{package}.opt-level=0")]);
    }
}

/// What is compiled again for each model.
const MODEL_PACKAGES: [&str; 2] = ["antigravity", "antigravity-model"];

fn debug_build(model: &Path) -> Command {
    let mut cargo = sh::cargo(&["build", "--package", "antigravity"]);
    of_model(&mut cargo, model);
    cargo
}

/// Cargo keeps one build of a package for each profile, so one model's would replace another's. A number of codegen
/// units of its own makes each a different one: all stay, and share what they depend on. The story model's is that of
/// the tests.
fn of_model(cargo: &mut Command, model: &Path) {
    if !is_story(model) {
        let units = 16 + number(model);
        for package in MODEL_PACKAGES {
            cargo.args(["--config", &format!("profile.dev.package.{package}.codegen-units={units}")]);
        }
    }
    cargo.env("ANTIGRAVITY_MODEL", bundled_name(model));
}

fn is_story(model: &Path) -> bool {
    model == sh::root().join("models/story")
}

/// What the last of these builds made, for a target or for this machine.
pub fn debug_binary(target: &[&str]) -> PathBuf {
    target_dir().join(target.concat()).join("debug/antigravity")
}

/// The place of a model among those that come with the project; others share the first.
fn number(model: &Path) -> usize {
    let dirs = ["models", "tests/fixtures/models", "tests/fixtures/gguf"];
    let mut all: Vec<PathBuf> = dirs
        .iter()
        .filter_map(|dir| fs::read_dir(sh::root().join(dir)).ok())
        .flat_map(|entries| entries.flatten().map(|e| e.path()))
        .filter(|path| path.is_dir() || path.extension().is_some_and(|e| e == "gguf"))
        .collect();
    all.sort();
    all.iter().position(|path| path == model).map_or(0, |at| at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_tests_have_builds_of_their_own() {
        let names = ["story", "m1-llama32-bf16", "m7-qwen3-bf16"];
        let numbers = names.map(|name| number(&model_dir(name).unwrap()));
        assert!(numbers.windows(2).all(|w| w[0] != w[1]) && !numbers.contains(&0), "{numbers:?}");
        assert_eq!(number(Path::new("/another")), 0);
    }

    #[test]
    fn models_are_found_by_name_and_path() {
        let story = model_dir("story").unwrap();
        assert!(story.is_absolute() && story.ends_with("models/story"));
        assert!(model_dir("m6-gpt2-f32").unwrap().ends_with("tests/fixtures/models/m6-gpt2-f32"));
        assert_eq!(model_dir(story.to_str().unwrap()).unwrap(), story);
        let gguf = std::env::temp_dir().join(format!("xtask-only-gguf-{}", std::process::id()));
        fs::create_dir_all(&gguf).unwrap();
        fs::write(gguf.join("x.gguf"), "").unwrap();
        assert_eq!(
            model_dir(gguf.to_str().unwrap()).unwrap(),
            fs::canonicalize(gguf.join("x.gguf")).unwrap()
        );
        fs::remove_dir_all(&gguf).unwrap();
        let e = model_dir("no-such-model").unwrap_err().to_string();
        assert!(e.contains("no-such-model") && e.contains("story"), "{e}");
    }
}
