//! The model on the CPU: the same bits on every path, and memory that is bounded and given back.

#[path = "../bed/bed.rs"]
mod bed;

mod allocations;
mod attention_mass;
mod batch;
mod cache_memory;
mod draft;
mod eviction;
mod gguf;
mod golden;
mod kernels;
