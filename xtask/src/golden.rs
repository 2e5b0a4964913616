//! `cargo xtask golden`: the golden tests in release here, or the golden set on a device.

pub mod case;
pub mod comparison;
mod remote;

use crate::error::{Error, Result};
use crate::{build, command, device};
use clap::Args;

#[derive(Args)]
pub struct GoldenArgs {
    #[command(flatten)]
    device: device::DeviceArgs,
    #[command(flatten)]
    model: build::ModelArgs,
    /// Write the golden files anew, from what this machine computes
    #[arg(long)]
    bless: bool,
}

pub fn run(args: &GoldenArgs) -> Result<()> {
    let elsewhere = !args.device.is_empty() || args.model.model.is_some();
    if elsewhere && args.bless {
        return Err(Error::Usage("--bless writes what this machine computes; leave --device out".into()));
    }
    if elsewhere {
        return remote::run(args);
    }
    let mut test =
        command::cargo(&["test", "--release", "--package", "antigravity", "--test", "engine", "golden::"]);
    if args.bless {
        test.env("ANTIGRAVITY_BLESS", "1");
    }
    command::run(&mut test)
}
