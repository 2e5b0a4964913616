//! Device selection; context and in-order queue of a device.

use super::device_info::{DeviceInfo, DeviceType, LocalMemory};
use super::failure::{Failure, FailureKind, Result, check_code};
use super::ffi::{self, Api, ContextId, CreateBufferNv, DeviceId, PlatformId, QueueId, cast_function};
use super::load::{self, Library};
use super::program_cache::Cache;
use super::watchdog::{Call, CallThread};
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// Environment variable that allows CPU devices to be selected like others, if 1.
pub const CPU_VARIABLE: &str = "ANTIGRAVITY_OPENCL_CPU";

/// A device that is not opened yet.
#[derive(Clone)]
pub struct DeviceEntry {
    library: &'static Library,
    platform: PlatformId,
    id: DeviceId,
    pub facts: DeviceInfo,
}

/// Lists all devices: GPUs, accelerators, others, CPUs. The position is the number that selects one.
pub fn list_devices() -> Result<&'static [DeviceEntry]> {
    // Called once, by one thread: PoCL 3.1 crashes if two threads do this at first use.
    static FOUND: OnceLock<Vec<DeviceEntry>> = OnceLock::new();
    let libraries = load::usable_libraries()?;
    Ok(FOUND.get_or_init(|| load::with_signals_restored(|| find_devices(libraries))))
}

fn find_devices(libraries: &'static [Library]) -> Vec<DeviceEntry> {
    let mut found = Vec::new();
    for library in libraries {
        for &platform in &library.platforms {
            let ids = device_ids(&library.api, platform);
            found.extend(ids.into_iter().map(|id| DeviceEntry {
                library,
                platform,
                id,
                facts: query_info(&library.api, platform, id),
            }));
        }
    }
    found.sort_by_key(|f| f.facts.device_type);
    found
}

/// Properties of the selected device (see [`select_device`]), without opening it; `None` if there is none.
pub fn select_info(select: Option<&str>) -> Option<&'static DeviceInfo> {
    let found = list_devices().ok()?;
    select_device(found, select).ok().map(|index| &found[index].facts)
}

/// Finds the device that matches `select`, an index or part of a name; without it, the first one that is not a CPU.
pub fn select_device(found: &[DeviceEntry], select: Option<&str>) -> Result<usize> {
    let list = || {
        let lines: Vec<String> = found
            .iter()
            .enumerate()
            .map(|(i, f)| {
                format!("{i}: {} ({}, {})", f.facts.name, f.facts.device_type.name(), f.facts.platform)
            })
            .collect();
        if lines.is_empty() { "no device was found".into() } else { format!("devices: {}", lines.join("; ")) }
    };
    let absent = |why: String| Err(Failure::new(FailureKind::Unsupported, format!("{why}; {}", list())));
    let Some(select) = select else {
        let cpu_too = std::env::var_os(CPU_VARIABLE).is_some_and(|v| v == "1");
        let first = found.iter().position(|f| cpu_too || f.facts.device_type != DeviceType::Cpu);
        return first.map_or_else(
            || absent("no GPU; `EngineOptions::cl_device` takes others by number or name".into()),
            Ok,
        );
    };
    if let Ok(index) = select.parse::<usize>() {
        return if index < found.len() {
            Ok(index)
        } else {
            absent(format!("`EngineOptions::cl_device` {index}: no device has this number"))
        };
    }
    let holds = |text: &str| text.to_lowercase().contains(&select.to_lowercase());
    let named = |f: &DeviceEntry| holds(&f.facts.name) || holds(&f.facts.platform);
    let matching: Vec<usize> = (0..found.len()).filter(|&i| !select.is_empty() && named(&found[i])).collect();
    match matching[..] {
        [one] => Ok(one),
        [] => absent(format!("`EngineOptions::cl_device` {select}: no device has this name")),
        _ => absent(format!(
            "`EngineOptions::cl_device` {select}: more than one device has this name; use the number"
        )),
    }
}

