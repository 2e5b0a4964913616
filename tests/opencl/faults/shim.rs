//! An OpenCL library that forwards every call to the real one, but for what it is told to do in another way:
//!
//! - `SHIM_FAULT=CALL:FROM:CODE` makes the calls of one function fail with a code, `hang`, or take four seconds
//!   (`slow`), from the one of this number on; `:once` after it, only that one. `*` is any function. With `exit` as the
//! code it does not fail, but the process aborts where it runs exit handlers.
//! - `SHIM_WRONG=KERNEL,OPTION...` makes a kernel that is compiled with these options compute wrong results.
//! - `SHIM_COPIES=1` maps copies of buffers, which turn to 0xAA when they are unmapped.
//! - `SHIM_MAX_ALLOC=BYTES` lowers the largest size of a buffer.
//!
//! `faults.rs` compiles this, with nothing but rustc.

#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::alloc::{Layout, alloc};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::{Mutex, OnceLock};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

type Word = usize;
/// Type by which every function is called: extra arguments do no harm, since the caller removes them.
type Any = unsafe extern "C" fn(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word) -> Word;

#[cfg_attr(target_os = "linux", link(name = "dl"))]
unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn atexit(handler: extern "C" fn()) -> c_int;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The real function.
fn real(name: &str) -> Any {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let name = CString::new(name).unwrap();
    // SAFETY: opens an OpenCL library, and takes a function of it, which can be called with more arguments.
    unsafe {
        let library = *LIBRARY.get_or_init(|| dlopen(c"libOpenCL.so.1".as_ptr(), 2) as usize);
        let function = dlsym(library as *mut c_void, name.as_ptr());
        assert!(!function.is_null());
        std::mem::transmute::<*mut c_void, Any>(function)
    }
}

struct Fault {
    call: String,
    from: u32,
    code: String,
    once: bool,
}

fn fault() -> &'static Option<Fault> {
    static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
    FAULT.get_or_init(|| {
        let text = std::env::var("SHIM_FAULT").ok()?;
        let mut parts = text.split(':').map(String::from);
        let (call, from, code) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?);
        Some(Fault { call, from, code, once: parts.next().is_some() })
    })
}

/// The code that this call shall fail with.
fn fails(name: &str, count: &AtomicU32) -> Option<i32> {
    static FAILED: AtomicBool = AtomicBool::new(false);
    static ALL: AtomicU32 = AtomicU32::new(0);
    let fault = fault().as_ref()?;
    let any = fault.call == "*";
    if FAILED.load(Ordering::Relaxed) && std::env::var_os("SHIM_TELL").is_some() {
        eprintln!("CALLED AFTER THE FAULT: {name}");
    }
    if !any && fault.call != name {
        return None;
    }
    let number = 1 + if any { &ALL } else { count }.fetch_add(1, Ordering::Relaxed);
    if number < fault.from || (fault.once && number > fault.from) {
        return None;
    }
    FAILED.store(true, Ordering::Relaxed);
    while fault.code == "hang" {
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
    if fault.code == "slow" {
        std::thread::sleep(std::time::Duration::from_secs(4));
    }
    if fault.code == "exit" {
        extern "C" fn crash() {
            std::process::abort();
        }
        // SAFETY: a library that is never unloaded.
        unsafe { atexit(crash) };
    }
    fault.code.parse().ok()
}

/// Forwards a call, unless it is to fail. Where `code` is the number of an argument, the code goes there.
unsafe fn forward(name: &'static str, code: Option<usize>, args: [Word; 10]) -> Word {
    static CALLS: Mutex<Vec<(&str, &AtomicU32, Any)>> = Mutex::new(Vec::new());
    let (count, real) = {
        let mut calls = CALLS.lock().unwrap();
        if !calls.iter().any(|(known, ..)| *known == name) {
            calls.push((name, Box::leak(Box::default()), real(name)));
        }
        calls.iter().find(|(known, ..)| *known == name).map(|&(_, count, real)| (count, real)).unwrap()
    };
    let Some(failure) = fails(name, count) else {
        let [a, b, c, d, e, f, g, h, i, j] = args;
        // SAFETY: the caller's arguments, passed on.
        return unsafe { real(a, b, c, d, e, f, g, h, i, j) };
    };
    let Some(code) = code else { return failure as u32 as Word };
    let to = args[code] as *mut i32;
    if !to.is_null() {
        // SAFETY: where the caller wants the code.
        unsafe { *to = failure };
    }
    0
}

/// The kernel that computes wrong results, and the options that it is compiled with.
fn wrong() -> &'static Option<(String, Vec<String>)> {
    static WRONG: OnceLock<Option<(String, Vec<String>)>> = OnceLock::new();
    WRONG.get_or_init(|| {
        let text = std::env::var("SHIM_WRONG").ok().filter(|text| !text.is_empty())?;
        let mut parts = text.split(',').map(String::from);
        Some((parts.next()?, parts.collect()))
    })
}

