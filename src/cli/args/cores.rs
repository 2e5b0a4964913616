//! Flags that say how many threads there are and where they run.

use super::number::within;
use clap::Args;
use files::{Error, Result};
use numeric::pool;
use numeric::topology::{self, CpuMask};

/// Most threads that can be asked for.
pub const MOST_THREADS: usize = 1024;

/// Where threads run.
#[derive(Args, Clone)]
pub struct MaskArgs {
    /// Cores to run on: a hexadecimal mask (f0) or a list (4-7 or 4,5,7) [default: the big cores]
    #[arg(short = 'C', long, value_name = "MASK")]
    pub cpu_mask: Option<CpuMask>,
}

impl MaskArgs {
    /// Keeps this thread, and all that it starts, on the cores of the mask: how many these are, which is the default number
    /// of threads. `None` without a mask. It comes before a driver of OpenCL is asked, whose threads stay where they start.
    ///
    /// # Errors
    ///
    /// `Usage` for cores that this process may not use.
    pub fn keep(&self) -> Result<Option<usize>> {
        let Some(mask) = &self.cpu_mask else { return Ok(None) };
        mask.check(&topology::allowed_cores())?;
        pool::keep_to(mask.cores())
            .map_err(|e| Error::Usage(format!("--cpu-mask {mask}: the system refuses it: {e}")))?;
        Ok(Some(mask.cores().len()))
    }
}

/// How many threads, and where.
#[derive(Args, Clone)]
pub struct ThreadArgs {
    /// CPU threads [default: one for each core to run on]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub mask: MaskArgs,
}

impl ThreadArgs {
    /// The number of threads; 0 leaves it to the engine.
    pub fn resolve(&self) -> Result<usize> {
        let of_mask = self.mask.keep()?;
        match self.threads {
            Some(n) => within("--threads", n, MOST_THREADS),
            None => Ok(of_mask.unwrap_or(0)),
        }
    }
}
