//! The plan of a split: the memory of each stage, and the split that `auto` chooses by it.

use super::{
    ContextName, DeviceMemory, MemoryKind, Plan, PlanItem, add, cpu_scratch_bytes, device_scratch_bytes,
    format_mib, mass_bytes, mul, sum, window_ring,
};
use crate::dims::{FULL_ATTENTION_LAYERS, LAYERS, SLIDING_LAYERS, cache_layers};
use crate::opencl::{self, Cache, DeviceInfo, DeviceType, device, read_bandwidth};
use crate::run::options::{BackendKind, EngineOptions};
use crate::run::placement::state_bytes;
use crate::run::split::{Split, SplitStage, StageDevice};
use files::{Error, Result};

/// The device of an OpenCL stage, if it can be asked.
fn facts_of(o: &EngineOptions, stage: &SplitStage) -> Option<&'static DeviceInfo> {
    let StageDevice::OpenCl(select) = &stage.device else { return None };
    opencl::facts_of(select.as_ref().or(o.cl_device.as_ref()).map(String::as_str))
}

/// The memory of a split's OpenCL devices: the machine's, if one of them has none of its own.
pub(super) fn split_memory(o: &EngineOptions) -> Option<DeviceMemory> {
    let mut stages = o.split_stages().iter().filter(|stage| stage.device != StageDevice::Cpu).peekable();
    stages.peek()?;
    let own =
        |stage| facts_of(o, stage).filter(|facts| !facts.unified_memory).map(|facts| facts.global_memory);
    let total = stages.map(own).try_fold(0, |total, bytes| Some(add(total, bytes?)));
    Some(total.map_or(DeviceMemory::Unified, DeviceMemory::Own))
}

impl Plan {
    /// The part of the mapped weights that the CPU reads: all, or the layers of its stages.
    pub(super) fn host_share(&self) -> u64 {
        let (mapped, stages) = (self.weights.mapped, self.options.split_stages());
        if stages.is_empty() {
            return mapped;
        }
        let of_cpu = stages.iter().filter(|stage| stage.device == StageDevice::Cpu);
        let share = of_cpu.fold(0, |sum, stage| add(sum, self.weights.stage_bytes(&stage.layers)));
        let share = stages.iter().fold(share, |sum, stage| add(sum, self.left_experts(stage)));
        let all = u128::from(self.weights.device.max(1));
        u64::try_from(u128::from(mapped) * u128::from(share) / all).unwrap_or(mapped).min(mapped)
    }

    /// Bytes of a stage's experts that it leaves to the CPU.
    fn left_experts(&self, stage: &SplitStage) -> u64 {
        if stage.experts_on_cpu { self.weights.expert_bytes(&stage.layers) } else { 0 }
    }

    /// The lines of all stages; none without a split.
    pub(super) fn split_items(&self, slots: usize) -> Vec<PlanItem> {
        let stages = self.options.split_stages().iter();
        let bytes = self.weights.mapped - self.host_share();
        let purpose = "weights that other devices have".to_owned();
        let others = PlanItem { purpose, bytes, kind: MemoryKind::Reclaimable };
        stages.flat_map(|stage| self.stage_items(stage, slots)).chain([others]).collect()
    }

    /// The lines of one stage.
    fn stage_items(&self, stage: &SplitStage, slots: usize) -> Vec<PlanItem> {
        let (o, chunk) = (&self.options, self.max_pass_tokens(slots));
        let [of_all, of_local] = self.kv_row_bytes(slots);
        let [full, sliding] = cache_layers(&stage.layers).map(|n| n as u64);
        let rows = add(
            mul(of_all / (FULL_ATTENTION_LAYERS as u64).max(1), full),
            mul(of_local / (SLIDING_LAYERS as u64).max(1), sliding),
        );
        let attended = slots.max(window_ring(o, chunk).rows_per_head(slots));
        let (kind, weights, scratch) = match stage.device {
            // The weights are those that the host has mapped.
            StageDevice::Cpu => (MemoryKind::Own, 0, cpu_scratch_bytes(slots, chunk)),
            StageDevice::OpenCl(_) => {
                let calibration = opencl::calibration_bytes(o.kv_types) as u64;
                let weights =
                    add(self.weights.stage_bytes(&stage.layers) - self.left_experts(stage), calibration);
                let scratch = device_scratch_bytes(attended, chunk, o.sequence_count());
                (MemoryKind::Device, weights, scratch)
            }
        };
        let name = format!("{}, layers {}-{}", stage.device, stage.layers.start, stage.layers.end - 1);
        let lines = [
            ("weights", weights),
            ("KV cache", rows),
            ("recurrent states", state_bytes(&stage.layers, o.sequence_count())),
            ("scratch", scratch),
            ("attention mass", mass_bytes(o, stage.layers.clone(), (slots, chunk))),
        ];
        let item = |(purpose, bytes)| PlanItem { purpose: format!("{name}: {purpose}"), bytes, kind };
        let mut items: Vec<_> = lines.map(item).into();
        if stage.experts_on_cpu {
            let bytes = add(cpu_scratch_bytes(0, chunk), self.thread_bytes());
            items.push(PlanItem {
                purpose: format!("{name}: experts on the CPU"),
                bytes,
                kind: MemoryKind::Own,
            });
        }
        items
    }

