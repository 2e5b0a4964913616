//! Device errors and their consequences.

use super::ffi::{self, error_name};
use files::Error;
use std::fmt;

/// Meaning of a failure for the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// No library, no platform or no such device.
    Absent,
    /// A program does not build, or lacks a kernel; another variant may work.
    Build,
    /// Out of memory of the device or of its driver.
    Memory,
    /// The device or its driver failed: its context is unusable.
    Lost,
    /// The user asked to stop before the device answered.
    Stopped,
    /// An invalid call: a bug in this program.
    Misuse,
}

/// A failed OpenCL call, or a failed check before one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("OpenCL: {message}")]
pub struct Failure {
    /// Its meaning.
    pub kind: Kind,
    /// Call, object and OpenCL's name of the error.
    pub message: String,
}

/// Result of a call to OpenCL.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure that OpenCL did not report.
    pub fn new(kind: Kind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string() }
    }

    /// `call` on `what` returned `code`.
    pub fn of_call(call: &str, what: impl fmt::Display, code: i32) -> Self {
        let message = format!("{call} of {what}: {} ({code})", error_name(code));
        Self { kind: kind_of(code), message }
    }
}

fn kind_of(code: i32) -> Kind {
    match code {
        -1 | -32 | -33 | ffi::PLATFORM_NOT_FOUND_KHR => Kind::Absent,
        // Compiler, linker, binary, options, program, kernel name.
        -3 | -11 | -17..=-15 | -47..=-42 | -67 | -66 => Kind::Build,
        // -61 is a buffer above the device's limit.
        ffi::MEM_OBJECT_ALLOCATION_FAILURE | ffi::OUT_OF_HOST_MEMORY | -12 | -61 => Kind::Memory,
        // After a fault NVIDIA's driver says that the queue (-36) or the context (-34) is not valid; codes
        // below -1000 are the vendors' own (-9999 is NVIDIA's illegal access).
        -2 | ffi::OUT_OF_RESOURCES | -14 | -34 | -36 => Kind::Lost,
        code if code < -1001 => Kind::Lost,
        _ => Kind::Misuse,
    }
}

/// `Ok` when `code` is success.
pub(super) fn check(code: i32, call: &str, what: impl fmt::Display) -> Result<()> {
    if code == ffi::SUCCESS { Ok(()) } else { Err(Failure::of_call(call, what, code)) }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        match failure.kind {
            Kind::Memory => Error::Memory(failure.to_string()),
            Kind::Absent => Error::Device(format!("{failure}; use `EngineOptions::backend` cpu")),
            Kind::Stopped => Error::Interrupted,
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
            (-1, "DEVICE_NOT_FOUND", Kind::Absent),
            (-5, "OUT_OF_RESOURCES", Kind::Lost),
            (-11, "BUILD_PROGRAM_FAILURE", Kind::Build),
            (-19, "KERNEL_ARG_INFO_NOT_AVAILABLE", Kind::Misuse),
            (-20, "unknown error", Kind::Misuse),
            (-30, "INVALID_VALUE", Kind::Misuse),
            (-36, "INVALID_COMMAND_QUEUE", Kind::Lost),
            (-42, "INVALID_BINARY", Kind::Build),
            (-52, "INVALID_KERNEL_ARGS", Kind::Misuse),
            (-54, "INVALID_WORK_GROUP_SIZE", Kind::Misuse),
            (-61, "INVALID_BUFFER_SIZE", Kind::Memory),
            (-63, "INVALID_GLOBAL_WORK_SIZE", Kind::Misuse),
            (-72, "MAX_SIZE_RESTRICTION_EXCEEDED", Kind::Misuse),
            (-1001, "PLATFORM_NOT_FOUND_KHR", Kind::Absent),
            (-9999, "unknown error", Kind::Lost),
            (7, "unknown error", Kind::Misuse),
            (i32::MIN, "unknown error", Kind::Lost),
        ] {
            let failure = Failure::of_call("clX", "y", code);
            assert_eq!((error_name(code), failure.kind), (name, kind), "{code}");
            assert_eq!(failure.to_string(), format!("OpenCL: clX of y: {name} ({code})"));
        }
    }
}
