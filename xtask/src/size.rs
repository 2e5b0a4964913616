//! How large release binaries may become.
//!
//! The least build was meant to be 2.5 MB, which the packages do not allow. Of its size OpenCL is 0.3 MB and regular
//! expressions are 0.8, 0.47 of code and 0.35 of Unicode tables: `tokenizers` asks for `regex` with all its default
//! features, so neither slower engines nor fewer tables can be chosen. Rust's standard library is 0.5 MB and as it was
//! built; 0.16 of that print backtraces. Of kernels' texts, 0.12, the 0.05 that only NVIDIA runs are left out of Android's.

use crate::error::{Error, Result};
use crate::targets::Features;
use std::path::Path;

/// The largest size of a stripped release binary of the bundled model.
pub struct Budget {
    pub target: &'static str,
    pub features: Features,
    pub bytes: u64,
}

/// One line a binary that tests build and weigh.
#[rustfmt::skip]
pub const BUDGETS: &[Budget] = &[
    Budget { target: "aarch64-linux-android", features: Features::Default, bytes: 6_800_000 },
    Budget { target: "aarch64-linux-android", features: Features::None, bytes: 4_120_000 },
    Budget { target: "x86_64-unknown-linux-gnu", features: Features::Default, bytes: 9_360_000 },
];

/// Finds out whether there is a budget for a target.
pub fn has_budget(target: &str) -> bool {
    BUDGETS.iter().any(|b| b.target == target)
}

/// The size of a file, if it is within its budget.
pub fn check(binary: &Path, target: &str, features: Features) -> Result<u64> {
    let size = std::fs::metadata(binary).map_err(|e| Error::at(binary, e))?.len();
    match BUDGETS.iter().find(|b| b.target == target && b.features == features) {
        Some(&Budget { bytes, .. }) if size > bytes => Err(Error::at(
            binary,
            format!(
                "{} is over the budget of {} for {target} {}; `cargo tree` shows what came in, xtask/src/size.rs holds the budget",
                megabytes(size),
                megabytes(bytes),
                features.words()
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
        let handle = std::fs::File::create(&file).unwrap();
        for &Budget { target, features, bytes } in BUDGETS {
            handle.set_len(bytes).unwrap();
            assert_eq!(check(&file, target, features).unwrap(), bytes);
            handle.set_len(bytes + 1).unwrap();
            let said = check(&file, target, features).unwrap_err().to_string();
            assert!(said.contains(&format!("over the budget of {}", megabytes(bytes))), "{said}");
        }
        assert!(check(&file, "another-target", Features::Default).is_ok());
        std::fs::remove_file(&file).unwrap();
    }
}
