//! How large the release binary may become.

use crate::error::{Error, Result};
use std::path::Path;

/// Bytes allowed for the stripped release binary of the bundled model, by target.
pub const BUDGETS: &[(&str, u64)] =
    &[("aarch64-linux-android", 5_000_000), ("x86_64-unknown-linux-gnu", 6_000_000)];

/// The size of a file, if it is within the budget of `target`.
pub fn check(binary: &Path, target: &str) -> Result<u64> {
    let size = std::fs::metadata(binary).map_err(|e| Error::at(binary, e))?.len();
    match BUDGETS.iter().find(|(t, _)| *t == target) {
        Some(&(_, budget)) if size > budget => Err(Error::at(
            binary,
            format!(
                "{} is over the budget of {} for {target}; `cargo tree` shows what came in, xtask/src/size.rs holds the budget",
                megabytes(size),
                megabytes(budget)
            ),
        )),
        _ => Ok(size),
    }
}

/// `3.21 MB`
pub fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_holds() {
        let file = std::env::temp_dir().join(format!("xtask-size-{}", std::process::id()));
        let (target, budget) = BUDGETS[0];
        let handle = std::fs::File::create(&file).unwrap();
        handle.set_len(budget).unwrap();
        assert_eq!(check(&file, target).unwrap(), budget);
        handle.set_len(budget + 1).unwrap();
        assert!(check(&file, target).unwrap_err().to_string().contains("over the budget of 5.00 MB"));
        assert!(check(&file, "another-target").is_ok());
        std::fs::remove_file(&file).unwrap();
    }
}
