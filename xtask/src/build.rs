//! `cargo xtask build`, and the builds of other models and targets for other tasks.

pub mod aar;
pub mod library;
mod model;
pub mod wheel;
mod zip;

use crate::command::{print_next_step, quote_word};
use crate::elf::{Elf, find_problems};
use crate::error::{AtPath, Error, Result};
use crate::targets::{ANDROID, ARM_LINUX, Product, TARGETS, is_android, is_static};
use crate::{android, cargo, command, fetch, size, toolchain};
use clap::Args;
use files::model_dir::TEXT_FILES;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use crate::targets::{Features, host_triple, target_dir};
use model::is_story;
pub use model::{ModelArgs, bundled_name, has_template, is_weights, model_dir, model_name};

/// The profile of released programs, and its folder in the target directory.
const PROFILE: &str = "dist";
/// That of libraries, in which panics do not end the process.
const LIBRARY_PROFILE: &str = "dist-library";
/// Variable set by tests that run tasks: they use the test build of the program, which is built already.
pub const TESTED: &str = "ANTIGRAVITY_TESTED";

#[derive(Args)]
pub struct BuildArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The target triple to build for [default: this machine's]
    #[arg(long, value_name = "T")]
    target: Option<String>,
    /// Link for Android without an NDK, also where there is one
    #[arg(long)]
    no_ndk: bool,
    /// Also write one file: the program with packed model, tokenizer and template inside
    #[arg(long)]
    bundle: bool,
    /// Build the C library instead: libantigravity.so, libantigravity.a and antigravity.h
    #[arg(long)]
    lib: bool,
    /// Build a Python package with the C library and the model inside
    #[arg(long, conflicts_with_all = ["lib", "bundle"])]
    wheel: bool,
    /// Build an Android archive: the C library for phones and the emulator, and a class for Java and Kotlin
    #[arg(long, conflicts_with_all = ["lib", "wheel", "target"])]
    aar: bool,
}

pub fn run(args: &BuildArgs) -> Result<()> {
    let model = args.model.model.as_deref().map(model_dir).transpose()?;
    let ndk = if args.no_ndk { android::NdkUse::Never } else { android::NdkUse::IfFound };
    if args.lib || args.wheel || args.aar {
        return run_library(args, ndk);
    }
    let built = match &args.target {
        Some(target) => release_for(target, model.as_deref(), ndk)?,
        None => portable_release(model.as_deref())?,
    };
    let chosen = args.model.dir()?;
    let mut binary = output_path(&chosen, args.target.as_deref());
    let dir = binary.parent().expect("a file in a folder").to_path_buf();
    fs::create_dir_all(&dir).at(&dir)?;
    fs::copy(&built, &binary).at(&binary)?;
    link_model_files(&chosen, &dir)?;
    if args.bundle {
        let (host, program) = (host_triple(), binary);
        binary = program.with_file_name(model_name(&chosen));
        write_bundle(args.target.as_deref().unwrap_or(&host), &chosen, &program, &binary)?;
    }
    let file = fs::read(&binary).at(&binary)?;
    println!("{} {}", binary.display(), size::megabytes(file.len() as u64));
    if let Ok(elf) = Elf::parse(&file) {
        println!("{}", elf.describe_linking());
    }
    print_next_steps(args, &chosen, &binary);
    Ok(())
}

/// Builds the library, and what has it inside.
fn run_library(args: &BuildArgs, ndk: android::NdkUse) -> Result<()> {
    let (model, host) = (args.model.dir()?, host_triple());
    if args.aar {
        return run_archive(args, &model, ndk);
    }
    let target = args.target.as_deref().unwrap_or(&host);
    let dir = library::build_library(&model, args.target.as_deref(), ndk)?;
    if args.bundle {
        library::bundle_shared(&model, &dir)?;
    }
    if args.wheel {
        let wheel = wheel::write_wheel(&model, &dir, target)?;
        print_size(&wheel)?;
    }
    Ok(())
}

/// Builds the Android archive, with the model as an asset where that is asked for.
fn run_archive(args: &BuildArgs, model: &Path, ndk: android::NdkUse) -> Result<()> {
    let dir = output_path(model, None).with_file_name("aar");
    fs::create_dir_all(&dir).at(&dir)?;
    let libraries = aar::build_libraries(model, ndk)?;
    let asset = dir.join(format!("{}.bundle", model_name(model)));
    let asset = args.bundle.then_some(asset.as_path());
    if let Some(asset) = asset {
        bundle_with(&build_for_host(Some(model))?, model, None, asset)?;
    }
    print_size(&aar::pack_aar(model, &libraries, asset, &dir)?)
}

