//! Search for an OpenCL library: the candidates, the linker's messages, and the platforms.
//!
//! A candidate counts if every required entry point resolves and it has at least one platform. If there is no loader,
//! as in many containers, the vendors' libraries are used directly; their entry points are only in the dispatch table
//! behind their platforms (cl_khr_icd). Libraries are never unloaded, because drivers start threads and register exit
//! handlers.

use super::failure::{Failure, FailureKind, Result};
use super::ffi::{self, Api, PlatformId, error_name};
use libloading::os::unix as dl;
use std::ffi::{CStr, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Environment variable that names the only library to try.
pub const LIB_VARIABLE: &str = "ANTIGRAVITY_OPENCL_LIB";

/// True once any library was loaded, even an unusable one.
static ANY_LOADED: AtomicBool = AtomicBool::new(false);

/// True if a driver may have threads and exit handlers in this process.
pub(super) fn is_any_loaded() -> bool {
    ANY_LOADED.load(Ordering::Relaxed)
}

/// A usable library with at least one platform.
pub struct Library {
    /// Name or path under which it was opened.
    pub name: String,
    pub(super) api: Api,
    pub(super) platforms: Vec<PlatformId>,
}

/// A candidate, and either how it is used or the linker's message.
pub struct Candidate {
    pub name: String,
    pub found: std::result::Result<String, String>,
}

/// Result of the search for OpenCL, made once per process.
pub struct Search {
    /// All candidates in the order tried.
    pub candidates: Vec<Candidate>,
    /// Usable libraries: the first loader, or all vendors' libraries if there is no loader.
    pub libraries: Vec<Library>,
}

impl Search {
    /// Searches on the first call; the libraries stay loaded.
    pub fn get() -> &'static Search {
        static SEARCH: OnceLock<Search> = OnceLock::new();
        SEARCH.get_or_init(|| with_signals_restored(Search::search_all))
    }

    fn search_all() -> Search {
        let mut search = Search { candidates: Vec::new(), libraries: Vec::new() };
        if let Some(only) = std::env::var_os(LIB_VARIABLE).filter(|v| !v.is_empty()) {
            search.try_candidate(&only.to_string_lossy());
            return search;
        }
        for name in CANDIDATES {
            if search.try_candidate(name) {
                return search;
            }
        }
        for name in vendor_libraries() {
            search.try_candidate(&name);
        }
        search
    }

    /// Tries a candidate and records the result. Returns true if it is usable.
    fn try_candidate(&mut self, name: &str) -> bool {
        if self.candidates.iter().any(|t| t.name == name) {
            return false;
        }
        let opened = open_library(name);
        let found = match &opened {
            Ok((library, how)) => Ok(format!("{how}, platforms: {}", library.platforms.len())),
            Err(why) => Err(why.clone()),
        };
        self.candidates.push(Candidate { name: name.into(), found });
        let counts = opened.is_ok();
        self.libraries.extend(opened.map(|(library, _)| library));
        counts
    }

    /// Error for a system without OpenCL: every candidate in short, and the remedy.
    pub fn to_failure(&self) -> Failure {
        let tried: Vec<String> = self
            .candidates
            .iter()
            .map(|t| {
                format!(
                    "{} ({})",
                    t.name,
                    t.found.as_ref().map_or_else(|e| strip_name(&t.name, e), Clone::clone)
                )
            })
            .collect();
        let message = format!("no library with a platform; tried {}; {}", tried.join(", "), install_advice());
        Failure::new(FailureKind::Unsupported, message)
    }
}

/// Runs `body`, which may start a driver, and restores the signal handlers. LLVM, which PoCL uses, installs its own,
/// with which Ctrl-C kills the process.
pub(super) fn with_signals_restored<T>(body: impl FnOnce() -> T) -> T {
    let mut before = Vec::with_capacity(32);
    for signal in 1..32 {
        // SAFETY: plain data, for which zeros are valid, and which the call fills.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut action) == 0 {
                before.push((signal, action));
            }
        }
    }
    let done = body();
    for (signal, action) in before {
        // SAFETY: restores the previous action. Signals that cannot be set never change.
        unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
    }
    done
}

