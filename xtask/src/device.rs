//! Devices that run programs: a phone through adb, an emulated Arm CPU, this machine. A device runs shell
//! scripts and takes files; everything else is built on these two (`shell`, `files`).

pub mod adb;
pub mod files;
pub mod local;
pub mod marker;
pub mod qemu;
pub mod shell;

use crate::command;
use crate::error::{Error, Result};
use clap::{Args, ValueEnum};
use std::path::Path;
use std::process::Command;

/// A machine with a POSIX shell.
pub trait Device: Sync {
    /// Its name in messages.
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
        let _ = self.0.as_mut().map(command::output);
    }
}

/// The device that a task is about.
#[derive(Clone, Default, Args)]
pub struct DeviceArgs {
    /// adb: an Android phone; qemu: an emulated Arm CPU; local: this machine [default: adb]
    #[arg(long, value_name = "D", hide_possible_values = true)]
    pub device: Option<DeviceKind>,
    /// The phone, where several are attached [default: $ANDROID_SERIAL]
    #[arg(long, value_name = "S")]
    pub serial: Option<String>,
    /// The target triple that qemu emulates
    #[arg(long, value_name = "T")]
    pub target: Option<String>,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
pub enum DeviceKind {
    Adb,
    Qemu,
    Local,
}

impl DeviceKind {
    /// The word that names it.
    pub fn word(self) -> &'static str {
        match self {
            DeviceKind::Adb => "adb",
            DeviceKind::Qemu => "qemu",
            DeviceKind::Local => "local",
        }
    }
}

impl DeviceArgs {
    pub fn of_kind(kind: DeviceKind) -> DeviceArgs {
        DeviceArgs { device: Some(kind), ..DeviceArgs::default() }
    }

    /// No flag names a device.
    pub fn is_empty(&self) -> bool {
        self.device.is_none() && self.serial.is_none() && self.target.is_none()
    }

    /// Opens the device that the flags name; without flags a phone.
    pub fn open(&self) -> Result<Box<dyn Device>> {
        let only = |flag: &str, of: &str| Err(Error::Usage(format!("{flag} is for --device {of}")));
        let kind = self.device.unwrap_or(DeviceKind::Adb);
        if self.target.is_some() && kind != DeviceKind::Qemu {
            return only("--target", "qemu; a phone says itself what it runs");
        }
        if self.serial.is_some() && kind != DeviceKind::Adb {
            return only("--serial", "adb");
        }
        match kind {
            DeviceKind::Adb => {
                let from_environment = std::env::var("ANDROID_SERIAL").ok().filter(|s| !s.is_empty());
                Ok(Box::new(adb::Adb::open(self.serial.clone().or(from_environment).as_deref())?))
            }
            DeviceKind::Qemu => Ok(Box::new(qemu::open(self.target.as_deref())?)),
            DeviceKind::Local => Ok(Box::new(local::Local::open())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_that_do_not_fit_are_usage_errors() {
        let open = |line| crate::parse_args::<DeviceArgs>(line)?.open();
        for line in [
            "--device toaster",
            "--device local --serial x",
            "--device qemu --serial x",
            "--device local --target x",
            "--target aarch64-linux-android",
            "--device qemu --target riscv64gc-unknown-linux-gnu",
        ] {
            let e = open(line).err().unwrap_or_else(|| panic!("{line}"));
            assert_eq!(e.exit_code(), 2, "{line}: {e}");
        }
        let local = open("--device local").unwrap();
        assert!(local.name() == "this machine" && local.home().starts_with('/'));
    }
}
