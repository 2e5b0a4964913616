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
pub mod told;
mod wrong;

pub use completion::token_limit;
#[cfg(feature = "chat")]
pub use completion::{CompletionArgs, show_settings};
#[cfg(feature = "tools")]
pub use cores::{MOST_THREADS, MaskArgs};
#[cfg(feature = "tools")]
pub use device::BackendName;
pub use generate::GenerateArgs;
#[cfg(any(feature = "chat", feature = "serve", feature = "tools"))]
pub use model::ModelArgs;
#[cfg(feature = "tools")]
pub use model::{LoadArgs, PathArgs, WeightArgs};
pub use number::within;
pub use output::{Format, OutputArgs};
#[cfg(feature = "chat")]
pub use prompt::EscapeArgs;
pub use prompt::text_of;
#[cfg(feature = "serve")]
pub use sampling::SamplerArgs;
pub use spelling::ours;
#[cfg(feature = "chat")]
pub use template::{ChosenTemplate, TemplateArgs, Think};
pub use wrong::one_line;
#[cfg(any(feature = "serve", feature = "tools"))]
pub use {output::QuietArgs, prompt::read_text};