/// Strips the library name from the linker's message, which repeats it.
fn strip_name(name: &str, words: &str) -> String {
    words.strip_prefix(name).map_or(words, |w| w.trim_start_matches(": ")).into()
}

/// Advice if nothing was found.
pub fn install_advice() -> String {
    match std::env::var_os(LIB_VARIABLE) {
        Some(_) => format!("{LIB_VARIABLE} limits the search to this library; unset it to try all"),
        None => REMEDY.into(),
    }
}

const REMEDY: &str = if cfg!(target_os = "android") {
    "the vendor's libOpenCL.so must be readable: from adb shell add /vendor/lib64 to LD_LIBRARY_PATH, an app \
     must declare it with <uses-native-library android:name=\"libOpenCL.so\"/>"
} else if cfg!(all(target_env = "musl", target_feature = "crt-static")) {
    "a static program cannot load libraries: use one built for *-linux-gnu or *-linux-android"
} else if cfg!(target_os = "macos") {
    "OpenCL is part of macOS; without it use `EngineOptions::backend` cpu"
} else {
    "install the GPU vendor's driver and the package ocl-icd-libopencl1 (or pocl-opencl-icd to run on the CPU)"
};

#[cfg(target_os = "android")]
const CANDIDATES: &[&str] = &[
    "libOpenCL.so",
    "libGLES_mali.so",
    "libmali.so",
    "libOpenCL-pixel.so",
    "libOpenCL-car.so",
    "/vendor/lib64/libOpenCL.so",
    "/system/vendor/lib64/libOpenCL.so",
    "/system/lib64/libOpenCL.so",
    "/vendor/lib64/egl/libGLES_mali.so",
    "/system/vendor/lib64/egl/libGLES_mali.so",
    "/system/lib64/egl/libGLES_mali.so",
    "libPVROCL.so",
    "/vendor/lib64/libPVROCL.so",
    "/system/vendor/lib64/libPVROCL.so",
];
// The framework is in the linker's cache; the file need not exist.
#[cfg(target_os = "macos")]
const CANDIDATES: &[&str] = &["/System/Library/Frameworks/OpenCL.framework/OpenCL"];
#[cfg(not(any(target_os = "android", target_os = "macos")))]
const CANDIDATES: &[&str] = &[
    "libOpenCL.so.1",
    "libOpenCL.so",
    #[cfg(target_arch = "x86_64")]
    "/usr/lib/x86_64-linux-gnu/libOpenCL.so.1",
    #[cfg(target_arch = "aarch64")]
    "/usr/lib/aarch64-linux-gnu/libOpenCL.so.1",
    "/usr/lib64/libOpenCL.so.1",
    "/usr/local/cuda/lib64/libOpenCL.so.1",
];

/// Vendors' libraries registered with the loader, in the order of their file names, then NVIDIA's, which containers
/// often have without a registration.
fn vendor_libraries() -> Vec<String> {
    if cfg!(any(target_os = "android", target_os = "macos")) {
        return Vec::new();
    }
    let place = std::env::var_os("OCL_ICD_VENDORS").map_or("/etc/OpenCL/vendors".into(), PathBuf::from);
    let is_icd = |path: &Path| path.extension().is_some_and(|e| e == "icd");
    let mut files: Vec<PathBuf> = match std::fs::read_dir(&place) {
        Ok(entries) => entries.flatten().map(|e| e.path()).filter(|p| is_icd(p)).collect(),
        Err(_) if is_icd(&place) => vec![place],
        Err(_) => Vec::new(),
    };
    files.sort();
    let text = |file: &PathBuf| std::fs::read_to_string(file).unwrap_or_default();
    let name = |text: String| Some(text.lines().next()?.trim().to_string()).filter(|n| !n.is_empty());
    let mut names: Vec<String> = files.iter().map(text).filter_map(name).collect();
    names.push("libnvidia-opencl.so.1".into());
    names
}

