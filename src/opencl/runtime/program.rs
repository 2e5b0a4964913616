//! Programs, kernels and launches.
//!
//! Kernel sources are part of this program and trusted like its Rust code: nothing here checks that a kernel stays
//! within its buffers. oclgrind does, in the tests.

use super::buffer::{Buffer, Memory};
use super::device::{BuildStats, Device, Shared, query_number, query_text};
use super::failure::{Failure, FailureKind, Result, check_code};
use super::ffi::{self, KernelId, ProgramId};
use super::program_cache::{CompileAttempt, Entry, Key, Marker, ProgramMetadata, Verdict};
use super::watchdog::Call;
use std::ffi::CString;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// Number of build attempts if the driver reports a lack of resources: some need a moment after other builds.
const TRIES: usize = 3;
/// Maximum lines and characters of a compiler log in a message.
const LOG_LINES: usize = 4;
const LOG_CHARS: usize = 250;

/// Source of a program.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Name in messages.
    pub name: &'a str,
    pub text: &'a str,
    /// Compiler options, separated by spaces.
    pub options: &'a str,
}

/// A program built for a device.
pub struct Program {
    shared: Arc<Shared>,
    name: String,
    id: ProgramId,
    cached: Option<CachedMetadata>,
}

/// Data about a program in the program cache.
struct CachedMetadata {
    key: Key,
    metadata: Mutex<ProgramMetadata>,
}

/// Risk that a program crashes the driver.
#[derive(Clone, Copy)]
enum Risk {
    Baseline,
    Variant,
}

impl Program {
    /// Compiles a program, or loads it from the cache.
    ///
    /// # Errors
    /// [`FailureKind::Build`] with the first lines of the compiler log.
    pub fn build(device: &Device, source: &Source<'_>) -> Result<Self> {
        Self::build_with(device, source, Risk::Baseline)
    }

    /// [`Program::build`] for an optional variant: after the driver once crashed on it, it fails with
    /// [`FailureKind::Build`].
    pub fn build_variant(device: &Device, source: &Source<'_>) -> Result<Self> {
        Self::build_with(device, source, Risk::Variant)
    }

    fn build_with(device: &Device, source: &Source<'_>, risk: Risk) -> Result<Self> {
        let shared = &device.shared;
        if device.has_stopped_builds() {
            return Err(Failure::new(FailureKind::Stopped, format!("{} is no longer needed", source.name)));
        }
        let begin = Instant::now();
        let key = Key::of(source.text, source.options, &shared.facts);
        let trial = || match risk {
            Risk::Baseline => Ok(None),
            Risk::Variant => mark_trial(shared, &key, source.name),
        };
        // What a driver crashed on is not loaded either.
        let early = shared.cache.is_marked(&key).then(trial).transpose()?;
        let entry = shared.cache.load(&key);
        let loaded = match &entry {
            Some(entry) => Self::from_binary(shared, source, &entry.binary)?,
            None => None,
        };
        let from_cache = loaded.is_some();
        let mut program = match loaded {
            Some(program) => program,
            None => {
                let _marker = early.map_or_else(trial, Ok)?;
                let program = Self::from_source(shared, source)?;
                program.build_program(source.options)?;
                program
            }
        };
        let metadata = Mutex::new(entry.map(|entry| entry.metadata).unwrap_or_default());
        program.cached = Some(CachedMetadata { key, metadata });
        if !from_cache {
            program.save();
        }
        let mut builds = shared.builds.lock().unwrap_or_else(PoisonError::into_inner);
        let BuildStats { compiled, compiling, loaded, loading, .. } = &mut *builds;
        let (count, time) = if from_cache { (loaded, loading) } else { (compiled, compiling) };
        *count += 1;
        *time += begin.elapsed();
        drop(builds);
        shared.report_builds();
        Ok(program)
    }

    /// Loads a cached binary; `None` if the driver rejects it, and the program must be compiled.
    fn from_binary(shared: &Arc<Shared>, source: &Source<'_>, binary: &[u8]) -> Result<Option<Self>> {
        if binary.is_empty() {
            return Ok(None);
        }
        let _marker = shared.cache.mark_loading();
        let (start, len) = (binary.as_ptr(), binary.len());
        let (mut status, mut code) = (0, 0);
        // SAFETY: one device and one binary of this length, which the call copies.
        let id = unsafe {
            let api = shared.api_or_failure()?;
            let create = api.clCreateProgramWithBinary;
            create(shared.context, 1, &shared.id, &len, &start, &mut status, &mut code)
        };
        if code != ffi::SUCCESS {
            return Ok(None);
        }
        let program = Self { shared: shared.clone(), name: source.name.into(), id, cached: None };
        // Binaries must be built too, before kernels can be created.
        Ok((status == ffi::SUCCESS && program.build_program(source.options).is_ok()).then_some(program))
    }