    /// The OpenCL devices with memory of their own, and the bytes that their stages need.
    fn device_needs(&self) -> Vec<(&'static DeviceInfo, u64)> {
        let mut needs: Vec<(&'static DeviceInfo, u64)> = Vec::new();
        for stage in self.options.split_stages() {
            let Some(facts) = facts_of(&self.options, stage).filter(|facts| !facts.unified_memory) else {
                continue;
            };
            let items = self.stage_items(stage, self.options.max_seq_len);
            let bytes = sum(items.iter().filter(|item| item.kind == MemoryKind::Device));
            match needs.iter_mut().find(|(known, _)| std::ptr::eq(*known, facts)) {
                Some((_, need)) => *need = add(*need, bytes),
                None => needs.push((facts, bytes)),
            }
        }
        needs
    }

    /// Checks the memory of each device of a split.
    pub(super) fn check_stages(&self, context: ContextName) -> Result<()> {
        let over = self.device_needs().into_iter().find(|(facts, need)| *need > facts.global_memory);
        let Some((facts, need)) = over else { return Ok(()) };
        Err(Error::Memory(format!(
            "{}: needs {} on {} with {}, but it has {}; give it fewer layers, or use `EngineOptions::split` auto",
            self.options.model.display(),
            format_mib(need),
            facts.name,
            context.describe(self.options.max_seq_len),
            format_mib(facts.global_memory)
        )))
    }

    /// Checks that the CPU has room for all layers when a device of a split is lost. What that one and its driver have in
    /// the machine's memory is never freed.
    pub fn check_fallback(&self) -> Result<()> {
        let (cpu, slots) = (self.clone(), self.options.max_seq_len);
        let options = EngineOptions { backend: BackendKind::Cpu, split: None, ..cpu.options };
        let on_cpu = Plan { options, device: None, ..cpu }.needed_bytes();
        let lost = if self.has_own_memory() { 0 } else { self.device_bytes() };
        let need = add(on_cpu, add(lost, self.host_side_bytes(slots, self.max_pass_tokens(slots), false)));
        match self.memory.usable_bytes() {
            Some(have) if need > have && !self.options.split_stages().is_empty() => {
                Err(Error::Memory(format!(
                    "all layers on the CPU need {} of memory, but {} are available",
                    format_mib(need),
                    format_mib(have)
                )))
            }
            _ => Ok(()),
        }
    }

    /// Replaces a split that is to be chosen by the devices' memory and speed: the fastest GPU has as many of the last
    /// layers as fit, the next one as many of those before, and the CPU the rest.
    pub(super) fn resolve_split(mut self) -> Result<Self> {
        if self.options.split != Some(Split::Auto) {
            return Ok(self);
        }
        let mut chosen: Vec<(StageDevice, usize)> = Vec::new();
        for gpu in gpus_by_speed() {
            let left = LAYERS - chosen.iter().map(|(_, layers)| layers).sum::<usize>();
            let with = |layers: usize| {
                let rest = (layers < left).then_some((StageDevice::Cpu, left - layers));
                let own = (StageDevice::OpenCl(Some(gpu.to_string())), layers);
                rest.into_iter().chain([own]).chain(chosen.iter().cloned()).collect::<Vec<_>>()
            };
            if let Some(layers) = (1..=left).rev().find(|&layers| self.fits_split(with(layers))) {
                chosen = with(layers);
                chosen.retain(|(device, _)| *device != StageDevice::Cpu);
            }
        }
        let left = LAYERS - chosen.iter().map(|(_, layers)| layers).sum::<usize>();
        if chosen.is_empty() {
            self.options
                .notice
                .warn("`EngineOptions::split` auto: no GPU has room for a layer; using the CPU");
            (self.options.backend, self.options.split, self.device) = (BackendKind::Cpu, None, None);
            return Ok(self);
        }
        chosen.splice(0..0, (left > 0).then_some((StageDevice::Cpu, left)));
        let split = Split::new(chosen)?;
        self.options.notice.warn(&format!("`EngineOptions::split` auto: {split}"));
        self.options.split = Some(split);
        self.device = split_memory(&self.options);
        Ok(self)
    }

    /// True if each device has room for its stage, and a sixteenth of its memory for others.
    fn fits_split(&self, stages: Vec<(StageDevice, usize)>) -> bool {
        let Ok(split) = Split::new(stages) else { return false };
        let mut plan = self.clone();
        plan.options.split = Some(split);
        plan.device = split_memory(&plan.options);
        let shares_memory = plan.device == Some(DeviceMemory::Unified);
        plan.device_needs().iter().all(|(facts, need)| *need <= facts.global_memory / 16 * 15)
            && (!shares_memory || plan.check().is_ok())
    }
}

/// Numbers of the GPUs, the one that reads its memory fastest first.
fn gpus_by_speed() -> Vec<usize> {
    let _ = opencl::facts_of(None);
    let cpu_too = std::env::var_os(device::CPU_VARIABLE).is_some_and(|value| value == "1");
    let usable = |facts: &DeviceInfo| facts.device_type != DeviceType::Cpu || cpu_too;
    let found = device::list_devices().unwrap_or_default().iter().enumerate();
    let mut gpus: Vec<_> = found.filter(|(_, entry)| usable(&entry.facts)).collect();
    if gpus.len() > 1 {
        gpus.sort_by_cached_key(|(index, entry)| std::cmp::Reverse(read_speed(*index, &entry.facts)));
    }
    gpus.into_iter().map(|(index, _)| index).collect()
}

/// Bytes per second at which a device reads its memory, measured once; 0 if it fails.
fn read_speed(index: usize, facts: &DeviceInfo) -> u64 {
    let (cache, key) = (Cache::for_user(), format!("read bandwidth of {:?}", facts.cache_key_parts()));
    if let Some(known) = cache.get_text(&key).and_then(|text| text.parse().ok()) {
        return known;
    }
    let opened = opencl::open_device(Some(&index.to_string()), Cache::for_user());
    let measured = opened.and_then(|device| read_bandwidth::measure_bandwidth(&device)).unwrap_or(0.0) as u64;
    cache.put_text(&key, &measured.to_string());
    measured
}
