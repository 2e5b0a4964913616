//! Flags that several commands share, with the names and defaults of the specification, and the options that they
//! resolve to.

mod clap_error;
mod completion;
mod device;
#[cfg(any(feature = "tools", feature = "ffi"))]
mod embed;
mod flag_warnings;
mod llama_cpp;
mod model;
mod prompt;
mod sampling;
#[cfg(feature = "chat")]
mod template;

use files::{Error, Result};

pub use clap_error::one_line;
#[cfg(feature = "chat")]
pub use completion::{CompletionArgs, format_settings};
pub use completion::{Format, GenerateArgs, OutputArgs, parse_token_limit};
#[cfg(feature = "tools")]
pub use device::{MAX_THREADS, MaskArgs, ThreadArgs, check_threads};
#[cfg(any(feature = "tools", feature = "ffi"))]
pub use embed::PoolingArgs;
pub use flag_warnings::FlagWarnings;
pub use llama_cpp::translate_args;
#[cfg(feature = "chat")]
pub use model::CONVERSATION_CONTEXT_HELP;
pub use model::ModelArgs;
#[cfg(feature = "tools")]
pub use model::{LoadArgs, MAX_SEQ_LEN, PathArgs, WeightArgs};
#[cfg(feature = "chat")]
pub use prompt::EscapeArgs;
pub use prompt::read_trimmed_text;
#[cfg(feature = "serve")]
pub use sampling::SamplerArgs;
#[cfg(any(feature = "serve", feature = "ffi"))]
pub use template::TemplateChoiceArgs;
#[cfg(feature = "chat")]
pub use template::{TemplateArgs, Think};
#[cfg(any(feature = "serve", feature = "tools"))]
pub use {completion::QuietArgs, prompt::read_text};

/// Returns `n`, or an error that names the flag if `n` is not in `1..=max`.
pub fn check_range(flag: &str, n: usize, max: usize) -> Result<usize> {
    if (1..=max).contains(&n) {
        return Ok(n);
    }
    Err(Error::Usage(format!("{flag} {n}: use a number from 1 to {max}")))
}
