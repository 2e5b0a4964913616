//! APIs: each reads its requests and writes its answers in a file of its own.

pub mod chat;
pub mod completions;
pub mod llama_cpp;
pub mod messages;
pub mod openai;
pub mod responses;
