//! This machine as a device, and the base of the emulated one.

use super::{Device, Forward};
use crate::error::{Error, Result};
use crate::targets;
use std::path::Path;
use std::process::Command;

/// A shell of this machine, and a directory for deployments.
pub struct Local {
    pub(super) name: String,
    pub(super) target: String,
    pub(super) home: String,
    /// Environment variables of the shell.
    pub(super) environment: Vec<(&'static str, String)>,
}

impl Local {
    pub fn open() -> Local {
        Local {
            name: "this machine".into(),
            target: targets::host_triple(),
            home: home("local"),
            environment: Vec::new(),
        }
    }
}

/// The directory under cargo's target directory that stands for a device's storage.
pub(super) fn home(kind: &str) -> String {
    let dir = targets::target_dir().join("device").join(kind);
    dir.to_str().expect("cargo's target directory has a UTF-8 name").into()
}

impl Device for Local {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn target(&self) -> &str {
        &self.target
    }

    fn home(&self) -> &str {
        &self.home
    }

    fn shell(&self, script: &str) -> Command {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]).env_remove("ANTIGRAVITY_EMULATOR").envs(self.environment.iter().cloned());
        shell
    }

    fn terminal(&self, script: &str) -> Command {
        self.shell(script)
    }

    fn push(&self, from: &Path, to: &str) -> Result<()> {
        std::fs::copy(from, to).map(|_| ()).map_err(|e| Error::Device(format!("{}: {to}: {e}", self.name)))
    }

    fn forward(&self, here: u16, there: u16) -> Result<Forward> {
        if here == there {
            return Ok(Forward(None));
        }
        Err(Error::Usage(format!(
            "--port {here} requires --device adb; for {}, give --port after --",
            self.name
        )))
    }
}
