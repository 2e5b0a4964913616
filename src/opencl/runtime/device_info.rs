//! Properties that a device reports.

/// Kind of device, in the order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceType {
    Gpu,
    Accelerator,
    Other,
    /// Selected only by name, or if `ANTIGRAVITY_OPENCL_CPU=1`.
    Cpu,
}

impl DeviceType {
    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            DeviceType::Gpu => "GPU",
            DeviceType::Accelerator => "accelerator",
            DeviceType::Other => "other",
            DeviceType::Cpu => "CPU",
        }
    }
}

/// Kind of local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalMemory {
    /// Dedicated fast memory.
    Dedicated,
    /// Part of global memory: fine for exchange within a group, useless for tiles.
    Global,
}

/// Extension with a dot product of four packed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DotExtension {
    /// `cl_khr_integer_dot_product`
    Khr,
    /// `cl_arm_integer_dot_product_int8`: both operands have the same signedness.
    Arm,
    /// `cl_qcom_dot_product8`
    Qcom,
}

/// Properties that a device reports; sizes in bytes, 0 or empty if it reports none.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    pub device_type: DeviceType,
    pub name: String,
    pub vendor: String,
    /// Version of the device, e.g. `OpenCL 3.0 …`.
    pub version: String,
    /// Version of the language, e.g. `OpenCL C 1.2 …`.
    pub c_version: String,
    pub driver: String,
    pub platform: String,
    pub platform_version: String,
    /// Names separated by spaces; see [`DeviceInfo::has_extension`].
    pub extensions: String,
    /// Size of the largest buffer.
    pub max_alloc: u64,
    pub global_memory: u64,
    pub local_memory: u64,
    pub local_memory_kind: LocalMemory,
    /// Maximum work-items of a work-group; a kernel may allow fewer.
    pub max_work_group: usize,
    pub compute_units: u32,
    pub clock_mhz: u32,
    /// CPU and device share memory.
    pub unified_memory: bool,
    /// Alignment of a buffer's start, in bytes.
    pub base_align: usize,
    /// f32 division and square root can be correctly rounded.
    pub has_correct_divide: bool,
    /// NVIDIA's compute capability, major and minor.
    pub compute_capability: Option<(u32, u32)>,
    /// Maximum texels of an image of a buffer; 0 if there are no such images.
    pub image_texels: usize,
}

impl DeviceInfo {
    /// Properties of a device that reports nothing.
    #[cfg(test)]
    pub(super) fn unknown_device() -> Self {
        let text = String::new;
        Self {
            device_type: DeviceType::Other,
            name: text(),
            vendor: text(),
            version: text(),
            c_version: text(),
            driver: text(),
            platform: text(),
            platform_version: text(),
            extensions: text(),
            max_alloc: 0,
            global_memory: 0,
            local_memory: 0,
            local_memory_kind: LocalMemory::Global,
            max_work_group: 0,
            compute_units: 0,
            clock_mhz: 0,
            unified_memory: false,
            base_align: 0,
            has_correct_divide: false,
            compute_capability: None,
            image_texels: 0,
        }
    }

    /// True if an extension is listed.
    pub fn has_extension(&self, extension: &str) -> bool {
        self.extensions.split_ascii_whitespace().any(|e| e == extension)
    }

    /// True if the device computes with `half`; loading and storing it always works.
    pub fn has_fp16(&self) -> bool {
        self.has_extension("cl_khr_fp16")
    }

    /// True if kernels can write to host memory without a copy: see [`Place::HostPinned`](super::Place::HostPinned).
    pub fn writes_to_host(&self) -> bool {
        self.has_extension("cl_nv_create_buffer")
    }

    /// True for PoCL, which has its own cache of compiled kernels. If asked for a binary, it compiles all kernels once
    /// more, for any work-group size: the first start then takes three times as long, and later ones no less.
    pub fn has_program_cache(&self) -> bool {
        self.platform == "Portable Computing Language"
    }

    /// Number of queued launches after which the queue is flushed. Otherwise some phone drivers do nothing until
    /// someone waits, and the idle GPU lowers its clock. The numbers are those of ML Drift.
    pub fn launches_per_flush(&self) -> Option<u32> {
        let vendors = [("ARM", 24), ("Imagination", 16)];
        vendors.into_iter().find(|(vendor, _)| self.vendor.starts_with(vendor)).map(|(_, launches)| launches)
    }

    /// True if there are subgroups of any kind.
    pub fn has_subgroups(&self) -> bool {
        ["cl_khr_subgroups", "cl_intel_subgroups"].iter().any(|e| self.has_extension(e))
    }

    /// Extension for dot products of four packed bytes, if any.
    pub fn dot_extension(&self) -> Option<DotExtension> {
        let dots = [
            ("cl_khr_integer_dot_product", DotExtension::Khr),
            ("cl_qcom_dot_product8", DotExtension::Qcom),
            ("cl_arm_integer_dot_product_int8", DotExtension::Arm),
        ];
        dots.into_iter().find(|(extension, _)| self.has_extension(extension)).map(|(_, dot)| dot)
    }

    /// Compiler option for the newest supported language; empty for 1.2.
    pub fn newest_language(&self) -> &'static str {
        match self.c_version.strip_prefix("OpenCL C ").and_then(|v| v.chars().next()) {
            Some('3') => " -cl-std=CL3.0",
            Some('2') => " -cl-std=CL2.0",
            _ => "",
        }
    }

    /// Properties that a compiled program depends on besides its source, for the cache key.
    pub fn cache_key_parts(&self) -> [&str; 5] {
        [&self.name, &self.driver, &self.version, &self.platform, &self.platform_version]
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceInfo;

    #[test]
    fn drivers_that_wait_are_told_to_begin() {
        let of = |vendor: &str| {
            DeviceInfo { vendor: vendor.into(), ..DeviceInfo::unknown_device() }.launches_per_flush()
        };
        assert_eq!(["ARM", "Imagination Technologies", "QUALCOMM"].map(of), [Some(24), Some(16), None]);
    }
}
