//! Where programs can run: a phone through adb, an emulated Arm CPU, this machine. A device runs shell
//! scripts and takes files; everything else is built on these two (`shell`, `files`).

pub mod adb;
pub mod files;
pub mod local;
pub mod marker;
pub mod qemu;
pub mod shell;

use crate::args::{Args, Flag};
use crate::error::{Error, Result};
use crate::sh;
use std::path::Path;
use std::process::Command;

/// A machine with a POSIX shell.
pub trait Device: Sync {
    /// What messages call it.
    fn name(&self) -> String;
    /// The target triple of the programs it runs.
    fn target(&self) -> &str;
    /// The absolute directory there that is ours.
    fn home(&self) -> &str;
    /// A process, not yet started, whose streams are those of a shell there that runs `script`. Where
    /// the shell's environment has `ANTIGRAVITY_EMULATOR`, its words start a program of [`Device::target`].
    fn shell(&self, script: &str) -> Command;
    /// A process like [`Device::shell`], whose streams there are a terminal, as ours are: keys go there as they are
    /// typed, Ctrl-C included.
    fn terminal(&self, script: &str) -> Command;
    /// Copies a file to an absolute path there.
    fn push(&self, from: &Path, to: &str) -> Result<()>;
    /// Lets a port of this machine lead to one there, for as long as what is returned lives.
    fn forward(&self, here: u16, there: u16) -> Result<Forward>;
}

/// A port of this machine that leads to a device; what ends that is done when this is dropped.
pub struct Forward(Option<Command>);

impl Drop for Forward {
    fn drop(&mut self) {
        let _ = self.0.as_mut().map(sh::output);
    }
}

/// The flags that [`select`] reads.
pub const FLAGS: &[Flag] = &[
    Flag::valued(
        "--device",
        "D",
        "adb: an Android phone; qemu: an emulated Arm CPU; local: this machine [adb]",
    ),
    Flag::valued("--serial", "S", "which phone, where several are attached [$ANDROID_SERIAL]"),
    Flag::valued("--target", "T", "the target triple that qemu emulates"),
];

/// The device that the flags name; without flags a phone.
pub fn select(args: &Args) -> Result<Box<dyn Device>> {
    let (kind, serial, target) = (args.value("--device"), args.value("--serial"), args.value("--target"));
    let only = |flag: &str, of: &str| Err(Error::Usage(format!("{flag} is for --device {of}")));
    match kind.unwrap_or("adb") {
        "adb" if target.is_some() => only("--target", "qemu; a phone says itself what it runs"),
        "adb" => {
            let from_environment = std::env::var("ANDROID_SERIAL").ok().filter(|s| !s.is_empty());
            Ok(Box::new(adb::Adb::open(serial.map(String::from).or(from_environment).as_deref())?))
        }
        _ if serial.is_some() => only("--serial", "adb"),
        "qemu" => Ok(Box::new(qemu::open(target)?)),
        "local" if target.is_some() => only("--target", "qemu"),
        "local" => Ok(Box::new(local::Local::open())),
        other => Err(Error::Usage(format!("--device {other}: use adb, qemu or local"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(words: &str) -> Result<Box<dyn Device>> {
        let words: Vec<String> = words.split_whitespace().map(String::from).collect();
        select(&Args::parse(&words, &[FLAGS])?)
    }

    #[test]
    fn flags_that_do_not_fit_are_usage_errors() {
        for words in [
            "--device toaster",
            "--device local --serial x",
            "--device qemu --serial x",
            "--device local --target x",
            "--target aarch64-linux-android",
            "--device qemu --target riscv64gc-unknown-linux-gnu",
        ] {
            let e = chosen(words).err().unwrap_or_else(|| panic!("{words}"));
            assert_eq!(e.exit_code(), 2, "{words}: {e}");
        }
    }

    #[test]
    fn this_machine_is_always_there() {
        let local = chosen("--device local").unwrap();
        assert_eq!(local.name(), "this machine");
        assert!(local.home().starts_with('/'));
    }
}
