//! Model files as named tensors: bytes in memory (`region`), safetensors (`source`).

#[allow(unsafe_code)]
pub mod region;
pub mod source;
