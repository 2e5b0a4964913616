//! Flags that say how many threads there are and where they run.

use clap::Args;
use files::{Error, Result};
use numeric::topology::{self, CpuMask};

/// Most threads that can be asked for.
const MOST: usize = 1024;

/// Where threads run.
#[derive(Args, Clone)]
pub(in crate::cli) struct MaskArgs {
    /// Cores to run on, a hexadecimal mask (f0) or a list (4-7; 4,5,7) [default: the machine's big cores]
    #[arg(short = 'C', long, value_name = "MASK")]
    pub cpu_mask: Option<CpuMask>,
}

impl MaskArgs {
    /// How many threads run where the user does not say: one on every core of the mask, or `None` without a mask.
    ///
    /// # Errors
    ///
    /// `Usage` for cores that this process may not use.
    pub fn threads(&self) -> Result<Option<usize>> {
        let Some(mask) = &self.cpu_mask else { return Ok(None) };
        mask.check(&topology::allowed_cores())?;
        Ok(Some(mask.cores().len()))
    }
}

/// How many threads, and where.
#[derive(Args, Clone)]
pub(in crate::cli) struct ThreadArgs {
    /// CPU threads [default: one for each core that --cpu-mask leaves]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub mask: MaskArgs,
}

impl ThreadArgs {
    /// The number of threads; 0 leaves it to the engine.
    pub fn resolve(&self) -> Result<usize> {
        let cores = self.mask.threads()?;
        match self.threads {
            Some(n) if !(1..=MOST).contains(&n) => {
                Err(Error::Usage(format!("--threads {n}: use a number from 1 to {MOST}")))
            }
            Some(n) => Ok(n),
            None => Ok(cores.unwrap_or(0)),
        }
    }
}
