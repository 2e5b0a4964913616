//! A private adb server, a fake phone, and this tool as a process.

use crate::run::serve::free_port;
use crate::{build, command};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A result, or a message with the expected and the actual value.
pub type Checked<T> = Result<T, String>;

/// An adb server that no other program uses, and the directory for all files of the checks.
pub struct AdbHarness {
    pub dir: PathBuf,
    port: u16,
}

impl AdbHarness {
    pub fn start() -> Checked<AdbHarness> {
        let dir = std::env::temp_dir().join(format!("antigravity-device-{}", std::process::id()));
        fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let port = free_port().map_err(|e| e.to_string())?;
        let harness = AdbHarness { dir, port };
        // The server keeps keys in its home, and would adopt emulators on ports up to 5585.
        let mut start = harness.adb(&["start-server"]);
        start.env("HOME", &harness.dir).env("ADB_LOCAL_TRANSPORT_MAX_PORT", "5554");
        command::output(&mut start).map_err(|e| e.to_string())?;
        Ok(harness)
    }

    fn adb(&self, words: &[&str]) -> Command {
        let mut adb = Command::new("adb");
        adb.args(words).env("ANDROID_ADB_SERVER_PORT", self.port.to_string());
        adb
    }

    /// Starts a fake phone; all share one storage.
    pub fn phone(&self, options: &[&str]) -> Checked<FakePhone<'_>> {
        let root = self.dir.join("phone");
        let mut daemon = Command::new("python3");
        daemon.arg(command::root().join("tests/device/fake_adbd.py")).arg("--root").arg(&root).args(options);
        let child = daemon.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| format!("python3: {e}"))?;
        let mut line = String::new();
        let _ = BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line);
        let serial = format!("127.0.0.1:{}", line.trim());
        let phone = FakePhone { harness: self, child, root, serial };
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let _ = command::output(&mut self.adb(&["connect", &phone.serial]));
            let state = command::output(&mut self.adb(&["-s", &phone.serial, "get-state"]));
            if state.is_ok_and(|out| out.stdout.starts_with(b"device")) {
                return Ok(phone);
            }
            if Instant::now() > end {
                return Err(format!("adb does not connect with {}", phone.serial));
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

impl Drop for AdbHarness {
    fn drop(&mut self) {
        let _ = command::output(&mut self.adb(&["kill-server"]));
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A device daemon that runs until it is dropped; its storage stays.
pub struct FakePhone<'a> {
    harness: &'a AdbHarness,
    child: Child,
    root: PathBuf,
    pub serial: String,
}

impl FakePhone<'_> {
    /// A task of this tool on this device, without the user's settings.
    pub fn task(&self, task: &str, words: &[&str]) -> Command {
        let mut xtask = Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()));
        xtask.args([task, "--serial", &self.serial]).args(words).stdin(Stdio::null());
        for name in ["ANDROID_SERIAL", "ANTIGRAVITY_DEVICE", "ANTIGRAVITY_SIMD", "QEMU_CPU"] {
            xtask.env_remove(name);
        }
        xtask.env("ANDROID_ADB_SERVER_PORT", self.harness.port.to_string());
        xtask.env("ANTIGRAVITY_MODEL", "story").env(build::TESTED, "1");
        xtask
    }

    pub fn run_task(&self, task: &str, words: &[&str]) -> Checked<TaskOutput> {
        run_to_end(&mut self.task(task, words))
    }

    pub fn deployed(&self) -> PathBuf {
        self.root.join("antigravity/story")
    }

    /// Waits until no deployed program runs on the device.
    pub fn wait_until_idle(&self) -> Checked<()> {
        let end = Instant::now() + Duration::from_secs(15);
        loop {
            match self.running_programs() {
                left if left.is_empty() => return Ok(()),
                left if Instant::now() > end => return Err(format!("still running there: {left:?}")),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// Command lines of the deployed program that run on the device.
    fn running_programs(&self) -> Vec<String> {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let line = |process: fs::DirEntry| {
            let dir = fs::read_link(process.path().join("cwd")).unwrap_or_default();
            let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
            dir.starts_with(&self.root).then(|| String::from_utf8_lossy(&line).replace('\0', " "))
        };
        processes.filter_map(line).filter(|line| line.contains("./antigravity")).collect()
    }
}

impl Drop for FakePhone<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = command::output(&mut self.harness.adb(&["disconnect", &self.serial]));
    }
}

pub struct TaskOutput {
    code: Option<i32>,
    pub out: String,
    pub err: String,
}

pub fn run_to_end(process: &mut Command) -> Checked<TaskOutput> {
    let out = process.output().map_err(|e| format!("{}: {e}", command::show(process)))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(TaskOutput { code: out.status.code(), out: text(&out.stdout), err: text(&out.stderr) })
}

impl TaskOutput {
    pub fn ended_with(&self, code: i32) -> Checked<()> {
        expect(self.code == Some(code), || {
            format!("expected exit code {code}, found {:?}: {}{}", self.code, self.out, self.err)
        })
    }

    /// Checks for exit code `code` and one `error:` line with these words.
    pub fn was_refused(&self, code: i32, words: &[&str]) -> Checked<()> {
        self.ended_with(code)?;
        let lines: Vec<&str> = self.err.lines().filter(|l| l.starts_with("error: ")).collect();
        match lines[..] {
            [line] if words.iter().all(|w| line.contains(w)) => Ok(()),
            _ => Err(format!("expected one `error: ` line with {words:?}, found: {}", self.err)),
        }
    }
}

pub fn expect(holds: bool, what: impl FnOnce() -> String) -> Checked<()> {
    if holds { Ok(()) } else { Err(what()) }
}
