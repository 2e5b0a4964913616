//! `cargo xtask golden`: the golden tests in release on this machine, or the golden set on a device.

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
    /// Rewrite the golden files from the results of this machine
    #[arg(long)]
    bless: bool,
}

pub fn run(args: &GoldenArgs) -> Result<()> {
    if !args.device.is_empty() || args.model.model.is_some() {
        if args.bless {
            return Err(Error::Usage(
                "--bless writes the results of this machine; leave --device out".into(),
            ));
        }
        return remote::run(args);
    }
    let mut test =
        command::cargo(&["test", "--release", "--package", "antigravity", "--test", "engine", "golden::"]);
    if args.bless {
        test.env("ANTIGRAVITY_BLESS", "1");
    }
    command::run(&mut test)
}