type Opened = std::result::Result<(Library, &'static str), String>;

/// Opens a library and looks for its platforms. The second value says how it is used.
fn open_library(name: &str) -> Opened {
    ANY_LOADED.store(true, Ordering::Relaxed);
    // SAFETY: this runs the library's initialisers. The names are those of OpenCL libraries, or were given
    // by the user or the system's administrator.
    let handle = unsafe { dl::Library::open(Some(name), dl::RTLD_NOW | dl::RTLD_LOCAL) }
        // The error's own text hides the linker's message in its source.
        .map_err(|e| std::error::Error::source(&e).map_or_else(|| e.to_string(), ToString::to_string))?;
    // Never unloaded, even if it is not usable.
    let handle: &'static dl::Library = Box::leak(Box::new(handle));
    let pixel = PixelHook::of(handle);
    let by_name = |name: &'static CStr, _slot: usize| match &pixel {
        Some(hook) => hook.symbol_address(name),
        None => symbol_address(handle, name),
    };
    // SAFETY: the addresses are those of the functions so named, in a library that stays.
    match unsafe { Api::bind(by_name) } {
        Ok(api) => {
            let how = if pixel.is_some() { "through loadOpenCLPointer" } else { "used" };
            let platforms = platforms_of(&|n, ids, count| {
                // SAFETY: `platforms_of` passes an array of `n` ids, or none, and where to put the count.
                unsafe { (api.clGetPlatformIDs)(n, ids, count) }
            })?;
            Ok((Library { name: name.into(), api, platforms }, how))
        }
        Err(missing) => {
            open_vendor_library(name, handle).unwrap_or_else(|| Err(format!("symbol {missing} is missing")))
        }
    }
}

/// Address of a symbol; null if missing.
fn symbol_address(handle: &dl::Library, name: &CStr) -> *mut c_void {
    // SAFETY: only the address is taken, nothing is called or read through it here.
    unsafe { handle.get::<*mut c_void>(name) }.map_or(std::ptr::null_mut(), dl::Symbol::as_raw_ptr)
}

/// Google's Pixel libraries return entry points from a function of their own.
struct PixelHook {
    load: unsafe extern "C" fn(*const c_char) -> *mut c_void,
}

impl PixelHook {
    fn of(handle: &'static dl::Library) -> Option<Self> {
        let (enable, load) =
            (symbol_address(handle, c"enableOpenCL"), symbol_address(handle, c"loadOpenCLPointer"));
        if enable.is_null() || load.is_null() {
            return None;
        }
        // SAFETY: of these types wherever both names are exported.
        let (enable, load) = unsafe {
            (
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn()>(enable),
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char) -> *mut c_void>(load),
            )
        };
        // SAFETY: to be called once before the first `load`; `open_library` makes one hook a library.
        unsafe { enable() };
        Some(Self { load })
    }

    fn symbol_address(&self, name: &CStr) -> *mut c_void {
        // SAFETY: takes a zero-terminated name and gives its address or null.
        unsafe { (self.load)(name.as_ptr()) }
    }
}

/// First word of a platform of the second ICD interface, which needs a loader.
const ICD2_TAG: usize = 0x4F50_454E_434C_3331_u64 as usize;

