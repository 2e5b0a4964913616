//! An OpenCL library that forwards every call to the real one, but for those that `SHIM_FAULT` names: `CALL:FROM:CODE`
//! makes the calls of one function fail with a code, `hang`, or take four seconds (`slow`), from the one of this number on;
//! `once` after it, only that one. `*` is any function. With `exit` as the code it does not fail, but the process aborts
//! where it runs exit handlers. `faults.rs` compiles this, with nothing but rustc.

#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

type Word = usize;
/// What every function is called with: more arguments than any has do no harm, since the caller removes them.
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

/// Writes a function. Those that make something return it, or null, and the code through argument `=> NUMBER`.
macro_rules! forward {
    ($($name:ident $(=> $code:literal)?;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            a: Word, b: Word, c: Word, d: Word, e: Word, f: Word, g: Word, h: Word, i: Word, j: Word,
        ) -> Word {
            static COUNT: AtomicU32 = AtomicU32::new(0);
            static REAL: OnceLock<Any> = OnceLock::new();
            if let Some(code) = fails(stringify!($name), &COUNT) {
                $(
                    let to = [a, b, c, d, e, f, g, h, i, j][$code] as *mut i32;
                    if !to.is_null() {
                        // SAFETY: where the caller wants the code.
                        unsafe { *to = code };
                    }
                    return 0;
                )?
                #[allow(unreachable_code)]
                return code as u32 as Word;
            }
            let real = REAL.get_or_init(|| real(stringify!($name)));
            // SAFETY: the caller's arguments, passed on.
            unsafe { real(a, b, c, d, e, f, g, h, i, j) }
        }
    )*};
}

forward! {
    clGetPlatformIDs; clGetPlatformInfo; clGetDeviceIDs; clGetDeviceInfo;
    clCreateContext => 5; clReleaseContext; clCreateCommandQueue => 3; clReleaseCommandQueue;
    clCreateBuffer => 4; clCreateSubBuffer => 4; clReleaseMemObject;
    clCreateProgramWithSource => 4; clCreateProgramWithBinary => 6; clReleaseProgram;
    clBuildProgram; clGetProgramInfo; clGetProgramBuildInfo;
    clCreateKernel => 2; clReleaseKernel; clSetKernelArg; clGetKernelWorkGroupInfo;
    clWaitForEvents; clReleaseEvent; clFlush; clFinish;
    clEnqueueReadBuffer; clEnqueueWriteBuffer; clEnqueueCopyBuffer; clEnqueueFillBuffer;
    clEnqueueMapBuffer => 9; clEnqueueUnmapMemObject; clEnqueueNDRangeKernel;
    clGetExtensionFunctionAddressForPlatform;
}
