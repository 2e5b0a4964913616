//! A qemu that counts instructions: the user's, or one built from the distribution's source package.
//!
//! Packages of qemu are often built without plugins.

use crate::error::{Error, Result};
use crate::fetch;
use crate::sh;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

/// qemu for programs of 64-bit Arm, and its plugin `insn`.
pub struct Emulator {
    qemu: PathBuf,
    plugin: PathBuf,
}

/// Builds both in the current folder. The distribution has taken away the firmware that a file of qemu's installs, and
/// newer versions keep the plugin elsewhere.
const BUILD: &str = "
apt-get source qemu
cd qemu-*/
: > pc-bios/meson.build
mkdir build
cd build
../configure --target-list=aarch64-linux-user --enable-plugins --disable-system --disable-tools --disable-docs
ninja qemu-aarch64
cc -O1 -shared -fPIC -o libinsn.so $(ls ../tests/plugin/insn.c ../tests/tcg/plugins/insn.c 2>/dev/null) \
    $(pkg-config --cflags glib-2.0) -I../include/qemu -I../include/plugins
mv qemu-aarch64 libinsn.so ../..
";
const REMEDY: &str =
    "with deb-src lines in apt's sources, sudo apt-get install dpkg-dev && sudo apt-get build-dep qemu";

impl Emulator {
    /// What `QEMU` and `QEMU_PLUGIN` name; else what was built before.
    pub fn of_environment() -> Result<Emulator> {
        let named = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        match (named("QEMU"), named("QEMU_PLUGIN")) {
            (None, None) => Emulator::kept(&kept_in()?).ok_or_else(|| {
                Error::Usage("--count: set QEMU to a qemu-aarch64 with plugins and QEMU_PLUGIN to its libinsn.so, or add --build-qemu".into())
            }),
            (qemu, plugin) => Emulator::new(qemu, plugin),
        }
    }

    fn new(qemu: Option<PathBuf>, plugin: Option<PathBuf>) -> Result<Emulator> {
        let file = |name: &str, path: Option<PathBuf>| match path {
            Some(path) if path.is_file() => fs::canonicalize(&path).map_err(|e| Error::at(&path, e)),
            Some(path) => Err(Error::Usage(format!("{name}={}: there is no such file", path.display()))),
            None => Err(Error::Usage(format!("{name} is not set: QEMU and QEMU_PLUGIN belong together"))),
        };
        Ok(Emulator { qemu: file("QEMU", qemu)?, plugin: file("QEMU_PLUGIN", plugin)? })
    }

    fn kept(dir: &Path) -> Option<Emulator> {
        Emulator::new(Some(dir.join("qemu-aarch64")), Some(dir.join("libinsn.so"))).ok()
    }

    /// The one in the user's cache, built if it is not there: ten minutes on two cores.
    pub fn built() -> Result<Emulator> {
        let dir = kept_in()?;
        if let Some(kept) = Emulator::kept(&dir) {
            return Ok(kept);
        }
        let tools = ["apt-get", "dpkg-source", "ninja", "cc", "pkg-config"];
        if let Some(missing) = tools.into_iter().find(|tool| !sh::on_path(tool)) {
            return Err(Error::Failed(format!("--build-qemu: {missing} is missing: {REMEDY}")));
        }
        let work = dir.join("unfinished");
        let _ = fs::remove_dir_all(&work);
        fs::create_dir_all(&work).map_err(|e| Error::at(&work, e))?;
        eprintln!("building qemu in {}", work.display());
        let mut script = Command::new("sh");
        let status = script.args(["-exc", BUILD]).current_dir(&work).stdout(std::io::stderr()).status();
        if !status.map_err(|e| sh::cannot_start(&script, e))?.success() {
            let left = work.display();
            return Err(Error::Failed(format!(
                "--build-qemu: the build in {left} failed, as said above; {REMEDY}"
            )));
        }
        for file in ["qemu-aarch64", "libinsn.so"] {
            fs::rename(work.join(file), dir.join(file)).map_err(|e| Error::at(&dir.join(file), e))?;
        }
        let _ = fs::remove_dir_all(&work);
        Emulator::kept(&dir).ok_or_else(|| Error::at(&dir, "holds no qemu after its build"))
    }

    /// Packs a model beside its file, so that no run converts it.
    pub fn pack(&self, cpu: &str, program: &Path, model: &Path) -> Result<()> {
        let mut pack = Command::new(&self.qemu);
        pack.args(["-cpu", cpu]).arg(program).args(["pack", "--model-path"]).arg(model);
        let out = sh::output(&mut pack)?;
        if out.status.success() { Ok(()) } else { Err(self.failed(&out)) }
    }

    /// Instructions that a run of the program executes, in all threads.
    pub fn count(&self, cpu: &str, program: &Path, words: &[String]) -> Result<u64> {
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let name =
            format!("antigravity-count-{}-{}", std::process::id(), RUNS.fetch_add(1, Ordering::Relaxed));
        let log = std::env::temp_dir().join(name);
        let mut run = Command::new(&self.qemu);
        run.args(["-cpu", cpu, "-plugin"]).arg(&self.plugin).args(["-d", "plugin", "-D"]).arg(&log);
        let out = sh::output(run.arg(program).args(words))?;
        let text = fs::read_to_string(&log).unwrap_or_default();
        let _ = fs::remove_file(&log);
        if !out.status.success() {
            return Err(self.failed(&out));
        }
        counted(&text).ok_or_else(|| {
            let plugin = self.plugin.display();
            Error::Failed(format!("QEMU_PLUGIN={plugin}: logged no `insns: N`; it is to be qemu's `insn`"))
        })
    }

