//! OpenCL on whatever device this machine has, PoCL's CPU if nothing else: library, device, buffers, programs.
#![cfg(unix)]

#[path = "opencl/bed.rs"]
mod bed;

#[path = "opencl/host.rs"]
mod host;
