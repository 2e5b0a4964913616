//! Runs the model: options, memory plan, sessions, generation loop, engine, saved sessions.

pub mod calibration;
pub mod draft_model;
pub mod embed;
pub mod engine;
pub mod eviction;
pub mod generate;
pub mod kept_experts;
pub mod options;
pub mod past;
pub mod placement;
pub mod plan;
pub mod saved;
pub mod session;
pub mod split;
mod state_file;
pub mod system;