    fn failed(&self, out: &std::process::Output) -> Error {
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let why =
            said.lines().rfind(|line| !line.trim().is_empty()).map_or("it said nothing".into(), sh::one_line);
        Error::Failed(format!("QEMU={}: ended with {}: {why}", self.qemu.display(), out.status))
    }
}

/// Where what was built is kept.
fn kept_in() -> Result<PathBuf> {
    let folder = fetch::folder().map(|folder| folder.join("qemu"));
    folder.ok_or_else(|| {
        Error::Failed("--build-qemu: there is no home to keep it in: set XDG_CACHE_HOME".into())
    })
}

/// The total of a plugin's log, `total insns: N`; where there is none, the sum of the lines `cpu I insns: N`.
fn counted(log: &str) -> Option<u64> {
    let lines = || log.lines().filter_map(|line| line.split_once(" insns: "));
    let number = |text: &str| text.trim().parse::<u64>().ok();
    if let Some((_, total)) = lines().find(|(what, _)| *what == "total") {
        return number(total);
    }
    let cpus: Option<Vec<u64>> = lines().map(|(_, n)| number(n)).collect();
    cpus.filter(|cpus| !cpus.is_empty()).map(|cpus| cpus.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_all_threads_are_read() {
        assert_eq!(counted("cpu 0 insns: 5\ncpu 1 insns: 7\ntotal insns: 12\n"), Some(12));
        assert_eq!(counted("cpu 0 insns: 5\ncpu 1 insns: 7\n"), Some(12));
        for log in ["", "insns\n", "cpu 0 insns: x\n", "total insns: \n"] {
            assert_eq!(counted(log), None, "{log:?}");
        }
    }

    /// A stand-in for qemu in a folder of its own, with a plugin.
    fn stand_in(name: &str, script: &str) -> (PathBuf, Emulator) {
        let dir = std::env::temp_dir().join(format!("xtask-count-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let (qemu, plugin) = (dir.join("qemu-aarch64"), dir.join("libinsn.so"));
        fs::write(&plugin, "").unwrap();
        sh::write_script(&qemu, &format!("echo \"$*\" >> {}/calls\n{script}", dir.display()));
        let emulator = Emulator::kept(&dir).unwrap();
        (dir, emulator)
    }

    #[test]
    fn an_emulator_is_given_core_plugin_and_program() {
        // The log is the eighth argument; packing has none.
        let (dir, emulator) = stand_in("counts", "[ -z \"$8\" ] || echo 'total insns: 1234567' > $8");
        let words = ["generate".to_string(), "-n".into(), "9".into()];
        assert_eq!(emulator.count("neoverse-n1", Path::new("/p"), &words).unwrap(), 1_234_567);
        emulator.pack("max", Path::new("/p"), Path::new("/m.gguf")).unwrap();
        let calls = fs::read_to_string(dir.join("calls")).unwrap();
        let plugin = fs::canonicalize(dir.join("libinsn.so")).unwrap();
        let count = format!("-cpu neoverse-n1 -plugin {} -d plugin -D ", plugin.display());
        let lines: Vec<&str> = calls.lines().collect();
        assert!(lines[0].starts_with(&count) && lines[0].ends_with(" /p generate -n 9"), "{calls}");
        assert_eq!(lines[1], "-cpu max /p pack --model-path /m.gguf");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn what_is_missing_is_named_in_a_line() {
        let said = |found: Result<u64>| found.unwrap_err().to_string();
        let (dir, emulator) = stand_in("silent", "exit 0");
        let none = said(emulator.count("max", Path::new("/p"), &[]));
        assert!(none.contains("QEMU_PLUGIN=") && none.contains("`insn`"), "{none}");
        fs::remove_dir_all(dir).unwrap();
        let (dir, emulator) = stand_in("fails", "echo \"qemu: unknown option 'plugin'\" >&2; exit 1");
        let fails = said(emulator.count("max", Path::new("/p"), &[]));
        assert!(fails.contains("QEMU=") && fails.ends_with("unknown option 'plugin'"), "{fails}");
        let other = |qemu: Option<&str>, plugin: Option<&str>| {
            let path = |name: &str| dir.join(name);
            Emulator::new(qemu.map(path), plugin.map(path)).err().unwrap().to_string()
        };
        let said = [
            other(Some("nothing"), Some("libinsn.so")),
            other(Some("qemu-aarch64"), Some("nothing")),
            other(Some("qemu-aarch64"), None),
        ];
        for (text, name) in said.iter().zip(["QEMU=", "QEMU_PLUGIN=", "QEMU_PLUGIN is not set"]) {
            assert!(text.starts_with(name) && text.lines().count() == 1, "{text}");
        }
        fs::remove_dir_all(dir).unwrap();
    }
}
