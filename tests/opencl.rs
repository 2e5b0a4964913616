//! OpenCL on whatever device this machine has, PoCL's CPU if nothing else: library, device, buffers, programs,
//! cache.
#![cfg(unix)]

#[path = "opencl/bed.rs"]
mod bed;

#[path = "opencl/cache.rs"]
mod cache;
#[path = "opencl/host.rs"]
mod host;
#[path = "opencl/loader.rs"]
mod loader;
