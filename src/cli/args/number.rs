//! The range check of flags that take a number.

use files::{Error, Result};

/// `n`, or an error that names the flag if `n` is not in `1..=most`.
pub fn within(flag: &str, n: usize, most: usize) -> Result<usize> {
    if (1..=most).contains(&n) {
        Ok(n)
    } else {
        Err(Error::Usage(format!("{flag} {n}: use a number from 1 to {most}")))
    }
}