    fn from_source(shared: &Arc<Shared>, source: &Source<'_>) -> Result<Self> {
        let (start, len) = (source.text.as_ptr().cast(), source.text.len());
        let mut code = 0;
        // SAFETY: one text of this length.
        let id = unsafe {
            (shared.api_or_failure()?.clCreateProgramWithSource)(shared.context, 1, &start, &len, &mut code)
        };
        shared.check_created(code, "clCreateProgramWithSource", source.name)?;
        Ok(Self { shared: shared.clone(), name: source.name.into(), id, cached: None })
    }

    /// Compiles and links the program.
    fn build_program(&self, options: &str) -> Result<()> {
        let words = CString::new(options).map_err(|_| {
            Failure::new(FailureKind::InvalidCall, format!("options of {} hold a zero byte", self.name))
        })?;
        let shared = &self.shared;
        let mut code = 0;
        for _ in 0..TRIES {
            let api = shared.api_or_failure()?;
            // SAFETY: one device, zero-terminated options, no callback.
            code = unsafe {
                (api.clBuildProgram)(self.id, 1, &shared.id, words.as_ptr(), None, std::ptr::null_mut())
            };
            drop(api);
            if ![ffi::OUT_OF_RESOURCES, ffi::OUT_OF_HOST_MEMORY].contains(&code) {
                break;
            }
            shared.wait_for_call(Call::Finish, &self.name)?;
        }
        // Whatever the code, another program may build.
        check_code(code, "clBuildProgram", &self.name).map_err(|failure| match self.build_log() {
            log if log.is_empty() => failure,
            log => Failure { message: format!("{}: {log}", failure.message), ..failure },
        })
    }

    /// First lines of the compiler log, joined into one.
    fn build_log(&self) -> String {
        let Ok(api) = self.shared.api_or_failure() else { return String::new() };
        let all = query_text(|size, value, wanted| {
            // SAFETY: `text` passes memory of the size it says.
            unsafe {
                let get = api.clGetProgramBuildInfo;
                get(self.id, self.shared.id, ffi::PROGRAM_BUILD_LOG, size, value, wanted)
            }
        });
        let lines: Vec<&str> = all.lines().map(str::trim).filter(|l| !l.is_empty()).take(LOG_LINES).collect();
        lines.join("; ").chars().take(LOG_CHARS).collect()
    }

    /// Binary of the built program; empty if the driver returns none.
    pub fn read_binary(&self) -> Vec<u8> {
        let Ok(api) = self.shared.api_or_failure() else { return Vec::new() };
        let api = &api;
        let ask = |name: u32| {
            // SAFETY: the callers below pass memory of the size they say.
            move |size, value, wanted| unsafe { (api.clGetProgramInfo)(self.id, name, size, value, wanted) }
        };
        let Some(len) = query_number::<usize>(ask(ffi::PROGRAM_BINARY_SIZES)) else { return Vec::new() };
        let mut binary = vec![0u8; len];
        let mut place = binary.as_mut_ptr();
        // The driver writes the binary to the address in the memory passed: one, for one device.
        let code =
            ask(ffi::PROGRAM_BINARIES)(size_of::<*mut u8>(), (&raw mut place).cast(), std::ptr::null_mut());
        if code == ffi::SUCCESS { binary } else { Vec::new() }
    }

    fn cached_metadata(&self) -> &CachedMetadata {
        self.cached.as_ref().expect("set by `build_with`")
    }

    fn lock_metadata(&self) -> MutexGuard<'_, ProgramMetadata> {
        self.cached_metadata().metadata.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores binary and metadata in the cache.
    fn save(&self) {
        let cache = &self.shared.cache;
        let binary = if cache.keeps_binaries() { self.read_binary() } else { Vec::new() };
        cache.save(&self.cached_metadata().key, &Entry { binary, metadata: self.lock_metadata().clone() });
    }

    /// Self-test result of `kernel`; `None` if it was never tested.
    pub fn kernel_verdict(&self, kernel: &str) -> Option<Verdict> {
        self.lock_metadata().verdicts.get(kernel).copied()
    }

