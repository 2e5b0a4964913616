//! A mapped model file that shrinks while in use ends the process with a line and exit code 3.
//! Each case runs in a child process, which it ends.

use crate::support::process;
use crate::support::test_dir::TestDir;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Output;

use files::mapped::map_file;
use files::source::Safetensors;

const FILE: &str = "ANTIGRAVITY_SIGBUS_FILE";

/// Runs `case` in a child, on a file of 64 KiB.
fn ended(case: &str) -> (Output, PathBuf) {
    let temp = TestDir::new();
    let path = temp.file(case);
    let header = br#"{"x":{"dtype":"U8","shape":[65536],"data_offsets":[0,65536]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header);
    bytes.resize(bytes.len() + 65536, 1);
    fs::write(&path, bytes).unwrap();
    let output = process::child("sigbus::in_child", case).env(FILE, &path).output().unwrap();
    (output, path)
}

/// Not a test of its own: the body of the children.
#[test]
fn in_child() {
    let (Some(case), Some(file)) = (process::job(), std::env::var_os(FILE)) else { return };
    let path = Path::new(&file);
    let truncate = || File::options().write(true).open(path).unwrap().set_len(0).unwrap();
    match case.as_str() {
        "truncated" => {
            let source = Safetensors::open(path).unwrap();
            truncate();
            std::hint::black_box(source.get("x").unwrap().data.bytes()[40_000]);
        }
        "thread" => {
            let plane = map_file(path).unwrap();
            truncate();
            let read = move || std::hint::black_box(plane.bytes()[0]);
            let _ = std::thread::spawn(read).join();
        }
        "foreign" => {
            let _ours = map_file(path).unwrap();
            // SAFETY: reading it is meant to fault.
            let theirs = unsafe { memmap2::Mmap::map(&File::open(path).unwrap()) }.unwrap();
            truncate();
            std::hint::black_box(theirs[0]);
        }
        "unmapped" => {
            let plane = map_file(path).unwrap();
            let (address, len) = (plane.bytes().as_ptr(), plane.bytes().len());
            drop(plane);
            let file = File::open(path).unwrap();
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            // Linux's number for it, since libc has no name for it on Android.
            const MAP_FIXED_NOREPLACE: libc::c_int = 0x10_0000;
            let flags = libc::MAP_SHARED | MAP_FIXED_NOREPLACE;
            // SAFETY: maps only where nothing is mapped; reading it is meant to fault.
            unsafe {
                let again = libc::mmap(address.cast_mut().cast(), len, libc::PROT_READ, flags, fd, 0);
                assert_eq!(again, address.cast_mut().cast());
                truncate();
                std::hint::black_box(address.read_volatile());
            }
        }
        "sent" => {
            let _ours = map_file(path).unwrap();
            // SAFETY: sends a signal to this thread. The first is handed on to Rust's own handler,
            // which restores the default and returns.
            unsafe {
                libc::raise(libc::SIGBUS);
                libc::raise(libc::SIGBUS);
            }
        }
        other => panic!("no case {other}"),
    }
    println!("still alive");
}

fn assert_line(case: &str) {
    let (output, path) = ended(case);
    let expected = format!(
        "error: {}: the file was truncated or its disk failed while in use; restore it and start again\n",
        path.display()
    );
    assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
    assert_eq!(output.status.code(), Some(3), "{:?}", output.status);
}

fn assert_killed(case: &str) {
    let (output, _) = ended(case);
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{case}: {output:?}");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("truncated"), "{case}");
}

#[test]
fn a_truncated_file_is_named() {
    assert_line("truncated");
}

#[test]
fn a_truncated_file_is_named_on_any_thread() {
    assert_line("thread");
}

#[test]
fn faults_elsewhere_keep_their_meaning() {
    assert_killed("foreign");
    assert_killed("sent");
}

#[test]
fn an_unmapped_file_is_forgotten() {
    assert_killed("unmapped");
}
