//! Flags that say which device runs what.

use crate::run::options::BackendKind;
use crate::run::session::{Fixed, Side};
use clap::{Args, ValueEnum};
use files::{Error, Result};

/// Which device runs the model.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum BackendName {
    Cpu,
    Opencl,
    Hybrid,
    Auto,
}

impl BackendName {
    /// For the engine.
    pub fn kind(self) -> BackendKind {
        match self {
            BackendName::Cpu => BackendKind::Cpu,
            BackendName::Opencl => BackendKind::OpenCl,
            BackendName::Hybrid => BackendKind::Hybrid,
            BackendName::Auto => BackendKind::Auto,
        }
    }
}

/// Where prompts run in a hybrid session.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(in crate::cli) enum SideName {
    Cpu,
    Gpu,
}

/// Where the model runs, and when it moves.
#[derive(Args, Clone)]
pub(in crate::cli) struct DeviceArgs {
    /// Device that runs the model
    #[arg(short, long, value_enum, default_value = "cpu")]
    pub backend: BackendName,
    /// Hybrid: position at which decode moves to the GPU, several as 512,2048; never; or auto: by measured speed
    #[arg(long, default_value = "512", value_name = "N")]
    pub switch_threshold: String,
    /// Hybrid: position at which decode moves back to the CPU, several as 1024,4096
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub switch_back: Vec<usize>,
    /// Hybrid: device that computes prompts of 32 tokens and more [default: cpu]
    #[arg(long, value_enum, value_name = "SIDE")]
    pub prefill_on: Option<SideName>,
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
    /// Checks the flags: the backend, and who runs what when there are two.
    pub fn resolve(&self) -> Result<(BackendKind, Fixed)> {
        let threshold = self.switch_threshold.as_str();
        let measured = threshold == "auto";
        let positions =
            || threshold.split(',').map(str::parse).collect::<std::result::Result<Vec<usize>, _>>();
        if measured && (self.prefill_on.is_some() || !self.switch_back.is_empty()) {
            return Err(Error::Usage(
                "--switch-threshold auto chooses by itself; leave --switch-back and --prefill-on out".into(),
            ));
        }
        let to_gpu = match threshold {
            "auto" | "never" => Vec::new(),
            _ => positions().map_err(|_| {
                Error::Usage(format!(
                    "--switch-threshold {threshold}: use positions, as 512 or 512,2048, never or auto"
                ))
            })?,
        };
        let kind = match (self.backend, measured) {
            (BackendName::Hybrid, true) => BackendKind::Auto,
            (name, _) => name.kind(),
        };
        let prefill = match self.prefill_on {
            Some(SideName::Gpu) => Side::Gpu,
            Some(SideName::Cpu) | None => Side::Cpu,
        };
        Ok((kind, Fixed { prefill, to_gpu, to_cpu: self.switch_back.clone() }))
    }
}
