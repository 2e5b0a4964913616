//! Devices that run programs: a phone through adb, an emulated Arm CPU, this machine. A device runs shell scripts and
//! takes files; `shell` and `files` build everything else on these two.

pub mod adb;
pub mod files;
pub mod local;
pub mod marker;
pub mod qemu;
pub mod shell;

use crate::command::{self, quote_word};
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
    /// The absolute path of our directory there.
    fn home(&self) -> &str;
    /// A command, not yet started, that runs `script` in a shell there and connects its streams. If the shell's
    /// environment has `ANTIGRAVITY_EMULATOR`, its words start programs of [`Device::target`].
    fn shell(&self, script: &str) -> Command;
    /// A command like [`Device::shell`] at a terminal there: keys, Ctrl-C included, are passed on as they are typed.
    fn terminal(&self, script: &str) -> Command;
    /// Copies a file to an absolute path there.
    fn push(&self, from: &Path, to: &str) -> Result<()>;
    /// Forwards a port of this machine to one there until the result is dropped.
    fn forward(&self, here: u16, there: u16) -> Result<Forward>;
}

/// A forwarded port, with the command that ends it on drop.
pub struct Forward(Option<Command>);

impl Drop for Forward {
    fn drop(&mut self) {
        let _ = self.0.as_mut().map(command::output);
    }
}

/// The flags that choose a device.
#[derive(Clone, Default, Args)]
pub struct DeviceArgs {
    /// adb: an Android phone; qemu: an emulated Arm CPU; local: this machine [default: adb]
    #[arg(long, value_name = "D", hide_possible_values = true)]
    pub device: Option<DeviceKind>,
    /// The phone, if several are attached [default: $ANDROID_SERIAL]
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
    /// Its name as a flag's value.
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

    /// True if no flag is set.
    pub fn is_empty(&self) -> bool {
        self.device.is_none() && self.serial.is_none() && self.target.is_none()
    }

    fn serial(&self) -> Option<String> {
        self.serial.clone().or_else(|| std::env::var("ANDROID_SERIAL").ok().filter(|s| !s.is_empty()))
    }

    /// The flags as one would type them, each after a space.
    pub fn words(&self) -> String {
        let kind = self.device.map(|kind| kind.word().to_string());
        let serial = if matches!(self.device, None | Some(DeviceKind::Adb)) { self.serial() } else { None };
        let flags = [("device", kind), ("serial", serial), ("target", self.target.clone())].into_iter();
        let flags = flags.filter_map(|(flag, value)| Some(format!(" --{flag} {}", quote_word(&value?))));
        flags.collect()
    }

    /// Opens the device in the flags; by default a phone.
    pub fn open(&self) -> Result<Box<dyn Device>> {
        let only = |flag: &str, of: &str| Err(Error::Usage(format!("{flag} requires --device {of}")));
        let kind = self.device.unwrap_or(DeviceKind::Adb);
        if self.target.is_some() && kind != DeviceKind::Qemu {
            return only("--target", "qemu; a phone reports its own target");
        }
        if self.serial.is_some() && kind != DeviceKind::Adb {
            return only("--serial", "adb");
        }
        match kind {
            DeviceKind::Adb => Ok(Box::new(adb::Adb::open(self.serial().as_deref())?)),
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