/// Programs that have that kernel.
static SUSPECTS: Mutex<Vec<Word>> = Mutex::new(Vec::new());

/// The places of `kernels/` where a result can be made wrong, and what then stands there.
const PLACES: [(&str, &str); 3] = [
    ("#define HEADER 16", "#define HEADER (16 + SHIM_WRONG)"),
    ("return TO_FLOATS(low);", "return TO_FLOATS(low) + SHIM_WRONG;"),
    ("held[e] = plane[", "held[e] = SHIM_WRONG ^ plane["),
];

/// Adds an option to sources of the kernel that is to compute wrong results: one text of a length.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clCreateProgramWithSource(
    context: Word, count: Word, texts: *const *const u8, lengths: *const usize, code: Word,
) -> Word {
    let (mut owned, mut args) = (String::new(), [context, count, texts as Word, lengths as Word, code, 0, 0, 0, 0, 0]);
    // SAFETY: the caller's text.
    let text = unsafe { std::slice::from_raw_parts(*texts, *lengths) };
    let suspect = wrong().as_ref().is_some_and(|(kernel, _)| {
        owned = String::from_utf8_lossy(text).into_owned();
        owned.contains(&format!("void {kernel}("))
    });
    if suspect {
        PLACES.iter().for_each(|(from, to)| owned = owned.replace(from, to));
        owned = format!("#ifndef SHIM_WRONG\n#define SHIM_WRONG 0\n#endif\n{owned}");
    }
    let (start, len) = (owned.as_ptr(), owned.len());
    if suspect {
        (args[2], args[3]) = ((&raw const start) as Word, (&raw const len) as Word);
    }
    // SAFETY: the caller's arguments, or our text, which the call copies.
    let program = unsafe { forward("clCreateProgramWithSource", Some(4), args) };
    if suspect {
        SUSPECTS.lock().unwrap().push(program);
    }
    program
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clBuildProgram(
    program: Word, count: Word, devices: Word, options: *const c_char, callback: Word, data: Word,
) -> Word {
    // SAFETY: zero-terminated, by OpenCL.
    let mut text = unsafe { CStr::from_ptr(options) }.to_string_lossy().into_owned();
    let meant = |(_, needed): &(String, Vec<String>)| needed.iter().all(|option| text.contains(option.as_str()));
    if SUSPECTS.lock().unwrap().contains(&program) && wrong().as_ref().is_some_and(meant) {
        text += " -DSHIM_WRONG=1";
    }
    let text = CString::new(text).unwrap();
    // SAFETY: the caller's arguments, but for the options.
    unsafe { forward("clBuildProgram", None, [program, count, devices, text.as_ptr() as Word, callback, data, 0, 0, 0, 0]) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clGetDeviceInfo(device: Word, what: u32, size: Word, value: *mut u64, wanted: Word) -> Word {
    const MAX_MEM_ALLOC_SIZE: u32 = 0x1010;
    // SAFETY: the caller's arguments.
    let code = unsafe { forward("clGetDeviceInfo", None, [device, what as Word, size, value as Word, wanted, 0, 0, 0, 0, 0]) };
    let most = std::env::var("SHIM_MAX_ALLOC").ok().and_then(|bytes| bytes.parse::<u64>().ok());
    if let (MAX_MEM_ALLOC_SIZE, Some(most), false) = (what, most, value.is_null()) {
        // SAFETY: eight bytes, by OpenCL.
        unsafe { *value = most.min(*value) };
    }
    code
}

/// A copy that is mapped instead of a buffer: it, the real address, its length, and whether it is written.
type Copied = (usize, usize, usize, bool);
static COPIES: Mutex<Vec<Copied>> = Mutex::new(Vec::new());
/// Byte that a stale view reads.
const STALE: u8 = 0xAA;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clEnqueueMapBuffer(
    queue: Word, buffer: Word, blocking: Word, flags: u64, offset: Word, len: Word, events: Word, list: Word, event: Word,
    code: Word,
) -> Word {
    let args = [queue, buffer, blocking, flags as Word, offset, len, events, list, event, code];
    // SAFETY: the caller's arguments.
    let real = unsafe { forward("clEnqueueMapBuffer", Some(9), args) };
    if real == 0 || std::env::var_os("SHIM_COPIES").is_none() {
        return real;
    }
    let (reads, writes) = (flags & 1 != 0, flags & 2 != 0);
    // SAFETY: of at least one byte; both are `len` bytes.
    let copy = unsafe {
        let copy = alloc(Layout::from_size_align(len, 4096).unwrap());
        copy.write_bytes(STALE, len);
        if reads {
            copy.copy_from_nonoverlapping(real as *const u8, len);
        }
        copy as usize
    };
    COPIES.lock().unwrap().push((copy, real, len, writes));
    copy
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn clEnqueueUnmapMemObject(queue: Word, buffer: Word, at: Word, events: Word, list: Word, event: Word) -> Word {
    let mut copies = COPIES.lock().unwrap();
    let found = copies.iter().position(|copy| copy.0 == at).map(|i| copies.swap_remove(i));
    let real = found.map_or(at, |(copy, real, len, writes)| {
        // SAFETY: both are `len` bytes. The copy stays: somebody may look there still.
        unsafe {
            if writes {
                (real as *mut u8).copy_from_nonoverlapping(copy as *const u8, len);
            }
            (copy as *mut u8).write_bytes(STALE, len);
        }
        real
    });
    // SAFETY: the caller's arguments, but for the address.
    unsafe { forward("clEnqueueUnmapMemObject", None, [queue, buffer, real, events, list, event, 0, 0, 0, 0]) }
}

/// Writes a function. Those that make something return it, or null, and the code through argument `=> NUMBER`.
macro_rules! forward {
    ($($name:ident $(=> $code:literal)?;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            a: Word, b: Word, c: Word, d: Word, e: Word, f: Word, g: Word, h: Word, i: Word, j: Word,
        ) -> Word {
            let code: Option<usize> = None $( .or(Some($code)) )?;
            // SAFETY: the caller's arguments, passed on.
            unsafe { forward(stringify!($name), code, [a, b, c, d, e, f, g, h, i, j]) }
        }
    )*};
}

forward! {
    clGetPlatformIDs; clGetPlatformInfo; clGetDeviceIDs;
    clCreateContext => 5; clReleaseContext; clCreateCommandQueue => 3; clReleaseCommandQueue;
    clCreateBuffer => 4; clCreateSubBuffer => 4; clReleaseMemObject;
    clCreateProgramWithBinary => 6; clReleaseProgram;
    clGetProgramInfo; clGetProgramBuildInfo;
    clCreateKernel => 2; clReleaseKernel; clSetKernelArg; clGetKernelWorkGroupInfo;
    clWaitForEvents; clReleaseEvent; clFlush; clFinish;
    clEnqueueReadBuffer; clEnqueueWriteBuffer; clEnqueueCopyBuffer; clEnqueueFillBuffer;
    clEnqueueNDRangeKernel;
    clGetExtensionFunctionAddressForPlatform;
}
