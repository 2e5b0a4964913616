//! Flags that say which device runs what.

use crate::engine::BackendKind;
use crate::error::{Error, Result};
use clap::{Args, ValueEnum};

/// Which device runs the model.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum BackendName {
    Cpu,
    Opencl,
    Hybrid,
    Auto,
}

impl BackendName {
    /// Refuses what this build does not have.
    pub fn kind(self) -> Result<BackendKind> {
        match self {
            BackendName::Cpu => Ok(BackendKind::Cpu),
            BackendName::Opencl => Ok(BackendKind::OpenCl),
            BackendName::Auto => Ok(BackendKind::Auto),
            BackendName::Hybrid => Err(Error::Device(
                "--backend hybrid is not in this build; use --backend cpu or opencl".into(),
            )),
        }
    }
}

/// Where the model runs, and when it moves.
#[derive(Args, Clone)]
pub(in crate::cli) struct DeviceArgs {
    /// Device that runs the model
    #[arg(short, long, value_enum, default_value = "cpu")]
    pub backend: BackendName,
    /// Hybrid: position at which decode moves to the GPU, or auto
    #[arg(long, default_value = "512", value_name = "N")]
    pub switch_threshold: String,
    /// Hybrid: position at which decode moves back to the CPU
    #[arg(long, value_name = "N")]
    pub switch_back: Option<usize>,
    /// OpenCL: the device, by the number or a part of the name that doctor shows [default: the first GPU]
    #[arg(long, value_name = "DEVICE")]
    pub cl_device: Option<String>,
    /// OpenCL: attention on the GPU too
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    pub gpu_attn: bool,
    /// OpenCL: faster kernels where the device has some, whose text may differ from the CPU's; with --gpu-attn
    #[arg(long, requires = "gpu_attn")]
    pub gpu_fast: bool,
    /// Share memory between CPU and GPU where the device can
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = clap::ArgAction::Set)]
    pub zero_copy: bool,
}

impl DeviceArgs {
    /// Checks the flags; the backend.
    pub fn resolve(&self) -> Result<BackendKind> {
        if self.switch_threshold != "auto" && self.switch_threshold.parse::<usize>().is_err() {
            let value = &self.switch_threshold;
            return Err(Error::Usage(format!("--switch-threshold {value}: use a position or auto")));
        }
        self.backend.kind()
    }
}