/// Prints a file that was built, and its size.
fn print_size(file: &Path) -> Result<()> {
    println!("{} {}", file.display(), size::megabytes(fs::metadata(file).at(file)?.len()));
    Ok(())
}

/// Links a model's files beside its program, which looks for them there.
fn link_model_files(model: &Path, dir: &Path) -> Result<()> {
    let entries = fs::read_dir(model).into_iter().flatten().flatten().map(|entry| entry.path());
    let in_dir =
        entries.filter(|file| is_weights(file) || TEXT_FILES.iter().any(|text| file.ends_with(text)));
    for file in in_dir.chain(model.is_file().then(|| model.into())) {
        let link = dir.join(file.file_name().expect("a file has a name"));
        if link.is_symlink() {
            fs::remove_file(&link).at(&link)?;
        }
        if !link.exists() {
            std::os::unix::fs::symlink(&file, &link).at(&link)?;
        }
    }
    Ok(())
}

/// Prints the commands that use a program that was just built.
fn print_next_steps(args: &BuildArgs, model: &Path, binary: &Path) {
    let words = args.model.words();
    match args.target.as_deref() {
        _ if fetch::find_fetch_command(model).is_some() => {
            let name = quote_word(&model_name(model));
            print_next_step("its weights", &format!("cargo xtask fetch {name}"));
        }
        Some(ANDROID) => {
            let task = format!("cargo xtask deploy{words} && cargo xtask run{words}");
            print_next_step("on a phone", &task);
        }
        Some(target) if target != host_triple() && !args.bundle => {
            let task = format!("cargo xtask build{words} --target {target} --bundle");
            print_next_step("as one file", &task);
        }
        _ => {
            let program = command::quote_path(binary);
            print_next_step("now a text", &format!("{program} --prompt 'Once upon a time'"));
            if has_template(model) {
                print_next_step("a chat", &format!("{program} chat"));
            }
        }
    }
}

/// The path of the program that `build` makes for a model and a target.
fn output_path(model: &Path, target: Option<&str>) -> PathBuf {
    target_dir().join("models").join(model_name(model)).join(target.unwrap_or_default()).join("antigravity")
}

/// Writes a bundle to `out`, the program for a target with the model inside, by a program of this machine.
pub fn write_bundle(target: &str, model: &Path, program: &Path, out: &Path) -> Result<()> {
    let maker = if target == host_triple() { program.into() } else { build_for_host(Some(model))? };
    bundle_with(&maker, model, Some(program), out)?;
    check_loadable(target, out.into()).map(drop)
}

/// Writes a bundle by `maker`, a program of this machine, and does not check it. Without a program it is an app's asset.
pub fn bundle_with(maker: &Path, model: &Path, program: Option<&Path>, out: &Path) -> Result<()> {
    let mut bundle = Command::new(maker);
    bundle.arg("bundle").arg("--model-path").arg(model);
    match program {
        Some(program) => bundle.arg("--program").arg(program),
        None => bundle.arg("--no-program"),
    };
    command::run(bundle.arg("--out").arg(out))
}

/// Builds a release for a target and a model (by default the one of the environment) with the best linker on this
/// machine. Returns the path of the stripped binary.
pub fn build_for_target(target: &str, model: Option<&Path>) -> Result<PathBuf> {
    if target == host_triple() {
        portable_release(model)
    } else if is_tested() {
        build_tested_for(target, &model.map_or_else(|| model_dir("story"), |model| Ok(model.into()))?)
    } else {
        release_for(target, model, android::NdkUse::IfFound)
    }
}

fn is_tested() -> bool {
    std::env::var_os(TESTED).is_some()
}

fn release_for(target: &str, model: Option<&Path>, ndk: android::NdkUse) -> Result<PathBuf> {
    link_release((build_command(PROFILE, Features::Default, model), &target_dir()), target, ndk)
}

/// Builds a release with these features, without an NDK, in a target directory of its own, so that other builds can
/// run.
pub fn build_release_aside(features: Features, target: &str, model: &Path) -> Result<PathBuf> {
    let aside = target_dir().join("aside");
    let mut cargo = build_command(PROFILE, features, Some(model));
    cargo.env("CARGO_TARGET_DIR", &aside);
    link_release((cargo, &aside), target, android::NdkUse::Never)
}

