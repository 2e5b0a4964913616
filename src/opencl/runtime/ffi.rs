//! OpenCL 1.x ABI: handles, constants, error names and the table of entry points.
//!
//! Taken from the Khronos specification and headers (OpenCL 1.2, `cl.h`, `cl_icd.h`). Checks nothing; the modules above
//! do.

use std::ffi::{CStr, c_char, c_void};

/// Opaque driver objects: pointers, null for none.
macro_rules! handles {
    ($($name:ident)*) => {$(
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name(pub *mut c_void);

        impl $name {
            pub const NULL: Self = Self(std::ptr::null_mut());
        }

        // SAFETY: a handle is an opaque name that only the driver dereferences; since OpenCL 1.1 (appendix A.2)
        // every call but clSetKernelArg may be made from any thread, and that one takes `&mut Kernel`.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! { PlatformId DeviceId ContextId QueueId MemId ProgramId KernelId EventId }

type ContextCallback = Option<unsafe extern "system" fn(*const c_char, *const c_void, usize, *mut c_void)>;
type BuildCallback = Option<unsafe extern "system" fn(ProgramId, *mut c_void)>;

/// Declares each prototype once; generates the table and the code that fills it.
macro_rules! entry_points {
    (
        required { $($req:ident @ $req_slot:literal ($($req_arg:ty),*) -> $req_ret:ty;)* }
        optional { $($opt:ident @ $opt_slot:literal ($($opt_arg:ty),*) -> $opt_ret:ty;)* }
    ) => {
        /// Entry points of one library.
        #[allow(non_snake_case)]
        pub struct Api {
            $(pub $req: unsafe extern "system" fn($($req_arg),*) -> $req_ret,)*
            $(pub $opt: Option<unsafe extern "system" fn($($opt_arg),*) -> $opt_ret>,)*
        }

        impl Api {
            /// Fills the table from `address(name, slot in the ICD dispatch table)`, which returns null for a missing
            /// function. The error is the name of a missing required function.
            ///
            /// # Safety
            /// `address` must return the function of that name, valid for the rest of the process.
            #[allow(non_snake_case)]
            pub unsafe fn bind(address: impl Fn(&'static CStr, usize) -> *mut c_void) -> Result<Api, &'static str> {
                $(
                    let at = address(const { symbol(concat!(stringify!($req), "\0")) }, $req_slot);
                    if at.is_null() {
                        return Err(stringify!($req));
                    }
                    // SAFETY: not null, and by this function's contract of this type.
                    let $req = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "system" fn($($req_arg),*) -> $req_ret>(at)
                    };
                )*
                $(
                    let at = address(const { symbol(concat!(stringify!($opt), "\0")) }, $opt_slot);
                    // SAFETY: by this function's contract of this type; null becomes `None`.
                    let $opt = unsafe {
                        std::mem::transmute::<*mut c_void, Option<unsafe extern "system" fn($($opt_arg),*) -> $opt_ret>>(at)
                    };
                )*
                Ok(Api { $($req,)* $($opt,)* })
            }
        }
    };
}

const fn symbol(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("a name ends with its only zero"),
    }
}

// All required functions are in OpenCL 1.0, so every driver has them. The number is the slot in `struct
// _cl_icd_dispatch`.
entry_points! {
    required {
        clGetPlatformIDs @ 0 (u32, *mut PlatformId, *mut u32) -> i32;
        clGetPlatformInfo @ 1 (PlatformId, u32, usize, *mut c_void, *mut usize) -> i32;
        clGetDeviceIDs @ 2 (PlatformId, u64, u32, *mut DeviceId, *mut u32) -> i32;
        clGetDeviceInfo @ 3 (DeviceId, u32, usize, *mut c_void, *mut usize) -> i32;
        clCreateContext @ 4 (*const isize, u32, *const DeviceId, ContextCallback, *mut c_void, *mut i32) -> ContextId;
        clReleaseContext @ 7 (ContextId) -> i32;
        clCreateCommandQueue @ 9 (ContextId, DeviceId, u64, *mut i32) -> QueueId;
        clReleaseCommandQueue @ 11 (QueueId) -> i32;
        clCreateBuffer @ 14 (ContextId, u64, usize, *mut c_void, *mut i32) -> MemId;
        clReleaseMemObject @ 18 (MemId) -> i32;
        clCreateProgramWithSource @ 26 (ContextId, u32, *const *const c_char, *const usize, *mut i32) -> ProgramId;
        clCreateProgramWithBinary @ 27 (ContextId, u32, *const DeviceId, *const usize, *const *const u8, *mut i32, *mut i32) -> ProgramId;
        clReleaseProgram @ 29 (ProgramId) -> i32;
        clBuildProgram @ 30 (ProgramId, u32, *const DeviceId, *const c_char, BuildCallback, *mut c_void) -> i32;
        clGetProgramInfo @ 32 (ProgramId, u32, usize, *mut c_void, *mut usize) -> i32;
        clGetProgramBuildInfo @ 33 (ProgramId, DeviceId, u32, usize, *mut c_void, *mut usize) -> i32;
        clCreateKernel @ 34 (ProgramId, *const c_char, *mut i32) -> KernelId;
        clReleaseKernel @ 37 (KernelId) -> i32;
        clSetKernelArg @ 38 (KernelId, u32, usize, *const c_void) -> i32;
        clGetKernelWorkGroupInfo @ 40 (KernelId, DeviceId, u32, usize, *mut c_void, *mut usize) -> i32;
        clWaitForEvents @ 41 (u32, *const EventId) -> i32;
        clReleaseEvent @ 44 (EventId) -> i32;
        clFlush @ 46 (QueueId) -> i32;
        clFinish @ 47 (QueueId) -> i32;
        clEnqueueReadBuffer @ 48 (QueueId, MemId, u32, usize, usize, *mut c_void, u32, *const EventId, *mut EventId) -> i32;
        clEnqueueWriteBuffer @ 49 (QueueId, MemId, u32, usize, usize, *const c_void, u32, *const EventId, *mut EventId) -> i32;
        clEnqueueCopyBuffer @ 50 (QueueId, MemId, MemId, usize, usize, usize, u32, *const EventId, *mut EventId) -> i32;
        clEnqueueMapBuffer @ 56 (QueueId, MemId, u32, u64, usize, usize, u32, *const EventId, *mut EventId, *mut i32) -> *mut c_void;
        clEnqueueUnmapMemObject @ 58 (QueueId, MemId, *mut c_void, u32, *const EventId, *mut EventId) -> i32;
        clEnqueueNDRangeKernel @ 59 (QueueId, KernelId, u32, *const usize, *const usize, *const usize, u32, *const EventId, *mut EventId) -> i32;
    }
    optional {
        // OpenCL 1.1; without it a kernel can access only one matrix at a time.
        clCreateSubBuffer @ 82 (MemId, u64, u32, *const c_void, *mut i32) -> MemId;
        // OpenCL 1.1; without them each strided piece is a transfer of its own.
        clEnqueueReadBufferRect @ 86 (QueueId, MemId, u32, *const [usize; 3], *const [usize; 3], *const [usize; 3], usize, usize, usize, usize, *mut c_void, u32, *const EventId, *mut EventId) -> i32;
        clEnqueueWriteBufferRect @ 87 (QueueId, MemId, u32, *const [usize; 3], *const [usize; 3], *const [usize; 3], usize, usize, usize, usize, *const c_void, u32, *const EventId, *mut EventId) -> i32;
        // OpenCL 1.2; without it no kernel reads through images.
        clCreateImage @ 96 (ContextId, u64, *const [u32; 2], *const ImageDescription, *mut c_void, *mut i32) -> MemId;
        // OpenCL 1.2; without it a fill is a write.
        clEnqueueFillBuffer @ 102 (QueueId, MemId, *const c_void, usize, usize, usize, u32, *const EventId, *mut EventId) -> i32;
        // OpenCL 1.2; without it no extension functions are available.
        clGetExtensionFunctionAddressForPlatform @ 107 (PlatformId, *const c_char) -> *mut c_void;
    }
}

/// `clCreateBufferNV` of cl_nv_create_buffer: `clCreateBuffer` with additional flags.
pub type CreateBufferNv =
    unsafe extern "system" fn(ContextId, u64, u64, usize, *mut c_void, *mut i32) -> MemId;
/// Flags for page-locked memory on the host.
pub const MEM_LOCATION_HOST_NV: u64 = 1;
pub const MEM_PINNED_NV: u64 = 2;

/// Casts an address to a function pointer; null becomes `None`.
///
/// # Safety
/// `F` must be a function pointer type, and the address null or that of a function of this type.
pub unsafe fn cast_function<F>(address: *mut c_void) -> Option<F> {
    const { assert!(size_of::<Option<F>>() == size_of::<*mut c_void>()) };
    // SAFETY: by this function's contract; `None` of a function pointer is null.
    unsafe { std::mem::transmute_copy::<*mut c_void, Option<F>>(&address) }
}

/// `cl_image_desc`
#[repr(C)]
pub struct ImageDescription {
    pub kind: u32,
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub array_size: usize,
    pub row_pitch: usize,
    pub slice_pitch: usize,
    pub levels: u32,
    pub samples: u32,
    pub memory: MemId,
}

pub const TRUE: u32 = 1;
pub const FALSE: u32 = 0;

pub const PLATFORM_VERSION: u32 = 0x0901;
pub const PLATFORM_NAME: u32 = 0x0902;

pub const DEVICE_TYPE_CPU: u64 = 2;
pub const DEVICE_TYPE_GPU: u64 = 4;
pub const DEVICE_TYPE_ACCELERATOR: u64 = 8;
pub const DEVICE_TYPE_ALL: u64 = 0xFFFF_FFFF;

pub const DEVICE_TYPE: u32 = 0x1000;
pub const DEVICE_MAX_COMPUTE_UNITS: u32 = 0x1002;
pub const DEVICE_MAX_WORK_GROUP_SIZE: u32 = 0x1004;
pub const DEVICE_MAX_CLOCK_FREQUENCY: u32 = 0x100C;
pub const DEVICE_MAX_MEM_ALLOC_SIZE: u32 = 0x1010;
pub const DEVICE_IMAGE_SUPPORT: u32 = 0x1016;
pub const DEVICE_MEM_BASE_ADDR_ALIGN: u32 = 0x1019;
pub const DEVICE_SINGLE_FP_CONFIG: u32 = 0x101B;
pub const FP_CORRECTLY_ROUNDED_DIVIDE_SQRT: u64 = 1 << 7;
pub const DEVICE_GLOBAL_MEM_SIZE: u32 = 0x101F;
pub const DEVICE_LOCAL_MEM_TYPE: u32 = 0x1022;
pub const DEVICE_LOCAL_MEM_SIZE: u32 = 0x1023;
pub const DEVICE_NAME: u32 = 0x102B;
pub const DEVICE_VENDOR: u32 = 0x102C;
pub const DRIVER_VERSION: u32 = 0x102D;
pub const DEVICE_VERSION: u32 = 0x102F;
pub const DEVICE_EXTENSIONS: u32 = 0x1030;
pub const DEVICE_HOST_UNIFIED_MEMORY: u32 = 0x1035;
pub const DEVICE_OPENCL_C_VERSION: u32 = 0x103D;
pub const DEVICE_IMAGE_MAX_BUFFER_SIZE: u32 = 0x1040;
pub const DEVICE_COMPUTE_CAPABILITY_MAJOR_NV: u32 = 0x4000;
pub const DEVICE_COMPUTE_CAPABILITY_MINOR_NV: u32 = 0x4001;
/// Value of `DEVICE_LOCAL_MEM_TYPE` for dedicated memory, not part of global memory.
pub const LOCAL: u32 = 1;

pub const CONTEXT_PLATFORM: isize = 0x1084;
pub const CONTEXT_PERF_HINT_QCOM: isize = 0x40C2;
pub const PERF_HINT_HIGH_QCOM: isize = 0x40C3;
pub const CONTEXT_PRIORITY_HINT_QCOM: isize = 0x40C9;
pub const PRIORITY_HINT_LOW_QCOM: isize = 0x40CC;

pub const MEM_READ_WRITE: u64 = 1;
pub const MEM_READ_ONLY: u64 = 4;
pub const MEM_ALLOC_HOST_PTR: u64 = 16;
pub const MAP_READ: u64 = 1;
pub const MAP_WRITE: u64 = 2;

/// Image channels, one or four, of unsigned 32-bit integers.
pub const CHANNEL_R: u32 = 0x10B0;
pub const CHANNELS_RGBA: u32 = 0x10B5;
pub const UNSIGNED_INT32: u32 = 0x10DC;
pub const IMAGE_OF_BUFFER: u32 = 0x10F6;

/// `cl_buffer_create_type` of a region, given by origin and size.
pub const BUFFER_CREATE_TYPE_REGION: u32 = 0x1220;

pub const PROGRAM_BINARY_SIZES: u32 = 0x1165;
pub const PROGRAM_BINARIES: u32 = 0x1166;
pub const PROGRAM_BUILD_LOG: u32 = 0x1183;

pub const KERNEL_WORK_GROUP_SIZE: u32 = 0x11B0;

pub const SUCCESS: i32 = 0;
pub const MEM_OBJECT_ALLOCATION_FAILURE: i32 = -4;
pub const OUT_OF_RESOURCES: i32 = -5;
pub const OUT_OF_HOST_MEMORY: i32 = -6;
pub const BUILD_PROGRAM_FAILURE: i32 = -11;
pub const INVALID_OPERATION: i32 = -59;
/// Returned by an ICD loader without drivers.
pub const PLATFORM_NOT_FOUND_KHR: i32 = -1001;

/// Names of -1, -2 and so on.
const FROM_MINUS_1: [&str; 19] = [
    "DEVICE_NOT_FOUND",
    "DEVICE_NOT_AVAILABLE",
    "COMPILER_NOT_AVAILABLE",
    "MEM_OBJECT_ALLOCATION_FAILURE",
    "OUT_OF_RESOURCES",
    "OUT_OF_HOST_MEMORY",
    "PROFILING_INFO_NOT_AVAILABLE",
    "MEM_COPY_OVERLAP",
    "IMAGE_FORMAT_MISMATCH",
    "IMAGE_FORMAT_NOT_SUPPORTED",
    "BUILD_PROGRAM_FAILURE",
    "MAP_FAILURE",
    "MISALIGNED_SUB_BUFFER_OFFSET",
    "EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST",
    "COMPILE_PROGRAM_FAILURE",
    "LINKER_NOT_AVAILABLE",
    "LINK_PROGRAM_FAILURE",
    "DEVICE_PARTITION_FAILED",
    "KERNEL_ARG_INFO_NOT_AVAILABLE",
];
/// Names of -30, -31 and so on.
const FROM_MINUS_30: [&str; 43] = [
    "INVALID_VALUE",
    "INVALID_DEVICE_TYPE",
    "INVALID_PLATFORM",
    "INVALID_DEVICE",
    "INVALID_CONTEXT",
    "INVALID_QUEUE_PROPERTIES",
    "INVALID_COMMAND_QUEUE",
    "INVALID_HOST_PTR",
    "INVALID_MEM_OBJECT",
    "INVALID_IMAGE_FORMAT_DESCRIPTOR",
    "INVALID_IMAGE_SIZE",
    "INVALID_SAMPLER",
    "INVALID_BINARY",
    "INVALID_BUILD_OPTIONS",
    "INVALID_PROGRAM",
    "INVALID_PROGRAM_EXECUTABLE",
    "INVALID_KERNEL_NAME",
    "INVALID_KERNEL_DEFINITION",
    "INVALID_KERNEL",
    "INVALID_ARG_INDEX",
    "INVALID_ARG_VALUE",
    "INVALID_ARG_SIZE",
    "INVALID_KERNEL_ARGS",
    "INVALID_WORK_DIMENSION",
    "INVALID_WORK_GROUP_SIZE",
    "INVALID_WORK_ITEM_SIZE",
    "INVALID_GLOBAL_OFFSET",
    "INVALID_EVENT_WAIT_LIST",
    "INVALID_EVENT",
    "INVALID_OPERATION",
    "INVALID_GL_OBJECT",
    "INVALID_BUFFER_SIZE",
    "INVALID_MIP_LEVEL",
    "INVALID_GLOBAL_WORK_SIZE",
    "INVALID_PROPERTY",
    "INVALID_IMAGE_DESCRIPTOR",
    "INVALID_COMPILER_OPTIONS",
    "INVALID_LINKER_OPTIONS",
    "INVALID_DEVICE_PARTITION_COUNT",
    "INVALID_PIPE_SIZE",
    "INVALID_DEVICE_QUEUE",
    "INVALID_SPEC_ID",
    "MAX_SIZE_RESTRICTION_EXCEEDED",
];

/// Name of an error code in the specification, without `CL_`.
pub fn error_name(code: i32) -> &'static str {
    let named = |names: &[&'static str], first: i32| {
        usize::try_from(first - code).ok().and_then(|i| names.get(i)).copied()
    };
    match code {
        PLATFORM_NOT_FOUND_KHR => "PLATFORM_NOT_FOUND_KHR",
        _ => named(&FROM_MINUS_1, -1).or(named(&FROM_MINUS_30, -30)).unwrap_or("unknown error"),
    }
}
