//! What the checks work with: an adb server of their own, stand-ins for phones, and this tool as a process.

use crate::{build, sh};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A failed check: what was expected, what was found.
pub type Checked<T> = Result<T, String>;

/// An adb server that no other program uses, and the directory of everything that the checks write.
pub struct Bench {
    pub dir: PathBuf,
    port: u16,
    /// The server sees devices that are not ours, e.g. by USB.
    pub crowded: bool,
}

impl Bench {
    pub fn new() -> Checked<Bench> {
        let dir = std::env::temp_dir().join(format!("antigravity-device-{}", std::process::id()));
        fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        // Free now, and the server takes it at once.
        let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr());
        let port = port.map_err(|e| format!("no free port: {e}"))?.port();
        let mut bench = Bench { dir, port, crowded: false };
        // The server keeps keys in its home, and it adopts emulators on the ports up to 5585.
        let mut start = bench.adb(&["start-server"]);
        start.env("HOME", &bench.dir).env("ADB_LOCAL_TRANSPORT_MAX_PORT", "5554");
        sh::output(&mut start).map_err(|e| e.to_string())?;
        let list = sh::output(&mut bench.adb(&["devices"])).map_err(|e| e.to_string())?;
        bench.crowded = String::from_utf8_lossy(&list.stdout).contains('\t');
        Ok(bench)
    }

    fn adb(&self, words: &[&str]) -> Command {
        let mut adb = Command::new("adb");
        adb.args(words).env("ANDROID_ADB_SERVER_PORT", self.port.to_string());
        adb
    }

    /// This tool, with our adb server and nothing of the user's settings.
    pub fn xtask(&self, words: &[&str]) -> Command {
        let mut xtask = Command::new(std::env::current_exe().unwrap_or_else(|_| "xtask".into()));
        xtask.args(words).env("ANDROID_ADB_SERVER_PORT", self.port.to_string());
        for name in ["ANDROID_SERIAL", "ANTIGRAVITY_DEVICE", "ANTIGRAVITY_SIMD", "QEMU_CPU"] {
            xtask.env_remove(name);
        }
        xtask.env("ANTIGRAVITY_MODEL", "story").env(build::TESTED, "1").stdin(Stdio::null());
        xtask
    }

    /// A stand-in whose storage is the directory `name` here.
    pub fn phone(&self, name: &str, options: &[&str]) -> Checked<Phone<'_>> {
        let root = self.dir.join(name);
        let mut daemon = Command::new("python3");
        daemon.arg(sh::root().join("tests/device/fake_adbd.py")).arg("--root").arg(&root).args(options);
        let child = daemon.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| format!("python3: {e}"))?;
        let mut line = String::new();
        let _ = BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line);
        let serial = format!("127.0.0.1:{}", line.trim());
        let phone = Phone { bench: self, child, root, serial };
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let _ = sh::output(&mut self.adb(&["connect", &phone.serial]));
            let state = sh::output(&mut self.adb(&["-s", &phone.serial, "get-state"]));
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

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = sh::output(&mut self.adb(&["kill-server"]));
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// A device daemon that runs until this is dropped; its storage stays.
pub struct Phone<'a> {
    bench: &'a Bench,
    child: Child,
    pub root: PathBuf,
    pub serial: String,
}

impl Phone<'_> {
    /// A task of this tool on this device.
    pub fn task(&self, task: &str, words: &[&str]) -> Command {
        self.bench.xtask(&[&[task, "--serial", &self.serial], words].concat())
    }

    /// The deployed program.
    pub fn program(&self) -> PathBuf {
        self.deployed().join("antigravity")
    }

    pub fn deployed(&self) -> PathBuf {
        self.root.join("antigravity/story")
    }

    /// The programs that run there: process id and command line.
    pub fn processes(&self) -> Vec<(u32, String)> {
        self.commands("./antigravity")
    }

    /// Processes that were started there and have `word` in their command line: id and line.
    pub fn commands(&self, word: &str) -> Vec<(u32, String)> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse().ok()) else { continue };
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let dir = fs::read_link(entry.path().join("cwd")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).replace('\0', " ");
            if dir.starts_with(&self.root) && line.contains(word) {
                found.push((pid, line));
            }
        }
        found
    }

    /// Waits until nothing of ours runs there.
    pub fn idle(&self) -> Checked<()> {
        let end = Instant::now() + Duration::from_secs(15);
        loop {
            match self.processes() {
                left if left.is_empty() => return Ok(()),
                left if Instant::now() > end => return Err(format!("still running there: {left:?}")),
                _ => std::thread::sleep(Duration::from_millis(50)),
            }
        }
    }

    /// The deployment runs.
    pub fn runs(&self) -> Checked<()> {
        let said = said(&mut self.task("run", &["--", "generate", "-p", "Once", "-n", "4", "--temp", "0"]))?;
        said.ended(0)?;
        if said.out.is_empty() { Err("it runs, but says nothing".into()) } else { Ok(()) }
    }
}