/// Builds a release for a target. Panics abort, so the tables for unwinding are dropped.
fn link_release((cargo, dir): (Command, &Path), target: &str, ndk: android::NdkUse) -> Result<PathBuf> {
    let mut cargo = make_reproducible(cargo, &command::root(), dir)?;
    if is_android(target) || is_static(target) {
        let script = command::root().join("xtask/src/no_unwind.ld");
        let flags = ["-Clink-arg=-T".into(), format!("-Clink-arg={}", script.display())];
        toolchain::add_flags(&mut cargo, &flags);
    }
    build_for(cargo, target, (ndk, Product::Program))?;
    check_loadable(target, dir.join(target).join(PROFILE).join("antigravity"))
}

fn build_for(mut cargo: Command, target: &str, linking: (android::NdkUse, Product)) -> Result<()> {
    cargo.args(["--target", target]);
    if let Some(note) = cargo::prepare(&mut cargo, target, linking)? {
        eprintln!("{target}: {note}");
    }
    command::build(&mut cargo)
}

/// Returns the binary if a loader of the target accepts it.
pub fn check_loadable(target: &str, binary: PathBuf) -> Result<PathBuf> {
    if TARGETS.contains(&target) {
        let file = fs::read(&binary).at(&binary)?;
        let elf = Elf::parse(&file).at(&binary)?;
        let problems = find_problems(target, &elf);
        if !problems.is_empty() {
            return Err(Error::at(&binary, format!("not fit for {target}: it {}", problems.join("; it "))));
        }
    }
    Ok(binary)
}

/// Builds the release program for this machine.
pub fn build_for_host(model: Option<&Path>) -> Result<PathBuf> {
    if let (true, Some(model)) = (is_tested(), model) {
        return build_tested(model);
    }
    command::build(&mut build_command("release", Features::Default, model))?;
    Ok(target_dir().join("release/antigravity"))
}

/// Builds the release program for other machines of this kind.
fn portable_release(model: Option<&Path>) -> Result<PathBuf> {
    if is_tested() {
        return build_for_host(model);
    }
    let release = build_command(PROFILE, Features::Default, model);
    command::build(&mut make_reproducible(release, &command::root(), &target_dir())?)?;
    Ok(target_dir().join(PROFILE).join("antigravity"))
}

/// Makes a build of the checkout `root` into `target` reproducible: the same bytes in every folder and for every user.
/// No path of this machine stays in it, and the program looks for its model in its own folder.
pub fn make_reproducible(mut cargo: Command, root: &Path, target: &Path) -> Result<Command> {
    let set = cargo.get_envs().find(|(name, _)| *name == "CARGO_HOME").and_then(|(_, home)| home);
    let home = set.map_or_else(cargo_home, PathBuf::from);
    let sysroot = command::stdout(toolchain::rustc().args(["--print", "sysroot"]))?;
    let sysroot = String::from_utf8_lossy(&sysroot);
    // The last one that fits wins.
    let paths = [
        (home.as_path(), "/cargo"),
        (Path::new(sysroot.trim()), "/rust"),
        (root, "/antigravity"),
        (target, "/target"),
    ];
    let flags = paths.map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()));
    toolchain::add_flags(&mut cargo, &flags);
    cargo.env("ANTIGRAVITY_SHIPPED", describe_commit());
    Ok(cargo)
}

/// Cargo's home, with its downloads.
pub fn cargo_home() -> PathBuf {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    home.unwrap_or_else(|| std::env::home_dir().unwrap_or_default().join(".cargo"))
}

