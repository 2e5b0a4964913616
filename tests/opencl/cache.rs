//! Tests of the disk cache: stored programs come back, and no file in it is ever an error.

use crate::device::{device_with, said};
use crate::support::command::binary;
use crate::support::process::{child, job};
use crate::support::test_dir::TestDir;
use antigravity::opencl::{Access, Cache, Device, FailureKind, Place, Program, Source, Verdict};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

const TEXT: &str = "kernel void f(global int *p) { p[get_global_id(0)] = VALUE; }";

fn source(options: &str) -> Source<'_> {
    Source { name: "f", text: TEXT, options }
}

/// Runs the kernel, which must give `value`.
#[track_caller]
fn gives(device: &Device, program: &Program, value: i32) {
    let out = device.allocate_buffer(64, Access::ReadWrite, Place::Device).unwrap();
    let mut kernel = program.create_kernel("f").unwrap();
    device.launch(kernel.set_buffer(0, &out).unwrap(), &[16], &[4]).unwrap();
    let mut bytes = [0; 64];
    out.read(0, &mut bytes).unwrap();
    assert_eq!(bytes, *[value.to_le_bytes(); 16].as_flattened());
}

/// Builds with `-DVALUE=value` as a new device would, runs it, and tells whether it came from the cache.
#[track_caller]
fn from_cache(dir: &Path, value: i32) -> Option<bool> {
    let device = device_with(Cache::in_dir(dir))?;
    let program = Program::build(&device, &source(&format!("-DVALUE={value}"))).unwrap();
    gives(&device, &program, value);
    let builds = device.build_stats();
    assert_eq!(builds.compiled + builds.loaded, 1);
    Some(builds.loaded == 1)
}

pub fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    paths.filter(|p| p.extension().is_some_and(|e| e == extension)).collect()
}

#[test]
fn a_stored_program_is_read_back_with_its_metadata() {
    let temp = TestDir::new();
    let dir = temp.0.join("made/here");
    let Some(device) = device_with(Cache::in_dir(&dir)) else { return };
    let program = Program::build(&device, &source("-DVALUE=1")).unwrap();
    assert_eq!(program.kernel_verdict("f"), None);
    program.set_verdict("f", Verdict::Passed);
    program.set_verdict("g", Verdict::Failed);
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(files(&dir, "program").len(), 1);

    let device = device_with(Cache::in_dir(&dir)).unwrap();
    let program = Program::build(&device, &source("-DVALUE=1")).unwrap();
    assert_eq!((device.build_stats().loaded, device.build_stats().compiled), (1, 0));
    assert_eq!(program.kernel_verdict("f"), Some(Verdict::Passed));
    assert_eq!(program.kernel_verdict("g"), Some(Verdict::Failed));
    assert_eq!(program.kernel_verdict("h"), None);
    gives(&device, &program, 1);
    // Other options are another program.
    assert_eq!(from_cache(&dir, 2), Some(false));
    assert_eq!(from_cache(&dir, 2), Some(true));
    assert_eq!(files(&dir, "program").len(), 2);
    assert!(Cache::in_dir(&dir).describe_contents().contains("2 programs"));
}

#[test]
fn damaged_and_foreign_entries_are_compiled_again() {
    let temp = TestDir::new();
    let dir = temp.0.join("cache");
    let Some(first) = from_cache(&dir, 1) else { return };
    assert!(!first);
    let file = files(&dir, "program").pop().unwrap();
    let good = fs::read(&file).unwrap();
    let mut damaged = good.clone();
    *damaged.last_mut().unwrap() ^= 1;
    from_cache(&dir, 2);
    let foreign = files(&dir, "program").into_iter().find(|f| *f != file).unwrap();
    let of_another = fs::read(&foreign).unwrap();
    for bytes in
        [&[][..], b"x", &good[..7], &good[..good.len() / 2], &good[..good.len() - 1], &damaged, &of_another]
    {
        fs::write(&file, bytes).unwrap();
        assert_eq!(from_cache(&dir, 1), Some(false), "{} bytes", bytes.len());
        // And mended.
        assert_eq!(from_cache(&dir, 1), Some(true));
    }
    assert!(files(&dir, "tmp").is_empty());
}

