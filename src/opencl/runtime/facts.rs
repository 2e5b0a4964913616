//! What a device says of itself.

/// Kind of device, in the order in which devices are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceType {
    Gpu,
    Accelerator,
    Other,
    /// Taken only when named, or when `ANTIGRAVITY_OPENCL_CPU=1`.
    Cpu,
}

impl DeviceType {
    /// For reports.
    pub fn name(self) -> &'static str {
        match self {
            DeviceType::Gpu => "GPU",
            DeviceType::Accelerator => "accelerator",
            DeviceType::Other => "other",
            DeviceType::Cpu => "CPU",
        }
    }
}

/// Where local memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LocalMemory {
    /// In memory of its own, fast.
    Own,
    /// In global memory: good for exchange within a group, not for tiles.
    Global,
}

/// How a kernel asks for a dot product of four packed bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dot {
    /// `cl_khr_integer_dot_product`
    Khr,
    /// `cl_arm_integer_dot_product_int8`: of equal signs.
    Arm,
    /// `cl_qcom_dot_product8`
    Qcom,
}

/// What a device says of itself; sizes in bytes, 0 or empty where it says nothing.
#[derive(Debug, Clone)]
pub struct Facts {
    pub device_type: DeviceType,
    pub name: String,
    pub vendor: String,
    /// Of the device, e.g. `OpenCL 3.0 …`.
    pub version: String,
    /// Of the language, e.g. `OpenCL C 1.2 …`.
    pub c_version: String,
    pub driver: String,
    pub platform: String,
    pub platform_version: String,
    /// Separated by blanks; see [`Facts::has`].
    pub extensions: String,
    /// Largest buffer.
    pub max_alloc: u64,
    pub global_memory: u64,
    pub local_memory: u64,
    pub local_memory_is: LocalMemory,
    /// Most items of a group; a kernel may allow fewer.
    pub max_work_group: usize,
    pub compute_units: u32,
    pub clock_mhz: u32,
    /// CPU and device share their memory.
    pub unified_memory: bool,
    /// Alignment of a buffer's start.
    pub base_align: usize,
    /// Quotients and roots in f32 can be rounded correctly.
    pub correct_divide: bool,
    /// NVIDIA's compute capability, major and minor.
    pub compute_capability: Option<(u32, u32)>,
    /// Texels of the largest image of a buffer; 0 where there are none.
    pub image_texels: usize,
}

impl Facts {
    /// Of a device that says nothing of itself.
    #[cfg(test)]
    pub(super) fn nothing() -> Self {
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
            local_memory_is: LocalMemory::Global,
            max_work_group: 0,
            compute_units: 0,
            clock_mhz: 0,
            unified_memory: false,
            base_align: 0,
            correct_divide: false,
            compute_capability: None,
            image_texels: 0,
        }
    }

    /// Whether an extension is listed.
    pub fn has(&self, extension: &str) -> bool {
        self.extensions.split_ascii_whitespace().any(|e| e == extension)
    }

    /// Arithmetic on `half`; loads and stores of it need nothing.
    pub fn fp16(&self) -> bool {
        self.has("cl_khr_fp16")
    }

    /// Whether kernels write to the host's memory where they are asked to: see [`Place::OnHost`](super::Place::OnHost).
    pub fn writes_to_host(&self) -> bool {
        self.has("cl_nv_create_buffer")
    }

    /// True for PoCL, which keeps what it compiles itself. Asked for a binary it compiles all kernels once more, for groups of
    /// any size: a first start then takes three times as long, and a later one no less.
    pub fn keeps_programs(&self) -> bool {
        self.platform == "Portable Computing Language"
    }

    /// After how many launches it is told to begin: without that some drivers of phones do nothing until somebody waits,
    /// and the GPU is idle meanwhile and lowers its clock. The numbers are those that ML Drift uses.
    pub fn launches_at_once(&self) -> Option<u32> {
        let vendors = [("ARM", 24), ("Imagination", 16)];
        vendors.into_iter().find(|(vendor, _)| self.vendor.starts_with(vendor)).map(|(_, launches)| launches)
    }

    /// Subgroups of any kind.
    pub fn subgroups(&self) -> bool {
        ["cl_khr_subgroups", "cl_intel_subgroups"].iter().any(|e| self.has(e))
    }

    /// Dot products of four packed bytes.
    pub fn dot(&self) -> Option<Dot> {
        let dots = [
            ("cl_khr_integer_dot_product", Dot::Khr),
            ("cl_qcom_dot_product8", Dot::Qcom),
            ("cl_arm_integer_dot_product_int8", Dot::Arm),
        ];
        dots.into_iter().find(|(extension, _)| self.has(extension)).map(|(_, dot)| dot)
    }

    /// The compiler's option for the newest language that it says it has; empty where that is 1.2.
    pub fn newest_language(&self) -> &'static str {
        match self.c_version.strip_prefix("OpenCL C ").and_then(|v| v.chars().next()) {
            Some('3') => " -cl-std=CL3.0",
            Some('2') => " -cl-std=CL2.0",
            _ => "",
        }
    }

    /// Everything that a built program depends on besides its source, for the key of the cache.
    pub fn identity(&self) -> [&str; 5] {
        [&self.name, &self.driver, &self.version, &self.platform, &self.platform_version]
    }
}

#[cfg(test)]
mod tests {
    use super::Facts;

    #[test]
    fn drivers_that_wait_are_told_to_begin() {
        let of = |vendor: &str| Facts { vendor: vendor.into(), ..Facts::nothing() }.launches_at_once();
        assert_eq!(["ARM", "Imagination Technologies", "QUALCOMM"].map(of), [Some(24), Some(16), None]);
    }
}
