//! `cargo xtask fuzz`: the fuzz targets of `tests/fuzz`, with seeds made from the fixtures.

use crate::error::{AtPath, Error, Result};
use crate::{build, command};
use clap::Args;
use std::fs;
use std::path::{Path, PathBuf};

const TARGETS: [&str; 6] = ["c_api", "gguf", "safetensors", "packed", "session", "template"];
/// Maximum bytes of an input: longer ones make mutations slow and find no more.
const MAX_LEN: usize = 200_000;

#[derive(Args)]
pub struct FuzzArgs {
    /// Seconds that each target runs
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
        fs::create_dir_all(&dir).at(&dir)?;
        write_seeds(name, &dir)?;
    }
    for name in chosen {
        let mut command = std::process::Command::new("cargo");
        // With these two set, cargo would be the one of this run, not the nightly one.
        command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN").current_dir(command::root());
        command.args(["+nightly", "fuzz", "run", "--fuzz-dir", "tests/fuzz", "--target-dir"]);
        command.arg(build::target_dir().join("fuzz")).args([name, "--"]);
        command.args(["-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]);
        command.arg(format!("-max_total_time={}", args.seconds)).arg(format!("-max_len={MAX_LEN}"));
        command::run(&mut command)?;
    }
    Ok(())
}

/// Writes the seeds of one target.
fn write_seeds(target: &str, dir: &Path) -> Result<()> {
    match target {
        // The first byte of an input is explained in its target.
        "gguf" => for_each(&["tests/fixtures"], "gguf", |file, bytes| {
            write_seed(dir, file, &[b"\x10", head(bytes, 1 << 16)])
        }),
        "safetensors" => for_each(&["tests/fixtures", "models"], "safetensors", |file, bytes| {
            write_seed(dir, file, &[b"\x02", head(bytes, 4096)])
        }),
        // Every call, with texts that it understands.
        "c_api" => (0..18).try_for_each(|call| {
            let bytes: Vec<u8> = [8, 2, 2, 1].into_iter().chain([call, 2, 3].repeat(40)).collect();
            write_seed(dir, Path::new(&format!("call{call}")), &[&bytes])
        }),
        "template" => for_each(&["tests/fixtures"], "jinja", |file, bytes| write_seed(dir, file, &[bytes])),
        "packed" => {
            let file = Path::new("fuzz.packed.safetensors");
            let bytes = make_file(&["pack", "--out"], file)?;
            let (length, rest) = bytes.split_first_chunk().expect("a packed file begins with a length");
            write_seed(dir, file, &[head(rest, u64::from_le_bytes(*length) as usize)])
        }
        _ => {
            let file = Path::new("fuzz.session");
            let generate = ["generate", "-q", "-p", "Once upon a time", "-n", "6", "-c", "64", "--session"];
            let bytes = make_file(&generate, file)?;
            write_seed(dir, Path::new("whole"), &[&bytes])?;
            let (length, rest) = bytes[8..].split_first_chunk().expect("a saved session has a length");
            let (json, rest) = rest.split_at(u64::from_le_bytes(*length) as usize);
            write_seed(dir, file, &[b"!", json, b"\0", &rest[4..rest.len() - 4]])
        }
    }
}

/// The bytes of a file that the program writes with the bundled model; `file` is its last argument.
fn make_file(words: &[&str], file: &Path) -> Result<Vec<u8>> {
    let file = build::target_dir().join(file);
    let _ = fs::remove_file(&file);
    let mut command = command::cargo(&["run", "-q", "--release", "-p", "antigravity", "--"]);
    command::stdout(command.args(words).arg(&file))?;
    let bytes = fs::read(&file).at(&file)?;
    fs::remove_file(&file).at(&file)?;
    Ok(bytes)
}

/// Calls `put` with each file of this extension in some of the project's folders.
fn for_each(dirs: &[&str], extension: &str, put: impl Fn(&Path, &[u8]) -> Result<()>) -> Result<()> {
    let mut left: Vec<PathBuf> = dirs.iter().map(|dir| command::root().join(dir)).collect();
    while let Some(dir) = left.pop() {
        for entry in fs::read_dir(&dir).at(&dir)? {
            let path = entry.at(&dir)?.path();
            if path.is_dir() {
                left.push(path);
            } else if path.extension().is_some_and(|e| e == extension) {
                put(&path, &fs::read(&path).at(&path)?)?;
            }
        }
    }
    Ok(())
}

/// Writes a seed that is named after the file it comes from.
fn write_seed(dir: &Path, from: &Path, parts: &[&[u8]]) -> Result<()> {
    let name = from.strip_prefix(command::root()).unwrap_or(from).to_string_lossy().replace('/', "_");
    let path = dir.join(name);
    fs::write(&path, parts.concat()).at(&path)
}

fn head(bytes: &[u8], most: usize) -> &[u8] {
    &bytes[..bytes.len().min(most)]
}
