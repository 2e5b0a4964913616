//! Splits of a model over several devices: the layers of each.

use crate::dims::{HAS_EXPERTS, LAYERS};
use crate::model::split::stage_ranges;
use files::{Error, Result};
use std::fmt;
use std::ops::Range;

/// Device of a stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StageDevice {
    /// The CPU.
    Cpu,
    /// An OpenCL device, by number or part of its name; `None` takes the first GPU.
    OpenCl(Option<String>),
}

impl fmt::Display for StageDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StageDevice::Cpu => f.write_str("cpu"),
            StageDevice::OpenCl(None) => f.write_str("cl"),
            StageDevice::OpenCl(Some(name)) => write!(f, "cl:{name}"),
        }
    }
}

/// A device with the layers that it computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SplitStage {
    /// The device.
    pub device: StageDevice,
    /// Its layers.
    pub layers: Range<usize>,
    /// True if their experts stay on the CPU.
    pub experts_on_cpu: bool,
}

/// Last part of a split whose experts stay on the CPU.
const CPU_EXPERTS: &str = ",experts=cpu";

/// The devices that compute a model's layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Split {
    /// Chosen by the memory and the speed of the devices when the model is opened.
    Auto,
    /// These, in the order of layers.
    Stages(Vec<SplitStage>),
}

impl Split {
    /// A split of some devices with numbers of layers.
    ///
    /// # Errors
    ///
    /// Errors of [`stage_ranges`].
    pub fn new(stages: impl IntoIterator<Item = (StageDevice, usize)>) -> Result<Self> {
        let (devices, counts): (Vec<_>, Vec<_>) = stages.into_iter().unzip();
        let stages = devices.into_iter().zip(stage_ranges(&counts)?);
        let stage = |(device, layers)| SplitStage { device, layers, experts_on_cpu: false };
        Ok(Self::Stages(stages.map(stage).collect()))
    }

    /// Reads `auto`, or devices with their numbers of layers: `cl:0=12,cpu=4`. `,experts=cpu` may follow.
    ///
    /// # Errors
    ///
    /// `Usage` for anything else, and errors of [`Split::new`].
    pub fn parse(text: &str) -> Result<Self> {
        if let Some(stages) = text.strip_suffix(CPU_EXPERTS) {
            return Self::parse(stages)?.with_cpu_experts();
        }
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let stage = |part: &str| {
            let (device, layers) = part.rsplit_once('=')?;
            let device = match device.split_once(':') {
                _ if device == "cpu" => StageDevice::Cpu,
                _ if device == "cl" => StageDevice::OpenCl(None),
                Some(("cl", name)) if !name.is_empty() => StageDevice::OpenCl(Some(name.into())),
                _ => return None,
            };
            Some((device, layers.parse().ok()?))
        };
        let stages: Option<Vec<_>> = text.split(',').map(stage).collect();
        match stages {
            Some(stages) => Self::new(stages),
            None => Err(Error::Usage(format!(
                "`EngineOptions::split` {text}: use devices with their numbers of layers (cl:0=12,cpu=4), or auto"
            ))),
        }
    }

    /// Leaves the experts of layers on OpenCL devices to the CPU.
    ///
    /// # Errors
    ///
    /// `Usage` if the model has none, or if the devices are not named yet.
    pub fn with_cpu_experts(self) -> Result<Self> {
        let why = match self {
            _ if !HAS_EXPERTS => "this model has no experts; leave it out",
            Self::Auto => "not with auto; give each device its number of layers (cl:0=12,experts=cpu)",
            Self::Stages(mut stages) => {
                stages.iter_mut().for_each(|stage| stage.experts_on_cpu = stage.device != StageDevice::Cpu);
                return Ok(Self::Stages(stages));
            }
        };
        Err(Error::Usage(format!("`EngineOptions::split` experts=cpu: {why}")))
    }

    /// The last `count` layers, and the output head, on an OpenCL device, and the others on the CPU.
    ///
    /// # Errors
    ///
    /// Errors of [`Split::new`].
    pub fn with_gpu_layers(count: usize) -> Result<Self> {
        Self::new([(StageDevice::Cpu, LAYERS - count), (StageDevice::OpenCl(None), count)])
    }
}

/// The split as on the command line: `cl:0=12,cpu=4`.
impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Split::Stages(stages) = self else { return f.write_str("auto") };
        let stage = |s: &SplitStage| format!("{}={}", s.device, s.layers.len());
        f.write_str(&stages.iter().map(stage).collect::<Vec<_>>().join(","))?;
        if stages.iter().any(|stage| stage.experts_on_cpu) { f.write_str(CPU_EXPERTS) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_names_devices_and_all_layers() {
        let (first, rest) = (1, LAYERS - 1);
        let text = format!("cl:0={first},cpu={rest}");
        let Ok(Split::Stages(stages)) = Split::parse(&text) else { panic!("{text}") };
        assert_eq!(stages[0].device, StageDevice::OpenCl(Some("0".into())));
        assert_eq!((stages[0].layers.clone(), stages[1].layers.clone()), (0..1, 1..LAYERS));
        assert_eq!(Split::Stages(stages).to_string(), text);
        for wrong in ["", "cl", "cl:=4", "gpu=4", "cl:0=x", "cpu=1,", &format!("cpu={}", LAYERS + 1), "cpu=0"]
        {
            let found = Split::parse(wrong);
            assert!(matches!(&found, Err(Error::Usage(why)) if !why.contains('\n')), "{wrong}: {found:?}");
        }
        let all = format!("cl={LAYERS},experts=cpu");
        match Split::parse(&all) {
            Ok(split) if HAS_EXPERTS => assert_eq!(split.to_string(), all),
            Err(Error::Usage(why)) if !HAS_EXPERTS => assert!(why.ends_with("no experts; leave it out")),
            found => panic!("{all}: {found:?}"),
        }
        assert_eq!(Split::with_gpu_layers(rest).unwrap().to_string(), format!("cpu={first},cl={rest}"));
    }
}
