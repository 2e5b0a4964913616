//! `cargo xtask golden`: the golden tests, in release. The tests themselves know the files.

use crate::args::Args;
use crate::error::Result;
use crate::sh;

pub fn run(words: &[String]) -> Result<()> {
    let args = Args::parse(words, &[], &["--bless"])?;
    args.no_rest()?;
    let mut test = sh::cargo(&["test", "--release", "--package", "antigravity", "--test", "golden"]);
    if args.has("--bless") {
        test.env("ANTIGRAVITY_BLESS", "1");
    }
    sh::run(&mut test)
}
