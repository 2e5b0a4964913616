//! Flags that several commands share, with the names and defaults of the specification, and the options they become.

mod completion;
mod cores;
mod device;
mod draft;
mod eviction;
mod generate;
mod grammar;
mod model;
mod number;
mod output;
mod prompt;
mod sampling;
mod spelling;
#[cfg(feature = "chat")]
mod template;
pub(super) mod told;
mod wrong;

pub(super) use completion::token_limit;
#[cfg(feature = "chat")]
pub(super) use completion::{CompletionArgs, show_settings};
#[cfg(feature = "tools")]
pub(super) use cores::{MOST_THREADS, MaskArgs};
#[cfg(feature = "tools")]
pub(super) use device::BackendName;
pub(super) use generate::GenerateArgs;
#[cfg(any(feature = "chat", feature = "serve", feature = "tools"))]
pub(super) use model::ModelArgs;
#[cfg(feature = "tools")]
pub(super) use model::{LoadArgs, PathArgs, WeightArgs};
pub(super) use number::within;
pub(super) use output::{Format, OutputArgs};
#[cfg(feature = "chat")]
pub(super) use prompt::EscapeArgs;
pub(super) use prompt::text_of;
#[cfg(feature = "serve")]
pub(super) use sampling::SamplerArgs;
pub(super) use spelling::ours;
#[cfg(feature = "chat")]
pub(super) use template::{ChosenTemplate, TemplateArgs, Think};
pub(super) use wrong::one_line;
#[cfg(any(feature = "serve", feature = "tools"))]
pub(super) use {output::QuietArgs, prompt::read_text};