    /// Stores a self-test result permanently.
    pub fn set_verdict(&self, kernel: &str, verdict: Verdict) {
        self.lock_metadata().verdicts.insert(kernel.into(), verdict);
        self.save();
    }

    /// Creates a kernel of this name, without arguments. Each call creates a new object.
    pub fn create_kernel(&self, name: &str) -> Result<Kernel> {
        let shared = &self.shared;
        let what = format!("{name} in {}", self.name);
        let symbol = CString::new(name).map_err(|_| {
            Failure::new(FailureKind::InvalidCall, format!("kernel name {name:?} holds a zero byte"))
        })?;
        let (api, mut code) = (shared.api_or_failure()?, 0);
        // SAFETY: a built program and a zero-terminated name.
        let id = unsafe { (api.clCreateKernel)(self.id, symbol.as_ptr(), &mut code) };
        shared.check_created(code, "clCreateKernel", what)?;
        let max_work_group = query_number(|size, value, wanted| {
            // SAFETY: `number` passes memory of the size it says.
            unsafe {
                let get = api.clGetKernelWorkGroupInfo;
                get(id, shared.id, ffi::KERNEL_WORK_GROUP_SIZE, size, value, wanted)
            }
        });
        let max_work_group = max_work_group.unwrap_or(0);
        let (args, launched) = (Vec::new(), AtomicBool::new(false));
        Ok(Kernel { shared: shared.clone(), name: name.into(), id, args, max_work_group, launched })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(api) = self.shared.api_for_release() {
            // SAFETY: created by this object; the driver keeps the program alive for its kernels.
            unsafe { (api.clReleaseProgram)(self.id) };
        }
    }
}

/// Marks the trial of a variant, unless an earlier one crashed.
fn mark_trial(shared: &Shared, key: &Key, name: &str) -> Result<Option<Marker>> {
    match shared.cache.start_variant_trial(key) {
        CompileAttempt::Started(marker) => Ok(marker),
        CompileAttempt::Crashed(path) => {
            let path = path.display();
            let message = format!("{name} is left out: the driver crashed on it; remove {path} to try again");
            Err(Failure::new(FailureKind::Build, message))
        }
    }
}

/// A kernel with its arguments, which persist until set again. It keeps their buffers alive, unless they were let go.
pub struct Kernel {
    shared: Arc<Shared>,
    name: String,
    id: KernelId,
    args: Vec<Arg>,
    max_work_group: usize,
    /// True once it was queued.
    launched: AtomicBool,
}

/// Argument of a kernel.
#[derive(Clone)]
enum Arg {
    Value,
    Buffer(Arc<Memory>),
    /// A buffer that may be gone.
    Released(Weak<Memory>),
}

impl Kernel {
    /// Stands for a kernel whose program is not built yet: it takes any arguments and cannot be launched.
    pub fn create_placeholder(device: &Device) -> Self {
        let (args, launched) = (Vec::new(), AtomicBool::new(false));
        let (shared, name) = (device.shared.clone(), "placeholder".into());
        Self { shared, name, id: KernelId::NULL, args, max_work_group: 0, launched }
    }

    /// Maximum work-items of a work-group, which may be lower than the device's because of register use.
    pub fn max_work_group(&self) -> usize {
        self.max_work_group
    }

    /// Sets argument `index` to a buffer.
    pub fn set_buffer(&mut self, index: usize, buffer: &Buffer) -> Result<&mut Self> {
        assert!(
            Arc::ptr_eq(&self.shared, &buffer.memory.shared),
            "kernel {}: argument {index} is a buffer of another device",
            self.name
        );
        // SAFETY: the value is a handle of this size; `args` keeps it alive, or no launch uses it.
        unsafe { self.set_arg(index, size_of::<ffi::MemId>(), (&raw const buffer.memory.id).cast())? };
        self.args[index] = Arg::Buffer(buffer.memory.clone());
        Ok(self)
    }

    /// Sets argument `index` to a buffer, at no cost if it is already that buffer.
    pub fn rebind_buffer(&mut self, index: usize, buffer: &Buffer) -> Result<&mut Self> {
        let set = match self.args.get(index) {
            Some(Arg::Buffer(memory)) => Arc::ptr_eq(memory, &buffer.memory),
            // While a weak reference exists, no other memory can have this address.
            Some(Arg::Released(memory)) => std::ptr::eq(memory.as_ptr(), Arc::as_ptr(&buffer.memory)),
            _ => false,
        };
        if !set {
            return self.set_buffer(index, buffer);
        }
        self.args[index] = Arg::Buffer(buffer.memory.clone());
        Ok(self)
    }

