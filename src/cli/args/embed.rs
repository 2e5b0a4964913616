//! Flags of embeddings.

use crate::run::embed::{EmbedOptions, Pooling};
use clap::Args;

/// Pooling and length of vectors.
#[derive(Args, Clone)]
pub struct PoolingArgs {
    /// Pooling of the tokens' final states: mean, cls (the first token's) or last [default: as the model's files say]
    #[arg(long, value_name = "mean|cls|last")]
    pooling: Option<Pooling>,
    /// Keep the first N values of each vector, for models that are trained for it [default: all]
    #[arg(long, value_name = "N")]
    dimensions: Option<usize>,
}

impl PoolingArgs {
    /// The options that the flags stand for.
    pub fn embed_options(&self) -> EmbedOptions {
        EmbedOptions { pooling: self.pooling, dimensions: self.dimensions }
    }
}