/// A device with a context and one in-order queue. Clones refer to the same device.
#[derive(Clone)]
pub struct Device {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub library: &'static Library,
    pub id: DeviceId,
    pub context: ContextId,
    pub queue: QueueId,
    pub facts: DeviceInfo,
    pub cache: Cache,
    pub launches: AtomicU64,
    /// Launches since the last flush.
    pub waiting: AtomicU32,
    pub allocated: AtomicU64,
    /// Transfers that were waited for, and their bytes.
    pub transfers: AtomicU64,
    pub moved: AtomicU64,
    pub builds: Mutex<BuildStats>,
    pub build_observer: Mutex<Option<BuildObserver>>,
    pub waiter: CallThread,
    /// True once no more programs are to be built.
    pub builds_stopped: AtomicBool,
    /// The first failure, after which no call is made.
    pub lost: OnceLock<Failure>,
    /// Function that creates buffers of [`Place::HostPinned`](super::Place::HostPinned).
    pub create_on_host: Option<CreateBufferNv>,
}

/// Function that receives the number of programs built so far, and of all that are expected.
pub type BuildObserver = Box<dyn Fn(usize, usize) + Send>;

/// Number of programs built, and the time it took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BuildStats {
    /// Built from source.
    pub compiled: usize,
    pub compiling: Duration,
    /// Loaded from the cache.
    pub loaded: usize,
    pub loading: Duration,
    /// Programs that the device needs, with those built so far; 0 before they are listed.
    pub needed: usize,
}

impl BuildStats {
    /// Programs built so far.
    pub fn count_built(&self) -> usize {
        self.compiled + self.loaded
    }
}

impl Device {
    /// Opens the selected device (see [`select_device`]); built programs are stored in `cache`.
    pub fn open(select: Option<&str>, cache: Cache) -> Result<Self> {
        let found = list_devices()?;
        let &DeviceEntry { library, platform, id, ref facts } = &found[select_device(found, select)?];
        let facts = facts.clone();
        if facts.max_alloc == 0 || facts.max_work_group == 0 {
            return Err(Failure::new(
                FailureKind::Lost,
                "the device reports no maximum size for buffers and work-groups",
            ));
        }
        cache.clear_after_crash();
        let context = create_context(&library.api, platform, id, &facts)?;
        let mut code = 0;
        // SAFETY: the device belongs to the context; no properties means an in-order queue.
        let queue = unsafe { (library.api.clCreateCommandQueue)(context, id, 0, &mut code) };
        check_code(code, "clCreateCommandQueue", &facts.name)?;
        let waiter = CallThread::new(&library.api, queue, &facts).map_err(|e| {
            Failure::new(FailureKind::Lost, format!("cannot start the thread that waits for the device: {e}"))
        })?;
        let (launches, waiting, allocated, transfers, moved) = Default::default();
        let (builds, build_observer, builds_no_more, lost) = Default::default();
        let extension = |name| extension_address(&library.api, platform, name);
        let on_host = facts.writes_to_host();
        // SAFETY: the function has this type by cl_nv_create_buffer.
        let create_on_host =
            on_host.then(|| unsafe { cast_function(extension(c"clCreateBufferNV")) }).flatten();
        let shared = Shared {
            library,
            id,
            context,
            queue,
            facts,
            cache,
            launches,
            waiting,
            allocated,
            transfers,
            moved,
            builds,
            build_observer,
            waiter,
            builds_stopped: builds_no_more,
            lost,
            create_on_host,
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Sets the timeout of calls, after which the device is lost. `stop`, once set, ends long waits early with
    /// [`FailureKind::Stopped`]; the device survives.
    pub fn set_timeout(&self, limit: Duration, stop: Option<Arc<AtomicBool>>) {
        self.shared.waiter.set_timeout(limit, stop);
    }

    /// Makes further builds fail with [`FailureKind::Stopped`], so that a thread which prepares the device ends soon. A
    /// build in progress is finished and stored.
    pub fn stop_builds(&self) {
        self.shared.builds_stopped.store(true, Ordering::Relaxed);
    }

    /// True once a call has failed: no further call is made.
    pub fn is_lost(&self) -> bool {
        self.shared.lost.get().is_some()
    }

    /// True after [`Device::stop_builds`].
    pub fn has_stopped_builds(&self) -> bool {
        self.shared.builds_stopped.load(Ordering::Relaxed)
    }

    /// Notes that `missing` programs are still to be built.
    pub fn expect_builds(&self, missing: usize) {
        let mut builds = self.shared.builds.lock().unwrap_or_else(PoisonError::into_inner);
        builds.needed = builds.count_built() + missing;
        drop(builds);
        self.shared.report_builds();
    }

    /// Properties of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.facts
    }

    /// Name of the library that the device belongs to.
    pub fn library_name(&self) -> &'static str {
        &self.shared.library.name
    }

