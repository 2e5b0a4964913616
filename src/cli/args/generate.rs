//! All flags of `generate`, which `plan` takes too.

use super::completion::CompletionArgs;
use super::model::ModelArgs;
use super::output::Format;
use super::prompt::{PromptArgs, PromptsArgs};
use crate::run::options::GenerateOptions;
use clap::Args;
use files::Result;
use std::path::PathBuf;

/// A completion.
#[derive(Args, Clone)]
pub struct GenerateArgs {
    #[command(flatten, next_help_heading = "Prompt")]
    pub prompt: PromptArgs,
    #[command(flatten, next_help_heading = "Prompt")]
    pub prompts: PromptsArgs,
    /// Continue the text in this file, if it exists, and save it there at the end. A prompt that begins with the saved
    /// text continues it; any other prompt is appended. Random numbers continue too, unless --seed changes
    #[arg(long, value_name = "FILE", help_heading = "Prompt")]
    pub session: Option<PathBuf>,
    #[command(flatten, next_help_heading = "Output")]
    pub completion: CompletionArgs,
    #[command(flatten)]
    pub model: ModelArgs,
}

impl GenerateArgs {
    /// Checks the flags on what to generate and resolves them.
    pub fn options(&self, format: Format) -> Result<GenerateOptions> {
        Ok(GenerateOptions { specials: self.prompt.specials(), ..self.completion.resolve(format)? })
    }
}
