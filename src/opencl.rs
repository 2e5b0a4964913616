//! OpenCL, opened at run time: nothing of it is needed to build or to start this program.
//!
//! [`load`] finds a library and a platform, [`device`] chooses a device and holds its queue, [`buffer`] is
//! memory there, [`program`] what runs there, [`cache`] what is kept of it on disk. [`ffi`] is the ABI and
//! [`failure`] what can go wrong.

#[allow(unsafe_code)]
pub mod buffer;
pub mod cache;
#[allow(unsafe_code)]
pub mod device;
pub mod facts;
pub mod failure;
#[allow(unsafe_code)]
pub mod ffi;
#[allow(unsafe_code)]
pub mod load;
#[allow(unsafe_code)]
pub mod program;

pub use buffer::{Access, Buffer, Mapped, Place, SharedView, Staged};
pub use cache::{Cache, Verdict};
pub use device::{Builds, Device};
pub use facts::{DeviceType, Facts};
pub use failure::{Failure, Kind};
pub use program::{Kernel, Program, Source};
