//! Flags that say who guesses tokens ahead, and how many.

use super::number::within;
use crate::run::draft_model::protocol::MOST;
use crate::run::draft_model::{DraftProgram, DraftWhen};
use clap::{Args, ValueEnum};
use files::Result;
use std::path::PathBuf;

/// Tokens of a draft where only `--draft-model` is given.
const WITH_MODEL: usize = 8;

/// When the model of `--draft-model` guesses.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WhenName {
    Pays,
    Always,
}

/// Tokens that are guessed ahead.
#[derive(Args, Clone)]
pub struct DraftFlags {
    /// Guess up to N tokens ahead, from the text so far or by --draft-model, and check them in one pass: the same text,
    /// faster where guesses are right; 0 is off [default: 0, or 8 with --draft-model]
    #[arg(long, value_name = "N")]
    pub draft: Option<usize>,
    /// Let another antigravity program guess, built for a smaller model with the same tokenizer; -md for short
    #[arg(long, value_name = "PROGRAM")]
    pub draft_model: Option<PathBuf>,
    /// When it guesses: as far ahead and as long as the text comes faster by the times so far, or always N tokens
    #[arg(long, value_enum, default_value = "pays", value_name = "WHEN")]
    pub draft_when: WhenName,
}

impl DraftFlags {
    /// Most tokens of a draft.
    pub fn length(&self) -> Result<usize> {
        match (self.draft, &self.draft_model) {
            (Some(0), _) | (None, None) => Ok(0),
            (Some(n), _) => within("--draft", n, MOST),
            (None, Some(_)) => Ok(WITH_MODEL),
        }
    }

    /// The program that guesses.
    pub fn program(&self) -> Option<DraftProgram> {
        let when = match self.draft_when {
            WhenName::Pays => DraftWhen::Pays,
            WhenName::Always => DraftWhen::Always,
        };
        self.draft_model.clone().map(|program| DraftProgram { program, when })
    }
}
