//! `cargo xtask golden`: the golden tests in release here, or the golden set on a device.

pub mod case;
pub mod comparison;
mod remote;

use crate::args::{Args, Flag, Flags};
use crate::error::{Error, Result};
use crate::{build, device, sh};

pub const FLAGS: Flags = &[
    device::FLAGS,
    build::MODEL,
    &[Flag::switch("--bless", "write the golden files anew, from what this machine computes")],
];

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, FLAGS)?;
    args.no_rest()?;
    let elsewhere = ["--device", "--serial", "--target", "--model"].iter().any(|f| args.value(f).is_some());
    if elsewhere && args.has("--bless") {
        return Err(Error::Usage("--bless writes what this machine computes; leave --device out".into()));
    }
    if elsewhere {
        return remote::run(&args);
    }
    let mut test =
        sh::cargo(&["test", "--release", "--package", "antigravity", "--test", "engine", "golden::"]);
    if args.has("--bless") {
        test.env("ANTIGRAVITY_BLESS", "1");
    }
    sh::run(&mut test)
}
