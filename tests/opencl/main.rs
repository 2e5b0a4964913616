//! OpenCL on whatever device this machine has, PoCL's CPU if nothing else. Without one these tests are skipped,
//! loudly; in CI they fail.
#![cfg(unix)]

#[path = "../bed/bed.rs"]
mod bed;
mod device;

mod cache;
mod gguf;
mod host;
mod hybrid;
mod kernels;
mod loader;
mod model;
mod shared;
