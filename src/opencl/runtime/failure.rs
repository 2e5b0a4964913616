//! Device errors and their consequences.

use super::ffi::{self, error_name};
use files::Error;
use std::fmt;

/// Meaning of a failure for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// No library, no platform or no such device.
    Unsupported,
    /// A program does not build, or lacks a kernel; another variant may work.
    Build,
    /// Out of memory of the device or of its driver.
    Memory,
    /// The device or its driver failed: its context is unusable.
    Lost,
    /// The user asked to stop before the device answered.
    Stopped,
    /// An invalid call: a bug in this program.
    InvalidCall,
}

/// A failed OpenCL call, or a failed check before one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("OpenCL: {message}")]
pub struct Failure {
    /// Its meaning.
    pub kind: FailureKind,
    /// Call, object and OpenCL's name of the error.
    pub message: String,
}

/// Result of a call to OpenCL.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure that OpenCL did not report.
    pub fn new(kind: FailureKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string() }
    }

    /// `call` on `what` returned `code`.
    pub fn from_call(call: &str, what: impl fmt::Display, code: i32) -> Self {
        let message = format!("{call} of {what}: {} ({code})", error_name(code));
        Self { kind: kind_of(code), message }
    }
}

fn kind_of(code: i32) -> FailureKind {
    match code {
        -1 | -32 | -33 | ffi::PLATFORM_NOT_FOUND_KHR => FailureKind::Unsupported,
        // Compiler, linker, binary, options, program, kernel name.
        -3 | -11 | -17..=-15 | -47..=-42 | -67 | -66 => FailureKind::Build,
        // -61 is a buffer above the device's limit.
        ffi::MEM_OBJECT_ALLOCATION_FAILURE | ffi::OUT_OF_HOST_MEMORY | -12 | -61 => FailureKind::Memory,
        // After a fault NVIDIA's driver says that the queue (-36) or the context (-34) is not valid; codes
        // below -1000 are the vendors' own (-9999 is NVIDIA's illegal access).
        -2 | ffi::OUT_OF_RESOURCES | -14 | -34 | -36 => FailureKind::Lost,
        code if code < -1001 => FailureKind::Lost,
        _ => FailureKind::InvalidCall,
    }
}

/// `Ok` when `code` is success.
pub(super) fn check_code(code: i32, call: &str, what: impl fmt::Display) -> Result<()> {
    if code == ffi::SUCCESS { Ok(()) } else { Err(Failure::from_call(call, what, code)) }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure.kind {
            FailureKind::Memory => Error::Memory(failure.to_string()),
            FailureKind::Unsupported => Error::Device(format!("{failure}; use `EngineOptions::backend` cpu")),
            FailureKind::Stopped => Error::Interrupted,
            _ => Error::Device(failure.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_their_names_and_kinds() {
        for (code, name, kind) in [
            (-1, "DEVICE_NOT_FOUND", FailureKind::Unsupported),
            (-5, "OUT_OF_RESOURCES", FailureKind::Lost),
            (-11, "BUILD_PROGRAM_FAILURE", FailureKind::Build),
            (-19, "KERNEL_ARG_INFO_NOT_AVAILABLE", FailureKind::InvalidCall),
            (-20, "unknown error", FailureKind::InvalidCall),
            (-30, "INVALID_VALUE", FailureKind::InvalidCall),
            (-36, "INVALID_COMMAND_QUEUE", FailureKind::Lost),
            (-42, "INVALID_BINARY", FailureKind::Build),
            (-52, "INVALID_KERNEL_ARGS", FailureKind::InvalidCall),
            (-54, "INVALID_WORK_GROUP_SIZE", FailureKind::InvalidCall),
            (-61, "INVALID_BUFFER_SIZE", FailureKind::Memory),
            (-63, "INVALID_GLOBAL_WORK_SIZE", FailureKind::InvalidCall),
            (-72, "MAX_SIZE_RESTRICTION_EXCEEDED", FailureKind::InvalidCall),
            (-1001, "PLATFORM_NOT_FOUND_KHR", FailureKind::Unsupported),
            (-9999, "unknown error", FailureKind::Lost),
            (7, "unknown error", FailureKind::InvalidCall),
            (i32::MIN, "unknown error", FailureKind::Lost),
        ] {
            let failure = Failure::from_call("clX", "y", code);
            assert_eq!((error_name(code), failure.kind), (name, kind), "{code}");
            assert_eq!(failure.to_string(), format!("OpenCL: clX of y: {name} ({code})"));
        }
    }
}
