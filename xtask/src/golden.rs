//! `cargo xtask golden`: the golden tests in release here, or the golden set on a device.

mod comparison;
mod remote;

use crate::args::Args;
use crate::error::{Error, Result};
use crate::{device, sh};

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, &[device::FLAGS, &["--model"]].concat(), &["--bless"])?;
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
