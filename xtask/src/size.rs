//! Maximum sizes of release binaries.
//!
//! The goal for the smallest build was 2.5 MB; the packages do not allow it. OpenCL takes 0.3 MB and regular
//! expressions 0.8 (0.47 code, 0.35 Unicode tables): `tokenizers` asks for `regex` with all default features, so
//! neither slower engines nor fewer tables can be chosen. Rust's standard library takes 0.5 MB as built, 0.16 of it for
//! backtraces. Kernel sources take 0.12; the 0.05 that only NVIDIA runs are left out on Android.
//!
//! The models of 2026 (configs, tensor names, tokenizers, forms of tool calls), the larger page, typing ahead and
//! progress lines added 0.23 MB on x86-64, 0.17 on Android and 0.1 to the smallest build; of the forward pass, a binary
//! has only what its model uses.
//!
//! All block formats of GGUF, each with its kernels for five instruction sets on x86-64 and three on Arm, and the one
//! that is quantised to, added 0.5 MB on x86-64 and 0.23 on Android. Attention over rows of five and six bits, adapters
//! and quantised checkpoints added 0.3 MB on x86-64, 0.2 on Android and to the smallest build. Splits, embeddings, Gemma
//! 4's assistant, and the configs and names of Mamba2's families added 0.43 MB on x86-64, 0.24 on Android and 0.19 to the
//! smallest build. Kernels for Mamba2, experts on either device, locked experts, pipelines, scores and reranking added
//! 0.13 MB on x86-64, 0.1 on Android and 0.07 to the smallest build.

use crate::error::{AtPath, Error, Result};
use crate::targets::Features;
use std::path::Path;

/// The maximum size of a stripped release binary with the bundled model.
pub struct Budget {
    pub target: &'static str,
    pub features: Features,
    pub bytes: u64,
}

/// One line per binary that the tests build and measure. That for x86-64 takes two cores six minutes more.
#[rustfmt::skip]
pub const BUDGETS: &[Budget] = &[
    Budget { target: "aarch64-linux-android", features: Features::Default, bytes: 8_500_000 },
    Budget { target: "aarch64-linux-android", features: Features::None, bytes: 5_200_000 },
];

/// The size of a file in bytes; an error if it is over its budget.
pub fn check(binary: &Path, target: &str, features: Features) -> Result<u64> {
    let size = std::fs::metadata(binary).at(binary)?.len();
    match BUDGETS.iter().find(|b| b.target == target && b.features == features) {
        Some(&Budget { bytes, .. }) if size > bytes => Err(Error::at(
            binary,
            format!(
                "{} is over the budget of {} for {target} {}; see `cargo tree` for new dependencies; the budget is in xtask/src/size.rs",
                megabytes(size),
                megabytes(bytes),
                features.words()
            ),
        )),
        _ => Ok(size),
    }
}

/// A number of bytes as `3.21 MB`.
pub fn megabytes(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binaries_over_their_budget_fail() {
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