/// The commit, followed by a plus if files differ from it; `unknown` outside of a repository.
fn describe_commit() -> String {
    let git = |words: &[&str]| command::stdout(Command::new("git").args(words).current_dir(command::root()));
    let Ok(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else { return "unknown".into() };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_ok_and(|out| !out.is_empty());
    format!("{}{}", String::from_utf8_lossy(&commit).trim(), if changed { "+" } else { "" })
}

fn build_command(profile: &str, features: Features, model: Option<&Path>) -> Command {
    let mut cargo = command::cargo(&["build", "--profile", profile, "--package", "antigravity"]);
    if features == Features::None {
        cargo.arg(features.words());
    }
    if let Some(model) = model {
        cargo.env("ANTIGRAVITY_MODEL", bundled_name(model));
    }
    cargo
}

/// Builds the test program of a model: optimised, but without link-time optimisation, which is faster to build.
pub fn build_tested(model: &Path) -> Result<PathBuf> {
    command::build(&mut debug_build(model))?;
    Ok(debug_binary(&[]))
}

/// Builds the program of [`build_tested`] for another target.
pub fn build_tested_for(target: &str, model: &Path) -> Result<PathBuf> {
    build_for(
        checked_on_arm(debug_build(model), target),
        target,
        (android::NdkUse::IfFound, Product::Program),
    )?;
    check_loadable(target, debug_binary(&[target]))
}

/// Builds the program of a model for checks that compute little: only the members are optimised. For the story model it
/// is the test program.
pub fn build_unoptimised(model: &Path) -> Result<PathBuf> {
    if is_story(model) {
        return build_tested(model);
    }
    command::build(&mut unoptimised_command(model))?;
    Ok(debug_binary(&[]))
}

/// Builds the program of [`build_unoptimised`] for another target.
pub fn build_unoptimised_for(target: &str, model: &Path) -> Result<PathBuf> {
    let mut cargo = checked_on_arm(unoptimised_command(model), target);
    // The members are built anew for increments, which takes longer than those of a few models save.
    cargo.env_remove("CARGO_INCREMENTAL");
    build_for(cargo, target, (android::NdkUse::IfFound, Product::Program))?;
    Ok(debug_binary(&[target]))
}

/// Adds Rust's pointer checks to a build for emulated Arm, so that it shares crates with the tests built for Arm.
fn checked_on_arm(mut cargo: Command, target: &str) -> Command {
    if target == ARM_LINUX {
        cargo.args(pointer_check_flags());
    }
    cargo
}

/// Cargo's flags that turn on debug assertions in the packages that compute a pass.
pub fn pointer_check_flags() -> Vec<String> {
    dev_profile_flags(["antigravity-model", "antigravity-numeric"], "debug-assertions=true")
}

/// Runs the example that compares a model's cache with that of transformers.
pub fn compare_past_key_values(model: &Path) -> Result<()> {
    let mut build = unoptimised_command(model);
    command::build(build.args(["--example", "past_key_values"]))?;
    let example = target_dir().join("debug/examples/past_key_values");
    command::run(Command::new(example).arg(model))
}

pub fn unoptimised_command(model: &Path) -> Command {
    let mut cargo = command::cargo(&["build", "--package", "antigravity"]);
    make_unoptimised(&mut cargo, model);
    cargo
}

/// Packages that are compiled for each model.
const MODEL_PACKAGES: [&str; 2] = ["antigravity", "antigravity-model"];

/// Cargo's flags that give packages a setting in the `dev` profile.
fn dev_profile_flags(packages: [&str; 2], setting: &str) -> Vec<String> {
    let flags = packages.map(|package| format!("profile.dev.package.{package}.{setting}"));
    flags.into_iter().flat_map(|flag| ["--config".into(), flag]).collect()
}

/// A variable with the bytes of stack of a program's threads, for programs that are not optimised: there each kernel that
/// is inlined has a part of the frame to itself, 2 MB for attention with all types of the cache.
pub const UNOPTIMISED_STACK: (&str, &str) = ("RUST_MIN_STACK", "8388608");

/// Makes cargo build for a model without optimising the model's packages: a fifth of the build time. Of what the last
/// such build compiled, for any model, it takes what does not depend on the model, which saves a third of that.
pub fn make_unoptimised(cargo: &mut Command, model: &Path) {
    cargo.args(dev_profile_flags(MODEL_PACKAGES, "opt-level=0"));
    cargo.env("CARGO_INCREMENTAL", "1").env("ANTIGRAVITY_MODEL", bundled_name(model));
}

fn debug_build(model: &Path) -> Command {
    let mut cargo = command::cargo(&["build", "--package", "antigravity"]);
    cargo.args(model_flags(model)).env("ANTIGRAVITY_MODEL", bundled_name(model));
    cargo
}

/// Cargo's flags that keep the tests' build, which is of the story model. Cargo keeps one build of a package per profile,
/// so that of another model would replace it; with another number of codegen units it is a different build.
pub fn model_flags(model: &Path) -> Vec<String> {
    if is_story(model) {
        return Vec::new();
    }
    dev_profile_flags(MODEL_PACKAGES, "codegen-units=32")
}

/// The program that the last debug build made, for a target or for this machine.
pub fn debug_binary(target: &[&str]) -> PathBuf {
    target_dir().join(target.concat()).join("debug/antigravity")
}

/// The path of the program that drafts for the story model in tests.
pub fn draft_program() -> PathBuf {
    output_path(Path::new("story-draft"), Some("tested"))
}

/// Builds the program of [`draft_program`] and copies it there, as the next build replaces it.
pub fn build_draft_program() -> Result<()> {
    let (built, draft) = (build_unoptimised(&model_dir("story-draft")?)?, draft_program());
    fs::create_dir_all(draft.parent().expect("a file in a folder")).at(&draft)?;
    // By renaming, as the old one may be running.
    let new = draft.with_extension("new");
    fs::copy(&built, &new).and_then(|_| fs::rename(&new, &draft)).at(&draft)
}