#[test]
fn a_directory_that_cannot_be_used_is_no_error() {
    let temp = TestDir::new();
    let file = temp.0.join("file");
    fs::write(&file, "").unwrap();
    for unusable in [file.clone(), file.join("below"), "/proc/nothing/here".into()] {
        let Some(loaded) = from_cache(&unusable, 1) else { return };
        assert!(!loaded);
        assert_eq!(from_cache(&unusable, 1), Some(false));
    }
    assert!(Cache::in_dir(&file).describe_contents().contains("not a directory"));

    // What others may write is neither read nor added to.
    let dir = temp.0.join("cache");
    from_cache(&dir, 1);
    for mode in [0o770, 0o777, 0o1777] {
        fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(from_cache(&dir, 1), Some(false), "mode {mode:o}");
        assert_eq!(from_cache(&dir, 2), Some(false));
        assert!(Cache::in_dir(&dir).describe_contents().contains("others may write there"));
    }
    assert_eq!(files(&dir, "program").len(), 1);

    // What only we may read is read. (Root may write it all the same.)
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o500)).unwrap();
    assert_eq!(from_cache(&dir, 1), Some(true));
    assert_eq!(from_cache(&dir, 3), Some(false));
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o700)).unwrap();

    // A file that cannot be replaced.
    let entry = files(&dir, "program").pop().unwrap();
    fs::remove_file(&entry).unwrap();
    fs::create_dir(&entry).unwrap();
    for value in [1, 3] {
        from_cache(&dir, value);
    }
    assert!(entry.is_dir());
}

#[test]
fn an_entry_that_others_may_have_written_is_not_loaded() {
    let temp = TestDir::new();
    let dir = temp.0.join("cache");
    if from_cache(&dir, 1).is_none() {
        return;
    }
    let entry = files(&dir, "program").pop().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&entry), 0o600, "whatever the umask");
    for others in [0o666, 0o620, 0o602] {
        fs::set_permissions(&entry, fs::Permissions::from_mode(others)).unwrap();
        assert_eq!(from_cache(&dir, 1), Some(false), "mode {others:o}");
        assert_eq!(from_cache(&dir, 1), Some(true), "it is mended");
    }
    // A link to what would be loaded by itself.
    let elsewhere = temp.0.join("elsewhere");
    fs::rename(&entry, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &entry).unwrap();
    assert_eq!(from_cache(&dir, 1), Some(false), "a link");
    assert!(entry.symlink_metadata().unwrap().is_file() && elsewhere.exists(), "the link is replaced");
    // Only root can give a file away.
    if std::os::unix::fs::chown(&entry, Some(12345), None).is_ok() {
        assert_eq!(from_cache(&dir, 1), Some(false), "another's");
    }
    // A pipe is not waited for.
    fs::remove_file(&entry).unwrap();
    assert!(Command::new("mkfifo").arg(&entry).status().unwrap().success());
    assert_eq!(from_cache(&dir, 1), Some(false), "a pipe");
}

#[test]
fn one_line_says_that_programs_cannot_be_kept() {
    if device_with(Cache::disabled()).is_none() {
        return;
    }
    let temp = TestDir::new();
    let says = |dir: &str| {
        let mut run = Command::new(binary());
        run.args(["generate", "-b", "opencl", "--gpu-attn", "--wait-for-gpu"]);
        run.args(["-p", "x", "-n", "1", "-c", "64", "-q"]);
        // Nothing is timed to choose kernels, as speeds are not kept either.
        run.env("ANTIGRAVITY_OPENCL_VARIANT", "tile").env("ANTIGRAVITY_OPENCL_CPU", "1");
        let out = run.env("ANTIGRAVITY_OPENCL_CACHE", dir).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        said(&out.stderr)
    };
    let file = temp.write("file", "");
    let line = says(&file);
    assert!(line.lines().count() == 1 && line.contains("compiled at each start"), "{line}");
    assert!(line.contains(&file) && line.contains("not a directory"), "{line}");
    let made = temp.path("made");
    for fine in ["off", &made, &made] {
        assert_eq!(says(fine), "");
    }
}

