//! Running a model: options, the memory plan, sessions, the engine, what is saved.

pub mod calibration;
pub mod draft_model;
pub mod engine;
pub mod eviction;
pub mod options;
pub mod past;
pub mod plan;
pub mod saved;
pub mod session;
pub mod speeds;
pub mod system;