/// Opens a vendor's library without a loader (cl_khr_icd): the first word of every platform points to a table of entry
/// points. `None` if it is not such a library.
fn open_vendor_library(name: &str, handle: &dl::Library) -> Option<Opened> {
    type GetAddress = unsafe extern "system" fn(*const c_char) -> *mut c_void;
    type GetPlatforms = unsafe extern "system" fn(u32, *mut PlatformId, *mut u32) -> i32;
    let get = symbol_address(handle, c"clGetExtensionFunctionAddress");
    if get.is_null() {
        return None;
    }
    // SAFETY: the function of this name has had this type since OpenCL 1.0.
    let get = unsafe { std::mem::transmute::<*mut c_void, GetAddress>(get) };
    // SAFETY: takes a zero-terminated name and gives its address or null.
    let entry = unsafe { get(c"clIcdGetPlatformIDsKHR".as_ptr()) };
    if entry.is_null() {
        return None;
    }
    // SAFETY: not null, and of this type by cl_khr_icd.
    let entry_fn = unsafe { std::mem::transmute::<*mut c_void, GetPlatforms>(entry) };
    let opened = || {
        let mut platforms = platforms_of(&|n, ids, count| {
            // SAFETY: `platforms_of` passes an array of `n` ids, or none, and where to put the count.
            unsafe { entry_fn(n, ids, count) }
        })?;
        // SAFETY: by cl_khr_icd a platform starts with the address of its dispatch table.
        let table_of = |p: &PlatformId| unsafe { *p.0.cast::<*const *mut c_void>() };
        platforms.retain(|p| table_of(p).addr() != ICD2_TAG && !table_of(p).is_null());
        let table =
            platforms.first().map(table_of).ok_or("its platforms can only be used through a loader")?;
        platforms.retain(|p| table_of(p) == table);
        let bind = |name: &'static CStr, slot: usize| match slot {
            // Its slot may be empty, because loaders never call it.
            0 => entry,
            // Slots of 1.0 and 1.1 are in every table, later ones only if the version says so.
            slot if slot < 91 || has_version_slot(table, platforms[0], slot) => {
                // SAFETY: the table has this slot.
                unsafe { *table.add(slot) }
            }
            _ => symbol_address(handle, name),
        };
        // SAFETY: the slots are those of the Khronos header, in a library that stays.
        let api =
            unsafe { Api::bind(bind) }.map_err(|missing| format!("its dispatch table lacks {missing}"))?;
        Ok((Library { name: name.into(), api, platforms }, "used directly, without a loader"))
    };
    Some(opened())
}

/// True if the platform's version promises a slot of OpenCL 1.2, the latest version used.
fn has_version_slot(table: *const *mut c_void, platform: PlatformId, slot: usize) -> bool {
    type GetInfo = unsafe extern "system" fn(PlatformId, u32, usize, *mut c_void, *mut usize) -> i32;
    // SAFETY: slot 1 is clGetPlatformInfo in every version.
    let get = unsafe { std::mem::transmute::<*mut c_void, Option<GetInfo>>(*table.add(1)) };
    let mut text = [0u8; 64];
    let Some(get) = get else { return false };
    // SAFETY: writes at most `text.len()` bytes.
    let code = unsafe {
        get(platform, ffi::PLATFORM_VERSION, text.len(), text.as_mut_ptr().cast(), std::ptr::null_mut())
    };
    let older = [b"OpenCL 1.0", b"OpenCL 1.1"];
    code == ffi::SUCCESS
        && slot < 123
        && text.starts_with(b"OpenCL ")
        && !older.iter().any(|v| text.starts_with(*v))
}

type PlatformsCall<'a> = &'a dyn Fn(u32, *mut PlatformId, *mut u32) -> i32;

/// Platforms of a library; none is an error.
fn platforms_of(call: PlatformsCall<'_>) -> std::result::Result<Vec<PlatformId>, String> {
    let none = |code: i32| match code {
        ffi::SUCCESS => "it loads but has no platform".into(),
        ffi::PLATFORM_NOT_FOUND_KHR => "it loads but no driver is registered with it".into(),
        code => format!("it loads but clGetPlatformIDs returned {} ({code})", error_name(code)),
    };
    let mut count = 0;
    let code = call(0, std::ptr::null_mut(), &mut count);
    if code != ffi::SUCCESS || count == 0 {
        return Err(none(code));
    }
    let mut ids = vec![PlatformId::NULL; count as usize];
    let code = call(count, ids.as_mut_ptr(), std::ptr::null_mut());
    ids.retain(|id| *id != PlatformId::NULL);
    if code != ffi::SUCCESS || ids.is_empty() { Err(none(code)) } else { Ok(ids) }
}

/// Usable libraries; the error lists every candidate in short.
pub fn usable_libraries() -> Result<&'static [Library]> {
    let search = Search::get();
    if search.libraries.is_empty() { Err(search.to_failure()) } else { Ok(&search.libraries) }
}
