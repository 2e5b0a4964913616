//! OpenCL, opened at run time: the library ([`load`], [`ffi`]), devices and their properties, calls with a timeout,
//! buffers, programs and the cache of compiled programs. Knows nothing about models.
#![deny(unsafe_code)]

pub mod arena;
#[allow(unsafe_code)]
pub mod buffer;
mod calls;
#[allow(unsafe_code)]
pub mod device;
pub mod device_info;
pub mod failure;
#[allow(unsafe_code)]
pub mod ffi;
#[allow(unsafe_code)]
pub mod load;
pub mod pending_calls;
#[allow(unsafe_code)]
pub mod program;
pub mod program_cache;
pub mod read_bandwidth;
#[allow(unsafe_code)]
pub mod watchdog;

pub use buffer::{Access, Buffer, Mapped, Place, SharedView, StagingBuffer};
pub use calls::exit_process;
pub use device::{BuildStats, Device};
pub use device_info::{DeviceInfo, DeviceType};
pub use failure::{Failure, FailureKind};
pub use program::{Kernel, Program, Source};
pub use program_cache::{Cache, Verdict};
