//! Layouts of quantised numbers. Activations are quantised to eight bits in blocks of 32 ([`act`]). [`packed`] is the
//! order in which all devices read Q4_0, [`native`] that of GGUF's other formats.

pub mod act;
pub mod native;
pub mod packed;
#[allow(unsafe_code)]
pub mod rows;