/// Does the job: builds one after another.
#[test]
fn child_uses_the_cache() {
    let Some(dir) = job() else { return };
    let Some(device) = device_with(Cache::in_dir(dir)) else { return };
    for i in 0..40 {
        let program = Program::build(&device, &source(&format!("-DVALUE={}", i % 4))).unwrap();
        let kernel = format!("round {i}");
        program.set_verdict(&kernel, Verdict::Passed);
        assert_eq!(program.kernel_verdict(&kernel), Some(Verdict::Passed));
    }
}

#[test]
fn processes_at_once_share_the_cache() {
    let temp = TestDir::new();
    let dir = temp.0.join("cache");
    let start = |own: &str| {
        let mut command = child("cache::child_uses_the_cache", dir.to_str().unwrap());
        // PoCL has a cache too, and may crash where processes put the same program there at once.
        command.env("POCL_CACHE_DIR", temp.path(own));
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    for running in ["a", "b", "c"].map(start) {
        let out = running.wait_with_output().unwrap();
        assert!(out.status.success(), "{}: {}", out.status, String::from_utf8_lossy(&out.stderr));
    }
    let Some(loaded) = from_cache(&dir, 3) else { return };
    assert!(loaded);
    assert_eq!(files(&dir, "program").len(), 4);
    assert!(files(&dir, "tmp").is_empty());
}

/// The file that is there while a binary is loaded.
fn marker_of_loading(device: &Device, dir: &Path) -> PathBuf {
    thread::scope(|scope| {
        let marker = scope.spawn(|| (0..1_000_000).find_map(|_| files(dir, "trying").pop()));
        while !marker.is_finished() {
            Program::build(device, &source("-DVALUE=1")).unwrap();
        }
        marker.join().unwrap().expect("a marker")
    })
}

#[test]
fn binaries_that_a_driver_crashes_on_are_compiled_anew() {
    let temp = TestDir::new();
    let dir = temp.0.join("cache");
    let Some(device) = device_with(Cache::in_dir(&dir)) else { return };
    Program::build(&device, &source("-DVALUE=1")).unwrap();
    let marker = marker_of_loading(&device, &dir);
    assert!(!marker.exists(), "what was loaded leaves nothing");
    assert_eq!(from_cache(&dir, 1), Some(true));
    // What a process leaves that does not live to end it.
    fs::write(&marker, "trying\n").unwrap();
    assert_eq!(from_cache(&dir, 1), Some(false));
    assert!(!marker.exists());
    assert_eq!(from_cache(&dir, 1), Some(true));
}

#[test]
fn a_program_that_crashed_the_driver_is_not_tried_again() {
    let temp = TestDir::new();
    let dir = temp.0.join("cache");
    let Some(device) = device_with(Cache::in_dir(&dir)) else { return };
    Program::build_variant(&device, &source("-DVALUE=1")).unwrap();
    assert!(files(&dir, "trying").is_empty(), "a trial that ends leaves nothing");
    // What a process leaves that does not live to end its trial.
    let marker = files(&dir, "program").pop().expect("a program").with_extension("trying");
    fs::write(&marker, "trying\n").unwrap();
    let failure = Program::build_variant(&device, &source("-DVALUE=1")).err().unwrap();
    assert_eq!(failure.kind, FailureKind::Build);
    assert!(failure.message.contains("crashed on it") && failure.message.contains(marker.to_str().unwrap()));
    assert!(Cache::in_dir(&dir).describe_contents().contains("1 crashed the driver"));
    // Others are not suspected, nor is a baseline, which cannot be done without.
    Program::build_variant(&device, &source("-DVALUE=2")).unwrap();
    gives(&device, &Program::build(&device, &source("-DVALUE=1")).unwrap(), 1);

    fs::remove_file(&marker).unwrap();
    Program::build_variant(&device, &source("-DVALUE=1")).unwrap();
    assert!(files(&dir, "trying").is_empty());
}
