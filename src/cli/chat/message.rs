//! The message on the command line, which `run` takes as in ollama.

use super::ChatArgs;
use crate::dims::MODEL;
use files::{Error, Result};

impl ChatArgs {
    /// The flags with the message as their prompt. As `ollama run` expects the model's name first, ours is skipped.
    pub fn with_message(&self) -> Result<Self> {
        let mut args = self.clone();
        let words = match self.message.split_first() {
            Some((first, rest)) if first == MODEL => rest,
            Some((first, _)) if is_model_name(first) => {
                return Err(Error::Usage(format!(
                    "{first} looks like a model, but this program runs {MODEL}; build it for the other \
                     (ANTIGRAVITY_MODEL=MODEL cargo build --release), or give a message with --prompt"
                )));
            }
            _ => &self.message[..],
        };
        if !words.is_empty() {
            args.prompt = Some(words.join(" "));
            args.single_turn = true;
        }
        Ok(args)
    }
}

/// True for a word such as `qwen3:0.6b` or `org/llama-3.2`: letters first, then a digit, and no blank.
fn is_model_name(word: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.:/".contains(c);
    word.starts_with(|c: char| c.is_ascii_alphabetic())
        && word.contains(|c: char| c.is_ascii_digit())
        && word.chars().all(allowed)
}