impl Drop for Phone<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = sh::output(&mut self.bench.adb(&["disconnect", &self.serial]));
    }
}

/// What a process said.
pub struct Said {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs to the end.
pub fn said(command: &mut Command) -> Checked<Said> {
    command.output().map(Said::from).map_err(|e| format!("{}: {e}", sh::show(command)))
}

impl From<Output> for Said {
    fn from(out: Output) -> Said {
        Said {
            code: out.status.code().or(out.status.signal().map(|s| 128 + s)),
            out: String::from_utf8_lossy(&out.stdout).into_owned(),
            err: String::from_utf8_lossy(&out.stderr).into_owned(),
        }
    }
}

impl Said {
    pub fn ended(&self, code: i32) -> Checked<()> {
        match self.code == Some(code) {
            true => Ok(()),
            false => Err(format!("expected exit code {code}, found {:?}: {}", self.code, self.err)),
        }
    }

    /// Ended with `code` and one `error:` line with these words.
    pub fn refused(&self, code: i32, words: &[&str]) -> Checked<()> {
        self.ended(code)?;
        let lines: Vec<&str> = self.err.lines().filter(|l| l.starts_with("error: ")).collect();
        match lines[..] {
            [line] if words.iter().all(|w| line.contains(w)) => Ok(()),
            _ => Err(format!("expected one `error: ` line with {words:?}, found: {}", self.err)),
        }
    }
}

/// A process whose stdout is read as it comes.
pub struct Running {
    pub child: Child,
    pub stdout: ChildStdout,
}

impl Running {
    pub fn start(command: &mut Command) -> Checked<Running> {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|e| format!("{}: {e}", sh::show(command)))?;
        let stdout = child.stdout.take().expect("piped");
        Ok(Running { child, stdout })
    }

    /// Waits for the first `count` bytes of text.
    pub fn read(&mut self, count: usize) -> Checked<Vec<u8>> {
        let mut text = vec![0; count];
        self.stdout.read_exact(&mut text).map_err(|e| format!("no text: {e}"))?;
        Ok(text)
    }

    pub fn signal(&self, signal: &str) -> Checked<()> {
        send(signal, self.child.id())
    }

    /// Reads what is left, until the end.
    pub fn end(mut self) -> Checked<Said> {
        let (mut out, mut err) = (Vec::new(), String::new());
        let _ = self.stdout.read_to_end(&mut out);
        let _ = self.child.stderr.take().expect("piped").read_to_string(&mut err);
        let status = self.child.wait().map_err(|e| e.to_string())?;
        let code = status.code().or(status.signal().map(|s| 128 + s));
        Ok(Said { code, out: String::from_utf8_lossy(&out).into_owned(), err })
    }
}

/// Sends a signal to a process of ours.
pub fn send(signal: &str, pid: u32) -> Checked<()> {
    let status = Command::new("kill").arg(format!("-{signal}")).arg(pid.to_string()).status();
    status.map(|_| ()).map_err(|e| format!("kill: {e}"))
}

/// The program built for this machine, with the bundled model.
pub fn here(words: &[&str]) -> Command {
    let mut program = Command::new(build::debug_binary(&[]));
    program.args(words).arg("-m").arg(sh::root().join("models/story")).stdin(Stdio::null());
    program
}

/// Makes the deployed program an older one that still runs: nothing minds a byte after its end.
pub fn age(program: &Path) -> Checked<Vec<u8>> {
    let at = |e: std::io::Error| format!("{}: {e}", program.display());
    let mut bytes = fs::read(program).map_err(at)?;
    bytes.push(b'\n');
    fs::write(program, &bytes).map_err(at)?;
    Ok(bytes)
}
