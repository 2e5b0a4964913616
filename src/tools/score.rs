//! `score`: writes log-probabilities of given texts as JSON lines.

use super::embed::{BATCH, TextArgs, in_part};
use crate::cli::args::{FlagWarnings, ModelArgs, QuietArgs};
use crate::cli::generation_report::logprobs_json;
use crate::cli::load::{self, LoadedEngine};
use crate::cli::signal;
use crate::cli::terminal::write_stdout;
use crate::run::options::{EngineOptions, GenerateOptions};
use crate::run::plan::OpenedModel;
use clap::Args;
use files::Result;
use serde_json::json;
use text::sampler::sum_logprobs;

/// Flags of `score`.
#[derive(Args, Clone)]
pub struct ScoreArgs {
    #[command(flatten)]
    warnings: FlagWarnings,
    #[command(flatten)]
    texts: TextArgs,
    /// Text before each of the texts, whose tokens are not counted
    #[arg(short, long, value_name = "TEXT", default_value = "", allow_hyphen_values = true)]
    prompt: String,
    /// Add each token's log-probability and those of the N most probable tokens (natural logarithm)
    #[arg(long, value_name = "N")]
    logprobs: Option<usize>,
    #[command(flatten)]
    quiet: QuietArgs,
    #[command(flatten)]
    model: ModelArgs,
}

pub fn run(args: &ScoreArgs) -> Result<()> {
    let texts = args.texts.read_texts()?;
    // All tokens are given, so nothing is drafted.
    let settings = EngineOptions { draft: 0, ..args.model.resolve_options()? };
    let mut opened = OpenedModel::new(&settings)?;
    opened.plan = opened.plan.with_rows(1);
    let LoadedEngine { engine, .. } = &load::load_engine(opened, args.quiet.verbosity(), &args.warnings)?;
    let options = GenerateOptions { logprobs: args.logprobs, ..GenerateOptions::default() };
    signal::connect_cancel(&options.cancel);
    for (batch, part) in texts.chunks(BATCH).enumerate() {
        let scores = engine.score(&args.prompt, part, &options).map_err(|e| in_part(e, batch * BATCH))?;
        for (i, tokens) in scores.iter().enumerate() {
            let (index, sum) = (batch * BATCH + i, sum_logprobs(tokens));
            let mut line = json!({"index": index, "tokens": tokens.len(), "logprob": sum});
            if args.logprobs.is_some() {
                let of = |token| logprobs_json(engine.tokenizer(), token);
                line["logprobs"] = tokens.iter().map(of).collect();
            }
            write_stdout(&format!("{line}\n"))?;
        }
    }
    Ok(())
}
