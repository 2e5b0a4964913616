//! `cargo xtask fuzz`: the fuzz targets of `tests/fuzz`, with seeds made from the fixtures.

use crate::error::{Error, Result};
use crate::{build, command};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};

const TARGETS: [&str; 5] = ["gguf", "safetensors", "packed", "session", "template"];
/// Longest input; longer ones make mutations slow and find no more.
const LONGEST: usize = 200_000;

#[derive(Args)]
pub struct FuzzArgs {
    /// How long each target runs
    #[arg(long, value_name = "S", default_value_t = 300)]
    seconds: u32,
    /// The targets to run [default: all]
    #[arg(value_name = "TARGET", value_parser = TARGETS)]
    targets: Vec<String>,
}

pub fn run(args: &FuzzArgs) -> Result<()> {
    let chosen: Vec<&str> = match args.targets.as_slice() {
        [] => TARGETS.to_vec(),
        names => names.iter().map(String::as_str).collect(),
    };
    if !command::is_on_path("cargo-fuzz") {
        let need = "cargo-fuzz is missing: cargo install cargo-fuzz; rustup toolchain install nightly";
        return Err(Error::Usage(need.into()));
    }
    let corpus = command::root().join("tests/fuzz/corpus");
    for name in &chosen {
        let dir = corpus.join(name);
        fs::create_dir_all(&dir).map_err(|e| Error::at(&dir, e))?;
        seed(name, &dir)?;
    }
    for name in chosen {
        let mut command = std::process::Command::new("cargo");
        // Without these two, cargo is the one of this very run and not the nightly one.
        command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN").current_dir(command::root());
        command.args(["+nightly", "fuzz", "run", "--fuzz-dir", "tests/fuzz", "--target-dir"]);
        command.arg(build::target_dir().join("fuzz")).args([name, "--"]);
        command.args(["-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]);
        command.arg(format!("-max_total_time={}", args.seconds)).arg(format!("-max_len={LONGEST}"));
        command::run(&mut command)?;
    }
    Ok(())
}

/// Writes the seeds of one target.
fn seed(target: &str, dir: &Path) -> Result<()> {
    match target {
        // The targets say what a first byte is for.
        "gguf" => {
            each(&["tests/fixtures"], "gguf", |file| put(dir, file, &[b"\x10", head(&read(file)?, 1 << 16)]))
        }
        "safetensors" => each(&["tests/fixtures", "models"], "safetensors", |file| {
            put(dir, file, &[b"\x02", head(&read(file)?, 4096)])
        }),
        "template" => each(&["tests/fixtures"], "jinja", |file| put(dir, file, &[&read(file)?])),
        "packed" => {
            let file = build::target_dir().join("fuzz.packed.safetensors");
            program(&["pack", "--out"], &file)?;
            let bytes = read(&file)?;
            let (length, rest) = bytes.split_first_chunk().expect("a packed file begins with a length");
            put(dir, &file, &[head(rest, u64::from_le_bytes(*length) as usize)])?;
            fs::remove_file(&file).map_err(|e| Error::at(&file, e))
        }
        _ => {
            let file = build::target_dir().join("fuzz.session");
            let _ = fs::remove_file(&file);
            program(
                &["generate", "-q", "-p", "Once upon a time", "-n", "6", "-c", "64", "--session"],
                &file,
            )?;
            let bytes = read(&file)?;
            put(dir, Path::new("whole"), &[&bytes])?;
            let (length, rest) = bytes[8..].split_first_chunk().expect("a saved session has a length");
            let (json, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
            put(dir, &file, &[b"!", json, b"\0", &rest[4..rest.len() - 4]])?;
            fs::remove_file(&file).map_err(|e| Error::at(&file, e))
        }
    }
}

/// Runs the program with the bundled model; `file` is its last argument.
fn program(words: &[&str], file: &Path) -> Result<()> {
    let mut command = command::cargo(&["run", "-q", "--release", "-p", "antigravity", "--"]);
    command::stdout(command.args(words).arg(file)).map(drop)
}

/// Calls `put` for each file with this extension below some of the project's directories.
fn each(dirs: &[&str], extension: &str, put: impl Fn(&Path) -> Result<()>) -> Result<()> {
    let mut left: Vec<PathBuf> = dirs.iter().map(|dir| command::root().join(dir)).collect();
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).map_err(|e| Error::at(&dir, e))? {
            let path = entry.map_err(|e| Error::at(&dir, e))?.path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                put(&path)?;
            }
        }
    }
    Ok(())
}

/// Writes a seed named after the file it comes from.
fn put(dir: &Path, from: &Path, parts: &[&[u8]]) -> Result<()> {
    let name = from.strip_prefix(command::root()).unwrap_or(from).to_string_lossy().replace('/', "_");
    let path = dir.join(name);
    fs::write(&path, parts.concat()).map_err(|e| Error::at(&path, e))
}

fn read(file: &Path) -> Result<Vec<u8>> {
    fs::read(file).map_err(|e| Error::at(file, e))
}

fn head(bytes: &[u8], most: usize) -> &[u8] {
    &bytes[..bytes.len().min(most)]
}
