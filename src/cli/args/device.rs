//! Flags for the device and the CPU cores that run the model.

use crate::dims::{HAS_EXPERTS, LAYERS};
use crate::run::options::{BackendKind, EngineOptions, FixedSchedule, Side};
use crate::run::split::{Split, StageDevice};
use clap::builder::PossibleValue;
use clap::{ArgAction, Args, ValueEnum};
use files::{Error, Result};
use numeric::pool;
use numeric::topology::{self, CpuMask};

/// Values of `--backend`.
impl ValueEnum for BackendKind {
    fn value_variants<'a>() -> &'a [Self] {
        &[BackendKind::Cpu, BackendKind::OpenCl, BackendKind::Hybrid, BackendKind::Auto]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(match self {
            BackendKind::Cpu => "cpu",
            BackendKind::OpenCl => "opencl",
            BackendKind::Hybrid => "hybrid",
            BackendKind::Auto => "auto",
        }))
    }
}

/// Value of `--prefill-on`.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PrefillDevice {
    Cpu,
    Gpu,
}

/// The device that runs the model, and when a hybrid run switches devices.
#[derive(Args, Clone)]
pub struct DeviceArgs {
    /// Device that runs the model: the CPU, an OpenCL device, both in turn (hybrid), or whichever was measured to be
    /// faster (auto)
    #[arg(short, long, value_enum, default_value = "cpu")]
    pub backend: BackendKind,
    /// OpenCL: device to use, by number or part of its name, as listed by doctor [default: the first GPU]
    #[arg(long, value_name = "DEVICE")]
    pub cl_device: Option<String>,
    /// Devices that compute some layers each, in order: cl:0=12,cl:1=12,cpu=4, or auto (by memory and speed);
    /// cl:0=28,experts=cpu leaves experts to the CPU
    #[arg(long, value_name = "STAGES", conflicts_with = "gpu_layers")]
    pub split: Option<String>,
    /// Layers on the GPU: the last N with the output head, or all; the others are on the CPU (auto: as many as fit)
    #[arg(long, aliases = ["ngl", "n-gpu-layers"], value_name = "N", allow_hyphen_values = true)]
    pub gpu_layers: Option<String>,
    /// All layers on the GPU but for their experts, which stay on the CPU; with --split or --gpu-layers those on GPUs
    #[arg(long, alias = "cmoe")]
    pub cpu_moe: bool,
    /// OpenCL: also compute attention on the GPU
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = ArgAction::Set)]
    pub gpu_attn: bool,
    /// OpenCL: share memory between CPU and GPU if the device supports it
    #[arg(long, num_args = 0..=1, default_missing_value = "true", default_value_t = false, action = ArgAction::Set)]
    pub zero_copy: bool,
    /// OpenCL: wait while kernels are compiled at the first start; without it, generate and chat begin on the CPU
    #[arg(long)]
    pub wait_for_gpu: bool,
    /// Hybrid: position in the context at which generation moves to the GPU; several (512,2048), never, or auto (by
    /// measured speed)
    #[arg(long, default_value = "512", value_name = "N")]
    pub switch_threshold: String,
    /// Hybrid: position in the context at which generation moves back to the CPU; may be several (1024,4096)
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub switch_back: Vec<usize>,
    /// Hybrid: device for prompts of 32 tokens or more [default: cpu]
    #[arg(long, value_enum, value_name = "SIDE")]
    pub prefill_on: Option<PrefillDevice>,
}

impl DeviceArgs {
    /// Checks the flags and sets the options they stand for.
    pub fn apply_to(&self, options: &mut EngineOptions) -> Result<()> {
        let threshold = self.switch_threshold.as_str();
        let measured = threshold == "auto";
        if measured && (self.prefill_on.is_some() || !self.switch_back.is_empty()) {
            return Err(Error::Usage(
                "--switch-threshold auto chooses when to switch; remove --switch-back and --prefill-on"
                    .into(),
            ));
        }
        let to_gpu = match threshold {
            "auto" | "never" => Vec::new(),
            list => list.split(',').map(str::parse).collect::<std::result::Result<_, _>>().map_err(|_| {
                Error::Usage(format!(
                    "--switch-threshold {threshold}: use positions (512 or 512,2048), never or auto"
                ))
            })?,
        };
        let prefill = if self.prefill_on == Some(PrefillDevice::Gpu) { Side::Gpu } else { Side::Cpu };
        options.hybrid = FixedSchedule { prefill, to_gpu, to_cpu: self.switch_back.clone() };
        options.backend = match self.backend {
            BackendKind::Hybrid if measured => BackendKind::Auto,
            kind => kind,
        };
        options.cl_device.clone_from(&self.cl_device);
        options.gpu_attn = self.gpu_attn;
        options.zero_copy = self.zero_copy;
        self.apply_layers(options)
    }

