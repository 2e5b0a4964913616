//! OpenCL on whatever device this machine has, PoCL's CPU if nothing else. Without one these tests are skipped,
//! loudly; in CI they fail.
#![allow(clippy::disallowed_macros, clippy::disallowed_methods, reason = "not the program that users run")]
#![cfg(unix)]

/// Shared by the modules below: the device, or a loud skip.
mod device;
/// Shared by all four binaries.
#[path = "../support/support.rs"]
mod support;

/// The program cache returns a stale program, or a damaged entry becomes an error.
mod cache;
/// A driver fails or hangs, and the program dies, hangs or writes another text.
mod faults;
/// A first start waits for kernels, tells another text than the CPU, does not end, or leaves none for the next one.
mod first_start;
/// A GGUF file gives other bits on the device than on the CPU.
mod gguf;
/// A buffer, view, program or launch misbehaves, or its failure does not say what failed.
mod host;
/// A sequence that moves between CPU and device changes, copies too much, or is lost with the device.
mod hybrid;
/// A kernel gives other bits than the CPU's scalar code.
mod kernels;
/// A library is not found, a wrong device is chosen, or the error does not say why.
mod loader;
/// The whole model gives other logits, text or cache rows on the device than on the CPU, or takes other memory than
/// planned.
mod model;
/// A kernel reads or writes out of bounds, races, or reads uninitialised memory (under oclgrind, slow).
mod oclgrind;
/// CPU and device disagree about rows in shared memory, or about attention mass.
mod shared;
/// Layers on several devices give other bits than the CPU, or a device gets more than it needs.
mod split;
/// A token, an eviction or a device switch transfers more bytes than needed, or the wrong ones.
mod transfers;
/// A kernel variant gives other bits, or is used although it is wrong.
mod variants;