    /// Number of kernels launched so far.
    pub fn launch_count(&self) -> u64 {
        self.shared.launches.load(Ordering::Relaxed)
    }

    /// Number of blocking reads, writes and mappings so far, and their bytes.
    pub fn transfer_stats(&self) -> (u64, u64) {
        let Shared { transfers, moved, .. } = &*self.shared;
        (transfers.load(Ordering::Relaxed), moved.load(Ordering::Relaxed))
    }

    /// Bytes of all buffers in device memory.
    pub fn allocated_bytes(&self) -> u64 {
        self.shared.allocated.load(Ordering::Relaxed)
    }

    /// Number of programs built so far, and the time it took.
    pub fn build_stats(&self) -> BuildStats {
        *self.shared.builds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports each build to `observer` from now on, or to nobody.
    pub fn observe_builds(&self, observer: Option<BuildObserver>) {
        *self.shared.lock_build_observer() = observer;
    }

    /// Counts a launch, and flushes the queue if too many are waiting.
    pub(super) fn count_launch(&self) -> Result<()> {
        self.shared.launches.fetch_add(1, Ordering::Relaxed);
        let waiting = self.shared.waiting.fetch_add(1, Ordering::Relaxed) + 1;
        match self.shared.facts.launches_per_flush() {
            Some(most) if waiting >= most => self.flush(),
            _ => Ok(()),
        }
    }

    /// Tells the device to start on queued work.
    pub fn flush(&self) -> Result<()> {
        self.shared.waiting.store(0, Ordering::Relaxed);
        // SAFETY: the queue lives as long as `self`.
        let code = unsafe { (self.shared.api_or_failure()?.clFlush)(self.shared.queue) };
        self.shared.check(code, "clFlush", &self.shared.facts.name)
    }

    /// Flushes the queue so that a GPU starts while more is queued; a CPU has already started.
    pub fn flush_if_gpu(&self) -> Result<()> {
        if self.shared.facts.device_type == DeviceType::Cpu { Ok(()) } else { self.flush() }
    }

    /// Waits until all queued work is done.
    pub fn finish(&self) -> Result<()> {
        self.shared.wait_for_call(Call::Finish, &self.shared.facts.name).map(drop)
    }
}

impl Shared {
    fn lock_build_observer(&self) -> MutexGuard<'_, Option<BuildObserver>> {
        self.build_observer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the observer the number of programs built so far.
    pub(super) fn report_builds(&self) {
        let builds = *self.builds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(observer) = &*self.lock_build_observer() {
            observer(builds.count_built(), builds.needed);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The process may end next, and its driver must not be busy then, for example unmapping memory. A failure loses
        // the device.
        if self.api_for_release().is_some() {
            let _ = self.wait_for_call(Call::Finish, &self.facts.name);
        }
        let Some(api) = self.api_for_release() else { return };
        // SAFETY: created in `Device::open`; every buffer, program and kernel holds `self`, so this is the last use.
        unsafe {
            (api.clReleaseCommandQueue)(self.queue);
            (api.clReleaseContext)(self.context);
        }
    }
}

/// Creates a context with the hints that the device supports, or without hints if the driver refuses them.
fn create_context(api: &Api, platform: PlatformId, id: DeviceId, facts: &DeviceInfo) -> Result<ContextId> {
    let plain = vec![ffi::CONTEXT_PLATFORM, platform.0.addr() as isize];
    let mut hinted = plain.clone();
    if facts.has_extension("cl_qcom_perf_hint") {
        hinted.extend([ffi::CONTEXT_PERF_HINT_QCOM, ffi::PERF_HINT_HIGH_QCOM]);
    }
    if facts.has_extension("cl_qcom_priority_hint") {
        // Keeps the phone's screen smooth while the model runs.
        hinted.extend([ffi::CONTEXT_PRIORITY_HINT_QCOM, ffi::PRIORITY_HINT_LOW_QCOM]);
    }
    let mut last = Ok(ContextId::NULL);
    for mut properties in [hinted, plain] {
        properties.push(0);
        let mut code = 0;
        // SAFETY: a list that ends with 0, one device of this platform, no callback.
        let context = unsafe {
            (api.clCreateContext)(properties.as_ptr(), 1, &id, None, std::ptr::null_mut(), &mut code)
        };
        last = check_code(code, "clCreateContext", &facts.name).map(|()| context);
        if last.is_ok() {
            break;
        }
    }
    last
}

/// Address of an extension function; null if missing.
fn extension_address(api: &Api, platform: PlatformId, name: &CStr) -> *mut c_void {
    let get = api.clGetExtensionFunctionAddressForPlatform;
    // SAFETY: takes a platform and a zero-terminated name, and gives an address or null.
    get.map_or(std::ptr::null_mut(), |get| unsafe { get(platform, name.as_ptr()) })
}

fn device_ids(api: &Api, platform: PlatformId) -> Vec<DeviceId> {
    let mut count = 0;
    // SAFETY: no array; only the count is requested.
    let code =
        unsafe { (api.clGetDeviceIDs)(platform, ffi::DEVICE_TYPE_ALL, 0, std::ptr::null_mut(), &mut count) };
    let mut ids = vec![DeviceId::NULL; if code == ffi::SUCCESS { count as usize } else { 0 }];
    if ids.is_empty() {
        return ids;
    }
    // SAFETY: the array has room for `count` ids.
    let code = unsafe {
        (api.clGetDeviceIDs)(platform, ffi::DEVICE_TYPE_ALL, count, ids.as_mut_ptr(), std::ptr::null_mut())
    };
    ids.retain(|id| code == ffi::SUCCESS && *id != DeviceId::NULL);
    ids
}

/// Integers that a driver writes into our memory.
pub(super) trait Plain: Copy + Default {}
impl Plain for u32 {}
impl Plain for u64 {}
impl Plain for usize {}

/// Queries a number from a `clGet…Info` function, given as `call(size, value, size wanted)`; `None` if unknown.
pub(super) fn query_number<T: Plain>(call: impl Fn(usize, *mut c_void, *mut usize) -> i32) -> Option<T> {
    let mut value = T::default();
    let code = call(size_of::<T>(), (&raw mut value).cast(), std::ptr::null_mut());
    (code == ffi::SUCCESS).then_some(value)
}

/// Queries bytes, whose length the driver knows; see [`query_number`].
pub(super) fn query_bytes(call: impl Fn(usize, *mut c_void, *mut usize) -> i32) -> Option<Vec<u8>> {
    let mut len = 0;
    if call(0, std::ptr::null_mut(), &mut len) != ffi::SUCCESS {
        return None;
    }
    let mut value = vec![0; len];
    let code = call(len, value.as_mut_ptr().cast(), std::ptr::null_mut());
    (len == 0 || code == ffi::SUCCESS).then_some(value)
}

/// Queries a zero-terminated text; see [`query_bytes`].
pub(super) fn query_text(call: impl Fn(usize, *mut c_void, *mut usize) -> i32) -> String {
    let value = query_bytes(call).unwrap_or_default();
    let end = value.iter().position(|&b| b == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).trim().into()
}

fn query_info(api: &Api, platform: PlatformId, id: DeviceId) -> DeviceInfo {
    let of_device = |name: u32| {
        // SAFETY: the functions above pass memory of the size they state.
        move |size, value, wanted| unsafe { (api.clGetDeviceInfo)(id, name, size, value, wanted) }
    };
    let of_platform = |name: u32| {
        // SAFETY: as above.
        move |size, value, wanted| unsafe { (api.clGetPlatformInfo)(platform, name, size, value, wanted) }
    };
    let word = |name: u32| query_number::<u32>(of_device(name)).unwrap_or(0);
    let long = |name: u32| query_number::<u64>(of_device(name)).unwrap_or(0);
    let size = |name: u32| query_number::<usize>(of_device(name)).unwrap_or(0);
    let kinds = long(ffi::DEVICE_TYPE);
    let device_type = [
        (ffi::DEVICE_TYPE_GPU, DeviceType::Gpu),
        (ffi::DEVICE_TYPE_ACCELERATOR, DeviceType::Accelerator),
        (ffi::DEVICE_TYPE_CPU, DeviceType::Cpu),
    ];
    let device_type =
        device_type.iter().find(|(bit, _)| kinds & bit != 0).map_or(DeviceType::Other, |(_, t)| *t);
    let own = word(ffi::DEVICE_LOCAL_MEM_TYPE) == ffi::LOCAL;
    let extensions = query_text(of_device(ffi::DEVICE_EXTENSIONS));
    // Other drivers do not know these queries.
    let nvidia = extensions.contains("cl_nv_device_attribute_query");
    let capability = || {
        let major = query_number(of_device(ffi::DEVICE_COMPUTE_CAPABILITY_MAJOR_NV))?;
        Some((major, query_number(of_device(ffi::DEVICE_COMPUTE_CAPABILITY_MINOR_NV))?))
    };
    DeviceInfo {
        device_type,
        name: query_text(of_device(ffi::DEVICE_NAME)),
        vendor: query_text(of_device(ffi::DEVICE_VENDOR)),
        version: query_text(of_device(ffi::DEVICE_VERSION)),
        c_version: query_text(of_device(ffi::DEVICE_OPENCL_C_VERSION)),
        driver: query_text(of_device(ffi::DRIVER_VERSION)),
        platform: query_text(of_platform(ffi::PLATFORM_NAME)),
        platform_version: query_text(of_platform(ffi::PLATFORM_VERSION)),
        max_alloc: long(ffi::DEVICE_MAX_MEM_ALLOC_SIZE),
        global_memory: long(ffi::DEVICE_GLOBAL_MEM_SIZE),
        local_memory: long(ffi::DEVICE_LOCAL_MEM_SIZE),
        local_memory_kind: if own { LocalMemory::Dedicated } else { LocalMemory::Global },
        max_work_group: size(ffi::DEVICE_MAX_WORK_GROUP_SIZE),
        compute_units: word(ffi::DEVICE_MAX_COMPUTE_UNITS),
        clock_mhz: word(ffi::DEVICE_MAX_CLOCK_FREQUENCY),
        unified_memory: word(ffi::DEVICE_HOST_UNIFIED_MEMORY) != 0,
        base_align: (word(ffi::DEVICE_MEM_BASE_ADDR_ALIGN) / 8) as usize,
        has_correct_divide: long(ffi::DEVICE_SINGLE_FP_CONFIG) & ffi::FP_CORRECTLY_ROUNDED_DIVIDE_SQRT != 0,
        compute_capability: if nvidia { capability() } else { None },
        image_texels: match api.clCreateImage {
            Some(_) if word(ffi::DEVICE_IMAGE_SUPPORT) != 0 => size(ffi::DEVICE_IMAGE_MAX_BUFFER_SIZE),
            _ => 0,
        },
        extensions,
    }
}