    /// True if a flag gives layers, or parts of them, to devices.
    pub fn is_split(&self) -> bool {
        self.split.is_some() || self.gpu_layers.is_some() || self.cpu_moe
    }

    /// Sets the devices of the layers.
    fn apply_layers(&self, options: &mut EngineOptions) -> Result<()> {
        if !self.is_split() {
            return Ok(());
        }
        let split = match (&self.split, self.gpu_layers.as_deref()) {
            (Some(text), _) => Some(Split::parse(text)?),
            (_, Some("auto")) => Some(Split::Auto),
            (_, None | Some("all" | "-1")) => None,
            (_, Some(count)) => match count.parse() {
                Ok(0) => {
                    options.backend = BackendKind::Cpu;
                    return Ok(());
                }
                Ok(count) if count < LAYERS => Some(Split::with_gpu_layers(count)?),
                Ok(_) => None,
                Err(_) => {
                    return Err(Error::Usage(format!("--gpu-layers {count}: use a number, all or auto")));
                }
            },
        };
        let split = match split {
            _ if self.cpu_moe && !HAS_EXPERTS => {
                return Err(Error::Usage("--cpu-moe: this model has no experts; leave it out".into()));
            }
            Some(split) if self.cpu_moe => Some(split.with_cpu_experts()?),
            None if self.cpu_moe => {
                Some(Split::new([(StageDevice::OpenCl(None), LAYERS)])?.with_cpu_experts()?)
            }
            split => split,
        };
        if matches!(self.backend, BackendKind::Hybrid | BackendKind::Auto)
            || self.zero_copy && split.is_some()
        {
            let other = if self.zero_copy { "--zero-copy" } else { "--backend hybrid or auto" };
            return Err(Error::Usage(format!(
                "--split, --gpu-layers and --cpu-moe cannot be combined with {other}"
            )));
        }
        (options.backend, options.gpu_attn, options.split) = (BackendKind::OpenCl, true, split);
        Ok(())
    }
}

/// Upper limit of `--threads`.
pub const MAX_THREADS: usize = 1024;

/// Returns `threads`, or an error if it is 0 or beyond four times the cores: a mistake, or much slower.
pub fn check_threads(threads: usize) -> Result<usize> {
    let most = match topology::allowed_cores().len() {
        0 => MAX_THREADS,
        cores => MAX_THREADS.min(4 * cores),
    };
    if (1..=most).contains(&threads) {
        return Ok(threads);
    }
    let why = if most < MAX_THREADS { ", four times the cores" } else { "" };
    Err(Error::Usage(format!("--threads {threads}: use a number from 1 to {most}{why}")))
}

/// The cores that threads run on.
#[derive(Args, Clone)]
pub struct MaskArgs {
    /// CPU cores to use: a hexadecimal mask (f0) or a list (4-7 or 4,5,7) [default: performance cores]
    #[arg(short = 'C', long, value_name = "MASK")]
    pub cpu_mask: Option<CpuMask>,
}

impl MaskArgs {
    /// Pins this thread, and all that it starts, to the cores of the mask. Returns the number of cores, which is the
    /// default number of threads, or `None` without a mask. Must run before OpenCL is opened, because a driver's
    /// threads keep the cores they start on.
    ///
    /// # Errors
    ///
    /// `Usage` for cores that this process is not allowed to use.
    pub fn pin_thread(&self) -> Result<Option<usize>> {
        let Some(mask) = &self.cpu_mask else { return Ok(None) };
        mask.check_available(&topology::allowed_cores())?;
        pool::pin_to_cores(mask.cores())
            .map_err(|e| Error::Usage(format!("--cpu-mask {mask}: refused by the system: {e}")))?;
        Ok(Some(mask.cores().len()))
    }
}

/// The number of threads and their cores.
#[derive(Args, Clone)]
pub struct ThreadArgs {
    /// Number of CPU threads [default: one per core used]
    #[arg(short, long, value_name = "N")]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub mask: MaskArgs,
}

impl ThreadArgs {
    /// The number of threads; 0 lets the engine choose.
    pub fn resolve_threads(&self) -> Result<usize> {
        // Before the mask leaves fewer cores.
        let threads = self.threads.map(check_threads).transpose()?;
        let cores = self.mask.pin_thread()?;
        Ok(threads.or(cores).unwrap_or(0))
    }
}