    /// Stops keeping these buffers alive; they must be set again before the next launch.
    pub fn release_buffers(&mut self, range: Range<usize>) {
        for arg in &mut self.args[range] {
            if let Arg::Buffer(memory) = arg {
                *arg = Arg::Released(Arc::downgrade(memory));
            }
        }
    }

    /// Sets argument `index` to an `int`.
    pub fn set_int(&mut self, index: usize, value: i32) -> Result<&mut Self> {
        // SAFETY: four bytes, which the call copies.
        unsafe { self.set_arg(index, 4, (&raw const value).cast()) }
    }

    /// Sets argument `index` to an `int`, a vector of `int` or a structure of only `int`s.
    pub fn set_ints(&mut self, index: usize, values: &[i32]) -> Result<&mut Self> {
        // SAFETY: readable memory of this size, which the call copies.
        unsafe { self.set_arg(index, size_of_val(values), values.as_ptr().cast()) }
    }

    /// # Safety
    /// `value` must point to `size` readable bytes; a handle in them must be alive while it is set.
    unsafe fn set_arg(
        &mut self,
        index: usize,
        size: usize,
        value: *const std::ffi::c_void,
    ) -> Result<&mut Self> {
        let number = u32::try_from(index).expect("a kernel has few arguments");
        if self.id != KernelId::NULL {
            // SAFETY: by this function's contract. The driver reports a wrong argument size.
            let code =
                unsafe { (self.shared.api_or_failure()?.clSetKernelArg)(self.id, number, size, value) };
            let what = format_args!("kernel {}, argument {index}, {size} bytes", self.name);
            self.shared.check(code, "clSetKernelArg", what)?;
        }
        if self.args.len() <= index {
            self.args.resize(index + 1, Arg::Value);
        }
        self.args[index] = Arg::Value;
        Ok(self)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if let Some(api) = self.shared.api_for_release().filter(|_| self.id != KernelId::NULL) {
            // SAFETY: created by this object; the driver keeps the kernel alive for queued work.
            unsafe { (api.clReleaseKernel)(self.id) };
        }
    }
}

impl Device {
    /// Queues `kernel` over `global` work-items, in work-groups of `local` (empty: chosen by the driver).
    ///
    /// # Panics
    /// If there are not one to three dimensions, if the sizes are not whole work-groups, if the CPU has a view of a
    /// buffer that the kernel may write, or if a buffer was let go.
    pub fn launch(&self, kernel: &Kernel, global: &[usize], local: &[usize]) -> Result<()> {
        let name = &kernel.name;
        assert!(
            (1..=3).contains(&global.len()) && (local.is_empty() || local.len() == global.len()),
            "kernel {name}: {global:?} items in groups of {local:?}"
        );
        let whole = global.iter().zip(local).all(|(g, l)| *l > 0 && g % l == 0);
        assert!(whole, "kernel {name}: {global:?} items are not whole groups of {local:?}");
        for (index, arg) in kernel.args.iter().enumerate() {
            let free = match arg {
                Arg::Value => true,
                Arg::Buffer(memory) => memory.device_may_use(),
                Arg::Released(_) => panic!("kernel {name}: argument {index} was let go and is not set again"),
            };
            assert!(free, "kernel {name}: argument {index} is mapped for the CPU");
        }
        let sizes = if local.is_empty() { std::ptr::null() } else { local.as_ptr() };
        let shared = &self.shared;
        // SAFETY: both arrays have `global.len()` entries; the kernel and its buffers are alive.
        let code = unsafe {
            let api = shared.api_or_failure()?;
            let launch = api.clEnqueueNDRangeKernel;
            let dims = global.len() as u32;
            let (none, event) = (std::ptr::null(), std::ptr::null_mut());
            launch(shared.queue, kernel.id, dims, none, global.as_ptr(), sizes, 0, none.cast(), event)
        };
        if !kernel.launched.swap(true, Ordering::Relaxed) {
            shared.waiter.note_first_launch();
        }
        shared.check(
            code,
            "clEnqueueNDRangeKernel",
            format_args!("kernel {name}, {global:?} items in groups of {local:?}"),
        )?;
        self.count_launch()
    }
}
